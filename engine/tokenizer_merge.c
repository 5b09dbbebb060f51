#include "engine/tokenizer_private.h"

#include <stdlib.h>
#include <string.h>

/* Up to here the plain loop (find the best pair, merge, repeat) beats the heap; words are
 * shorter. */
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

/* ---- Long pre-tokens: parts that grow in place, a heap of their pairs ------------------------ */

/* A part is a token and the positions that it covers, one for each token in the beginning. A word
 * can be as long as a text, so little is kept: `spans` says at a part's first and at its last
 * position how many they are, which leads to both its neighbours; ids and ranks count at its first
 * position. ranks[i] is the rank of the pair (this part, the next); MERGE_NONE also inside parts. */
struct parts {
    int32_t *ids;
    uint32_t *spans, *ranks; /* [length] each */
    size_t length;
};

/* rank << 32 | position: the smallest is the lowest rank and, there, the leftmost pair. An entry
 * whose position has another rank by now is stale. No two are equal. The heap may be too small for
 * all: entries from `limit` on are left out, to be looked for again when those below are gone. */
struct heap {
    uint64_t *entries;
    size_t count, capacity;
    uint64_t limit; /* UINT64_MAX: none is left out */
    uint64_t draw;
};

#define HEAP_MIN            ((size_t)4096) /* never too small for a word of half as many tokens */
#define POSITIONS_PER_ENTRY ((size_t)8)

static uint64_t heap_entry(uint32_t rank, size_t position) {
    return (uint64_t)rank << 32 | (uint32_t)position;
}

static void heap_sink(struct heap *heap, size_t hole) {
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

static void heap_order(struct heap *heap) {
    for (size_t i = heap->count / 2; i-- > 0;) heap_sink(heap, i);
}

static uint64_t heap_take(struct heap *heap) {
    uint64_t least = heap->entries[0];
    heap->entries[0] = heap->entries[--heap->count];
    if (heap->count > 0) heap_sink(heap, 0);
    return least;
}

/* Leaves out what is above an entry near the middle, a quarter at least. The entry is drawn, so
 * that no text can be made to need many draws. Order is lost. */
static void heap_lower_limit(struct heap *heap) {
    size_t less, quarter = heap->count / 4;
    do {
        uint64_t drawn = mix_bits(heap->draw += MIX_STEP) % heap->count;
        heap->limit = heap->entries[drawn];
        less = 0;
        for (size_t i = 0; i < heap->count; i++) less += heap->entries[i] < heap->limit;
    } while (less < quarter || less > heap->count - quarter);
    size_t kept = 0;
    for (size_t i = 0; i < heap->count; i++) {
        if (heap->entries[i] < heap->limit) heap->entries[kept++] = heap->entries[i];
    }
    heap->count = kept;
}

static void heap_put(struct heap *heap, uint64_t entry) {
    if (entry < heap->limit && heap->count == heap->capacity) {
        heap_lower_limit(heap);
        heap_order(heap);
    }
    if (entry >= heap->limit) return;
    size_t hole = heap->count++;
    while (hole > 0 && heap->entries[(hole - 1) / 2] > entry) {
        heap->entries[hole] = heap->entries[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap->entries[hole] = entry;
}

/* The least of all pairs that can be merged, as many as there is room for. */
static void heap_fill(struct heap *heap, const struct parts *parts) {
    heap->count = 0;
    heap->limit = UINT64_MAX;
    for (size_t i = 0; i < parts->length; i += parts->spans[i]) {
        uint64_t entry = heap_entry(parts->ranks[i], i);
        if (parts->ranks[i] == MERGE_NONE || entry >= heap->limit) continue;
        if (heap->count == heap->capacity) heap_lower_limit(heap);
        if (entry < heap->limit) heap->entries[heap->count++] = entry;
    }
    heap_order(heap);
}

/* The part at `position`, or the one behind it, has another token than before. */
static void rank_pair(const struct merge_table *table, struct parts *parts, struct heap *heap,
                      size_t position) {
    size_t next = position + parts->spans[position];
    uint32_t rank = next < parts->length
                        ? merge_table_rank(table, parts->ids[position], parts->ids[next])
                        : MERGE_NONE;
    if (rank == parts->ranks[position]) return;
    parts->ranks[position] = rank;
    if (rank != MERGE_NONE) heap_put(heap, heap_entry(rank, position));
}

static void merge_pair(const struct merge_table *table, struct parts *parts, struct heap *heap,
                       size_t position, uint32_t rank) {
    size_t right = position + parts->spans[position], end = right + parts->spans[right];
    parts->ids[position] = table->results[rank];
    parts->spans[position] = parts->spans[end - 1] = (uint32_t)(end - position);
    parts->ranks[position] = parts->ranks[right] = MERGE_NONE;
    rank_pair(table, parts, heap, position);
    if (position > 0) rank_pair(table, parts, heap, position - parts->spans[position - 1]);
}

static int merge_parts(const struct merge_table *table, struct parts *parts, struct heap *heap,
                       const atomic_bool *stop, struct error *error) {
    int result = 0;
    for (size_t i = 0; i < parts->length; i++) {
        bool is_last = i + 1 == parts->length;
        parts->spans[i] = 1;
        parts->ranks[i] =
            is_last ? MERGE_NONE : merge_table_rank(table, parts->ids[i], parts->ids[i + 1]);
    }
    do {
        heap_fill(heap, parts);
        while (heap->count > 0 && (result = stop_check(stop, error)) == 0) {
            uint64_t entry = heap_take(heap);
            uint32_t rank = (uint32_t)(entry >> 32), position = (uint32_t)entry;
            if (parts->ranks[position] == rank) merge_pair(table, parts, heap, position, rank);
        }
    } while (result == 0 && heap->limit != UINT64_MAX);
    return result;
}

static int merge_long(const struct merge_table *table, int32_t *ids, size_t *count,
                      const atomic_bool *stop, struct error *error) {
    size_t length = *count, capacity = length / POSITIONS_PER_ENTRY;
    if (capacity < HEAP_MIN) capacity = HEAP_MIN;
    uint32_t *numbers = malloc(2 * length * sizeof *numbers);
    struct heap heap = {
        .entries = malloc(capacity * sizeof *heap.entries),
        .capacity = capacity,
        .draw = table->seed,
    };
    struct parts parts = {ids, numbers, numbers + length, length};
    int result = 0;
    if (!numbers || !heap.entries) {
        result =
            error_set(error, FATHOM_NO_MEMORY, "no memory to tokenize a word of %zu parts", length);
    } else {
        result = merge_parts(table, &parts, &heap, stop, error);
        *count = 0;
        for (size_t i = 0; i < length; i += parts.spans[i]) ids[(*count)++] = ids[i];
    }
    free(numbers);
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
