/* Runs windows of text straight through a model, without an engine: for evaluation and
 * calibration. */
#ifndef FATHOM_MEASURE_H
#define FATHOM_MEASURE_H

#include "engine/model.h"

/* One sequence at a time in a KV cache of its own. */
struct window_runner {
    struct model *model;
    struct kv_arena *arena;
    size_t window, blocks;
    int body;     /* BODY_*; BODY_AUTO unless a test says otherwise */
    int32_t *ids; /* owns the arrays below */
    int32_t *position, *tier, *slot, *logit_rows;
    int32_t *block_table, *places; /* [kv_groups, blocks], [kv_groups] */
};

int window_runner_create(struct model *model, size_t window, struct window_runner *runner,
                         struct error *error);
void window_runner_destroy(struct window_runner *runner);

/* Runs positions first .. first + rows - 1 of a window whose earlier positions have run. The head
 * is the dearest part of a small model: `logits` says whether those of all rows are wanted. */
void window_runner_step(struct window_runner *runner, const int32_t *window, size_t first,
                        size_t rows, size_t tier, bool logits, struct step_result *result);

#endif
