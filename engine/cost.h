/* What a step will take, from what its rows will execute: the arithmetic over a struct cost_model.
 *
 * A step costs its rows (states, gates, and K and V of rows that skip), then for each sub-layer the
 * rows that run it, the positions that they attend to, and the head for rows that want logits. The
 * curves are measured at a few row counts and taken as straight in between.
 */
#ifndef FATHOM_COST_H
#define FATHOM_COST_H

#include "engine/engine.h"

/* Expected work of a step. Rows count with the share of sub-layers that they should run. */
struct cost_load {
    double rows, attn_rows, mlp_rows;
    double attended; /* positions attended to, summed over rows that run attention */
    double logit_rows;
};

/* Nanoseconds; 0 when nothing was measured. */
double cost_predict(const struct cost_model *cost, const struct cost_load *load);

/* Whether packing the running rows of a sub-layer beats running all rows and masking. */
bool cost_prefers_gather(const struct cost_model *cost, size_t sublayer, size_t running,
                         size_t rows);

/* Rows at which those that run a sub-layer cost as much as reading its weights: from there on a
 * skip pays whatever the others do. 0: not within the rows that were measured. */
size_t cost_find_ridge(const struct cost_model *cost);

#endif
