/* Memory of the CPU device. Weights and the KV cache are streamed through whole, so buffers of a
 * large page and more ask for large pages, which saves most of the address look-ups.
 *
 * The first touch of a page can cost ten microseconds and more, seconds for a KV cache. A large
 * buffer is therefore touched at its front when it is created, and behind that by a thread of its
 * own while the caller goes on; blocks are handed out from the front, so a step rarely meets a page
 * that was not touched. */
#include "kernels/cpu/cpu.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

#define LARGE_PAGE  ((size_t)2 << 20)
#define FRONT_BYTES ((size_t)16 << 20)

struct toucher {
    pthread_t thread;
    atomic_bool stop;
    unsigned char *data;
    size_t bytes;
};

static size_t round_up(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/* Makes pages present without changing what they hold, whoever writes to them meanwhile. */
static int touch(unsigned char *data, size_t bytes) {
    int result;
    do {
        result = madvise(data, bytes, MADV_POPULATE_WRITE);
    } while (result != 0 && errno == EINTR);
    return result;
}

static void *touch_rest(void *argument) {
    struct toucher *toucher = argument;
    size_t at = 0;
    while (at < toucher->bytes && !atomic_load_explicit(&toucher->stop, memory_order_relaxed)) {
        size_t part = toucher->bytes - at < LARGE_PAGE ? toucher->bytes - at : LARGE_PAGE;
        if (touch(toucher->data + at, part) != 0)
            break; /* the page is then touched when it is used */
        at += part;
    }
    return NULL;
}

/* Touches everything at once where the kernel cannot do it behind our back. */
static void touch_large(struct buffer *buffer) {
    size_t front = buffer->mapped < FRONT_BYTES ? buffer->mapped : FRONT_BYTES;
    if (touch(buffer->data, front) != 0) {
        memset(buffer->data, 0, buffer->mapped);
        return;
    }
    if (front == buffer->mapped) return;
    struct toucher *toucher = calloc(1, sizeof *toucher);
    if (!toucher) return;
    toucher->data = buffer->data + front;
    toucher->bytes = buffer->mapped - front;
    if (pthread_create(&toucher->thread, NULL, touch_rest, toucher) == 0)
        buffer->toucher = toucher;
    else
        free(toucher);
}

/* mmap aligns to small pages: a large page more is mapped, and both ends are given back. */
static unsigned char *map_aligned(size_t bytes) {
    unsigned char *map =
        mmap(NULL, bytes + LARGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return NULL;
    size_t before = (LARGE_PAGE - (uintptr_t)map % LARGE_PAGE) % LARGE_PAGE;
    if (before) munmap(map, before);
    munmap(map + before + bytes, LARGE_PAGE - before);
    madvise(map + before, bytes, MADV_HUGEPAGE);
    return map + before;
}

struct buffer *cpu_buffer_create(struct device *device, size_t bytes, struct error *error) {
    (void)device;
    struct buffer *buffer = calloc(1, sizeof *buffer);
    size_t guard; /* what rounding and aligning add must not overflow */
    if (buffer && size_add(bytes, 2 * LARGE_PAGE, &guard)) {
        buffer->bytes = bytes;
        if (bytes >= LARGE_PAGE) {
            buffer->mapped = round_up(bytes, LARGE_PAGE);
            buffer->data = map_aligned(buffer->mapped);
        } else {
            buffer->data = aligned_alloc(64, round_up(bytes ? bytes : 1, 64));
        }
    }
    if (!buffer || !buffer->data) {
        free(buffer);
        error_set(error, FATHOM_NO_MEMORY, "no memory for a buffer of %zu bytes", bytes);
        return NULL;
    }
    if (buffer->mapped)
        touch_large(buffer);
    else
        memset(buffer->data, 0, bytes);
    return buffer;
}

void cpu_buffer_destroy(struct device *device, struct buffer *buffer) {
    (void)device;
    if (!buffer) return;
    if (buffer->toucher) {
        atomic_store_explicit(&buffer->toucher->stop, true, memory_order_relaxed);
        pthread_join(buffer->toucher->thread, NULL);
        free(buffer->toucher);
    }
    if (buffer->mapped)
        munmap(buffer->data, buffer->mapped);
    else
        free(buffer->data);
    free(buffer);
}
