/* Matrix products of every type of weights: against double precision, and against themselves with
 * other numbers of rows and threads and on other instruction sets; and the rounding of numbers. */
#include "test_kernels.h"

#include "kernels/number.h"

/* ---- Against double precision ---------------------------------------------------------------- */

/* `count` numbers in `type`: the values a file would hold, and in *exact what they are as
 * floats. */
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
                if (weights == DTYPE_F16 && !is_cpu_tested()) a = rounded_to_f16(a);
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
    bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, rows, NULL}, 1);
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
                for (enum dtype weights = DTYPE_F32; weights <= DTYPE_INT8; weights++) {
                    run_product_case(isa_names[isa], type, weights, sizes[i][0], sizes[i][1],
                                     rows[j]);
                }
            }
        }
    }
}

/* ---- The same bits --------------------------------------------------------------------------- */

enum { SAME_ROWS = 33, SAME_IN = 193, SAME_OUT = 520 };

/* y of all rows on an open device, which is closed. */
static void compute_on(struct bench *bench, enum dtype weights, const float *x, const float *w,
                       float *y) {
    struct matmul matmul = {bench_floats(bench, x, SAME_ROWS * SAME_IN),
                            bench_matrix(bench, w, DTYPE_F32, SAME_OUT, SAME_IN, weights),
                            bench_floats(bench, NULL, SAME_ROWS * SAME_OUT), SAME_ROWS, NULL};
    bench->kernels->matmul(bench->device, &matmul, 1);
    bench_read(bench, matmul.y, y, SAME_ROWS * SAME_OUT * sizeof *y);
    bench_close(bench);
}

static void compute_all(const char *isa, size_t threads, enum dtype weights, const float *x,
                        const float *w, float *y) {
    struct bench bench;
    assert_true(bench_open(&bench, isa, threads));
    compute_on(&bench, weights, x, w, y);
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
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, rows, NULL}, 1);
        bench_read(&bench, ys, y, rows * row_bytes);
        assert_memory_equal(y, all, rows * row_bytes);
    }
    for (int32_t i = 0; i < SAME_ROWS / 2; i++) odd[i] = 2 * i + 1;
    for (int32_t count = 0; count <= SAME_ROWS / 2; count += 4) {
        struct row_list list = bench_list(&bench, odd, count);
        memset(y, 0, SAME_ROWS * row_bytes);
        bench.kernels->write(bench.device, ys, 0, y, SAME_ROWS * row_bytes);
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, SAME_ROWS, &list}, 1);
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

/* Products of the same rows, given together, are those that are given one by one: with matrices of
 * few panels and of many, of a list of rows and of all. */
static void check_together(const char *isa, size_t threads, enum dtype weights, const float *x) {
    static const size_t outs[MATMULS_MAX] = {7, SAME_OUT, 33};
    struct bench bench;
    int32_t odd[SAME_ROWS / 2];
    if (!bench_open(&bench, isa, threads)) return;
    struct buffer *xs = bench_floats(&bench, x, SAME_ROWS * SAME_IN);
    struct buffer *alone[MATMULS_MAX];
    struct matmul products[MATMULS_MAX];
    for (size_t i = 0; i < MATMULS_MAX; i++) {
        float *w = random_floats(outs[i] * SAME_IN, 5 + (uint32_t)i);
        struct matrix *matrix = bench_matrix(&bench, w, DTYPE_F32, outs[i], SAME_IN, weights);
        alone[i] = bench_floats(&bench, NULL, SAME_ROWS * outs[i]);
        products[i] = (struct matmul){
            .x = xs, .w = matrix, .y = bench_floats(&bench, NULL, SAME_ROWS * outs[i])};
        free(w);
    }
    for (int32_t i = 0; i < SAME_ROWS / 2; i++) odd[i] = 2 * i + 1;
    struct row_list list = bench_list(&bench, odd, SAME_ROWS / 2);
    for (size_t turn = 0; turn <= SAME_ROWS; turn++) {
        bool listed = turn == 0;
        size_t rows = listed ? SAME_ROWS : turn, written = listed ? SAME_ROWS / 2 : rows;
        for (size_t i = 0; i < MATMULS_MAX; i++) {
            products[i].rows = rows;
            products[i].gather = listed ? &list : NULL;
            struct matmul product = products[i];
            product.y = alone[i];
            bench.kernels->matmul(bench.device, &product, 1);
        }
        for (size_t count = 1; count <= MATMULS_MAX; count++) {
            float got[SAME_ROWS * SAME_OUT] = {0}, expected[SAME_ROWS * SAME_OUT];
            for (size_t i = 0; i < count; i++) { /* nothing is left of the products before */
                bench.kernels->write(bench.device, products[i].y, 0, got,
                                     SAME_ROWS * outs[i] * sizeof *got);
            }
            bench.kernels->matmul(bench.device, products, count);
            for (size_t i = 0; i < count; i++) {
                size_t bytes = written * outs[i] * sizeof *got;
                bench_read(&bench, products[i].y, got, bytes);
                bench_read(&bench, alone[i], expected, bytes);
                assert_memory_equal(got, expected, bytes);
            }
        }
    }
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
    compute_all(isa, 3, weights, x, w, all); /* which all else must repeat bit for bit */
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
    check_together(isa, 1, weights, x);
    check_together(isa, 3, weights, x);
    free(x);
    free(w);
    free(reversed);
    free(all);
    free(other);
}

static void test_product_same_bits(void **state) {
    (void)state;
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        for (enum dtype weights = DTYPE_F32; weights <= DTYPE_INT8; weights++) {
            check_same(isa_names[isa], weights);
        }
    }
}

/* Sums of codes are integers, so every instruction set, and every device, finds the same bits. */
static void test_int8_same_everywhere(void **state) {
    float *x = random_floats(SAME_ROWS * SAME_IN, 3), *w = random_floats(SAME_OUT * SAME_IN, 4);
    float *portable = allocate(SAME_ROWS * SAME_OUT * sizeof *portable);
    float *other = allocate(SAME_ROWS * SAME_OUT * sizeof *other);
    struct bench bench;
    (void)state;
    for (size_t i = 0; i < SAME_ROWS * SAME_IN; i++) x[i] = expf(9 * x[i]) - 1; /* all sizes */
    assert_true(bench_open_on(&bench, "cpu", "portable", 1));
    compute_on(&bench, DTYPE_INT8, x, w, portable);
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        if (!bench_open(&bench, isa_names[isa], 2)) continue;
        compute_on(&bench, DTYPE_INT8, x, w, other);
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
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, ROWS, NULL}, 1);
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
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, ROWS, NULL}, 1);
        bench_read(&bench, ys, y, sizeof y);
        assert_close(y[0], 70e30, 1e30, "large weights");
        for (size_t i = 1; i < 4; i++) assert_true(y[i] == 0);
        for (size_t i = 4; i < 8; i++) assert_true(isnan(y[i]));
        w[3] = NAN;
        matrix = bench_matrix(&bench, w, DTYPE_F32, 2, IN, DTYPE_INT8);
        bench.kernels->matmul(bench.device, &(struct matmul){xs, matrix, ys, 2, NULL}, 1);
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
            bench.kernels->matmul(bench.device, &both[j], 1);
            bench_read(&bench, ys, y, sizeof y);
            for (size_t i = 0; i < CASES; i++) assert_memory_equal(&y[i], &cases[i][1], sizeof *y);
            assert_true(isnan(y[CASES]));
        }
        bench_close(&bench);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_product),
        cmocka_unit_test(test_product_same_bits),
        cmocka_unit_test(test_int8_same_everywhere),
        cmocka_unit_test(test_int8_exact),
        cmocka_unit_test(test_int8_odd_numbers),
        cmocka_unit_test(test_f16_conversion),
        cmocka_unit_test(test_bf16_rounding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
