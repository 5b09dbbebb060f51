/* The paged K/V cache as the device sees it, and the rotation that q and k wait for: shared by
 * those who write the cache and those who read it.
 *
 * A block of the cache holds 16 positions of all layers: per layer and key/value head K as [16][D],
 * then V as [16][D]. */
#ifndef FATHOM_CUDA_CACHE_H
#define FATHOM_CUDA_CACHE_H

#include "kernels/cuda/block.h"

#define CACHE_WARPS 4 /* of a block that reads or writes the cache */

/* Where one layer's share of a block is. */
struct layout {
    unsigned char *arena;
    size_t block_bytes, head_bytes; /* head_bytes: of K, or of V, of one head */
    size_t first;                   /* of the layer's K of head 0 */
};

/* Rows of a step in the cache. */
struct places {
    const int32_t *position, *slot, *table;
    const int32_t *shape; /* of a recorded step: in place of the next two */
    int slots, blocks_per_slot, layer;
};

struct layout layout_of(const struct kv_layer *kv);
struct places places_of(const struct cuda_device *cuda, const struct step_rows *step);

/* The rotation that waits for `buffer`, for an operation over `rows` that will do it on the way;
 * one of other rows is done at once. `table` NULL: none. */
struct rotation take_rotation(struct cuda_device *cuda, const struct buffer *buffer,
                              struct active rows, size_t head_size);

/* The blocks of a slot, in the order of its positions. */
static __device__ __forceinline__ const int32_t *blocks_of(const struct places &places, int slot) {
    int slots = places.shape ? places.shape[SHAPE_SLOTS] : places.slots;
    int per_slot = places.shape ? places.shape[SHAPE_BLOCKS] : places.blocks_per_slot;
    return places.table + ((size_t)places.layer * slots + slot) * per_slot;
}

static __device__ __forceinline__ unsigned char *block_at(const struct layout &layout,
                                                          const int32_t *blocks, int position) {
    return layout.arena + (size_t)blocks[position / KV_BLOCK_TOKENS] * layout.block_bytes;
}

static __device__ __forceinline__ unsigned char *keys_at(const struct layout &layout,
                                                         unsigned char *block, int head) {
    return block + layout.first + (size_t)head * 2 * layout.head_bytes;
}

/* One head by one warp: out = norm and rotation of x (may be in place), for a row's position. The
 * table has cos, then sin. */
template <typename In, typename Out>
static __device__ __forceinline__ void
rotate_head(const struct rotation &rotation, int row, const In *x, Out *out) {
    int lane = (int)threadIdx.x % WARP, size = rotation.head_size, half = size / 2;
    const float *table = rotation.table + (size_t)rotation.position[row] * size;
    const float *gain = rotation.gain;
    float scale = rotation.scale;
    bool is_before = rotation.norm == QK_NORM_BEFORE_ROPE;
    float squares = 0;
    for (int i = lane; i < half && rotation.norm != QK_NORM_NONE; i += WARP) {
        float a = number_of(x[i]), b = number_of(x[half + i]);
        float c = table[i], s = table[half + i];
        float u = a * c - b * s, v = b * c + a * s;
        squares += is_before ? a * a + b * b : u * u + v * v;
    }
    if (rotation.norm != QK_NORM_NONE) {
        scale /= sqrtf(warp_sum(squares) / (float)size + rotation.epsilon);
    }
    for (int i = lane; i < half; i += WARP) {
        float a = number_of(x[i]), b = number_of(x[half + i]);
        float c = table[i], s = table[half + i], p = 1, q = 1;
        if (gain) {
            p = gain[i];
            q = gain[half + i];
        }
        if (is_before) {
            a *= p;
            b *= q;
            p = q = 1;
        }
        number_store(&out[i], (a * c - b * s) * scale * p);
        number_store(&out[half + i], (b * c + a * s) * scale * q);
    }
}

template <typename In, typename Out>
static __device__ __forceinline__ void copy_head(const In *x, Out *out, int size) {
    for (int i = (int)threadIdx.x % WARP; i < size; i += WARP)
        number_store(&out[i], number_of(x[i]));
}

#endif
