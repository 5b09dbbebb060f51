/* Memory of the CPU device. Weights and the KV cache are streamed through whole, so they ask for
 * large pages, which saves most of the address look-ups, and most of the time to get them: a first
 * touch can cost ten microseconds and more, whether it brings 4 KiB or much of 2 MiB.
 *
 * Buffers below a large page lie side by side in slabs, the smallest with malloc. A buffer of a
 * large page and more has a mapping of its own, but for packed weights. Its front is touched when it
 * is created, and what is behind that by a thread of its own while the caller goes on; blocks are
 * handed out from the front, so a step rarely meets a page that was not touched.
 *
 * Fronts, and slabs a little ahead of what is handed out, are touched by all threads of the device
 * together: a small matrix lies in one large page, which the thread that packs its first panel
 * would bring in while the others wait. */
#include "kernels/cpu/cpu.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

#define LARGE_PAGE   ((size_t)2 << 20)
#define FRONT_BYTES  ((size_t)16 << 20)
#define SLAB_BYTES   ((size_t)32 << 20)
#define SLAB_FROM    ((size_t)128 << 10) /* smaller ones would not profit */
#define SLAB_AHEAD   ((size_t)8 << 20)   /* of a slab, touched at a time */
#define TOUCH_COST   (LARGE_PAGE / 8)    /* of a large page, as pool_run counts */
#define TOUCHER_NICE 10                  /* first requests go before what none of them needs yet */

/* A mapping that several buffers share; it goes with the last of them. */
struct slab {
    unsigned char *data;
    size_t bytes, used, buffers;
    size_t touched; /* bytes of the front whose pages are there */
};

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
    setpriority(PRIO_PROCESS, 0, TOUCHER_NICE); /* on Linux, of the calling thread */
    while (at < toucher->bytes && !atomic_load_explicit(&toucher->stop, memory_order_relaxed)) {
        size_t part = toucher->bytes - at < LARGE_PAGE ? toucher->bytes - at : LARGE_PAGE;
        if (touch(toucher->data + at, part) != 0)
            break; /* the page is then touched when it is used */
        at += part;
    }
    return NULL;
}

struct touching {
    unsigned char *data;
    atomic_bool failed;
};

static void touch_pages(void *context, size_t first, size_t end) {
    struct touching *touching = context;
    size_t bytes = (end - first) * LARGE_PAGE;
    if (touch(touching->data + first * LARGE_PAGE, bytes) != 0) touching->failed = true;
}

/* Whole large pages, on all threads; false where the kernel cannot. */
static bool touch_together(struct cpu_device *cpu, unsigned char *data, size_t bytes) {
    struct touching touching = {data, false};
    pool_run(cpu->pool, bytes / LARGE_PAGE, TOUCH_COST, touch_pages, &touching);
    return !touching.failed;
}

/* Touches everything at once where the kernel cannot do it behind our back. */
static void touch_large(struct cpu_device *cpu, struct buffer *buffer) {
    size_t front = buffer->mapped < FRONT_BYTES ? buffer->mapped : FRONT_BYTES;
    if (!touch_together(cpu, buffer->data, front)) {
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

/* The device's slab if it has room, else a new one in its place. */
static struct slab *slab_with_room(struct cpu_device *cpu, size_t bytes) {
    struct slab *slab = cpu->slab;
    if (slab && slab->bytes - slab->used >= bytes) return slab;
    slab = calloc(1, sizeof *slab);
    if (!slab) return NULL;
    slab->bytes = bytes > SLAB_BYTES / 2 ? round_up(bytes, LARGE_PAGE) : SLAB_BYTES;
    slab->data = map_aligned(slab->bytes);
    if (!slab->data) {
        free(slab);
        return NULL;
    }
    /* One that is filled by a single buffer leaves room in the one before. */
    if (slab->bytes == SLAB_BYTES || !cpu->slab) cpu->slab = slab;
    return slab;
}

static bool take_from_slab(struct cpu_device *cpu, struct buffer *buffer) {
    size_t bytes = round_up(buffer->bytes, 64);
    struct slab *slab = slab_with_room(cpu, bytes);
    if (!slab) return false;
    buffer->slab = slab;
    buffer->data = slab->data + slab->used;
    slab->used += bytes;
    slab->buffers++;
    if (slab->used > slab->touched) {
        size_t end = round_up(slab->used, SLAB_AHEAD);
        if (end > slab->bytes) end = slab->bytes;
        touch_together(cpu, slab->data + slab->touched, end - slab->touched);
        slab->touched = end; /* or where the kernel cannot, left to those who use it first */
    }
    return true;
}

static void leave_slab(struct cpu_device *cpu, struct slab *slab) {
    if (--slab->buffers > 0) return;
    if (cpu->slab == slab) cpu->slab = NULL;
    munmap(slab->data, slab->bytes);
    free(slab);
}

static bool buffer_allocate(struct cpu_device *cpu, struct buffer *buffer, bool is_packed) {
    size_t bytes = buffer->bytes;
    if (bytes >= SLAB_FROM && (bytes < LARGE_PAGE || is_packed)) return take_from_slab(cpu, buffer);
    if (bytes >= LARGE_PAGE) {
        buffer->mapped = round_up(bytes, LARGE_PAGE);
        buffer->data = map_aligned(buffer->mapped);
    } else {
        buffer->data = aligned_alloc(64, round_up(bytes ? bytes : 1, 64));
    }
    return buffer->data != NULL;
}

static struct buffer *buffer_create(struct device *device, size_t bytes, bool is_packed,
                                    struct error *error) {
    struct buffer *buffer = calloc(1, sizeof *buffer);
    size_t guard; /* what rounding and aligning add must not overflow */
    if (buffer) buffer->bytes = bytes;
    if (!buffer || !size_add(bytes, 2 * LARGE_PAGE, &guard) ||
        !buffer_allocate(cpu_of(device), buffer, is_packed)) {
        free(buffer);
        error_set(error, FATHOM_NO_MEMORY, "no memory for a buffer of %zu bytes", bytes);
        return NULL;
    }
    if (buffer->mapped)
        touch_large(cpu_of(device), buffer);
    else if (!buffer->slab) /* whose memory is zero, and used once */
        memset(buffer->data, 0, bytes);
    return buffer;
}

struct buffer *cpu_buffer_create(struct device *device, size_t bytes, struct error *error) {
    return buffer_create(device, bytes, false, error);
}

struct buffer *cpu_panels_create(struct device *device, size_t bytes, struct error *error) {
    return buffer_create(device, bytes, true, error);
}

void cpu_buffer_destroy(struct device *device, struct buffer *buffer) {
    if (!buffer) return;
    if (buffer->toucher) {
        atomic_store_explicit(&buffer->toucher->stop, true, memory_order_relaxed);
        pthread_join(buffer->toucher->thread, NULL);
        free(buffer->toucher);
    }
    if (buffer->slab)
        leave_slab(cpu_of(device), buffer->slab);
    else if (buffer->mapped)
        munmap(buffer->data, buffer->mapped);
    else
        free(buffer->data);
    free(buffer);
}
