/* A checkpoint packed on a device, and the scratch of one step. Private to the engine. */
#ifndef FATHOM_MODEL_H
#define FATHOM_MODEL_H

#include "engine/checkpoint.h"
#include "engine/forward.h"
#include "engine/residual.h"

struct layer {
    struct matrix *q, *k, *v, *o; /* [H*D, d], [G*D, d], [G*D, d], [d, H*D] */
    struct matrix *gate, *up,
        *down; /* [inner, d], [inner, d], [d, inner]; gate NULL when ungated */
    /* Biases of the outputs above, and gains of the Q/K norm [D]; NULL where the model has none. */
    struct buffer *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
    struct buffer *q_gain, *k_gain;
};

/* Device memory of one step, made for max_step_rows rows. */
struct scratch {
    struct step_rows step;
    struct buffer *q, *k, *v, *mixed; /* [rows, H*D], [rows, G*D], [rows, G*D], [rows, H*D] */
    struct buffer *gate, *up;         /* [rows, inner] */
    struct buffer *f;                 /* [rows, d] */
    struct buffer *logits;            /* [rows, V] */
    struct step_rows placed; /* under omit: `step`, but with places in one layer's cache for */
    struct buffer *place;    /* positions: int32 [rows] */
    struct buffer *taken;    /* int32 [kv_groups, slots]: of those places, by earlier steps */
    struct row_list wanted;  /* rows whose logits are asked for */
    /* Of those, where the device draws: draw_row [rows], draw_change [DRAW_CHANGES_MAX],
     * draw_outcome [rows], draw_best [rows, DRAW_BEST_MAX]. */
    struct buffer *asked, *changes, *outcome, *best;
    size_t table_capacity;   /* entries of step.block_table */
};

/* Host copies of what a step computed; the logits are the device's own where it shows them. */
struct host_results {
    float *logits, *mix, *log_norm;
    uint8_t *run;
    struct draw_outcome *outcome;
    struct draw_best *best;
};

struct model {
    struct model_info info;
    struct config config;
    struct checkpoint *checkpoint; /* stays open: calibration rewrites depth.json from it */
    struct tokenizer *tokenizer;   /* NULL when the folder has no tokenizer.json */
    struct device *device;
    enum dtype weights; /* of the matrices, F32 or BF16; the KV cache has the same */
    struct residual *residual;
    struct layer *layers; /* [blocks] */
    struct buffer *rope;  /* f32 [context, D] */
    struct scratch scratch;
    struct host_results host;
    struct cost_model cost; /* once measured or read */
    char cost_note[1280];   /* where it comes from */
    char cost_cache[512];   /* folder; empty: none */
};

/* Bytes of one KV block, 16 tokens of all layers. */
size_t model_kv_block_bytes(const struct model *model);

/* Runs a few tokens: FATHOM_INVALID where their logits are not finite. The last step of a load. */
int model_try(struct model *model, struct error *error);

/* FLOPs that a skip of the sub-layer saves for a row that sees `context` positions. (models/nag.md
 * section 2) */
double model_skip_flops(const struct model *model, size_t sublayer, size_t context);

#endif
