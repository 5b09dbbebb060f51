#include "peaks.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- Operations ------------------------------------------------------------------------------ */

#if defined(__x86_64__)
#define TURNS  200000
#define CHAINS 12 /* enough to hide the latency, few enough for 16 registers */

typedef float eight __attribute__((vector_size(32)));
typedef float sixteen __attribute__((vector_size(64)));

/* %0 is a sum, %1 to be overwritten, %2 and %3 are factors. */
#define PEAK(NAME, TARGET, VECTOR, CODE)                                                           \
    __attribute__((target(TARGET), noinline)) static void NAME(void) {                             \
        VECTOR sum[CHAINS] = {{0}}, x = {0}, y = {0}, other;                                       \
        for (int turn = 0; turn < TURNS; turn++) {                                                 \
            _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++) {                            \
                __asm__ volatile(CODE : "+v"(sum[i]), "=&v"(other) : "v"(x), "v"(y));              \
            }                                                                                      \
        }                                                                                          \
    }

PEAK(avx2_fma, "avx2,fma", eight, "vfmadd231ps %3, %2, %0")
PEAK(avx2_pairs, "avx2,fma", eight, "vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0")
PEAK(avx512_fma, "avx512f", sixteen, "vfmadd231ps %3, %2, %0")
PEAK(avx512_pairs, "avx512f,avx512bw", sixteen, "vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0")
PEAK(avx512_bf16, "avx512f", sixteen, "vdpbf16ps %3, %2, %0")
PEAK(avx512_fours, "avx512f", sixteen, "vpdpbusd %3, %2, %0")

static const struct peak {
    const char *isa;
    bool int8, bf16;
    void (*run)(void);
    double operations; /* of one instruction */
} peaks[] = {
    {"avx2", false, false, avx2_fma, 16},           {"avx2", false, true, avx2_fma, 16},
    {"avx2", true, false, avx2_pairs, 32},          {"avx512", false, false, avx512_fma, 32},
    {"avx512", false, true, avx512_fma, 32},        {"avx512", true, false, avx512_pairs, 64},
    {"avx512vnni", false, false, avx512_fma, 32},   {"avx512vnni", false, true, avx512_fma, 32},
    {"avx512vnni", true, false, avx512_fours, 128}, {"avx512bf16", false, false, avx512_fma, 32},
    {"avx512bf16", false, true, avx512_bf16, 64},   {"avx512bf16", true, false, avx512_fours, 128},
};

double peak_operations(const char *isa, enum dtype type) {
    for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++) {
        const struct peak *peak = &peaks[i];
        if (strcmp(peak->isa, isa) || peak->int8 != (type == DTYPE_INT8) ||
            peak->bf16 != (type == DTYPE_BF16)) {
            continue;
        }
        uint64_t best = UINT64_MAX;
        for (int repeat = 0; repeat < 20; repeat++) {
            uint64_t start = time_now_ns();
            peak->run();
            uint64_t taken = time_now_ns() - start;
            if (taken < best) best = taken;
        }
        return peak->operations * CHAINS * TURNS / (double)best * 1e9;
    }
    return 0;
}
#else
double peak_operations(const char *isa, enum dtype type) {
    (void)isa;
    (void)type;
    return 0;
}
#endif

/* ---- Reading --------------------------------------------------------------------------------- */

#define READ_BYTES ((size_t)256 << 20) /* in all, and at a time: the best of short times */
#define READ_PART  ((size_t)16 << 20)

struct reader {
    const uint64_t *data;
    size_t count;
    uint64_t sum;
};

#define LARGE_PAGE ((size_t)2 << 20)

/* A processor fetches ahead in several places at once: one alone would not be its limit. */
#define STREAMS 4

static void *read_all(void *argument) {
    struct reader *reader = argument;
    uint64_t sum[STREAMS] = {0};
    size_t part = reader->count / STREAMS;
    for (size_t i = 0; i + 8 <= part; i += 8) { /* a line of each */
        for (size_t s = 0; s < STREAMS; s++) {
            const uint64_t *line = reader->data + s * part + i;
            sum[s] += ((line[0] + line[1]) + (line[2] + line[3])) +
                      ((line[4] + line[5]) + (line[6] + line[7]));
        }
    }
    for (size_t s = 0; s < STREAMS; s++) reader->sum += sum[s];
    return NULL;
}

static double read_once(const uint64_t *data, size_t threads) {
    struct reader readers[64] = {0};
    pthread_t thread[64];
    size_t count = READ_PART / sizeof *data / threads / 8 * 8;
    uint64_t start = time_now_ns();
    for (size_t i = 0; i < threads; i++) readers[i] = (struct reader){data + i * count, count, 0};
    size_t started = 1;
    while (started < threads &&
           !pthread_create(&thread[started], NULL, read_all, &readers[started])) {
        started++;
    }
    read_all(&readers[0]);
    for (size_t i = 1; i < started; i++) pthread_join(thread[i], NULL);
    return (double)(started * count * sizeof *data) / (double)(time_now_ns() - start) * 1e9;
}

double peak_read(size_t threads) {
    double best = 0;
    uint64_t *data = aligned_alloc(LARGE_PAGE, READ_BYTES);
    if (!data) return 0;
    madvise(data, READ_BYTES, MADV_HUGEPAGE); /* as the weights have */
    memset(data, 1, READ_BYTES);
    if (threads > 64) threads = 64;
    for (size_t part = 0; part < 8 * (READ_BYTES / READ_PART); part++) {
        size_t first = part % (READ_BYTES / READ_PART) * READ_PART;
        double rate = read_once(data + first / sizeof *data, threads);
        if (rate > best) best = rate;
    }
    free(data);
    return best;
}
