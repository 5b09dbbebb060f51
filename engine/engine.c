/* The engine thread: requests in, steps of the model, events out.
 *
 * The public functions only check, copy and leave a message; every sequence, block and step belongs
 * to the thread that runs engine_run. */
#include "engine/engine.h"

#include "engine/engine_thread.h"
#include "engine/model.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define DEFAULT_SEQUENCES   256
#define DEFAULT_QUEUE_LIMIT 1024
#define UNFINISHED_MAX      (1 << 20) /* requests; far beyond what one process can serve */
#define EVENT_CAPACITY      8192
#define SWEEP_NS            UINT64_C(5000000)

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
    size_t groups = engine->info->kv_groups;
    *blocks = options->kv_budget / engine->info->kv_block_bytes;
    if (*blocks < groups) {
        return error_set(
            error, FATHOM_INVALID, "kv_budget of %zu bytes is too small: %d tokens take %zu bytes",
            options->kv_budget, KV_BLOCK_TOKENS, model_kv_bytes(engine->info, KV_BLOCK_TOKENS));
    }
    if (size_multiply(running, groups * kv_blocks_for(engine->info->context), &useful) &&
        *blocks > useful) {
        *blocks = useful;
    }
    return 0;
}

/* blocks is at most INT32_MAX, so that the sum cannot overflow. */
static size_t count_queue_tokens(const struct engine *engine, size_t blocks) {
    size_t tokens = engine->options.queue_tokens;
    if (tokens == 0 || tokens > SIZE_MAX / 2) return SIZE_MAX;
    return tokens + blocks / engine->info->kv_groups * KV_BLOCK_TOKENS;
}

static int create_parts(struct engine *engine, struct error *error) {
    const struct model_info *info = engine->info;
    size_t rows = info->max_step_rows, blocks, kv_tokens;
    int result = resolve_options(engine, error);
    if (result == 0) result = count_blocks(engine, &blocks, error);
    if (result != 0) return result;
    if (!size_multiply(blocks / info->kv_groups, KV_BLOCK_TOKENS, &kv_tokens) ||
        kv_tokens > info->context) {
        kv_tokens = info->context;
    }
    engine->limits =
        (struct request_limits){info->vocab, info->context, info->tier_count, kv_tokens};
    struct scheduler_limits limits = {
        .max_sequences = engine->options.max_sequences,
        .max_step_rows = rows,
        .prefill_chunk = engine->options.prefill_chunk,
        .kv_blocks = blocks,
        .kv_groups = info->kv_groups,
        .max_tokens = kv_tokens,
        /* Under omit a prefix ends in the middle of a block of every layer. */
        .prefix_cache = !engine->options.no_prefix_cache && info->kv_groups == 1,
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
    limits.prefill_share = engine->options.prefill_share;
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
    engine->skips = calloc(rows * info->kv_groups, sizeof *engine->skips);
    if (!engine->attn_depth || !engine->mlp_depth || !engine->skips) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory for steps of %zu rows", rows);
    }
    if (model_draws(engine->model) && !engine->options.host_draws) {
        result = draw_batch_create(&engine->draws, rows, error);
        if (result != 0) return result;
    }
    engine->stats.kv_blocks_total = blocks;
    engine->stats.kv_bytes_budget = blocks * info->kv_block_bytes;
    engine->stats.idle = true;
    engine->mean_work = engine->slowness = 1;
    engine->published_load = (struct auto_load){
        .max_sequences = engine->scheduler.limits.max_sequences, .mean_work = 1, .slowness = 1};
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
    free(engine->skips);
    draw_batch_destroy(&engine->draws);
    free(engine);
}

/* ---- Other threads --------------------------------------------------------------------------- */

int engine_submit(struct engine *engine, const struct engine_request *request,
                  struct error *error) {
    int result = request_check(request, &engine->limits, error);
    if (result != 0) return result;
    struct sequence *sequence;
    result = sequence_create(request, engine->info->eos, engine->info->eos_count, &sequence, error);
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
    /* What an idle engine published holds until it has woken, which may be never. */
    uint64_t since = inbox_waits_since(&engine->inbox);
    if (!stats->idle || since == 0) return;
    stats->idle = false;
    if (since > stats->last_step_at_ns) stats->last_step_at_ns = since;
}

size_t engine_get_steps(struct engine *engine, struct step_record *records, size_t capacity) {
    pthread_mutex_lock(&engine->stats_lock);
    size_t count = step_log_copy(&engine->step_log, records, capacity);
    pthread_mutex_unlock(&engine->stats_lock);
    return count;
}

void engine_choose_tier(struct engine *engine, const struct auto_options *options,
                        size_t prompt_tokens, struct auto_choice *choice) {
    pthread_mutex_lock(&engine->stats_lock);
    struct auto_load load = engine->published_load;
    size_t computed = engine->computed_tokens;
    pthread_mutex_unlock(&engine->stats_lock);
    /* Counted where requests come in: a burst within one step is seen as it arrives. */
    struct inbox_count count = inbox_count(&engine->inbox, time_now_ns());
    load.unfinished = count.accepted;
    load.arrivals_per_second = count.arrivals_per_second;
    load.pending_tokens = count.tokens > computed ? count.tokens - computed : 0;
    load.prompt_tokens = prompt_tokens;
    auto_tier_choose(&engine->cost, engine->info, &load, options, choice);
}

size_t engine_max_sequence(const struct engine *engine) {
    return engine->limits.kv_tokens;
}

/* ---- The thread ------------------------------------------------------------------------------ */

/* Blocks that running sequences would hold more if every computed token took a place in every
 * group. */
static size_t count_saved_blocks(const struct scheduler *scheduler) {
    const struct kv *kv = &scheduler->kv;
    size_t saved = 0;
    const struct sequence *sequence = scheduler->running.first;
    for (; kv->groups > 1 && sequence; sequence = sequence->next) {
        size_t all = kv_blocks_for(sequence->computed);
        for (size_t group = 0; group < kv->groups; group++) {
            size_t held = kv_held(kv, (size_t)sequence->slot, group);
            saved += all > held ? all - held : 0;
        }
    }
    return saved;
}

static void publish_stats(struct engine *engine) {
    struct engine_stats *stats = &engine->stats;
    const struct scheduler *scheduler = &engine->scheduler;
    stats->running = scheduler->running.count;
    stats->waiting = scheduler->waiting.count;
    stats->kv_blocks_used = kv_blocks_used(&scheduler->kv);
    stats->kv_bytes_used = stats->kv_blocks_used * engine->info->kv_block_bytes;
    stats->kv_bytes_saved = count_saved_blocks(scheduler) * engine->info->kv_block_bytes;
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
        .max_step_rows = scheduler->limits.max_step_rows,
        .step_target = scheduler->limits.step_target_ns / 1e9,
        .prefill_share = scheduler->limits.prefill_share,
        .seconds_per_end = engine->seconds_per_end,
        .tokens_per_end = engine->tokens_per_end,
        .mean_work = engine->mean_work,
        .slowness = engine->slowness,
    };
    pthread_mutex_unlock(&engine->stats_lock);
}

static void cancel_marked(struct engine *engine, struct sequence_list *list) {
    for (struct sequence *sequence = list->first, *next; sequence; sequence = next) {
        next = sequence->next;
        if (atomic_load(&sequence->cancelled)) engine_finish(engine, sequence, FINISH_CANCELLED);
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
            engine_finish(engine, sequence, FINISH_EXPIRED);
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
        if (!scheduler_is_empty(&engine->scheduler)) engine_step(engine);
        publish_stats(engine);
        engine_announce(engine);
    }
    return NULL;
}
