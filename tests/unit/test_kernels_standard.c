/* The residual of standard models against its formula in double precision. */
#include "test_kernels.h"

enum { ROWS = 5, WIDTH = 70, VOCAB = 9 };
#define EPSILON 1e-5f

static const int32_t tokens[ROWS] = {3, 0, 8, 3, 1};

static void check_norm(const float *x, const float *y, const float *gain) {
    for (size_t row = 0; row < ROWS; row++, x += WIDTH, y += WIDTH) {
        double squares = 0;
        for (size_t i = 0; i < WIDTH; i++) squares += (double)x[i] * x[i];
        for (size_t i = 0; i < WIDTH; i++) {
            double expected = x[i] / sqrt(squares / WIDTH + EPSILON) * gain[i];
            assert_close(y[i], expected, 1e-6 * fabs(expected), "norm");
        }
    }
}

static void test_sublayer(void **state) {
    (void)state;
    float *table = random_floats(VOCAB * WIDTH, 1), *f = random_floats(ROWS * WIDTH, 2);
    float *first = random_floats(WIDTH, 3), *second = random_floats(WIDTH, 4);
    float x[ROWS * WIDTH], y[ROWS * WIDTH], before[ROWS * WIDTH], last[ROWS * WIDTH];
    memset(table + 8 * WIDTH, 0, WIDTH * sizeof *table); /* a row of zeros stays one */
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct bench bench;
        if (!bench_open(&bench, isa_names[isa], 2)) continue;
        struct step_rows step = {.rows = ROWS,
                                 .token = bench_buffer(&bench, tokens, sizeof tokens)};
        struct prenorm norm = {WIDTH, bench_floats(&bench, NULL, ROWS * WIDTH),
                               bench_floats(&bench, NULL, ROWS * WIDTH),
                               bench_floats(&bench, first, WIDTH), EPSILON};
        struct standard_begin begin = {&step, bench_floats(&bench, table, VOCAB * WIDTH), DTYPE_F32,
                                       norm};
        bench.kernels->standard_begin(bench.device, &begin);
        bench_read(&bench, norm.x, x, sizeof x);
        bench_read(&bench, norm.y, y, sizeof y);
        for (size_t row = 0; row < ROWS; row++) {
            const float *entry = table + (size_t)tokens[row] * WIDTH;
            assert_memory_equal(x + row * WIDTH, entry, WIDTH * sizeof *entry);
        }
        check_norm(x, y, first);

        memcpy(before, x, sizeof x);
        norm.gain = bench_floats(&bench, second, WIDTH);
        struct standard_end_sublayer end = {&step, bench_floats(&bench, f, ROWS * WIDTH), norm};
        bench.kernels->standard_end_sublayer(bench.device, &end);
        bench_read(&bench, norm.x, x, sizeof x);
        bench_read(&bench, norm.y, y, sizeof y);
        for (size_t i = 0; i < ROWS * WIDTH; i++) assert_true(x[i] == before[i] + f[i]);
        check_norm(x, y, second);

        end.norm.gain = NULL; /* behind the last sub-layer y stays as it is */
        bench.kernels->standard_end_sublayer(bench.device, &end);
        bench_read(&bench, norm.y, last, sizeof last);
        assert_memory_equal(last, y, sizeof y);
        bench_close(&bench);
    }
    free(table);
    free(f);
    free(first);
    free(second);
}

static void test_bias(void **state) {
    (void)state;
    float *x = random_floats(ROWS * WIDTH, 5), *bias = random_floats(WIDTH, 6);
    float got[ROWS * WIDTH];
    for (size_t isa = 0; isa < ISA_COUNT; isa++) {
        struct bench bench;
        if (!bench_open(&bench, isa_names[isa], 2)) continue;
        struct add_bias add = {bench_floats(&bench, x, ROWS * WIDTH),
                               bench_floats(&bench, bias, WIDTH), ROWS - 1, WIDTH};
        bench.kernels->add_bias(bench.device, &add);
        bench_read(&bench, add.x, got, sizeof got);
        for (size_t i = 0; i < (ROWS - 1) * WIDTH; i++)
            assert_true(got[i] == x[i] + bias[i % WIDTH]);
        assert_memory_equal(got + (ROWS - 1) * WIDTH, x + (ROWS - 1) * WIDTH, WIDTH * sizeof *got);
        bench_close(&bench);
    }
    free(x);
    free(bias);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sublayer),
        cmocka_unit_test(test_bias),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
