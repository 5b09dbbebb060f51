/* Steps that the CUDA backend has recorded: the same bits as issued one launch at a time, whatever
 * their width and whoever draws. Run with FATHOM_CUDA_LIBRARY; skipped without. */
#include "cuda_runs.h"
#include "tests/step_batch.h"

/* ---- Recorded steps -------------------------------------------------------------------------- */

/* Two sequences side by side: five rows and three, then one each, through several blocks of the
 * cache. */
enum { SEQUENCES = 2, SLOT_BLOCKS = 3, STEPS = 30, GROUPS_MAX = 8 };

struct pair {
    struct model *model;
    struct kv_arena *arena;
    size_t length[SEQUENCES];
    int32_t places[GROUPS_MAX * SEQUENCES];
    const struct draw_batch *draws; /* NULL: nothing is drawn */
};

/* The table is as wide as the longer sequence needs, like the scheduler's. */
static void pair_step(struct pair *pair, size_t step, int body, struct step_result *result) {
    const struct model_info *info = &pair->model->info;
    struct step_batch rows = {0};
    int32_t table[GROUPS_MAX * SEQUENCES * SLOT_BLOCKS];
    size_t groups = info->kv_groups, per_slot = pair->length[0] / KV_BLOCK_TOKENS + 1;
    for (size_t s = 0; s < SEQUENCES; s++) {
        for (size_t i = 0; i < (step ? 1 : 5 - 2 * s); i++) {
            int32_t token = (int32_t)((7 * step + rows.rows + 3) % info->vocab);
            size_t tier = (step / 3 + rows.rows) % info->tier_count;
            step_batch_add(&rows, token, pair->length[s]++, tier, s);
        }
        step_batch_want(&rows);
    }
    for (size_t i = 0; i < groups * SEQUENCES * per_slot; i++) {
        size_t of_all = i / per_slot * SLOT_BLOCKS + i % per_slot;
        table[i] = (int32_t)(groups * SEQUENCES * SLOT_BLOCKS - 1 - of_all);
    }
    struct batch batch = step_batch_view(&rows);
    batch.block_table = table;
    batch.places = pair->places;
    batch.slots = SEQUENCES;
    batch.blocks_per_slot = per_slot;
    batch.draws = pair->draws;
    batch.body = body;
    model_step(pair->model, pair->arena, &batch, result);
    for (size_t i = 0; i < groups * batch.rows; i++) {
        size_t group = i / batch.rows, row = i % batch.rows;
        bool runs = result->run[2 * group * info->max_step_rows + row];
        pair->places[group * SEQUENCES + (size_t)batch.slot[row]] += runs;
    }
}

struct story {
    float *logits; /* [STEPS, SEQUENCES, vocab] */
    size_t bytes, graphs;
};

/* drawn: [STEPS, SEQUENCES], with draws. */
static struct story pair_run(const struct emulation *emulation, const char *name,
                             enum weight_type weights, int body, const struct draw_batch *draws,
                             struct draw_outcome *drawn) {
    char path[512];
    struct error error = {0};
    struct model_options options = {.device = "cuda", .weights = weights};
    snprintf(path, sizeof path, "%s%s", GOLDEN_FOLDER, name);
    struct pair pair = {.model = golden_model(path, &options), .draws = draws};
    const struct model_info *info = &pair.model->info;
    size_t blocks = info->kv_groups * SEQUENCES * SLOT_BLOCKS;
    assert_in_range(info->kv_groups, 1, GROUPS_MAX);
    must(kv_arena_create(pair.model, blocks, &pair.arena, &error), &error);
    size_t floats = SEQUENCES * info->vocab;
    struct story story = {.logits = calloc(STEPS * floats, sizeof *story.logits),
                          .bytes = STEPS * floats * sizeof *story.logits};
    assert_non_null(story.logits);
    if (emulation->clear) emulation->clear();
    for (size_t step = 0; step < STEPS; step++) {
        struct step_result result;
        pair_step(&pair, step, body, &result);
        memcpy(story.logits + step * floats, result.logits, floats * sizeof *story.logits);
        if (draws) memcpy(drawn + step * SEQUENCES, result.drawn, SEQUENCES * sizeof *drawn);
        assert_int_equal(result.body_none + result.body_dense + result.body_gather,
                         info->sublayers);
    }
    if (emulation->get) story.graphs = emulation->get().graphs;
    kv_arena_destroy(pair.model, pair.arena);
    model_destroy(pair.model);
    return story;
}

/* Issued launch by launch, recorded, recorded without branches, or refused by the driver. On a real
 * device too: rows are powers of two, so that products have one shape whichever way. */
static void recording_changes_no_bit(void **state) {
    (void)state;
    static const struct {
        const char *model;
        enum weight_type weights;
        int body;
        size_t lacks; /* drivers that are tried */
    } cases[] = {{"mha-silu", WEIGHTS_BF16, BODY_AUTO, 3},
                 {"gqa-relu2", WEIGHTS_F32, BODY_AUTO, 3},
                 {"gqa-relu2", WEIGHTS_BF16, BODY_DENSE, 3},
                 {"sharded-omit", WEIGHTS_BF16, BODY_AUTO, 3},
                 {"mqa-gelu-omit", WEIGHTS_F32, BODY_DENSE, 3},
                 {"mqa-gelu-omit", WEIGHTS_F16, BODY_AUTO, 1},
                 {"odd-shapes", WEIGHTS_INT8, BODY_AUTO, 1},
                 {"llama/biases", WEIGHTS_BF16, BODY_AUTO, 1},
                 {"llama/qwen3", WEIGHTS_F16, BODY_AUTO, 1},
                 {"llama/qwen2", WEIGHTS_INT8, BODY_DENSE, 1}};
    static const enum emulation_lack lacks[] = {LACKS_NOTHING, LACKS_BRANCHES, LACKS_GRAPHS};
    struct emulation emulation = emulation_find();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setenv("FATHOM_CUDA_GRAPHS", "0", 1);
        struct story issued = pair_run(&emulation, cases[i].model, cases[i].weights, cases[i].body,
                                       NULL, NULL);
        unsetenv("FATHOM_CUDA_GRAPHS");
        assert_int_equal(issued.graphs, 0);
        for (size_t j = 0; j < (emulation.set_lack ? cases[i].lacks : 1); j++) {
            if (emulation.set_lack) emulation.set_lack(lacks[j]);
            struct story other =
                pair_run(&emulation, cases[i].model, cases[i].weights, cases[i].body, NULL, NULL);
            if (emulation.set_lack) {
                emulation.set_lack(LACKS_NOTHING);
                /* Two shapes: those of the first step, and those of all others. */
                assert_int_equal(other.graphs, lacks[j] == LACKS_GRAPHS ? 0 : STEPS - 2);
            }
            assert_int_equal(other.bytes, issued.bytes);
            assert_memory_equal(other.logits, issued.logits, issued.bytes);
            free(other.logits);
        }
        free(issued.logits);
    }
}

/* ---- Wide steps ------------------------------------------------------------------------------ */

/* Six prompts of sixty tokens, read anew in every step, at tiers that take turns: 360 rows, of
 * which more or fewer run. Every other step wants the logits of all rows. */
enum { WIDE_SLOTS = 6, WIDE_LENGTH = 60, WIDE_ROWS = WIDE_SLOTS * WIDE_LENGTH, WIDE_STEPS = 8 };
enum { WIDE_BLOCKS = (WIDE_LENGTH + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS };

struct wide_story {
    float *logits; /* [WIDE_STEPS, WIDE_ROWS, vocab] */
    uint8_t *run;  /* [WIDE_STEPS, sublayers, max step rows] */
    size_t logits_bytes, run_bytes;
    struct emulation_counters counters[WIDE_STEPS];
};

static void wide_step(struct model *model, struct kv_arena *arena, size_t step,
                      struct step_result *result) {
    const struct model_info *info = &model->info;
    struct step_batch rows = {0};
    int32_t table[GROUPS_MAX * WIDE_SLOTS * WIDE_BLOCKS], places[GROUPS_MAX * WIDE_SLOTS] = {0};
    for (size_t i = 0; i < info->kv_groups * WIDE_SLOTS * WIDE_BLOCKS; i++) table[i] = (int32_t)i;
    for (size_t slot = 0; slot < WIDE_SLOTS; slot++) {
        for (size_t i = 0; i < WIDE_LENGTH; i++) {
            int32_t token = (int32_t)((slot * 31 + i * 7 + step) % info->vocab);
            size_t turn = step / 2 % (info->tier_count + 1); /* the last: all tiers side by side */
            size_t tier = turn < info->tier_count ? turn : (i + slot) % info->tier_count;
            step_batch_add(&rows, token, i, tier, slot);
            if (step % 2 == 0 || i + 1 == WIDE_LENGTH) step_batch_want(&rows);
        }
    }
    struct batch batch = step_batch_view(&rows);
    batch.block_table = table;
    batch.places = places;
    batch.slots = WIDE_SLOTS;
    batch.blocks_per_slot = WIDE_BLOCKS;
    model_step(model, arena, &batch, result);
}

static struct wide_story wide_run(const struct emulation *emulation, const char *name,
                                  enum weight_type weights) {
    char path[512];
    struct error error = {0};
    struct model_options options = {.device = "cuda", .weights = weights, .max_step_rows = 400};
    snprintf(path, sizeof path, "%s%s", GOLDEN_FOLDER, name);
    struct model *model = golden_model(path, &options);
    const struct model_info *info = &model->info;
    struct kv_arena *arena;
    assert_in_range(info->kv_groups, 1, GROUPS_MAX);
    size_t blocks = info->kv_groups * WIDE_SLOTS * WIDE_BLOCKS;
    must(kv_arena_create(model, blocks, &arena, &error), &error);
    size_t floats = WIDE_ROWS * info->vocab, bytes = info->sublayers * info->max_step_rows;
    struct wide_story story = {.logits_bytes = WIDE_STEPS * floats * sizeof(float),
                               .run_bytes = WIDE_STEPS * bytes};
    story.logits = calloc(1, story.logits_bytes);
    story.run = calloc(1, story.run_bytes);
    assert_true(story.logits && story.run);
    for (size_t step = 0; step < WIDE_STEPS; step++) {
        struct step_result result;
        emulation->clear();
        wide_step(model, arena, step, &result);
        story.counters[step] = emulation->get();
        size_t wanted = step % 2 == 0 ? floats : WIDE_SLOTS * info->vocab;
        memcpy(story.logits + step * floats, result.logits, wanted * sizeof(float));
        for (size_t l = 0; l < info->sublayers; l++)
            memcpy(story.run + step * bytes + l * info->max_step_rows,
                   result.run + l * info->max_step_rows, WIDE_ROWS);
    }
    kv_arena_destroy(model, arena);
    model_destroy(model);
    return story;
}

static void wide_story_free(struct wide_story *story) {
    free(story->logits);
    free(story->run);
}

/* Steps of more rows than a product is free for ask the host nothing once they are recorded, and
 * make products over about as many rows as run. */
static void wide_steps_are_recorded(void **state) {
    (void)state;
    static const struct {
        const char *model;
        enum weight_type weights;
    } cases[] = {
        {"mha-silu", WEIGHTS_BF16}, {"gqa-relu2", WEIGHTS_F32}, {"sharded-omit", WEIGHTS_BF16}};
    static const enum emulation_lack lacks[] = {LACKS_NOTHING, LACKS_BRANCHES};
    struct emulation emulation = emulation_open(); /* its products are the same at any size */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setenv("FATHOM_CUDA_GRAPHS", "0", 1);
        struct wide_story issued = wide_run(&emulation, cases[i].model, cases[i].weights);
        unsetenv("FATHOM_CUDA_GRAPHS");
        size_t lack_count = i == 0 ? sizeof lacks / sizeof *lacks : 1;
        for (size_t j = 0; j < lack_count; j++) {
            emulation.set_lack(lacks[j]);
            struct wide_story other = wide_run(&emulation, cases[i].model, cases[i].weights);
            emulation.set_lack(LACKS_NOTHING);
            assert_memory_equal(other.run, issued.run, issued.run_bytes);
            assert_memory_equal(other.logits, issued.logits, issued.logits_bytes);
            /* Two shapes: with few logits and with all; each is recorded when it comes again. */
            for (size_t step = 0; step < WIDE_STEPS; step++) {
                bool is_recorded = lacks[j] == LACKS_NOTHING && step >= 2;
                assert_int_equal(other.counters[step].graphs, is_recorded);
                if (is_recorded) assert_int_equal(other.counters[step].waits, 1);
                if (!is_recorded) assert_true(other.counters[step].waits > 1);
                assert_true(issued.counters[step].waits > 1);
                if (is_recorded)
                    assert_true(other.counters[step].bytes < issued.counters[step].bytes * 5 / 4);
            }
            wide_story_free(&other);
        }
        wide_story_free(&issued);
    }
}

/* ---- Drawing --------------------------------------------------------------------------------- */

/* Of two rows the device draws one: the other's logits come as they are. */
static void device_draws_beside_the_host(void **state) {
    (void)state;
    struct emulation emulation = emulation_find();
    struct draw_batch draws;
    struct error error = {0};
    struct story all = pair_run(&emulation, "gqa-relu2", WEIGHTS_F32, BODY_AUTO, NULL, NULL);
    must(draw_batch_create(&draws, SEQUENCES, &error), &error);
    for (size_t drawn = 0; drawn < SEQUENCES; drawn++) {
        struct draw_outcome outcomes[STEPS * SEQUENCES];
        draw_batch_clear(&draws, SEQUENCES);
        draws.rows[drawn] = (struct draw_row){.kind = DRAW_TOKEN};
        struct story other =
            pair_run(&emulation, "gqa-relu2", WEIGHTS_F32, BODY_AUTO, &draws, outcomes);
        size_t vocab = all.bytes / sizeof(float) / STEPS / SEQUENCES;
        for (size_t i = 0; i < STEPS * SEQUENCES; i++) {
            const float *logits = all.logits + i * vocab;
            if (i % SEQUENCES != drawn) {
                assert_memory_equal(other.logits + i * vocab, logits, vocab * sizeof *logits);
                continue;
            }
            assert_in_range(outcomes[i].token, 0, vocab - 1);
            for (size_t v = 0; v < vocab; v++) assert_true(logits[v] <= logits[outcomes[i].token]);
        }
        free(other.logits);
    }
    draw_batch_destroy(&draws);
    free(all.logits);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recording_changes_no_bit),
        cmocka_unit_test(wide_steps_are_recorded),
        cmocka_unit_test(device_draws_beside_the_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
