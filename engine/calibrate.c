/* Finds the thresholds of every tier: models/nag.md section 3.
 *
 * One number decides a tier: tau, a size of step; a sub-layer is skipped where |g| < tau. tau is
 * the quantile of |g|, pooled over sub-layers and tokens with the FLOPs that a skip saves as
 * weights. Skipping changes the directions that later sub-layers see, so the text is run again with
 * the thresholds in force until the achieved rate is the wanted one. */
#include "engine/measure.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS_MAX 12
#define TOLERANCE  0.005 /* half a point */
#define AIM        0.001 /* go on while rounds are left and the rate is farther than this */

struct sample {
    float size;   /* |g| */
    float weight; /* FLOPs that a skip saves */
};

struct fit {
    struct model *model;
    const struct calibration *calibration;
    struct window_runner runner;
    struct sample *samples; /* [sublayers * tokens] */
    size_t sample_count;
    float *theta; /* [sublayers]: in force in the last round */
};

static void say(const struct calibration *calibration, const char *line) {
    if (calibration->progress) calibration->progress(calibration->progress_context, line);
}

/* Runs the text with fit->theta in force as tier `tier`; fills the samples and returns the achieved
 * rate. */
static double run_round(struct fit *fit, size_t tier) {
    struct model *model = fit->model;
    const struct calibration *text = fit->calibration;
    size_t max_rows = model->info.max_step_rows, window = fit->runner.window;
    double saved = 0, savable = 0;
    fit->sample_count = 0;
    model->residual->kind->set_theta(model->residual, tier, fit->theta);
    for (size_t at = 0; at < text->count; at += window) {
        size_t length = text->count - at < window ? text->count - at : window;
        for (size_t first = 0; first < length; first += max_rows) {
            size_t rows = length - first < max_rows ? length - first : max_rows;
            struct step_result result;
            window_runner_step(&fit->runner, text->tokens + at, first, rows, tier, false, &result);
            for (size_t l = 0; l < model->info.sublayers; l++) {
                for (size_t i = 0; i < rows; i++) {
                    size_t cell = l * max_rows + i;
                    double flops = model_skip_flops(model, l, first + i + 1);
                    double size = model->residual->kind->step_size(model->residual, l,
                                                                   (double)result.mix[cell]);
                    fit->samples[fit->sample_count++] = (struct sample){(float)size, (float)flops};
                    savable += flops;
                    if (!result.run[cell]) saved += flops;
                }
            }
        }
    }
    return saved / savable;
}

static int compare_samples(const void *a, const void *b) {
    float x = ((const struct sample *)a)->size, y = ((const struct sample *)b)->size;
    return (x > y) - (x < y);
}

/* The size below which a share `rate` of the weight lies. Sorts the samples. */
static double weighted_quantile(struct sample *samples, size_t count, double rate) {
    double total = 0, below = 0;
    for (size_t i = 0; i < count; i++) total += (double)samples[i].weight;
    qsort(samples, count, sizeof *samples, compare_samples);
    for (size_t i = 0; i < count; i++) {
        below += (double)samples[i].weight;
        if (below > rate * total) return (double)samples[i].size;
    }
    return (double)samples[count - 1].size;
}

static void theta_from_size(struct fit *fit, double tau) {
    for (size_t l = 0; l < fit->model->info.sublayers; l++) {
        fit->theta[l] = (float)fit->model->residual->kind->threshold(fit->model->residual, l, tau);
    }
}

/* Fits one tier; leaves the best thresholds in fit->theta. */
static int fit_tier(struct fit *fit, size_t tier, const struct calibration_target *target,
                    struct error *error) {
    size_t sublayers = fit->model->info.sublayers;
    memset(fit->theta, 0, sublayers * sizeof *fit->theta);
    run_round(fit, tier);
    double best_miss = INFINITY, best_tau = 0;
    for (int round = 1; round <= ROUNDS_MAX && best_miss > AIM; round++) {
        double tau = weighted_quantile(fit->samples, fit->sample_count, target->skip);
        theta_from_size(fit, tau);
        double achieved = run_round(fit, tier);
        char line[160];
        snprintf(line, sizeof line, "%-10s round %d: |g| < %.5f skips %.2f %% (target %.2f %%)",
                 target->name, round, tau, 100 * achieved, 100 * target->skip);
        say(fit->calibration, line);
        double miss = fabs(achieved - target->skip);
        if (miss < best_miss) {
            best_miss = miss;
            best_tau = tau;
        }
    }
    theta_from_size(fit, best_tau);
    if (best_miss <= TOLERANCE) return 0;
    return error_set(error, FATHOM_UNSUPPORTED,
                     "tier '%s': the nearest rate to %.1f %% is %.1f points away; its sub-layers "
                     "do not skip gradually",
                     target->name, 100 * target->skip, 100 * best_miss);
}

/* Measures a tier that is in force on the device and writes its figures into the table. */
static int measure_tier(struct fit *fit, struct depth_table *table, size_t tier,
                        struct error *error) {
    const struct calibration *text = fit->calibration;
    struct evaluate_options options = {.window = text->window};
    struct evaluation evaluation;
    const int32_t *tokens = text->measure_tokens ? text->measure_tokens : text->tokens;
    size_t count = text->measure_tokens ? text->measure_count : text->count;
    int result = model_evaluate(fit->model, tokens, count, tier, &options, &evaluation, error);
    if (result != 0) return result;
    struct tier_info *info = &table->tiers[tier];
    info->measured = true;
    info->perplexity = evaluation.perplexity;
    info->attn_skip = evaluation.attn_skip;
    info->mlp_skip = evaluation.mlp_skip;
    info->flops_per_token = evaluation.flops_per_token;
    free(evaluation.sublayer_skip);
    char line[160];
    snprintf(line, sizeof line,
             "%-10s perplexity %.3f, skips %.1f %% of attention and %.1f %% of MLP", info->name,
             info->perplexity, 100 * info->attn_skip, 100 * info->mlp_skip);
    say(text, line);
    return 0;
}

static int check_calibration(const struct calibration *calibration, struct error *error) {
    if (calibration->count < 2) {
        return error_set(error, FATHOM_INVALID, "%zu tokens of text are too few to calibrate on",
                         calibration->count);
    }
    if (calibration->target_count == 0 || calibration->target_count > TIERS_MAX - 1) {
        return error_set(error, FATHOM_INVALID, "%zu targets; 1 to %d are possible",
                         calibration->target_count, TIERS_MAX - 1);
    }
    for (size_t i = 0; i < calibration->target_count; i++) {
        const struct calibration_target *target = &calibration->targets[i];
        if (!(target->skip > 0 && target->skip <= CALIBRATION_SKIP_MAX)) {
            return error_set(error, FATHOM_INVALID, "tier '%s': skip %g is not in (0, %g]",
                             target->name, target->skip, CALIBRATION_SKIP_MAX);
        }
    }
    return 0;
}

/* The table to be, with "full" first and no thresholds yet: wrong names are found before the
 * rounds. */
static int table_create(const struct model *model, const struct calibration *calibration,
                        struct depth_table *table, struct error *error) {
    const struct model_info *info = &model->info;
    *table = (struct depth_table){
        .kv_policy = info->kv_policy,
        .tier_count = calibration->target_count + 1,
        .sublayers = info->sublayers,
    };
    snprintf(table->tiers[0].name, TIER_NAME_MAX, "full");
    for (size_t t = 1; t < table->tier_count; t++) {
        const struct calibration_target *target = &calibration->targets[t - 1];
        memcpy(table->tiers[t].name, target->name, TIER_NAME_MAX);
        table->tiers[t].target_skip = target->skip;
        if (strcmp(target->name, info->tiers[info->default_tier].name) == 0) {
            table->default_tier = t;
        }
    }
    table->theta = calloc(table->tier_count * table->sublayers, sizeof *table->theta);
    if (!table->theta) return error_set(error, FATHOM_NO_MEMORY, "no memory for thresholds");
    return depth_table_check(table, error);
}

static int fit_create(struct model *model, const struct calibration *calibration, struct fit *fit,
                      struct error *error) {
    size_t sublayers = model->info.sublayers, samples, bytes;
    *fit = (struct fit){.model = model, .calibration = calibration};
    int result = window_runner_create(model, calibration->window, &fit->runner, error);
    if (result != 0) return result;
    if (size_multiply(sublayers, calibration->count, &samples) &&
        size_multiply(samples, sizeof *fit->samples, &bytes)) {
        fit->samples = malloc(bytes);
    }
    fit->theta = calloc(sublayers, sizeof *fit->theta);
    if (fit->samples && fit->theta) return 0;
    return error_set(error, FATHOM_NO_MEMORY,
                     "no memory for %zu tokens of %zu sub-layers; give less text",
                     calibration->count, sublayers);
}

static void fit_destroy(struct fit *fit) {
    window_runner_destroy(&fit->runner);
    free(fit->samples);
    free(fit->theta);
}

int model_calibrate(struct model *model, const struct calibration *calibration,
                    struct error *error) {
    struct depth_table table = {0};
    struct fit fit = {.model = model};
    if (!residual_skips(model->residual)) {
        return error_set(
            error, FATHOM_UNSUPPORTED,
            "a model with the %s residual runs every sub-layer for every token: it has "
            "the tier \"full\" alone and nothing to calibrate; NAG models have gates",
            model->info.residual);
    }
    int result = check_calibration(calibration, error);
    if (result == 0) result = table_create(model, calibration, &table, error);
    if (result == 0) result = fit_create(model, calibration, &fit, error);
    for (size_t t = 0; result == 0 && t < table.tier_count; t++) {
        float *theta = table.theta + t * table.sublayers;
        if (t > 0) result = fit_tier(&fit, t, &calibration->targets[t - 1], error);
        memcpy(theta, fit.theta, table.sublayers * sizeof *theta);
        model->residual->kind->set_theta(model->residual, t, theta);
        if (result == 0) result = measure_tier(&fit, &table, t, error);
    }
    if (result == 0) result = depth_table_save(model->info.path, &table, error);
    fit_destroy(&fit);
    free(table.theta);
    return result;
}
