/* Drawing tokens: what comes back of a row of logits is an id.
 *
 * The vocabulary is cut into parts whose length follows from its size alone, a block to each: first
 * the best logit of every part, then its sum of weights, then one block per row that finds the part
 * in which the draw falls, and the token in it. Sums are in double, so that a token differs from what
 * one sum in order would give only where the draw falls within its rounding. */
#include "kernels/cuda/block.h"

#include <float.h>
#include <limits.h>
#include <math.h>

#define PART_MIN 4096

struct drawing {
    struct active rows;
    const float *logits;
    const float *temperature;
    const double *uniform;
    int32_t *token;
    struct draw_part *parts; /* [rows, DRAW_PARTS_MAX] */
    int vocab, part, part_count;
};

/* As engine/sampler.c: no number is -inf, and the largest float stands for +inf. */
static __device__ __forceinline__ float logit_at(const struct drawing &drawing, int row, int id) {
    float logit = drawing.logits[(size_t)row * drawing.vocab + id];
    if (logit != logit) return -INFINITY;
    return logit > FLT_MAX ? FLT_MAX : logit;
}

static __device__ __forceinline__ double warp_sum(double x) {
    for (int bits = WARP / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(ALL_LANES, x, bits);
    return x;
}

/* Of two: the larger logit, the lower id among equals. */
static __device__ __forceinline__ void keep_better(float *best, int *token, float other, int id) {
    if (other < *best || (other == *best && id > *token)) return;
    *best = other;
    *token = id;
}

/* Grid: parts, rows. */
static __global__ void __launch_bounds__(THREADS) best_kernel(struct drawing drawing) {
    __shared__ float bests[WARP];
    __shared__ int tokens[WARP];
    int row = (int)blockIdx.y, thread = (int)threadIdx.x;
    if (row >= active_count(drawing.rows) || drawing.temperature[row] < 0) return;
    int first = (int)blockIdx.x * drawing.part, end = first + drawing.part, token = INT_MAX;
    float best = -INFINITY;
    if (end > drawing.vocab) end = drawing.vocab;
    for (int id = first + thread; id < end; id += THREADS)
        keep_better(&best, &token, logit_at(drawing, row, id), id);
    for (int bits = WARP / 2; bits > 0; bits /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, best, bits);
        int id = __shfl_xor_sync(ALL_LANES, token, bits);
        keep_better(&best, &token, other, id);
    }
    if (thread % WARP == 0) {
        bests[thread / WARP] = best;
        tokens[thread / WARP] = token;
    }
    __syncthreads();
    if (thread != 0) return;
    for (int i = 1; i < THREADS / WARP; i++) keep_better(&best, &token, bests[i], tokens[i]);
    struct draw_part *part = &drawing.parts[row * DRAW_PARTS_MAX + (int)blockIdx.x];
    part->best = best;
    part->token = token;
    COUNT_BYTES((size_t)(end - first) * sizeof(float));
}

static __device__ __forceinline__ float best_of_row(const struct drawing &drawing, int row,
                                                    int *token) {
    const struct draw_part *parts = drawing.parts + row * DRAW_PARTS_MAX;
    float best = parts[0].best;
    *token = parts[0].token;
    for (int i = 1; i < drawing.part_count; i++)
        keep_better(&best, token, parts[i].best, parts[i].token);
    return best;
}

static __device__ __forceinline__ double weight_at(const struct drawing &drawing, int row, int id,
                                                   float best) {
    return (double)expf((logit_at(drawing, row, id) - best) / drawing.temperature[row]);
}

/* Grid: parts, rows. */
static __global__ void __launch_bounds__(THREADS) weigh_kernel(struct drawing drawing) {
    __shared__ double sums[WARP];
    int row = (int)blockIdx.y, thread = (int)threadIdx.x, token;
    if (row >= active_count(drawing.rows) || !(drawing.temperature[row] > 0)) return;
    int first = (int)blockIdx.x * drawing.part, end = first + drawing.part;
    float best = best_of_row(drawing, row, &token);
    if (best == -INFINITY) return;
    if (end > drawing.vocab) end = drawing.vocab;
    double sum = 0;
    for (int id = first + thread; id < end; id += THREADS) sum += weight_at(drawing, row, id, best);
    sum = warp_sum(sum);
    if (thread % WARP == 0) sums[thread / WARP] = sum;
    __syncthreads();
    if (thread != 0) return;
    for (int i = 1; i < THREADS / WARP; i++) sum += sums[i];
    drawing.parts[row * DRAW_PARTS_MAX + (int)blockIdx.x].sum = sum;
    COUNT_BYTES((size_t)(end - first) * sizeof(float));
}

/* The first index whose weight is above what is left of *rest when those before it are taken off;
 * -1: none is. */
template <typename Weight>
static __device__ __forceinline__ int find_share(int count, double *rest, Weight weight) {
    for (int i = 0; i < count; i++) {
        double share = weight(i);
        if (*rest - share < 0) return i;
        *rest -= share;
    }
    return -1;
}

/* Grid: rows. A part is cut again, a run of ids to each thread. */
static __global__ void __launch_bounds__(THREADS) choose_kernel(struct drawing drawing) {
    __shared__ double sums[THREADS];
    __shared__ int chosen;
    __shared__ double shared_rest;
    int row = (int)blockIdx.x, thread = (int)threadIdx.x, token;
    if (row >= active_count(drawing.rows) || drawing.temperature[row] < 0) return;
    const struct draw_part *parts = drawing.parts + row * DRAW_PARTS_MAX;
    float best = best_of_row(drawing, row, &token);
    if (best == -INFINITY || drawing.temperature[row] == 0) {
        if (thread == 0) drawing.token[row] = best == -INFINITY ? -1 : token;
        return;
    }
    if (thread == 0) {
        double total = 0;
        for (int i = 0; i < drawing.part_count; i++) total += parts[i].sum;
        double rest = drawing.uniform[row] * total;
        chosen = find_share(drawing.part_count, &rest, [&](int i) { return parts[i].sum; });
        shared_rest = rest;
        drawing.token[row] = token; /* rounding may leave a rest behind the last weight */
    }
    __syncthreads();
    if (chosen < 0) return;
    int run = (drawing.part + THREADS - 1) / THREADS, first = chosen * drawing.part + thread * run;
    int end = chosen * drawing.part + drawing.part;
    if (end > drawing.vocab) end = drawing.vocab;
    if (end > first + run) end = first + run;
    double sum = 0, rest = shared_rest;
    for (int id = first; id < end; id++) sum += weight_at(drawing, row, id, best);
    sums[thread] = sum;
    __syncthreads();
    if (thread == 0) {
        chosen = find_share(THREADS, &rest, [&](int i) { return sums[i]; });
        shared_rest = rest;
    }
    __syncthreads();
    if (thread != chosen) return;
    rest = shared_rest;
    int at = find_share(end - first, &rest,
                        [&](int i) { return weight_at(drawing, row, first + i, best); });
    if (at >= 0) drawing.token[row] = first + at;
    COUNT_BYTES((size_t)drawing.part * sizeof(float));
}

void cuda_draw(struct device *device, const struct draw *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    struct drawing drawing = {};
    drawing.rows = cuda_rows(cuda, args->list, 0);
    if (drawing.rows.most == 0) return;
    drawing.logits = (const float *)args->logits->data;
    drawing.temperature = (const float *)args->temperature->data;
    drawing.uniform = (const double *)args->uniform->data;
    drawing.token = (int32_t *)args->token->data;
    drawing.parts = cuda->draw_parts;
    drawing.vocab = (int)args->vocab;
    drawing.part = PART_MIN;
    while ((size_t)drawing.part * DRAW_PARTS_MAX < args->vocab) drawing.part *= 2;
    drawing.part_count = (drawing.vocab + drawing.part - 1) / drawing.part;
    dim3 parts((unsigned)drawing.part_count, (unsigned)drawing.rows.most);
    LAUNCH(best_kernel, parts, dim3(THREADS), 0, cuda->stream, drawing);
    LAUNCH(weigh_kernel, parts, dim3(THREADS), 0, cuda->stream, drawing);
    LAUNCH(choose_kernel, dim3((unsigned)drawing.rows.most), dim3(THREADS), 0, cuda->stream,
           drawing);
}
