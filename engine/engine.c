/* The engine thread: requests in, steps of the model, events out.
 *
 * The public functions only check, copy and leave a message; every sequence, block and step belongs
 * to the thread that runs engine_run. */
#include "engine/engine.h"

#include "engine/auto_tier.h"
#include "engine/event_queue.h"
#include "engine/forward.h"
#include "engine/inbox.h"
#include "engine/model.h"
#include "engine/request.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/step_log.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define DEFAULT_SEQUENCES   256
#define DEFAULT_QUEUE_LIMIT 1024
#define UNFINISHED_MAX      (1 << 20) /* requests; far beyond what one process can serve */
#define EVENT_CAPACITY      8192
#define SWEEP_NS            UINT64_C(5000000)

struct engine {
    struct model *model;
    const struct model_info *info;
    struct engine_options options; /* defaults resolved */
    struct request_limits limits;
    struct inbox inbox;
    struct event_queue events;
    uint64_t secret;             /* of prefix_root */
    size_t same_tier[TIERS_MAX]; /* the first tier with the same thresholds */
    pthread_t thread;
    bool started;

    /* The engine thread's. */
    struct kv_arena *arena;
    struct cost_model cost; /* read only */
    struct scheduler scheduler;
    struct sampler sampler;
    struct engine_stats stats;
    uint16_t *attn_depth, *mlp_depth; /* [max_step_rows] sub-layers that ran for each row */
    uint64_t busy_ns, ended_ns;       /* when it last woke; when a request last ended since, or 0 */
    double seconds_per_end;           /* recent time between two ends; 0: not known */
    uint64_t swept_ns; /* when the queue was last looked through for expired requests */
    bool unannounced;  /* events were pushed since the consumer was last told */

    double mean_work;          /* share of all sub-layers that recent rows ran */
    struct step_record record; /* of the step that runs */
    struct step_log step_log;  /* written under stats_lock */

    pthread_mutex_t stats_lock;      /* of what follows, and of step_log */
    struct engine_stats published;   /* a copy of `stats` */
    struct auto_load published_load; /* its rates, of recent work */
    size_t computed_tokens;          /* of the prompts of running sequences */
};

static void *engine_run(void *context);

/* ---- Start and end --------------------------------------------------------------------------- */

static int resolve_options(struct engine *engine, struct error *error) {
    struct engine_options *options = &engine->options;
    if (options->max_sequences == 0) options->max_sequences = DEFAULT_SEQUENCES;
    if (options->queue_limit == 0) options->queue_limit = DEFAULT_QUEUE_LIMIT;
    if (options->max_sequences > UNFINISHED_MAX || options->queue_limit > UNFINISHED_MAX) {
        return error_set(error, FATHOM_INVALID,
                         "max_sequences %zu or queue_limit %zu is over the limit of %d",
                         options->max_sequences, options->queue_limit, UNFINISHED_MAX);
    }
    if (options->body < BODY_AUTO || options->body > BODY_GATHER) {
        return error_set(error, FATHOM_INVALID, "body is %d; it must be 0..2", options->body);
    }
    return 0;
}

/* Blocks that the budget pays for, and no more than all sequences at full context would use. */
static int count_blocks(const struct engine *engine, size_t *blocks, struct error *error) {
    const struct engine_options *options = &engine->options;
    size_t running = options->max_sequences, useful;
    if (running > engine->info->max_step_rows) running = engine->info->max_step_rows;
    *blocks = options->kv_budget / engine->info->kv_block_bytes;
    if (*blocks == 0) {
        return error_set(error, FATHOM_INVALID,
                         "kv_budget of %zu bytes is too small: a block of %d tokens is %zu bytes",
                         options->kv_budget, KV_BLOCK_TOKENS, engine->info->kv_block_bytes);
    }
    if (size_multiply(running, kv_blocks_for(engine->info->context), &useful) && *blocks > useful) {
        *blocks = useful;
    }
    return 0;
}

/* blocks is at most INT32_MAX, so that the sum cannot overflow. */
static size_t count_queue_tokens(const struct engine *engine, size_t blocks) {
    size_t tokens = engine->options.queue_tokens;
    if (tokens == 0 || tokens > SIZE_MAX / 2) return SIZE_MAX;
    return tokens + blocks * KV_BLOCK_TOKENS;
}

static int create_parts(struct engine *engine, struct error *error) {
    const struct model_info *info = engine->info;
    size_t rows = info->max_step_rows, blocks, kv_tokens;
    int result = resolve_options(engine, error);
    if (result == 0) result = count_blocks(engine, &blocks, error);
    if (result != 0) return result;
    if (!size_multiply(blocks, KV_BLOCK_TOKENS, &kv_tokens) || kv_tokens > info->context) {
        kv_tokens = info->context;
    }
    engine->limits =
        (struct request_limits){info->vocab, info->context, info->tier_count, kv_tokens};
    struct scheduler_limits limits = {
        .max_sequences = engine->options.max_sequences,
        .max_step_rows = rows,
        .prefill_chunk = engine->options.prefill_chunk,
        .kv_blocks = blocks,
        .max_tokens = kv_tokens,
        .prefix_cache = !engine->options.no_prefix_cache,
    };
    if (engine->options.cost) {
        engine->cost = *engine->options.cost;
    } else {
        result = model_measure_cost(engine->model, error);
        if (result != 0) return result;
        engine->cost = *model_get_cost(engine->model);
    }
    limits.cost = &engine->cost;
    limits.step_target_ns = (double)engine->options.step_target_us * 1e3;
    result = scheduler_create(&engine->scheduler, &limits, error);
    if (result == 0) result = kv_arena_create(engine->model, blocks, &engine->arena, error);
    if (result == 0) result = sampler_create(&engine->sampler, info->vocab, error);
    if (result == 0) result = step_log_create(&engine->step_log, engine->options.step_log, error);
    if (result == 0) result = event_queue_create(&engine->events, EVENT_CAPACITY, error);
    if (result == 0) {
        size_t unfinished = engine->options.max_sequences + engine->options.queue_limit;
        result =
            inbox_create(&engine->inbox, unfinished, count_queue_tokens(engine, blocks), error);
    }
    if (result != 0) return result;
    engine->attn_depth = calloc(rows, sizeof *engine->attn_depth);
    engine->mlp_depth = calloc(rows, sizeof *engine->mlp_depth);
    if (!engine->attn_depth || !engine->mlp_depth) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory for steps of %zu rows", rows);
    }
    engine->stats.kv_blocks_total = blocks;
    engine->stats.kv_bytes_budget = engine->options.kv_budget;
    engine->stats.idle = true;
    engine->mean_work = 1;
    engine->published_load =
        (struct auto_load){.max_sequences = engine->scheduler.limits.max_sequences, .mean_work = 1};
    engine->published = engine->stats;
    return 0;
}

/* Equal thresholds make equal K and V: such tiers share prefixes. */
static void find_same_tiers(struct engine *engine) {
    const struct depth_table *depth = checkpoint_depth(engine->model->checkpoint);
    size_t bytes = depth->sublayers * sizeof *depth->theta;
    for (size_t tier = 0; tier < depth->tier_count; tier++) {
        const float *theta = depth->theta + tier * depth->sublayers;
        size_t same = 0;
        while (memcmp(depth->theta + same * depth->sublayers, theta, bytes) != 0) same++;
        engine->same_tier[tier] = same;
    }
}

int engine_create(struct model *model, const struct engine_options *options, struct engine **out,
                  struct error *error) {
    /* aligned_alloc: the event queue keeps its two counters on cache lines of their own. */
    size_t alignment = _Alignof(struct engine);
    struct engine *engine = aligned_alloc(alignment, sizeof *engine);
    if (!engine) return error_set(error, FATHOM_NO_MEMORY, "no memory for an engine");
    *engine = (struct engine){
        .model = model,
        .info = model_get_info(model),
        .options = *options,
        .stats_lock = PTHREAD_MUTEX_INITIALIZER,
    };
    int result = create_parts(engine, error);
    find_same_tiers(engine);
    if (result == 0 && getrandom(&engine->secret, sizeof engine->secret, 0) < 0) {
        result = error_set(error, FATHOM_IO, "the system gives no random number");
    }
    if (result == 0) {
        engine->started = pthread_create(&engine->thread, NULL, engine_run, engine) == 0;
        if (!engine->started) {
            result = error_set(error, FATHOM_NO_MEMORY, "the engine thread could not be started");
        }
    }
    if (result != 0) {
        engine_destroy(engine);
        return result;
    }
    *out = engine;
    return 0;
}

static void destroy_list(struct sequence_list *list) {
    for (struct sequence *sequence = list->first, *next; sequence; sequence = next) {
        next = sequence->next;
        sequence_destroy(sequence);
    }
}

void engine_destroy(struct engine *engine) {
    if (!engine) return;
    if (engine->started) {
        inbox_stop(&engine->inbox);
        event_queue_close(&engine->events); /* the thread may be waiting for room */
        pthread_join(engine->thread, NULL);
    }
    destroy_list(&engine->scheduler.running);
    destroy_list(&engine->scheduler.waiting);
    scheduler_destroy(&engine->scheduler);
    sampler_destroy(&engine->sampler);
    inbox_destroy(&engine->inbox);
    event_queue_destroy(&engine->events);
    step_log_destroy(&engine->step_log);
    kv_arena_destroy(engine->model, engine->arena);
    pthread_mutex_destroy(&engine->stats_lock);
    free(engine->attn_depth);
    free(engine->mlp_depth);
    free(engine);
}

/* ---- Other threads --------------------------------------------------------------------------- */

int engine_submit(struct engine *engine, const struct engine_request *request,
                  struct error *error) {
    int result = request_check(request, &engine->limits, error);
    if (result != 0) return result;
    struct sequence *sequence;
    result = sequence_create(request, engine->info->eos, &sequence, error);
    if (result != 0) return result;
    sequence->submitted_ns = time_now_ns();
    const struct tier_info *tier = &engine->info->tiers[request->tier];
    if (tier->measured) sequence->attn_rate = 1 - tier->attn_skip;
    if (tier->measured) sequence->mlp_rate = 1 - tier->mlp_skip;
    sequence->prefix_root = prefix_root(engine->secret, engine->same_tier[request->tier],
                                        request->cache_salt, request->cache_salt_length);
    result = inbox_submit(&engine->inbox, sequence, error);
    if (result != 0) sequence_destroy(sequence);
    return result;
}

void engine_cancel(struct engine *engine, uint64_t id) {
    inbox_cancel(&engine->inbox, id);
}

size_t engine_take_events(struct engine *engine, struct engine_event *events, size_t capacity) {
    return event_queue_take(&engine->events, events, capacity);
}

void engine_wait(struct engine *engine, unsigned timeout_ms) {
    event_queue_wait(&engine->events, timeout_ms);
}

void engine_get_stats(struct engine *engine, struct engine_stats *stats) {
    pthread_mutex_lock(&engine->stats_lock);
    *stats = engine->published;
    pthread_mutex_unlock(&engine->stats_lock);
}

size_t engine_get_steps(struct engine *engine, struct step_record *records, size_t capacity) {
    pthread_mutex_lock(&engine->stats_lock);
    size_t count = step_log_copy(&engine->step_log, records, capacity);
    pthread_mutex_unlock(&engine->stats_lock);
    return count;
}

void engine_choose_tier(struct engine *engine, const struct auto_options *options,
                        size_t prompt_tokens, struct auto_choice *choice) {
    size_t unfinished, tokens;
    pthread_mutex_lock(&engine->stats_lock);
    struct auto_load load = engine->published_load;
    size_t computed = engine->computed_tokens;
    pthread_mutex_unlock(&engine->stats_lock);
    /* Counted where requests come in: a burst within one step is seen as it arrives. */
    inbox_count(&engine->inbox, &unfinished, &tokens);
    load.unfinished = unfinished;
    load.pending_tokens = tokens > computed ? tokens - computed : 0;
    load.prompt_tokens = prompt_tokens;
    auto_tier_choose(&engine->cost, engine->info, &load, options, choice);
}

size_t engine_max_sequence(const struct engine *engine) {
    return engine->limits.kv_tokens;
}

/* ---- Events ---------------------------------------------------------------------------------- */

static void announce_events(struct engine *engine) {
    if (!engine->unannounced) return;
    engine->unannounced = false;
    event_queue_announce(&engine->events);
    if (engine->options.notify) engine->options.notify(engine->options.notify_context);
}

/* A full queue holds the engine until the consumer, told of what is there, makes room. Once the
 * queue is closed nobody reads, and the event is dropped. */
static void emit(struct engine *engine, const struct engine_event *event) {
    while (!event_queue_push(&engine->events, event)) {
        announce_events(engine);
        if (!event_queue_wait_room(&engine->events)) return;
    }
    engine->unannounced = true;
}

static void emit_choice(struct engine *engine, const struct sequence *sequence,
                        enum engine_event_kind kind, const struct choice *choice, size_t depth) {
    struct engine_event event = {
        .id = sequence->request.id,
        .kind = kind,
        .token = choice->token,
        .is_stop = kind == EVENT_TOKEN && sequence_is_stop(sequence, choice->token),
        .logprob = choice->logprob,
        .depth = (uint16_t)depth,
        .top_count = choice->top_count,
    };
    for (size_t i = 0; i < choice->top_count; i++) event.top[i] = choice->top[i];
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

/* Time between two ends, of late: what a place in the queue takes to become free. */
static void note_end(struct engine *engine, uint64_t now) {
    uint64_t since = engine->ended_ns ? engine->ended_ns : engine->busy_ns;
    double seconds = (double)(now - since) / 1e9;
    if (engine->seconds_per_end > 0) {
        engine->seconds_per_end += (seconds - engine->seconds_per_end) / 16;
    } else {
        engine->seconds_per_end = seconds;
    }
    engine->ended_ns = now;
}

/* The only way out for a sequence: blocks back, id free, EVENT_FINISHED. */
static void finish_sequence(struct engine *engine, struct sequence *sequence,
                            enum finish_reason reason) {
    scheduler_remove(&engine->scheduler, sequence);
    measure_times(sequence, time_now_ns());
    if (reason == FINISH_CANCELLED) engine->stats.cancelled++;
    if (reason == FINISH_EXPIRED) engine->stats.expired++;
    if (sequence->started_ns) note_end(engine, time_now_ns());
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

/* The row's logits, or NULL if it has none; *next is the first of logit_rows not yet used. */
static const float *row_logits(const struct engine *engine, const struct step *step,
                               const struct step_result *result, size_t row, size_t *next) {
    if (*next == step->logit_count || (size_t)step->logit_rows[*next] != row) return NULL;
    return result->logits + engine->info->vocab * (*next)++;
}

/* A prompt token is predicted by the row before its own, perhaps a step ago, but its depth is that
 * of its own row: its event comes with its row, and the next token's score is kept until then. */
static void report_prompt_row(struct engine *engine, struct sequence *sequence, size_t position,
                              const float *logits, size_t depth) {
    const struct engine_request *request = &sequence->request;
    sequence->pending.token = sequence->tokens[position];
    emit_choice(engine, sequence, EVENT_PROMPT, &sequence->pending, depth);
    if (position + 1 < request->prompt_length) {
        sampler_score(&engine->sampler, logits, sequence->tokens[position + 1],
                      (size_t)request->top_logprobs, &sequence->pending);
    }
}

static void draw_next(struct engine *engine, struct sequence *sequence, const float *logits,
                      size_t depth) {
    struct choice choice;
    if (sampler_draw(&engine->sampler, sequence, logits, &choice) != 0) {
        finish_sequence(engine, sequence, FINISH_ERROR);
        return;
    }
    sequence_append(sequence, choice.token);
    if (sequence->first_token_ns == 0) sequence->first_token_ns = time_now_ns();
    engine->stats.generated_tokens++;
    emit_choice(engine, sequence, EVENT_TOKEN, &choice, depth);
    if (sequence_is_stop(sequence, choice.token)) {
        finish_sequence(engine, sequence, FINISH_STOP);
    } else if (sequence_is_full(sequence)) {
        finish_sequence(engine, sequence, FINISH_LENGTH);
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
    size_t end = part->first_row + part->rows, logit = part->first_logit, depth = 0;
    const float *logits = NULL;
    size_t first = (size_t)step->position[part->first_row];
    note_rates(engine, part);
    count_reused(engine, sequence, first - part->reused, first);
    for (size_t row = part->first_row + part->recomputed; row < end; row++) {
        size_t position = (size_t)step->position[row];
        logits = row_logits(engine, step, result, row, &logit);
        depth = (size_t)engine->attn_depth[row] + engine->mlp_depth[row];
        usage->attn_run += engine->attn_depth[row];
        usage->mlp_run += engine->mlp_depth[row];
        usage->attn_total += engine->info->blocks;
        usage->mlp_total += engine->info->blocks;
        if (sequence->request.prompt_logprobs && position < sequence->request.prompt_length) {
            report_prompt_row(engine, sequence, position, logits, depth);
        }
    }
    if (sequence->computed < sequence->length) return;
    if (sequence_is_full(sequence)) {
        finish_sequence(engine, sequence, FINISH_LENGTH); /* max_tokens 0: nothing to draw */
    } else {
        draw_next(engine, sequence, logits, depth);
    }
}

/* Sub-layers that ran, by row, by position of the cache and by tier: even ones (from 0) are
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
    struct kv *kv = &engine->scheduler.kv;
    for (size_t row = 0; row < step->rows; row++) {
        size_t position = (size_t)step->position[row], offset = position % KV_BLOCK_TOKENS;
        int32_t block = kv_block_at(kv, (size_t)step->slot[row], position / KV_BLOCK_TOKENS);
        kv->block[block].attn_run[offset] = engine->attn_depth[row];
        kv->block[block].mlp_run[offset] = engine->mlp_depth[row];
        int32_t tier = step->tier[row];
        stats->attn_run[tier] += engine->attn_depth[row];
        stats->attn_skipped[tier] += blocks - engine->attn_depth[row];
        stats->mlp_run[tier] += engine->mlp_depth[row];
        stats->mlp_skipped[tier] += blocks - engine->mlp_depth[row];
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

static void run_step(struct engine *engine) {
    uint64_t start = time_now_ns();
    const struct step *step = scheduler_next_step(&engine->scheduler, start);
    struct batch batch = {
        .rows = step->rows,
        .token = step->token,
        .position = step->position,
        .tier = step->tier,
        .slot = step->slot,
        .block_table = engine->scheduler.kv.table,
        .slots = step->slots,
        .blocks_per_slot = engine->scheduler.kv.blocks_per_slot,
        .logit_rows = step->logit_rows,
        .logit_count = step->logit_count,
        .body = engine->options.body,
        .cost = &engine->cost,
    };
    double predicted = step->predicted_ns;
    struct step_result result;
    model_step(engine->model, engine->arena, &batch, &result);
    count_step(engine, step, &result);
    count_depth(engine, step, &result);
    log_step(engine, step, &result);
    scheduler_complete_step(&engine->scheduler);
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
    engine->record.real_ns = end - start;
    pthread_mutex_lock(&engine->stats_lock);
    step_log_add(&engine->step_log, &engine->record);
    pthread_mutex_unlock(&engine->stats_lock);
}

/* ---- The thread ------------------------------------------------------------------------------ */

static void publish_stats(struct engine *engine) {
    struct engine_stats *stats = &engine->stats;
    const struct scheduler *scheduler = &engine->scheduler;
    stats->running = scheduler->running.count;
    stats->waiting = scheduler->waiting.count;
    stats->kv_blocks_used = kv_blocks_used(&scheduler->kv);
    stats->kv_bytes_used = stats->kv_blocks_used * engine->info->kv_block_bytes;
    stats->kv_blocks_cached = scheduler->kv.idle_count;
    stats->preemptions = scheduler->preemptions;
    stats->prefix_queries = scheduler->prefix_queries;
    stats->prefix_hits = scheduler->prefix_hits;
    stats->idle = scheduler_is_empty(scheduler);
    stats->drain_seconds = (double)stats->waiting * engine->seconds_per_end;
    size_t computed = 0;
    const struct sequence *sequence = scheduler->running.first;
    for (; sequence; sequence = sequence->next) {
        size_t prompt = sequence->request.prompt_length;
        computed += sequence->computed < prompt ? sequence->computed : prompt;
    }
    pthread_mutex_lock(&engine->stats_lock);
    engine->published = *stats;
    engine->computed_tokens = computed;
    engine->published_load = (struct auto_load){
        .max_sequences = scheduler->limits.max_sequences,
        .seconds_per_end = engine->seconds_per_end,
        .mean_work = engine->mean_work,
    };
    pthread_mutex_unlock(&engine->stats_lock);
}

static void cancel_marked(struct engine *engine, struct sequence_list *list) {
    for (struct sequence *sequence = list->first, *next; sequence; sequence = next) {
        next = sequence->next;
        if (atomic_load(&sequence->cancelled)) finish_sequence(engine, sequence, FINISH_CANCELLED);
    }
}

/* Requests that waited too long for their first row. */
static void expire_waiting(struct engine *engine) {
    uint64_t now = time_now_ns(), limit = engine->options.queue_timeout_ms * UINT64_C(1000000);
    if (limit == 0 || now - engine->swept_ns < SWEEP_NS) return;
    engine->swept_ns = now;
    struct sequence *sequence = engine->scheduler.waiting.first, *next;
    for (; sequence; sequence = next) {
        next = sequence->next;
        bool is_late = now > sequence->submitted_ns && now - sequence->submitted_ns > limit;
        if (sequence->started_ns == 0 && is_late) {
            finish_sequence(engine, sequence, FINISH_EXPIRED);
        }
    }
}

/* Takes in what other threads asked; sleeps while there is nothing to run. False: stop. */
static bool take_requests(struct engine *engine) {
    bool was_idle = scheduler_is_empty(&engine->scheduler);
    struct inbox_contents contents;
    if (!inbox_collect(&engine->inbox, was_idle, &contents)) return false;
    for (struct sequence *sequence = contents.submitted, *next; sequence; sequence = next) {
        next = sequence->inbox_next; /* once added, the sequence may finish and be gone */
        scheduler_add(&engine->scheduler, sequence);
    }
    if (contents.cancelled) {
        cancel_marked(engine, &engine->scheduler.running);
        cancel_marked(engine, &engine->scheduler.waiting);
    }
    if (was_idle) {
        /* Busy from now on: a watcher must not take the time asleep for a step that hangs. */
        engine->stats.last_step_at_ns = engine->busy_ns = time_now_ns();
        engine->ended_ns = 0;
        publish_stats(engine);
    }
    return true;
}

static void *engine_run(void *context) {
    struct engine *engine = context;
    while (take_requests(engine)) {
        expire_waiting(engine);
        if (!scheduler_is_empty(&engine->scheduler)) run_step(engine);
        publish_stats(engine);
        announce_events(engine);
    }
    return NULL;
}
