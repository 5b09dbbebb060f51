/* Requests to an engine over a golden checkpoint, and what became of them. */
#ifndef FATHOM_TESTS_ENGINE_RUNS_H
#define FATHOM_TESTS_ENGINE_RUNS_H

#include "golden.h"
#include "test_device.h"

#include "engine/engine.h"

#include <semaphore.h>
#include <stdatomic.h>
#include <unistd.h>

enum { CONTEXT = 128 /* of every golden checkpoint */ };

struct asked {
    struct engine_request request;
    int32_t prompt[CONTEXT], stops[4];
    struct logit_bias bias[2];
};

struct outcome {
    struct engine_event prompt[CONTEXT], tokens[CONTEXT], finished;
    size_t prompt_count, token_count;
    bool ended;
};

static inline size_t hash(size_t a, size_t b) {
    uint64_t x = (a * 1000003 + b + 1) * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(x >> 33);
}

/* A plain greedy request: prompts differ by `i`. */
static inline void ask(struct asked *asked, const struct model_info *info, size_t i, size_t prompt,
                       size_t max_tokens) {
    *asked = (struct asked){.request = {
                                .id = i,
                                .prompt = asked->prompt,
                                .prompt_length = prompt,
                                .max_tokens = max_tokens,
                                .top_logprobs = -1,
                                .sampling = {.top_p = 1, .repetition_penalty = 1, .seed = i},
                            }};
    for (size_t p = 0; p < prompt; p++) asked->prompt[p] = (int32_t)(hash(i, p) % info->vocab);
}

/* Every kind of sampling, tier, length and report, chosen by `i`. */
static inline void ask_variously(struct asked *asked, const struct model_info *info, size_t i) {
    size_t prompt = 1 + hash(i, 901) % 60, max_tokens = i % 11 == 3 ? 0 : 1 + hash(i, 902) % 60;
    ask(asked, info, i, prompt, max_tokens);
    struct engine_request *request = &asked->request;
    struct sampling *sampling = &request->sampling;
    sampling->temperature = (float)(i % 3) * 0.7f;
    sampling->top_k = i % 4 == 1 ? 10 : 0;
    sampling->top_p = i % 5 == 2 ? 0.8f : 1;
    sampling->min_p = i % 7 == 3 ? 0.05f : 0;
    if (i % 2) sampling->frequency_penalty = 0.5f;
    if (i % 6 == 4) sampling->repetition_penalty = 1.2f;
    asked->bias[0] = (struct logit_bias){(int32_t)(i % info->vocab), 2};
    sampling->bias = asked->bias;
    sampling->bias_count = i % 2;
    for (size_t j = 0; j < 4; j++) asked->stops[j] = (int32_t)(hash(i, 950 + j) % info->vocab);
    request->stop_tokens = asked->stops;
    request->stop_token_count = i % 3 == 0 ? 4 : 0;
    request->min_tokens = max_tokens / 3;
    request->tier = (int32_t)(i % info->tier_count);
    request->priority = (int32_t)(i % 4 == 2);
    request->top_logprobs = (int32_t)(i % 5) - 1;
    request->prompt_logprobs = request->top_logprobs >= 0 && i % 2;
}

static inline void submit(struct engine *engine, const struct asked *asked) {
    struct error error = {0};
    must(engine_submit(engine, &asked->request, &error), &error);
}

/* Files an event; the rules of order are checked here, for every test. */
static inline void note_event(struct outcome *outcome, const struct engine_event *event) {
    assert_false(outcome->ended);
    switch (event->kind) {
    case EVENT_PROMPT:
        assert_int_equal(outcome->token_count, 0);
        assert_in_range(outcome->prompt_count, 0, CONTEXT - 1);
        outcome->prompt[outcome->prompt_count++] = *event;
        break;
    case EVENT_TOKEN:
        assert_in_range(outcome->token_count, 0, CONTEXT - 1);
        outcome->tokens[outcome->token_count++] = *event;
        break;
    case EVENT_FINISHED:
        outcome->finished = *event;
        outcome->ended = true;
        assert_int_equal(event->usage.completion_tokens, outcome->token_count);
    }
}

/* Takes what is there (waiting a little for it) into outcomes[id]; returns how many ended. */
static inline size_t collect(struct engine *engine, struct outcome *outcomes, size_t count) {
    struct engine_event events[64];
    size_t ended = 0;
    engine_wait(engine, 1000);
    size_t taken = engine_take_events(engine, events, 64);
    for (size_t i = 0; i < taken; i++) {
        assert_in_range(events[i].id, 0, count - 1);
        note_event(&outcomes[events[i].id], &events[i]);
        ended += events[i].kind == EVENT_FINISHED;
    }
    return ended;
}

static inline void collect_all(struct engine *engine, struct outcome *outcomes, size_t count) {
    for (size_t ended = 0; ended < count;) ended += collect(engine, outcomes, count);
}

static inline void wait_idle(struct engine *engine, struct engine_stats *stats) {
    for (size_t i = 0; i < 5000; i++) {
        engine_get_stats(engine, stats);
        if (stats->idle) break;
        usleep(1000);
    }
    assert_true(stats->idle);
    assert_int_equal(stats->running + stats->waiting, 0);
    assert_int_equal(stats->kv_blocks_used, 0);
    assert_int_equal(stats->kv_bytes_used, 0);
}

/* What a request gets, but for times and for what was cached. */
static inline void check_same_event(const struct engine_event *a, const struct engine_event *b) {
    assert_int_equal(a->token, b->token);
    assert_int_equal(a->is_stop, b->is_stop);
    assert_int_equal(a->depth, b->depth);
    assert_memory_equal(&a->logprob, &b->logprob, sizeof a->logprob);
    assert_int_equal(a->top_count, b->top_count);
    for (size_t i = 0; i < a->top_count; i++) {
        assert_int_equal(a->top[i].token, b->top[i].token);
        assert_memory_equal(&a->top[i].logprob, &b->top[i].logprob, sizeof(float));
    }
}

static inline void check_same(const struct outcome *a, const struct outcome *b) {
    assert_int_equal(a->prompt_count, b->prompt_count);
    assert_int_equal(a->token_count, b->token_count);
    for (size_t i = 0; i < a->prompt_count; i++) check_same_event(&a->prompt[i], &b->prompt[i]);
    for (size_t i = 0; i < a->token_count; i++) check_same_event(&a->tokens[i], &b->tokens[i]);
    assert_int_equal(a->finished.finish, b->finished.finish);
    const struct engine_usage *left = &a->finished.usage, *right = &b->finished.usage;
    assert_int_equal(left->prompt_tokens, right->prompt_tokens);
    assert_int_equal(left->attn_run, right->attn_run);
    assert_int_equal(left->attn_total, right->attn_total);
    assert_int_equal(left->mlp_run, right->mlp_run);
    assert_int_equal(left->mlp_total, right->mlp_total);
}

static inline struct engine *open_engine(struct model *model, struct engine_options options) {
    struct error error = {0};
    struct engine *engine = NULL;
    if (options.kv_budget == 0) options.kv_budget = 64 << 20;
    must(engine_create(model, &options, &engine, &error), &error);
    return engine;
}

static inline struct model *open_model(const char *name, size_t threads, size_t rows) {
    char folder[512];
    snprintf(folder, sizeof folder, "%s%s", GOLDEN_FOLDER, name);
    struct model_options options = {
        .device = test_device(), .threads = threads, .max_step_rows = rows};
    return golden_model(folder, &options);
}

static inline void run_one(struct engine *engine, const struct asked *asked,
                           struct outcome *outcome) {
    memset(outcome, 0, sizeof *outcome);
    submit(engine, asked);
    while (!outcome->ended) {
        struct engine_event event;
        engine_wait(engine, 1000);
        if (engine_take_events(engine, &event, 1)) note_event(outcome, &event);
    }
}

/* ---- An engine that can be held between two steps -------------------------------------------- */

struct brake {
    sem_t told, go_on;
    atomic_bool held; /* when false, notify returns at once */
    atomic_size_t notified;
};

static inline void notify_brake(void *context) {
    struct brake *brake = context;
    atomic_fetch_add(&brake->notified, 1);
    sem_post(&brake->told);
    if (atomic_load(&brake->held)) sem_wait(&brake->go_on);
}

static inline struct engine *open_held(struct model *model, struct brake *brake,
                                       struct engine_options options) {
    sem_init(&brake->told, 0, 0);
    sem_init(&brake->go_on, 0, 0);
    atomic_init(&brake->held, true);
    atomic_init(&brake->notified, 0);
    options.notify = notify_brake;
    options.notify_context = brake;
    return open_engine(model, options);
}

static inline void brake_release(struct brake *brake) {
    atomic_store(&brake->held, false);
    sem_post(&brake->go_on);
}

#endif
