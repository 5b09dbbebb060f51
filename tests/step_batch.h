/* The rows of one step, for programs that run a model without an engine. */
#ifndef FATHOM_TESTS_STEP_BATCH_H
#define FATHOM_TESTS_STEP_BATCH_H

#include <assert.h>

#include "engine/forward.h"

#define STEP_BATCH_ROWS 512

/* Zero-filled is empty. */
struct step_batch {
    size_t rows;
    int32_t token[STEP_BATCH_ROWS], position[STEP_BATCH_ROWS];
    int32_t tier[STEP_BATCH_ROWS], slot[STEP_BATCH_ROWS];
    int32_t logit_rows[STEP_BATCH_ROWS];
    size_t logit_count;
};

/* A row behind the others. */
static inline void step_batch_add(struct step_batch *step, int32_t token, size_t position,
                                  size_t tier, size_t slot) {
    size_t row = step->rows++;
    assert(row < STEP_BATCH_ROWS);
    step->token[row] = token;
    step->position[row] = (int32_t)position;
    step->tier[row] = (int32_t)tier;
    step->slot[row] = (int32_t)slot;
}

/* The logits of the row added last are wanted. */
static inline void step_batch_want(struct step_batch *step) {
    step->logit_rows[step->logit_count++] = (int32_t)step->rows - 1;
}

/* What model_step takes, valid as long as `step`; the caller fills in the cache and the body. */
static inline struct batch step_batch_view(const struct step_batch *step) {
    return (struct batch){
        .rows = step->rows,
        .token = step->token,
        .position = step->position,
        .tier = step->tier,
        .slot = step->slot,
        .logit_rows = step->logit_rows,
        .logit_count = step->logit_count,
    };
}

#endif
