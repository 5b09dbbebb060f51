/* From logits to a token.
 *
 * In this order: bias, penalties, the ban of stop tokens before min_tokens; logprobs are told of
 * the distribution then, at temperature 1; then temperature, top_k, top_p, min_p, and the draw.
 * Prompt tokens are scored by the model's own distribution: nothing was drawn there.
 *
 * Deterministic: same logits and same sequence, same token, whoever draws: a device does it by the
 * same rules (kernels.h, struct draw). Equal logits are ordered by lower id; the draw goes through
 * the candidates in the order of ids. Not-a-number counts as -inf. Engine thread only; nothing is
 * allocated after creation.
 */
#ifndef FATHOM_SAMPLER_H
#define FATHOM_SAMPLER_H

#include "engine/sequence.h"

struct candidate {
    uint64_t weight; /* kernels/weight.h, at the temperature */
    float logit;
    int32_t token;
};

struct sampler {
    size_t vocab;
    float *logits;                /* [vocab] the row at hand, after bias, penalties and ban */
    struct candidate *candidates; /* [vocab] */
};

int sampler_create(struct sampler *sampler, size_t vocab, struct error *error);
void sampler_destroy(struct sampler *sampler); /* zeroed is allowed */

/* Chooses the sequence's next token from logits [vocab]. FATHOM_INVALID if all of them are -inf. */
int sampler_draw(struct sampler *sampler, const struct sequence *sequence, const float *logits,
                 struct scored_token *scored);

/* Scores a given token, with the `top` (0..TOP_LOGPROBS_MAX) best ones. */
void sampler_score(struct sampler *sampler, const float *logits, int32_t token, size_t top,
                   struct scored_token *scored);

/* The end of scoring, from the token's logit, the best one, and the sum of weights at temperature
 * 1. The logprobs of scored->top are still logits. */
void sampler_tell(struct scored_token *scored, float logit, float peak, uint64_t sum);

/* Uniform in [0, 1), a function of the arguments alone. */
double sampler_uniform(uint64_t seed, uint64_t position);

#endif
