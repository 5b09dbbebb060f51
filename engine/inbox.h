/* What other threads ask of the engine thread: new sequences, cancellations, and to stop.
 *
 * It knows every accepted and unfinished request by id, bounds their number, and lets the engine
 * thread sleep while there is nothing to do. Its lock is held for a few pointers' time, never
 * across a step. Asking never allocates, so a cancellation cannot fail.
 */
#ifndef FATHOM_INBOX_H
#define FATHOM_INBOX_H

#include "engine/sequence.h"

#include <pthread.h>

#define ARRIVAL_S 4.0 /* a hundred requests at 25 per second: a rate within 10 % */

struct inbox {
    pthread_mutex_t lock;
    pthread_cond_t asked;
    struct sequence **buckets; /* [bucket_count] accepted and unfinished sequences by id */
    size_t bucket_count;       /* a power of two */
    size_t accepted, limit;
    size_t tokens, token_limit; /* prompt tokens of those accepted */
    uint64_t arrivals;
    double recent; /* arrivals, each counting e^(-age / ARRIVAL_S), as of recent_ns */
    uint64_t recent_ns;
    struct sequence *first, *last; /* accepted, not yet collected: in order of arrival */
    uint64_t first_ns;             /* when the first of these came */
    bool cancel, stop;             /* some sequence was cancelled; the engine must stop */
};

int inbox_create(struct inbox *inbox, size_t limit, size_t token_limit, struct error *error);

/* Sequences never collected are destroyed with it. */
void inbox_destroy(struct inbox *inbox);

/* Any thread. On success the engine thread owns the sequence. FATHOM_FULL, or FATHOM_INVALID if the
 * id is in use. */
int inbox_submit(struct inbox *inbox, struct sequence *sequence, struct error *error);

/* Any thread: marks the sequence as cancelled. An unknown id is ignored. */
void inbox_cancel(struct inbox *inbox, uint64_t id);

struct inbox_count {
    size_t accepted, tokens;    /* requests that are unfinished, and tokens of their prompts */
    double arrivals_per_second; /* over the last ARRIVAL_S seconds or so */
};

/* Any thread. */
struct inbox_count inbox_count(struct inbox *inbox, uint64_t now);

/* Any thread: time_now_ns() when the first came of those that are not collected yet; 0: all are. */
uint64_t inbox_waits_since(struct inbox *inbox);

/* Any thread: the next inbox_collect is the last. */
void inbox_stop(struct inbox *inbox);

struct inbox_contents {
    struct sequence *submitted; /* linked by inbox_next, in order of arrival */
    bool cancelled;             /* look for marked sequences */
};

/* Engine thread: takes what was asked; with `sleep`, waits until something is. False: stop. */
bool inbox_collect(struct inbox *inbox, bool sleep, struct inbox_contents *contents);

/* Engine thread: a collected sequence has finished; its id and its place are free again. */
void inbox_retire(struct inbox *inbox, struct sequence *sequence);

#endif
