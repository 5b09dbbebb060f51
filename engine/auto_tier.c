#include "engine/auto_tier.h"

#include "kernels/kernels.h"

#include <math.h>

/* Predicted is the mean, and objectives are kept by 99 of 100 requests: first tokens come three times
 * as late when others came just before, further ones share steps with prompts. */
#define FIRST_ROOM 0.35
#define NEXT_ROOM  0.5
/* Going back up needs yet more room, or each finished request would change the tier of the next. */
#define HYSTERESIS  0.7
#define CHUNK_ROWS  64 /* rows over which the time of a prefill is averaged */
#define SECONDS(ns) ((ns) / 1e9)

static double step_seconds(const struct cost_model *cost, const struct tier_info *tier,
                           const struct auto_load *load, double rows, double logits) {
    double attn = tier->measured ? 1 - tier->attn_skip : 1 - tier->target_skip;
    double mlp = tier->measured ? 1 - tier->mlp_skip : 1 - tier->target_skip;
    struct cost_load step = {
        .rows = rows,
        .attn_rows = rows * attn,
        .mlp_rows = rows * mlp,
        .attended = rows * attn * load->tokens_per_end / 2, /* on the way from none to all */
        .logit_rows = logits,
    };
    return SECONDS(cost_predict(cost, &step)) * load->slowness;
}

static double running(const struct auto_load *load) {
    size_t rows = load->unfinished < load->max_sequences ? load->unfinished : load->max_sequences;
    return (double)rows;
}

/* Rows of prompts that a step has room for beside those that decode: as the scheduler does it. */
static double prefill_rows(const struct auto_load *load, double decode_seconds, double row) {
    double decodes = running(load), rows = (double)load->max_step_rows - decodes;
    double shared = decode_seconds / (1 - load->prefill_share);
    double target = shared > load->step_target ? shared : load->step_target;
    double in_time = (target - decode_seconds) / row;
    if (load->step_target > 0 && decodes > 0 && in_time < rows) rows = in_time;
    return rows > KV_BLOCK_TOKENS ? rows : KV_BLOCK_TOKENS;
}

/* Seconds of work that arrive in a second, beyond the one that there is for them, if all requests
 * ran like this tier: of rows in steps as full as they can be. */
static double overload(const struct cost_model *cost, const struct tier_info *tier,
                       const struct auto_load *load) {
    double least = fmax(running(load), KV_BLOCK_TOKENS), rows = (double)load->max_step_rows;
    while (load->step_target > 0 && rows > least &&
           step_seconds(cost, tier, load, rows, rows) > load->step_target) {
        rows = fmax(rows / 2, least);
    }
    double row = step_seconds(cost, tier, load, rows, rows / 2) / rows;
    return fmax(load->arrivals_per_second * load->tokens_per_end * row - 1, 0);
}

/* Prompts before it and its own are read in steps whose other rows decode; beyond the sequences
 * that can run, others must end first, which they do faster the less they execute. */
static double predict_first_token(const struct cost_model *cost, const struct tier_info *tier,
                                  const struct auto_load *load, double work) {
    double decodes = running(load), decode = step_seconds(cost, tier, load, decodes, decodes);
    double row = step_seconds(cost, tier, load, CHUNK_ROWS, 0) / CHUNK_ROWS;
    double tokens = (double)(load->pending_tokens + load->prompt_tokens);
    double seconds = tokens * row + tokens / prefill_rows(load, decode, row) * decode;
    if (load->unfinished >= load->max_sequences) {
        double ends = (double)(load->unfinished + 1 - load->max_sequences);
        seconds += ends * load->seconds_per_end * work / load->mean_work;
    }
    /* Those who run now stay for (unfinished / ends per second): so long the queue grows on. */
    double stay = (double)load->unfinished * load->seconds_per_end;
    return seconds + overload(cost, tier, load) * stay;
}

static double predict_per_token(const struct cost_model *cost, const struct tier_info *tier,
                                const struct auto_load *load) {
    size_t rows = load->unfinished + 1;
    if (rows > load->max_sequences) rows = load->max_sequences;
    return step_seconds(cost, tier, load, (double)rows, (double)rows);
}

/* The next worse tier, by the work that it is meant to skip; the same when there is none. */
static size_t next_tier(const struct model_info *info, size_t tier) {
    size_t next = tier;
    for (size_t i = 0; i < info->tier_count; i++) {
        if (info->tiers[i].target_skip <= info->tiers[tier].target_skip) continue;
        bool is_nearer = info->tiers[i].target_skip < info->tiers[next].target_skip;
        if (next == tier || is_nearer) next = i;
    }
    return next;
}

static size_t best_tier(const struct model_info *info) {
    size_t best = 0;
    for (size_t i = 1; i < info->tier_count; i++) {
        if (info->tiers[i].target_skip < info->tiers[best].target_skip) best = i;
    }
    return best;
}

void auto_tier_choose(const struct cost_model *cost, const struct model_info *info,
                      const struct auto_load *load, const struct auto_options *options,
                      struct auto_choice *choice) {
    const struct tier_info *tiers = info->tiers;
    enum auto_reason reason = AUTO_WITHIN;
    for (size_t tier = best_tier(info);; tier = next_tier(info, tier)) {
        bool is_upward = tiers[tier].target_skip < tiers[options->previous].target_skip;
        double room = is_upward ? HYSTERESIS : 1;
        double work = 1 - tiers[tier].target_skip;
        choice->tier = tier;
        choice->reason = reason;
        choice->first_token = predict_first_token(cost, &tiers[tier], load, work);
        choice->per_token = predict_per_token(cost, &tiers[tier], load);
        bool is_last = tiers[tier].target_skip >= tiers[options->floor].target_skip ||
                       next_tier(info, tier) == tier;
        if (is_last || load->unfinished == 0) return;
        if (choice->first_token > room * FIRST_ROOM * options->first_token) {
            reason = AUTO_FIRST_TOKEN;
        } else if (choice->per_token > room * NEXT_ROOM * options->per_token) {
            reason = AUTO_PER_TOKEN;
        } else {
            return;
        }
    }
}
