/* Which tier a request gets that leaves the choice to the server: the best one with which the
 * objectives hold if all requests ran like it. A pure function of what is known. */
#ifndef FATHOM_AUTO_TIER_H
#define FATHOM_AUTO_TIER_H

#include "engine/cost.h"

struct auto_load {
    size_t unfinished, max_sequences; /* requests here; those that can run at once */
    size_t max_step_rows;
    double step_target;     /* seconds; 0: none */
    double prefill_share;   /* struct scheduler_limits */
    size_t pending_tokens;  /* of their prompts, not yet computed */
    size_t prompt_tokens;   /* of the request that asks */
    double seconds_per_end; /* recent time between two ends */
    double tokens_per_end;  /* prompt and generated, of those who ended of late; 0: not known */
    double arrivals_per_second;
    double mean_work; /* share of all sub-layers that recent rows ran */
    double slowness;  /* recent steps took that many times what the model says */
};

void auto_tier_choose(const struct cost_model *cost, const struct model_info *info,
                      const struct auto_load *load, const struct auto_options *options,
                      struct auto_choice *choice);

#endif
