/* Load on one engine, without HTTP: clients that wait for each answer, batches in lock-step, or
 * arrivals that wait for nobody; and what came of it. */
#ifndef FATHOM_TESTS_ENGINE_LOAD_H
#define FATHOM_TESTS_ENGINE_LOAD_H

#include "bench/dice.h"
#include "bench/lengths.h"
#include "engine/engine.h"

#define LOAD_AUTO (-1)

struct load {
    struct model *model;
    struct engine_options engine;
    const struct token_list *text; /* prompts are cut from it; NULL or too short: random tokens */
    struct lengths prompt, generated; /* tokens; what does not fit the context is cut */
    int tier;                         /* or LOAD_AUTO, by `objectives` */
    struct auto_options objectives;

    size_t clients;  /* closed loop: requests at any time; 0: an open loop */
    bool lockstep;   /* the next ones start only when all of them have ended */
    double rate;     /* open loop: Poisson arrivals per second */
    size_t requests; /* ends when so many have; 0: after `seconds` */
    /* Open loop: of arrivals, then everybody ends. Else measured, at least, from when every client
     * has had a first token, and until as many requests have ended as there are clients, 4 to 32:
     * prompts should have their share. */
    double seconds;
};

struct load_result {
    double seconds;             /* measured */
    double cpu_seconds;         /* of this process in that time */
    double others;              /* processors that other programs took, on average */
    size_t ended, tokens;       /* in that time: requests, generated tokens */
    size_t per_tier[TIERS_MAX]; /* requests sent */
    double saving;              /* FLOPs skipped, of all at full depth, head included */
    double attn_skip, mlp_skip; /* shares */
    double rows_per_step;
    double first_p50, first_p99, next_p50, next_p99; /* seconds: to a first token, between tokens */
    uint64_t hash;             /* of all tokens, by request: whatever their order in time */
    struct engine_stats stats; /* at the end */
};

/* Exits with a message when the engine cannot be made or refuses a request. */
void load_run(const struct load *load, struct load_result *result);

/* Any tokens that the model has. */
void load_fill_tokens(const struct model_info *model, struct dice *dice, int32_t *tokens,
                      size_t count);

/* Asks for exactly `generated` tokens, the best each time, without logprobs. Exits with a message
 * when the engine refuses. */
void load_submit(struct engine *engine, uint64_t id, const int32_t *prompt, size_t prompt_length,
                 size_t generated, int32_t tier);

/* The value below which a share of them lies; sorts them. 0 of none. */
double load_quantile(double *values, size_t count, double share);

#endif
