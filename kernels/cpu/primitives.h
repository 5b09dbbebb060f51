/* The inner loops of the CPU backend: one table per instruction set, all made from primitives.inc.
 *
 * Within one table a result depends on the numbers alone. Tables differ from each other in the last
 * bits only: a fused multiply-add rounds once, portable C twice, bf16 dot products pairwise.
 */
#ifndef FATHOM_CPU_PRIMITIVES_H
#define FATHOM_CPU_PRIMITIVES_H

#include "kernels/kernels.h"

#define PANEL           16    /* output columns that lie side by side in a packed weight */
#define ATTENTION_HEADS 8     /* query heads that one call of attention_row can serve */
#define RMS_EPSILON     1e-6f /* under the root, in rope and rmsnorm */

/* A part of y = x W^T: rows first_row..end_row-1, panels first_panel..end_panel-1.
 * f32:  x is f32 [rows, steps]; panels is f32 [panel][steps][16].
 * bf16: x is [rows, steps] pairs made by round_pairs; panels is bf16 [panel][steps][16][2]. A step
 * is then two inputs (an odd last one is paired with zero). */
struct gemm {
    const void *x, *panels;
    float *y; /* [rows, out] */
    size_t steps, out;
    size_t first_row, end_row, first_panel, end_panel;
};

/* One row's attention for `heads` (1..ATTENTION_HEADS) query heads that share a key/value head.
 * Block b of the row's positions begins at arena + blocks[b] * block_bytes; in it lie K [D][16], V
 * [16][D] and, when `omit`, one byte per position that is 1 where K and V are present. */
struct attention_row {
    const float *q; /* [heads, D] */
    float *out;     /* [heads, D] */
    size_t heads, head_size;
    size_t length; /* positions 0..length-1 are visible */
    const unsigned char *arena;
    const int32_t *blocks;
    size_t block_bytes, key_offset, value_offset, presence_offset;
    bool omit;
    enum dtype type; /* of K and V: F32 or BF16 */
    float scale;
};

struct primitives {
    const char *name;
    enum dtype preferred_weights;
    size_t pair_bytes; /* of one step of x in gemm_bf16 */

    /* Rounds a row of `in` inputs to bf16, in the form that gemm_bf16 reads: (in + 1) / 2 pairs. */
    void (*round_pairs)(const float *x, size_t in, void *pairs);
    void (*gemm_f32)(const struct gemm *gemm);
    void (*gemm_bf16)(const struct gemm *gemm);

    float (*sum_squares)(const float *x, size_t width);
    /* out = x * factor, and * gain[i] unless gain is NULL. May be in place. */
    void (*scale)(const float *x, const float *gain, float factor, float *out, size_t width);

    /* mix of one gate for one direction; the step of one row (models/nag.md section 1). */
    float (*gate_mix)(const float *r, size_t width, const float *directions, const float *bias,
                      const float *weight, size_t count);
    void (*nag_step)(const float *f, float *r, size_t width, float g);

    void (*rope_head)(float *x, size_t head_size, const float *table, enum qk_norm norm,
                      float scale);
    void (*attention_row)(const struct attention_row *row);
    void (*activate)(enum activation kind, const float *gate, const float *up, float *out,
                     size_t count);
};

extern const struct primitives primitives_portable;
#if defined(__x86_64__)
extern const struct primitives primitives_avx2, primitives_avx512, primitives_avx512bf16;
#endif

#endif
