/* What a device is asked to draw in one step, and what its answers mean. Private to the engine. */
#ifndef FATHOM_DRAW_BATCH_H
#define FATHOM_DRAW_BATCH_H

#include "engine/sequence.h"
#include "kernels/kernels.h"

/* Changes of logits that one step can ask for: a biased, used or banned token each. Rows whose
 * changes find no room are drawn by the host. */
#define DRAW_CHANGES_MAX ((size_t)1 << 18)

struct draw_batch {
    struct draw_row *rows;       /* [max_step_rows] by index of logit_rows; engine_step.c's */
    struct draw_change *changes; /* [DRAW_CHANGES_MAX] */
    size_t change_count;
    bool is_plain; /* no row has changes, or a cut by top_k, top_p or min_p */
};

int draw_batch_create(struct draw_batch *batch, size_t rows, struct error *error);
void draw_batch_destroy(struct draw_batch *batch); /* zeroed is allowed */

/* Nothing is asked of the first `rows`. */
void draw_batch_clear(struct draw_batch *batch, size_t rows);

/* The sequence's next token. Without room for its changes nothing is asked of the row. */
void draw_batch_ask_token(struct draw_batch *batch, size_t row, const struct sequence *sequence);

/* A given token with the `top` best ones, as sampler_score. */
void draw_batch_ask_score(struct draw_batch *batch, size_t row, int32_t token, size_t top);

/* As sampler_draw and sampler_score tell it; best: the row's DRAW_BEST_MAX. FATHOM_INVALID where no
 * token is possible. */
int draw_batch_tell(const struct draw_batch *batch, size_t row, size_t vocab,
                    const struct draw_outcome *outcome, const struct draw_best *best,
                    struct scored_token *scored);

#endif
