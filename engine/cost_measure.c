/* Times steps at a few row counts and takes them apart: nothing runs, attention alone, MLP alone.
 *
 * Whole steps, so that weights come from where they come from when it matters: a block timed alone
 * would find its own in the nearest cache. Two rows of the theta table that no tier uses say what
 * runs. Every step is timed once in each of a few rounds, if there is time for more than one, and
 * the quickest counts: what disturbs the machine for a moment disturbs one round. */
#include "engine/cost.h"
#include "engine/cost_cache.h"
#include "engine/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

/* Of what the shots take, which is not all: a device may have to record steps first. */
#define ROUNDS_MAX      6
#define ROUNDS_NS       280e6 /* no round that would end after that, but the first */
#define POINTS_MIN      3
#define POINTS_WANT     6 /* up to here no point that would end after */
#define POINTS_NS       220e6
#define POINT_MAX_NS    15e6         /* and beyond, while a point takes less than this */
#define SLOW_POINT_NS   15e6         /* from here on points are wider apart */
#define FAR_ROWS        ((size_t)16) /* of the far shot, at most */
#define ATTENDED_BLOCKS ((size_t)64) /* of positions before them */
#define RECORDING_STEPS 2 /* of a shape, before a device that records steps runs the record */

enum { TIER_CHOSEN = TIERS_MAX, TIER_NOTHING };

/* A step to be timed: rows first .. first + rows - 1 of one sequence, of which every `stride`-th
 * runs the kinds of sub-layers that are named, and the others nothing. */
struct shot {
    size_t rows, first, logits, stride; /* 0 rows: nothing to be timed */
    bool attn, mlp;
    double ns; /* the quickest so far */
};

/* Of every point these four, and at the end two that compare with one of them. */
enum { SHOT_STEP, SHOT_HEAD, SHOT_ATTN, SHOT_MLP, POINT_SHOTS };
#define SHOTS_MAX (POINT_SHOTS * COST_POINTS_MAX + 2)

/* Rows of one sequence at consecutive positions, all arrays made for max_rows. */
struct probe {
    struct model *model;
    struct kv_arena *arena;
    size_t max_rows, blocks, table_blocks;
    int32_t *token, *position, *tier, *slot, *logit_rows;
    int32_t *table, *places; /* [kv_groups, table_blocks], [kv_groups] */
    struct draw_batch draws; /* the best of each row: a device that draws does so */
    float *theta;
};

static void probe_close(struct probe *probe) {
    kv_arena_destroy(probe->model, probe->arena);
    free(probe->token);
    free(probe->theta);
    draw_batch_destroy(&probe->draws);
}

static int probe_open(struct probe *probe, struct model *model, struct error *error) {
    const struct model_info *info = &model->info;
    size_t rows = info->max_step_rows < info->context ? info->max_step_rows : info->context;
    size_t table = (info->context + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    *probe = (struct probe){.model = model, .max_rows = rows, .table_blocks = table};
    probe->blocks = (rows + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    probe->token = calloc(5 * rows + (table + 1) * info->kv_groups, sizeof *probe->token);
    probe->theta = calloc(info->sublayers, sizeof *probe->theta);
    probe->draws.is_plain = true;
    int result = draw_batch_create(&probe->draws, rows, error);
    if (result == 0)
        result = kv_arena_create(model, probe->blocks * info->kv_groups, &probe->arena, error);
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
    probe->places = probe->table + table * info->kv_groups;
    return 0;
}

static void choose_sublayers(struct probe *probe, size_t tier, bool attn, bool mlp) {
    struct residual *residual = probe->model->residual;
    if (!residual_skips(residual)) return;
    for (size_t l = 0; l < probe->model->info.sublayers; l++) {
        bool runs = l % 2 ? mlp : attn;
        probe->theta[l] = (float)residual->kind->threshold(residual, l, runs ? 0 : INFINITY);
    }
    residual->kind->set_theta(residual, tier, probe->theta);
}

static void fill_rows(struct probe *probe, const struct shot *shot) {
    for (size_t i = 0; i < shot->rows; i++) {
        probe->token[i] = (int32_t)(i % probe->model->info.vocab);
        probe->position[i] = (int32_t)(shot->first + i);
        probe->tier[i] = i % shot->stride ? TIER_NOTHING : TIER_CHOSEN;
        probe->logit_rows[i] = (int32_t)i;
    }
    /* All positions before the rows read one block, which was written by shots without any. */
    size_t groups = probe->model->info.kv_groups;
    for (size_t group = 0; group < groups; group++) {
        for (size_t i = 0; i < probe->table_blocks; i++) {
            size_t block = group * probe->blocks + (shot->first ? 0 : i % probe->blocks);
            probe->table[group * probe->table_blocks + i] = (int32_t)block;
        }
        probe->places[group] = (int32_t)shot->first;
    }
}

/* On a device with a clock, its time. Else wall time; where this thread had to give its processor
 * to somebody else, the time that it had one, which is less. */
static double time_step(struct probe *probe, const struct batch *batch) {
    struct device *device = probe->model->device;
    struct rusage before, after;
    struct timespec cpu_before, cpu_after;
    struct step_result result;
    if (device->kernels->finish_ns) {
        uint64_t begin = device->kernels->finish_ns(device);
        model_step(probe->model, probe->arena, batch, &result);
        return (double)(device->kernels->finish_ns(device) - begin);
    }
    getrusage(RUSAGE_THREAD, &before);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu_before);
    uint64_t start = time_now_ns();
    model_step(probe->model, probe->arena, batch, &result);
    double wall = (double)(time_now_ns() - start);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu_after);
    getrusage(RUSAGE_THREAD, &after);
    if (after.ru_nivcsw == before.ru_nivcsw) return wall;
    double cpu = (double)(cpu_after.tv_sec - cpu_before.tv_sec) * 1e9 +
                 (double)(cpu_after.tv_nsec - cpu_before.tv_nsec);
    return fmin(wall, cpu);
}

static void take_shot(struct probe *probe, struct shot *shot) {
    if (shot->rows == 0) return;
    choose_sublayers(probe, TIER_CHOSEN, shot->attn, shot->mlp);
    fill_rows(probe, shot);
    struct batch batch = {
        .rows = shot->rows,
        .token = probe->token,
        .position = probe->position,
        .tier = probe->tier,
        .slot = probe->slot,
        .block_table = probe->table,
        .places = probe->places,
        .slots = 1,
        .blocks_per_slot = probe->table_blocks,
        .logit_rows = probe->logit_rows,
        .logit_count = shot->logits,
        .draws = &probe->draws,
        .body = BODY_AUTO,
    };
    bool records = probe->model->device->kernels->step_begin != NULL;
    for (int i = 0; records && shot->ns == 0 && i < RECORDING_STEPS; i++) time_step(probe, &batch);
    double ns = time_step(probe, &batch);
    if (shot->ns == 0 || ns < shot->ns) shot->ns = ns;
}

static double sum_shots(const struct shot *shots, size_t count) {
    double ns = 0;
    for (size_t i = 0; i < count; i++) ns += shots[i].ns;
    return ns;
}

/* The first round: points at `factor` times the rows each, while they are quick. Where nothing is
 * skipped, a step is always the whole. Returns how many. */
static size_t take_points(struct probe *probe, struct shot *shots, bool skips, size_t *factor) {
    size_t count = 0;
    double all = 0;
    *factor = 2;
    for (size_t rows = 1; rows <= probe->max_rows && count < COST_POINTS_MAX; rows *= *factor) {
        struct shot *point = shots + POINT_SHOTS * count++;
        size_t parts = skips ? rows : 0;
        point[SHOT_STEP] = (struct shot){.rows = rows, .stride = 1};
        point[SHOT_HEAD] = (struct shot){.rows = rows, .stride = 1, .logits = rows};
        point[SHOT_ATTN] = (struct shot){.rows = parts, .stride = 1, .attn = true};
        point[SHOT_MLP] = (struct shot){.rows = parts, .stride = 1, .mlp = true};
        for (size_t i = 0; i < POINT_SHOTS; i++) take_shot(probe, &point[i]);
        double taken = sum_shots(point, POINT_SHOTS);
        all += taken;
        if (count == 1 && taken > SLOW_POINT_NS && probe->max_rows >= 16) *factor = 4;
        if (count < POINTS_MIN) continue;
        if (all + (double)*factor * taken > POINTS_NS) break;
        if (count >= POINTS_WANT && taken > POINT_MAX_NS) break;
    }
    return count;
}

/* What each part adds; noise must not make a part of more rows cheaper. */
static void fit_point(struct cost_model *cost, const struct shot *shots, bool skips) {
    struct cost_point *point = &cost->points[cost->count], before = {0};
    double blocks = (double)cost->blocks, step = shots[SHOT_STEP].ns;
    if (cost->count > 0) before = point[-1];
    double attn = shots[SHOT_ATTN].ns, mlp = shots[SHOT_MLP].ns, head = shots[SHOT_HEAD].ns - step;
    if (!skips) {
        /* Only the sum of its parts will be asked for. */
        attn = mlp = step / 2;
        step = 0;
    }
    *point = (struct cost_point){
        .rows = shots->rows,
        .step_ns = fmax(step, before.step_ns),
        .attn_ns = fmax((attn - step) / blocks, fmax(before.attn_ns, 1)),
        .mlp_ns = fmax((mlp - step) / blocks, fmax(before.mlp_ns, 1)),
        .head_ns = fmax(head, before.head_ns),
    };
    cost->count++;
}

/* Attention of the same rows with many positions before them, to few. */
static double fit_attended(const struct cost_model *cost, const struct shot *far,
                           const struct shot *near) {
    double attended = (double)(far->rows * far->first * cost->blocks);
    return attended > 0 ? fmax(far->ns - near->ns, 0) / attended : 0;
}

/* MLP of some rows, packed, to the same number of rows without packing. Noise apart it is between
 * free and twice the work: of every other row, that would be running all. */
static double fit_gather(const struct shot *packed, const struct shot *all,
                         const struct shot *few) {
    double dense = few[SHOT_MLP].ns - few[SHOT_STEP].ns;
    return dense > 0 ? fmin(fmax((packed->ns - all[SHOT_STEP].ns) / dense, 1), 2) : 1;
}

static void measure(struct probe *probe) {
    struct cost_model *cost = &probe->model->cost;
    struct shot shots[SHOTS_MAX];
    bool skips = residual_skips(probe->model->residual);
    choose_sublayers(probe, TIER_NOTHING, false, false);
    take_shot(probe, &(struct shot){.rows = 1, .stride = 1, .logits = 1, .attn = 1, .mlp = 1});
    size_t factor, points = take_points(probe, shots, skips, &factor), count = POINT_SHOTS * points;

    /* 32 rows of which half run, and 16 rows far into a context: or as many as were timed. Rows of
     * one sequence share the reading of its keys: by fewer rows, chunks of prompts would look twice
     * as dear as they are. */
    size_t whole = points > 6 ? 5 : points - 1, before = whole > 0 ? whole - 1 : 0, chunk = whole;
    while (shots[POINT_SHOTS * chunk].rows > FAR_ROWS) chunk--;
    const struct shot *all_rows = shots + POINT_SHOTS * whole;
    const struct shot *few_rows = shots + POINT_SHOTS * before;
    const struct shot *near = shots + POINT_SHOTS * chunk;
    struct shot *packed = &shots[count++], *far = &shots[count++];
    size_t room = (probe->model->info.context - near->rows) / KV_BLOCK_TOKENS;
    *packed = (struct shot){.rows = skips ? all_rows->rows : 0, .stride = factor, .mlp = true};
    *far = (struct shot){.rows = near->rows, .stride = 1, .attn = true};
    far->first = KV_BLOCK_TOKENS * (room < ATTENDED_BLOCKS ? room : ATTENDED_BLOCKS);
    take_shot(probe, packed);
    take_shot(probe, far);

    double taken = sum_shots(shots, count);
    for (int round = 1; round < ROUNDS_MAX && (round + 1) * taken <= ROUNDS_NS; round++) {
        for (size_t i = 0; i < count; i++) take_shot(probe, &shots[i]);
    }
    for (size_t i = 0; i < points; i++) fit_point(cost, shots + POINT_SHOTS * i, skips);
    cost->attended_ns = fit_attended(cost, far, &near[skips ? SHOT_ATTN : SHOT_STEP]);
    cost->gather_factor = skips ? fit_gather(packed, all_rows, few_rows) : 1;
    cost->ridge = cost_find_ridge(cost);
}

static int measure_anew(struct model *model, struct error *error) {
    struct probe probe;
    int result = probe_open(&probe, model, error);
    if (result != 0) return result;
    model->cost = (struct cost_model){.blocks = model->info.blocks};
    measure(&probe);
    probe_close(&probe);
    return 0;
}

int model_measure_cost(struct model *model, struct error *error) {
    char *note = model->cost_note;
    struct error cache = {0};
    if (model->cost.count > 0) return 0;
    int found = cost_cache_read(model, &model->cost, &cache);
    if (found == 0) {
        snprintf(note, sizeof model->cost_note, "read from the cache in %s", model->cost_cache);
        return 0;
    }
    uint64_t start = time_now_ns();
    int result = measure_anew(model, error);
    if (result != 0) return result;
    double ms = (double)(time_now_ns() - start) / 1e6;
    snprintf(note, sizeof model->cost_note, "measured in %.0f ms", ms);
    if (found != FATHOM_NOT_FOUND) { /* a file that cannot be used is worth a word */
        snprintf(note, sizeof model->cost_note, "measured in %.0f ms: %s", ms, cache.message);
    }
    if (cost_cache_write(model, &model->cost, &cache) != 0) {
        size_t used = strlen(note);
        snprintf(note + used, sizeof model->cost_note - used, "; not kept: %s", cache.message);
    }
    return 0;
}

const struct cost_model *model_get_cost(const struct model *model) {
    return &model->cost;
}

const char *model_get_cost_note(const struct model *model) {
    return model->cost_note;
}
