#include "engine/draw_batch.h"

#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(TOP_LOGPROBS_MAX <= DRAW_BEST_MAX, "a device tells as many as may be asked for");

int draw_batch_create(struct draw_batch *batch, size_t rows, struct error *error) {
    batch->rows = calloc(rows, sizeof *batch->rows);
    batch->changes = calloc(DRAW_CHANGES_MAX, sizeof *batch->changes);
    if (batch->rows && batch->changes) return 0;
    draw_batch_destroy(batch);
    return error_set(error, FATHOM_NO_MEMORY, "no memory to draw for %zu rows", rows);
}

void draw_batch_destroy(struct draw_batch *batch) {
    free(batch->rows);
    free(batch->changes);
    memset(batch, 0, sizeof *batch);
}

void draw_batch_clear(struct draw_batch *batch, size_t rows) {
    for (size_t i = 0; i < rows; i++) batch->rows[i] = (struct draw_row){.kind = DRAW_NOTHING};
    batch->change_count = 0;
    batch->is_plain = true;
}

/* ---- What is asked --------------------------------------------------------------------------- */

static struct draw_change *add_change(struct draw_batch *batch, int32_t token) {
    struct draw_change *change = &batch->changes[batch->change_count++];
    change->token = token;
    return change;
}

static void add_used(struct draw_batch *batch, const struct token_counts *counts) {
    for (size_t i = 0; counts->entries && i < counts->capacity; i++) {
        const struct token_count *entry = &counts->entries[i];
        if (entry->uses) add_change(batch, entry->token)->by.generated = entry->uses - 1;
    }
}

/* False: there is no room. A sequence has no more used tokens than it is long. */
static bool add_changes(struct draw_batch *batch, const struct sequence *sequence,
                        struct draw_row *row) {
    const struct engine_request *request = &sequence->request;
    bool is_banned = sequence_generated(sequence) < request->min_tokens;
    size_t biases = request->sampling.bias_count, bans = is_banned ? request->stop_token_count : 0;
    size_t start = batch->change_count, most = biases + bans;
    if (sequence->counts.entries) most += sequence->length;
    if (most > DRAW_CHANGES_MAX - start) return false;
    for (size_t i = 0; i < biases; i++)
        add_change(batch, request->sampling.bias[i].token)->by.bias =
            request->sampling.bias[i].bias;
    add_used(batch, &sequence->counts);
    row->changes = (int32_t)start;
    row->bias_count = (int32_t)biases;
    row->used_count = (int32_t)(batch->change_count - start - biases);
    for (size_t i = 0; i < bans; i++) add_change(batch, sequence->stop_tokens[i]);
    row->ban_count = (int32_t)bans;
    return true;
}

void draw_batch_ask_token(struct draw_batch *batch, size_t at, const struct sequence *sequence) {
    const struct sampling *sampling = &sequence->request.sampling;
    struct draw_row row = {
        .kind = DRAW_TOKEN,
        .uniform = sampler_uniform(sampling->seed, sequence->length),
        .temperature = sampling->temperature,
        .top_p = sampling->top_p,
        .min_p = sampling->min_p,
        .top_k = sampling->top_k,
        .repetition = sampling->repetition_penalty,
        .presence = sampling->presence_penalty,
        .frequency = sampling->frequency_penalty,
        .is_told = sequence->request.top_logprobs >= 0,
    };
    if (row.is_told) row.best_count = sequence->request.top_logprobs;
    if (!add_changes(batch, sequence, &row)) return;
    bool is_cut = row.temperature > 0 && (row.top_k > 0 || row.top_p < 1 || row.min_p > 0);
    if (is_cut || row.bias_count + row.used_count + row.ban_count > 0) batch->is_plain = false;
    batch->rows[at] = row;
}

void draw_batch_ask_score(struct draw_batch *batch, size_t at, int32_t token, size_t top) {
    batch->rows[at] = (struct draw_row){
        .kind = DRAW_SCORE, .token = token, .is_told = true, .best_count = (int32_t)top};
}

/* ---- What comes back ------------------------------------------------------------------------- */

int draw_batch_tell(const struct draw_batch *batch, size_t at, size_t vocab,
                    const struct draw_outcome *outcome, const struct draw_best *best,
                    struct scored_token *scored) {
    const struct draw_row *row = &batch->rows[at];
    *scored = (struct scored_token){.token = outcome->token, .logprob = NAN};
    if (outcome->token < 0) return FATHOM_INVALID;
    if (!row->is_told) return 0;
    scored->top_count = (uint16_t)row->best_count;
    if (scored->top_count > vocab) scored->top_count = (uint16_t)vocab;
    for (size_t i = 0; i < scored->top_count; i++)
        scored->top[i] = (struct token_logprob){best[i].token, best[i].logit};
    sampler_tell(scored, outcome->logit, outcome->best, outcome->sum);
    return 0;
}
