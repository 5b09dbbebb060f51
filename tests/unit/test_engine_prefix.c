/* Prompts that begin alike: what is reused changes what is computed, nothing that is answered. That
 * is bits, as in test_engine.c; an emulated device gets fewer requests, and every third of the
 * circumstances: that bodies agree is test_golden.c's there. */
#include "engine_runs.h"

enum { REQUESTS = 40, EMULATED = 18, PROMPT = 100 };

static size_t request_count(void) {
    return is_cpu_tested() ? REQUESTS : EMULATED;
}

/* Various requests over three texts; each leaves its text at some point, or is a piece of it. */
static void ask_alike(struct asked *asked, const struct model_info *info, size_t i) {
    ask_variously(asked, info, i);
    struct engine_request *request = &asked->request;
    size_t text = i % 3, length = 1 + hash(i, 1) % 90, same = hash(i, 2) % 120;
    request->prompt_length = length;
    if (request->max_tokens > CONTEXT - length) request->max_tokens = CONTEXT - length;
    request->min_tokens = request->max_tokens / 3;
    for (size_t p = 0; p < length; p++) {
        asked->prompt[p] = (int32_t)(hash(p < same ? 1000 + text : i, p) % info->vocab);
    }
}

static void run_alike(struct model *model, struct engine_options options, bool together,
                      const struct asked *asked, struct outcome *outcomes,
                      struct engine_stats *stats) {
    struct engine *engine = open_engine(model, options);
    memset(outcomes, 0, REQUESTS * sizeof *outcomes);
    for (size_t i = 0; i < request_count(); i++) {
        submit(engine, &asked[i]);
        while (!together && !outcomes[i].ended) collect(engine, outcomes, request_count());
    }
    for (size_t i = 0; i < request_count(); i++) {
        while (!outcomes[i].ended) collect(engine, outcomes, request_count());
    }
    wait_idle(engine, stats);
    engine_destroy(engine);
}

static void check_reuse(const char *name) {
    static struct asked asked[REQUESTS];
    static struct outcome anew[REQUESTS], outcomes[REQUESTS];
    struct model *model = open_model(name, 1, 64);
    const struct model_info *info = model_get_info(model);
    struct engine_stats stats;
    for (size_t i = 0; i < request_count(); i++) ask_alike(&asked[i], info, i);
    run_alike(model, (struct engine_options){.no_prefix_cache = true}, false, asked, anew, &stats);
    assert_int_equal(stats.prefix_queries + stats.prefix_hits + stats.kv_blocks_cached, 0);
    for (size_t i = 0; i < request_count(); i++) {
        assert_int_equal(anew[i].finished.usage.cached_tokens, 0);
    }

    size_t tiny = model_kv_bytes(info, 9 * 16);
    const struct engine_options circumstances[] = {
        {.body = BODY_AUTO},
        {.body = BODY_GATHER, .prefill_chunk = 7},
        {.body = BODY_DENSE, .prefill_chunk = 16},
        {.kv_budget = tiny},
        {.kv_budget = tiny, .prefill_chunk = 16},
    };
    size_t count = 2 * sizeof circumstances / sizeof *circumstances;
    for (size_t i = 0; i < count; i += is_cpu_tested() ? 1 : 3) {
        run_alike(model, circumstances[i / 2], i % 2, asked, outcomes, &stats);
        size_t cached = 0;
        for (size_t j = 0; j < request_count(); j++) {
            const struct engine_usage *usage = &outcomes[j].finished.usage;
            check_same(&anew[j], &outcomes[j]);
            assert_int_equal(usage->cached_tokens % 16, 0);
            assert_true(usage->cached_tokens < usage->prompt_tokens);
            if (asked[j].request.prompt_logprobs) assert_int_equal(usage->cached_tokens, 0);
            cached += usage->cached_tokens;
        }
        assert_true(cached > 0);
        assert_int_equal(stats.prefix_hits, cached);
        assert_true(stats.prefix_queries >= stats.prefix_hits);
        assert_true(stats.kv_blocks_cached > 0);
    }
    model_destroy(model);
}

static void test_same_answers_under_compute(void **state) {
    (void)state;
    check_reuse("gqa-relu2");
}

/* A prefix ends in the middle of a block of every layer: there is nothing to share. */
static void test_nothing_is_shared_under_omit(void **state) {
    (void)state;
    struct model *model = open_model("mqa-gelu-omit", 1, 64);
    struct engine *engine = open_engine(model, (struct engine_options){0});
    struct asked asked;
    ask(&asked, model_get_info(model), 1, PROMPT, 4);
    for (size_t i = 0; i < 2; i++) {
        struct outcome outcome;
        run_one(engine, &asked, &outcome);
        assert_int_equal(outcome.finished.usage.cached_tokens, 0);
    }
    engine_destroy(engine);
    model_destroy(model);
}

static size_t cached_tokens(struct engine *engine, struct asked *asked) {
    struct outcome outcome;
    run_one(engine, asked, &outcome);
    return outcome.finished.usage.cached_tokens;
}

static void test_what_may_be_shared(void **state) {
    (void)state;
    struct model *model = open_model("gqa-relu2", 1, 64);
    const struct model_info *info = model_get_info(model);
    struct engine *engine = open_engine(model, (struct engine_options){0});
    struct asked asked;
    ask(&asked, info, 1, PROMPT, 4);
    assert_int_equal(cached_tokens(engine, &asked), 0);
    assert_int_equal(cached_tokens(engine, &asked), 96);
    asked.request.prompt_length = 96; /* the last row must run */
    assert_int_equal(cached_tokens(engine, &asked), 80);
    asked.request.cache_salt = "mine";
    asked.request.cache_salt_length = 4;
    assert_int_equal(cached_tokens(engine, &asked), 0);
    assert_int_equal(cached_tokens(engine, &asked), 80);
    asked.request.cache_salt = "your";
    assert_int_equal(cached_tokens(engine, &asked), 0);
    asked.request.cache_salt_length = 0;
    asked.request.tier = (int32_t)info->tier_count - 1; /* other thresholds: other K and V */
    assert_int_equal(cached_tokens(engine, &asked), 0);
    asked.request.tier = 0;
    asked.prompt[40]++;
    asked.prompt[40] %= (int32_t)info->vocab;
    assert_int_equal(cached_tokens(engine, &asked), 32);
    engine_destroy(engine);
    model_destroy(model);
}

/* A conversation: the next prompt is the last one, its answer and some more. */
static void test_generated_tokens_are_found_too(void **state) {
    (void)state;
    struct model *model = open_model("gqa-relu2", 1, 64);
    struct engine *engine = open_engine(model, (struct engine_options){0});
    struct asked asked;
    struct outcome outcome;
    ask(&asked, model_get_info(model), 1, 40, 30);
    asked.request.ignore_eos = true;
    run_one(engine, &asked, &outcome);
    for (size_t i = 0; i < 30; i++) asked.prompt[40 + i] = outcome.tokens[i].token;
    asked.prompt[70] = 1;
    asked.request.prompt_length = 71;
    assert_int_equal(cached_tokens(engine, &asked), 64);
    engine_destroy(engine);
    model_destroy(model);
}

/* The choices of one request: whether they come in one step or not, one of them computes. */
static void test_siblings_share_their_prompt_at_once(void **state) {
    (void)state;
    struct model *model = open_model("gqa-relu2", 1, 256);
    struct engine *engine = open_engine(model, (struct engine_options){0});
    static struct outcome outcomes[4];
    struct engine_stats stats;
    struct asked asked;
    memset(outcomes, 0, sizeof outcomes);
    ask(&asked, model_get_info(model), 7, PROMPT, 1);
    for (size_t i = 0; i < 4; i++) {
        asked.request.id = i;
        submit(engine, &asked);
    }
    collect_all(engine, outcomes, 4);
    wait_idle(engine, &stats);
    assert_int_equal(stats.prompt_tokens, PROMPT + 3 * (PROMPT - 96));
    assert_int_equal(stats.prefix_hits, 3 * 96);
    assert_int_equal(stats.prefix_queries, 4 * PROMPT);
    engine_destroy(engine);
    model_destroy(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_answers_under_compute),
        cmocka_unit_test(test_nothing_is_shared_under_omit),
        cmocka_unit_test(test_what_may_be_shared),
        cmocka_unit_test(test_generated_tokens_are_found_too),
        cmocka_unit_test(test_siblings_share_their_prompt_at_once),
    };
    return cmocka_run_group_tests_name("engine prefix", tests, NULL, NULL);
}
