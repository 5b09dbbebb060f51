/* The scheduler against a virtual clock: a made-up device takes the time that its cost model says,
 * times a factor which the scheduler has to find out. */
#include "engine/scheduler.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#define MS 1e6

/* One block; 1 ms a step, 0.1 ms a row, most of it in the sub-layers. */
static const struct cost_model device = {
    .blocks = 1,
    .count = 2,
    .points = {{1, 1.01 * MS, 0.04 * MS, 0.04 * MS, 0.01 * MS},
               {101, 2.01 * MS, 4.04 * MS, 4.04 * MS, 1.01 * MS}},
    .attended_ns = 10,
    .gather_factor = 1,
};

struct world {
    struct scheduler scheduler;
    double now, slowness;
    uint64_t arrivals;
};

static void open_world(struct world *world, size_t sequences, double target_ms) {
    struct scheduler_limits limits = {
        .max_sequences = sequences,
        .max_step_rows = 256,
        .kv_blocks = 1000,
        .max_tokens = 9000,
        .cost = &device,
        .step_target_ns = target_ms * MS,
    };
    *world = (struct world){.slowness = 1};
    assert_int_equal(scheduler_create(&world->scheduler, &limits, NULL), 0);
}

static struct sequence *arrive(struct world *world, size_t prompt, size_t max_tokens,
                               int32_t priority) {
    int32_t *tokens = calloc(prompt, sizeof *tokens);
    struct engine_request request = {
        .prompt = tokens,
        .prompt_length = prompt,
        .max_tokens = max_tokens,
        .priority = priority,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
    };
    struct sequence *sequence = NULL;
    assert_int_equal(sequence_create(&request, NULL, 0, &sequence, NULL), 0);
    free(tokens);
    sequence->arrival = world->arrivals++;
    sequence->submitted_ns = (uint64_t)world->now;
    scheduler_add(&world->scheduler, sequence);
    return sequence;
}

/* What the step really executes: rows of a sequence run the share that `attn_rate` says. */
static double real_time(const struct world *world, const struct step *step) {
    struct cost_load load = {0};
    for (size_t i = 0; i < step->part_count; i++) {
        const struct sequence *sequence = step->parts[i].sequence;
        for (size_t j = 0; j < step->parts[i].rows; j++) {
            double position = step->position[step->parts[i].first_row + j];
            load.rows++;
            load.attn_rows += sequence->attn_rate;
            load.mlp_rows += sequence->mlp_rate;
            load.attended += (position + 1) * sequence->attn_rate;
        }
    }
    load.logit_rows = (double)step->logit_count;
    return cost_predict(&device, &load) * world->slowness;
}

/* Runs one step; the finished leave. Returns its time, and its rows of prefill. */
static double run_step(struct world *world, size_t *prefill, size_t *decodes) {
    struct scheduler *scheduler = &world->scheduler;
    const struct step *step = scheduler_next_step(scheduler, (uint64_t)world->now);
    double taken = real_time(world, step);
    *prefill = *decodes = 0;
    for (size_t i = 0; i < step->part_count; i++) {
        bool is_decode = sequence_is_decoding(step->parts[i].sequence);
        *(is_decode ? decodes : prefill) += step->parts[i].rows;
    }
    world->now += taken;
    scheduler_complete_step(scheduler, NULL);
    scheduler_observe_step(scheduler, taken);
    for (size_t i = 0; i < step->part_count; i++) {
        struct sequence *sequence = step->parts[i].sequence;
        if (sequence->computed < sequence->length) continue;
        if (!sequence_is_full(sequence)) sequence_append(sequence, 1);
        if (!sequence_is_full(sequence)) continue;
        scheduler_remove(scheduler, sequence);
        sequence_destroy(sequence);
    }
    return taken;
}

static void close_world(struct world *world) {
    size_t prefill, decodes;
    while (!scheduler_is_empty(&world->scheduler)) run_step(world, &prefill, &decodes);
    scheduler_destroy(&world->scheduler);
}

static void test_a_long_prompt_does_not_stop_streams(void **state) {
    (void)state;
    for (double slowness = 0.5; slowness < 4; slowness *= 2) {
        struct world world;
        size_t prefill, decodes, steps = 0, rows = 0;
        open_world(&world, 16, 10);
        world.slowness = slowness;
        for (size_t i = 0; i < 8; i++) arrive(&world, 4, 2000, 0);
        for (size_t i = 0; i < 20; i++) run_step(&world, &prefill, &decodes);
        struct sequence *longer = arrive(&world, 8000, 1, 0);
        while (longer->computed + 300 < 8000) {
            double taken = run_step(&world, &prefill, &decodes);
            assert_int_equal(decodes, 8);
            assert_true(prefill >= KV_BLOCK_TOKENS);
            /* Until it has seen a few steps of that size it may be wrong, by one chunk at most. */
            bool is_smallest = prefill == KV_BLOCK_TOKENS;
            if (steps++ > 20) assert_true(taken <= 10.5 * MS || is_smallest);
            rows += prefill;
        }
        /* The target is used, not only kept. */
        if (slowness <= 1) assert_true(rows / steps > 20);
        close_world(&world);
    }
}

static void test_nobody_decodes_nothing_is_held_back(void **state) {
    (void)state;
    struct world world;
    size_t prefill, decodes;
    open_world(&world, 16, 3);
    arrive(&world, 2000, 1, 0);
    run_step(&world, &prefill, &decodes);
    assert_int_equal(prefill, 256);
    close_world(&world);
}

/* Decoding alone takes longer than the target: prompts still have their share of the step. */
static void test_prompts_have_a_share_of_slow_steps(void **state) {
    (void)state;
    static const double shares[] = {0, 0.5, 2.0 / 3};
    size_t before = 0;
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        struct world world;
        size_t prefill, decodes;
        open_world(&world, 64, 3);
        world.scheduler.limits.prefill_share = shares[i];
        for (size_t j = 0; j < 40; j++) arrive(&world, 4, 200, 0);
        double decoding = 0;
        for (size_t j = 0; j < 20; j++) decoding = run_step(&world, &prefill, &decodes);
        assert_int_equal(decodes, 40);
        assert_true(decoding > 3 * MS);
        struct sequence *longer = arrive(&world, 3000, 1, 0);
        while (longer->computed + 300 < 3000) {
            double taken = run_step(&world, &prefill, &decodes);
            assert_true(taken <= 1.05 * decoding / (1 - shares[i]) || shares[i] == 0);
        }
        assert_true(shares[i] > 0 ? prefill > 3 * before / 2 : prefill == KV_BLOCK_TOKENS);
        before = prefill;
        close_world(&world);
    }
}

/* Work is counted, not tokens: who skips gets a longer chunk. */
static void test_those_who_skip_get_more_rows(void **state) {
    (void)state;
    size_t rows[2];
    for (size_t skips = 0; skips < 2; skips++) {
        struct world world;
        size_t decodes;
        open_world(&world, 16, 10);
        arrive(&world, 4, 100, 0);
        run_step(&world, &rows[skips], &decodes);
        struct sequence *longer = arrive(&world, 3000, 1, 0);
        if (skips) longer->attn_rate = longer->mlp_rate = 0.5;
        run_step(&world, &rows[skips], &decodes);
        close_world(&world);
    }
    assert_true(rows[0] > 40);
    assert_true(rows[1] > rows[0] * 3 / 2);
}

/* Better-paid work arrives faster than it is done; the rest must start all the same. */
static void test_aging_lets_everybody_start(void **state) {
    (void)state;
    struct world world;
    size_t prefill, decodes, urgent = 0;
    open_world(&world, 2, 10);
    for (size_t i = 0; i < 4; i++) arrive(&world, 50, 50, 0);
    struct sequence *patient = arrive(&world, 50, 50, 3);
    double submitted = world.now;
    while (patient->started_ns == 0) {
        for (; urgent < (size_t)(world.now / (20 * MS)); urgent++) arrive(&world, 50, 50, 0);
        run_step(&world, &prefill, &decodes);
        assert_true(world.now - submitted < 60e9);
    }
    /* All who came before it, or up to three seconds after, and nobody else. */
    size_t before = 0;
    const struct sequence *sequence = world.scheduler.waiting.first;
    for (; sequence; sequence = sequence->next) before += sequence_before(sequence, patient);
    assert_int_equal(before, 0);
    assert_true((double)patient->started_ns - submitted > 3e9);
    close_world(&world);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_long_prompt_does_not_stop_streams),
        cmocka_unit_test(test_nobody_decodes_nothing_is_held_back),
        cmocka_unit_test(test_prompts_have_a_share_of_slow_steps),
        cmocka_unit_test(test_those_who_skip_get_more_rows),
        cmocka_unit_test(test_aging_lets_everybody_start),
    };
    return cmocka_run_group_tests_name("scheduler time", tests, NULL, NULL);
}
