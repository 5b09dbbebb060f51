/* Rotary positions, and what is written into the paged K/V cache. */
#include "kernels/cuda/cache.h"

#include <assert.h>
#include <math.h>

/* ---- Layout ---------------------------------------------------------------------------------- */

static size_t head_bytes(const struct kv_layer *kv) {
    return KV_BLOCK_TOKENS * kv->head_size * dtype_size(kv->type);
}

size_t cuda_kv_block_bytes(const struct kv_layer *kv) {
    assert(kv->type != DTYPE_F16);
    return (kv->layers * kv->kv_heads * 2 * head_bytes(kv) + 63) / 64 * 64;
}

struct layout layout_of(const struct kv_layer *kv) {
    struct layout layout = {};
    layout.arena = kv->arena->data;
    layout.block_bytes = cuda_kv_block_bytes(kv);
    layout.head_bytes = head_bytes(kv);
    layout.first = kv->layer * kv->kv_heads * 2 * layout.head_bytes;
    return layout;
}

struct places places_of(const struct cuda_device *cuda, const struct step_rows *step) {
    struct places places = {};
    places.position = (const int32_t *)step->position->data;
    places.slot = (const int32_t *)step->slot->data;
    places.table = (const int32_t *)step->block_table->data;
    places.shape = cuda->bucket ? cuda->shape : NULL;
    places.slots = (int)step->slots;
    places.blocks_per_slot = (int)step->blocks_per_slot;
    places.layer = (int)step->layer;
    return places;
}

/* ---- Rotary positions ------------------------------------------------------------------------ */

static __device__ __forceinline__ struct active rotation_rows(const struct rotation &rotation) {
    struct active rows;
    rows.indices = rotation.indices;
    rows.count = rotation.count;
    rows.most = rotation.rows;
    return rows;
}

template <typename T>
static __global__ void __launch_bounds__(CACHE_WARPS *WARP)
    rotate_kernel(struct rotation rotation, T *x) {
    struct active rows = rotation_rows(rotation);
    int i = (int)blockIdx.x;
    if (i >= active_count(rows)) return;
    int row = active_row(rows, i);
    for (int h = (int)threadIdx.x / WARP; h < rotation.heads; h += CACHE_WARPS) {
        T *head = x + ((size_t)i * rotation.heads + h) * rotation.head_size;
        rotate_head(rotation, row, head, head);
    }
}

void cuda_rotate_now(struct cuda_device *cuda, struct buffer *buffer) {
    if (!buffer->is_rotated) return;
    cuda_flush(cuda);
    buffer->is_rotated = false;
    dim3 grid((unsigned)buffer->rotation.rows), block(CACHE_WARPS * WARP);
    if (buffer->type == DTYPE_F32) {
        LAUNCH(rotate_kernel<float>, grid, block, 0, cuda->stream, buffer->rotation,
               (float *)buffer->data);
    } else {
        LAUNCH(rotate_kernel<__nv_bfloat16>, grid, block, 0, cuda->stream, buffer->rotation,
               (__nv_bfloat16 *)buffer->data);
    }
}

void cuda_rope(struct device *device, const struct rope *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    cuda_rotate_now(cuda, args->x);
    struct active rows = cuda_rows(cuda, args->list, args->step->rows);
    if (rows.most == 0) return;
    struct rotation *rotation = &args->x->rotation;
    rotation->position = (const int32_t *)args->step->position->data;
    rotation->indices = rows.indices;
    rotation->count = rows.count;
    rotation->rows = rows.most;
    rotation->table = (const float *)args->table->data;
    rotation->heads = (int)args->heads;
    rotation->head_size = (int)args->head_size;
    rotation->norm = args->norm;
    rotation->scale = args->scale;
    rotation->epsilon = args->epsilon;
    rotation->gain = args->gain ? (const float *)args->gain->data : NULL;
    args->x->is_rotated = true;
}

struct rotation take_rotation(struct cuda_device *cuda, const struct buffer *buffer,
                              struct active rows, size_t head_size) {
    struct rotation none = {};
    struct buffer *x = (struct buffer *)buffer;
    if (!x->is_rotated) return none;
    if (x->rotation.indices != rows.indices || x->rotation.rows != rows.most ||
        x->rotation.head_size != (int)head_size) {
        cuda_rotate_now(cuda, x);
        return none;
    }
    x->is_rotated = false;
    return x->rotation;
}

/* ---- The cache ------------------------------------------------------------------------------- */

struct append {
    struct active rows;
    struct places places;
    struct layout layout;
    struct rotation rotation; /* of k */
    int kv_heads, head_size;
};

template <typename T, typename Cached>
static __global__ void __launch_bounds__(CACHE_WARPS *WARP)
    append_kernel(struct append append, const T *k, const T *v) {
    int i = (int)blockIdx.x, size = append.head_size;
    if (i >= active_count(append.rows)) return;
    int row = active_row(append.rows, i), position = append.places.position[row];
    int t = position % KV_BLOCK_TOKENS;
    const int32_t *blocks = blocks_of(append.places, append.places.slot[row]);
    unsigned char *block = block_at(append.layout, blocks, position);
    for (int h = (int)threadIdx.x / WARP; h < append.kv_heads; h += CACHE_WARPS) {
        size_t from = ((size_t)i * append.kv_heads + h) * size;
        unsigned char *keys = keys_at(append.layout, block, h);
        Cached *key = (Cached *)keys + (size_t)t * size;
        Cached *value = (Cached *)(keys + append.layout.head_bytes) + (size_t)t * size;
        if (append.rotation.table) {
            rotate_head(append.rotation, row, k + from, key);
        } else {
            copy_head(k + from, key, size);
        }
        copy_head(v + from, value, size);
    }
    if (threadIdx.x == 0)
        COUNT_BYTES((size_t)2 * append.kv_heads * size * (sizeof(T) + sizeof(Cached)));
}

template <typename T, typename Cached>
static void launch_append(struct cuda_device *cuda, const struct append *append,
                          const struct kv_append *args) {
    LAUNCH((append_kernel<T, Cached>), dim3((unsigned)append->rows.most), dim3(CACHE_WARPS * WARP),
           0, cuda->stream, *append, (const T *)args->k->data, (const T *)args->v->data);
}

void cuda_kv_append(struct device *device, const struct kv_append *args) {
    struct cuda_device *cuda = cuda_of(device);
    const struct kv_layer *kv = args->kv;
    cuda_flush(cuda);
    cuda_rotate_now(cuda, (struct buffer *)args->v);
    struct append append = {};
    append.rows = cuda_rows(cuda, args->list, args->step->rows);
    append.places = places_of(cuda, args->step);
    append.layout = layout_of(kv);
    append.kv_heads = (int)kv->kv_heads;
    append.head_size = (int)kv->head_size;
    if (append.rows.most == 0) return;
    append.rotation = take_rotation(cuda, args->k, append.rows, kv->head_size);
    assert(args->k->type == DTYPE_F32 || kv->type == DTYPE_BF16);
    if (args->k->type == DTYPE_BF16)
        launch_append<__nv_bfloat16, __nv_bfloat16>(cuda, &append, args);
    else if (kv->type == DTYPE_BF16)
        launch_append<float, __nv_bfloat16>(cuda, &append, args);
    else
        launch_append<float, float>(cuda, &append, args);
}
