#include "engine/sequence.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static int counts_create(struct token_counts *counts, const struct sequence *sequence);
static struct token_count *counts_find(const struct token_counts *counts, int32_t token);

/* A copy of `count` elements with room for `room`; never NULL for want of elements. */
static void *copy_array(const void *source, size_t count, size_t room, size_t element) {
    void *copy = calloc(room ? room : 1, element);
    if (copy && count) memcpy(copy, source, count * element);
    return copy;
}

int sequence_create(const struct engine_request *request, const int32_t *eos, size_t eos_count,
                    struct sequence **out, struct error *error) {
    struct sequence *sequence = calloc(1, sizeof *sequence);
    if (!sequence) return error_set(error, FATHOM_NO_MEMORY, "no memory for a request");
    size_t prompt = request->prompt_length, stops = request->stop_token_count;
    size_t biases = request->sampling.bias_count;
    sequence->request = *request;
    sequence->request.cache_salt = NULL; /* the submitter's, and in prefix_root by now */
    sequence->tokens = copy_array(request->prompt, prompt, prompt + request->max_tokens, 4);
    sequence->stop_tokens = copy_array(request->stop_tokens, stops, stops + eos_count, 4);
    sequence->bias = copy_array(request->sampling.bias, biases, biases, sizeof *sequence->bias);
    sequence->request.prompt = sequence->tokens;
    sequence->request.stop_tokens = sequence->stop_tokens;
    sequence->request.sampling.bias = sequence->bias;
    sequence->length = prompt;
    sequence->slot = -1;
    sequence->attn_rate = sequence->mlp_rate = 1;
    sequence->pending.logprob = NAN; /* nothing predicts position 0 */
    sequence->usage.prompt_tokens = prompt;
    if (!sequence->tokens || !sequence->stop_tokens || !sequence->bias ||
        counts_create(&sequence->counts, sequence) != 0) {
        sequence_destroy(sequence);
        return error_set(error, FATHOM_NO_MEMORY, "no memory for a request of %zu + %zu tokens",
                         prompt, request->max_tokens);
    }
    for (size_t i = 0; i < eos_count && !request->ignore_eos; i++) {
        sequence->stop_tokens[sequence->request.stop_token_count++] = eos[i];
    }
    *out = sequence;
    return 0;
}

void sequence_destroy(struct sequence *sequence) {
    if (!sequence) return;
    free(sequence->tokens);
    free(sequence->stop_tokens);
    free(sequence->bias);
    free(sequence->counts.entries);
    free(sequence);
}

void sequence_append(struct sequence *sequence, int32_t token) {
    assert(!sequence_is_full(sequence));
    sequence->tokens[sequence->length++] = token;
    sequence->usage.completion_tokens++;
    if (!sequence->counts.entries) return;
    struct token_count *entry = counts_find(&sequence->counts, token);
    *entry = (struct token_count){token, entry->uses ? entry->uses + 1 : 2};
}

bool sequence_is_stop(const struct sequence *sequence, int32_t token) {
    for (size_t i = 0; i < sequence->request.stop_token_count; i++) {
        if (sequence->stop_tokens[i] == token) return true;
    }
    return false;
}

/* Room for every token of the longest possible sequence being a different one. */
static int counts_create(struct token_counts *counts, const struct sequence *sequence) {
    const struct sampling *sampling = &sequence->request.sampling;
    if (sampling->presence_penalty == 0 && sampling->frequency_penalty == 0 &&
        sampling->repetition_penalty == 1) {
        return 0;
    }
    size_t capacity = 16;
    while (capacity / 2 < sequence_limit(sequence)) capacity *= 2;
    counts->entries = calloc(capacity, sizeof *counts->entries);
    if (!counts->entries) return FATHOM_NO_MEMORY;
    counts->capacity = capacity;
    for (size_t i = 0; i < sequence->length; i++) {
        int32_t token = sequence->tokens[i];
        *counts_find(counts, token) = (struct token_count){token, 1};
    }
    return 0;
}

/* The token's entry, or the empty one where it belongs. */
static struct token_count *counts_find(const struct token_counts *counts, int32_t token) {
    size_t mask = counts->capacity - 1;
    /* Fibonacci hashing: the high bits of a product with 2^64 / golden ratio. */
    size_t i = (uint64_t)token * UINT64_C(0x9E3779B97F4A7C15) >> 32 & mask;
    while (counts->entries[i].uses && counts->entries[i].token != token) i = (i + 1) & mask;
    return &counts->entries[i];
}
