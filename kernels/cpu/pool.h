/* A parallel loop over threads that live as long as the device.
 *
 * The calling thread works too, so a pool of 1 has no thread of its own. Items are cut into ranges
 * whose borders depend on sizes alone; which thread takes a range is a race, and the body must not
 * care: it writes only what belongs to its items. One thread at a time may call pool_run.
 */
#ifndef FATHOM_CPU_POOL_H
#define FATHOM_CPU_POOL_H

#include "base/base.h"

#define POOL_THREADS_MAX 64

struct pool;

/* The body of a loop: does items first..end-1. */
typedef void pool_body(void *context, size_t first, size_t end);

/* `threads` is 1..POOL_THREADS_MAX and includes the caller. */
int pool_create(size_t threads, struct pool **pool, struct error *error);
void pool_destroy(struct pool *pool); /* NULL is allowed */
size_t pool_threads(const struct pool *pool);

/* Does `items` items and returns when all are done. `cost` is a rough price of one item in
 * operations on 16 floats (about 3 per nanosecond): a loop too cheap to share is run by the caller
 * alone. */
void pool_run(struct pool *pool, size_t items, size_t cost, pool_body *body, void *context);

#endif
