#include "engine/kv.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int kv_create(struct kv *kv, size_t blocks, size_t slots, size_t blocks_per_slot,
              struct error *error) {
    memset(kv, 0, sizeof *kv);
    size_t entries;
    if (blocks == 0 || blocks > INT32_MAX || !size_multiply(slots, blocks_per_slot, &entries)) {
        return error_set(error, FATHOM_INVALID, "a KV cache of %zu blocks is outside 1..%d", blocks,
                         INT32_MAX);
    }
    kv->blocks = blocks;
    kv->slots = slots;
    kv->blocks_per_slot = blocks_per_slot;
    kv->table = calloc(entries, sizeof *kv->table);
    kv->held = calloc(slots, sizeof *kv->held);
    kv->references = calloc(blocks, sizeof *kv->references);
    kv->free_blocks = calloc(blocks, sizeof *kv->free_blocks);
    if (!kv->table || !kv->held || !kv->references || !kv->free_blocks) {
        kv_destroy(kv);
        return error_set(error, FATHOM_NO_MEMORY, "no memory for a block table of %zu x %zu", slots,
                         blocks_per_slot);
    }
    for (size_t i = 0; i < blocks; i++) kv->free_blocks[i] = (int32_t)(blocks - 1 - i);
    kv->free_count = blocks;
    return 0;
}

void kv_destroy(struct kv *kv) {
    free(kv->table);
    free(kv->held);
    free(kv->references);
    free(kv->free_blocks);
    memset(kv, 0, sizeof *kv);
}

bool kv_reserve(struct kv *kv, size_t slot, size_t tokens) {
    size_t wanted = kv_blocks_for(tokens), held = kv->held[slot];
    assert(slot < kv->slots && wanted <= kv->blocks_per_slot);
    if (wanted <= held) return true;
    if (wanted - held > kv->free_count) return false;
    int32_t *row = kv->table + slot * kv->blocks_per_slot;
    while (held < wanted) {
        int32_t block = kv->free_blocks[--kv->free_count];
        kv->references[block] = 1;
        row[held++] = block;
    }
    kv->held[slot] = held;
    return true;
}

size_t kv_share_prefix(struct kv *kv, size_t from, size_t to, size_t tokens) {
    size_t shared = tokens / KV_BLOCK_TOKENS;
    assert(from < kv->slots && to < kv->slots && kv->held[to] == 0);
    if (shared > kv->held[from]) shared = kv->held[from];
    const int32_t *source = kv->table + from * kv->blocks_per_slot;
    int32_t *target = kv->table + to * kv->blocks_per_slot;
    for (size_t i = 0; i < shared; i++) {
        target[i] = source[i];
        kv->references[source[i]]++;
    }
    kv->held[to] = shared;
    return shared * KV_BLOCK_TOKENS;
}

void kv_release(struct kv *kv, size_t slot) {
    assert(slot < kv->slots);
    const int32_t *row = kv->table + slot * kv->blocks_per_slot;
    for (size_t i = kv->held[slot]; i-- > 0;) {
        assert(kv->references[row[i]] > 0);
        if (--kv->references[row[i]] == 0) kv->free_blocks[kv->free_count++] = row[i];
    }
    kv->held[slot] = 0;
}
