/* Weights that are finite one by one can still overflow in sums and products: then no token has a
 * probability, and every request would end as an error. A short text tells when the model loads. */
#include <math.h>
#include <stdlib.h>

#include "engine/model.h"

#define TRIAL_ROWS ((size_t)4)

static int check_logits(const struct model *model, const struct step_result *result,
                        const int32_t *tokens, size_t rows, struct error *error) {
    size_t vocab = model->info.vocab;
    for (size_t i = 0; i < rows * vocab; i++) {
        if (isfinite(result->logits[i])) continue;
        return error_set(error, FATHOM_INVALID,
                         "the logits behind token %d are not finite: some weights are too large to "
                         "compute with",
                         (int)tokens[i / vocab]);
    }
    return 0;
}

/* Tokens from all over the vocabulary, one text, at the tier that runs everything. */
int model_try(struct model *model, struct error *error) {
    const struct model_info *info = &model->info;
    int32_t tokens[TRIAL_ROWS], positions[TRIAL_ROWS], tiers[TRIAL_ROWS], slots[TRIAL_ROWS] = {0},
                                                                          rows_of[TRIAL_ROWS];
    size_t rows = TRIAL_ROWS;
    if (rows > info->max_step_rows) rows = info->max_step_rows;
    if (rows > info->context) rows = info->context;
    for (size_t i = 0; i < rows; i++) {
        tokens[i] = (int32_t)(i * (info->vocab - 1) / (TRIAL_ROWS - 1));
        positions[i] = rows_of[i] = (int32_t)i;
        tiers[i] = model_find_tier(model, "full");
    }
    /* One block does: a layer's K and V are not read after it, so that the next may reuse it. */
    int32_t *zeros = calloc(info->kv_groups, sizeof *zeros);
    if (!zeros) return error_set(error, FATHOM_NO_MEMORY, "no memory to try the weights");
    struct kv_arena *arena;
    struct step_result result;
    struct batch batch = {
        .rows = rows,
        .token = tokens,
        .position = positions,
        .tier = tiers,
        .slot = slots,
        .block_table = zeros,
        .places = zeros,
        .slots = 1,
        .blocks_per_slot = 1,
        .logit_rows = rows_of,
        .logit_count = rows,
        .body = BODY_DENSE,
    };
    int status = kv_arena_create(model, 1, &arena, error);
    if (status == 0) {
        model_step(model, arena, &batch, &result);
        status = check_logits(model, &result, tokens, rows, error);
        kv_arena_destroy(model, arena);
    }
    free(zeros);
    return status;
}
