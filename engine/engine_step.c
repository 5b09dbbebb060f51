/* A step of the engine: rows chosen, the model run, and what came of each row told and counted. */
#include "engine/engine_thread.h"

#include <math.h>
#include <string.h>
#include <time.h>

/* ---- Events ---------------------------------------------------------------------------------- */

void engine_announce(struct engine *engine) {
    if (!engine->unannounced) return;
    engine->unannounced = false;
    event_queue_announce(&engine->events);
    if (engine->options.notify) engine->options.notify(engine->options.notify_context);
}

/* A full queue holds the engine until the consumer, told of what is there, makes room. Once the
 * queue is closed nobody reads, and the event is dropped. */
static void emit(struct engine *engine, const struct engine_event *event) {
    while (!event_queue_push(&engine->events, event)) {
        engine_announce(engine);
        if (!event_queue_wait_room(&engine->events)) return;
    }
    engine->unannounced = true;
}

static void emit_token(struct engine *engine, const struct sequence *sequence,
                       enum engine_event_kind kind, const struct scored_token *scored, size_t row) {
    struct engine_event event = {
        .id = sequence->request.id,
        .kind = kind,
        .token = scored->token,
        .is_stop = kind == EVENT_TOKEN && sequence_is_stop(sequence, scored->token),
        .logprob = scored->logprob,
        .depth = (uint16_t)(engine->attn_depth[row] + engine->mlp_depth[row]),
        .attn_depth = engine->attn_depth[row],
        .top_count = scored->top_count,
    };
    for (size_t i = 0; i < scored->top_count; i++) event.top[i] = scored->top[i];
    emit(engine, &event);
}

static void measure_times(struct sequence *sequence, uint64_t now) {
    struct engine_usage *usage = &sequence->usage;
    uint64_t started = sequence->started_ns ? sequence->started_ns : now;
    uint64_t first = sequence->first_token_ns ? sequence->first_token_ns : now;
    usage->queue_ns = started - sequence->submitted_ns;
    usage->prefill_ns = first - started;
    usage->decode_ns = now - first;
}

static void note_recent(double *mean, double value) {
    *mean += *mean > 0 ? (value - *mean) / 16 : value;
}

/* Time between two ends, of late: what a place in the queue takes to become free. And how much
 * there was to be done for one. */
static void note_end(struct engine *engine, const struct sequence *sequence, uint64_t now) {
    uint64_t since = engine->ended_ns ? engine->ended_ns : engine->busy_ns;
    note_recent(&engine->seconds_per_end, (double)(now - since) / 1e9);
    note_recent(&engine->tokens_per_end, (double)sequence->length);
    engine->ended_ns = now;
}

void engine_finish(struct engine *engine, struct sequence *sequence, enum finish_reason reason) {
    scheduler_remove(&engine->scheduler, sequence);
    measure_times(sequence, time_now_ns());
    if (reason == FINISH_CANCELLED) engine->stats.cancelled++;
    if (reason == FINISH_EXPIRED) engine->stats.expired++;
    if (sequence->started_ns) note_end(engine, sequence, time_now_ns());
    inbox_retire(&engine->inbox, sequence); /* first: who takes the event may submit the id again */
    struct engine_event event = {
        .id = sequence->request.id,
        .kind = EVENT_FINISHED,
        .finish = reason,
        .usage = sequence->usage,
    };
    emit(engine, &event);
    sequence_destroy(sequence);
}

/* ---- A step ---------------------------------------------------------------------------------- */

#define NO_LOGITS SIZE_MAX

/* Where the row is among those with logits; *next is the first of logit_rows not yet used. */
static size_t logit_index(const struct step *step, size_t row, size_t *next) {
    bool has_logits = *next < step->logit_count && (size_t)step->logit_rows[*next] == row;
    return has_logits ? (*next)++ : NO_LOGITS;
}

/* Before the step: what the device is to do with the rows that have logits. */
static void ask_draws(struct engine *engine, const struct step *step) {
    struct draw_batch *draws = &engine->draws;
    draw_batch_clear(draws, step->logit_count);
    for (size_t i = 0; i < step->part_count; i++) {
        const struct step_part *part = &step->parts[i];
        const struct sequence *sequence = part->sequence;
        const struct engine_request *request = &sequence->request;
        size_t next = part->first_logit;
        for (size_t row = part->first_row; row < part->first_row + part->rows; row++) {
            size_t at = logit_index(step, row, &next), after = (size_t)step->position[row] + 1;
            if (at == NO_LOGITS) continue;
            if (after < request->prompt_length)
                draw_batch_ask_score(draws, at, sequence->tokens[after],
                                     (size_t)request->top_logprobs);
            else
                draw_batch_ask_token(draws, at, sequence);
        }
    }
}

static bool is_drawn(const struct engine *engine, const struct step_result *result, size_t at) {
    return result->drawn && engine->draws.rows[at].kind != DRAW_NOTHING;
}

static int tell_drawn(const struct engine *engine, const struct step_result *result, size_t at,
                      struct scored_token *scored) {
    return draw_batch_tell(&engine->draws, at, engine->info->vocab, &result->drawn[at],
                           result->best + at * DRAW_BEST_MAX, scored);
}

static const float *host_logits(struct engine *engine, const struct step_result *result,
                                size_t at) {
    engine->stats.host_draws++;
    return result->logits + engine->info->vocab * at;
}

/* A prompt token is predicted by the row before its own, perhaps a step ago, but its depth is that
 * of its own row: its event comes with its row, and the next token's score is kept until then. */
static void report_prompt_row(struct engine *engine, struct sequence *sequence, size_t position,
                              const struct step_result *result, size_t at, size_t row) {
    const struct engine_request *request = &sequence->request;
    sequence->pending.token = sequence->tokens[position];
    emit_token(engine, sequence, EVENT_PROMPT, &sequence->pending, row);
    if (position + 1 == request->prompt_length) return;
    if (is_drawn(engine, result, at))
        tell_drawn(engine, result, at, &sequence->pending);
    else
        sampler_score(&engine->sampler, host_logits(engine, result, at),
                      sequence->tokens[position + 1], (size_t)request->top_logprobs,
                      &sequence->pending);
}

/* From the logits of index `at`, unless the device has. */
static int choose_token(struct engine *engine, const struct sequence *sequence,
                        const struct step_result *result, size_t at, struct scored_token *scored) {
    if (is_drawn(engine, result, at)) return tell_drawn(engine, result, at, scored);
    return sampler_draw(&engine->sampler, sequence, host_logits(engine, result, at), scored);
}

static void draw_next(struct engine *engine, struct sequence *sequence,
                      const struct step_result *result, size_t at, size_t row) {
    struct scored_token scored;
    if (choose_token(engine, sequence, result, at, &scored) != 0) {
        engine_finish(engine, sequence, FINISH_ERROR);
        return;
    }
    sequence_append(sequence, scored.token);
    if (sequence->first_token_ns == 0) sequence->first_token_ns = time_now_ns();
    engine->stats.generated_tokens++;
    emit_token(engine, sequence, EVENT_TOKEN, &scored, row);
    if (sequence_is_stop(sequence, scored.token)) {
        engine_finish(engine, sequence, FINISH_STOP);
    } else if (sequence_is_full(sequence)) {
        engine_finish(engine, sequence, FINISH_LENGTH);
    }
}

/* Moves the sequence's rates towards those of its rows in this step: a chunk says more than one
 * row, about as much as its last sixteen. */
static void note_rates(const struct engine *engine, const struct step_part *part) {
    struct sequence *sequence = part->sequence;
    double weight = part->rows < 16 ? (double)part->rows / 16 : 1, attn = 0, mlp = 0;
    for (size_t row = part->first_row; row < part->first_row + part->rows; row++) {
        attn += engine->attn_depth[row];
        mlp += engine->mlp_depth[row];
    }
    double all = (double)(part->rows * engine->info->blocks);
    sequence->attn_rate += weight * (attn / all - sequence->attn_rate);
    sequence->mlp_rate += weight * (mlp / all - sequence->mlp_rate);
}

/* Cached positions count with the depth that they were executed with. */
static void count_reused(const struct engine *engine, struct sequence *sequence, size_t first,
                         size_t end) {
    const struct kv *kv = &engine->scheduler.kv;
    struct engine_usage *usage = &sequence->usage;
    for (size_t position = first; position < end; position++) {
        int32_t block = kv_block_at(kv, (size_t)sequence->slot, position / KV_BLOCK_TOKENS);
        usage->attn_run += kv->block[block].attn_run[position % KV_BLOCK_TOKENS];
        usage->mlp_run += kv->block[block].mlp_run[position % KV_BLOCK_TOKENS];
    }
    usage->attn_total += (end - first) * engine->info->blocks;
    usage->mlp_total += (end - first) * engine->info->blocks;
}

/* Tells the new rows of a sequence; those recomputed after a preemption were told before it. */
static void deliver_part(struct engine *engine, const struct step *step,
                         const struct step_part *part, const struct step_result *result) {
    struct sequence *sequence = part->sequence;
    struct engine_usage *usage = &sequence->usage;
    size_t end = part->first_row + part->rows, logit = part->first_logit;
    size_t first = (size_t)step->position[part->first_row];
    note_rates(engine, part);
    count_reused(engine, sequence, first - part->reused, first);
    for (size_t row = part->first_row + part->recomputed; row < end; row++) {
        size_t position = (size_t)step->position[row];
        size_t at = logit_index(step, row, &logit);
        usage->attn_run += engine->attn_depth[row];
        usage->mlp_run += engine->mlp_depth[row];
        usage->attn_total += engine->info->blocks;
        usage->mlp_total += engine->info->blocks;
        if (sequence->request.prompt_logprobs && position < sequence->request.prompt_length) {
            report_prompt_row(engine, sequence, position, result, at, row);
        }
    }
    if (sequence->computed < sequence->length) return;
    if (sequence_is_full(sequence)) {
        engine_finish(engine, sequence, FINISH_LENGTH); /* max_tokens 0: nothing to draw */
    } else {
        draw_next(engine, sequence, result, logit - 1, end - 1); /* the last that it has */
    }
}

/* Sub-layers that ran, by row and by tier: even ones (from 0) are
 * attention, odd ones MLP. */
static void count_depth(struct engine *engine, const struct step *step,
                        const struct step_result *result) {
    size_t blocks = engine->info->blocks, stride = engine->info->max_step_rows;
    struct engine_stats *stats = &engine->stats;
    for (size_t row = 0; row < step->rows; row++) {
        engine->attn_depth[row] = engine->mlp_depth[row] = 0;
    }
    for (size_t block = 0; block < blocks; block++) {
        const uint8_t *attn = result->run + 2 * block * stride, *mlp = attn + stride;
        for (size_t row = 0; row < step->rows; row++) {
            engine->attn_depth[row] = (uint16_t)(engine->attn_depth[row] + attn[row]);
            engine->mlp_depth[row] = (uint16_t)(engine->mlp_depth[row] + mlp[row]);
        }
    }
    for (size_t row = 0; row < step->rows; row++) {
        int32_t tier = step->tier[row];
        stats->attn_run[tier] += engine->attn_depth[row];
        stats->attn_skipped[tier] += blocks - engine->attn_depth[row];
        stats->mlp_run[tier] += engine->mlp_depth[row];
        stats->mlp_skipped[tier] += blocks - engine->mlp_depth[row];
    }
}

/* By position of the cache, for whoever finds it there. */
static void keep_depth(struct engine *engine, const struct step *step) {
    struct kv *kv = &engine->scheduler.kv;
    for (size_t row = 0; row < step->rows; row++) {
        const struct sequence *sequence = step->parts[step->slot[row]].sequence;
        size_t position = (size_t)step->position[row], offset = position % KV_BLOCK_TOKENS;
        int32_t block = kv_block_at(kv, (size_t)sequence->slot, position / KV_BLOCK_TOKENS);
        kv->block[block].attn_run[offset] = engine->attn_depth[row];
        kv->block[block].mlp_run[offset] = engine->mlp_depth[row];
    }
}

/* Under omit: rows of each part that took no place in each layer's cache. */
static void count_kv_skips(struct engine *engine, const struct step *step,
                           const struct step_result *result) {
    size_t groups = engine->info->kv_groups, stride = engine->info->max_step_rows;
    memset(engine->skips, 0, step->part_count * groups * sizeof *engine->skips);
    for (size_t group = 0; group < groups; group++) {
        const uint8_t *run = result->run + 2 * group * stride;
        for (size_t row = 0; row < step->rows; row++) {
            engine->skips[(size_t)step->slot[row] * groups + group] += !run[row];
        }
    }
}

static void count_step(struct engine *engine, const struct step *step,
                       const struct step_result *result) {
    struct engine_stats *stats = &engine->stats;
    stats->steps++;
    stats->step_rows += step->rows;
    stats->body_none += result->body_none;
    stats->body_dense += result->body_dense;
    stats->body_gather += result->body_gather;
    for (size_t i = 0; i < step->part_count; i++) {
        const struct step_part *part = &step->parts[i];
        size_t first = (size_t)step->position[part->first_row];
        size_t prompt = part->sequence->request.prompt_length;
        if (first >= prompt) continue;
        stats->prompt_tokens += part->rows < prompt - first ? part->rows : prompt - first;
    }
}

const double step_error_edges[STEP_ERROR_EDGES] = {0.05, 0.1, 0.15, 0.25, 0.5, 1};

static void count_prediction(struct engine_stats *stats, double predicted, double real) {
    double off = predicted > 0 ? real / predicted - 1 : 0;
    size_t edge = 0;
    if (off < 0) off = -off;
    while (edge < STEP_ERROR_EDGES && off > step_error_edges[edge]) edge++;
    stats->step_errors[edge]++;
    stats->predicted_ns_last = (uint64_t)predicted;
    stats->predicted_ns_total += (uint64_t)predicted;
}

/* For GET /debug/steps, and what recent rows ran. */
static void log_step(struct engine *engine, const struct step *step,
                     const struct step_result *result) {
    struct step_record record = {
        .number = engine->stats.steps,
        .rows = step->rows,
        .logit_rows = step->logit_count,
        .body_none = result->body_none,
        .body_dense = result->body_dense,
        .body_gather = result->body_gather,
    };
    uint64_t run = 0;
    for (size_t row = 0; row < step->rows; row++) {
        record.tiers[step->tier[row]]++;
        run += (uint64_t)engine->attn_depth[row] + engine->mlp_depth[row];
    }
    for (size_t i = 0; i < step->part_count; i++) {
        record.decode_rows += sequence_is_decoding(step->parts[i].sequence);
    }
    double work = (double)run / (double)(step->rows * engine->info->sublayers);
    engine->mean_work += (work - engine->mean_work) / 16;
    engine->record = record;
}

/* A stall says little of the next step. */
static void note_slowness(struct engine *engine, double slowness) {
    if (slowness > 2 * engine->slowness) slowness = 2 * engine->slowness;
    engine->slowness += (slowness - engine->slowness) / 16;
}

/* Processor time of this thread. */
static uint64_t thread_time_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * UINT64_C(1000000000) + (uint64_t)time.tv_nsec;
}

void engine_step(struct engine *engine) {
    uint64_t start = time_now_ns(), thread_start = thread_time_ns();
    const struct step *step = scheduler_next_step(&engine->scheduler, start);
    struct batch batch = {
        .rows = step->rows,
        .token = step->token,
        .position = step->position,
        .tier = step->tier,
        .slot = step->slot,
        .block_table = step->block_table,
        .places = step->places,
        .slots = step->part_count,
        .blocks_per_slot = step->blocks_per_part,
        .logit_rows = step->logit_rows,
        .logit_count = step->logit_count,
        .draws = engine->draws.rows ? &engine->draws : NULL,
        .body = engine->options.body,
        .cost = &engine->cost,
    };
    if (engine->draws.rows) ask_draws(engine, step);
    double predicted = step->predicted_ns, modelled = step->modelled_ns;
    struct step_result result;
    model_step(engine->model, engine->arena, &batch, &result);
    count_step(engine, step, &result);
    count_depth(engine, step, &result);
    log_step(engine, step, &result);
    if (engine->scheduler.limits.prefix_cache) keep_depth(engine, step);
    if (engine->info->kv_groups > 1) count_kv_skips(engine, step, &result);
    scheduler_complete_step(&engine->scheduler, engine->skips);
    for (size_t i = 0; i < step->part_count; i++) {
        deliver_part(engine, step, &step->parts[i], &result);
    }
    uint64_t end = time_now_ns();
    scheduler_observe_step(&engine->scheduler, (double)(end - start));
    engine->stats.step_ns_last = end - start;
    engine->stats.step_ns_total += end - start;
    engine->stats.last_step_at_ns = end;
    count_prediction(&engine->stats, predicted, (double)(end - start));
    engine->record.at_ns = end;
    engine->record.predicted_ns = (uint64_t)predicted;
    if (modelled > 0) note_slowness(engine, (double)(end - start) / modelled);
    engine->record.modelled_ns = (uint64_t)modelled;
    engine->record.real_ns = end - start;
    engine->record.thread_ns = thread_time_ns() - thread_start;
    pthread_mutex_lock(&engine->stats_lock);
    step_log_add(&engine->step_log, &engine->record);
    pthread_mutex_unlock(&engine->stats_lock);
}
