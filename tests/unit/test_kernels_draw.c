/* What a device draws against what the sampler draws from the same logits: the same token, and the
 * same bits of every logprob. The CPU leaves drawing to the sampler: there, weights alone. */
#include "test_kernels.h"

#include "engine/draw_batch.h"
#include "engine/sampler.h"
#include "kernels/weight.h"

enum { ROWS = 300, PROMPT = 20, GENERATED = 6 };

/* ---- Weights --------------------------------------------------------------------------------- */

static void weights_follow_exp(void **state) {
    (void)state;
    uint64_t previous = 0;
    for (int i = 320000; i >= 0; i--) {
        float distance = (float)i * -1e-4f;
        uint64_t weight = weight_of(distance);
        double exact = exp((double)distance) * WEIGHT_UNIT;
        assert_true(fabs((double)weight - exact) <= 0.5 + 1e-9 * exact);
        assert_true(weight >= previous);
        previous = weight;
    }
    assert_true(weight_of(0) == (uint64_t)WEIGHT_UNIT);
    assert_true(weight_of(-INFINITY) == 0 && weight_of(NAN) == 0 && weight_of(-3e38f) == 0);
}

static void shares_stay_within_the_whole(void **state) {
    (void)state;
    static const uint64_t totals[] = {1, 2, 3, 1000, (uint64_t)1 << 40, ((uint64_t)1 << 62) - 1};
    for (size_t i = 0; i < sizeof totals / sizeof *totals; i++) {
        uint64_t total = totals[i];
        assert_true(weight_drawn(0, total) == 0);
        assert_true(weight_drawn(1 - 0x1p-53, total) < total);
        assert_true(weight_to_reach(1e-45f, total) == 1);
        assert_true(weight_to_reach(0.999999f, total) <= total);
    }
    assert_true(weight_to_reach(0.5f, 1000) == 500 && weight_to_reach(0.5f, 1001) == 501);
    assert_true(weight_least(0) == 0 && weight_least(1) == (uint64_t)WEIGHT_UNIT);
}

/* ---- Requests -------------------------------------------------------------------------------- */

/* min_tokens beyond GENERATED bans the stop tokens. */
static const struct setting {
    float temperature, top_p, min_p;
    int32_t top_k;
    float repetition, presence, frequency;
    size_t bias_count, min_tokens;
    int32_t top_logprobs;
} settings[] = {
    {0, 1, 0, 0, 1, 0, 0, 0, 0, -1},
    {1, 1, 0, 0, 1, 0, 0, 0, 0, -1},
    {0.7f, 1, 0, 0, 1, 0, 0, 0, 0, -1},
    {1, 1, 0, 0, 1, 0, 0, 0, 0, 5},
    {0, 1, 0, 0, 1, 0, 0, 0, 0, 20},
    {1, 1, 0, 1, 1, 0, 0, 0, 0, -1},
    {1.3f, 1, 0, 7, 1, 0, 0, 0, 0, 0},
    {1, 1, 0, 5000, 1, 0, 0, 0, 0, -1},
    {1, 1, 0, INT32_MAX, 1, 0, 0, 0, 0, -1},
    {1, 0.9f, 0, 0, 1, 0, 0, 0, 0, -1},
    {2, 0.5f, 0, 0, 1, 0, 0, 0, 0, 3},
    {1, 1e-45f, 0, 0, 1, 0, 0, 0, 0, -1},
    {1.6f, 0.999f, 0, 50, 1, 0, 0, 0, 0, -1},
    {0.8f, 0.3f, 0, 3, 1, 0, 0, 0, 0, 1},
    {1, 1, 0.05f, 0, 1, 0, 0, 0, 0, -1},
    {1, 1, 1, 0, 1, 0, 0, 0, 0, -1},
    {1.2f, 0.95f, 0.02f, 40, 1, 0, 0, 0, 0, 2},
    {1, 1, 0, 0, 1.3f, 0, 0, 0, 0, -1},
    {0, 1, 0, 0, 0.5f, 1.5f, -0.7f, 0, 0, 4},
    {1, 1, 0, 0, 1, 0.9f, 0.4f, 0, 0, -1},
    {1, 1, 0, 0, 1, 0, 0, 5, 0, -1},
    {1, 1, 0, 0, 1, 0, 0, 0, 50, -1},
    {0.9f, 0.8f, 0.01f, 20, 1.1f, -0.5f, 0.2f, 5, 50, 20},
    {1e-45f, 0.9f, 0, 4, 1e-45f, 2, 2, 5, 50, 20},
};
enum { SETTINGS = sizeof settings / sizeof *settings };

/* Tokens repeat within the first of a vocabulary; a bias comes twice. */
static struct sequence *make_sequence(const struct setting *setting, size_t vocab, uint64_t seed) {
    int32_t tokens[PROMPT], few = vocab < 30 ? (int32_t)vocab : 30;
    const int32_t stops[] = {1 % few, 7 % few, (int32_t)vocab - 1};
    struct logit_bias bias[5];
    for (int32_t i = 0; i < 5; i++)
        bias[i] = (struct logit_bias){3 * (i % 4) % few, (float)(i * 7 % 5) * 1.3f - 2};
    for (int32_t i = 0; i < PROMPT; i++) tokens[i] = 3 * i % few;
    struct engine_request request = {
        .prompt = tokens,
        .prompt_length = PROMPT,
        .max_tokens = GENERATED + 1,
        .min_tokens = setting->min_tokens,
        .stop_tokens = stops,
        .stop_token_count = 3,
        .top_logprobs = setting->top_logprobs,
        .sampling = {.temperature = setting->temperature,
                     .top_p = setting->top_p,
                     .min_p = setting->min_p,
                     .top_k = setting->top_k,
                     .presence_penalty = setting->presence,
                     .frequency_penalty = setting->frequency,
                     .repetition_penalty = setting->repetition,
                     .seed = seed,
                     .bias = bias,
                     .bias_count = setting->bias_count},
    };
    struct sequence *sequence = NULL;
    assert_int_equal(sequence_create(&request, NULL, 0, &sequence, NULL), 0);
    for (int32_t i = 0; i < GENERATED; i++) sequence_append(sequence, 2 * (i % 4) % few);
    return sequence;
}

/* Spread, equals, impossible ones, extremes; one row in eleven has no possible token. */
static void fill_row(float *logits, size_t vocab, size_t row) {
    random_fill(logits, vocab, (uint32_t)(row * 31 + vocab));
    for (size_t i = 0; i < vocab; i++) {
        float x = logits[i], y = logits[(i * 7 + 3) % vocab];
        switch (row % 11) {
        case 0: logits[i] = x * 3; break;
        case 1: logits[i] = (x + y) * 12; break;
        case 2: logits[i] = roundf(x * 3); break;
        case 3: logits[i] = 0.25f; break;
        case 4: logits[i] = x > 0.5f ? y * 4 : -INFINITY; break;
        case 5: logits[i] = i % 4 ? x * 9 : NAN; break;
        case 6: logits[i] = x > 0 ? 0.f : -0.f; break;
        case 7: logits[i] = i % 3 ? x * 3e38f : i % 2 ? INFINITY : -INFINITY; break;
        case 8: logits[i] = -40 - x * x * 20; break;
        case 9: logits[i] = i % 2 ? -INFINITY : NAN; break;
        default: logits[i] = x * 1e-40f;
        }
    }
}

/* ---- The comparison -------------------------------------------------------------------------- */

struct table {
    struct bench bench;
    struct sampler sampler;
    struct draw_batch batch;
    struct sequence *sequences[ROWS];
    float *logits; /* [ROWS, vocab] */
    struct draw draw;
    struct row_list list;
    size_t vocab, rows;
};

/* False where the device does not draw. */
static bool table_open(struct table *table, size_t vocab, size_t rows) {
    struct device_options options = {test_device(), 1, NULL, ROWS, 64};
    struct error error = {0};
    int32_t indices[ROWS];
    *table = (struct table){.vocab = vocab, .rows = rows};
    struct bench *bench = &table->bench;
    assert_int_equal(device_open(&options, &bench->device, &error), 0);
    bench->kernels = bench->device->kernels;
    if (!bench->kernels->draw) {
        bench_close(bench);
        return false;
    }
    for (size_t i = 0; i < rows; i++) indices[i] = (int32_t)i;
    assert_int_equal(sampler_create(&table->sampler, vocab, &error), 0);
    assert_int_equal(draw_batch_create(&table->batch, rows, &error), 0);
    table->logits = allocate(rows * vocab * sizeof *table->logits);
    table->list = bench_list(bench, indices, (int32_t)rows);
    table->draw = (struct draw){
        .logits = bench_buffer(bench, NULL, rows * vocab * sizeof(float)),
        .list = &table->list,
        .vocab = vocab,
        .asked = bench_buffer(bench, NULL, rows * sizeof(struct draw_row)),
        .changes = bench_buffer(bench, NULL, rows * 64 * sizeof(struct draw_change)),
        .outcome = bench_buffer(bench, NULL, rows * sizeof(struct draw_outcome)),
        .best = bench_buffer(bench, NULL, rows * DRAW_BEST_MAX * sizeof(struct draw_best)),
    };
    return true;
}

static void table_close(struct table *table) {
    draw_batch_destroy(&table->batch);
    sampler_destroy(&table->sampler);
    free(table->logits);
    bench_close(&table->bench);
}

static void table_draw(struct table *table, struct draw_outcome *outcome, struct draw_best *best) {
    struct bench *bench = &table->bench;
    struct device *device = bench->device;
    struct draw_batch *batch = &table->batch;
    bench->kernels->write(device, table->draw.logits, 0, table->logits,
                          table->rows * table->vocab * sizeof(float));
    bench->kernels->write(device, (struct buffer *)table->draw.asked, 0, batch->rows,
                          table->rows * sizeof *batch->rows);
    bench->kernels->write(device, (struct buffer *)table->draw.changes, 0, batch->changes,
                          batch->change_count * sizeof *batch->changes);
    table->draw.is_plain = batch->is_plain;
    bench->kernels->draw(device, &table->draw);
    bench_read(bench, table->draw.outcome, outcome, table->rows * sizeof *outcome);
    bench_read(bench, table->draw.best, best, table->rows * DRAW_BEST_MAX * sizeof *best);
}

static void check_same(const struct scored_token *got, const struct scored_token *want) {
    assert_int_equal(got->token, want->token);
    assert_memory_equal(&got->logprob, &want->logprob, sizeof got->logprob);
    assert_int_equal(got->top_count, want->top_count);
    for (size_t i = 0; i < want->top_count; i++) {
        assert_int_equal(got->top[i].token, want->top[i].token);
        assert_memory_equal(&got->top[i].logprob, &want->top[i].logprob, sizeof(float));
    }
}

static bool is_scored(size_t row) {
    return row % 13 == 5;
}
static bool is_left_out(size_t row) {
    return row % 17 == 3;
}

/* Row i has the setting i + round of the first `kinds`, and a shape and a seed of its own. */
static void check_round(struct table *table, size_t round, size_t kinds) {
    static struct draw_outcome outcome[ROWS];
    static struct draw_best best[ROWS * DRAW_BEST_MAX];
    struct draw_batch *batch = &table->batch;
    size_t vocab = table->vocab;
    draw_batch_clear(batch, table->rows);
    for (size_t i = 0; i < table->rows; i++) {
        const struct setting *setting = &settings[(i + round) % kinds];
        fill_row(table->logits + i * vocab, vocab, i * 5 + round * 3);
        table->sequences[i] = make_sequence(setting, vocab, i * 7919 + round);
        if (is_left_out(i)) continue;
        if (is_scored(i))
            draw_batch_ask_score(batch, i, (int32_t)((i * 11 + round) % vocab), i % 21);
        else
            draw_batch_ask_token(batch, i, table->sequences[i]);
    }
    assert_int_equal(batch->is_plain, kinds == 3);
    memset(outcome, 0x5a, sizeof outcome);
    table_draw(table, outcome, best);
    for (size_t i = 0; i < table->rows; i++) {
        const float *logits = table->logits + i * vocab;
        struct scored_token got = {0}, want = {0};
        if (!is_left_out(i)) {
            const struct draw_best *others = best + i * DRAW_BEST_MAX;
            int told = draw_batch_tell(batch, i, vocab, &outcome[i], others, &got);
            int result = 0;
            if (is_scored(i))
                sampler_score(&table->sampler, logits, batch->rows[i].token, i % 21, &want);
            else
                result = sampler_draw(&table->sampler, table->sequences[i], logits, &want);
            assert_int_equal(told, result);
            if (result == 0) check_same(&got, &want);
        }
        sequence_destroy(table->sequences[i]);
    }
}

static void device_draws_as_the_sampler(void **state) {
    (void)state;
    static const struct {
        size_t vocab, rows, rounds;
    } shapes[] = {{1, 12, 2},    {5, 60, 8},    {300, 60, 30},
                  {60, ROWS, 3}, {4097, 48, 4}, {70000, 25, 2}};
    struct table table;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (!table_open(&table, shapes[i].vocab, shapes[i].rows)) skip();
        for (size_t round = 0; round < shapes[i].rounds; round++)
            check_round(&table, round, SETTINGS);
        table_close(&table);
    }
}

/* The first three settings are a temperature and nothing else. */
static void plain_rows_take_fewer_launches(void **state) {
    (void)state;
    static const size_t vocabs[] = {7, 4096, 9001, 300000};
    struct table table;
    for (size_t i = 0; i < sizeof vocabs / sizeof *vocabs; i++) {
        if (!table_open(&table, vocabs[i], 12)) skip();
        for (size_t round = 0; round < 3; round++) check_round(&table, round, 3);
        table_close(&table);
    }
}

/* ---- Room ------------------------------------------------------------------------------------ */

/* Bias, 20 + 6 used tokens at most, and stops. */
static void rows_without_room_are_left_to_the_host(void **state) {
    (void)state;
    struct draw_batch batch;
    struct error error = {0};
    assert_int_equal(draw_batch_create(&batch, 2, &error), 0);
    struct sequence *changed = make_sequence(&settings[SETTINGS - 1], 100, 1);
    struct sequence *plain = make_sequence(&settings[1], 100, 1);
    for (size_t room = 0; room < 60; room++) {
        draw_batch_clear(&batch, 2);
        batch.change_count = DRAW_CHANGES_MAX - room;
        draw_batch_ask_token(&batch, 0, changed);
        draw_batch_ask_token(&batch, 1, plain);
        bool fits = room >= 5 + PROMPT + GENERATED + 3;
        assert_int_equal(batch.rows[0].kind, fits ? DRAW_TOKEN : DRAW_NOTHING);
        assert_int_equal(batch.rows[1].kind, DRAW_TOKEN);
        assert_in_range(batch.change_count, DRAW_CHANGES_MAX - room, DRAW_CHANGES_MAX);
        assert_int_equal(batch.is_plain, !fits);
    }
    sequence_destroy(changed);
    sequence_destroy(plain);
    draw_batch_destroy(&batch);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_follow_exp),
        cmocka_unit_test(shares_stay_within_the_whole),
        cmocka_unit_test(device_draws_as_the_sampler),
        cmocka_unit_test(plain_rows_take_fewer_launches),
        cmocka_unit_test(rows_without_room_are_left_to_the_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
