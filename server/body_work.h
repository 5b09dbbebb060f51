/* The work that a request's body makes before it is a task for the engine: parsing, tokenizing.
 *
 * A short body is worked on at once, a long one on the thread pool of libuv, where it waits. How
 * many wait, and their bytes, is bounded; and what nobody waits for any more is not begun, or is
 * given up where it takes long, in tokenizing.
 */
#ifndef FATHOM_BODY_WORK_H
#define FATHOM_BODY_WORK_H

#include <stdatomic.h>

#include <uv.h>

#include "api/api.h"

struct server;

/* Part of the job that it is for. */
struct body_work {
    uv_work_t request;
    struct server *server;
    size_t bytes;
    void (*run)(struct body_work *work);  /* any thread: touches the job and what never changes; to
                                             be left early once is_abandoned */
    void (*done)(struct body_work *work); /* loop thread, once, even if `run` never was called */
    bool is_queued;
    atomic_bool is_abandoned; /* by the loop thread */
};

/* Sees to it that `done` is called, now or later; the fields up to it are filled. Where no more may
 * wait it returns FATHOM_FULL with a 429 in `error`, and `done` is not called. */
int body_work_start(struct body_work *work, struct api_error *error);

/* Nobody needs the result. `done` still comes, never from in here. */
void body_work_abandon(struct body_work *work);

#endif
