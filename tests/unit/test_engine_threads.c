/* The engine between threads: held, cancelled, flooded, destroyed at any moment, it ends every
 * request exactly once and leaves nothing behind. */
#include "engine_runs.h"

#include <pthread.h>
#include <sys/resource.h>

static void test_cancel_takes_effect_before_the_next_step(void **state) {
    (void)state;
    static struct asked asked[3];
    static struct outcome outcomes[3];
    struct model *model = open_model("mha-silu", 1, 32);
    struct brake brake;
    struct engine *engine = open_held(model, &brake, (struct engine_options){.max_sequences = 2});
    memset(outcomes, 0, sizeof outcomes);
    for (size_t i = 0; i < 3; i++) ask(&asked[i], model_get_info(model), i, 5, 50);
    submit(engine, &asked[0]);
    sem_wait(&brake.told);
    submit(engine, &asked[1]);
    submit(engine, &asked[2]); /* has no place to run */
    engine_cancel(engine, 0);
    engine_cancel(engine, 2);
    engine_cancel(engine, 0);
    engine_cancel(engine, 77);
    brake_release(&brake);
    collect_all(engine, outcomes, 3);
    assert_int_equal(outcomes[0].finished.finish, FINISH_CANCELLED);
    assert_int_equal(outcomes[0].token_count, 1);
    assert_int_equal(outcomes[2].finished.finish, FINISH_CANCELLED);
    assert_int_equal(outcomes[2].token_count, 0);
    assert_int_equal(outcomes[2].finished.usage.attn_total, 0);
    assert_int_equal(outcomes[1].finished.finish, FINISH_LENGTH);
    struct engine_stats stats;
    wait_idle(engine, &stats);
    assert_int_equal(stats.cancelled, 2);
    engine_destroy(engine);
    model_destroy(model);
}

static void test_full_queue_and_used_ids_are_refused(void **state) {
    (void)state;
    static struct asked asked[6];
    static struct outcome outcomes[6];
    struct error error = {0};
    struct model *model = open_model("mha-silu", 1, 32);
    struct brake brake;
    struct engine_options options = {.max_sequences = 2, .queue_limit = 3};
    struct engine *engine = open_held(model, &brake, options);
    memset(outcomes, 0, sizeof outcomes);
    for (size_t i = 0; i < 6; i++) ask(&asked[i], model_get_info(model), i, 5, 20);
    submit(engine, &asked[0]);
    sem_wait(&brake.told);
    assert_int_equal(engine_submit(engine, &asked[0].request, &error), FATHOM_INVALID);
    assert_memory_equal(error.message, "id ", 3);
    for (size_t i = 1; i < 5; i++) submit(engine, &asked[i]);
    assert_int_equal(engine_submit(engine, &asked[5].request, &error), FATHOM_FULL);
    brake_release(&brake);
    collect_all(engine, outcomes, 5);
    submit(engine, &asked[5]); /* places and ids are free by the time the end is told */
    outcomes[0].ended = false;
    outcomes[0].token_count = 0;
    submit(engine, &asked[0]);
    for (size_t ended = 0; ended < 2;) ended += collect(engine, outcomes, 6);
    engine_destroy(engine);
    model_destroy(model);
}

static void test_queue_is_bounded_by_tokens(void **state) {
    (void)state;
    static struct asked asked[4];
    static struct outcome outcomes[4];
    struct error error = {0};
    struct model *model = open_model("mha-silu", 1, 32);
    size_t four_blocks = 4 * model_get_info(model)->kv_block_bytes;
    struct brake brake;
    struct engine_options options = {.kv_budget = four_blocks, .queue_tokens = 50};
    struct engine *engine = open_held(model, &brake, options);
    memset(outcomes, 0, sizeof outcomes);
    for (size_t i = 0; i < 4; i++) ask(&asked[i], model_get_info(model), i, i < 3 ? 40 : 34, 5);
    submit(engine, &asked[0]);
    sem_wait(&brake.told);
    submit(engine, &asked[1]);
    assert_int_equal(engine_submit(engine, &asked[2].request, &error), FATHOM_FULL); /* 120 > 114 */
    submit(engine, &asked[3]);
    brake_release(&brake);
    for (size_t ended = 0; ended < 3;) ended += collect(engine, outcomes, 4);
    submit(engine, &asked[2]);
    while (!outcomes[2].ended) collect(engine, outcomes, 4);
    engine_destroy(engine);
    model_destroy(model);
}

static void test_waiting_too_long_expires(void **state) {
    (void)state;
    static struct asked asked[2];
    static struct outcome outcomes[2];
    struct engine_stats stats;
    struct model *model = open_model("mha-silu", 1, 32);
    struct brake brake;
    struct engine_options options = {.max_sequences = 1, .queue_timeout_ms = 500};
    struct engine *engine = open_held(model, &brake, options);
    memset(outcomes, 0, sizeof outcomes);
    for (size_t i = 0; i < 2; i++) ask(&asked[i], model_get_info(model), i, 5, 60);
    asked[0].request.ignore_eos = true;
    submit(engine, &asked[0]);
    sem_wait(&brake.told);
    submit(engine, &asked[1]);
    usleep(600000); /* half a second is long enough for the first to start on a busy machine */
    brake_release(&brake);
    collect_all(engine, outcomes, 2);
    assert_int_equal(outcomes[0].finished.finish, FINISH_LENGTH);
    assert_int_equal(outcomes[1].finished.finish, FINISH_EXPIRED);
    assert_int_equal(outcomes[1].token_count, 0);
    wait_idle(engine, &stats);
    assert_int_equal(stats.expired, 1);
    assert_true(stats.drain_seconds == 0); /* nobody waits */
    engine_destroy(engine);
    model_destroy(model);
}

static void test_consumer_is_told_at_most_once_per_step(void **state) {
    (void)state;
    static struct asked asked[8];
    static struct outcome outcomes[8];
    struct model *model = open_model("mha-silu", 1, 32);
    struct brake brake;
    struct engine *engine = open_held(model, &brake, (struct engine_options){.body = BODY_AUTO});
    memset(outcomes, 0, sizeof outcomes);
    for (size_t i = 0; i < 8; i++) ask(&asked[i], model_get_info(model), i, 5, 20);
    brake_release(&brake);
    for (size_t i = 0; i < 8; i++) submit(engine, &asked[i]);
    collect_all(engine, outcomes, 8);
    struct engine_stats stats;
    wait_idle(engine, &stats);
    engine_destroy(engine); /* joined: nobody is between a step and its notification */
    assert_in_range(atomic_load(&brake.notified), 20, stats.steps);
    model_destroy(model);
}

/* ---- Other threads, at any time -------------------------------------------------------------- */

/* More events than the queue holds: 90 prompts of 100 tokens, all of them told. */
static void submit_flood(struct engine *engine, const struct model_info *info) {
    static struct asked asked;
    for (size_t i = 0; i < 90; i++) {
        ask(&asked, info, i, 100, 2);
        asked.request.top_logprobs = 0;
        asked.request.prompt_logprobs = true;
        submit(engine, &asked);
    }
}

static uint64_t wait_until_stalled(struct engine *engine) {
    struct engine_stats stats;
    uint64_t steps = UINT64_MAX;
    for (;;) {
        engine_get_stats(engine, &stats);
        if (stats.steps == steps && steps > 200) return steps;
        steps = stats.steps;
        usleep(50000);
    }
}

/* The consumer takes only when told, as an event loop does: a full queue must have been told of. */
static void test_slow_consumer_holds_the_engine(void **state) {
    (void)state;
    static struct outcome outcomes[90];
    struct model *model = open_model("odd-shapes", 1, 32);
    struct brake brake;
    struct engine *engine = open_held(model, &brake, (struct engine_options){.body = BODY_AUTO});
    brake_release(&brake);
    submit_flood(engine, model_get_info(model));
    wait_until_stalled(engine);
    struct engine_stats stats;
    engine_get_stats(engine, &stats);
    assert_false(stats.idle);
    memset(outcomes, 0, sizeof outcomes);
    for (size_t ended = 0; ended < 90;) {
        struct engine_event event;
        sem_wait(&brake.told);
        while (engine_take_events(engine, &event, 1)) {
            note_event(&outcomes[event.id], &event);
            ended += event.kind == EVENT_FINISHED;
        }
    }
    for (size_t i = 0; i < 90; i++) {
        assert_int_equal(outcomes[i].prompt_count, 100);
        assert_int_equal(outcomes[i].token_count, 2);
    }
    wait_idle(engine, &stats);
    engine_destroy(engine);
    model_destroy(model);
}

/* It published that it is idle, and then does not come on: who watches sees work that waits. */
static void test_a_held_engine_is_not_idle_once_asked(void **state) {
    (void)state;
    static struct asked asked[2];
    static struct outcome outcomes[2];
    struct model *model = open_model("mha-silu", 1, 32);
    struct brake brake;
    struct engine *engine = open_held(model, &brake, (struct engine_options){.body = BODY_AUTO});
    memset(outcomes, 0, sizeof outcomes);
    for (size_t i = 0; i < 2; i++) ask(&asked[i], model_get_info(model), i, 5, 1);
    submit(engine, &asked[0]);
    sem_wait(&brake.told);
    struct engine_stats stats;
    engine_get_stats(engine, &stats);
    assert_true(stats.idle);
    uint64_t before = time_now_ns();
    submit(engine, &asked[1]);
    uint64_t after = time_now_ns();
    engine_get_stats(engine, &stats);
    assert_false(stats.idle);
    assert_in_range(stats.last_step_at_ns, before, after);
    brake_release(&brake);
    collect_all(engine, outcomes, 2);
    wait_idle(engine, &stats);
    engine_destroy(engine);
    model_destroy(model);
}

static void test_destroy_returns_whatever_goes_on(void **state) {
    (void)state;
    static struct asked asked;
    struct model *model = open_model("odd-shapes", 1, 32);
    struct engine *engine = open_engine(model, (struct engine_options){.body = BODY_AUTO});
    submit_flood(engine, model_get_info(model));
    wait_until_stalled(engine); /* in the middle of a step, waiting for room */
    engine_destroy(engine);
    for (size_t i = 0; i < 20; i++) { /* in a step, between steps, before the first one */
        engine = open_engine(model, (struct engine_options){.max_sequences = 4});
        for (size_t j = 0; j < 10; j++) {
            ask(&asked, model_get_info(model), j, 10, 100);
            submit(engine, &asked);
        }
        usleep((useconds_t)(i * 100));
        engine_destroy(engine);
    }
    model_destroy(model);
}

static void test_idle_engine_sleeps(void **state) {
    (void)state;
    static struct asked asked;
    static struct outcome outcome;
    struct model *model = open_model("mha-silu", 1, 32);
    struct engine *engine = open_engine(model, (struct engine_options){.body = BODY_AUTO});
    ask(&asked, model_get_info(model), 0, 5, 5);
    run_one(engine, &asked, &outcome);
    struct engine_stats stats;
    wait_idle(engine, &stats);
    struct rusage before, after;
    usleep(20000);
    getrusage(RUSAGE_SELF, &before);
    usleep(200000);
    getrusage(RUSAGE_SELF, &after);
    long used = (after.ru_utime.tv_sec - before.ru_utime.tv_sec) * 1000000 +
                after.ru_utime.tv_usec - before.ru_utime.tv_usec;
    assert_in_range(used, 0, 50000);
    engine_destroy(engine);
    model_destroy(model);
}

enum { CHAOS = 120 };

static void *submit_chaos(void *context) {
    struct engine *engine = context;
    static struct asked asked;
    struct model_info info = {.vocab = 96, .tier_count = 3};
    for (size_t i = 0; i < CHAOS; i++) {
        struct error error = {0};
        ask_variously(&asked, &info, i);
        int result;
        while ((result = engine_submit(engine, &asked.request, &error)) == FATHOM_FULL) usleep(200);
        must(result, &error);
        if (i % 3 == 0) engine_cancel(engine, hash(i, 5) % (i + 1));
    }
    return NULL;
}

static void test_random_cancellations_leave_nothing_behind(void **state) {
    (void)state;
    static struct outcome outcomes[CHAOS];
    struct model *model = open_model("gqa-relu2", 2, 24);
    const struct model_info *info = model_get_info(model);
    struct engine_options options = {
        .kv_budget = 20 * info->kv_block_bytes, .max_sequences = 12, .queue_limit = 20};
    struct engine *engine = open_engine(model, options);
    memset(outcomes, 0, sizeof outcomes);
    pthread_t submitter;
    assert_int_equal(pthread_create(&submitter, NULL, submit_chaos, engine), 0);
    struct engine_stats stats;
    size_t ended = 0, cancelled = 0;
    for (size_t i = 0; ended < CHAOS; i++) {
        ended += collect(engine, outcomes, CHAOS);
        if (i % 4 == 0) engine_cancel(engine, hash(i, 6) % CHAOS);
        engine_get_stats(engine, &stats);
        assert_true(stats.kv_blocks_used <= stats.kv_blocks_total);
        assert_true(stats.running <= 12);
    }
    pthread_join(submitter, NULL);
    for (size_t i = 0; i < CHAOS; i++) cancelled += outcomes[i].finished.finish == FINISH_CANCELLED;
    wait_idle(engine, &stats);
    assert_int_equal(stats.cancelled, cancelled);
    assert_in_range(cancelled, 1, CHAOS - 1);
    engine_destroy(engine);
    model_destroy(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cancel_takes_effect_before_the_next_step),
        cmocka_unit_test(test_full_queue_and_used_ids_are_refused),
        cmocka_unit_test(test_queue_is_bounded_by_tokens),
        cmocka_unit_test(test_waiting_too_long_expires),
        cmocka_unit_test(test_consumer_is_told_at_most_once_per_step),
        cmocka_unit_test(test_slow_consumer_holds_the_engine),
        cmocka_unit_test(test_a_held_engine_is_not_idle_once_asked),
        cmocka_unit_test(test_destroy_returns_whatever_goes_on),
        cmocka_unit_test(test_idle_engine_sleeps),
        cmocka_unit_test(test_random_cancellations_leave_nothing_behind),
    };
    return cmocka_run_group_tests_name("engine_threads", tests, NULL, NULL);
}
