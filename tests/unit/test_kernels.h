/* What the kernel tests share: devices of every instruction set, buffers, numbers to compare
 * with. */
#ifndef FATHOM_TEST_KERNELS_H
#define FATHOM_TEST_KERNELS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h needs the four above */
#include <cmocka.h>

#include "kernels/kernels.h"
#include "test_device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const isa_names[] = {"portable", "avx2", "avx512", "avx512vnni", "avx512bf16"};
#define ISA_COUNT (sizeof isa_names / sizeof *isa_names)

/* A device and everything made on it. */
struct bench {
    struct device *device;
    const struct kernels *kernels;
    struct buffer *buffers[64];
    size_t buffer_count;
    struct matrix *matrices[8];
    size_t matrix_count;
};

/* False where this machine lacks the instruction set. */
static inline bool bench_open_on(struct bench *bench, const char *name, const char *isa,
                                 size_t threads) {
    struct device_options options = {name, threads, isa, 64, 4096};
    struct error error = {0};
    *bench = (struct bench){0};
    int status = device_open(&options, &bench->device, &error);
    if (status == FATHOM_UNSUPPORTED) return false;
    if (status) fail_msg("device_open: %s", error.message);
    bench->kernels = bench->device->kernels;
    return true;
}

/* The device under test; false where it does not take part as `isa`. */
static inline bool bench_open(struct bench *bench, const char *isa, size_t threads) {
    *bench = (struct bench){0};
    return is_isa_tested(isa) &&
           bench_open_on(bench, test_device(), is_cpu_tested() ? isa : NULL, threads);
}

static inline void bench_close(struct bench *bench) {
    for (size_t i = 0; i < bench->buffer_count; i++) {
        bench->kernels->buffer_destroy(bench->device, bench->buffers[i]);
    }
    for (size_t i = 0; i < bench->matrix_count; i++) {
        bench->kernels->matrix_destroy(bench->device, bench->matrices[i]);
    }
    bench->kernels->close(bench->device);
}

/* A buffer of `bytes`, holding a copy of `data` unless that is NULL. */
static inline struct buffer *bench_buffer(struct bench *bench, const void *data, size_t bytes) {
    struct error error = {0};
    struct buffer *buffer = bench->kernels->buffer_create(bench->device, bytes, &error);
    assert_non_null(buffer);
    assert_true(bench->buffer_count < sizeof bench->buffers / sizeof *bench->buffers);
    bench->buffers[bench->buffer_count++] = buffer;
    if (data) bench->kernels->write(bench->device, buffer, 0, data, bytes);
    return buffer;
}

static inline struct buffer *bench_floats(struct bench *bench, const float *data, size_t count) {
    return bench_buffer(bench, data, count * sizeof *data);
}

static inline struct matrix *bench_matrix(struct bench *bench, const void *data, enum dtype type,
                                          size_t out, size_t in, enum dtype weights) {
    struct error error = {0};
    struct matrix *matrix =
        bench->kernels->matrix_create(bench->device, data, type, out, in, weights, &error);
    if (!matrix) fail_msg("matrix_create: %s", error.message);
    assert_true(bench->matrix_count < sizeof bench->matrices / sizeof *bench->matrices);
    return bench->matrices[bench->matrix_count++] = matrix;
}

static inline struct row_list bench_list(struct bench *bench, const int32_t *rows, int32_t count) {
    int32_t none[1] = {0};
    size_t bytes = (count ? (size_t)count : 1) * sizeof *rows;
    return (struct row_list){bench_buffer(bench, count ? rows : none, bytes),
                             bench_buffer(bench, &count, sizeof count), (size_t)count, true};
}

static inline void bench_read(const struct bench *bench, const struct buffer *buffer, void *out,
                              size_t bytes) {
    bench->kernels->read(bench->device, buffer, 0, out, bytes);
}

static inline void *allocate(size_t bytes) {
    void *memory = calloc(1, bytes);
    assert_non_null(memory);
    return memory;
}

/* Uniform in -1..1, reproducible. */
static inline void random_fill(float *x, size_t count, uint32_t seed) {
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)((int32_t)(state >> 32)) * 0x1p-31f;
    }
}

static inline float *random_floats(size_t count, uint32_t seed) {
    float *x = allocate(count * sizeof *x);
    random_fill(x, count, seed);
    return x;
}

/* Nearest bf16, ties to even, by the definition: 8 bits of mantissa. Normal numbers only. */
static inline float rounded_to_bf16(float x) {
    int exponent;
    double mantissa = frexp(x, &exponent);
    return (float)ldexp(nearbyint(mantissa * 256), exponent - 8);
}

static inline void assert_close(double actual, double expected, double tolerance,
                                const char *what) {
    if (fabs(actual - expected) <= tolerance) return;
    fail_msg("%s: %.9g, expected %.9g within %.3g", what, actual, expected, tolerance);
}

#endif
