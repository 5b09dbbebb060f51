#include "kernels/cpu/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Handing out a range costs about a microsecond in cache misses; a range should cost a few. */
#define RANGE_COST 8192
/* Long loops are cut finer, so that a thread that loses its processor for a while holds up less. */
#define RANGES_PER_THREAD 2
/* Spinning covers the pauses inside a step (some 50 microseconds), not those between requests. */
#define SPINS           1500
#define SPINS_PER_YIELD 128

struct pool {
    /* The current loop. Written before `ticket` opens it, read only by holders of its ranges. */
    pool_body *body;
    void *context;
    size_t items;

    /* ranges << 32 | next range to hand out: open while the lower half is smaller. One word, so
     * that a thread takes a range by one compare-and-swap. If the word was reopened since it was
     * read, the swap either fails or takes a range of the new loop, which is as good. */
    _Alignas(64) atomic_uint_fast64_t ticket;
    _Alignas(64) atomic_size_t finished; /* ranges of the current loop that are done */
    _Alignas(64) atomic_size_t sleeping; /* workers in, or about to enter, the wait on `wake` */
    atomic_bool stopping;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    size_t workers;
    pthread_t thread[POOL_THREADS_MAX - 1];
};

static bool ticket_is_open(uint64_t ticket) {
    return (uint32_t)ticket < ticket >> 32;
}

/* Takes one range of the current loop and does it; false when none is left. */
static bool range_run_next(struct pool *pool) {
    uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    do {
        if (!ticket_is_open(ticket)) return false;
    } while (!atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket, ticket + 1,
                                                    memory_order_acq_rel, memory_order_acquire));
    size_t range = (uint32_t)ticket, ranges = ticket >> 32;
    pool->body(pool->context, pool->items * range / ranges, pool->items * (range + 1) / ranges);
    atomic_fetch_add_explicit(&pool->finished, 1, memory_order_release);
    return true;
}

/* Processors may be shared with other programs: a spinning thread offers its own now and then. */
static void spin(size_t turn) {
    if (turn % SPINS_PER_YIELD == SPINS_PER_YIELD - 1) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool spin_until_open(struct pool *pool) {
    for (size_t turn = 0; turn < SPINS; turn++) {
        if (ticket_is_open(atomic_load_explicit(&pool->ticket, memory_order_relaxed))) return true;
        if (atomic_load_explicit(&pool->stopping, memory_order_relaxed)) return true;
        spin(turn);
    }
    return false;
}

/* Sequentially consistent on both sides: either this thread sees the ticket opened, or pool_run
 * sees that somebody sleeps, and then its broadcast waits for the mutex until this thread is in the
 * wait. */
static void sleep_until_open(struct pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleeping, 1);
    while (!ticket_is_open(atomic_load(&pool->ticket)) && !atomic_load(&pool->stopping)) {
        pthread_cond_wait(&pool->wake, &pool->mutex);
    }
    atomic_fetch_sub(&pool->sleeping, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void wake_all(struct pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *argument) {
    struct pool *pool = argument;
    while (!atomic_load_explicit(&pool->stopping, memory_order_relaxed)) {
        if (!range_run_next(pool) && !spin_until_open(pool)) sleep_until_open(pool);
    }
    return NULL;
}

/* Signals belong to the program's own threads: workers are started with all of them blocked, but
 * for what a thread can only bring on itself. */
static int workers_start(struct pool *pool, size_t workers) {
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    int status = pthread_sigmask(SIG_BLOCK, &all, &before);
    while (!status && pool->workers < workers) {
        status = pthread_create(&pool->thread[pool->workers], NULL, worker_main, pool);
        if (!status) pool->workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

int pool_create(size_t threads, struct pool **result, struct error *error) {
    *result = NULL;
    struct pool *pool = aligned_alloc(64, sizeof *pool);
    if (!pool) return error_set(error, FATHOM_NO_MEMORY, "no memory for a thread pool");
    memset(pool, 0, sizeof *pool);
    atomic_init(&pool->ticket, 0);
    atomic_init(&pool->finished, 0);
    atomic_init(&pool->sleeping, 0);
    atomic_init(&pool->stopping, false);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    int status = workers_start(pool, threads - 1);
    if (status) {
        size_t started = pool->workers;
        pool_destroy(pool);
        return error_set(error, FATHOM_NO_MEMORY, "cannot start compute thread %zu of %zu: %s",
                         started + 2, threads, strerror(status));
    }
    *result = pool;
    return FATHOM_OK;
}

void pool_destroy(struct pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stopping, true);
    wake_all(pool);
    for (size_t i = 0; i < pool->workers; i++) pthread_join(pool->thread[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

size_t pool_threads(const struct pool *pool) {
    return pool->workers + 1;
}

/* Equal shares, or a whole number of shares per thread: three ranges on two threads would waste
 * one. */
static size_t range_count(const struct pool *pool, size_t items, size_t cost) {
    size_t threads = pool_threads(pool), ranges = items * cost / RANGE_COST;
    if (ranges >= threads * RANGES_PER_THREAD) {
        ranges = threads * RANGES_PER_THREAD;
    } else if (ranges > threads) {
        ranges = threads;
    }
    return ranges < items ? ranges : items;
}

void pool_run(struct pool *pool, size_t items, size_t cost, pool_body *body, void *context) {
    size_t ranges = pool->workers ? range_count(pool, items, cost) : 0;
    if (ranges < 2) {
        if (items) body(context, 0, items);
        return;
    }
    pool->body = body;
    pool->context = context;
    pool->items = items;
    atomic_store_explicit(&pool->finished, 0, memory_order_relaxed);
    atomic_store(&pool->ticket, (uint64_t)ranges << 32);
    if (atomic_load(&pool->sleeping)) wake_all(pool);
    while (range_run_next(pool)) continue;
    size_t turn = 0;
    while (atomic_load_explicit(&pool->finished, memory_order_acquire) < ranges) spin(turn++);
}
