/* Operations on the elements of rows: activation, scale of logits, norm. */
#include "test_kernels.h"

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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_activate),
        cmocka_unit_test(test_activate_keeps_nan),
        cmocka_unit_test(test_scale_logits),
        cmocka_unit_test(test_rmsnorm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
