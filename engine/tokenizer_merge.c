#include "engine/tokenizer_private.h"

#include <stdlib.h>
#include <string.h>

/* Up to here the plain loop (find the best pair, merge, repeat) beats the heap; words are shorter.
 */
#define MERGE_SHORT_MAX 48

int merge_table_create(struct merge_table *table, size_t count, uint64_t seed,
                       struct error *error) {
    size_t slots = 2;
    while (slots < 2 * count) slots *= 2;
    table->slots = malloc(slots * sizeof *table->slots);
    table->results = calloc(count + 1, sizeof *table->results);
    if (!table->slots || !table->results) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory for %zu merges", count);
    }
    for (size_t i = 0; i < slots; i++) table->slots[i].left = -1;
    table->mask = slots - 1;
    table->seed = seed;
    table->count = count;
    return 0;
}

void merge_table_clear(struct merge_table *table) {
    free(table->slots);
    free(table->results);
}

/* The slot that holds this pair, or the empty one where it would go. */
static struct merge_slot *merge_table_slot(const struct merge_table *table, int32_t left,
                                           int32_t right) {
    uint64_t hash =
        (((uint64_t)(uint32_t)left << 32 | (uint32_t)right) ^ table->seed) * 0xD6E8FEB86659FD93u;
    hash = (hash ^ (hash >> 32)) * 0x9E3779B97F4A7C15u;
    size_t slot = (size_t)(hash ^ (hash >> 32)) & table->mask;
    while (table->slots[slot].left >= 0 &&
           (table->slots[slot].left != left || table->slots[slot].right != right)) {
        slot = (slot + 1) & table->mask;
    }
    return &table->slots[slot];
}

void merge_table_add(struct merge_table *table, int32_t left, int32_t right, uint32_t rank,
                     int32_t result) {
    *merge_table_slot(table, left, right) = (struct merge_slot){left, right, rank};
    table->results[rank] = result;
}

static uint32_t merge_table_rank(const struct merge_table *table, int32_t left, int32_t right) {
    const struct merge_slot *slot = merge_table_slot(table, left, right);
    return slot->left >= 0 ? slot->rank : MERGE_NONE;
}

int token_list_reserve(struct token_list *list, size_t extra, struct error *error) {
    size_t needed, bytes;
    if (!size_add(list->count, extra, &needed)) needed = SIZE_MAX;
    if (needed <= list->capacity) return 0;
    size_t capacity = list->capacity < 32 ? 64 : list->capacity + list->capacity / 2;
    if (capacity < needed) capacity = needed;
    int32_t *ids = size_multiply(capacity, sizeof *ids, &bytes) ? realloc(list->ids, bytes) : NULL;
    if (!ids) return error_set(error, FATHOM_NO_MEMORY, "no memory for %zu tokens", needed);
    list->ids = ids;
    list->capacity = capacity;
    return 0;
}

/* Merges ids[count] in place; returns how many are left. ranks[i] is the rank of the pair (i, i +
 * 1). */
static size_t merge_short(const struct merge_table *table, int32_t *ids, size_t count) {
    uint32_t ranks[MERGE_SHORT_MAX];
    for (size_t i = 0; i + 1 < count; i++) ranks[i] = merge_table_rank(table, ids[i], ids[i + 1]);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) {
            if (ranks[i] < ranks[best]) best = i;
        }
        if (ranks[best] == MERGE_NONE) break;
        ids[best] = table->results[ranks[best]];
        count--;
        memmove(&ids[best + 1], &ids[best + 2], (count - best - 1) * sizeof *ids);
        if (best > 0) ranks[best - 1] = merge_table_rank(table, ids[best - 1], ids[best]);
        if (best + 1 < count) {
            /* Pairs best + 1 .. count - 2 were one further right before the merge. */
            memmove(&ranks[best + 1], &ranks[best + 2], (count - best - 2) * sizeof *ranks);
            ranks[best] = merge_table_rank(table, ids[best], ids[best + 1]);
        }
    }
    return count;
}

/* ---- Long pre-tokens: a linked list of what is left, a heap of its pairs --------------------- */

#define LINK_END UINT32_MAX

struct merge_node {
    int32_t id;
    uint32_t
        rank; /* of the pair (this, next); MERGE_NONE also once the node has been merged away */
    uint32_t previous, next;
};

/* rank << 32 | position: the smallest is the lowest rank and, there, the leftmost pair. An entry
 * whose node has another rank by now is stale. Each merge takes one entry out and puts at most two
 * in, so there are never more than twice as many entries as nodes. */
struct merge_heap {
    uint64_t *entries;
    size_t count;
};

static void heap_sink(struct merge_heap *heap, size_t hole) {
    uint64_t entry = heap->entries[hole];
    for (;;) {
        size_t child = 2 * hole + 1;
        if (child >= heap->count) break;
        if (child + 1 < heap->count && heap->entries[child + 1] < heap->entries[child]) child++;
        if (entry <= heap->entries[child]) break;
        heap->entries[hole] = heap->entries[child];
        hole = child;
    }
    heap->entries[hole] = entry;
}

static uint64_t heap_take(struct merge_heap *heap) {
    uint64_t least = heap->entries[0];
    heap->entries[0] = heap->entries[--heap->count];
    if (heap->count > 0) heap_sink(heap, 0);
    return least;
}

static void heap_put(struct merge_heap *heap, uint64_t entry) {
    size_t hole = heap->count++;
    while (hole > 0 && heap->entries[(hole - 1) / 2] > entry) {
        heap->entries[hole] = heap->entries[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap->entries[hole] = entry;
}

static uint64_t heap_entry(uint32_t rank, size_t position) {
    return (uint64_t)rank << 32 | (uint32_t)position;
}

/* Gives the pair that starts at `position` its rank and, if it can be merged, an entry. */
static void rank_pair(const struct merge_table *table, struct merge_node *nodes,
                      struct merge_heap *heap, uint32_t position) {
    struct merge_node *node = &nodes[position];
    node->rank = node->next == LINK_END ? MERGE_NONE
                                        : merge_table_rank(table, node->id, nodes[node->next].id);
    if (node->rank != MERGE_NONE) heap_put(heap, heap_entry(node->rank, position));
}

static int merge_linked(const struct merge_table *table, struct merge_node *nodes,
                        struct merge_heap *heap, const atomic_bool *stop, struct error *error) {
    int result = 0;
    while (heap->count > 0 && (result = stop_check(stop, error)) == 0) {
        uint64_t entry = heap_take(heap);
        uint32_t rank = (uint32_t)(entry >> 32), position = (uint32_t)entry;
        struct merge_node *left = &nodes[position];
        if (left->rank != rank) continue;
        struct merge_node *right = &nodes[left->next];
        left->id = table->results[rank];
        left->next = right->next;
        right->rank = MERGE_NONE;
        if (left->next != LINK_END) nodes[left->next].previous = position;
        rank_pair(table, nodes, heap, position);
        if (left->previous != LINK_END) rank_pair(table, nodes, heap, left->previous);
    }
    return result;
}

static int merge_long(const struct merge_table *table, int32_t *ids, size_t *count,
                      const atomic_bool *stop, struct error *error) {
    size_t length = *count;
    struct merge_node *nodes = malloc(length * sizeof *nodes);
    struct merge_heap heap = {malloc(2 * length * sizeof *heap.entries), 0};
    int result = 0;
    if (!nodes || !heap.entries) {
        result = error_set(error, FATHOM_NO_MEMORY, "no memory to tokenize a word of %zu parts",
                           length);
    } else {
        for (size_t i = 0; i < length; i++) {
            bool last = i + 1 == length;
            nodes[i] = (struct merge_node){
                .id = ids[i],
                .rank = last ? MERGE_NONE : merge_table_rank(table, ids[i], ids[i + 1]),
                .previous = i ? (uint32_t)(i - 1) : LINK_END,
                .next = last ? LINK_END : (uint32_t)(i + 1),
            };
            if (nodes[i].rank != MERGE_NONE) {
                heap.entries[heap.count++] = heap_entry(nodes[i].rank, i);
            }
        }
        for (size_t i = heap.count / 2; i-- > 0;) heap_sink(&heap, i);
        result = merge_linked(table, nodes, &heap, stop, error);
        *count = 0;
        for (uint32_t i = 0; i != LINK_END; i = nodes[i].next) ids[(*count)++] = nodes[i].id;
    }
    free(nodes);
    free(heap.entries);
    return result;
}

int merge_tokens(const struct merge_table *table, struct token_list *list, size_t first,
                 const atomic_bool *stop, struct error *error) {
    int32_t *ids = list->ids + first;
    size_t count = list->count - first;
    int result = 0;
    if (count > MERGE_SHORT_MAX) {
        result = merge_long(table, ids, &count, stop, error);
    } else {
        count = merge_short(table, ids, count);
    }
    list->count = first + count;
    return result;
}

int merge_encode(const struct tokenizer *tokenizer, const char *bytes, size_t length,
                 const atomic_bool *stop, struct token_list *out, struct error *error) {
    const unsigned char *byte = (const unsigned char *)bytes;
    size_t first = out->count;
    int result;
    if (tokenizer->has_pieces) {
        result = piece_start(tokenizer, bytes, length, out, error);
    } else if ((result = token_list_reserve(out, length, error)) == 0) {
        for (size_t i = 0; i < length; i++) {
            int32_t id = tokenizer->byte_tokens[byte[i]];
            if (id >= 0) out->ids[out->count++] = id;
        }
    }
    return result ? result : merge_tokens(&tokenizer->merges, out, first, stop, error);
}
