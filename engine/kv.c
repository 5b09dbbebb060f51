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
    kv->oldest = kv->newest = -1;
    kv->table = calloc(entries, sizeof *kv->table);
    kv->held = calloc(slots, sizeof *kv->held);
    kv->block = calloc(blocks, sizeof *kv->block);
    kv->free_blocks = calloc(blocks, sizeof *kv->free_blocks);
    if (!kv->table || !kv->held || !kv->block || !kv->free_blocks) {
        kv_destroy(kv);
        return error_set(error, FATHOM_NO_MEMORY, "no memory for a block table of %zu x %zu", slots,
                         blocks_per_slot);
    }
    int result = prefix_index_create(&kv->index, blocks, error);
    if (result != 0) {
        kv_destroy(kv);
        return result;
    }
    for (size_t i = 0; i < blocks; i++) kv->free_blocks[i] = (int32_t)(blocks - 1 - i);
    kv->free_count = blocks;
    return 0;
}

void kv_destroy(struct kv *kv) {
    free(kv->table);
    free(kv->held);
    free(kv->block);
    free(kv->free_blocks);
    prefix_index_destroy(&kv->index);
    memset(kv, 0, sizeof *kv);
}

/* ---- Idle blocks: a list by last use ---- */

static void idle_append(struct kv *kv, int32_t block) {
    struct kv_block *entry = &kv->block[block];
    entry->older = kv->newest;
    entry->newer = -1;
    *(kv->newest >= 0 ? &kv->block[kv->newest].newer : &kv->oldest) = block;
    kv->newest = block;
    kv->idle_count++;
}

static void idle_remove(struct kv *kv, int32_t block) {
    const struct kv_block *entry = &kv->block[block];
    *(entry->older >= 0 ? &kv->block[entry->older].newer : &kv->oldest) = entry->newer;
    *(entry->newer >= 0 ? &kv->block[entry->newer].older : &kv->newest) = entry->older;
    kv->idle_count--;
}

/* ---- Taking and letting go ---- */

static int32_t take_block(struct kv *kv) {
    if (kv->free_count > 0) return kv->free_blocks[--kv->free_count];
    int32_t block = kv->oldest;
    idle_remove(kv, block);
    prefix_index_remove(&kv->index, block);
    return block;
}

static void let_go(struct kv *kv, int32_t block) {
    assert(kv->block[block].references > 0);
    if (--kv->block[block].references > 0) return;
    if (kv_serial(kv, block)) {
        idle_append(kv, block);
    } else {
        kv->free_blocks[kv->free_count++] = block;
    }
}

bool kv_reserve(struct kv *kv, size_t slot, size_t tokens) {
    size_t wanted = kv_blocks_for(tokens), held = kv->held[slot];
    assert(slot < kv->slots && wanted <= kv->blocks_per_slot);
    if (wanted <= held) return true;
    if (wanted - held > kv_blocks_available(kv)) return false;
    int32_t *row = kv->table + slot * kv->blocks_per_slot;
    while (held < wanted) {
        int32_t block = take_block(kv);
        kv->block[block].references = 1;
        row[held++] = block;
    }
    kv->held[slot] = held;
    return true;
}

void kv_adopt(struct kv *kv, size_t slot, size_t i, int32_t block) {
    int32_t *entry = kv->table + slot * kv->blocks_per_slot + i;
    assert(slot < kv->slots && i <= kv->held[slot] && i < kv->blocks_per_slot);
    assert(kv_serial(kv, block) != 0);
    if (kv->block[block].references++ == 0) idle_remove(kv, block);
    if (i < kv->held[slot]) {
        let_go(kv, *entry);
    } else {
        kv->held[slot]++;
    }
    *entry = block;
}

void kv_publish(struct kv *kv, size_t slot, size_t i, uint64_t parent, const int32_t *tokens) {
    assert(i < kv->held[slot]);
    prefix_index_insert(&kv->index, kv_block_at(kv, slot, i), parent, tokens);
}

/* From the end: of a chain the last block is the first to be taken again, as no other needs it. */
void kv_release(struct kv *kv, size_t slot) {
    assert(slot < kv->slots);
    for (size_t i = kv->held[slot]; i-- > 0;) let_go(kv, kv_block_at(kv, slot, i));
    kv->held[slot] = 0;
}
