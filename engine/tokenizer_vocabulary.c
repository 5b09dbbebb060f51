#include "engine/tokenizer_private.h"

#include <stdlib.h>
#include <string.h>

/* Multiply and fold, eight bytes at a time; the multipliers are odd numbers with scattered bits. */
static uint64_t bytes_hash(const char *bytes, size_t length, uint64_t seed) {
    uint64_t hash = seed ^ ((uint64_t)length * 0x9E3779B97F4A7C15u);
    while (length > 0) {
        uint64_t word = 0;
        size_t take = length < sizeof word ? length : sizeof word;
        memcpy(&word, bytes, take);
        hash = (hash ^ word) * 0xD6E8FEB86659FD93u;
        hash ^= hash >> 32;
        bytes += take;
        length -= take;
    }
    hash *= 0xD6E8FEB86659FD93u;
    return hash ^ (hash >> 32);
}

const char *vocabulary_bytes(const struct vocabulary *vocabulary, int32_t id, size_t *length) {
    if (id < 0 || (size_t)id >= vocabulary->size) {
        *length = 0;
        return "";
    }
    *length = vocabulary->offsets[id + 1] - vocabulary->offsets[id];
    return vocabulary->pool + vocabulary->offsets[id];
}

int vocabulary_create_index(struct vocabulary *vocabulary, struct error *error) {
    size_t slots = 2;
    while (slots < 2 * vocabulary->size) slots *= 2;
    vocabulary->slots = malloc(slots * sizeof *vocabulary->slots);
    if (!vocabulary->slots) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory for the vocabulary");
    }
    memset(vocabulary->slots, 0xFF, slots * sizeof *vocabulary->slots);
    vocabulary->mask = slots - 1;
    return 0;
}

/* The slot that holds these bytes, or the empty one where they would go. */
static size_t vocabulary_slot(const struct vocabulary *vocabulary, const char *bytes,
                              size_t length) {
    size_t slot = (size_t)bytes_hash(bytes, length, vocabulary->seed) & vocabulary->mask;
    while (vocabulary->slots[slot] >= 0) {
        size_t other_length;
        const char *other = vocabulary_bytes(vocabulary, vocabulary->slots[slot], &other_length);
        if (other_length == length && memcmp(other, bytes, length) == 0) break;
        slot = (slot + 1) & vocabulary->mask;
    }
    return slot;
}

void vocabulary_index(struct vocabulary *vocabulary, int32_t id) {
    size_t length;
    const char *bytes = vocabulary_bytes(vocabulary, id, &length);
    vocabulary->slots[vocabulary_slot(vocabulary, bytes, length)] = id;
}

int32_t vocabulary_find(const struct vocabulary *vocabulary, const char *bytes, size_t length) {
    return vocabulary->slots[vocabulary_slot(vocabulary, bytes, length)];
}

void vocabulary_clear(struct vocabulary *vocabulary) {
    free(vocabulary->pool);
    free(vocabulary->offsets);
    free(vocabulary->flags);
    free(vocabulary->slots);
}
