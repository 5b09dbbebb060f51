/* What is special to the CUDA backend, on its emulation: bf16 throughout, launches, and bytes. Run with
 * FATHOM_CUDA_LIBRARY; skipped without. */
#include "golden.h"
#include "test_device.h"

#include <dlfcn.h>
#include <math.h>

#define BF16_TOLERANCE 2e-2 /* of the length of all logits; of a mix */
#define ROW_TOLERANCE  3e-2 /* of the length of one row of them */

/* As in kernels/emulation/emulation.h. */
struct emulation_counters {
    size_t launches, products, bytes, graphs;
};

struct emulation {
    struct emulation_counters (*get)(void);
    void (*clear)(void);
    void (*set_schedule)(uint64_t seed);
};

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    assert_non_null(found);
    return found;
}

static struct emulation emulation_open(void) {
    struct emulation emulation;
    const char *file = getenv("FATHOM_CUDA_LIBRARY");
    if (is_cpu_tested() || !file) skip();
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    *(void **)&emulation.get = symbol(library, "emulation_get_counters");
    *(void **)&emulation.clear = symbol(library, "emulation_clear_counters");
    *(void **)&emulation.set_schedule = symbol(library, "emulation_set_schedule");
    return emulation;
}

struct run {
    struct model *model;
    struct window_runner runner;
    int32_t tokens[128];
    size_t count;
    struct safetensors expected;
};

static void run_open(struct run *run, const char *name) {
    char path[512];
    struct error error = {0};
    struct model_options options = {.device = "cuda", .weights = WEIGHTS_BF16};
    snprintf(path, sizeof path, "%s%s", GOLDEN_FOLDER, name);
    run->model = golden_model(path, &options);
    must(window_runner_create(run->model, 0, &run->runner, &error), &error);
    golden_expected(name, &run->expected);
    run->count = golden_count(&run->expected, "tokens");
    assert_in_range(run->count, 1, 128);
    golden_copy(&run->expected, "tokens", run->tokens, run->count * sizeof(int32_t));
}

static void run_close(struct run *run) {
    safetensors_close(&run->expected);
    window_runner_destroy(&run->runner);
    model_destroy(run->model);
}

/* ---- bf16 against the reference in fp32 ------------------------------------------------------ */

static void compare_logits(const struct run *run, const float *got, const float *want,
                           const char *name, double *worst) {
    size_t vocab = run->model->config.vocab;
    double all_off = 0, all_length = 0;
    for (size_t row = 0; row < run->count; row++) {
        double off = 0, length = 0;
        for (size_t v = 0; v < vocab; v++) {
            double a = (double)got[row * vocab + v], b = (double)want[row * vocab + v];
            off += (a - b) * (a - b);
            length += b * b;
        }
        if (!(sqrt(off) <= ROW_TOLERANCE * sqrt(length)))
            fail_msg("%s: row %zu is off by %g of its length", name, row, sqrt(off / length));
        all_off += off;
        all_length += length;
    }
    *worst = fmax(*worst, sqrt(all_off / all_length));
    if (!(sqrt(all_off) <= BF16_TOLERANCE * sqrt(all_length)))
        fail_msg("%s: logits are off by %g of their length", name, sqrt(all_off / all_length));
}

/* Every sub-layer runs, so that no decision near its threshold can part the two. */
static void full_depth_agrees(void **state) {
    (void)state;
    double worst = 0;
    emulation_open();
    for (size_t c = 0; c < GOLDEN_CASES; c++) {
        struct run run;
        struct step_result result;
        run_open(&run, golden_cases[c]);
        size_t vocab = run.model->config.vocab, sublayers = run.model->info.sublayers;
        float *logits = calloc(run.count * vocab, sizeof *logits);
        float *mix = calloc(run.count * sublayers, sizeof *mix);
        assert_true(logits && mix);
        golden_copy(&run.expected, "logits.full", logits, run.count * vocab * sizeof *logits);
        golden_copy(&run.expected, "mix.full", mix, run.count * sublayers * sizeof *mix);
        window_runner_step(&run.runner, run.tokens, 0, run.count, 0, true, &result);
        compare_logits(&run, result.logits, logits, golden_cases[c], &worst);
        for (size_t i = 0; i < run.count * sublayers; i++) {
            size_t at = i / run.count * run.model->info.max_step_rows + i % run.count;
            assert_true(fabs((double)result.mix[at] - (double)mix[i]) < BF16_TOLERANCE);
            assert_int_equal(result.run[at], 1);
        }
        free(logits);
        free(mix);
        run_close(&run);
    }
    print_message("logits are off by %.4f of their length at most\n", worst);
}

/* Decisions follow the reference's until one is taken so near to its threshold that bf16 may decide
 * otherwise; what follows may differ then. */
static void decisions_agree(void **state) {
    (void)state;
    emulation_open();
    size_t compared = 0;
    for (size_t c = 0; c < GOLDEN_CASES; c++) {
        struct run run;
        run_open(&run, golden_cases[c]);
        const struct depth_table *depth = checkpoint_depth(run.model->checkpoint);
        size_t cells = run.count * run.model->info.sublayers;
        for (size_t tier = 1; tier < depth->tier_count; tier++) {
            struct step_result result;
            char name[64];
            float mix[128 * 64];
            assert_in_range(cells, 1, sizeof mix / sizeof *mix);
            snprintf(name, sizeof name, "mix.%s", depth->tiers[tier].name);
            golden_copy(&run.expected, name, mix, cells * sizeof *mix);
            window_runner_step(&run.runner, run.tokens, 0, run.count, tier, false, &result);
            for (size_t i = 0; i < cells; i++, compared++) {
                size_t l = i / run.count, at = l * run.model->info.max_step_rows + i % run.count;
                double theta = (double)depth->theta[tier * depth->sublayers + l];
                double distance = fabs((double)mix[i] - theta);
                bool runs = !((double)mix[i] < theta);
                if (result.run[at] == runs) continue;
                if (distance < BF16_TOLERANCE) break;
                fail_msg("%s %s: sub-layer %zu row %zu decides %d at mix %g, theta %g",
                         golden_cases[c], depth->tiers[tier].name, l, i % run.count, result.run[at],
                         (double)mix[i], theta);
            }
        }
        run_close(&run);
    }
    assert_true(compared > 1000);
}

/* Warps, blocks and lanes in any order: the same bits. */
static void schedules_change_no_bit(void **state) {
    (void)state;
    struct emulation emulation = emulation_open();
    struct run run;
    run_open(&run, "gqa-relu2");
    size_t bytes = run.count * run.model->config.vocab * sizeof(float);
    float *first = malloc(bytes);
    assert_non_null(first);
    for (uint64_t seed = 0; seed < 4; seed++) {
        struct step_result result;
        emulation.set_schedule(seed * 1009);
        window_runner_step(&run.runner, run.tokens, 0, run.count, 1, true, &result);
        if (seed == 0)
            memcpy(first, result.logits, bytes);
        else
            assert_memory_equal(result.logits, first, bytes);
    }
    emulation.set_schedule(0);
    free(first);
    run_close(&run);
}

/* ---- Launches and bytes ---------------------------------------------------------------------- */

/* kernels/cuda/README.md: 12 launches per routed block, 1 to begin, 3 for the head. */
static void launches_are_as_planned(void **state) {
    (void)state;
    struct emulation emulation = emulation_open();
    static const size_t row_counts[] = {1, 5, 24};
    for (size_t i = 0; i < 3; i++) {
        struct run run;
        struct step_result result;
        run_open(&run, "mha-silu");
        assert_int_equal(run.model->info.kv_policy, KV_COMPUTE);
        run.runner.body = BODY_GATHER;
        emulation.clear();
        window_runner_step(&run.runner, run.tokens, 0, row_counts[i], 0, true, &result);
        struct emulation_counters counters = emulation.get();
        size_t blocks = run.model->config.blocks;
        assert_int_equal(result.body_gather, 2 * blocks);
        assert_int_equal(counters.launches, 1 + 12 * blocks + 3);
        assert_int_equal(counters.products, 5 * blocks + 1);
        run_close(&run);
    }
}

/* A sub-layer that nobody runs is not computed, and its weights are not read. */
static void skips_read_nothing(void **state) {
    (void)state;
    struct emulation emulation = emulation_open();
    struct run run;
    struct step_result result;
    run_open(&run, "gqa-relu2");
    int none = model_find_tier(run.model, "none");
    assert_true(none > 0);
    const struct config *config = &run.model->config;
    size_t blocks = config->blocks;
    size_t skipped = 2 * (2 * config->hidden * config->heads * config->head_size +
                          2 * config->hidden * config->inner); /* Q, O, up and down in bf16 */
    emulation.clear();
    window_runner_step(&run.runner, run.tokens, 0, 8, 0, false, &result);
    struct emulation_counters full = emulation.get();
    emulation.clear();
    window_runner_step(&run.runner, run.tokens, 0, 8, (size_t)none, false, &result);
    struct emulation_counters empty = emulation.get();
    assert_int_equal(result.body_none, 2 * blocks);
    assert_int_equal(empty.products, blocks); /* K and V */
    assert_true(full.bytes > empty.bytes + blocks * skipped);
    run_close(&run);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_depth_agrees),       cmocka_unit_test(decisions_agree),
        cmocka_unit_test(schedules_change_no_bit), cmocka_unit_test(launches_are_as_planned),
        cmocka_unit_test(skips_read_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
