/* One request on its way through the engine: what was asked, the tokens so far, how far we are.
 *
 * Created by the submitting thread, then owned by the engine thread until its EVENT_FINISHED. All
 * its memory is taken at creation. Text, and how many choices a client wants, are not its business.
 */
#ifndef FATHOM_SEQUENCE_H
#define FATHOM_SEQUENCE_H

#include "engine/engine.h"

#include <stdatomic.h>

/* A token with its place in a distribution; for one that was drawn or one of the prompt. */
struct scored_token {
    int32_t token;
    float logprob; /* NAN when not asked for */
    uint16_t top_count;
    struct token_logprob top[TOP_LOGPROBS_MAX];
};

/* Tokens of a sequence with how often each was generated: open addressing, at most half full. */
struct token_count {
    int32_t token;
    uint32_t uses; /* 1 + times generated; 0: an empty entry, so that calloc makes a table */
};
struct token_counts {
    struct token_count *entries; /* NULL when no penalty was asked for */
    size_t capacity;             /* a power of two */
};

struct sequence {
    /* The request; its prompt, stop_tokens and sampling.bias point at the copies below. The stop
     * tokens include end-of-text unless it is ignored. */
    struct engine_request request;
    int32_t *tokens; /* [prompt_length + max_tokens]: prompt, then generated */
    int32_t *stop_tokens;
    struct logit_bias *bias;
    struct token_counts counts;

    size_t length;    /* tokens known */
    size_t computed;  /* leading positions whose K and V are in this sequence's blocks */
    size_t reached;   /* the largest `computed` ever: rows below it were told already */
    uint64_t prefix_root; /* what its first block's key begins with: tier and tenant */
    int32_t slot;     /* row of the block table; -1 when not running */
    uint64_t arrival; /* order of acceptance, unique */
    struct scored_token pending; /* prompt_logprobs: of token `reached`, told with its row */

    double attn_rate, mlp_rate; /* share of sub-layers that its recent rows ran: for predictions */

    struct engine_usage usage;
    uint64_t submitted_ns, started_ns, first_token_ns; /* 0: not yet */

    struct sequence *previous, *next; /* the scheduler's list that it is in */
    struct sequence *inbox_next;      /* accepted, not yet taken by the engine thread */
    struct sequence *bucket_next;     /* the inbox's table of ids */
    atomic_bool cancelled;            /* set by any thread, read by the engine thread */
};

/* Copies a request that request_check accepted. eos[eos_count]: the tokens that end a text. */
int sequence_create(const struct engine_request *request, const int32_t *eos, size_t eos_count,
                    struct sequence **sequence, struct error *error);
void sequence_destroy(struct sequence *sequence); /* NULL is allowed */

/* Appends a generated token; there must be room: sequence_is_full was false. */
void sequence_append(struct sequence *sequence, int32_t token);

bool sequence_is_stop(const struct sequence *sequence, int32_t token);

static inline size_t sequence_generated(const struct sequence *sequence) {
    return sequence->length - sequence->request.prompt_length;
}

/* The most tokens that it can grow to. */
static inline size_t sequence_limit(const struct sequence *sequence) {
    return sequence->request.prompt_length + sequence->request.max_tokens;
}

static inline bool sequence_is_full(const struct sequence *sequence) {
    return sequence->length == sequence_limit(sequence);
}

/* One row per step from here on: everything but the last token drawn is in the cache. */
static inline bool sequence_is_decoding(const struct sequence *sequence) {
    return sequence_generated(sequence) > 0 && sequence->computed + 1 == sequence->length;
}

/* Whether the row at `position` needs logits: to draw the next token, or to score a prompt token
 * that was not scored before a preemption. */
static inline bool sequence_wants_logits(const struct sequence *sequence, size_t position) {
    if (position + 1 == sequence->length && !sequence_is_full(sequence)) return true;
    return sequence->request.prompt_logprobs && position >= sequence->reached &&
           position + 1 < sequence->request.prompt_length;
}

/* What one step of priority is worth: a second of waiting. Later requests of a better priority
 * overtake for that long at most, so that nobody waits for ever. */
#define PRIORITY_NS INT64_C(1000000000)

/* Who goes first: by time of submission and priority, then by arrival. A strict order, which never
 * changes for two sequences. */
static inline bool sequence_before(const struct sequence *a, const struct sequence *b) {
    int64_t left = (int64_t)a->submitted_ns + a->request.priority * PRIORITY_NS;
    int64_t right = (int64_t)b->submitted_ns + b->request.priority * PRIORITY_NS;
    return left != right ? left < right : a->arrival < b->arrival;
}

#endif
