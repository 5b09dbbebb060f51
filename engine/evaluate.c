/* Perplexity, skip rates and executed FLOPs of a text at one tier. */
#include "engine/measure.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* -ln softmax(logits)[target], with the sum in double. */
static double negative_log_likelihood(const float *logits, size_t vocab, int32_t target) {
    float top = logits[0];
    for (size_t v = 1; v < vocab; v++) top = logits[v] > top ? logits[v] : top;
    double sum = 0;
    for (size_t v = 0; v < vocab; v++) sum += (double)expf(logits[v] - top);
    return log(sum) + (double)top - (double)logits[target];
}

/* ---- Windows --------------------------------------------------------------------------------- */

int window_runner_create(struct model *model, size_t window, struct window_runner *runner,
                         struct error *error) {
    memset(runner, 0, sizeof *runner);
    runner->model = model;
    runner->window = window ? window : model->info.context;
    if (runner->window < 2 || runner->window > model->info.context) {
        return error_set(error, FATHOM_INVALID, "window of %zu tokens; the model allows 2 to %zu",
                         runner->window, model->info.context);
    }
    size_t rows = model->info.max_step_rows;
    runner->blocks = (runner->window + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    size_t groups = model->info.kv_groups, blocks = groups * runner->blocks;
    runner->ids = calloc(5 * rows + blocks + groups, sizeof *runner->ids);
    if (!runner->ids) return error_set(error, FATHOM_NO_MEMORY, "no memory for a window");
    runner->position = runner->ids;
    runner->tier = runner->position + rows;
    runner->slot = runner->tier + rows;
    runner->logit_rows = runner->slot + rows;
    runner->block_table = runner->logit_rows + rows;
    for (size_t i = 0; i < rows; i++) runner->logit_rows[i] = (int32_t)i;
    runner->places = runner->block_table + blocks;
    for (size_t i = 0; i < blocks; i++) runner->block_table[i] = (int32_t)i;
    int result = kv_arena_create(model, blocks, &runner->arena, error);
    if (result != 0) window_runner_destroy(runner);
    return result;
}

void window_runner_destroy(struct window_runner *runner) {
    kv_arena_destroy(runner->model, runner->arena);
    free(runner->ids);
    runner->arena = NULL;
    runner->ids = NULL;
}

void window_runner_step(struct window_runner *runner, const int32_t *window, size_t first,
                        size_t rows, size_t tier, bool logits, struct step_result *result) {
    size_t groups = runner->model->info.kv_groups, stride = runner->model->info.max_step_rows;
    if (first == 0) memset(runner->places, 0, groups * sizeof *runner->places);
    for (size_t i = 0; i < rows; i++) {
        runner->position[i] = (int32_t)(first + i);
        runner->tier[i] = (int32_t)tier;
    }
    struct batch batch = {
        .rows = rows,
        .token = window + first,
        .position = runner->position,
        .tier = runner->tier,
        .slot = runner->slot,
        .block_table = runner->block_table,
        .places = runner->places,
        .slots = 1,
        .blocks_per_slot = runner->blocks,
        .logit_rows = runner->logit_rows,
        .logit_count = logits ? rows : 0,
        .body = runner->body,
    };
    model_step(runner->model, runner->arena, &batch, result);
    for (size_t group = 0; group < groups; group++) {
        const uint8_t *run = result->run + 2 * group * stride;
        for (size_t i = 0; i < rows; i++) runner->places[group] += run[i];
    }
}

/* ---- Sums ------------------------------------------------------------------------------------ */

struct totals {
    double nll, saved, savable; /* FLOPs */
    size_t predicted, rows, context_sum;
    size_t *skipped; /* [sublayers] rows */
};

static void count_skips(const struct model *model, const struct step_result *result, size_t first,
                        size_t rows, struct totals *totals) {
    for (size_t l = 0; l < model->info.sublayers; l++) {
        const uint8_t *run = result->run + l * model->info.max_step_rows;
        for (size_t i = 0; i < rows; i++) {
            double flops = model_skip_flops(model, l, first + i + 1);
            totals->savable += flops;
            if (run[i]) continue;
            totals->saved += flops;
            totals->skipped[l]++;
        }
    }
    for (size_t i = 0; i < rows; i++) totals->context_sum += first + i + 1;
    totals->rows += rows;
}

static void run_window(struct window_runner *runner, const int32_t *window, size_t length,
                       size_t tier, struct totals *totals) {
    const struct model *model = runner->model;
    size_t vocab = model->config.vocab;
    for (size_t first = 0; first < length; first += model->info.max_step_rows) {
        size_t rows = length - first;
        if (rows > model->info.max_step_rows) rows = model->info.max_step_rows;
        struct step_result result;
        window_runner_step(runner, window, first, rows, tier, true, &result);
        for (size_t i = 0; i < rows && first + i + 1 < length; i++) {
            totals->nll +=
                negative_log_likelihood(result.logits + i * vocab, vocab, window[first + i + 1]);
            totals->predicted++;
        }
        count_skips(model, &result, first, rows, totals);
    }
}

static void fill_evaluation(const struct model *model, const struct totals *totals,
                            struct evaluation *evaluation) {
    const struct model_info *info = &model->info;
    double rows = (double)totals->rows, pairs = rows * (double)info->blocks;
    size_t kinds[2] = {0};
    for (size_t l = 0; l < info->sublayers; l++) {
        kinds[l % 2] += totals->skipped[l];
        evaluation->sublayer_skip[l] = (float)((double)totals->skipped[l] / rows);
    }
    evaluation->tokens = totals->predicted;
    evaluation->perplexity = exp(totals->nll / (double)totals->predicted);
    evaluation->attn_skip = (double)kinds[0] / pairs;
    evaluation->mlp_skip = (double)kinds[1] / pairs;
    evaluation->flops_skip = totals->saved / totals->savable;
    double context = (double)totals->context_sum / rows;
    evaluation->flops_per_token_full = info->flops_fixed + info->flops_attn + info->flops_mlp +
                                       context * info->flops_attn_per_context;
    evaluation->flops_per_token = evaluation->flops_per_token_full - totals->saved / rows;
}

static int check_tokens(const struct model *model, const int32_t *tokens, size_t count, size_t tier,
                        struct error *error) {
    if (tier >= TIERS_MAX) {
        return error_set(error, FATHOM_INVALID, "tier %zu; %d are possible", tier, TIERS_MAX);
    }
    for (size_t i = 0; i < count; i++) {
        if (tokens[i] >= 0 && (size_t)tokens[i] < model->info.vocab) continue;
        return error_set(error, FATHOM_INVALID, "token %zu is %d; the vocabulary has %zu", i,
                         tokens[i], model->info.vocab);
    }
    return 0;
}

int model_evaluate(struct model *model, const int32_t *tokens, size_t count, size_t tier,
                   const struct evaluate_options *options, struct evaluation *evaluation,
                   struct error *error) {
    static const struct evaluate_options defaults;
    if (!options) options = &defaults;
    memset(evaluation, 0, sizeof *evaluation);
    if (options->max_tokens && count > options->max_tokens) count = options->max_tokens;
    if (count < 2)
        return error_set(error, FATHOM_INVALID, "%zu tokens are too few: perplexity needs 2",
                         count);
    int result = check_tokens(model, tokens, count, tier, error);
    if (result != 0) return result;
    struct window_runner runner;
    result = window_runner_create(model, options->window, &runner, error);
    if (result != 0) return result;
    struct totals totals = {.skipped = calloc(model->info.sublayers, sizeof *totals.skipped)};
    evaluation->sublayer_skip = calloc(model->info.sublayers, sizeof *evaluation->sublayer_skip);
    if (!totals.skipped || !evaluation->sublayer_skip) {
        result = error_set(error, FATHOM_NO_MEMORY, "no memory for an evaluation");
    }
    uint64_t started = time_now_ns();
    for (size_t at = 0; result == 0 && at < count; at += runner.window) {
        size_t length = count - at < runner.window ? count - at : runner.window;
        run_window(&runner, tokens + at, length, tier, &totals);
        if (options->progress && totals.predicted) {
            options->progress(options->progress_context, (double)(at + length) / (double)count,
                              exp(totals.nll / (double)totals.predicted));
        }
    }
    if (result == 0) {
        fill_evaluation(model, &totals, evaluation);
        evaluation->seconds = (double)(time_now_ns() - started) / 1e9;
    } else {
        free(evaluation->sublayer_skip);
        evaluation->sublayer_skip = NULL;
    }
    free(totals.skipped);
    window_runner_destroy(&runner);
    return result;
}
