#include "engine/sampler.h"

#include "kernels/weight.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void load_logits(struct sampler *sampler, const float *logits);
static void adjust_logits(struct sampler *sampler, const struct sequence *sequence);
static int32_t find_best(const struct sampler *sampler);
static void tell_logprobs(const struct sampler *sampler, int32_t best, size_t top,
                          struct scored_token *scored);
static int32_t draw_token(struct sampler *sampler, const struct sequence *sequence, int32_t best);

int sampler_create(struct sampler *sampler, size_t vocab, struct error *error) {
    sampler->vocab = vocab;
    sampler->logits = calloc(vocab, sizeof *sampler->logits);
    sampler->candidates = calloc(vocab, sizeof *sampler->candidates);
    if (sampler->logits && sampler->candidates) return 0;
    sampler_destroy(sampler);
    return error_set(error, FATHOM_NO_MEMORY, "no memory to sample from %zu entries", vocab);
}

void sampler_destroy(struct sampler *sampler) {
    free(sampler->logits);
    free(sampler->candidates);
    memset(sampler, 0, sizeof *sampler);
}

int sampler_draw(struct sampler *sampler, const struct sequence *sequence, const float *logits,
                 struct scored_token *scored) {
    const struct engine_request *request = &sequence->request;
    load_logits(sampler, logits);
    adjust_logits(sampler, sequence);
    int32_t best = find_best(sampler);
    if (sampler->logits[best] == -INFINITY) return FATHOM_INVALID;
    *scored = (struct scored_token){.token = best, .logprob = NAN};
    if (request->sampling.temperature > 0) scored->token = draw_token(sampler, sequence, best);
    if (request->top_logprobs >= 0) {
        tell_logprobs(sampler, best, (size_t)request->top_logprobs, scored);
    }
    return 0;
}

void sampler_score(struct sampler *sampler, const float *logits, int32_t token, size_t top,
                   struct scored_token *scored) {
    load_logits(sampler, logits);
    *scored = (struct scored_token){.token = token};
    tell_logprobs(sampler, find_best(sampler), top, scored);
}

/* From here on a logit is finite or -inf: the largest float stands for +inf, so that differences of
 * logits are numbers. */
static float logit_clean(float logit) {
    if (isnan(logit)) return -INFINITY;
    return logit > FLT_MAX ? FLT_MAX : logit;
}

static void load_logits(struct sampler *sampler, const float *logits) {
    for (size_t i = 0; i < sampler->vocab; i++) sampler->logits[i] = logit_clean(logits[i]);
}

static void apply_penalties(float *logits, const struct token_counts *counts,
                            const struct sampling *sampling) {
    for (size_t i = 0; i < counts->capacity; i++) {
        const struct token_count *entry = &counts->entries[i];
        if (entry->uses == 0) continue;
        float logit = logits[entry->token], repetition = sampling->repetition_penalty;
        logit = logit > 0 ? logit / repetition : logit * repetition;
        if (entry->uses > 1) {
            float generated = (float)(entry->uses - 1);
            logit -= sampling->frequency_penalty * generated + sampling->presence_penalty;
        }
        logits[entry->token] = logit_clean(logit);
    }
}

static void adjust_logits(struct sampler *sampler, const struct sequence *sequence) {
    const struct sampling *sampling = &sequence->request.sampling;
    for (size_t i = 0; i < sampling->bias_count; i++) {
        float *logit = &sampler->logits[sampling->bias[i].token];
        *logit = logit_clean(*logit + sampling->bias[i].bias);
    }
    if (sequence->counts.entries) apply_penalties(sampler->logits, &sequence->counts, sampling);
    if (sequence_generated(sequence) < sequence->request.min_tokens) {
        for (size_t i = 0; i < sequence->request.stop_token_count; i++) {
            sampler->logits[sequence->stop_tokens[i]] = -INFINITY;
        }
    }
}

static int32_t find_best(const struct sampler *sampler) {
    size_t best = 0;
    for (size_t i = 1; i < sampler->vocab; i++) {
        if (sampler->logits[i] > sampler->logits[best]) best = i;
    }
    return (int32_t)best;
}

/* Descending in `top`, at most `room`. Ids come in ascending order, so an equal goes behind. */
static void top_offer(struct scored_token *scored, size_t room, int32_t token, float logprob) {
    size_t place = scored->top_count;
    while (place > 0 && scored->top[place - 1].logprob < logprob) place--;
    if (place == room) return;
    if (scored->top_count < room) scored->top_count++;
    for (size_t i = scored->top_count - 1u; i > place; i--) scored->top[i] = scored->top[i - 1];
    scored->top[place] = (struct token_logprob){token, logprob};
}

void sampler_tell(struct scored_token *scored, float logit, float peak, uint64_t sum) {
    double log_sum = log((double)sum / WEIGHT_UNIT) + peak;
    for (size_t i = 0; i < scored->top_count; i++) {
        float top = scored->top[i].logprob;
        scored->top[i].logprob = top > -INFINITY ? (float)(top - log_sum) : -INFINITY;
    }
    scored->logprob = logit > -INFINITY ? (float)(logit - log_sum) : -INFINITY;
}

static void tell_logprobs(const struct sampler *sampler, int32_t best, size_t top,
                          struct scored_token *scored) {
    const float *logits = sampler->logits;
    float peak = logits[best];
    uint64_t sum = 0;
    for (size_t i = 0; i < sampler->vocab; i++) sum += weight_of(logits[i] - peak);
    if (top > TOP_LOGPROBS_MAX) top = TOP_LOGPROBS_MAX;
    for (size_t i = 0; i < sampler->vocab; i++) top_offer(scored, top, (int32_t)i, logits[i]);
    sampler_tell(scored, logits[scored->token], peak, sum);
}

/* ---- The draw -------------------------------------------------------------------------------- */

static bool candidate_before(const struct candidate *a, const struct candidate *b) {
    return a->logit != b->logit ? a->logit > b->logit : a->token < b->token;
}

static void candidate_swap(struct candidate *a, struct candidate *b) {
    struct candidate held = *a;
    *a = *b;
    *b = held;
}

/* Splits [low, high) around the median of its first, middle and last: returns where that one is
 * now, with those before it in the order on its left. */
static size_t candidates_partition(struct candidate *all, size_t low, size_t high) {
    size_t middle = low + (high - low) / 2, last = high - 1;
    if (candidate_before(&all[middle], &all[low])) candidate_swap(&all[middle], &all[low]);
    if (candidate_before(&all[last], &all[low])) candidate_swap(&all[last], &all[low]);
    if (candidate_before(&all[middle], &all[last])) candidate_swap(&all[middle], &all[last]);
    size_t place = low;
    for (size_t i = low; i < last; i++) {
        if (candidate_before(&all[i], &all[last])) candidate_swap(&all[i], &all[place++]);
    }
    candidate_swap(&all[place], &all[last]);
    return place;
}

/* Moves the shortest run of the best candidates whose weights sum to `target` (> 0) to the front;
 * returns its length, 1 at least. A quickselect by weight: the vocabulary is never sorted. */
static size_t candidates_select(struct candidate *all, size_t count, uint64_t target) {
    size_t low = 0, high = count; /* those before low are in, those from high on are out */
    uint64_t taken = 0;           /* weight of those before low, below the target */
    while (low < high) {
        size_t middle = candidates_partition(all, low, high);
        uint64_t left = 0;
        for (size_t i = low; i < middle; i++) left += all[i].weight;
        if (taken + left >= target) {
            high = middle;
            continue;
        }
        taken += left + all[middle].weight;
        low = middle + 1;
        if (taken >= target) return low;
    }
    return low;
}

static uint64_t candidates_weight(const struct candidate *all, size_t count) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) sum += all[i].weight;
    return sum;
}

/* Possible tokens that are no worse than `last` (NULL: all), in the order of ids. */
static size_t collect_candidates(struct sampler *sampler, const struct candidate *last) {
    struct candidate *all = sampler->candidates;
    size_t count = 0;
    for (size_t i = 0; i < sampler->vocab; i++) {
        struct candidate one = {1, sampler->logits[i], (int32_t)i};
        if (one.logit == -INFINITY || (last && candidate_before(last, &one))) continue;
        all[count++] = one;
    }
    return count;
}

static void weigh_candidates(struct candidate *all, size_t count, float peak, float temperature) {
    float scale = weight_scale(temperature);
    for (size_t i = 0; i < count; i++) all[i].weight = weight_of((all[i].logit - peak) * scale);
}

static struct candidate find_last(const struct candidate *all, size_t count) {
    struct candidate last = all[0];
    for (size_t i = 1; i < count; i++) {
        if (candidate_before(&last, &all[i])) last = all[i];
    }
    return last;
}

/* Candidates in the order of ids, weighed. To select is to move them: those that stay are collected
 * once more. */
static size_t choose_candidates(struct sampler *sampler, const struct sampling *sampling,
                                float peak) {
    struct candidate *all = sampler->candidates;
    size_t count = collect_candidates(sampler, NULL), possible = count;
    size_t top_k = (size_t)sampling->top_k;
    if (top_k > 0 && top_k < count) count = candidates_select(all, count, top_k);
    weigh_candidates(all, count, peak, sampling->temperature);
    if (sampling->top_p < 1) {
        uint64_t target = weight_to_reach(sampling->top_p, candidates_weight(all, count));
        count = candidates_select(all, count, target);
    }
    if (count == possible && sampling->top_p >= 1) return count;
    struct candidate last = find_last(all, count);
    count = collect_candidates(sampler, &last);
    weigh_candidates(all, count, peak, sampling->temperature);
    return count;
}

/* Those at least min_p times as likely as the best. */
static size_t drop_unlikely(struct candidate *all, size_t count, float min_p) {
    uint64_t least = weight_least(min_p);
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        if (all[i].weight >= least) all[kept++] = all[i];
    }
    return kept;
}

static int32_t draw_token(struct sampler *sampler, const struct sequence *sequence, int32_t best) {
    const struct sampling *sampling = &sequence->request.sampling;
    const struct candidate *candidate = sampler->candidates;
    size_t count = choose_candidates(sampler, sampling, sampler->logits[best]);
    if (sampling->min_p > 0) count = drop_unlikely(sampler->candidates, count, sampling->min_p);
    uint64_t rest = weight_drawn(sampler_uniform(sampling->seed, sequence->length),
                                 candidates_weight(candidate, count));
    while (rest >= candidate->weight) rest -= candidate++->weight;
    return candidate->token;
}

/* Mixed twice: neighbouring seeds at neighbouring positions must not meet. */
double sampler_uniform(uint64_t seed, uint64_t position) {
    uint64_t start = mix_bits(seed + MIX_STEP);
    uint64_t bits = mix_bits(start + (position + 1) * MIX_STEP);
    return (double)(bits >> 11) * 0x1p-53;
}
