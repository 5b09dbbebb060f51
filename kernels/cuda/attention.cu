/* Attention over the paged K/V cache.
 *
 * It computes one function in two ways. A context is cut into chunks whose length follows from the
 * length of the context alone; each chunk has an online softmax of its own over tiles of 64 keys;
 * chunks are merged in ascending order. Where rows are few, a block takes one chunk, and the block
 * that comes last merges; else a block takes up to 64 pairs of (row, query head) that share a
 * key/value head, through all of their chunks. Every sum has the same order in both, so prefill,
 * chunked prefill and decode agree bit for bit. */
#include "kernels/cuda/cache.h"

#include <assert.h>
#include <math.h>

#define WARPS          CACHE_WARPS
#define KEYS           64 /* of a tile */
#define TILE           16 /* of a tensor core */
#define PAIRS_MAX      64
#define CHUNK          256 /* positions */
#define CHUNKS_MAX     64  /* longer contexts have longer chunks */
#define SPLIT_ROWS_MAX 64  /* more rows fill the device without splitting contexts */
#define PARTIALS_BYTES ((size_t)64 << 20)

/* ---- Tiles of 16 x 16, by one warp ---------------------------------------------------------- */

/* s = q k^T over `depth`; all three in shared memory. */
static __device__ __forceinline__ void multiply_scores(const __nv_bfloat16 *q,
                                                       const __nv_bfloat16 *k, int stride,
                                                       int depth, float *s, int s_stride) {
    using namespace nvcuda::wmma;
    fragment<accumulator, TILE, TILE, TILE, float> sum;
    fill_fragment(sum, 0.0f);
    for (int d = 0; d < depth; d += TILE) {
        fragment<matrix_a, TILE, TILE, TILE, __nv_bfloat16, row_major> a;
        fragment<matrix_b, TILE, TILE, TILE, __nv_bfloat16, col_major> b;
        load_matrix_sync(a, q + d, (unsigned)stride);
        load_matrix_sync(b, k + d, (unsigned)stride);
        mma_sync(sum, a, b, sum);
    }
    store_matrix_sync(s, sum, (unsigned)s_stride, mem_row_major);
}

/* o += p v over `depth` keys. */
static __device__ __forceinline__ void multiply_values(const __nv_bfloat16 *p, int p_stride,
                                                       const __nv_bfloat16 *v, int v_stride,
                                                       int depth, float *o, int o_stride) {
    using namespace nvcuda::wmma;
    fragment<accumulator, TILE, TILE, TILE, float> sum;
    load_matrix_sync(sum, o, (unsigned)o_stride, mem_row_major);
    for (int t = 0; t < depth; t += TILE) {
        fragment<matrix_a, TILE, TILE, TILE, __nv_bfloat16, row_major> a;
        fragment<matrix_b, TILE, TILE, TILE, __nv_bfloat16, row_major> b;
        load_matrix_sync(a, p + t, (unsigned)p_stride);
        load_matrix_sync(b, v + (size_t)t * v_stride, (unsigned)v_stride);
        mma_sync(sum, a, b, sum);
    }
    store_matrix_sync(o, sum, (unsigned)o_stride, mem_row_major);
}

/* The same in fp32, for checkpoints that are served in it: no tensor cores. */
static __device__ __forceinline__ void multiply_scores(const float *q, const float *k, int stride,
                                                       int depth, float *s, int s_stride) {
    for (int at = (int)threadIdx.x % WARP; at < TILE * TILE; at += WARP) {
        int row = at / TILE, column = at % TILE;
        float sum = 0;
        for (int d = 0; d < depth; d++) sum += q[row * stride + d] * k[column * stride + d];
        s[row * s_stride + column] = sum;
    }
}

static __device__ __forceinline__ void multiply_values(const float *p, int p_stride, const float *v,
                                                       int v_stride, int depth, float *o,
                                                       int o_stride) {
    for (int at = (int)threadIdx.x % WARP; at < TILE * TILE; at += WARP) {
        int row = at / TILE, column = at % TILE;
        float sum = o[row * o_stride + column];
        for (int t = 0; t < depth; t++) sum += p[row * p_stride + t] * v[t * v_stride + column];
        o[row * o_stride + column] = sum;
    }
}

/* ---- Attention ------------------------------------------------------------------------------- */

struct attend {
    struct active rows;
    struct places places;
    struct layout layout;
    struct rotation rotation; /* of q */
    const void *q;
    void *out;
    int heads, head_size, group;         /* query heads; of one key/value head */
    int heads_per_part, parts_per_group; /* a block takes a part of a group */
    int tile_rows, pairs;                /* rows of a block; pairs, a multiple of 16 */
    float scale;
    float *partials; /* NULL: a block takes all chunks of its rows */
    int32_t *arrived;
    int chunks; /* at most, of any row */
};

/* Shared memory of a block. `stride` is 8 elements more than a row needs: rows then begin in
 * different banks. */
template <typename Cached> struct tiles {
    int width, stride; /* head size in whole tiles */
    Cached *q, *k, *v, *p;
    float *s, *o, *sum;  /* scores; of the chunk; of the chunks before it */
    float *high, *total; /* [pairs] of the chunk */
    float *merged_high, *merged_total;
    float *rescale;
    int *position; /* [pairs]; -1: no pair */
};

#define P_STRIDE (KEYS + 8)
#define S_STRIDE (KEYS + 4)

static __device__ __host__ __forceinline__ int whole_tiles(int size) {
    return (size + TILE - 1) / TILE * TILE;
}

template <typename Cached> static size_t tiles_bytes(int pairs, int head_size) {
    int stride = whole_tiles(head_size) + 8;
    return sizeof(Cached) * ((size_t)(pairs + 2 * KEYS) * stride + (size_t)pairs * P_STRIDE) +
           sizeof(float) * (size_t)pairs * (S_STRIDE + 2 * stride + 6);
}

template <typename Cached>
static __device__ __forceinline__ struct tiles<Cached> tiles_of(unsigned char *memory, int pairs,
                                                                int head_size) {
    struct tiles<Cached> tiles;
    tiles.width = whole_tiles(head_size);
    tiles.stride = tiles.width + 8;
    tiles.q = (Cached *)memory;
    tiles.k = tiles.q + pairs * tiles.stride;
    tiles.v = tiles.k + KEYS * tiles.stride;
    tiles.p = tiles.v + KEYS * tiles.stride;
    tiles.s = (float *)(tiles.p + pairs * P_STRIDE);
    tiles.o = tiles.s + pairs * S_STRIDE;
    tiles.sum = tiles.o + pairs * tiles.stride;
    tiles.high = tiles.sum + pairs * tiles.stride;
    tiles.total = tiles.high + pairs;
    tiles.merged_high = tiles.total + pairs;
    tiles.merged_total = tiles.merged_high + pairs;
    tiles.rescale = tiles.merged_total + pairs;
    tiles.position = (int *)(tiles.rescale + pairs);
    return tiles;
}

/* Of a row that sees `length` positions: a function of that alone, or its bits would depend on who
 * else is in the step. */
static __device__ __host__ __forceinline__ int
chunk_of(int length) {
    int chunk = CHUNK;
    while (length > chunk * CHUNKS_MAX) chunk *= 2;
    return chunk;
}

static __device__ __forceinline__ int heads_of_part(const struct attend &attend, int *first) {
    int kv_head = (int)blockIdx.y / attend.parts_per_group;
    int skip = (int)blockIdx.y % attend.parts_per_group * attend.heads_per_part;
    *first = kv_head * attend.group + skip;
    int left = attend.group - skip;
    return left < attend.heads_per_part ? left : attend.heads_per_part;
}

/* q of all pairs, rotated; what is beyond them, and beyond the head, is zero. */
template <typename T, typename Cached>
static __device__ __forceinline__ void load_queries(const struct attend &attend,
                                                    const struct tiles<Cached> &tiles,
                                                    int first_row, int rows) {
    int first_head, heads = heads_of_part(attend, &first_head), size = attend.head_size;
    for (int pair = (int)threadIdx.x / WARP; pair < attend.pairs; pair += WARPS) {
        Cached *to = tiles.q + pair * tiles.stride;
        int i = first_row + pair / heads, lane = (int)threadIdx.x % WARP;
        bool is_pair = pair < rows * heads;
        int row = is_pair ? active_row(attend.rows, i) : 0;
        for (int d = lane + (is_pair ? size : 0); d < tiles.width; d += WARP)
            number_store(&to[d], 0.0f);
        if (is_pair) {
            const T *q =
                (const T *)attend.q + ((size_t)i * attend.heads + first_head + pair % heads) * size;
            if (attend.rotation.table) {
                rotate_head(attend.rotation, row, q, to);
            } else {
                copy_head(q, to, size);
            }
        }
        if (lane != 0) continue;
        tiles.position[pair] = is_pair ? attend.places.position[row] : -1;
        tiles.merged_high[pair] = -INFINITY;
        tiles.merged_total[pair] = 0;
    }
    for (int i = (int)threadIdx.x; i < attend.pairs * tiles.stride; i += WARPS * WARP) {
        tiles.sum[i] = 0;
    }
    if (threadIdx.x == 0) COUNT_BYTES((size_t)rows * heads * size * sizeof(T));
}

template <typename Cached>
static __device__ __forceinline__ void begin_chunk(const struct tiles<Cached> &tiles, int pair) {
    int lane = (int)threadIdx.x % WARP;
    for (int d = lane; d < tiles.width; d += WARP) tiles.o[pair * tiles.stride + d] = 0;
    if (lane != 0) return;
    tiles.high[pair] = -INFINITY;
    tiles.total[pair] = 0;
}

/* Keys first..first+63 of a slot, those from `end` on as zeros: what a reused block holds there may
 * be NaN, which no weight of zero would hide. */
template <typename Cached>
static __device__ __forceinline__ void load_keys(const struct attend &attend,
                                                 const struct tiles<Cached> &tiles, int slot,
                                                 int first, int end) {
    int size = attend.head_size, kv_head = (int)blockIdx.y / attend.parts_per_group;
    const int32_t *blocks = blocks_of(attend.places, slot);
    const int per_vector = (int)(sizeof(uint4) / sizeof(Cached));
    int keys = end - first < KEYS ? end - first : KEYS;
    if (threadIdx.x == 0) COUNT_BYTES((size_t)keys * 2 * size * sizeof(Cached));
    bool by_vector = size % TILE == 0;
    int step = by_vector ? per_vector : 1, steps = tiles.width / step;
    for (int at = (int)threadIdx.x; at < KEYS * steps; at += WARPS * WARP) {
        int t = at / steps, d = at % steps * step, to = t * tiles.stride + d;
        bool is_loaded = t < keys && d < size;
        const Cached *key = NULL, *value = NULL;
        if (is_loaded) {
            int position = first + t;
            unsigned char *block = block_at(attend.layout, blocks, position);
            unsigned char *head = keys_at(attend.layout, block, kv_head);
            key = (const Cached *)head + (size_t)(position % KV_BLOCK_TOKENS) * size + d;
            value = (const Cached *)(head + attend.layout.head_bytes) +
                    (size_t)(position % KV_BLOCK_TOKENS) * size + d;
        }
        if (by_vector) {
            uint4 zero = {0, 0, 0, 0};
            *(uint4 *)(tiles.k + to) = is_loaded ? *(const uint4 *)key : zero;
            *(uint4 *)(tiles.v + to) = is_loaded ? *(const uint4 *)value : zero;
        } else {
            number_store(&tiles.k[to], is_loaded ? number_of(*key) : 0.0f);
            number_store(&tiles.v[to], is_loaded ? number_of(*value) : 0.0f);
        }
    }
}

/* The online softmax of one pair over a tile, by one warp. */
template <typename Cached>
static __device__ __forceinline__ void weigh_tile(const struct tiles<Cached> &tiles, int pair,
                                                  int first, float scale) {
    int lane = (int)threadIdx.x % WARP, position = tiles.position[pair];
    float score[2], top = -INFINITY, high = tiles.high[pair];
    for (int i = 0; i < 2; i++) {
        int t = lane + i * WARP;
        score[i] = first + t <= position ? tiles.s[pair * S_STRIDE + t] * scale : -INFINITY;
        top = score[i] > top ? score[i] : top;
    }
    top = warp_largest(top);
    float now = top > high ? top : high, sum = 0;
    float rescale = now > high ? expf(high - now) : 1;
    for (int i = 0; i < 2; i++) {
        float weight = score[i] == -INFINITY ? 0 : expf(score[i] - now);
        number_store(&tiles.p[pair * P_STRIDE + lane + i * WARP], weight);
        sum += weight;
    }
    sum = warp_sum(sum);
    if (rescale != 1) {
        for (int d = lane; d < tiles.width; d += WARP) tiles.o[pair * tiles.stride + d] *= rescale;
    }
    if (lane != 0) return;
    tiles.high[pair] = now;
    tiles.total[pair] = fmaf(tiles.total[pair], rescale, sum);
}

/* Adds a chunk (highest score, sum of weights, weighted V) to those before it, by one warp. */
template <typename Cached>
static __device__ __forceinline__ void merge_chunk(const struct tiles<Cached> &tiles, int pair,
                                                   float high, float total, const float *o,
                                                   int size) {
    int lane = (int)threadIdx.x % WARP;
    float before = tiles.merged_high[pair], now = high > before ? high : before;
    if (total == 0) return; /* it saw none of these keys; what is not a number goes on */
    float keep = expf(before - now), add = expf(high - now);
    for (int d = lane; d < size; d += WARP) {
        float *sum = &tiles.sum[pair * tiles.stride + d];
        *sum = fmaf(o[d], add, *sum * keep);
    }
    __syncwarp();
    if (lane != 0) return;
    tiles.merged_high[pair] = now;
    tiles.merged_total[pair] = fmaf(total, add, tiles.merged_total[pair] * keep);
}

/* Pairs first_pair..end_pair-1, all of one slot, over keys first..end-1; chunks that end on the way
 * are merged when `merge`. */
template <typename Cached>
static __device__ __forceinline__ void
attend_keys(const struct attend &attend, const struct tiles<Cached> &tiles, int slot,
            int first_pair, int end_pair, int first, int end, bool merge) {
    int warp = (int)threadIdx.x / WARP;
    int low = first_pair / TILE, tiles_high = (end_pair + TILE - 1) / TILE;
    for (int pair = low * TILE + warp; pair < tiles_high * TILE; pair += WARPS)
        begin_chunk(tiles, pair);
    for (; first < end; first += KEYS) {
        __syncthreads();
        load_keys(attend, tiles, slot, first, end);
        __syncthreads();
        for (int item = warp; item < (tiles_high - low) * (KEYS / TILE); item += WARPS) {
            int m = low + item / (KEYS / TILE), n = item % (KEYS / TILE);
            multiply_scores(tiles.q + m * TILE * tiles.stride, tiles.k + n * TILE * tiles.stride,
                            tiles.stride, tiles.width, tiles.s + m * TILE * S_STRIDE + n * TILE,
                            S_STRIDE);
        }
        __syncthreads();
        for (int pair = low * TILE + warp; pair < tiles_high * TILE; pair += WARPS) {
            if (pair >= first_pair && pair < end_pair) {
                weigh_tile(tiles, pair, first, attend.scale);
            } else {
                for (int t = (int)threadIdx.x % WARP; t < KEYS; t += WARP)
                    number_store(&tiles.p[pair * P_STRIDE + t], 0.0f);
            }
        }
        __syncthreads();
        int columns = tiles.width / TILE;
        for (int item = warp; item < (tiles_high - low) * columns; item += WARPS) {
            int m = low + item / columns, n = item % columns;
            multiply_values(tiles.p + m * TILE * P_STRIDE, P_STRIDE, tiles.v + n * TILE,
                            tiles.stride, KEYS, tiles.o + m * TILE * tiles.stride + n * TILE,
                            tiles.stride);
        }
        __syncthreads();
        for (int pair = first_pair + warp; merge && pair < end_pair; pair += WARPS) {
            int length = tiles.position[pair] + 1, next = first + KEYS;
            if (next % chunk_of(length) != 0 && next < length) continue;
            merge_chunk(tiles, pair, tiles.high[pair], tiles.total[pair],
                        tiles.o + pair * tiles.stride, attend.head_size);
            __syncwarp();
            begin_chunk(tiles, pair);
        }
    }
    __syncthreads();
}

template <typename T, typename Cached>
static __device__ __forceinline__ void store_output(const struct attend &attend,
                                                    const struct tiles<Cached> &tiles,
                                                    int first_row, int rows) {
    int first_head, heads = heads_of_part(attend, &first_head), size = attend.head_size;
    for (int pair = (int)threadIdx.x / WARP; pair < rows * heads; pair += WARPS) {
        int i = first_row + pair / heads;
        T *out = (T *)attend.out + ((size_t)i * attend.heads + first_head + pair % heads) * size;
        float total = tiles.merged_total[pair], factor = total == 0 ? 0 : 1 / total;
        for (int d = (int)threadIdx.x % WARP; d < size; d += WARP)
            number_store(&out[d], tiles.sum[pair * tiles.stride + d] * factor);
    }
    if (threadIdx.x == 0) COUNT_BYTES((size_t)rows * heads * size * sizeof(T));
}

/* Where a block leaves its chunk: per pair the highest score, the sum of weights, weighted V. */
static __device__ __forceinline__ float *partial_at(const struct attend &attend, int chunk,
                                                    int pair) {
    size_t block = ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * attend.chunks + chunk;
    return attend.partials + (block * attend.heads_per_part + pair) * (attend.head_size + 2);
}

/* Leaves this block's chunk, and in the last block merges those of all. */
template <typename Cached>
static __device__ __forceinline__ bool merge_partials(const struct attend &attend,
                                                      const struct tiles<Cached> &tiles, int heads,
                                                      int chunks) {
    __shared__ bool is_last;
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, size = attend.head_size;
    for (int pair = warp; pair < heads; pair += WARPS) {
        float *partial = partial_at(attend, (int)blockIdx.z, pair);
        for (int d = lane; d < size; d += WARP) partial[2 + d] = tiles.o[pair * tiles.stride + d];
        if (lane == 0) {
            partial[0] = tiles.high[pair];
            partial[1] = tiles.total[pair];
            COUNT_BYTES(2 * (size_t)(size + 2) * sizeof(float));
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t *arrived = &attend.arrived[blockIdx.x * gridDim.y + blockIdx.y];
        is_last = atomicAdd(arrived, 1) == chunks - 1;
        if (is_last) *arrived = 0;
    }
    __syncthreads();
    __threadfence();
    if (!is_last) return false;
    for (int pair = warp; pair < heads; pair += WARPS) {
        for (int chunk = 0; chunk < chunks; chunk++) {
            const float *partial = partial_at(attend, chunk, pair);
            merge_chunk(tiles, pair, __ldcg(partial), __ldcg(partial + 1), partial + 2, size);
            __syncwarp();
        }
    }
    __syncthreads();
    return true;
}

/* Grid: rows or tiles of rows, parts of groups of heads, chunks (1 without splitting). */
template <typename T, typename Cached>
static __global__ void __launch_bounds__(WARPS *WARP, 3) attend_kernel(struct attend attend) {
    SHARED_MEMORY(memory);
    int first_row = (int)blockIdx.x * attend.tile_rows;
    int rows = active_count(attend.rows) - first_row;
    if (rows <= 0) return;
    if (rows > attend.tile_rows) rows = attend.tile_rows;
    int first_head, heads = heads_of_part(attend, &first_head);
    int row = active_row(attend.rows, first_row), length = attend.places.position[row] + 1;
    int chunk = chunk_of(length), chunks = (length + chunk - 1) / chunk;
    if (attend.partials && (int)blockIdx.z >= chunks) return;
    struct tiles<Cached> tiles = tiles_of<Cached>(memory, attend.pairs, attend.head_size);
    load_queries<T>(attend, tiles, first_row, rows);
    __syncthreads();
    if (attend.partials) {
        int first = (int)blockIdx.z * chunk, end = first + chunk < length ? first + chunk : length;
        attend_keys(attend, tiles, attend.places.slot[row], 0, heads, first, end, chunks == 1);
        if (chunks > 1 && !merge_partials(attend, tiles, heads, chunks)) return;
    } else {
        for (int from = 0, to; from < rows; from = to) {
            int slot = attend.places.slot[active_row(attend.rows, first_row + from)], end = 0;
            for (to = from; to < rows; to++) {
                int other = active_row(attend.rows, first_row + to);
                if (attend.places.slot[other] != slot) break;
                int sees = attend.places.position[other] + 1;
                end = sees > end ? sees : end;
            }
            attend_keys(attend, tiles, slot, from * heads, to * heads, 0, end, true);
        }
    }
    store_output<T>(attend, tiles, first_row, rows);
}

/* ---- Host ------------------------------------------------------------------------------------ */

int cuda_attention_create(struct cuda_device *cuda, struct error *error) {
    size_t rows = cuda->max_rows < SPLIT_ROWS_MAX ? cuda->max_rows : SPLIT_ROWS_MAX;
    size_t most = rows * CHUNKS_MAX * cuda->max_width * 2 * sizeof(float);
    cuda->partials_bytes = most < PARTIALS_BYTES ? most : PARTIALS_BYTES;
    cuda->parts_arrived_count = rows * cuda->max_width;
    cuda->partials = (float *)cuda_allocate(cuda->partials_bytes, error);
    cuda->parts_arrived =
        (int32_t *)cuda_allocate(cuda->parts_arrived_count * sizeof(int32_t), error);
    return cuda->partials && cuda->parts_arrived ? FATHOM_OK : FATHOM_NO_MEMORY;
}

/* Whether to split contexts: few rows, and room for what the chunks leave. */
static bool can_split(const struct cuda_device *cuda, const struct attend *attend, size_t parts) {
    size_t rows = (size_t)attend->rows.most, bytes;
    if (rows > SPLIT_ROWS_MAX || rows * parts > cuda->parts_arrived_count) return false;
    bytes = rows * parts * (size_t)attend->chunks * (size_t)attend->heads_per_part *
            (size_t)(attend->head_size + 2) * sizeof(float);
    return bytes <= cuda->partials_bytes;
}

template <typename T, typename Cached>
static void launch_attend(struct cuda_device *cuda, struct attend *attend, size_t kv_heads) {
    size_t parts = kv_heads * (size_t)attend->parts_per_group;
    unsigned chunks = 1;
    attend->tile_rows = 1;
    attend->pairs = whole_tiles(attend->heads_per_part);
    if (can_split(cuda, attend, parts)) {
        attend->partials = cuda->partials;
        attend->arrived = cuda->parts_arrived;
        chunks = (unsigned)attend->chunks;
    } else {
        attend->pairs = PAIRS_MAX;
        while (attend->pairs > whole_tiles(attend->heads_per_part) &&
               tiles_bytes<Cached>(attend->pairs, attend->head_size) > cuda->shared_limit) {
            attend->pairs -= TILE;
        }
        attend->tile_rows = attend->pairs / attend->heads_per_part;
    }
    size_t shared = tiles_bytes<Cached>(attend->pairs, attend->head_size);
    dim3 grid((unsigned)((attend->rows.most + attend->tile_rows - 1) / attend->tile_rows),
              (unsigned)parts, chunks);
    ALLOW_SHARED((attend_kernel<T, Cached>), shared);
    LAUNCH((attend_kernel<T, Cached>), grid, dim3(WARPS * WARP), shared, cuda->stream, *attend);
}

void cuda_attention(struct device *device, const struct attention *args) {
    struct cuda_device *cuda = cuda_of(device);
    const struct kv_layer *kv = args->kv;
    cuda_flush(cuda);
    struct attend attend = {};
    attend.rows = cuda_rows(cuda, args->list, args->step->rows);
    if (attend.rows.most == 0) return;
    attend.places = places_of(cuda, args->step);
    attend.layout = layout_of(kv);
    attend.rotation = take_rotation(cuda, args->q, attend.rows, kv->head_size);
    attend.q = args->q->data;
    attend.out = args->out->data;
    attend.heads = (int)args->heads;
    attend.head_size = (int)kv->head_size;
    attend.group = (int)(args->heads / kv->kv_heads);
    attend.heads_per_part = attend.group < PAIRS_MAX ? attend.group : PAIRS_MAX;
    attend.parts_per_group = (attend.group + PAIRS_MAX - 1) / PAIRS_MAX;
    attend.scale = 1 / sqrtf((float)kv->head_size);
    size_t blocks = cuda->bucket ? cuda->block_bucket : args->step->blocks_per_slot;
    int longest = (int)blocks * KV_BLOCK_TOKENS;
    attend.chunks =
        (longest + CHUNK - 1) / CHUNK < CHUNKS_MAX ? (longest + CHUNK - 1) / CHUNK : CHUNKS_MAX;
    bool q_bf16 = args->q->type == DTYPE_BF16, kv_bf16 = kv->type == DTYPE_BF16;
    assert(!q_bf16 || kv_bf16);
    if (q_bf16)
        launch_attend<__nv_bfloat16, __nv_bfloat16>(cuda, &attend, kv->kv_heads);
    else if (kv_bf16)
        launch_attend<float, __nv_bfloat16>(cuda, &attend, kv->kv_heads);
    else
        launch_attend<float, float>(cuda, &attend, kv->kv_heads);
}
