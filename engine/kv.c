#include "engine/kv.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int kv_create(struct kv *kv, size_t blocks, size_t groups, size_t slots, size_t blocks_per_slot,
              struct error *error) {
    memset(kv, 0, sizeof *kv);
    size_t tables, entries;
    if (blocks == 0 || blocks > INT32_MAX || !size_multiply(slots, groups, &tables) ||
        !size_multiply(tables, blocks_per_slot, &entries)) {
        return error_set(error, FATHOM_INVALID, "a KV cache of %zu blocks is outside 1..%d", blocks,
                         INT32_MAX);
    }
    kv->blocks = blocks;
    kv->groups = groups;
    kv->slots = slots;
    kv->blocks_per_slot = blocks_per_slot;
    kv->oldest = kv->newest = -1;
    kv->table = calloc(entries, sizeof *kv->table);
    kv->held = calloc(tables, sizeof *kv->held);
    kv->skipped = calloc(tables, sizeof *kv->skipped);
    kv->block = calloc(blocks, sizeof *kv->block);
    kv->free_blocks = calloc(blocks, sizeof *kv->free_blocks);
    if (!kv->table || !kv->held || !kv->skipped || !kv->block || !kv->free_blocks) {
        kv_destroy(kv);
        return error_set(error, FATHOM_NO_MEMORY, "no memory for block tables of %zu x %zu", tables,
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
    free(kv->skipped);
    free(kv->block);
    free(kv->free_blocks);
    prefix_index_destroy(&kv->index);
    memset(kv, 0, sizeof *kv);
}

/* ---- Idle blocks: a list by last use --------------------------------------------------------- */

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

/* ---- Taking and letting go ------------------------------------------------------------------- */

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

/* Blocks of one group's table that hold the first `tokens` positions. */
static size_t blocks_wanted(const struct kv *kv, size_t table, size_t tokens) {
    return tokens > kv->skipped[table] ? kv_blocks_for(tokens - kv->skipped[table]) : 0;
}

size_t kv_missing(const struct kv *kv, size_t slot, size_t group, size_t tokens) {
    size_t table = slot * kv->groups + group, wanted = blocks_wanted(kv, table, tokens);
    return wanted > kv->held[table] ? wanted - kv->held[table] : 0;
}

size_t kv_missing_all(const struct kv *kv, size_t slot, size_t tokens) {
    size_t missing = 0;
    for (size_t group = 0; group < kv->groups; group++) {
        missing += kv_missing(kv, slot, group, tokens);
    }
    return missing;
}

bool kv_reserve(struct kv *kv, size_t slot, size_t tokens) {
    assert(slot < kv->slots);
    if (kv_missing_all(kv, slot, tokens) > kv_blocks_available(kv)) return false;
    for (size_t table = slot * kv->groups; table < (slot + 1) * kv->groups; table++) {
        size_t wanted = blocks_wanted(kv, table, tokens);
        assert(wanted <= kv->blocks_per_slot);
        while (kv->held[table] < wanted) {
            int32_t block = take_block(kv);
            kv->block[block].references = 1;
            kv->table[table * kv->blocks_per_slot + kv->held[table]++] = block;
        }
    }
    return true;
}

void kv_skip(struct kv *kv, size_t slot, size_t group, size_t positions, size_t tokens) {
    size_t table = slot * kv->groups + group;
    kv->skipped[table] += positions;
    size_t wanted = blocks_wanted(kv, table, tokens);
    while (kv->held[table] > wanted) {
        let_go(kv, kv->table[table * kv->blocks_per_slot + --kv->held[table]]);
    }
}

void kv_adopt(struct kv *kv, size_t slot, size_t i, int32_t block) {
    int32_t *entry = kv->table + slot * kv->blocks_per_slot + i;
    assert(kv->groups == 1 && slot < kv->slots);
    assert(i <= kv->held[slot] && i < kv->blocks_per_slot);
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
    assert(kv->groups == 1 && i < kv->held[slot]);
    prefix_index_insert(&kv->index, kv_block_at(kv, slot, i), parent, tokens);
}

/* From the end: of a chain the last block is the first to be taken again, as no other needs it. */
void kv_release(struct kv *kv, size_t slot) {
    assert(slot < kv->slots);
    for (size_t table = slot * kv->groups; table < (slot + 1) * kv->groups; table++) {
        const int32_t *row = kv->table + table * kv->blocks_per_slot;
        for (size_t i = kv->held[table]; i-- > 0;) let_go(kv, row[i]);
        kv->held[table] = kv->skipped[table] = 0;
    }
}
