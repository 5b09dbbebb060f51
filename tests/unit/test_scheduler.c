/* The scheduler over the block manager: small cases by hand, then a long random life in which every
 * rule is checked after every event against bookkeeping of the test's own. */
#include "engine/scheduler.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- Small cases ----------------------------------------------------------------------------- */

static uint64_t arrivals;

static struct sequence *make_sequence(size_t prompt_length, size_t max_tokens, int32_t priority) {
    int32_t prompt[512];
    assert_true(prompt_length <= 512);
    for (size_t i = 0; i < prompt_length; i++) prompt[i] = (int32_t)i;
    struct engine_request request = {
        .prompt = prompt,
        .prompt_length = prompt_length,
        .max_tokens = max_tokens,
        .priority = priority,
        .top_logprobs = -1,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
    };
    struct sequence *sequence = NULL;
    assert_int_equal(sequence_create(&request, NULL, 0, &sequence, NULL), 0);
    sequence->arrival = arrivals++;
    return sequence;
}

static struct scheduler make_scheduler_of(size_t groups, size_t sequences, size_t rows,
                                          size_t chunk, size_t blocks) {
    struct scheduler_limits limits = {
        .max_sequences = sequences,
        .max_step_rows = rows,
        .prefill_chunk = chunk,
        .kv_blocks = blocks,
        .kv_groups = groups,
        .max_tokens = blocks / groups * KV_BLOCK_TOKENS,
    };
    struct scheduler scheduler;
    struct error error = {0};
    assert_int_equal(scheduler_create(&scheduler, &limits, &error), 0);
    return scheduler;
}

static struct scheduler make_scheduler(size_t sequences, size_t rows, size_t chunk, size_t blocks) {
    return make_scheduler_of(1, sequences, rows, chunk, blocks);
}

/* Runs a step and gives each sequence that has all its tokens computed the next one. */
static const struct step *take_step(struct scheduler *scheduler) {
    const struct step *step = scheduler_next_step(scheduler, 1);
    scheduler_complete_step(scheduler, NULL);
    for (size_t i = 0; i < step->part_count; i++) {
        struct sequence *sequence = step->parts[i].sequence;
        if (sequence->computed == sequence->length) sequence_append(sequence, 5);
    }
    return step;
}

static void drop(struct scheduler *scheduler, struct sequence *sequence) {
    scheduler_remove(scheduler, sequence);
    sequence_destroy(sequence);
}

static void test_decodes_come_before_prefill(void **state) {
    (void)state;
    struct scheduler scheduler = make_scheduler(4, 8, 0, 16);
    struct sequence *first = make_sequence(3, 10, 0), *second = make_sequence(20, 10, 0);
    scheduler_add(&scheduler, first);
    scheduler_add(&scheduler, second);
    const struct step *step = take_step(&scheduler);
    assert_int_equal(step->part_count, 2);
    assert_int_equal(step->parts[0].rows, 3);
    assert_int_equal(step->parts[1].rows, 5);
    assert_int_equal(step->logit_count, 1); /* the second prompt is not complete */
    assert_int_equal(step->logit_rows[0], 2);
    step = take_step(&scheduler);
    assert_ptr_equal(step->parts[0].sequence, first);
    assert_int_equal(step->parts[0].rows, 1);
    assert_int_equal(step->position[0], 3);
    assert_int_equal(step->token[0], 5);
    assert_int_equal(step->parts[1].rows, 7);
    assert_int_equal(step->position[1], 5);
    drop(&scheduler, first);
    drop(&scheduler, second);
    assert_int_equal(kv_blocks_used(&scheduler.kv), 0);
    scheduler_destroy(&scheduler);
}

static void test_chunk_lets_a_short_prompt_pass_by(void **state) {
    (void)state;
    struct scheduler scheduler = make_scheduler(4, 16, 4, 16);
    struct sequence *longer = make_sequence(40, 1, 0), *shorter = make_sequence(4, 1, 0);
    scheduler_add(&scheduler, longer);
    scheduler_add(&scheduler, shorter);
    const struct step *step = take_step(&scheduler);
    assert_int_equal(step->rows, 8);
    assert_int_equal(shorter->length, 5);
    drop(&scheduler, longer);
    drop(&scheduler, shorter);
    scheduler_destroy(&scheduler);
}

static void test_lower_priority_value_goes_first(void **state) {
    (void)state;
    struct scheduler scheduler = make_scheduler(1, 16, 0, 16);
    struct sequence *idle = make_sequence(4, 9, 3), *urgent = make_sequence(4, 9, -2);
    struct sequence *urgent_later = make_sequence(4, 9, -2);
    scheduler_add(&scheduler, idle);
    scheduler_add(&scheduler, urgent);
    scheduler_add(&scheduler, urgent_later);
    assert_ptr_equal(take_step(&scheduler)->parts[0].sequence, urgent);
    drop(&scheduler, urgent);
    assert_ptr_equal(take_step(&scheduler)->parts[0].sequence, urgent_later);
    drop(&scheduler, urgent_later);
    assert_ptr_equal(take_step(&scheduler)->parts[0].sequence, idle);
    drop(&scheduler, idle);
    scheduler_destroy(&scheduler);
}

static void test_every_running_sequence_can_decode_in_a_step(void **state) {
    (void)state;
    struct scheduler scheduler = make_scheduler(64, 4, 0, 64);
    struct sequence *sequences[6];
    for (size_t i = 0; i < 6; i++) {
        sequences[i] = make_sequence(2, 50, 0);
        scheduler_add(&scheduler, sequences[i]);
    }
    for (size_t i = 0; i < 8; i++) take_step(&scheduler);
    assert_int_equal(scheduler.running.count, 4);
    assert_int_equal(take_step(&scheduler)->rows, 4);
    for (size_t i = 0; i < 6; i++) drop(&scheduler, sequences[i]);
    scheduler_destroy(&scheduler);
}

static void test_admission_keeps_a_block_for_those_who_grow(void **state) {
    (void)state;
    for (size_t grows = 0; grows < 2; grows++) {
        struct scheduler scheduler = make_scheduler(4, 64, 0, 3);
        struct sequence *first = make_sequence(16, grows ? 20 : 4, 0);
        struct sequence *second = make_sequence(8, 4, 0);
        scheduler_add(&scheduler, first);
        scheduler_add(&scheduler, second);
        take_step(&scheduler);
        assert_int_equal(scheduler.kv.held[first->slot], 2);
        assert_int_equal(second->slot < 0, grows);
        drop(&scheduler, first);
        drop(&scheduler, second);
        scheduler_destroy(&scheduler);
    }
}

static void test_preemption_takes_the_last_and_resumes_it(void **state) {
    (void)state;
    struct scheduler scheduler = make_scheduler(4, 64, 0, 4);
    struct sequence *first = make_sequence(15, 40, 0), *second = make_sequence(15, 20, 0);
    scheduler_add(&scheduler, first);
    scheduler_add(&scheduler, second);
    while (second->usage.preemptions == 0) take_step(&scheduler);
    assert_int_equal(second->slot, -1);
    assert_int_equal(second->computed, 0);
    assert_int_equal(scheduler.preemptions, 1);
    size_t known = second->length, reached = second->reached;
    assert_int_equal(reached, known - 1); /* its last token had no row yet */
    while (first->length < 55) take_step(&scheduler);
    assert_int_equal(second->length, known);
    drop(&scheduler, first);
    const struct step *step = take_step(&scheduler);
    assert_int_equal(step->rows, known);
    assert_int_equal(step->parts[0].recomputed, reached);
    assert_int_equal(step->logit_count, 1);
    assert_int_equal(step->logit_rows[0], known - 1);
    assert_int_equal(second->length, known + 1);
    drop(&scheduler, second);
    scheduler_destroy(&scheduler);
}

static void test_one_sequence_may_fill_the_cache(void **state) {
    (void)state;
    struct scheduler scheduler = make_scheduler(4, 16, 0, 3);
    struct sequence *sequence = make_sequence(20, 28, 0);
    scheduler_add(&scheduler, sequence);
    while (!sequence_is_full(sequence)) assert_true(take_step(&scheduler)->rows > 0);
    assert_int_equal(scheduler.preemptions, 0);
    drop(&scheduler, sequence);
    scheduler_destroy(&scheduler);
}

static void test_prompt_logprobs_want_every_prompt_row_once(void **state) {
    (void)state;
    struct scheduler scheduler = make_scheduler(4, 8, 0, 8);
    struct sequence *sequence = make_sequence(12, 3, 0);
    sequence->request.prompt_logprobs = true;
    scheduler_add(&scheduler, sequence);
    assert_int_equal(take_step(&scheduler)->logit_count, 8);
    assert_int_equal(take_step(&scheduler)->logit_count, 4);
    assert_int_equal(take_step(&scheduler)->logit_count, 1);
    drop(&scheduler, sequence);

    sequence = make_sequence(5, 0, 0); /* scoring only: the last row predicts nothing of interest */
    sequence->request.prompt_logprobs = true;
    scheduler_add(&scheduler, sequence);
    assert_int_equal(scheduler_next_step(&scheduler, 1)->logit_count, 4);
    scheduler_complete_step(&scheduler, NULL);
    drop(&scheduler, sequence);
    scheduler_destroy(&scheduler);
}

/* ---- A long random life ---------------------------------------------------------------------- */

enum { BLOCKS = 12, SLOTS = 6, ROWS = 20, LIVE_MAX = 24 };
enum { GROUPS = 3, BLOCKS_MAX = 18 }; /* under omit */

struct cell {        /* what K and V of one place in the arena were computed from */
    uint64_t prefix; /* a hash of the tier and of all tokens up to this one */
    size_t position, group;
};

/* What the test knows of a live sequence, from its own counting. */
struct witness {
    struct sequence *sequence; /* NULL: free entry */
    size_t computed;           /* 0 again when its blocks went */
    size_t scored;             /* prompt rows whose logits were asked for a score */
    size_t drawn;
    uint32_t preemptions;
};

struct world {
    struct scheduler scheduler;
    struct cell arena[BLOCKS_MAX * KV_BLOCK_TOKENS];
    struct witness live[LIVE_MAX];
    size_t groups, blocks, limit; /* of the cache; tokens of a sequence */
    uint32_t skips[SLOTS * GROUPS];
    size_t omitted; /* rows and groups in which they took no place */
    size_t events, started, ended, preempted, steps;
    size_t found; /* positions that the prefix cache had */
    uint64_t random;
};

static size_t pick(struct world *world, size_t below) { /* xorshift64, Marsaglia 2003 */
    world->random ^= world->random << 13;
    world->random ^= world->random >> 7;
    world->random ^= world->random << 17;
    return (size_t)(world->random >> 11) % below;
}

static void check_list(const struct sequence_list *list) {
    size_t count = 0;
    const struct sequence *previous = NULL, *sequence = list->first;
    for (; sequence; previous = sequence, sequence = sequence->next, count++) {
        assert_ptr_equal(sequence->previous, previous);
        if (previous) assert_true(sequence_before(previous, sequence));
    }
    assert_ptr_equal(list->last, previous);
    assert_int_equal(list->count, count);
}

/* Blocks are conserved, and only running sequences hold any. A block is in several tables only if
 * the prefix cache may share it. */
static void check_blocks(const struct world *world) {
    const struct kv *kv = &world->scheduler.kv;
    uint32_t seen[BLOCKS_MAX] = {0};
    bool slot_used[SLOTS] = {false};
    size_t held = 0;
    const struct sequence *sequence = world->scheduler.running.first;
    for (; sequence; sequence = sequence->next) {
        size_t slot = (size_t)sequence->slot;
        assert_in_range(slot, 0, SLOTS - 1);
        assert_false(slot_used[slot]);
        slot_used[slot] = true;
        for (size_t group = 0; group < kv->groups; group++) {
            size_t skipped = kv->skipped[slot * kv->groups + group],
                   places = kv_held(kv, slot, group);
            places *= KV_BLOCK_TOKENS;
            assert_true(skipped <= sequence->computed);
            assert_true(places + skipped >= sequence->computed);
            /* Nothing is kept for tokens that took no place. */
            if (sequence->computed > 0) {
                assert_true(places + skipped < sequence->length + 1 + KV_BLOCK_TOKENS);
            }
            for (size_t i = 0; i < kv_held(kv, slot, group); i++) {
                int32_t block = kv_table(kv, slot, group)[i];
                assert_in_range(block, 0, world->blocks - 1);
                held += seen[block]++ == 0;
                if (seen[block] > 1) assert_true(kv_serial(kv, block) != 0);
            }
        }
    }
    assert_int_equal(held, kv_blocks_used(kv));
    for (size_t i = 0; i < world->blocks; i++) assert_int_equal(seen[i], kv->block[i].references);
    for (size_t i = 0; i < kv->free_count; i++) assert_int_equal(seen[kv->free_blocks[i]], 0);
    for (size_t slot = 0; slot < SLOTS; slot++) {
        for (size_t group = 0; !slot_used[slot] && group < kv->groups; group++) {
            assert_int_equal(kv_held(kv, slot, group), 0);
            assert_int_equal(kv->skipped[slot * kv->groups + group], 0);
        }
    }
}

static void check_world(struct world *world) {
    const struct scheduler *scheduler = &world->scheduler;
    check_list(&scheduler->running);
    check_list(&scheduler->waiting);
    assert_int_equal(scheduler->running.count + scheduler->waiting.count,
                     world->started - world->ended);
    assert_int_equal(scheduler->running.count + scheduler->free_slot_count, SLOTS);
    const struct sequence *waiting = scheduler->waiting.first;
    for (; waiting; waiting = waiting->next) assert_int_equal(waiting->slot, -1);
    check_blocks(world);
    world->events++;
}

static void arrive(struct world *world) {
    struct witness *witness = world->live;
    while (witness < world->live + LIVE_MAX && witness->sequence) witness++;
    if (witness == world->live + LIVE_MAX) return;
    size_t prompt = 1 + pick(world, pick(world, 4) ? 12 : world->limit); /* most grow later */
    size_t generated = pick(world, 6) ? pick(world, world->limit - prompt + 1) : 0;
    struct sequence *sequence = make_sequence(prompt, generated, (int32_t)pick(world, 3));
    *witness = (struct witness){.sequence = sequence};
    sequence->request.prompt_logprobs = pick(world, 4) == 0;
    sequence->request.tier = (int32_t)pick(world, 4);
    sequence->prefix_root = UINT64_MAX - (uint64_t)sequence->request.tier;
    /* Texts that begin alike and part at some point. */
    if (pick(world, 2)) sequence->tokens[pick(world, prompt)] = (int32_t)pick(world, 3);
    scheduler_add(&world->scheduler, sequence);
    world->started++;
    check_world(world);
}

static void leave(struct world *world, struct witness *witness) {
    scheduler_remove(&world->scheduler, witness->sequence);
    sequence_destroy(witness->sequence);
    witness->sequence = NULL;
    world->ended++;
    check_world(world);
}

static struct witness *find_witness(struct world *world, const struct sequence *sequence) {
    for (size_t i = 0; i < LIVE_MAX; i++) {
        if (world->live[i].sequence == sequence) return &world->live[i];
    }
    fail_msg("a sequence that ended is scheduled");
    return NULL;
}

/* Under omit: what a token decides depends on all tokens up to it. Some run nearly everything, the
 * last group nearly nothing. */
static bool takes_place(const struct world *world, uint64_t prefix, size_t group) {
    uint64_t dice = prefix * UINT64_C(0xBF58476D1CE4E5B9) >> (40 + 3 * group);
    return world->groups == 1 || dice % 16 < (group == 2 ? 2 : 12 + 3 * group);
}

/* Runs one row: in each group it must see K and V of all its earlier positions that have a place
 * there, one behind the other, then leaves its own. */
static void execute_row(struct world *world, const struct step *step, size_t row,
                        const struct sequence *sequence) {
    size_t position = (size_t)step->position[row], part = (size_t)step->slot[row];
    for (size_t group = 0; group < world->groups; group++) {
        size_t table = group * step->part_count + part, place = 0;
        uint64_t prefix = (uint64_t)sequence->request.tier + 1;
        for (size_t p = 0; p <= position; p++) {
            prefix = prefix * UINT64_C(0x9E3779B97F4A7C15) + (uint64_t)sequence->tokens[p] + 1;
            if (p == position && row == step->parts[part].first_row) {
                assert_int_equal(step->places[table], place);
            }
            if (!takes_place(world, prefix, group)) continue;
            assert_true(place / KV_BLOCK_TOKENS < step->blocks_per_part);
            size_t block =
                (size_t)step->block_table[table * step->blocks_per_part + place / KV_BLOCK_TOKENS];
            struct cell *cell = &world->arena[block * KV_BLOCK_TOKENS + place % KV_BLOCK_TOKENS];
            if (p == position) *cell = (struct cell){prefix, p, group};
            assert_true(cell->prefix == prefix && cell->position == p && cell->group == group);
            place++;
        }
        bool skips = !takes_place(world, prefix, group);
        world->skips[part * world->groups + group] += skips;
        world->omitted += skips;
    }
}

/* Rows that want logits must be exactly those that the test would ask for. */
static void check_logits(struct witness *witness, const struct step *step,
                         const struct step_part *part) {
    const struct sequence *sequence = witness->sequence;
    size_t logit = part->first_logit;
    for (size_t row = part->first_row; row < part->first_row + part->rows; row++) {
        size_t position = (size_t)step->position[row];
        bool scores = sequence->request.prompt_logprobs && position == witness->scored &&
                      position + 1 < sequence->request.prompt_length;
        bool draws = position + 1 == sequence->length && !sequence_is_full(sequence);
        witness->scored += scores;
        bool wanted = logit < step->logit_count && (size_t)step->logit_rows[logit] == row;
        assert_int_equal(wanted, scores || draws);
        logit += wanted;
    }
}

static void check_part(struct world *world, const struct step *step, const struct step_part *part) {
    struct sequence *sequence = part->sequence;
    struct witness *witness = find_witness(world, sequence);
    assert_true(part->rows > 0);
    assert_true(part->rows <= world->scheduler.limits.prefill_chunk);
    if (world->scheduler.limits.prefix_cache) { /* positions may have been found */
        size_t found = (size_t)step->position[part->first_row];
        assert_true(found >= witness->computed);
        assert_true(found == witness->computed || found % KV_BLOCK_TOKENS == 0);
        world->found += found - witness->computed;
        witness->computed = found;
    }
    for (size_t i = 0; i < part->rows; i++) {
        size_t row = part->first_row + i, position = witness->computed + i;
        assert_int_equal(step->position[row], position);
        assert_int_equal(step->token[row], sequence->tokens[position]);
        assert_int_equal(step->tier[row], sequence->request.tier);
        assert_ptr_equal(&step->parts[step->slot[row]], part);
        execute_row(world, step, row, sequence);
    }
    check_logits(witness, step, part);
    witness->computed += part->rows;
}

static bool has_part(const struct step *step, const struct sequence *sequence) {
    for (size_t i = 0; i < step->part_count; i++) {
        if (step->parts[i].sequence == sequence) return true;
    }
    return false;
}

/* The order: decodes before prefills, all decodes served, the first of all never left out, nobody
 * admitted past a sequence that waits, and victims later in the order than all who run. One that
 * comes back after a preemption and finds its blocks decodes at the place of its prefill. */
static void check_order(struct world *world, const struct step *step) {
    const struct scheduler *scheduler = &world->scheduler;
    size_t decodes = 0;
    while (decodes < step->part_count && sequence_is_decoding(step->parts[decodes].sequence)) {
        decodes++;
    }
    for (size_t i = 0; i < step->part_count; i++) {
        const struct sequence *sequence = step->parts[i].sequence;
        if (i >= decodes && sequence_is_decoding(sequence)) {
            assert_true(sequence->usage.preemptions > 0);
        }
        for (size_t j = 0; j < i; j++) assert_ptr_not_equal(step->parts[j].sequence, sequence);
    }
    const struct sequence *sequence = scheduler->running.first;
    if (step->part_count > 0) assert_true(has_part(step, sequence));
    for (; sequence; sequence = sequence->next) {
        if (sequence_is_decoding(sequence)) assert_true(has_part(step, sequence));
        if (sequence->started_ns == world->steps) {
            const struct sequence *waiting = scheduler->waiting.first;
            assert_true(!waiting || sequence_before(sequence, waiting));
        }
    }
}

static void note_preemptions(struct world *world) {
    for (size_t i = 0; i < LIVE_MAX; i++) {
        struct witness *witness = &world->live[i];
        const struct sequence *sequence = witness->sequence;
        if (!sequence || sequence->usage.preemptions == witness->preemptions) continue;
        witness->preemptions++;
        assert_int_equal(sequence->usage.preemptions, witness->preemptions);
        assert_int_equal(sequence->slot, -1);
        witness->computed = 0;
        world->preempted++;
        const struct sequence *last = world->scheduler.running.last;
        assert_true(!last || sequence_before(last, sequence));
    }
}

static void run_random_step(struct world *world) {
    const struct step *step = scheduler_next_step(&world->scheduler, ++world->steps);
    note_preemptions(world);
    check_world(world);
    assert_true(step->rows <= ROWS);
    assert_int_equal(step->rows == 0, scheduler_is_empty(&world->scheduler));
    check_order(world, step);
    size_t row = 0;
    memset(world->skips, 0, sizeof world->skips);
    for (size_t i = 0; i < step->part_count; i++) {
        assert_int_equal(step->parts[i].first_row, row);
        check_part(world, step, &step->parts[i]);
        row += step->parts[i].rows;
    }
    assert_int_equal(row, step->rows);
    scheduler_complete_step(&world->scheduler, world->skips);
    scheduler_observe_step(&world->scheduler, (double)(1 + pick(world, 3000)));
    for (size_t i = 0; i < step->part_count; i++) {
        struct sequence *sequence = step->parts[i].sequence;
        struct witness *witness = find_witness(world, sequence);
        assert_int_equal(sequence->computed, witness->computed);
        if (sequence->computed < sequence->length) continue;
        if (!sequence_is_full(sequence)) {
            sequence_append(sequence, (int32_t)pick(world, 1000));
            assert_int_equal(++witness->drawn, sequence_generated(sequence));
            check_world(world);
        }
        if (sequence_is_full(sequence) || pick(world, 100) == 0) leave(world, witness);
    }
}

/* With nobody arriving, the first in the order gains a token position each step: it must end. */
static void drain(struct world *world) {
    size_t bound = 1;
    for (size_t i = 0; i < LIVE_MAX; i++) {
        if (world->live[i].sequence) bound += sequence_limit(world->live[i].sequence) + 1;
    }
    while (!scheduler_is_empty(&world->scheduler)) {
        assert_true(bound-- > 0);
        run_random_step(world);
    }
}

/* Four rows or so fit the target: steps are cut short in all places where they can be. */
static const struct cost_model some_cost = {
    .blocks = 1,
    .count = 2,
    .points = {{1, 1000, 50, 50, 0}, {ROWS, 1000, 50 * ROWS, 50 * ROWS, 0}},
    .gather_factor = 1,
};

static void live_randomly(struct world *world, uint64_t seed, size_t events, size_t groups,
                          bool prefix_cache) {
    memset(world, 0, sizeof *world);
    world->random = seed;
    world->groups = groups;
    world->blocks = groups > 1 ? BLOCKS_MAX : BLOCKS;
    world->limit = world->blocks / groups * KV_BLOCK_TOKENS;
    world->scheduler = make_scheduler_of(groups, SLOTS, ROWS, seed % 2 ? 7 : ROWS, world->blocks);
    world->scheduler.limits.prefix_cache = prefix_cache;
    if (seed % 3 == 0) world->scheduler.limits.cost = &some_cost;
    world->scheduler.limits.step_target_ns = 1500;
    while (world->events < events) {
        switch (pick(world, 8)) {
        case 0:
        case 1:
            arrive(world);
            break;
        case 2: {
            struct witness *witness = &world->live[pick(world, LIVE_MAX)];
            if (witness->sequence && pick(world, 10) == 0) leave(world, witness);
            break;
        }
        default:
            run_random_step(world);
        }
    }
    drain(world);
    assert_int_equal(world->started, world->ended);
    assert_int_equal(kv_blocks_used(&world->scheduler.kv), 0);
    assert_int_equal(world->scheduler.preemptions, world->preempted);
    assert_true(world->preempted > events / 2000); /* the case was really provoked */
    scheduler_destroy(&world->scheduler);
}

static void test_random_life_keeps_every_rule(void **state) {
    (void)state;
    static struct world world;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        live_randomly(&world, seed * 7919, 125000, 1, seed > 4);
        assert_int_equal(world.found > 0, seed > 4);
    }
}

static void test_random_life_where_tokens_take_no_place(void **state) {
    (void)state;
    static struct world world;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        live_randomly(&world, seed * 104729, 100000, GROUPS, false);
        assert_true(world.omitted > 100000);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decodes_come_before_prefill),
        cmocka_unit_test(test_chunk_lets_a_short_prompt_pass_by),
        cmocka_unit_test(test_lower_priority_value_goes_first),
        cmocka_unit_test(test_every_running_sequence_can_decode_in_a_step),
        cmocka_unit_test(test_admission_keeps_a_block_for_those_who_grow),
        cmocka_unit_test(test_preemption_takes_the_last_and_resumes_it),
        cmocka_unit_test(test_one_sequence_may_fill_the_cache),
        cmocka_unit_test(test_prompt_logprobs_want_every_prompt_row_once),
        cmocka_unit_test(test_random_life_keeps_every_rule),
        cmocka_unit_test(test_random_life_where_tokens_take_no_place),
    };
    return cmocka_run_group_tests_name("scheduler", tests, NULL, NULL);
}
