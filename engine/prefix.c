#include "engine/prefix.h"

static uint64_t parent_of(const struct kv *kv, const struct sequence *sequence, size_t i) {
    if (i == 0) return sequence->prefix_root;
    return kv_serial(kv, kv_block_at(kv, (size_t)sequence->slot, i - 1));
}

static const int32_t *block_tokens(const struct sequence *sequence, size_t i) {
    return sequence->tokens + i * KV_BLOCK_TOKENS;
}

/* The last token known needs its row; prompt tokens to be scored need theirs, the first time. */
static size_t reusable_tokens(const struct sequence *sequence) {
    size_t tokens = sequence->length - 1;
    if (sequence->request.prompt_logprobs && sequence->reached < tokens) tokens = sequence->reached;
    return tokens;
}

size_t prefix_reuse(struct kv *kv, struct sequence *sequence) {
    size_t i = sequence->computed / KV_BLOCK_TOKENS, end = reusable_tokens(sequence);
    if (sequence->computed % KV_BLOCK_TOKENS != 0) return 0;
    for (; (i + 1) * KV_BLOCK_TOKENS <= end; i++) {
        uint64_t parent = parent_of(kv, sequence, i);
        int32_t block = prefix_index_find(&kv->index, parent, block_tokens(sequence, i));
        if (block < 0) break;
        kv_adopt(kv, (size_t)sequence->slot, i, block);
    }
    sequence->computed = i * KV_BLOCK_TOKENS;
    if (sequence->computed <= sequence->reached) return 0;
    size_t gained = sequence->computed - sequence->reached;
    sequence->reached = sequence->computed;
    return gained;
}

void prefix_announce(struct kv *kv, const struct sequence *sequence, size_t rows) {
    size_t i = sequence->computed / KV_BLOCK_TOKENS;
    size_t end = (sequence->computed + rows) / KV_BLOCK_TOKENS;
    uint64_t parent = i < end ? parent_of(kv, sequence, i) : 0;
    for (; i < end; i++) {
        const int32_t *tokens = block_tokens(sequence, i);
        int32_t block = prefix_index_find(&kv->index, parent, tokens);
        if (block < 0) {
            kv_publish(kv, (size_t)sequence->slot, i, parent, tokens);
            block = kv_block_at(kv, (size_t)sequence->slot, i);
        }
        parent = kv_serial(kv, block);
    }
}

void prefix_settle(struct kv *kv, const struct sequence *sequence, size_t rows) {
    size_t slot = (size_t)sequence->slot;
    size_t i = (sequence->computed - rows) / KV_BLOCK_TOKENS;
    size_t end = sequence->computed / KV_BLOCK_TOKENS;
    for (; i < end; i++) {
        if (kv_serial(kv, kv_block_at(kv, slot, i))) continue;
        uint64_t parent = parent_of(kv, sequence, i);
        const int32_t *tokens = block_tokens(sequence, i);
        int32_t block = prefix_index_find(&kv->index, parent, tokens);
        if (block >= 0) {
            kv_adopt(kv, slot, i, block);
        } else { /* the other copy was evicted meanwhile */
            kv_publish(kv, slot, i, parent, tokens);
        }
    }
}
