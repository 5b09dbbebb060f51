/* The host's side of the KV cache: which block of the arena holds which positions of whom.
 *
 * A slot is a running sequence's row of the block table; its entry i names the block of places
 * i * KV_BLOCK_TOKENS and up. Under kv_policy compute a token's place is its position, and a block
 * holds K and V of all layers: there is one group. Under omit every layer is a group with a table
 * of its own: a token that skips the attention of a layer takes no place there, and those behind it
 * move up.
 *
 * Under compute a full block may be published in an index by content: then other
 * slots can hold it too, since nobody writes into a full block again, and it outlives its holders.
 * A block is free, held (by one slot or more), or idle: published, held by nobody, there to be
 * found again or, the longest unused first, to be taken when none is free. Everything is allocated
 * at start. Engine thread only.
 */
#ifndef FATHOM_KV_H
#define FATHOM_KV_H

#include "engine/prefix_index.h"

struct kv_block {
    uint32_t references;                /* slots that hold it */
    int32_t older, newer;               /* idle: neighbours by last use; -1: none */
    uint16_t attn_run[KV_BLOCK_TOKENS]; /* sub-layers that ran for each position: what a */
    uint16_t mlp_run[KV_BLOCK_TOKENS];  /* request that reuses it reports as its depth */
};

struct kv {
    size_t blocks, groups, slots, blocks_per_slot;
    int32_t *table;  /* [slots, groups, blocks_per_slot]; the first `held` entries of each count */
    size_t *held;    /* [slots, groups] */
    size_t *skipped; /* [slots, groups] computed positions that took no place */
    struct kv_block *block; /* [blocks] */
    int32_t *free_blocks;   /* [blocks] a stack: the block released last is the warmest */
    size_t free_count;
    int32_t oldest, newest; /* idle blocks; -1: none */
    size_t idle_count;
    struct prefix_index index;
};

int kv_create(struct kv *kv, size_t blocks, size_t groups, size_t slots, size_t blocks_per_slot,
              struct error *error);
void kv_destroy(struct kv *kv); /* a zeroed or destroyed kv is allowed */

/* Blocks that hold `tokens` positions. */
static inline size_t kv_blocks_for(size_t tokens) {
    return tokens / KV_BLOCK_TOKENS + (tokens % KV_BLOCK_TOKENS != 0);
}

/* Makes the slot hold at least the first `tokens` positions, at most blocks_per_slot blocks in each
 * group: all but those that are known to take no place. Idle blocks go when none is free. All or
 * nothing: false, and no change, when too few are left. */
bool kv_reserve(struct kv *kv, size_t slot, size_t tokens);

/* Blocks that kv_reserve would take: in one group, in all. */
size_t kv_missing(const struct kv *kv, size_t slot, size_t group, size_t tokens);
size_t kv_missing_all(const struct kv *kv, size_t slot, size_t tokens);

/* Some computed positions took no place in a group: gives back what the slot does not need there
 * to hold its first `tokens` positions. */
void kv_skip(struct kv *kv, size_t slot, size_t group, size_t positions, size_t tokens);

/* Lets the slot's entry `i`, at most its first unused one, be that published block; what the entry
 * held before is let go. Here and below: of one group only. */
void kv_adopt(struct kv *kv, size_t slot, size_t i, int32_t block);

/* Enters the full block of the slot's entry `i` into the index, under a key not there yet. */
void kv_publish(struct kv *kv, size_t slot, size_t i, uint64_t parent, const int32_t *tokens);

/* Empties the slot. A block without holders is idle if it was published, else free. */
void kv_release(struct kv *kv, size_t slot);

static inline const int32_t *kv_table(const struct kv *kv, size_t slot, size_t group) {
    return kv->table + (slot * kv->groups + group) * kv->blocks_per_slot;
}

static inline size_t kv_held(const struct kv *kv, size_t slot, size_t group) {
    return kv->held[slot * kv->groups + group];
}

/* Of the first group. */
static inline int32_t kv_block_at(const struct kv *kv, size_t slot, size_t i) {
    return kv_table(kv, slot, 0)[i];
}

/* 0 for a block that is not published. */
static inline uint64_t kv_serial(const struct kv *kv, int32_t block) {
    return kv->index.entries[block].serial;
}

/* Blocks that a reservation can get. */
static inline size_t kv_blocks_available(const struct kv *kv) {
    return kv->free_count + kv->idle_count;
}

/* Blocks that somebody holds. */
static inline size_t kv_blocks_used(const struct kv *kv) {
    return kv->blocks - kv_blocks_available(kv);
}

#endif
