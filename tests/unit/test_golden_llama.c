/* Ordinary models against Hugging Face transformers in fp32: every family, on every instruction
 * set, whole and in chunks; and the promises that hold for every residual. Other devices than the
 * CPU get some of the combinations. */
#include "golden.h"
#include "test_device.h"

#include <math.h>
#include <stdlib.h>

#define TOLERANCE 1e-4 /* of the largest logit of the row */

enum { LENGTH = 40, GREEDY = 12 };

static const char *const families[] = {"biases", "scaled", "linear",    "mistral",
                                       "qwen2",  "qwen3",  "qwen3-tied"};
enum { FAMILIES = sizeof families / sizeof *families };

struct run {
    struct model *model;
    struct window_runner runner;
    int32_t tokens[LENGTH + GREEDY];
};

static void open_run(struct run *run, const char *family, const struct model_options *options,
                     struct safetensors *expected) {
    char path[512], name[64];
    struct error error = {0};
    snprintf(name, sizeof name, "llama/%s", family);
    snprintf(path, sizeof path, "%s%s", GOLDEN_FOLDER, name);
    *run = (struct run){.model = golden_model(path, options)};
    must(window_runner_create(run->model, 0, &run->runner, &error), &error);
    golden_expected(name, expected);
    golden_copy(expected, "tokens", run->tokens, LENGTH * sizeof(int32_t));
}

static void close_run(struct run *run, struct safetensors *expected) {
    window_runner_destroy(&run->runner);
    model_destroy(run->model);
    safetensors_close(expected);
}

/* Logits of all tokens in chunks; the caller frees them. */
static float *run_tokens(struct run *run, size_t chunk, int body) {
    size_t vocab = run->model->config.vocab;
    float *logits = calloc(LENGTH * vocab, sizeof *logits);
    run->runner.body = body;
    for (size_t first = 0; first < LENGTH; first += chunk) {
        size_t rows = LENGTH - first < chunk ? LENGTH - first : chunk;
        struct step_result result;
        window_runner_step(&run->runner, run->tokens, first, rows, 0, true, &result);
        memcpy(logits + first * vocab, result.logits, rows * vocab * sizeof *logits);
        for (size_t l = 0; l < run->model->info.sublayers; l++) {
            const uint8_t *ran = result.run + l * run->model->info.max_step_rows;
            for (size_t row = 0; row < rows; row++) assert_int_equal(ran[row], 1);
        }
    }
    return logits;
}

static void compare(const char *what, const float *got, const float *want, size_t vocab) {
    for (size_t row = 0; row < LENGTH; row++, got += vocab, want += vocab) {
        double top = 0;
        for (size_t v = 0; v < vocab; v++) top = fmax(top, fabs((double)want[v]));
        for (size_t v = 0; v < vocab; v++) {
            if (fabs((double)got[v] - (double)want[v]) <= TOLERANCE * top) continue;
            fail_msg("%s: row %zu logit %zu is %.7f, not %.7f", what, row, v, (double)got[v],
                     (double)want[v]);
        }
    }
}

static size_t best_of(const float *logits, size_t vocab) {
    size_t best = 0;
    for (size_t v = 1; v < vocab; v++) {
        if (logits[v] > logits[best]) best = v;
    }
    return best;
}

static void check_family(const char *family, const char *isa) {
    static const size_t chunks[] = {LENGTH, 7, 1};
    struct model_options options = {
        .device = test_device(), .isa = isa, .weights = WEIGHTS_F32, .threads = 2};
    struct safetensors expected;
    struct run run;
    open_run(&run, family, &options, &expected);
    size_t vocab = run.model->config.vocab;
    float *want = malloc(LENGTH * vocab * sizeof *want);
    int32_t greedy[GREEDY], *tokens = run.tokens;
    golden_copy(&expected, "logits", want, LENGTH * vocab * sizeof *want);
    golden_copy(&expected, "greedy", greedy, sizeof greedy);
    for (size_t i = 0; i < 3; i++) {
        char what[96];
        snprintf(what, sizeof what, "%s %s chunk %zu", family, isa, chunks[i]);
        float *got = run_tokens(&run, chunks[i], BODY_AUTO);
        compare(what, got, want, vocab);
        tokens[LENGTH] = (int32_t)best_of(got + (LENGTH - 1) * vocab, vocab);
        free(got);
    }
    for (size_t i = 0; i < GREEDY; i++) {
        struct step_result result;
        assert_int_equal(tokens[LENGTH + i], greedy[i]);
        if (i + 1 == GREEDY) break;
        window_runner_step(&run.runner, tokens, LENGTH + i, 1, 0, true, &result);
        tokens[LENGTH + i + 1] = (int32_t)best_of(result.logits, vocab);
    }
    free(want);
    close_run(&run, &expected);
}

static void check_families(const char *isa) {
    for (size_t f = 0; f < FAMILIES; f++) check_family(families[f], isa);
}

static void agrees_with_transformers(void **state) {
    (void)state;
    for_each_isa(check_families);
}

static void chunks_bodies_and_threads_change_no_bit(void **state) {
    static const size_t chunks[] = {17, 1};
    static const int bodies[] = {BODY_DENSE, BODY_GATHER, BODY_AUTO};
    (void)state;
    for (size_t f = 0; f < FAMILIES; f++) {
        for (int weights = WEIGHTS_F32; weights <= WEIGHTS_BF16; weights++) {
            float *first = NULL;
            for (size_t threads = 1; threads <= (is_cpu_tested() ? 3 : 1); threads++) {
                struct model_options options = {.device = test_device(),
                                                .weights = (enum weight_type)weights,
                                                .threads = threads};
                struct safetensors expected;
                struct run run;
                open_run(&run, families[f], &options, &expected);
                size_t bytes = LENGTH * run.model->config.vocab * sizeof *first;
                if (!first) first = run_tokens(&run, LENGTH, BODY_DENSE);
                for (size_t i = 0; i < 6; i += is_cpu_tested() ? 1 : 5) {
                    float *other = run_tokens(&run, chunks[i % 2], bodies[i / 2]);
                    assert_memory_equal(first, other, bytes);
                    free(other);
                }
                close_run(&run, &expected);
            }
            free(first);
        }
    }
}

/* What the tools say of such a model: one tier, which skips nothing, and no calibration. */
static void there_is_full_alone(void **state) {
    (void)state;
    struct safetensors expected;
    struct run run;
    struct error error = {0};
    struct evaluation evaluation;
    struct model_options options = {.device = test_device()};
    open_run(&run, "qwen3", &options, &expected);
    const struct model_info *info = model_get_info(run.model);
    assert_string_equal(info->residual, "standard");
    assert_int_equal(info->tier_count, 1);
    assert_string_equal(info->tiers[0].name, "full");
    assert_int_equal(model_find_tier(run.model, "fast"), FATHOM_NOT_FOUND);
    assert_int_equal(info->eos_count, 2); /* generation_config.json lists both */
    assert_int_equal(info->eos[0], 2);
    assert_int_equal(info->eos[1], 5);

    must(model_evaluate(run.model, run.tokens, LENGTH, 0, &(struct evaluate_options){0},
                        &evaluation, &error),
         &error);
    assert_true(evaluation.attn_skip == 0 && evaluation.mlp_skip == 0);
    assert_true(evaluation.flops_per_token == evaluation.flops_per_token_full);
    free(evaluation.sublayer_skip);

    must(model_measure_cost(run.model, &error), &error);
    const struct cost_model *cost = model_get_cost(run.model);
    assert_true(cost->count > 0 && cost->points[0].attn_ns > 0 && cost->gather_factor == 1);

    struct calibration_target target = {"fast", 0.4};
    struct calibration calibration = {
        .tokens = run.tokens, .count = LENGTH, .targets = &target, .target_count = 1};
    assert_int_equal(model_calibrate(run.model, &calibration, &error), FATHOM_UNSUPPORTED);
    assert_non_null(strstr(error.message, "nothing to calibrate"));
    close_run(&run, &expected);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agrees_with_transformers),
        cmocka_unit_test(chunks_bodies_and_threads_change_no_bit),
        cmocka_unit_test(there_is_full_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
