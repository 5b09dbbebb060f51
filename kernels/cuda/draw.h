/* Private to draw.cu and draw_cut.cu: what kernels that draw know of a row of logits. */
#ifndef FATHOM_CUDA_DRAW_H
#define FATHOM_CUDA_DRAW_H

#include "kernels/cuda/block.h"
#include "kernels/weight.h"

#include <float.h>
#include <math.h>

#define DRAW_DIGITS 2048 /* values of a digit of a key */

/* Of one part of a row of logits: the best, and weights. */
struct draw_part {
    uint64_t sum, sum_told; /* of candidates before the cut, at the temperature; of all, at 1 */
    float best;
    int32_t token, ties; /* ties: those at the cut */
};

/* Candidates stay whose key is above `key`, and of those with the same key the first `ties`, by id.
 * While it is searched, `key` is the digits that are known. */
struct draw_cut {
    uint64_t weight; /* of those before the digits that are known; at the end, of all that stay */
    uint64_t rest;   /* what they lack: candidates, or weight */
    uint32_t key, ties;
    int32_t is_found, arrived; /* arrived: blocks that are done with the row */
};
enum { CUT_TOP_K, CUT_TOP_P, CUTS };

/* Scratch of one row. */
struct draw_state {
    struct draw_part parts[DRAW_PARTS_MAX];
    struct draw_cut cuts[CUTS];
    unsigned long long weights[DRAW_DIGITS]; /* of candidates by their next digit; 0 between uses */
    unsigned counts[DRAW_DIGITS];
};

/* One launch: rows `first` .. first + DRAW_ROWS_MAX - 1 of those listed. */
struct drawing {
    struct active rows;
    int first;
    float *logits;
    const struct draw_row *asked;
    const struct draw_change *changes;
    struct draw_outcome *outcome;
    struct draw_best *best;
    struct draw_state *states; /* [DRAW_ROWS_MAX] */
    int vocab, part, part_count;
    bool is_plain;
};

void draw_find_cuts(struct cuda_device *cuda, const struct drawing *drawing, int rows);

static __device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
    for (int bits = WARP / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(ALL_LANES, x, bits);
    return x;
}

/* The sum over the block, in its first thread. `scratch` is shared, one per warp. */
static __device__ __forceinline__ uint64_t block_total(uint64_t x, uint64_t *scratch) {
    x = warp_sum(x);
    __syncthreads(); /* the total before this one has been read */
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int i = 1; threadIdx.x == 0 && i < THREADS / WARP; i++) x += scratch[i];
    return x;
}

/* The sum of x over the threads before this one, and over all of them. */
static __device__ __forceinline__ uint64_t block_before(uint64_t x, uint64_t *scratch,
                                                        uint64_t *total) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    uint64_t sum = x, before = 0;
    for (int distance = 1; distance < WARP; distance *= 2) {
        uint64_t other = __shfl_up_sync(ALL_LANES, sum, (unsigned)distance);
        if (lane >= distance) sum += other;
    }
    __syncthreads(); /* the sums before these have been read */
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    *total = 0;
    for (int i = 0; i < THREADS / WARP; i++) {
        if (i < warp) before += scratch[i];
        *total += scratch[i];
    }
    return before + sum - x;
}

/* As engine/sampler.c: no number is -inf, and the largest float stands for +inf. */
static __device__ __forceinline__ float logit_clean(float logit) {
    if (logit != logit) return -INFINITY;
    return logit > FLT_MAX ? FLT_MAX : logit;
}
static __device__ __forceinline__ float *logits_of(const struct drawing &drawing, int row) {
    return drawing.logits + (size_t)row * drawing.vocab;
}

/* Ascending like the logit; equal for both zeros. */
static __device__ __forceinline__ uint32_t key_of(float logit) {
    uint32_t bits = __float_as_uint(logit + 0.f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}
static __device__ __forceinline__ float logit_of(uint32_t key) {
    return __uint_as_float(key & 0x80000000 ? key & 0x7fffffff : ~key);
}

/* Of two: the larger logit, the lower id among equals. */
static __device__ __forceinline__ void keep_better(float *best, int *token, float other, int id) {
    if (other < *best || (other == *best && id > *token)) return;
    *best = other;
    *token = id;
}

static __device__ __forceinline__ float best_of_row(const struct drawing &drawing,
                                                    const struct draw_state &state, int *token) {
    float best = state.parts[0].best;
    *token = state.parts[0].token;
    for (int i = 1; i < drawing.part_count; i++)
        keep_better(&best, token, state.parts[i].best, state.parts[i].token);
    return best;
}

#endif
