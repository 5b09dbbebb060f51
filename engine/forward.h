/* One step of the model over a batch of rows: the private seam between the scheduler's side (which
 * rows) and the model's side (what is computed). Engine thread only. */
#ifndef FATHOM_FORWARD_H
#define FATHOM_FORWARD_H

#include "engine/draw_batch.h"
#include "engine/engine.h"

/* The KV arena of one engine: a buffer of `blocks` blocks, created and touched at start. Under
 * compute a block holds K and V of KV_BLOCK_TOKENS positions in all layers. Under omit it holds
 * those of as many places of one layer: rows that run the layer's attention take the places of a
 * sequence in order, the others take none. */
struct kv_arena;
int kv_arena_create(struct model *model, size_t blocks, struct kv_arena **arena,
                    struct error *error);
void kv_arena_destroy(struct model *model, struct kv_arena *arena);

/* Rows of one step. A sequence's rows are consecutive and ascending in position; K/V of all its
 * earlier positions are already in its blocks. Arrays belong to the caller. */
struct batch {
    size_t rows;                                   /* 1..max_step_rows */
    const int32_t *token, *position, *tier, *slot; /* [rows] */
    const int32_t *block_table; /* [kv_groups, slots, blocks_per_slot]: the block of place / 16 */
    /* Under omit [kv_groups, slots]: places taken by earlier positions. NULL: a place is a
     * position. */
    const int32_t *places;
    size_t slots, blocks_per_slot;
    const int32_t *logit_rows; /* ascending rows whose logits are wanted */
    size_t logit_count;
    /* Where the device draws: what it is asked for each of logit_rows; those of which nothing is
     * asked give their logits in its place. NULL: the logits of all. */
    const struct draw_batch *draws;
    int body;                      /* BODY_* */
    const struct cost_model *cost; /* chooses bodies; NULL: packs whenever a row skips */
};

/* What a step computed; valid until the next step. Row l of run and mix starts at l *
 * max_step_rows. */
struct step_result {
    const float *logits; /* [logit_count, vocab], of rows that nothing was asked of; NULL: of all
                            something was */
    const struct draw_outcome *drawn; /* [logit_count]; NULL: nothing was asked */
    const struct draw_best *best;     /* [logit_count, DRAW_BEST_MAX] of those that are told */
    const uint8_t *run;                        /* [sublayers, max_step_rows] 1 = ran */
    const float *mix;                          /* [sublayers, max_step_rows] */
    const float *log_norm;                     /* [rows]: s after the last sub-layer */
    size_t body_none, body_dense, body_gather; /* sub-layers executed by each body */
};

/* The device draws, for a batch that asks for it. */
bool model_draws(const struct model *model);

/* Cannot fail: everything was allocated by model_load. */
void model_step(struct model *model, struct kv_arena *arena, const struct batch *batch,
                struct step_result *result);

#endif
