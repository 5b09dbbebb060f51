/* The engine over real (tiny) checkpoints: whatever else it is doing, a request gets the same
 * tokens, logprobs and depths, ends for the right reason, and a bad one is refused.
 *
 * Bit for bit, on the emulated CUDA backend too: its kernels and the emulated product make a row's
 * sums in one order, whatever is beside it. cuBLASLt may not (kernels/cuda/README.md), so that on a
 * GPU all this holds between steps of one bucket only. An emulated device gets fewer requests. */
#include "engine_runs.h"

#include <math.h>
#include <stdlib.h>

enum { REQUESTS = 33 };

static size_t request_count(size_t emulated) {
    return is_cpu_tested() ? REQUESTS : emulated;
}

/* ---- A request is the same whatever happens around it ---------------------------------------- */

/* What the events must say by themselves. */
static void check_sound(const struct asked *asked, const struct outcome *outcome,
                        const struct model_info *info) {
    const struct engine_request *request = &asked->request;
    size_t rows = request->prompt_length + (outcome->token_count ? outcome->token_count - 1 : 0);
    assert_int_equal(outcome->finished.usage.attn_total, rows * info->blocks);
    assert_int_equal(outcome->finished.usage.mlp_total, rows * info->blocks);
    assert_int_equal(outcome->prompt_count, request->prompt_logprobs ? request->prompt_length : 0);
    for (size_t i = 0; i < outcome->prompt_count; i++) {
        assert_int_equal(outcome->prompt[i].token, request->prompt[i]);
        assert_int_equal(isnan(outcome->prompt[i].logprob), i == 0);
        assert_int_equal(outcome->prompt[i].top_count, i == 0 ? 0 : request->top_logprobs);
    }
    for (size_t i = 0; i < outcome->token_count; i++) {
        const struct engine_event *event = &outcome->tokens[i];
        bool last = i + 1 == outcome->token_count;
        assert_int_equal(event->is_stop, last && outcome->finished.finish == FINISH_STOP);
        assert_true(!event->is_stop || i >= request->min_tokens);
        assert_int_equal(isnan(event->logprob), request->top_logprobs < 0);
        if (request->tier == 0) assert_int_equal(event->depth, info->sublayers);
    }
    if (outcome->finished.finish == FINISH_STOP) return;
    assert_int_equal(outcome->finished.finish, FINISH_LENGTH);
    assert_int_equal(outcome->token_count, request->max_tokens);
}

static void run_together(struct model *model, struct engine_options options, size_t count,
                         const struct asked *asked, struct outcome *outcomes,
                         struct engine_stats *stats) {
    struct brake brake; /* nobody is through before all have come */
    struct engine *engine = open_held(model, &brake, options);
    memset(outcomes, 0, count * sizeof *outcomes);
    for (size_t i = 0; i < count; i++) submit(engine, &asked[i]);
    brake_release(&brake);
    collect_all(engine, outcomes, count);
    wait_idle(engine, stats);
    engine_destroy(engine);
}

static void run_alone(struct model *model, size_t count, const struct asked *asked,
                      struct outcome *outcomes) {
    struct engine *engine = open_engine(model, (struct engine_options){.body = BODY_AUTO});
    memset(outcomes, 0, count * sizeof *outcomes);
    for (size_t i = 0; i < count; i++) {
        submit(engine, &asked[i]);
        while (!outcomes[i].ended) collect(engine, outcomes, count);
    }
    engine_destroy(engine);
}

static void check_stats(const struct engine_stats *stats, size_t count,
                        const struct outcome *outcomes, const struct model_info *info) {
    uint64_t generated = 0, run = 0, executed = 0, total = 0;
    for (size_t i = 0; i < count; i++) {
        generated += outcomes[i].token_count;
        run += outcomes[i].finished.usage.attn_run;
        total += outcomes[i].finished.usage.attn_total;
    }
    for (size_t tier = 0; tier < info->tier_count; tier++) {
        executed += stats->attn_run[tier];
        assert_int_equal(stats->attn_run[tier] + stats->attn_skipped[tier],
                         stats->mlp_run[tier] + stats->mlp_skipped[tier]);
    }
    assert_int_equal(stats->generated_tokens, generated);
    assert_int_equal(stats->body_none + stats->body_dense + stats->body_gather,
                     stats->steps * info->sublayers);
    assert_true(stats->preemptions > 0 ? executed > run : executed == run);
    if (stats->preemptions == 0) assert_int_equal(stats->step_rows * info->blocks, total);
}

static void check_invariance(const char *name) {
    static struct asked asked[REQUESTS];
    static struct outcome alone[REQUESTS], outcomes[REQUESTS];
    struct engine_stats stats;
    struct model *model = open_model(name, 1, 64);
    const struct model_info *info = model_get_info(model);
    size_t count = request_count(8);
    size_t apart = is_cpu_tested() ? 1 : 19; /* few are of all lengths: those beside are alike */
    for (size_t i = 0; i < count; i++) {
        ask_variously(&asked[i], info, apart * i);
        asked[i].request.id = i;
    }
    run_alone(model, count, asked, alone);
    for (size_t i = 0; i < count; i++) check_sound(&asked[i], &alone[i], info);

    size_t tiny = model_kv_bytes(info, 9 * 16); /* what the longest request takes */
    const struct engine_options circumstances[] = {
        {.body = BODY_AUTO},
        {.body = BODY_DENSE},
        {.body = BODY_GATHER, .prefill_chunk = 7},
        {.kv_budget = tiny},
        {.kv_budget = tiny, .prefill_chunk = 7, .body = BODY_GATHER},
        {.max_sequences = 3, .prefill_chunk = 1},
        {.step_target_us = 1}, /* a block's rows of prefill in each step, and no more */
    };
    for (size_t i = 0; i < sizeof circumstances / sizeof *circumstances; i++) {
        run_together(model, circumstances[i], count, asked, outcomes, &stats);
        for (size_t j = 0; j < count; j++) check_same(&alone[j], &outcomes[j]);
        check_stats(&stats, count, outcomes, info);
        /* Under omit these take so little that nobody has to go. */
        bool is_tight = circumstances[i].kv_budget == tiny && info->kv_policy == KV_COMPUTE;
        assert_int_equal(stats.preemptions > 0, is_tight);
    }
    model_destroy(model);

    model = open_model(name, 2, 10); /* two threads, of a CPU; steps of ten rows everywhere */
    run_together(model, (struct engine_options){.body = BODY_AUTO}, count, asked, outcomes, &stats);
    for (size_t j = 0; j < count; j++) check_same(&alone[j], &outcomes[j]);
    model_destroy(model);
}

static void test_same_answer_under_compute(void **state) {
    (void)state;
    check_invariance("gqa-relu2");
}

static void test_same_answer_under_omit(void **state) {
    (void)state;
    check_invariance("sharded-omit");
}

/* All run everything, so that they do not fit; and skip, so that places and positions part. */
static void test_same_answer_after_preemption_under_omit(void **state) {
    (void)state;
    static struct asked asked[REQUESTS];
    static struct outcome alone[REQUESTS], outcomes[REQUESTS];
    struct model *model = open_model("sharded-omit", 1, 64);
    const struct model_info *info = model_get_info(model);
    size_t preemptions = 0, count = request_count(4);
    for (int32_t tier = 0; tier < 2; tier++) {
        for (size_t i = 0; i < count; i++) {
            ask(&asked[i], info, i, 10 + i, 128 - 10 - REQUESTS);
            asked[i].request.tier = tier;
        }
        run_alone(model, count, asked, alone);
        struct engine_options tight = {.kv_budget = model_kv_bytes(info, 8 * 16)};
        struct engine_stats stats;
        run_together(model, tight, count, asked, outcomes, &stats);
        for (size_t j = 0; j < count; j++) check_same(&alone[j], &outcomes[j]);
        check_stats(&stats, count, outcomes, info);
        preemptions += stats.preemptions;
        assert_int_equal(stats.kv_blocks_used, 0);
    }
    assert_true(preemptions > 0);
    model_destroy(model);
}

struct peaks {
    struct engine *engine;
    size_t used, saved;
};

/* Called after each step that has events: every step of one request has. */
static void note_peaks(void *context) {
    struct peaks *peaks = context;
    struct engine_stats stats;
    engine_get_stats(peaks->engine, &stats);
    if (stats.kv_bytes_used > peaks->used) peaks->used = stats.kv_bytes_used;
    if (stats.kv_bytes_saved > peaks->saved) peaks->saved = stats.kv_bytes_saved;
}

/* A tier that skips all attention needs no KV between steps. */
static void test_omitted_tokens_take_no_kv(void **state) {
    (void)state;
    static struct asked asked;
    static struct outcome outcome;
    struct model *model = open_model("sharded-omit", 1, 64);
    const struct model_info *info = model_get_info(model);
    assert_int_equal(info->kv_groups, info->blocks);
    for (int32_t tier = 0; tier < 3; tier++) {
        struct peaks peaks = {0};
        struct engine_options options = {.notify = note_peaks, .notify_context = &peaks};
        struct engine *engine = peaks.engine = open_engine(model, options);
        ask(&asked, info, 1, 64, 60);
        asked.request.tier = tier;
        run_one(engine, &asked, &outcome);
        engine_destroy(engine);
        if (tier == 0) assert_int_equal(peaks.saved, 0);
        if (tier == 1) assert_true(peaks.saved > 0 && peaks.used < model_kv_bytes(info, 124));
        if (tier == 2) assert_int_equal(peaks.used, 0);
        if (tier == 2) assert_true(peaks.saved >= model_kv_bytes(info, 112));
    }
    model_destroy(model);
}

static void test_same_answer_with_end_of_text(void **state) {
    (void)state;
    check_invariance("with-tokenizer");
}

/* ---- Ends ------------------------------------------------------------------------------------ */

static void test_stop_tokens_and_end_of_text(void **state) {
    (void)state;
    static struct asked asked;
    static struct outcome free_run, outcome;
    struct model *model = open_model("with-tokenizer", 1, 32);
    int32_t eos = model_get_info(model)->eos[0];
    struct engine *engine = open_engine(model, (struct engine_options){.body = BODY_AUTO});
    ask(&asked, model_get_info(model), 1, 9, 30);
    asked.request.sampling.temperature = 1;
    asked.request.ignore_eos = true;
    run_one(engine, &asked, &free_run);
    assert_int_equal(free_run.token_count, 30);

    size_t first = 0;
    asked.stops[0] = free_run.tokens[7].token;
    asked.request.stop_tokens = asked.stops;
    asked.request.stop_token_count = 1;
    while (free_run.tokens[first].token != asked.stops[0]) first++;
    run_one(engine, &asked, &outcome);
    assert_int_equal(outcome.finished.finish, FINISH_STOP);
    assert_int_equal(outcome.token_count, first + 1);
    assert_true(outcome.tokens[first].is_stop);
    for (size_t i = 0; i <= first; i++) {
        assert_int_equal(outcome.tokens[i].token, free_run.tokens[i].token);
    }

    asked.request.stop_token_count = 0;
    asked.request.ignore_eos = false;
    asked.bias[0] = (struct logit_bias){eos, 100}; /* end-of-text whenever it may be drawn */
    asked.request.sampling.bias = asked.bias;
    asked.request.sampling.bias_count = 1;
    asked.request.min_tokens = 12;
    run_one(engine, &asked, &outcome);
    assert_int_equal(outcome.finished.finish, FINISH_STOP);
    assert_int_equal(outcome.token_count, 13);
    for (size_t i = 0; i < 13; i++) assert_int_equal(outcome.tokens[i].token == eos, i == 12);
    asked.request.ignore_eos = true;
    run_one(engine, &asked, &outcome);
    assert_int_equal(outcome.finished.finish, FINISH_LENGTH);
    for (size_t i = 0; i < 30; i++) assert_false(outcome.tokens[i].is_stop);
    engine_destroy(engine);
    model_destroy(model);
}

/* With every token of the vocabulary banned nothing can be drawn; the neighbours do not notice. */
static void test_error_ends_only_its_own_request(void **state) {
    (void)state;
    static struct asked asked[2];
    static struct outcome outcomes[2];
    struct model *model = open_model("mha-silu", 1, 32);
    int32_t everything[STOP_TOKENS_MAX];
    assert_int_equal(model_get_info(model)->vocab, STOP_TOKENS_MAX);
    for (size_t i = 0; i < STOP_TOKENS_MAX; i++) everything[i] = (int32_t)i;
    struct engine *engine = open_engine(model, (struct engine_options){.body = BODY_AUTO});
    memset(outcomes, 0, sizeof outcomes);
    for (size_t i = 0; i < 2; i++) ask(&asked[i], model_get_info(model), i, 5, 20);
    asked[1].request.stop_tokens = everything;
    asked[1].request.stop_token_count = STOP_TOKENS_MAX;
    asked[1].request.min_tokens = 1;
    for (size_t i = 0; i < 2; i++) submit(engine, &asked[i]);
    collect_all(engine, outcomes, 2);
    assert_int_equal(outcomes[1].finished.finish, FINISH_ERROR);
    assert_int_equal(outcomes[1].token_count, 0);
    assert_int_equal(outcomes[0].finished.finish, FINISH_LENGTH);
    assert_int_equal(outcomes[0].token_count, 20);
    engine_destroy(engine);
    model_destroy(model);
}

/* Scoring a text gives, bit for bit, the logprobs and depths that drawing it gave. */
static void test_scoring_agrees_with_drawing(void **state) {
    (void)state;
    static struct asked drawing, scoring;
    static struct outcome drawn, scored;
    struct model *model = open_model("gqa-relu2", 1, 32);
    struct engine *engine = open_engine(model, (struct engine_options){.prefill_chunk = 13});
    for (int32_t tier = 0; tier < (int32_t)model_get_info(model)->tier_count; tier++) {
        ask(&drawing, model_get_info(model), 1, 20, 60);
        drawing.request.tier = tier;
        drawing.request.top_logprobs = 3;
        drawing.request.sampling.temperature = 1;
        run_one(engine, &drawing, &drawn);
        ask(&scoring, model_get_info(model), 1, 20, 0);
        for (size_t i = 0; i < 60; i++) scoring.prompt[20 + i] = drawn.tokens[i].token;
        scoring.request.prompt_length = 80;
        scoring.request.tier = tier;
        scoring.request.top_logprobs = 3;
        scoring.request.prompt_logprobs = true;
        run_one(engine, &scoring, &scored);
        assert_int_equal(scored.finished.finish, FINISH_LENGTH);
        assert_int_equal(scored.token_count, 0);
        assert_int_equal(scored.prompt_count, 80);
        for (size_t i = 0; i < 60; i++) {
            struct engine_event expected = drawn.tokens[i];
            expected.depth = scored.prompt[20 + i].depth;
            check_same_event(&expected, &scored.prompt[20 + i]);
            assert_int_equal(drawn.tokens[i].depth, scored.prompt[19 + i].depth);
        }
    }
    engine_destroy(engine);
    model_destroy(model);
}

/* What the engine tells of a text and its depth is what an evaluation of it measures. */
static void test_scoring_agrees_with_evaluation(void **state) {
    (void)state;
    static struct asked asked;
    static struct outcome outcome;
    struct model *model = open_model("sharded-omit", 1, 32);
    const struct model_info *info = model_get_info(model);
    for (int32_t tier = 0; tier < (int32_t)info->tier_count; tier++) {
        struct engine *engine = open_engine(model, (struct engine_options){.prefill_chunk = 13});
        ask(&asked, info, 3, 100, 0);
        asked.request.tier = tier;
        asked.request.top_logprobs = 0;
        asked.request.prompt_logprobs = true;
        run_one(engine, &asked, &outcome);
        struct engine_stats stats;
        wait_idle(engine, &stats);
        engine_destroy(engine);
        struct evaluation evaluation;
        struct error error = {0};
        int result =
            model_evaluate(model, asked.prompt, 100, (size_t)tier, NULL, &evaluation, &error);
        must(result, &error);
        const struct engine_usage *usage = &outcome.finished.usage;
        double sum = 0, pairs = 100.0 * (double)info->blocks, depth = 0;
        for (size_t i = 1; i < 100; i++) sum -= outcome.prompt[i].logprob;
        for (size_t i = 0; i < 100; i++) depth += outcome.prompt[i].depth;
        assert_true(fabs(exp(sum / 99) / evaluation.perplexity - 1) < 1e-5);
        assert_true(fabs(1 - (double)usage->attn_run / pairs - evaluation.attn_skip) < 1e-9);
        assert_true(fabs(1 - (double)usage->mlp_run / pairs - evaluation.mlp_skip) < 1e-9);
        assert_true(depth == (double)(usage->attn_run + usage->mlp_run));
        assert_int_equal(stats.attn_run[tier], usage->attn_run);
        assert_int_equal(stats.mlp_skipped[tier], usage->mlp_total - usage->mlp_run);
        assert_int_equal(stats.prompt_tokens, 100);
        free(evaluation.sublayer_skip);
    }
    model_destroy(model);
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static void test_every_field_is_checked(void **state) {
    (void)state;
    static struct asked good, bad;
    struct model *model = open_model("mha-silu", 1, 32);
    const struct model_info *info = model_get_info(model);
    struct engine *engine =
        open_engine(model, (struct engine_options){.kv_budget = 4 * info->kv_block_bytes});
    assert_int_equal(engine_max_sequence(engine), 4 * 16);
    ask(&good, info, 1, 10, 10);
#define REFUSED(expected, field, change)                                                           \
    do {                                                                                           \
        struct error error = {0};                                                                  \
        struct engine_request *r = &bad.request;                                                   \
        struct sampling *s = &r->sampling;                                                         \
        bad = good;                                                                                \
        r->prompt = bad.prompt;                                                                    \
        r->stop_tokens = bad.stops;                                                                \
        s->bias = bad.bias;                                                                        \
        change;                                                                                    \
        (void)s;                                                                                   \
        assert_int_equal(engine_submit(engine, r, &error), expected);                              \
        assert_int_equal(error.code, expected);                                                    \
        assert_memory_equal(error.message, field, strlen(field));                                  \
    } while (0)
    REFUSED(FATHOM_INVALID, "prompt is", r->prompt = NULL);
    REFUSED(FATHOM_INVALID, "the prompt has", r->prompt_length = 0);
    REFUSED(FATHOM_INVALID, "the prompt has", r->prompt_length = CONTEXT + 1);
    REFUSED(FATHOM_INVALID, "the prompt has", r->prompt_length = SIZE_MAX);
    REFUSED(FATHOM_INVALID, "prompt[3]", bad.prompt[3] = -1);
    REFUSED(FATHOM_INVALID, "prompt[9]", bad.prompt[9] = 64);
    REFUSED(FATHOM_INVALID, "max_tokens", r->max_tokens = CONTEXT - 9);
    REFUSED(FATHOM_INVALID, "max_tokens", r->max_tokens = SIZE_MAX);
    REFUSED(FATHOM_TOO_LARGE, "max_tokens", r->max_tokens = 55);
    REFUSED(FATHOM_INVALID, "min_tokens", r->min_tokens = 11);
    REFUSED(FATHOM_INVALID, "stop_token_count", r->stop_token_count = STOP_TOKENS_MAX + 1);
    REFUSED(FATHOM_INVALID, "stop_tokens is", r->stop_token_count = 1; r->stop_tokens = NULL);
    REFUSED(FATHOM_INVALID, "stop_tokens[1]", r->stop_token_count = 2; bad.stops[1] = 64);
    REFUSED(FATHOM_INVALID, "tier", r->tier = -1);
    REFUSED(FATHOM_INVALID, "tier", r->tier = (int32_t)info->tier_count);
    REFUSED(FATHOM_INVALID, "top_logprobs", r->top_logprobs = -2);
    REFUSED(FATHOM_INVALID, "top_logprobs", r->top_logprobs = TOP_LOGPROBS_MAX + 1);
    REFUSED(FATHOM_INVALID, "prompt_logprobs", r->prompt_logprobs = true);
    REFUSED(FATHOM_INVALID, "temperature", s->temperature = -0.1f);
    REFUSED(FATHOM_INVALID, "temperature", s->temperature = 2.1f);
    REFUSED(FATHOM_INVALID, "temperature", s->temperature = NAN);
    REFUSED(FATHOM_INVALID, "top_p", s->top_p = 0);
    REFUSED(FATHOM_INVALID, "top_p", s->top_p = 1.5f);
    REFUSED(FATHOM_INVALID, "min_p", s->min_p = -0.5f);
    REFUSED(FATHOM_INVALID, "min_p", s->min_p = INFINITY);
    REFUSED(FATHOM_INVALID, "top_k", s->top_k = -1);
    REFUSED(FATHOM_INVALID, "presence_penalty", s->presence_penalty = 2.5f);
    REFUSED(FATHOM_INVALID, "frequency_penalty", s->frequency_penalty = -INFINITY);
    REFUSED(FATHOM_INVALID, "repetition_penalty", s->repetition_penalty = 0);
    REFUSED(FATHOM_INVALID, "bias_count", s->bias_count = LOGIT_BIAS_MAX + 1);
    REFUSED(FATHOM_INVALID, "bias is", s->bias_count = 1; s->bias = NULL);
    REFUSED(FATHOM_INVALID, "bias[0].token", s->bias_count = 1; bad.bias[0].token = 64);
    REFUSED(FATHOM_INVALID, "bias[1].bias", s->bias_count = 2; bad.bias[1].bias = NAN);
    REFUSED(FATHOM_INVALID, "bias[1].bias", s->bias_count = 2; bad.bias[1].bias = 101);
#undef REFUSED
    static struct outcome outcome; /* the largest that fits is served */
    good.request.max_tokens = 54;
    good.request.ignore_eos = true;
    run_one(engine, &good, &outcome);
    assert_int_equal(outcome.token_count, 54);
    engine_destroy(engine);
    model_destroy(model);
}

static void test_impossible_engines_are_refused(void **state) {
    (void)state;
    struct model *model = open_model("mha-silu", 1, 32);
    size_t block = model_get_info(model)->kv_block_bytes;
    const struct engine_options options[] = {
        {.kv_budget = 0},
        {.kv_budget = block - 1},
        {.kv_budget = block, .body = 3},
        {.kv_budget = block, .max_sequences = SIZE_MAX},
        {.kv_budget = block, .queue_limit = SIZE_MAX},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        struct engine *engine = NULL;
        struct error error = {0};
        assert_int_equal(engine_create(model, &options[i], &engine, &error), FATHOM_INVALID);
        assert_true(strlen(error.message) > 0);
        assert_null(engine);
    }
    engine_destroy(NULL);
    /* A budget beyond what all sequences can use is not taken from the machine. */
    struct engine_options lavish = {.kv_budget = (size_t)1 << 50};
    struct engine *engine = open_engine(model, lavish);
    struct engine_stats stats;
    engine_get_stats(engine, &stats);
    assert_int_equal(stats.kv_blocks_total, 32 * CONTEXT / 16);
    engine_destroy(engine);
    model_destroy(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_answer_under_compute),
        cmocka_unit_test(test_same_answer_under_omit),
        cmocka_unit_test(test_same_answer_after_preemption_under_omit),
        cmocka_unit_test(test_omitted_tokens_take_no_kv),
        cmocka_unit_test(test_same_answer_with_end_of_text),
        cmocka_unit_test(test_stop_tokens_and_end_of_text),
        cmocka_unit_test(test_error_ends_only_its_own_request),
        cmocka_unit_test(test_scoring_agrees_with_drawing),
        cmocka_unit_test(test_scoring_agrees_with_evaluation),
        cmocka_unit_test(test_every_field_is_checked),
        cmocka_unit_test(test_impossible_engines_are_refused),
    };
    return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
