#include "engine/prefix_index.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define ROOT_BIT (UINT64_C(1) << 63) /* serial numbers will not get there */

int prefix_index_create(struct prefix_index *index, size_t blocks, struct error *error) {
    size_t count = 16;
    while (count < blocks) count *= 2;
    *index = (struct prefix_index){
        .entries = calloc(blocks, sizeof *index->entries),
        .buckets = malloc(count * sizeof *index->buckets),
        .bucket_count = count,
    };
    if (!index->entries || !index->buckets) {
        prefix_index_destroy(index);
        return error_set(error, FATHOM_NO_MEMORY, "no memory for an index of %zu blocks", blocks);
    }
    for (size_t i = 0; i < count; i++) index->buckets[i] = -1;
    return 0;
}

void prefix_index_destroy(struct prefix_index *index) {
    free(index->entries);
    free(index->buckets);
    *index = (struct prefix_index){0};
}

static int32_t *find_bucket(const struct prefix_index *index, uint64_t parent,
                            const int32_t *tokens) {
    uint64_t hash = XXH3_64bits_withSeed(tokens, KV_BLOCK_TOKENS * sizeof *tokens, parent);
    return &index->buckets[hash & (index->bucket_count - 1)];
}

int32_t prefix_index_find(const struct prefix_index *index, uint64_t parent,
                          const int32_t *tokens) {
    int32_t block = *find_bucket(index, parent, tokens);
    for (; block >= 0; block = index->entries[block].next) {
        const struct prefix_entry *entry = &index->entries[block];
        if (entry->parent == parent && memcmp(entry->tokens, tokens, sizeof entry->tokens) == 0) {
            break;
        }
    }
    return block;
}

void prefix_index_insert(struct prefix_index *index, int32_t block, uint64_t parent,
                         const int32_t *tokens) {
    struct prefix_entry *entry = &index->entries[block];
    int32_t *bucket = find_bucket(index, parent, tokens);
    assert(entry->serial == 0);
    entry->serial = ++index->last_serial;
    entry->parent = parent;
    memcpy(entry->tokens, tokens, sizeof entry->tokens);
    entry->next = *bucket;
    *bucket = block;
}

void prefix_index_remove(struct prefix_index *index, int32_t block) {
    struct prefix_entry *entry = &index->entries[block];
    if (entry->serial == 0) return;
    int32_t *link = find_bucket(index, entry->parent, entry->tokens);
    while (*link != block) link = &index->entries[*link].next;
    *link = entry->next;
    entry->serial = 0;
}

uint64_t prefix_root(uint64_t secret, size_t tier, const char *salt, size_t salt_length) {
    uint64_t hash = salt_length ? XXH3_64bits_withSeed(salt, salt_length, secret) : secret;
    return XXH3_64bits_withSeed(&tier, sizeof tier, hash) | ROOT_BIT;
}
