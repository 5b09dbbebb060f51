#include "engine/event_queue.h"

#include <assert.h>
#include <stdlib.h>
#include <time.h>

int event_queue_create(struct event_queue *queue, size_t capacity, struct error *error) {
    assert(capacity > 0 && (capacity & (capacity - 1)) == 0);
    queue->capacity = capacity;
    queue->events = calloc(capacity, sizeof *queue->events);
    if (!queue->events) return error_set(error, FATHOM_NO_MEMORY, "no memory for the event queue");
    atomic_init(&queue->pushed, 0);
    atomic_init(&queue->taken, 0);
    atomic_init(&queue->closed, false);
    pthread_condattr_t monotonic; /* a timeout must not follow the wall clock when it is set */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->filled, &monotonic);
    pthread_cond_init(&queue->emptied, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return 0;
}

void event_queue_destroy(struct event_queue *queue) {
    if (!queue->events) return;
    pthread_cond_destroy(&queue->filled);
    pthread_cond_destroy(&queue->emptied);
    pthread_mutex_destroy(&queue->lock);
    free(queue->events);
    queue->events = NULL;
}

bool event_queue_push(struct event_queue *queue, const struct engine_event *event) {
    size_t pushed = atomic_load_explicit(&queue->pushed, memory_order_relaxed);
    /* acquire: the consumer has copied the slot before it is written again */
    size_t taken = atomic_load_explicit(&queue->taken, memory_order_acquire);
    if (pushed - taken == queue->capacity) return false;
    queue->events[pushed & (queue->capacity - 1)] = *event;
    atomic_store_explicit(&queue->pushed, pushed + 1, memory_order_release);
    return true;
}

size_t event_queue_take(struct event_queue *queue, struct engine_event *events, size_t count) {
    size_t taken = atomic_load_explicit(&queue->taken, memory_order_relaxed);
    size_t ready = atomic_load_explicit(&queue->pushed, memory_order_acquire) - taken;
    if (count > ready) count = ready;
    if (count == 0) return 0;
    for (size_t i = 0; i < count; i++) {
        events[i] = queue->events[(taken + i) & (queue->capacity - 1)];
    }
    atomic_store_explicit(&queue->taken, taken + count, memory_order_release);
    /* Under the lock, or the signal could fall between the producer's look and its sleep. */
    pthread_mutex_lock(&queue->lock);
    pthread_cond_signal(&queue->emptied);
    pthread_mutex_unlock(&queue->lock);
    return count;
}

void event_queue_announce(struct event_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    pthread_cond_signal(&queue->filled);
    pthread_mutex_unlock(&queue->lock);
}

static size_t events_ready(const struct event_queue *queue) {
    return atomic_load(&queue->pushed) - atomic_load(&queue->taken);
}

bool event_queue_wait_room(struct event_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    while (!atomic_load(&queue->closed) && events_ready(queue) == queue->capacity) {
        pthread_cond_wait(&queue->emptied, &queue->lock);
    }
    pthread_mutex_unlock(&queue->lock);
    return !atomic_load(&queue->closed);
}

void event_queue_wait(struct event_queue *queue, unsigned timeout_ms) {
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += timeout_ms / 1000;
    deadline.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&queue->lock);
    int timed_out = 0;
    while (!timed_out && !atomic_load(&queue->closed) && events_ready(queue) == 0) {
        timed_out = pthread_cond_timedwait(&queue->filled, &queue->lock, &deadline);
    }
    pthread_mutex_unlock(&queue->lock);
}

void event_queue_close(struct event_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    atomic_store(&queue->closed, true);
    pthread_cond_broadcast(&queue->filled);
    pthread_cond_broadcast(&queue->emptied);
    pthread_mutex_unlock(&queue->lock);
}
