/* The host's side of the KV cache: which block of the arena holds which positions of whom.
 *
 * A slot is a running sequence's row of the block table; its entry i names the block of positions
 * i * KV_BLOCK_TOKENS and up. Everything is allocated at start. Engine thread only.
 */
#ifndef FATHOM_KV_H
#define FATHOM_KV_H

#include "kernels/kernels.h"

struct kv {
    size_t blocks, slots, blocks_per_slot;
    int32_t *table;       /* [slots, blocks_per_slot]; a slot's first `held` entries count */
    size_t *held;         /* [slots] */
    uint32_t *references; /* [blocks] slots that hold the block; 0: free */
    int32_t *free_blocks; /* [blocks] a stack: the block released last is the warmest */
    size_t free_count;
};

int kv_create(struct kv *kv, size_t blocks, size_t slots, size_t blocks_per_slot,
              struct error *error);
void kv_destroy(struct kv *kv); /* a zeroed or destroyed kv is allowed */

/* Blocks that hold `tokens` positions. */
static inline size_t kv_blocks_for(size_t tokens) {
    return tokens / KV_BLOCK_TOKENS + (tokens % KV_BLOCK_TOKENS != 0);
}

/* Makes the slot hold at least the first `tokens` positions, at most blocks_per_slot blocks. All or
 * nothing: false, and no change, when too few blocks are free. */
bool kv_reserve(struct kv *kv, size_t slot, size_t tokens);

/* Gives an empty slot the blocks of another slot's first `tokens` positions; returns the positions
 * shared. Only full blocks are: nobody writes into a full block again, so none needs a copy. */
size_t kv_share_prefix(struct kv *kv, size_t from, size_t to, size_t tokens);

/* Empties the slot. A block is free again when its last holder lets go. */
void kv_release(struct kv *kv, size_t slot);

static inline size_t kv_blocks_used(const struct kv *kv) { return kv->blocks - kv->free_count; }

#endif
