/* The residual of NAG: where a token starts, the end of a sub-layer with the next mix and decision,
 * and the list of rows that run. Formulas: models/nag.md section 1.
 *
 * A block works on one row; where rows are few, several blocks share the gate directions of a row.
 * Each of them computes the new r, which is cheap, and its share of the scores; the block that
 * comes last, when nobody reads the old r any more, writes r and decides. */
#include "kernels/cuda/block.h"

#include <math.h>

#define NAG_EPSILON 1e-6f /* the least ||f_perp||, so that a branch parallel to r makes no step */

/* What follows from a row's new direction. */
struct decide {
    const float *directions, *bias, *weight; /* NULL: after the last sub-layer */
    int count;
    const float *theta; /* of the sub-layer; one tier is `sublayers` elements on */
    int sublayers;
    const int32_t *tier;
    float *mix; /* [rows] of the sub-layer */
    uint8_t *run;
    float *scores;
    int32_t *arrived;
};

static __device__ __forceinline__ float dot_warp(const float *x, const float *w, int width) {
    float sum = 0;
    int lane = (int)threadIdx.x % WARP;
    if (width % 4 == 0) {
        for (int i = lane; i < width / 4; i += WARP) {
            float4 a = ((const float4 *)x)[i], b = ((const float4 *)w)[i];
            sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
    } else {
        for (int i = lane; i < width; i += WARP) sum += x[i] * w[i];
    }
    return warp_sum(sum);
}

/* Scores of this block's share of the directions. True in the block that is last to be done with
 * the row; it sees the scores of all. */
static __device__ __forceinline__ bool score_row(const struct decide &decide, const float *r,
                                                 int width, int row) {
    __shared__ bool is_last;
    int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP;
    for (int c = (int)blockIdx.x * warps + warp; decide.directions && c < decide.count;
         c += (int)gridDim.x * warps) {
        float score = dot_warp(r, decide.directions + (size_t)c * width, width);
        if (threadIdx.x % WARP == 0) {
            decide.scores[(size_t)row * SCORES_MAX + c] = score + decide.bias[c];
            COUNT_BYTES((size_t)width * sizeof(float));
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = gridDim.x == 1 || atomicAdd(&decide.arrived[row], 1) == (int)gridDim.x - 1;
        if (is_last) decide.arrived[row] = 0;
    }
    __syncthreads();
    __threadfence();
    return is_last;
}

/* mix = sum_c p_c * sigmoid(score_c)  (13), and the decision: skip iff mix < theta. Written as
 * !(mix < theta): a mix that is no number runs. */
static __device__ __forceinline__ void decide_row(const struct decide &decide, int row,
                                                  float *scratch) {
    float sum = 0;
    for (int c = (int)threadIdx.x; c < decide.count; c += (int)blockDim.x) {
        sum += decide.weight[c] / (1 + expf(-__ldcg(&decide.scores[(size_t)row * SCORES_MAX + c])));
    }
    float mix = block_sum(sum, scratch);
    if (threadIdx.x != 0) return;
    decide.mix[row] = mix;
    decide.run[row] = !(mix < decide.theta[(size_t)decide.tier[row] * decide.sublayers]);
}

static __device__ __forceinline__ void store_row(const float *r, int width, int row, float *to,
                                                 uint16_t *copy, enum dtype half) {
    for (int i = (int)threadIdx.x; i < width; i += (int)blockDim.x) {
        to[(size_t)row * width + i] = r[i];
        copy[(size_t)row * width + i] = half_bits(r[i], half);
    }
    if (threadIdx.x == 0) COUNT_BYTES((size_t)width * 6);
}

/* ---- Start ----------------------------------------------------------------------------------- */

struct begin {
    struct active rows;
    const int32_t *token;
    const void *table;
    enum dtype table_type;
    int width;
    float log_gain;
    float *r, *s;
    uint16_t *copy;
    enum dtype half;
    struct decide decide;
};

static __global__ void __launch_bounds__(THREADS) begin_kernel(struct begin begin) {
    SHARED_MEMORY(memory);
    __shared__ float scratch[WARP];
    float *r = (float *)memory;
    int row = (int)blockIdx.y, width = begin.width;
    if (row >= active_count(begin.rows)) return;
    size_t token = (size_t)begin.token[row];
    float squares = 0;
    for (int i = (int)threadIdx.x; i < width; i += (int)blockDim.x) {
        float e = table_value(begin.table, begin.table_type, token * width + i);
        r[i] = e;
        squares += e * e;
    }
    float rho = sqrtf(block_sum(squares, scratch) / (float)width);
    for (int i = (int)threadIdx.x; rho != 0 && i < width; i += (int)blockDim.x) r[i] *= 1 / rho;
    __syncthreads();
    if (!score_row(begin.decide, r, width, row)) return;
    store_row(r, width, row, begin.r, begin.copy, begin.half);
    if (threadIdx.x == 0) begin.s[row] = (rho != 0 ? logf(rho) : 0) + begin.log_gain;
    decide_row(begin.decide, row, scratch);
}

/* ---- End of a sub-layer ---------------------------------------------------------------------- */

struct end {
    struct active rows;
    const void *f;
    const int32_t *place; /* where f of a row is; NULL: at its own index */
    int width;
    const float *mix; /* of the sub-layer that ends */
    const uint8_t *run;
    float alpha, beta;
    float *r, *s;
    uint16_t *copy;
    enum dtype half;
    struct decide decide; /* of the next one */
};

/* r' = (r + g * u) / rms, u = sqrt(d) * f_perp / ||f_perp||  (10..12, 16), in shared memory. A row
 * of zeros has no direction: nothing is removed from f along it, and if it stays zero it is not
 * normalised. */
static __device__ __forceinline__ void step_row(float *r, float *f, int width, float g,
                                                float *scratch) {
    int first = (int)threadIdx.x, stride = (int)blockDim.x;
    float sum = 0, norm2 = 0, with_r = 0, perp2 = 0;
    for (int i = first; i < width; i += stride) {
        sum += f[i];
        norm2 += r[i] * r[i];
    }
    float mean = block_sum(sum, scratch) / (float)width;
    norm2 = block_sum(norm2, scratch);
    for (int i = first; i < width; i += stride) with_r += (f[i] - mean) * r[i];
    with_r = block_sum(with_r, scratch);
    float along = norm2 == 0 ? 0 : with_r / norm2;
    for (int i = first; i < width; i += stride) {
        f[i] = f[i] - mean - along * r[i];
        perp2 += f[i] * f[i];
    }
    float norm = sqrtf(block_sum(perp2, scratch));
    float size = g * sqrtf((float)width) / (norm < NAG_EPSILON ? NAG_EPSILON : norm);
    norm2 = 0;
    for (int i = first; i < width; i += stride) {
        r[i] += size * f[i];
        norm2 += r[i] * r[i];
    }
    norm2 = block_sum(norm2, scratch);
    if (norm2 != 0) norm2 = 1 / sqrtf(norm2 / (float)width);
    for (int i = first; norm2 != 0 && i < width; i += stride) r[i] *= norm2;
}

template <typename T> static __global__ void __launch_bounds__(THREADS) end_kernel(struct end end) {
    SHARED_MEMORY(memory);
    __shared__ float scratch[WARP];
    int row = (int)blockIdx.y, width = end.width;
    float *r = (float *)memory, *f = r + (width + 3) / 4 * 4;
    if (row >= active_count(end.rows)) return;
    bool ran = end.run[row];
    if (!ran && !end.decide.directions) return;
    const T *from = (const T *)end.f + (size_t)(ran && end.place ? end.place[row] : row) * width;
    for (int i = (int)threadIdx.x; i < width; i += (int)blockDim.x) {
        r[i] = end.r[(size_t)row * width + i];
        if (ran) f[i] = number_of(from[i]);
    }
    if (threadIdx.x == 0) COUNT_BYTES((size_t)width * (4 + (ran ? sizeof(T) : 0)));
    float g = 0;
    if (ran) {
        g = end.alpha * powf(end.mix[row], end.beta);
        step_row(r, f, width, g, scratch);
    }
    __syncthreads();
    if (!score_row(end.decide, r, width, row)) return;
    if (ran) store_row(r, width, row, end.r, end.copy, end.half);
    if (ran && threadIdx.x == 0) end.s[row] += 0.5f * log1pf(g * g);
    if (end.decide.directions) decide_row(end.decide, row, scratch);
}

/* ---- The list of running rows, and their r side by side -------------------------------------- */

struct list {
    struct active rows;
    const uint8_t *run;
    int32_t *indices, *count, *place;
    /* Of the rows in a layer's cache; places NULL: positions are places. */
    const int32_t *slot, *taken, *shape; /* taken [layers, slots]; shape: of a recorded step */
    int32_t *places;
    int slots, layer;
    struct condition condition; /* of the branches that the listed rows have */
    const uint16_t *copy;       /* NULL: do not pack */
    uint16_t *packed;
    int width;
};

/* The first place of a row's slot in the layer's cache that earlier steps left. */
static __device__ __forceinline__ int first_place(const struct list &list, int row) {
    int slots = list.shape ? list.shape[SHAPE_SLOTS] : list.slots;
    return list.taken[(size_t)list.layer * slots + list.slot[row]];
}

/* One branch is taken if the condition is not 0; of several the one that it numbers, if any. */
static __device__ __forceinline__ void set_condition(const struct condition &condition,
                                                     int length) {
    int branch = 0;
    while (branch < condition.count && length > condition.length[branch]) branch++;
    if (length == 0) branch = condition.count;
    unsigned value = (unsigned)(condition.count == 1 ? length > 0 : branch);
    if (condition.count > 0) cudaGraphSetConditional(condition.handle, value);
}

/* A block per row counts the running rows before it: no second pass, no order of blocks. */
static __global__ void __launch_bounds__(THREADS) list_kernel(struct list list) {
    __shared__ float scratch[WARP];
    int row = (int)blockIdx.x, rows = active_count(list.rows);
    if (row >= rows) return;
    bool runs = list.run[row];
    if (!runs && row != rows - 1 && !list.places) return;
    float before = 0, of_slot = 0; /* exact: below 2^24 */
    for (int i = (int)threadIdx.x; i < row; i += (int)blockDim.x) {
        if (!list.run[i]) continue;
        before += 1;
        if (list.places && list.slot[i] == list.slot[row]) of_slot += 1;
    }
    int at = (int)block_sum(before, scratch);
    if (list.places) {
        int next = first_place(list, row) + (int)block_sum(of_slot, scratch);
        if (threadIdx.x == 0) list.places[row] = runs || next == 0 ? next : next - 1;
    }
    if (threadIdx.x == 0) {
        COUNT_BYTES((size_t)row);
        if (row == rows - 1) {
            *list.count = at + runs;
            set_condition(list.condition, at + runs);
        }
        if (runs) {
            list.indices[at] = row;
            list.place[row] = at;
        }
    }
    if (!runs || !list.copy) return;
    const uint16_t *from = list.copy + (size_t)row * list.width;
    uint16_t *to = list.packed + (size_t)at * list.width;
    if (list.width % 8 == 0) {
        for (int i = (int)threadIdx.x; i < list.width / 8; i += (int)blockDim.x) {
            ((uint4 *)to)[i] = ((const uint4 *)from)[i];
        }
    } else {
        for (int i = (int)threadIdx.x; i < list.width; i += (int)blockDim.x) to[i] = from[i];
    }
    if (threadIdx.x == 0) COUNT_BYTES((size_t)list.width * 4);
}

/* ---- Host ------------------------------------------------------------------------------------ */

static struct decide decide_of(struct cuda_device *cuda, const struct decisions *decisions,
                               const struct gate *gate, const struct step_rows *step,
                               size_t sublayer) {
    struct decide decide = {};
    decide.arrived = cuda->arrived;
    decide.scores = cuda->scores;
    if (!gate) return decide;
    size_t first = sublayer * decisions->max_rows;
    decide.directions = (const float *)gate->directions->data;
    decide.bias = (const float *)gate->bias->data;
    decide.weight = (const float *)gate->weight->data;
    decide.count = (int)gate->count;
    decide.theta = (const float *)decisions->theta->data + sublayer;
    decide.sublayers = (int)decisions->sublayers;
    decide.tier = (const int32_t *)step->tier->data;
    decide.mix = (float *)decisions->mix->data + first;
    decide.run = decisions->run->data + first;
    return decide;
}

/* Blocks for one row: many where there are few rows, so that the gates, the most bytes by far, are
 * read by more of the device. What is computed does not depend on it. */
static unsigned gate_parts(const struct decide &decide, int rows, unsigned threads) {
    int warps = (int)threads / WARP, most = (decide.count + warps - 1) / warps;
    int parts = rows <= 16 ? GATE_PARTS_MAX : rows <= 64 ? 2 : 1;
    if (parts > most) parts = most;
    return parts < 1 ? 1 : (unsigned)parts;
}

static void list_rows(struct cuda_device *cuda, const struct decisions *decisions,
                      struct active rows, size_t sublayer, const struct buffer *r, size_t width,
                      const struct step_rows *step, const struct kv_place *place) {
    struct list list = {};
    list.rows = rows;
    list.run = decisions->run->data + sublayer * decisions->max_rows;
    list.indices = (int32_t *)decisions->running.indices->data;
    list.count = (int32_t *)decisions->running.count->data;
    list.place = cuda->place;
    list.copy = cuda->copy;
    list.packed = (uint16_t *)cuda->packed;
    list.width = (int)width;
    if (place) {
        list.slot = (const int32_t *)step->slot->data;
        list.taken = (const int32_t *)place->taken->data;
        list.shape = cuda->bucket ? cuda->shape : NULL;
        list.places = (int32_t *)place->place->data;
        list.slots = (int)step->slots;
        list.layer = (int)place->layer;
    }
    cuda_condition(cuda, rows.most, &list.condition);
    LAUNCH(list_kernel, dim3((unsigned)rows.most), dim3(threads_of(width)), 0, cuda->stream, list);
    cuda->packed_of = r;
    cuda->packed_list = decisions->running.indices;
    cuda->packed_type = cuda->half;
    cuda->packed_rows = rows.most;
    cuda->known_list = NULL;
}

void cuda_nag_begin(struct device *device, const struct nag_begin *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    struct begin begin = {};
    begin.rows = cuda_rows(cuda, NULL, args->step->rows);
    begin.token = (const int32_t *)args->step->token->data;
    begin.table = args->table->data;
    begin.table_type = args->table_type;
    begin.width = (int)args->width;
    begin.log_gain = args->log_gain;
    begin.r = (float *)args->r->data;
    begin.s = (float *)args->s->data;
    begin.copy = cuda->copy;
    begin.half = cuda->half;
    begin.decide = decide_of(cuda, args->decisions, args->next, args->step, 0);
    dim3 grid(gate_parts(begin.decide, begin.rows.most, threads_of(args->width)),
              (unsigned)begin.rows.most);
    size_t shared = args->width * sizeof(float);
    ALLOW_SHARED(begin_kernel, shared);
    LAUNCH(begin_kernel, grid, dim3(threads_of(args->width)), shared, cuda->stream, begin);
    cuda->copy_of = args->r;
    list_rows(cuda, args->decisions, begin.rows, 0, args->r, args->width, args->step, args->place);
}

void cuda_nag_end_sublayer(struct device *device, const struct nag_end_sublayer *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    const struct decisions *decisions = args->decisions;
    struct end end = {};
    end.rows = cuda_rows(cuda, NULL, args->step->rows);
    end.f = args->f->data;
    end.place = args->packed ? cuda->place : NULL;
    end.width = (int)args->width;
    end.mix = (const float *)decisions->mix->data + args->sublayer * decisions->max_rows;
    end.run = decisions->run->data + args->sublayer * decisions->max_rows;
    end.alpha = args->gate->alpha;
    end.beta = args->gate->beta;
    end.r = (float *)args->r->data;
    end.s = (float *)args->s->data;
    end.copy = cuda->copy;
    end.half = cuda->half;
    end.decide = decide_of(cuda, decisions, args->next, args->step, args->sublayer + 1);
    dim3 grid(gate_parts(end.decide, end.rows.most, threads_of(args->width)),
              (unsigned)end.rows.most);
    size_t shared = ((args->width + 3) / 4 * 4 + args->width) * sizeof(float);
    if (args->f->type == DTYPE_F32) {
        ALLOW_SHARED(end_kernel<float>, shared);
        LAUNCH(end_kernel<float>, grid, dim3(threads_of(args->width)), shared, cuda->stream, end);
    } else {
        ALLOW_SHARED(end_kernel<__nv_bfloat16>, shared);
        LAUNCH(end_kernel<__nv_bfloat16>, grid, dim3(threads_of(args->width)), shared, cuda->stream,
               end);
    }
    cuda->packed_of = NULL;
    if (args->next) {
        list_rows(cuda, decisions, end.rows, args->sublayer + 1, args->r, args->width, args->step,
                  args->place);
    }
}
