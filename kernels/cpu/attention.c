/* Rotary positions, the paged K/V cache, and attention over it.
 *
 * A block of the cache holds 16 positions of all layers: per layer and key/value head K as [D][16],
 * so that 16 scores come out of one vector sum, then V as [16][D]. K and V of a head take
 * 32 * D * (2 or 4) bytes: all of them begin on a border of 64 bytes. */
#include "kernels/cpu/cpu.h"
#include "kernels/number.h"

#include <assert.h>
#include <math.h>

/* ---- Layout ---------------------------------------------------------------------------------- */

/* Bytes of K, or of V, of one head in a block. */
static size_t head_bytes(const struct kv_layer *kv) {
    return KV_BLOCK_TOKENS * kv->head_size * dtype_size(kv->type);
}

static size_t key_offset(const struct kv_layer *kv, size_t head) {
    return (kv->layer * kv->kv_heads + head) * 2 * head_bytes(kv);
}

size_t cpu_kv_block_bytes(const struct kv_layer *kv) {
    assert(kv->type != DTYPE_F16);
    return (kv->layers * kv->kv_heads * 2 * head_bytes(kv) + 63) / 64 * 64;
}

/* The row of the block table that a step's row uses. */
static const int32_t *row_blocks(const struct step_rows *step, size_t row) {
    size_t slot = (size_t)buffer_i32(step->slot)[row];
    return buffer_i32(step->block_table) +
           (step->layer * step->slots + slot) * step->blocks_per_slot;
}

/* The block that a row's own position is in. */
static unsigned char *row_block(const struct step_rows *step, const struct kv_layer *kv,
                                size_t row) {
    size_t position = (size_t)buffer_i32(step->position)[row];
    size_t block = (size_t)row_blocks(step, row)[position / KV_BLOCK_TOKENS];
    return kv->arena->data + block * cpu_kv_block_bytes(kv);
}

/* ---- Rotary positions ------------------------------------------------------------------------ */

struct rope_loop {
    const struct primitives *primitives;
    const struct rope *rope;
    struct rows rows;
};

static void rope_rows(void *context, size_t first, size_t end) {
    const struct rope_loop *loop = context;
    const struct rope *rope = loop->rope;
    size_t size = rope->head_size;
    const float *gain = rope->gain ? buffer_f32(rope->gain) : NULL;
    for (size_t i = first; i < end; i++) {
        size_t row = rows_at(&loop->rows, i);
        const float *table =
            buffer_f32(rope->table) + (size_t)buffer_i32(rope->step->position)[row] * size;
        for (size_t h = 0; h < rope->heads; h++) {
            float *head = buffer_f32(rope->x) + (i * rope->heads + h) * size;
            loop->primitives->rope_head(head, size, table, rope->norm, gain, rope->epsilon,
                                        rope->scale);
        }
    }
}

void cpu_rope(struct device *device, const struct rope *rope) {
    struct cpu_device *cpu = cpu_of(device);
    struct rope_loop loop = {cpu->primitives, rope, rows_of(rope->list, rope->step->rows)};
    size_t cost = rope->heads * (rope->head_size / 2 + 16);
    pool_run(cpu->pool, loop.rows.count, cost, rope_rows, &loop);
}

/* ---- The cache ------------------------------------------------------------------------------- */

struct append_loop {
    const struct kv_append *append;
    struct rows rows;
};

/* element[i * stride] = x[i] in the type of the cache. */
static void store_cached(unsigned char *element, size_t stride, const float *x, size_t count,
                         enum dtype type) {
    if (type == DTYPE_BF16) {
        for (size_t i = 0; i < count; i++) ((uint16_t *)element)[i * stride] = number_to_bf16(x[i]);
    } else {
        for (size_t i = 0; i < count; i++) ((float *)element)[i * stride] = x[i];
    }
}

static void append_rows(void *context, size_t first, size_t end) {
    const struct append_loop *loop = context;
    const struct kv_append *append = loop->append;
    const struct kv_layer *kv = append->kv;
    size_t size = kv->head_size, element = dtype_size(kv->type);
    for (size_t i = first; i < end; i++) {
        size_t row = rows_at(&loop->rows, i);
        size_t t = (size_t)buffer_i32(append->step->position)[row] % KV_BLOCK_TOKENS;
        unsigned char *block = row_block(append->step, kv, row);
        for (size_t h = 0; h < kv->kv_heads; h++) {
            size_t from = (i * kv->kv_heads + h) * size;
            unsigned char *keys = block + key_offset(kv, h), *values = keys + head_bytes(kv);
            store_cached(keys + t * element, KV_BLOCK_TOKENS, buffer_f32(append->k) + from, size,
                         kv->type);
            store_cached(values + t * size * element, 1, buffer_f32(append->v) + from, size,
                         kv->type);
        }
    }
}

void cpu_kv_append(struct device *device, const struct kv_append *append) {
    const struct kv_layer *kv = append->kv;
    struct append_loop loop = {append, rows_of(append->list, append->step->rows)};
    pool_run(cpu_of(device)->pool, loop.rows.count, kv->kv_heads * kv->head_size * 4, append_rows,
             &loop);
}

/* ---- Attention ------------------------------------------------------------------------------- */

/* Items are (part, tile): a part is a run of query heads that share a key/value head, a tile a run
 * of listed rows. Rows of a tile that belong to one sequence read K and V once. */
struct attention_loop {
    const struct primitives *primitives;
    const struct attention *attention;
    struct rows rows;
    size_t parts, heads_per_part;
    size_t tiles, rows_per_tile;
    size_t block_bytes;
};

/* Rows first..end-1 of the list, which have one slot, and the query heads of one part. */
static void attend_rows(const struct attention_loop *loop, size_t part, size_t first, size_t end) {
    const struct attention *attention = loop->attention;
    const struct kv_layer *kv = attention->kv;
    size_t group = attention->heads / kv->kv_heads, parts_per_group = loop->parts / kv->kv_heads;
    size_t kv_head = part / parts_per_group, skip = part % parts_per_group * loop->heads_per_part;
    size_t heads = group - skip < loop->heads_per_part ? group - skip : loop->heads_per_part;
    struct attend attend = {
        .head_size = kv->head_size,
        .arena = kv->arena->data,
        .blocks = row_blocks(attention->step, rows_at(&loop->rows, first)),
        .block_bytes = loop->block_bytes,
        .key_offset = key_offset(kv, kv_head),
        .value_offset = key_offset(kv, kv_head) + head_bytes(kv),
        .type = kv->type,
        .scale = 1 / sqrtf((float)kv->head_size),
    };
    for (size_t i = first; i < end; i++) {
        size_t row = rows_at(&loop->rows, i);
        for (size_t h = 0; h < heads; h++) {
            size_t at = (i * attention->heads + kv_head * group + skip + h) * kv->head_size;
            attend.queries[attend.count++] = (struct query){
                .q = buffer_f32(attention->q) + at,
                .out = buffer_f32(attention->out) + at,
                .length = (size_t)buffer_i32(attention->step->position)[row] + 1,
            };
        }
    }
    loop->primitives->attend(&attend);
}

/* Rows of a prompt see ever longer contexts: tiles are taken from both ends by turns, so that every
 * range of items has its share of the long ones. */
static void attend_items(void *context, size_t first, size_t end) {
    const struct attention_loop *loop = context;
    const int32_t *slot = buffer_i32(loop->attention->step->slot);
    for (size_t item = first; item < end; item++) {
        size_t part = item / loop->tiles, i = item % loop->tiles;
        size_t tile = i % 2 ? loop->tiles - 1 - i / 2 : i / 2;
        size_t row = tile * loop->rows_per_tile, last = row + loop->rows_per_tile;
        if (last > loop->rows.count) last = loop->rows.count;
        while (row < last) {
            size_t same = row + 1;
            while (same < last &&
                   slot[rows_at(&loop->rows, same)] == slot[rows_at(&loop->rows, row)]) {
                same++;
            }
            attend_rows(loop, part, row, same);
            row = same;
        }
    }
}

/* Mean price of an item: rows see contexts of different lengths. */
static size_t attention_cost(const struct attention_loop *loop) {
    const int32_t *position = buffer_i32(loop->attention->step->position);
    size_t positions = 0;
    for (size_t i = 0; i < loop->rows.count; i++) {
        positions += (size_t)position[rows_at(&loop->rows, i)] + 1;
    }
    size_t blocks = positions / loop->tiles / KV_BLOCK_TOKENS + 1;
    return blocks * loop->heads_per_part * 3 * loop->attention->kv->head_size;
}

void cpu_attention(struct device *device, const struct attention *attention) {
    struct cpu_device *cpu = cpu_of(device);
    const struct kv_layer *kv = attention->kv;
    size_t group = attention->heads / kv->kv_heads, threads = pool_threads(cpu->pool);
    struct attention_loop loop = {
        .primitives = cpu->primitives,
        .attention = attention,
        .rows = rows_of(attention->list, attention->step->rows),
        .block_bytes = cpu_kv_block_bytes(kv),
    };
    assert(kv->head_size <= HEAD_SIZE_MAX);
    if (loop.rows.count == 0) return;
    /* Heads of a group share the reading of K and V, and so do rows, unless that would leave
     * threads without work. */
    bool share = loop.rows.count * kv->kv_heads >= 2 * threads;
    loop.heads_per_part = !share ? 1 : group < QUERIES_MAX ? group : QUERIES_MAX;
    size_t parts_per_group = (group + loop.heads_per_part - 1) / loop.heads_per_part;
    loop.parts = kv->kv_heads * parts_per_group;
    size_t most = QUERIES_MAX / loop.heads_per_part;
    size_t even = loop.rows.count * loop.parts / (8 * threads) + 1;
    loop.rows_per_tile = even < most ? even : most;
    loop.tiles = (loop.rows.count + loop.rows_per_tile - 1) / loop.rows_per_tile;
    pool_run(cpu->pool, loop.tiles * loop.parts, attention_cost(&loop), attend_items, &loop);
}
