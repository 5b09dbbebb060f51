/* Devices: opening one, its memory, what it refuses to make, and its threads. */
#include "test_kernels.h"

#include <stdatomic.h>
#include <unistd.h>

static void test_open_refuses(void **state) {
    static const struct {
        struct device_options options;
        int code;
        const char *says;
    } cases[] = {
        {{.name = "cuda:9", .max_rows = 1, .max_width = 1}, FATHOM_UNSUPPORTED, "CUDA"},
        {{.name = "tpu", .max_rows = 1, .max_width = 1}, FATHOM_INVALID, "\"tpu\""},
        {{.isa = "mmx", .max_rows = 1, .max_width = 1}, FATHOM_UNSUPPORTED, "portable"},
        {{.name = "cpu", .threads = 65, .max_rows = 1, .max_width = 1},
         FATHOM_INVALID,
         "limit is 64"},
        {{.name = "cpu", .max_rows = 2, .max_width = SIZE_MAX}, FATHOM_INVALID, "max_width"},
        {{.name = "cpu", .max_rows = SIZE_MAX / 2, .max_width = 64}, FATHOM_NO_MEMORY, "too large"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct device *device = (struct device *)&device;
        struct error error = {0};
        assert_int_equal(device_open(&cases[i].options, &device, &error), cases[i].code);
        assert_int_equal(error.code, cases[i].code);
        assert_non_null(strstr(error.message, cases[i].says));
        assert_null(device);
    }
}

static void test_open_describes(void **state) {
    struct bench bench;
    (void)state;
    if (!is_cpu_tested()) skip();
    assert_true(bench_open(&bench, "portable", 3));
    assert_string_equal(bench.device->description, "cpu portable, 3 threads");
    assert_string_equal(bench.kernels->name, "cpu");
    assert_int_equal(device_preferred_weights(bench.device, DTYPE_BF16), DTYPE_F32);
    bench_close(&bench);
    if (bench_open(&bench, "avx2", 1)) {
        for (enum dtype type = DTYPE_F32; type <= DTYPE_F16; type++) {
            assert_int_equal(device_preferred_weights(bench.device, type), type);
        }
        bench_close(&bench);
    }
    assert_true(bench_open(&bench, NULL, 0));
    bench_close(&bench);
}

static void test_buffers(void **state) {
    struct bench bench;
    unsigned char got[100], zero[100] = {0};
    (void)state;
    assert_true(bench_open(&bench, "portable", 1));
    struct buffer *buffer = bench_buffer(&bench, NULL, sizeof zero);
    assert_int_equal(bench.kernels->buffer_bytes(buffer), sizeof zero);
    bench_read(&bench, buffer, got, sizeof got);
    assert_memory_equal(got, zero, sizeof zero);
    bench.kernels->write(bench.device, buffer, 97, "abc", 3);
    bench.kernels->read(bench.device, buffer, 98, got, 2);
    assert_memory_equal(got, "bc", 2);
    bench.kernels->buffer_destroy(bench.device, NULL);
    bench.kernels->matrix_destroy(bench.device, NULL);
    bench_close(&bench);
}

static void test_large_buffer_is_zero(void **state) {
    struct bench bench;
    size_t bytes = ((size_t)2 << 20) + 5;
    (void)state;
    assert_true(bench_open(&bench, "portable", 1));
    unsigned char *got = allocate(bytes);
    memset(got, 1, bytes);
    bench_read(&bench, bench_buffer(&bench, NULL, bytes), got, bytes);
    for (size_t i = 0; i < bytes; i++) assert_int_equal(got[i], 0);
    free(got);
    struct error error = {0};
    assert_null(bench.kernels->buffer_create(bench.device, SIZE_MAX, &error));
    assert_int_equal(error.code, FATHOM_NO_MEMORY);
    assert_null(bench.kernels->activation_create(bench.device, SIZE_MAX / 2, 4, DTYPE_F32, &error));
    bench_close(&bench);
}

/* Buffers of every size keep to themselves, also where others have gone. */
static void test_buffers_keep_to_themselves(void **state) {
    static const size_t sizes[] = {1,       100000,  131072,  300003,  1 << 20,
                                   2097151, 2097152, 5000007, 1 << 20, 1500000};
    enum { COUNT = sizeof sizes / sizeof *sizes };
    struct buffer *buffers[COUNT];
    struct bench bench;
    struct error error = {0};
    (void)state;
    assert_true(bench_open(&bench, "portable", 3));
    const struct kernels *kernels = bench.kernels;
    unsigned char *data = allocate(5000007), *got = allocate(5000007);
    for (size_t round = 0; round < 3; round++) {
        for (size_t i = round ? 1 : 0; i < COUNT; i += round ? 2 : 1) {
            buffers[i] = kernels->buffer_create(bench.device, sizes[i], &error);
            assert_non_null(buffers[i]);
            kernels->read(bench.device, buffers[i], 0, got, sizes[i]);
            memset(data, 0, sizes[i]);
            assert_memory_equal(got, data, sizes[i]);
            for (size_t k = 0; k < sizes[i]; k++) data[k] = (unsigned char)(k % 251 + i + round);
            kernels->write(bench.device, buffers[i], 0, data, sizes[i]);
        }
        for (size_t i = 0; i < COUNT; i++) {
            size_t written = i % 2 ? round : 0;
            for (size_t k = 0; k < sizes[i]; k++) data[k] = (unsigned char)(k % 251 + i + written);
            kernels->read(bench.device, buffers[i], 0, got, sizes[i]);
            assert_memory_equal(got, data, sizes[i]);
            if (kernels->look) assert_memory_equal(kernels->look(buffers[i]), data, sizes[i]);
        }
        for (size_t i = 1; i < COUNT; i += 2) kernels->buffer_destroy(bench.device, buffers[i]);
    }
    for (size_t i = 0; i < COUNT; i += 2) kernels->buffer_destroy(bench.device, buffers[i]);
    free(data);
    free(got);
    bench_close(&bench);
}

static void count_items(void *context, size_t first, size_t end) {
    atomic_uint *counts = context;
    for (size_t i = first; i < end; i++) atomic_fetch_add(&counts[i], 1);
}

static void test_work_is_shared_out_once(void **state) {
    struct bench bench;
    atomic_uint counts[1000] = {0};
    (void)state;
    assert_true(bench_open(&bench, "portable", 3));
    if (bench.kernels->share_out)
        bench.kernels->share_out(bench.device, 1000, 100000, count_items, counts);
    for (size_t i = 0; i < 1000; i++) assert_int_equal(counts[i], bench.kernels->share_out ? 1 : 0);
    bench_close(&bench);
}

static void test_activation_reads_floats(void **state) {
    struct bench bench;
    float x[12], got[5];
    struct error error = {0};
    (void)state;
    assert_true(bench_open(&bench, "portable", 1));
    struct buffer *activation =
        bench.kernels->activation_create(bench.device, 3, 4, DTYPE_F32, &error);
    assert_non_null(activation);
    random_fill(x, 12, 1);
    bench.kernels->write(bench.device, activation, 0, x, sizeof x);
    bench.kernels->read_activation(bench.device, activation, 6, 5, got);
    assert_memory_equal(got, x + 6, sizeof got);
    bench.kernels->buffer_destroy(bench.device, activation);
    bench_close(&bench);
}

static void test_matrix_refuses(void **state) {
    struct bench bench;
    float data[4] = {0};
    struct error error = {0};
    (void)state;
    assert_true(bench_open(&bench, "portable", 1));
    const struct kernels *kernels = bench.kernels;
    assert_null(kernels->matrix_create(bench.device, data, DTYPE_F32, 1, 4097, DTYPE_F32, &error));
    assert_int_equal(error.code, FATHOM_INVALID);
    assert_non_null(strstr(error.message, "4096"));
    assert_null(kernels->matrix_create(bench.device, data, DTYPE_F32, 0, 4, DTYPE_F32, &error));
    assert_int_equal(error.code, FATHOM_INVALID);
    for (enum dtype weights = DTYPE_F32; weights <= DTYPE_INT8; weights++) {
        assert_null(
            kernels->matrix_create(bench.device, data, DTYPE_F32, SIZE_MAX, 4, weights, &error));
        assert_int_equal(error.code, FATHOM_NO_MEMORY);
    }
    data[2] = 65520; /* the first number that rounds to infinity */
    assert_null(kernels->matrix_create(bench.device, data, DTYPE_F32, 2, 2, DTYPE_F16, &error));
    assert_int_equal(error.code, FATHOM_INVALID);
    assert_non_null(strstr(error.message, "65504"));
    data[2] = 65519;
    bench_matrix(&bench, data, DTYPE_F32, 2, 2, DTYPE_F16);
    data[2] = INFINITY; /* infinite before, infinite after */
    bench_matrix(&bench, data, DTYPE_F32, 2, 2, DTYPE_F16);
    bench_close(&bench);
}

/* Many short loops, some after a pause long enough for the workers to fall asleep. */
static void test_threads_wake(void **state) {
    enum { IN = 192, OUT = 512 };
    float *x = random_floats(IN, 5), *w = random_floats(OUT * IN, 6);
    float first[OUT], y[OUT];
    struct bench bench;
    (void)state;
    assert_true(bench_open(&bench, NULL, 4));
    struct buffer *xs = bench_floats(&bench, x, IN), *ys = bench_floats(&bench, NULL, OUT);
    struct matrix *matrix = bench_matrix(&bench, w, DTYPE_F32, OUT, IN, DTYPE_F32);
    for (size_t i = 0; i < 400; i++) {
        if (i % 40 == 39) usleep(3000);
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, 1, NULL}, 1);
        bench_read(&bench, ys, y, sizeof y);
        if (i == 0) memcpy(first, y, sizeof y);
        assert_memory_equal(y, first, sizeof y);
    }
    bench_close(&bench);
    free(x);
    free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open_refuses),
        cmocka_unit_test(test_open_describes),
        cmocka_unit_test(test_buffers),
        cmocka_unit_test(test_large_buffer_is_zero),
        cmocka_unit_test(test_buffers_keep_to_themselves),
        cmocka_unit_test(test_work_is_shared_out_once),
        cmocka_unit_test(test_activation_reads_floats),
        cmocka_unit_test(test_matrix_refuses),
        cmocka_unit_test(test_threads_wake),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
