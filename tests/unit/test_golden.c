/* The forward pass against the PyTorch reference: logits, mixes, decisions and log-norms of every
 * setting of the format, on every instruction set, by every body, whole and in chunks. Other
 * devices than the CPU are emulated: they get every third or fourth of the combinations. */
#include "golden.h"
#include "test_device.h"

#include <math.h>
#include <stdlib.h>

#define LOGIT_TOLERANCE 1e-4 /* of the largest logit of the row */
#define MIX_TOLERANCE   1e-5 /* a decision nearer to its threshold than this may go either way */

enum { TOKENS_MAX = 128 };

struct run {
    struct model *model;
    struct window_runner runner;
    int32_t tokens[TOKENS_MAX];
    size_t count;
};

/* What one pass over the tokens gave, whatever the chunks. */
struct trace {
    float *logits, *mix, *log_norm; /* [T, V], [L, T], [T] */
    uint8_t *run;                   /* [L, T] */
};

static struct trace trace_create(const struct run *run) {
    size_t vocab = run->model->config.vocab, sublayers = run->model->info.sublayers;
    return (struct trace){
        .logits = calloc(run->count * vocab, sizeof(float)),
        .mix = calloc(run->count * sublayers, sizeof(float)),
        .log_norm = calloc(run->count, sizeof(float)),
        .run = calloc(run->count * sublayers, 1),
    };
}

static void trace_free(struct trace *trace) {
    free(trace->logits);
    free(trace->mix);
    free(trace->log_norm);
    free(trace->run);
}

static struct run run_open(const char *name, const struct model_options *options) {
    char path[512];
    struct error error = {0};
    struct safetensors expected;
    struct run run = {0};
    snprintf(path, sizeof path, "%s%s", GOLDEN_FOLDER, name);
    run.model = golden_model(path, options);
    must(window_runner_create(run.model, 0, &run.runner, &error), &error);
    golden_expected(name, &expected);
    run.count = golden_count(&expected, "tokens");
    assert_true(run.count <= TOKENS_MAX);
    golden_copy(&expected, "tokens", run.tokens, run.count * sizeof(int32_t));
    safetensors_close(&expected);
    return run;
}

static void run_close(struct run *run) {
    window_runner_destroy(&run->runner);
    model_destroy(run->model);
}

/* Feeds the tokens in chunks through one body. */
static struct trace run_tokens(struct run *run, size_t tier, size_t chunk, int body) {
    struct trace trace = trace_create(run);
    size_t vocab = run->model->config.vocab, max_rows = run->model->info.max_step_rows;
    for (size_t first = 0; first < run->count; first += chunk) {
        size_t rows = run->count - first < chunk ? run->count - first : chunk;
        struct step_result result;
        run->runner.body = body;
        window_runner_step(&run->runner, run->tokens, first, rows, tier, true, &result);
        memcpy(trace.logits + first * vocab, result.logits, rows * vocab * sizeof(float));
        memcpy(trace.log_norm + first, result.log_norm, rows * sizeof(float));
        for (size_t l = 0; l < run->model->info.sublayers; l++) {
            memcpy(trace.mix + l * run->count + first, result.mix + l * max_rows,
                   rows * sizeof(float));
            memcpy(trace.run + l * run->count + first, result.run + l * max_rows, rows);
        }
    }
    return trace;
}

/* ---- Against the reference ------------------------------------------------------------------- */

static struct trace load_expected(const struct run *run, const struct safetensors *file,
                                  const char *tier) {
    struct trace trace = trace_create(run);
    size_t cells = run->count * run->model->info.sublayers;
    char name[64];
    snprintf(name, sizeof name, "logits.%s", tier);
    golden_copy(file, name, trace.logits, run->count * run->model->config.vocab * sizeof(float));
    snprintf(name, sizeof name, "mix.%s", tier);
    golden_copy(file, name, trace.mix, cells * sizeof(float));
    snprintf(name, sizeof name, "run.%s", tier);
    golden_copy(file, name, trace.run, cells);
    snprintf(name, sizeof name, "s.%s", tier);
    golden_copy(file, name, trace.log_norm, run->count * sizeof(float));
    return trace;
}

static void compare_traces(const struct run *run, const struct trace *got, const struct trace *want,
                           const float *theta, const char *what) {
    size_t vocab = run->model->config.vocab;
    for (size_t cell = 0; cell < run->count * run->model->info.sublayers; cell++) {
        double distance = fabs((double)want->mix[cell] - (double)theta[cell / run->count]);
        if (got->run[cell] != want->run[cell] && distance >= MIX_TOLERANCE) {
            fail_msg("%s: sub-layer %zu row %zu decides %d; mix %.7f, theta %.7f", what,
                     cell / run->count, cell % run->count, got->run[cell], (double)want->mix[cell],
                     (double)theta[cell / run->count]);
        }
        if (!(fabs((double)got->mix[cell] - (double)want->mix[cell]) < 2e-5)) {
            fail_msg("%s: sub-layer %zu row %zu has mix %.7f, not %.7f", what, cell / run->count,
                     cell % run->count, (double)got->mix[cell], (double)want->mix[cell]);
        }
    }
    for (size_t row = 0; row < run->count; row++) {
        double top = 0;
        for (size_t v = 0; v < vocab; v++)
            top = fmax(top, fabs((double)want->logits[row * vocab + v]));
        for (size_t v = 0; v < vocab; v++) {
            double a = (double)got->logits[row * vocab + v],
                   b = (double)want->logits[row * vocab + v];
            if (!(fabs(a - b) <= LOGIT_TOLERANCE * top)) {
                fail_msg("%s: row %zu logit %zu is %.7f, not %.7f", what, row, v, a, b);
            }
        }
        assert_true(fabs((double)got->log_norm[row] - (double)want->log_norm[row]) < 1e-4);
    }
}

static void check_case(const char *name, const char *isa) {
    static const int bodies[] = {BODY_AUTO, BODY_DENSE, BODY_GATHER};
    static const size_t chunks[] = {TOKENS_MAX, 7, 1};
    struct model_options options = {
        .device = test_device(), .isa = isa, .weights = WEIGHTS_F32, .threads = 2};
    struct run run = run_open(name, &options);
    struct safetensors expected;
    golden_expected(name, &expected);
    const struct depth_table *depth = checkpoint_depth(run.model->checkpoint);
    for (size_t tier = 0; tier < depth->tier_count; tier++) {
        struct trace want = load_expected(&run, &expected, depth->tiers[tier].name);
        for (size_t i = 0; i < 9; i += is_cpu_tested() ? 1 : 4) {
            char what[96];
            snprintf(what, sizeof what, "%s %s %s body %d chunk %zu", name, isa,
                     depth->tiers[tier].name, bodies[i % 3], chunks[i / 3]);
            struct trace got = run_tokens(&run, tier, chunks[i / 3], bodies[i % 3]);
            compare_traces(&run, &got, &want, depth->theta + tier * depth->sublayers, what);
            trace_free(&got);
        }
        trace_free(&want);
    }
    safetensors_close(&expected);
    run_close(&run);
}

static void check_cases(const char *isa) {
    for (size_t c = 0; c < GOLDEN_CASES; c++) check_case(golden_cases[c], isa);
}

static void agrees_with_reference(void **state) {
    (void)state;
    for_each_isa(check_cases);
}

/* The bundled model: two prompts at every tier. Its weights are bf16 on disk, so f32 is exact. */
static void bundled_model_agrees(void **state) {
    enum { PROMPTS = 2, LENGTH = 96, LAST = 8 };
    (void)state;
    struct error error = {0};
    struct model_options options = {
        .device = test_device(), .weights = WEIGHTS_F32, .threads = 2};
    struct safetensors expected;
    golden_expected("fathom-tiny", &expected);
    struct run run = {.model = golden_model(FATHOM_SOURCE "/models/fathom-tiny", &options)};
    must(window_runner_create(run.model, 0, &run.runner, &error), &error);
    const struct depth_table *depth = checkpoint_depth(run.model->checkpoint);
    size_t vocab = run.model->config.vocab, cells = LENGTH * run.model->info.sublayers;
    assert_int_equal(depth->tier_count, 4);
    for (size_t i = 0; i < PROMPTS * depth->tier_count; i += is_cpu_tested() ? 1 : 3) {
        size_t prompt = i % PROMPTS, tier = i / PROMPTS;
        char name[64];
        run.count = LENGTH;
        snprintf(name, sizeof name, "tokens.%zu", prompt);
        golden_copy(&expected, name, run.tokens, LENGTH * sizeof(int32_t));
        struct trace want = trace_create(&run), got = run_tokens(&run, tier, 17, BODY_AUTO);
        snprintf(name, sizeof name, "logits.%s.%zu", depth->tiers[tier].name, prompt);
        golden_copy(&expected, name, want.logits + (LENGTH - LAST) * vocab,
                    LAST * vocab * sizeof(float));
        memcpy(want.logits, got.logits, (LENGTH - LAST) * vocab * sizeof(float)); /* not stored */
        snprintf(name, sizeof name, "mix.%s.%zu", depth->tiers[tier].name, prompt);
        golden_copy(&expected, name, want.mix, cells * sizeof(float));
        snprintf(name, sizeof name, "run.%s.%zu", depth->tiers[tier].name, prompt);
        golden_copy(&expected, name, want.run, cells);
        snprintf(name, sizeof name, "s.%s.%zu", depth->tiers[tier].name, prompt);
        golden_copy(&expected, name, want.log_norm, LENGTH * sizeof(float));
        compare_traces(&run, &got, &want, depth->theta + tier * depth->sublayers,
                       depth->tiers[tier].name);
        trace_free(&want);
        trace_free(&got);
    }
    safetensors_close(&expected);
    run_close(&run);
}

/* ---- Bit for bit ----------------------------------------------------------------------------- */

static void assert_same_bits(const struct run *run, const struct trace *a, const struct trace *b) {
    size_t cells = run->count * run->model->info.sublayers;
    assert_memory_equal(a->run, b->run, cells);
    assert_memory_equal(a->mix, b->mix, cells * sizeof(float));
    assert_memory_equal(a->log_norm, b->log_norm, run->count * sizeof(float));
    assert_memory_equal(a->logits, b->logits,
                        run->count * run->model->config.vocab * sizeof(float));
}

/* Prefill = chunked prefill = decode, and dense = gather, decisions included. */
static void chunks_and_bodies_change_no_bit(void **state) {
    static const size_t chunks[] = {TOKENS_MAX, 17, 7, 1};
    static const int bodies[] = {BODY_DENSE, BODY_GATHER, BODY_AUTO};
    int last = is_cpu_tested() ? WEIGHTS_INT8 : WEIGHTS_BF16;
    (void)state;
    for (size_t c = 0; c < GOLDEN_CASES; c++) {
        for (int weights = WEIGHTS_F32; weights <= last; weights++) {
            struct model_options options = {
                .device = test_device(), .weights = (enum weight_type)weights, .threads = 2};
            struct run run = run_open(golden_cases[c], &options);
            for (size_t tier = 0; tier < run.model->info.tier_count; tier++) {
                struct trace first = run_tokens(&run, tier, TOKENS_MAX, BODY_AUTO);
                for (size_t i = 0; i < 12; i += is_cpu_tested() ? 1 : 3) {
                    struct trace other = run_tokens(&run, tier, chunks[i % 4], bodies[i / 4]);
                    assert_same_bits(&run, &first, &other);
                    trace_free(&other);
                }
                trace_free(&first);
            }
            run_close(&run);
        }
    }
}

static void threads_change_no_bit(void **state) {
    (void)state;
    if (!is_cpu_tested()) skip();
    for (size_t c = 0; c < GOLDEN_CASES; c++) {
        struct trace first = {0};
        for (size_t threads = 1; threads <= 3; threads++) {
            struct model_options options = {.threads = threads};
            struct run run = run_open(golden_cases[c], &options);
            struct trace trace =
                run_tokens(&run, run.model->info.tier_count > 1, TOKENS_MAX, BODY_AUTO);
            if (threads == 1) {
                first = trace;
            } else {
                assert_same_bits(&run, &first, &trace);
                trace_free(&trace);
            }
            run_close(&run);
        }
        trace_free(&first);
    }
}

/* theta = 0 is the dense model; theta above 1 everywhere leaves the start state. */
static void extremes(void **state) {
    (void)state;
    struct model_options options = {.device = test_device(), .weights = WEIGHTS_F32};
    struct run run = run_open("gqa-relu2", &options);
    struct trace full = run_tokens(&run, 0, TOKENS_MAX, BODY_DENSE);
    size_t cells = run.count * run.model->info.sublayers;
    for (size_t i = 0; i < cells; i++) assert_int_equal(full.run[i], 1);
    int none = model_find_tier(run.model, "none");
    assert_true(none > 0);
    struct trace skipped = run_tokens(&run, (size_t)none, TOKENS_MAX, BODY_AUTO);
    for (size_t i = 0; i < cells; i++) assert_int_equal(skipped.run[i], 0);
    /* Every sub-layer reads the same r, so equal tokens end in equal states, at any position. */
    size_t vocab = run.model->config.vocab;
    for (size_t a = 0; a < run.count; a++) {
        for (size_t b = 0; b < a; b++) {
            if (run.tokens[a] != run.tokens[b]) continue;
            assert_memory_equal(skipped.logits + a * vocab, skipped.logits + b * vocab,
                                vocab * sizeof(float));
        }
    }
    trace_free(&full);
    trace_free(&skipped);
    run_close(&run);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agrees_with_reference),
        cmocka_unit_test(bundled_model_agrees),
        cmocka_unit_test(chunks_and_bodies_change_no_bit),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(extremes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
