/* The device, its memory, matrix products, and operations on elements: against double precision,
 * and against themselves with other numbers of rows and threads. */
#include "test_kernels.h"

#include <float.h>

#include "kernels/number.h"

#include <unistd.h>

/* Other devices than the CPU compute with f32 and bf16. */
static enum dtype last_weights(void) {
    return is_cpu_tested() ? DTYPE_INT8 : DTYPE_BF16;
}

/* ---- Device and memory ----------------------------------------------------------------------- */

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
    for (enum dtype weights = DTYPE_F32; weights <= last_weights(); weights++) {
        assert_null(
            kernels->matrix_create(bench.device, data, DTYPE_F32, SIZE_MAX, 4, weights, &error));
        assert_int_equal(error.code, FATHOM_NO_MEMORY);
    }
    if (!is_cpu_tested()) {
        assert_null(
            kernels->matrix_create(bench.device, data, DTYPE_F32, 2, 2, DTYPE_INT8, &error));
        assert_int_equal(error.code, FATHOM_UNSUPPORTED);
        bench_close(&bench);
        return;
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

/* ---- Matrix products ------------------------------------------------------------------------- */

/* `count` numbers in `type`: the values a file would hold, and in *exact what they are as floats.
 */
static void *weights_of(enum dtype type, size_t count, uint32_t seed, float *exact) {
    void *data = allocate(count * dtype_size(type));
    random_fill(exact, count, seed);
    for (size_t i = 0; i < count; i++) {
        if (type == DTYPE_F32) {
            ((float *)data)[i] = exact[i];
        } else if (type == DTYPE_BF16) {
            exact[i] = rounded_to_bf16(exact[i]);
            uint32_t bits;
            memcpy(&bits, &exact[i], sizeof bits);
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        } else { /* f16: a multiple of 2^-11 in 1/2..1, written as exponent 14 and ten bits */
            uint32_t fraction = (uint32_t)(fabsf(exact[i]) * 1023);
            bool negative = exact[i] < 0;
            exact[i] = (negative ? -0.5f : 0.5f) * (1 + (float)fraction / 1024);
            ((uint16_t *)data)[i] = (uint16_t)((negative ? 0x8000u : 0u) | 14u << 10 | fraction);
        }
    }
    return data;
}

/* Nearest f16, ties to even: 11 bits of mantissa. Below 2^-14 a multiple of 2^-24. */
static float rounded_to_f16(float x) {
    int exponent;
    double mantissa = frexp(x, &exponent);
    int bits = exponent < -13 ? exponent + 24 : 11;
    return (float)ldexp(nearbyint(ldexp(mantissa, bits)), exponent - bits);
}

/* Largest of a group of a row; half of a step between codes is at most 0.502 of it / 127, as a
 * scale is rounded up to 8 bits. */
static double largest_of_group(const float *row, size_t in, size_t k) {
    size_t first = k / INT8_GROUP * INT8_GROUP;
    double largest = 0;
    for (size_t i = first; i < in && i < first + INT8_GROUP; i++) {
        largest = fmax(largest, fabs((double)row[i]));
    }
    return largest;
}

/* The most that rounding both factors to codes can add to a product. */
static double int8_error(const float *x, const float *w, size_t in, size_t k) {
    double half = 0.51 / 127;
    double dx = half * largest_of_group(x, in, k), dw = half * largest_of_group(w, in, k);
    return fabs((double)x[k]) * dw + fabs((double)w[k]) * dx + dx * dw;
}

/* Every element within the bound for a sum of `in` products in fp32, whatever the order. */
static void check_product(const float *x, const float *w, const float *y, size_t rows, size_t out,
                          size_t in, enum dtype weights) {
    for (size_t i = 0; i < rows; i++) {
        for (size_t o = 0; o < out; o++) {
            double sum = 0, size = 0, codes = 0;
            for (size_t k = 0; k < in; k++) {
                float a = x[i * in + k], b = w[o * in + k];
                if (weights == DTYPE_BF16) a = rounded_to_bf16(a);
                if (weights == DTYPE_BF16) b = rounded_to_bf16(b);
                if (weights == DTYPE_F16) b = rounded_to_f16(b);
                if (weights == DTYPE_INT8) codes += int8_error(x + i * in, w + o * in, in, k);
                sum += (double)a * b;
                size += fabs((double)a * b);
            }
            double bound = size * (double)(in + 2) * 0x1p-24 + codes;
            assert_close(y[i * out + o], sum, bound, "product");
        }
    }
}

static void run_product_case(const char *isa, enum dtype type, enum dtype weights, size_t out,
                             size_t in, size_t rows) {
    struct bench bench;
    if (!bench_open(&bench, isa, 2)) return;
    float *x = random_floats(rows * in, 7), *w = allocate(out * in * sizeof *w);
    float *y = allocate(rows * out * sizeof *y);
    void *data = weights_of(type, out * in, 8, w);
    struct buffer *xs = bench_floats(&bench, x, rows * in),
                  *ys = bench_floats(&bench, NULL, rows * out);
    struct matrix *matrix = bench_matrix(&bench, data, type, out, in, weights);
    assert_true(bench.kernels->matrix_bytes(matrix) >= out * in * dtype_size(weights));
    bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, rows, NULL});
    bench_read(&bench, ys, y, rows * out * sizeof *y);
    check_product(x, w, y, rows, out, in, weights);
    free(x);
    free(w);
    free(y);
    free(data);
    bench_close(&bench);
}

static void test_product(void **state) {
    static const size_t sizes[][2] = {{1, 1}, {5, 7}, {70, 40}, {17, 192}, {48, 193}, {200, 70}};
    static const size_t rows[] = {1, 2, 3, 8, 19, 64};
    (void)state;
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) {
                enum dtype type = (enum dtype)((i + j) % 3);
                for (enum dtype weights = DTYPE_F32; weights <= last_weights(); weights++) {
                    run_product_case(isa_names[isa], type, weights, sizes[i][0], sizes[i][1],
                                     rows[j]);
                }
            }
        }
    }
}

enum { SAME_ROWS = 33, SAME_IN = 193, SAME_OUT = 520 };

/* y of all rows with three threads, which everything else must repeat bit for bit. */
static void compute_all(const char *isa, size_t threads, enum dtype weights, const float *x,
                        const float *w, float *y) {
    struct bench bench;
    assert_true(bench_open(&bench, isa, threads));
    struct matmul matmul = {bench_floats(&bench, x, SAME_ROWS * SAME_IN),
                            bench_matrix(&bench, w, DTYPE_F32, SAME_OUT, SAME_IN, weights),
                            bench_floats(&bench, NULL, SAME_ROWS * SAME_OUT), SAME_ROWS, NULL};
    bench.kernels->matmul(bench.device, &matmul);
    bench_read(&bench, matmul.y, y, SAME_ROWS * SAME_OUT * sizeof *y);
    bench_close(&bench);
}

/* Fewer rows, and rows gathered from odd places, give the rows of `all`. */
static void check_subsets(const char *isa, enum dtype weights, const float *x, const float *w,
                          const float *all) {
    struct bench bench;
    int32_t odd[SAME_ROWS / 2];
    float *y = allocate(SAME_ROWS * SAME_OUT * sizeof *y);
    size_t row_bytes = SAME_OUT * sizeof *y;
    assert_true(bench_open(&bench, isa, 2));
    struct buffer *xs = bench_floats(&bench, x, SAME_ROWS * SAME_IN);
    struct buffer *ys = bench_floats(&bench, NULL, SAME_ROWS * SAME_OUT);
    struct matrix *matrix = bench_matrix(&bench, w, DTYPE_F32, SAME_OUT, SAME_IN, weights);
    for (size_t rows = 1; rows <= SAME_ROWS; rows++) {
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, rows, NULL});
        bench_read(&bench, ys, y, rows * row_bytes);
        assert_memory_equal(y, all, rows * row_bytes);
    }
    for (int32_t i = 0; i < SAME_ROWS / 2; i++) odd[i] = 2 * i + 1;
    for (int32_t count = 0; count <= SAME_ROWS / 2; count += 4) {
        struct row_list list = bench_list(&bench, odd, count);
        memset(y, 0, SAME_ROWS * row_bytes);
        bench.kernels->write(bench.device, ys, 0, y, SAME_ROWS * row_bytes);
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, SAME_ROWS, &list});
        bench_read(&bench, ys, y, SAME_ROWS * row_bytes);
        assert_int_equal(bench.kernels->row_count(bench.device, &list), count);
        for (int32_t i = 0; i < count; i++) {
            assert_memory_equal(y + i * SAME_OUT, all + odd[i] * SAME_OUT, row_bytes);
        }
        for (size_t i = (size_t)count * SAME_OUT; i < SAME_ROWS * SAME_OUT; i++)
            assert_true(y[i] == 0);
    }
    free(y);
    bench_close(&bench);
}

static void check_same(const char *isa, enum dtype weights) {
    struct bench bench;
    if (!bench_open(&bench, isa, 1)) return;
    bench_close(&bench);
    float *x = random_floats(SAME_ROWS * SAME_IN, 3), *w = random_floats(SAME_OUT * SAME_IN, 4);
    float *reversed = allocate(SAME_ROWS * SAME_IN * sizeof *x);
    float *all = allocate(SAME_ROWS * SAME_OUT * sizeof *all);
    float *other = allocate(SAME_ROWS * SAME_OUT * sizeof *other);
    compute_all(isa, 3, weights, x, w, all);
    for (size_t threads = 1; threads <= 2; threads++) {
        compute_all(isa, threads, weights, x, w, other);
        assert_memory_equal(other, all, SAME_ROWS * SAME_OUT * sizeof *all);
    }
    for (size_t i = 0; i < SAME_ROWS; i++) {
        memcpy(reversed + i * SAME_IN, x + (SAME_ROWS - 1 - i) * SAME_IN, SAME_IN * sizeof *x);
    }
    compute_all(isa, 2, weights, reversed, w, other);
    for (size_t i = 0; i < SAME_ROWS; i++) {
        assert_memory_equal(other + (SAME_ROWS - 1 - i) * SAME_OUT, all + i * SAME_OUT,
                            SAME_OUT * sizeof *all);
    }
    check_subsets(isa, weights, x, w, all);
    free(x);
    free(w);
    free(reversed);
    free(all);
    free(other);
}

static void test_product_same_bits(void **state) {
    (void)state;
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        for (enum dtype weights = DTYPE_F32; weights <= last_weights(); weights++) {
            check_same(isa_names[isa], weights);
        }
    }
}

/* Sums of codes are integers, so every instruction set finds the same bits. */
static void test_int8_same_everywhere(void **state) {
    if (!is_cpu_tested()) skip();
    float *x = random_floats(SAME_ROWS * SAME_IN, 3), *w = random_floats(SAME_OUT * SAME_IN, 4);
    float *portable = allocate(SAME_ROWS * SAME_OUT * sizeof *portable);
    float *other = allocate(SAME_ROWS * SAME_OUT * sizeof *other);
    (void)state;
    for (size_t i = 0; i < SAME_ROWS * SAME_IN; i++) x[i] = expf(9 * x[i]) - 1; /* all sizes */
    compute_all("portable", 1, DTYPE_INT8, x, w, portable);
    for (size_t isa = 1; isa < ISA_COUNT; isa++) {
        struct bench bench;
        if (!bench_open(&bench, isa_names[isa], 1)) continue;
        bench_close(&bench);
        compute_all(isa_names[isa], 2, DTYPE_INT8, x, w, other);
        assert_memory_equal(other, portable, SAME_ROWS * SAME_OUT * sizeof *other);
    }
    free(x);
    free(w);
    free(portable);
    free(other);
}

/* Numbers that are codes already, the largest ones among them, are multiplied without any error. */
static void test_int8_exact(void **state) {
    enum { ROWS = 7, OUT = 21, IN = 200 };
    static float x[ROWS * IN], w[OUT * IN], y[ROWS * OUT];
    (void)state;
    if (!is_cpu_tested()) skip();
    random_fill(x, ROWS * IN, 21);
    random_fill(w, OUT * IN, 22);
    for (size_t i = 0; i < ROWS * IN; i++) x[i] = rintf(x[i] * 127);
    for (size_t i = 0; i < OUT * IN; i++) w[i] = rintf(w[i] * 127);
    for (size_t k = 0; k < IN; k += 8) { /* so that every group's scale is 1 */
        for (size_t i = 0; i < ROWS; i++) x[i * IN + k] = 127;
        for (size_t i = 0; i < OUT; i++) w[i * IN + k] = -127;
    }
    for (size_t k = 0; k < IN; k++) { /* the largest sums */
        x[0 * IN + k] = 127;
        x[1 * IN + k] = -127;
        w[0 * IN + k] = 127;
        w[1 * IN + k] = -127;
        x[2 * IN + k] = 0;
    }
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct bench bench;
        if (!bench_open(&bench, isa_names[isa], 1)) continue;
        struct buffer *xs = bench_floats(&bench, x, ROWS * IN);
        struct buffer *ys = bench_floats(&bench, NULL, ROWS * OUT);
        struct matrix *matrix = bench_matrix(&bench, w, DTYPE_F32, OUT, IN, DTYPE_INT8);
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, ROWS, NULL});
        bench_read(&bench, ys, y, sizeof y);
        for (size_t i = 0; i < ROWS; i++) {
            for (size_t o = 0; o < OUT; o++) {
                double sum = 0;
                for (size_t k = 0; k < IN; k++) sum += (double)x[i * IN + k] * w[o * IN + k];
                assert_true(y[i * OUT + o] == sum);
            }
        }
        bench_close(&bench);
    }
}

/* Tiny numbers are zero; a number that is none makes its row, or its output, none. */
static void test_int8_odd_numbers(void **state) {
    enum { ROWS = 4, IN = 70 };
    static float x[ROWS * IN], w[2 * IN], y[ROWS * 2];
    (void)state;
    if (!is_cpu_tested()) skip();
    for (size_t i = 0; i < ROWS * IN; i++) x[i] = 1;
    for (size_t k = 0; k < IN; k++) {
        x[1 * IN + k] = 1e-40f;
        w[k] = 1e30f;
        w[IN + k] = -1e-35f;
    }
    x[2 * IN + 69] = NAN;
    x[3 * IN + 1] = INFINITY;
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct bench bench;
        if (!bench_open(&bench, isa_names[isa], 1)) continue;
        struct buffer *xs = bench_floats(&bench, x, ROWS * IN);
        struct buffer *ys = bench_floats(&bench, NULL, ROWS * 2);
        struct matrix *matrix = bench_matrix(&bench, w, DTYPE_F32, 2, IN, DTYPE_INT8);
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, ROWS, NULL});
        bench_read(&bench, ys, y, sizeof y);
        assert_close(y[0], 70e30, 1e30, "large weights");
        for (size_t i = 1; i < 4; i++) assert_true(y[i] == 0);
        for (size_t i = 4; i < 8; i++) assert_true(isnan(y[i]));
        w[3] = NAN;
        matrix = bench_matrix(&bench, w, DTYPE_F32, 2, IN, DTYPE_INT8);
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, 2, NULL});
        bench_read(&bench, ys, y, sizeof y);
        assert_true(isnan(y[0]) && y[1] == 0 && isnan(y[2]) && y[3] == 0);
        w[3] = 1e30f;
        bench_close(&bench);
    }
}

/* Every f16 number comes back as itself, and what lies between goes to the nearer one. */
static void test_f16_conversion(void **state) {
    (void)state;
    for (uint32_t half = 0; half < 0x10000; half++) {
        float value = number_from_f16((uint16_t)half);
        if (isnan(value)) {
            assert_true(isnan(number_from_f16(number_to_f16(value))));
            continue;
        }
        assert_int_equal(number_to_f16(value), half);
        if ((half & 0x7fff) >= 0x7bff) continue;
        float next = number_from_f16((uint16_t)(half + 1)), middle = (value + next) / 2;
        assert_int_equal(number_to_f16(middle), half + (half & 1));
        assert_int_equal(number_to_f16(nextafterf(middle, value)), half);
        assert_int_equal(number_to_f16(nextafterf(middle, next)), half + 1);
    }
}

/* Both factors of a bf16 product are rounded: one times the number shows how. */
static void test_bf16_rounding(void **state) {
    static const uint32_t cases[][2] = {
        {0x3f800000, 0x3f800000}, {0x3f808000, 0x3f800000}, /* tie, to even below */
        {0x3f818000, 0x3f820000},                           /* tie, to even above */
        {0x3f808001, 0x3f810000}, {0x3f80ffff, 0x3f810000}, {0xbf818000, 0xbf820000},
        {0x7f7fffff, 0x7f800000}, /* the largest float rounds to infinity */
        {0x7f800000, 0x7f800000}, {0xff800000, 0xff800000}, {0x00000000, 0x00000000},
    };
    enum { CASES = sizeof cases / sizeof *cases };
    float x[CASES + 1], one = 1, y[CASES + 1];
    uint32_t quiet = 0x7f800001; /* NaN whose payload is all in the half that is cut off */
    (void)state;
    for (size_t i = 0; i < CASES; i++) memcpy(&x[i], &cases[i][0], sizeof *x);
    memcpy(&x[CASES], &quiet, sizeof quiet);
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct bench bench;
        if (!bench_open(&bench, isa_names[isa], 1)) continue;
        struct buffer *xs = bench_floats(&bench, x, CASES + 1),
                      *ones = bench_floats(&bench, &one, 1);
        struct buffer *ys = bench_floats(&bench, NULL, CASES + 1);
        struct matrix *row = bench_matrix(&bench, &one, DTYPE_F32, 1, 1, DTYPE_BF16);
        struct matrix *column = bench_matrix(&bench, x, DTYPE_F32, CASES + 1, 1, DTYPE_BF16);
        struct matmul both[] = {{xs, row, ys, CASES + 1, NULL}, {ones, column, ys, 1, NULL}};
        for (size_t j = 0; j < 2; j++) {
            bench.kernels->matmul(bench.device, &both[j]);
            bench_read(&bench, ys, y, sizeof y);
            for (size_t i = 0; i < CASES; i++) assert_memory_equal(&y[i], &cases[i][1], sizeof *y);
            assert_true(isnan(y[CASES]));
        }
        bench_close(&bench);
    }
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
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, 1, NULL});
        bench_read(&bench, ys, y, sizeof y);
        if (i == 0) memcpy(first, y, sizeof y);
        assert_memory_equal(y, first, sizeof y);
    }
    bench_close(&bench);
    free(x);
    free(w);
}

/* ---- Elements -------------------------------------------------------------------------------- */

static double activation_reference(enum activation kind, double gate, double up) {
    if (kind == ACTIVATION_SILU_GATED) return gate / (1 + exp(-gate)) * up;
    if (kind == ACTIVATION_RELU2) return up > 0 ? up * up : 0;
    return 0.5 * up * (1 + erf(up / sqrt(2)));
}

static void check_activation(struct bench *bench, enum activation kind) {
    enum { ROWS = 3, WIDTH = 71 };
    float gate[ROWS * WIDTH], up[ROWS * WIDTH], out[ROWS * WIDTH];
    random_fill(gate, ROWS * WIDTH, 9);
    random_fill(up, ROWS * WIDTH, 10);
    for (size_t i = 0; i < ROWS * WIDTH; i++) {
        gate[i] *= 20;
        up[i] *= 6;
    }
    gate[0] = 200;
    gate[1] = -200;
    struct buffer *in_place = bench_floats(bench, up, ROWS * WIDTH);
    struct activate activate = {
        bench_floats(bench, gate, ROWS * WIDTH), in_place, in_place, ROWS, WIDTH, kind, NULL};
    if (kind != ACTIVATION_SILU_GATED) activate.gate = NULL;
    bench->kernels->activate(bench->device, &activate);
    bench_read(bench, in_place, out, sizeof out);
    for (size_t i = 0; i < ROWS * WIDTH; i++) {
        double expected = activation_reference(kind, gate[i], up[i]);
        double size = kind == ACTIVATION_GELU ? fabs((double)up[i]) : fabs(expected);
        assert_close(out[i], expected, 5e-7 * size + 1e-30, "activation");
    }
}

static void test_activate(void **state) {
    (void)state;
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct bench bench;
        if (!bench_open(&bench, isa_names[isa], 2)) continue;
        check_activation(&bench, ACTIVATION_SILU_GATED);
        check_activation(&bench, ACTIVATION_RELU2);
        check_activation(&bench, ACTIVATION_GELU);
        bench_close(&bench);
    }
}

static void test_activate_keeps_nan(void **state) {
    (void)state;
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct bench bench;
        if (!bench_open(&bench, isa_names[isa], 1)) continue;
        for (int kind = ACTIVATION_SILU_GATED; kind <= ACTIVATION_GELU; kind++) {
            float x[2] = {NAN, 1}, y[2];
            struct buffer *in = bench_floats(&bench, x, 2), *out = bench_floats(&bench, NULL, 2);
            bench.kernels->activate(
                bench.device, &(struct activate){in, in, out, 1, 2, (enum activation)kind, NULL});
            bench_read(&bench, out, y, sizeof y);
            assert_true(isnan(y[0]) && !isnan(y[1]));
        }
        bench_close(&bench);
    }
}

static void test_scale_logits(void **state) {
    enum { VOCAB = 50, WIDTH = 40 };
    static const int32_t rows[] = {1, 3};
    float logits[2 * VOCAB], got[2 * VOCAB], s[4] = {9, -0.5f, 9, 2.25f};
    (void)state;
    random_fill(logits, 2 * VOCAB, 11);
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct bench bench;
        if (!bench_open(&bench, isa_names[isa], 1)) continue;
        struct row_list list = bench_list(&bench, rows, 2);
        struct buffer *buffer = bench_floats(&bench, logits, 2 * VOCAB);
        bench.kernels->scale_logits(
            bench.device,
            &(struct scale_logits){buffer, bench_floats(&bench, s, 4), &list, VOCAB, WIDTH});
        bench_read(&bench, buffer, got, sizeof got);
        for (size_t i = 0; i < 2 * VOCAB; i++) {
            double expected = logits[i] * exp(s[rows[i / VOCAB]]) / WIDTH;
            assert_close(got[i], expected, fabs(expected) * 3e-7, "logit");
        }
        bench_close(&bench);
    }
}

static void test_rmsnorm(void **state) {
    enum { ROWS = 5, WIDTH = 70 };
    static const int32_t rows[] = {0, 2, 4};
    float x[ROWS * WIDTH], gain[WIDTH], y[3 * WIDTH];
    (void)state;
    random_fill(x, ROWS * WIDTH, 12);
    random_fill(gain, WIDTH, 13);
    memset(x + 2 * WIDTH, 0, WIDTH * sizeof *x); /* a row of zeros stays zero */
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct bench bench;
        if (!bench_open(&bench, isa_names[isa], 1)) continue;
        struct row_list list = bench_list(&bench, rows, 3);
        struct rmsnorm norm = {bench_floats(&bench, x, ROWS * WIDTH),
                               bench_floats(&bench, gain, WIDTH),
                               bench_floats(&bench, NULL, 3 * WIDTH),
                               &list,
                               WIDTH,
                               1e-6f};
        bench.kernels->rmsnorm(bench.device, &norm);
        bench_read(&bench, norm.y, y, sizeof y);
        for (size_t i = 0; i < 3; i++) {
            const float *row = x + rows[i] * WIDTH;
            double squares = 0;
            for (size_t j = 0; j < WIDTH; j++) squares += (double)row[j] * row[j];
            for (size_t j = 0; j < WIDTH; j++) {
                double expected = row[j] / sqrt(squares / WIDTH + 1e-6) * gain[j];
                assert_close(y[i * WIDTH + j], expected, 1e-6 * fabs(expected), "rmsnorm");
            }
        }
        bench_close(&bench);
    }
}

/* ---- Drawing --------------------------------------------------------------------------------- */

/* One sum, in order. */
static int32_t draw_reference(const float *logits, size_t vocab, float temperature,
                              double uniform) {
    float best = -INFINITY;
    int32_t token = -1;
    double total = 0;
    for (size_t i = 0; i < vocab; i++) {
        float logit = isnan(logits[i]) ? -INFINITY : fminf(logits[i], FLT_MAX);
        if (logit > best) {
            best = logit;
            token = (int32_t)i;
        }
    }
    if (temperature == 0 || token < 0) return token;
    for (int pass = 0; pass < 2; pass++) {
        double rest = uniform * total;
        for (size_t i = 0; i < vocab; i++) {
            float logit = isnan(logits[i]) ? -INFINITY : fminf(logits[i], FLT_MAX);
            double weight = (double)expf((logit - best) / temperature);
            rest -= weight;
            if (pass == 0)
                total += weight;
            else if (rest < 0)
                return (int32_t)i;
        }
    }
    return token;
}

static void check_draw(struct bench *bench, size_t vocab) {
    enum { DRAWN = 8 };
    static const float temperatures[DRAWN] = {0, 1, 0.7f, -1, 2, 0, 1, 0};
    int32_t rows[DRAWN], tokens[DRAWN];
    double uniforms[DRAWN];
    float *logits = random_floats(DRAWN * vocab, (uint32_t)vocab);
    for (size_t row = 0; row < DRAWN; row++) {
        float *x = logits + row * vocab;
        rows[row] = (int32_t)(2 * row);
        tokens[row] = 77;
        uniforms[row] = fmod(0.37 * (double)(row + vocab), 1);
        for (size_t i = 0; i < vocab; i++) x[i] *= 8;
        x[vocab / 2] = x[vocab - 1] = 9; /* equals */
        x[0] = row == 1 ? NAN : -INFINITY;
        if (row == 2) x[vocab - 1] = INFINITY;
        for (size_t i = 0; row >= 6 && i < vocab; i++) x[i] = row == 6 ? -INFINITY : NAN;
    }
    uniforms[4] = 0.999999; /* within the weight of the last, which is 1 */
    struct row_list list = bench_list(bench, rows, DRAWN);
    struct draw draw = {bench_floats(bench, logits, DRAWN * vocab),
                        &list,
                        vocab,
                        bench_floats(bench, temperatures, DRAWN),
                        bench_buffer(bench, uniforms, sizeof uniforms),
                        bench_buffer(bench, tokens, sizeof tokens)};
    bench->kernels->draw(bench->device, &draw);
    bench_read(bench, draw.token, tokens, sizeof tokens);
    for (size_t row = 0; row < DRAWN; row++) {
        int32_t expected = temperatures[row] < 0
                               ? 77
                               : draw_reference(logits + row * vocab, vocab, temperatures[row],
                                                uniforms[row]);
        assert_int_equal(tokens[row], expected);
    }
    free(logits);
}

static void test_draw(void **state) {
    static const size_t vocabs[] = {3, 4096, 4097, 9001, 300000};
    (void)state;
    for (size_t i = 0; i < sizeof vocabs / sizeof *vocabs; i++) {
        struct bench bench;
        if (!bench_open(&bench, NULL, 1)) continue;
        if (bench.kernels->draw) check_draw(&bench, vocabs[i]);
        bench_close(&bench);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open_refuses),
        cmocka_unit_test(test_open_describes),
        cmocka_unit_test(test_buffers),
        cmocka_unit_test(test_large_buffer_is_zero),
        cmocka_unit_test(test_activation_reads_floats),
        cmocka_unit_test(test_matrix_refuses),
        cmocka_unit_test(test_product),
        cmocka_unit_test(test_product_same_bits),
        cmocka_unit_test(test_int8_same_everywhere),
        cmocka_unit_test(test_int8_exact),
        cmocka_unit_test(test_int8_odd_numbers),
        cmocka_unit_test(test_f16_conversion),
        cmocka_unit_test(test_bf16_rounding),
        cmocka_unit_test(test_threads_wake),
        cmocka_unit_test(test_activate),
        cmocka_unit_test(test_draw),
        cmocka_unit_test(test_activate_keeps_nan),
        cmocka_unit_test(test_scale_logits),
        cmocka_unit_test(test_rmsnorm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
