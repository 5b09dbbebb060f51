/* Drawing the next token on the device, against one sum in order. */
#include "test_kernels.h"

#include <float.h>

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
        cmocka_unit_test(test_draw),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
