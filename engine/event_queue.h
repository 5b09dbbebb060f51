/* Events from the engine thread to the one thread that takes them: a bounded ring.
 *
 * When the ring is full the engine waits: a consumer that stops taking stops the engine, and memory
 * stays bounded. Closing the queue ends every wait.
 */
#ifndef FATHOM_EVENT_QUEUE_H
#define FATHOM_EVENT_QUEUE_H

#include "engine/engine.h"

#include <pthread.h>
#include <stdatomic.h>

struct event_queue {
    struct engine_event *events; /* [capacity], a power of two */
    size_t capacity;
    /* Counts of events ever pushed and taken; each is written by one side only. */
    _Alignas(64) atomic_size_t pushed;
    _Alignas(64) atomic_size_t taken;
    atomic_bool closed;
    pthread_mutex_t lock; /* of the two sleeps only; the ring needs none */
    pthread_cond_t filled, emptied;
};

int event_queue_create(struct event_queue *queue, size_t capacity, struct error *error);
void event_queue_destroy(struct event_queue *queue);

/* Producer: false when the ring is full. */
bool event_queue_push(struct event_queue *queue, const struct engine_event *event);

/* Producer: wakes the consumer; once for many pushes. */
void event_queue_announce(struct event_queue *queue);

/* Producer: waits until there is room; false when the queue was closed. */
bool event_queue_wait_room(struct event_queue *queue);

/* Consumer: takes up to `count` events; returns how many. */
size_t event_queue_take(struct event_queue *queue, struct engine_event *events, size_t count);

/* Consumer: waits until there are events, the queue is closed, or the time has passed. */
void event_queue_wait(struct event_queue *queue, unsigned timeout_ms);

/* Any thread. */
void event_queue_close(struct event_queue *queue);

#endif
