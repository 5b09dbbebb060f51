/* Times steps at a few row counts and takes them apart: nothing runs, attention alone, MLP alone.
 *
 * Whole steps, so that weights come from where they come from when it matters: a block timed alone
 * would find its own in the nearest cache. Two rows of the theta table that no tier uses say what
 * runs. */
#include "engine/cost.h"
#include "engine/model.h"

#include <math.h>
#include <stdlib.h>

#define BUDGET_NS     (60 * UINT64_C(1000000)) /* no further row count after that, */
#define POINTS_MIN    3                        /* but these */
#define REPEATS       5
#define REPEATS_NS    (3 * UINT64_C(1000000)) /* no further repetition after that */
#define ROWS_FACTOR   4                        /* between row counts */
#define ATTENDED_ROWS KV_BLOCK_TOKENS
#define ATTENDED_MAX  ((size_t)1024) /* positions before them */

enum { TIER_CHOSEN = TIERS_MAX, TIER_NOTHING };

/* Rows of one sequence at consecutive positions, all arrays made for max_rows. */
struct probe {
    struct model *model;
    struct kv_arena *arena;
    size_t max_rows, blocks, table_blocks;
    int32_t *token, *position, *tier, *slot, *logit_rows, *table;
    float *theta;
};

static void probe_close(struct probe *probe) {
    kv_arena_destroy(probe->model, probe->arena);
    free(probe->token);
    free(probe->theta);
}

static int probe_open(struct probe *probe, struct model *model, struct error *error) {
    const struct model_info *info = &model->info;
    size_t rows = info->max_step_rows < info->context ? info->max_step_rows : info->context;
    size_t table = (info->context + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    *probe = (struct probe){.model = model, .max_rows = rows, .table_blocks = table};
    probe->blocks = (rows + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    probe->token = calloc(5 * rows + table, sizeof *probe->token);
    probe->theta = calloc(info->sublayers, sizeof *probe->theta);
    int result = kv_arena_create(model, probe->blocks, &probe->arena, error);
    if (result == 0 && (!probe->token || !probe->theta)) {
        result = error_set(error, FATHOM_NO_MEMORY, "no memory to time steps of %zu rows", rows);
    }
    if (result != 0) {
        probe_close(probe);
        return result;
    }
    probe->position = probe->token + rows;
    probe->tier = probe->position + rows;
    probe->slot = probe->tier + rows;
    probe->logit_rows = probe->slot + rows;
    probe->table = probe->logit_rows + rows;
    return 0;
}

static void choose_sublayers(struct probe *probe, size_t tier, bool attn, bool mlp) {
    struct residual *residual = probe->model->residual;
    for (size_t l = 0; l < probe->model->info.sublayers; l++) {
        bool runs = l % 2 ? mlp : attn;
        probe->theta[l] = (float)residual->kind->threshold(residual, l, runs ? 0 : INFINITY);
    }
    residual->kind->set_theta(residual, tier, probe->theta);
}

/* The quickest of a few steps of `rows` rows from position `first` on; every `stride`-th row runs
 * what is chosen, the others nothing. */
static double time_step(struct probe *probe, size_t rows, size_t first, size_t logits,
                        size_t stride) {
    for (size_t i = 0; i < rows; i++) {
        probe->token[i] = (int32_t)(i % probe->model->info.vocab);
        probe->position[i] = (int32_t)(first + i);
        probe->tier[i] = i % stride ? TIER_NOTHING : TIER_CHOSEN;
        probe->logit_rows[i] = (int32_t)i;
    }
    /* All positions before the rows read one block that was written: under omit, too, they have K
     * and V. */
    for (size_t i = 0; i < probe->table_blocks; i++) {
        probe->table[i] = first ? 0 : (int32_t)(i % probe->blocks);
    }
    struct batch batch = {
        .rows = rows,
        .token = probe->token,
        .position = probe->position,
        .tier = probe->tier,
        .slot = probe->slot,
        .block_table = probe->table,
        .slots = 1,
        .blocks_per_slot = probe->table_blocks,
        .logit_rows = probe->logit_rows,
        .logit_count = logits,
        .body = BODY_AUTO,
    };
    struct step_result result;
    uint64_t best = UINT64_MAX, begin = time_now_ns(), end = begin;
    for (size_t i = 0; i < REPEATS && (i == 0 || end - begin < REPEATS_NS); i++) {
        uint64_t start = end;
        model_step(probe->model, probe->arena, &batch, &result);
        end = time_now_ns();
        if (end - start < best) best = end - start;
    }
    return (double)best;
}

/* What each part adds; noise must not make a part of more rows cheaper. */
static void measure_point(struct probe *probe, size_t rows) {
    struct cost_model *cost = &probe->model->cost;
    struct cost_point *point = &cost->points[cost->count], before = {0};
    double blocks = (double)cost->blocks;
    if (cost->count > 0) before = point[-1];
    choose_sublayers(probe, TIER_CHOSEN, false, false);
    double step = time_step(probe, rows, 0, 0, 1);
    double head = time_step(probe, rows, 0, rows, 1);
    choose_sublayers(probe, TIER_CHOSEN, true, false);
    double attn = time_step(probe, rows, 0, 0, 1);
    choose_sublayers(probe, TIER_CHOSEN, false, true);
    double mlp = time_step(probe, rows, 0, 0, 1);
    *point = (struct cost_point){
        .rows = rows,
        .step_ns = fmax(step, before.step_ns),
        .attn_ns = fmax((attn - step) / blocks, fmax(before.attn_ns, 1)),
        .mlp_ns = fmax((mlp - step) / blocks, fmax(before.mlp_ns, 1)),
        .head_ns = fmax(head - step, before.head_ns),
    };
    cost->count++;
}

/* Attention of the same rows with many positions before them, to few. */
static double measure_attended(struct probe *probe) {
    size_t rows = ATTENDED_ROWS < probe->max_rows ? ATTENDED_ROWS : probe->max_rows;
    size_t room = probe->model->info.context - rows;
    size_t first = (room < ATTENDED_MAX ? room : ATTENDED_MAX) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    if (first == 0) return 0;
    choose_sublayers(probe, TIER_CHOSEN, true, false);
    double near = INFINITY, far = INFINITY;
    for (size_t i = 0; i < 3; i++) { /* long steps, timed once each: noise would tell */
        near = fmin(near, time_step(probe, rows, 0, 0, 1));
        far = fmin(far, time_step(probe, rows, first, 0, 1));
    }
    double attended = (double)(rows * first * probe->model->cost.blocks);
    return fmax(far - near, 0) / attended;
}

/* MLP of half the rows, packed, to the same number of rows without packing. */
static double measure_gather(struct probe *probe) {
    size_t half = probe->max_rows / 2 < ATTENDED_ROWS ? probe->max_rows / 2 : ATTENDED_ROWS;
    if (half == 0) return 1;
    choose_sublayers(probe, TIER_CHOSEN, false, false);
    double base_half = time_step(probe, half, 0, 0, 1), base = time_step(probe, 2 * half, 0, 0, 1);
    choose_sublayers(probe, TIER_CHOSEN, false, true);
    double dense = time_step(probe, half, 0, 0, 1) - base_half;
    double packed = time_step(probe, 2 * half, 0, 0, 2) - base;
    /* Noise apart it is between free and twice the work, which would be running all rows. */
    return dense > 0 ? fmin(fmax(packed / dense, 1), 2) : 1;
}

int model_measure_cost(struct model *model, struct error *error) {
    struct probe probe;
    if (model->cost.count > 0) return 0;
    int result = probe_open(&probe, model, error);
    if (result != 0) return result;
    uint64_t start = time_now_ns();
    model->cost.blocks = model->info.blocks;
    choose_sublayers(&probe, TIER_NOTHING, false, false);
    choose_sublayers(&probe, TIER_CHOSEN, true, true);
    time_step(&probe, 1, 0, 1, 1); /* pages and caches are touched */
    for (size_t rows = 1; rows <= probe.max_rows; rows *= ROWS_FACTOR) {
        measure_point(&probe, rows);
        uint64_t taken = time_now_ns() - start;
        bool is_over = taken > BUDGET_NS / ROWS_FACTOR && model->cost.count >= POINTS_MIN;
        if (is_over || model->cost.count == COST_POINTS_MAX) break;
    }
    model->cost.attended_ns = measure_attended(&probe);
    model->cost.gather_factor = measure_gather(&probe);
    model->cost.ridge = cost_find_ridge(&model->cost);
    probe_close(&probe);
    return 0;
}

const struct cost_model *model_get_cost(const struct model *model) {
    return &model->cost;
}
