/* Which blocks of the cache hold which prefixes: an index by content.
 *
 * What K and V of a block are follows from its tokens and from all that came before. So a block's
 * key is its 16 tokens and the serial number of the block before it, which stands for the whole
 * chain; the first block's parent stands for the tier and the tenant. Serial numbers are never used
 * again: a chain whose middle was evicted cannot be taken for another one. Hashes only choose the
 * bucket, keys are compared whole. Engine thread only.
 */
#ifndef FATHOM_PREFIX_INDEX_H
#define FATHOM_PREFIX_INDEX_H

#include "kernels/kernels.h"

struct prefix_entry {
    uint64_t serial; /* 0: the block is not in the index */
    uint64_t parent;
    int32_t tokens[KV_BLOCK_TOKENS];
    int32_t next; /* block in the same bucket; -1: none */
};

struct prefix_index {
    struct prefix_entry *entries; /* [blocks] */
    int32_t *buckets;             /* [bucket_count] first block; -1: none */
    size_t bucket_count;          /* a power of two */
    uint64_t last_serial;
};

int prefix_index_create(struct prefix_index *index, size_t blocks, struct error *error);
void prefix_index_destroy(struct prefix_index *index); /* a zeroed index is allowed */

/* The block that holds these KV_BLOCK_TOKENS tokens after that parent, or -1. */
int32_t prefix_index_find(const struct prefix_index *index, uint64_t parent, const int32_t *tokens);

/* Enters a block under a key that is not there yet. */
void prefix_index_insert(struct prefix_index *index, int32_t block, uint64_t parent,
                         const int32_t *tokens);

/* Takes a block out, if it is in. */
void prefix_index_remove(struct prefix_index *index, int32_t block);

/* The parent of first blocks for a tier and a tenant's salt: never a serial number. `secret` is the
 * process's: without it nobody can make a salt that collides with another tenant's. */
uint64_t prefix_root(uint64_t secret, size_t tier, const char *salt, size_t salt_length);

#endif
