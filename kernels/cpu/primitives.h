/* The inner loops of the CPU backend: one table per instruction set, all made from primitives.inc.
 *
 * Within one table a result depends on the numbers alone. Tables differ from each other in the last
 * bits only: a fused multiply-add rounds once, portable C twice, bf16 dot products pairwise.
 */
#ifndef FATHOM_CPU_PRIMITIVES_H
#define FATHOM_CPU_PRIMITIVES_H

#include "kernels/kernels.h"

#define PANEL           16    /* output columns that lie side by side in a packed weight */
#define QUERIES_MAX     24    /* of one call of attend */
#define HEAD_SIZE_MAX   1024

/* A part of y = x W^T: rows first_row..end_row-1, panels first_panel..end_panel-1.
 * f32:  x is f32 [rows, steps]; panels is f32 [panel][steps][16].
 * f16:  the same, with panels in f16.
 * bf16: x is [rows, steps] pairs made by round_row; panels is bf16 [panel][steps][16][2]. A step is
 *       then two inputs (an odd last one is paired with zero).
 * int8: x is [rows, steps] groups of codes made by round_row; panels is uint8 [panel][steps][16
 *       fours of inputs][16][4], each a code + 128; scales is bf16 [panel][steps][16]. A step is
 *       then a group of 64 inputs (zeros behind the last one). */
struct gemm {
    const void *x, *panels;
    const uint16_t *scales;
    float *y; /* [rows, out] */
    size_t steps, out;
    size_t row_bytes; /* of x */
    size_t first_row, end_row, first_panel, end_panel;
};

/* A weight type as an instruction set multiplies by it. */
struct gemm_type {
    size_t step_inputs, step_bytes; /* inputs of one step, bytes of one step of x */
    /* A row of x with `in` inputs as gemm reads it; NULL: as it is, in f32. */
    void (*round_row)(const float *x, size_t in, void *row);
    void (*gemm)(const struct gemm *gemm);
};

/* One head of one row. */
struct query {
    const float *q; /* [D] */
    float *out;     /* [D] */
    size_t length;  /* positions 0..length-1 are visible; >= 1 */
};

/* Attention of queries that share a sequence and a key/value head. Block b of the sequence's
 * positions begins at arena + blocks[b] * block_bytes; in it lie K [D][16] and V [16][D]. */
struct attend {
    struct query queries[QUERIES_MAX];
    size_t count, head_size;
    const unsigned char *arena;
    const int32_t *blocks;
    size_t block_bytes, key_offset, value_offset;
    enum dtype type; /* of K and V: F32 or BF16 */
    float scale;
};

struct primitives {
    const char *name;
    bool halves_pay;                 /* 16-bit weights are multiplied by as fast as they are read */
    const unsigned char *int8_order; /* input of a four at each of its places in panels of int8 */
    struct gemm_type gemm[DTYPE_COUNT];
    float (*quantise)(const float *x, int16_t *codes); /* number_quantise: the same bits */

    float (*sum_squares)(const float *x, size_t width);
    /* x += f; returns sum_squares of the new x. */
    float (*add_squares)(const float *f, float *x, size_t width);
    /* out = x * factor, and * gain[i] unless gain is NULL. May be in place. */
    void (*scale)(const float *x, const float *gain, float factor, float *out, size_t width);

    /* mix of one gate for one direction; the step of one row (models/nag.md section 1). */
    float (*gate_mix)(const float *r, size_t width, const float *directions, const float *bias,
                      const float *weight, size_t count);
    void (*nag_step)(const float *f, float *r, size_t width, float g);

    /* gain NULL: none. */
    void (*rope_head)(float *x, size_t head_size, const float *table, enum qk_norm norm,
                      const float *gain, float epsilon, float scale);
    void (*attend)(const struct attend *attend);
    void (*activate)(enum activation kind, const float *gate, const float *up, float *out,
                     size_t count);
};

extern const struct primitives primitives_portable;
#if defined(__x86_64__)
extern const struct primitives primitives_avx2, primitives_avx512, primitives_avx512vnni,
    primitives_avx512bf16;
#endif

#endif
