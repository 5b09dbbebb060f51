/* The sampler against a reference that sorts everything and computes in double. */
#include "engine/sampler.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { VOCAB_MAX = 400 };

static const struct sampling plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};

static struct sampler make_sampler(size_t vocab) {
    struct sampler sampler;
    assert_int_equal(sampler_create(&sampler, vocab, NULL), 0);
    return sampler;
}

/* A sequence with the given settings: `prompt` tokens 0, 3, 6 and so on, then `generated` tokens
 * 0, 2, 4 and so on twice over, so that counts of 0, 1 and 2 occur. */
static struct sequence *make_sequence(const struct engine_request *settings, size_t prompt,
                                      size_t generated) {
    int32_t tokens[64];
    assert_true(prompt <= 64);
    for (size_t i = 0; i < prompt; i++) tokens[i] = (int32_t)(3 * i);
    struct engine_request request = *settings;
    request.prompt = tokens;
    request.prompt_length = prompt;
    request.max_tokens = generated + 1;
    struct sequence *sequence = NULL;
    assert_int_equal(sequence_create(&request, NULL, 0, &sequence, NULL), 0);
    for (size_t i = 0; i < generated; i++) {
        sequence_append(sequence, (int32_t)(2 * (i % (generated / 2 + 1))));
    }
    return sequence;
}

static double uniform_random(void) { return rand() / (RAND_MAX + 1.0); }

/* Shapes that differ in what is hard about them: spread, equals, impossible ones, not-a-numbers. */
static void fill_logits(float *logits, size_t vocab, size_t shape) {
    for (size_t i = 0; i < vocab; i++) {
        double normal = sqrt(-2 * log(1 - uniform_random())) * cos(6.283185307 * uniform_random());
        switch (shape % 6) {
        case 0: logits[i] = (float)normal; break;
        case 1: logits[i] = (float)(normal * 8); break;
        case 2: logits[i] = (float)round(normal * 2); break;
        case 3: logits[i] = 0.25f; break;
        case 4: logits[i] = rand() % 3 ? (float)normal : -INFINITY; break;
        default: logits[i] = rand() % 4 ? (float)normal : NAN;
        }
    }
    logits[rand() % (int)vocab] = 1.5f; /* one is always possible */
}

/* ---- The reference --------------------------------------------------------------------------- */

struct entry {
    int32_t token;
    double logit, probability;
};

static int compare_entries(const void *a, const void *b) {
    const struct entry *left = a, *right = b;
    if (left->logit != right->logit) return left->logit > right->logit ? -1 : 1;
    return left->token < right->token ? -1 : 1;
}

static size_t count_token(const int32_t *tokens, size_t count, size_t token) {
    size_t found = 0;
    for (size_t i = 0; i < count; i++) found += (size_t)tokens[i] == token;
    return found;
}

/* Every token after bias, penalties and ban, best first; probabilities at temperature 1. */
static void reference_sort(const struct sequence *sequence, const float *logits, size_t vocab,
                           struct entry *entries) {
    const struct engine_request *request = &sequence->request;
    const struct sampling *sampling = &request->sampling;
    size_t generated_count = sequence->length - request->prompt_length;
    const int32_t *drawn = sequence->tokens + request->prompt_length;
    for (size_t i = 0; i < vocab; i++) {
        float logit = isnan(logits[i]) ? -INFINITY : logits[i];
        for (size_t j = 0; j < sampling->bias_count; j++) {
            if ((size_t)sampling->bias[j].token == i) logit += sampling->bias[j].bias;
        }
        size_t generated = count_token(drawn, generated_count, i);
        if (count_token(sequence->tokens, sequence->length, i) > 0) {
            logit = logit > 0 ? logit / sampling->repetition_penalty
                              : logit * sampling->repetition_penalty;
        }
        if (generated > 0) {
            logit -= sampling->frequency_penalty * (float)generated + sampling->presence_penalty;
        }
        bool stops = count_token(request->stop_tokens, request->stop_token_count, i) > 0;
        if (stops && generated_count < request->min_tokens) logit = -INFINITY;
        entries[i] = (struct entry){(int32_t)i, logit, 0};
    }
    qsort(entries, vocab, sizeof *entries, compare_entries);
    double sum = 0;
    for (size_t i = 0; i < vocab; i++) sum += exp(entries[i].logit - entries[0].logit);
    for (size_t i = 0; i < vocab; i++) {
        entries[i].probability = exp(entries[i].logit - entries[0].logit) / sum;
    }
}

/* How many of the sorted entries stay; their probabilities become those of the draw. `slack` widens
 * top_p and min_p: an entry at the very edge may stay or go by a rounding. */
static size_t reference_keep(const struct sampling *sampling, struct entry *entries, size_t vocab,
                             double slack) {
    size_t count = vocab, kept = 0;
    while (count > 0 && entries[count - 1].logit == -INFINITY) count--;
    if (sampling->top_k > 0 && (size_t)sampling->top_k < count) count = (size_t)sampling->top_k;
    double sum = 0, mass = 0;
    for (size_t i = 0; i < count; i++) {
        entries[i].probability = exp((entries[i].logit - entries[0].logit) / sampling->temperature);
        sum += entries[i].probability;
    }
    while (kept < count && (kept == 0 || mass < (sampling->top_p + slack) * sum)) {
        mass += entries[kept++].probability;
    }
    while (entries[kept - 1].probability < sampling->min_p - slack) {
        mass -= entries[--kept].probability;
    }
    for (size_t i = 0; i < kept; i++) entries[i].probability /= mass;
    return kept;
}

/* ---- Comparisons ----------------------------------------------------------------------------- */

static struct engine_request random_settings(struct logit_bias *bias, int32_t *stops) {
    static const float temperatures[] = {0.1f, 0.7f, 1, 1.6f, 2}, top_ps[] = {0.05f, 0.5f, 0.9f, 1};
    struct engine_request request = {.top_logprobs = rand() % 22 - 1};
    struct sampling *sampling = &request.sampling;
    sampling->temperature = temperatures[rand() % 5];
    sampling->top_p = top_ps[rand() % 4];
    sampling->top_k = rand() % 2 ? 0 : 1 + rand() % 30;
    sampling->min_p = rand() % 3 ? 0 : (float)uniform_random() * 0.3f;
    sampling->repetition_penalty = rand() % 2 ? 1 : 0.5f + (float)uniform_random();
    sampling->presence_penalty = rand() % 2 ? 0 : (float)uniform_random() * 4 - 2;
    sampling->frequency_penalty = rand() % 2 ? 0 : (float)uniform_random() * 4 - 2;
    sampling->bias_count = (size_t)rand() % 5;
    for (size_t i = 0; i < sampling->bias_count; i++) {
        bias[i] = (struct logit_bias){rand() % 40, (float)uniform_random() * 6 - 3};
    }
    for (size_t i = 0; i < 4; i++) stops[i] = rand() % 40;
    sampling->bias = bias;
    request.stop_tokens = stops;
    request.stop_token_count = (size_t)rand() % 5;
    request.min_tokens = rand() % 2 ? 0 : 6;
    return request;
}

static void check_logprobs(const struct scored_token *choice, const struct engine_request *request,
                           const struct entry *sorted, size_t vocab) {
    if (request->top_logprobs < 0) {
        assert_true(isnan(choice->logprob));
        assert_int_equal(choice->top_count, 0);
        return;
    }
    size_t expected = (size_t)request->top_logprobs < vocab ? (size_t)request->top_logprobs : vocab;
    assert_int_equal(choice->top_count, expected);
    for (size_t i = 0; i < vocab; i++) {
        double logprob = log(sorted[i].probability);
        if (sorted[i].token == choice->token) assert_true(fabs(choice->logprob - logprob) < 1e-4);
        if (i >= expected) continue;
        assert_int_equal(choice->top[i].token, sorted[i].token);
        float told = choice->top[i].logprob;
        assert_true(told == logprob || fabs(told - logprob) < 1e-4); /* both may be -inf */
    }
}

static void test_random_settings_match_sorting(void **state) {
    (void)state;
    static float logits[VOCAB_MAX];
    static struct entry sorted[VOCAB_MAX], kept[VOCAB_MAX];
    struct logit_bias bias[4];
    int32_t stops[4];
    srand(11);
    for (size_t round = 0; round < 3000; round++) {
        size_t vocab = 130 + (size_t)rand() % (VOCAB_MAX - 130);
        struct sampler sampler = make_sampler(vocab);
        fill_logits(logits, vocab, round);
        logits[129] = 1; /* beyond bias, penalties and ban: something stays possible */
        struct engine_request request = random_settings(bias, stops);
        struct sequence *sequence = make_sequence(&request, 40, (size_t)rand() % 10);
        reference_sort(sequence, logits, vocab, sorted);
        memcpy(kept, sorted, sizeof kept);
        size_t count = reference_keep(&request.sampling, kept, vocab, 1e-6);
        for (size_t draw = 0; draw < 20; draw++) {
            sequence->request.sampling.seed = draw;
            struct scored_token choice;
            assert_int_equal(sampler_draw(&sampler, sequence, logits, &choice), 0);
            size_t place = 0;
            while (place < count && kept[place].token != choice.token) place++;
            assert_true(place < count);
            check_logprobs(&choice, &request, sorted, vocab);
        }
        sequence_destroy(sequence);
        sampler_destroy(&sampler);
    }
}

/* Pearson's statistic of the draws over the kept entries; those expected below 5 share a cell. */
static double chi_square(const struct entry *kept, size_t count, const size_t *drawn, size_t draws,
                         size_t *cells) {
    double statistic = 0, rare_expected = 0, rare_seen = 0;
    *cells = 0;
    for (size_t i = 0; i < count; i++) {
        double expected = kept[i].probability * (double)draws, seen = (double)drawn[kept[i].token];
        if (expected < 5) {
            rare_expected += expected;
            rare_seen += seen;
        } else {
            statistic += (seen - expected) * (seen - expected) / expected;
            ++*cells;
        }
    }
    if (rare_expected >= 5) {
        statistic += (rare_seen - rare_expected) * (rare_seen - rare_expected) / rare_expected;
        ++*cells;
    }
    return statistic;
}

static void test_draws_follow_the_distribution(void **state) {
    (void)state;
    static float logits[VOCAB_MAX];
    static struct entry kept[VOCAB_MAX];
    const size_t vocab = 200, draws = 20000;
    struct sampler sampler = make_sampler(vocab);
    struct logit_bias bias[4];
    int32_t stops[4];
    srand(5);
    for (size_t round = 0; round < 24; round++) {
        fill_logits(logits, vocab, round);
        logits[129] = 1;
        struct engine_request request = random_settings(bias, stops);
        request.top_logprobs = -1;
        struct sequence *sequence = make_sequence(&request, 20, 4);
        reference_sort(sequence, logits, vocab, kept);
        size_t count = reference_keep(&request.sampling, kept, vocab, 0);
        size_t cells, drawn[VOCAB_MAX] = {0};
        for (size_t draw = 0; draw < draws; draw++) {
            sequence->request.sampling.seed = draw;
            struct scored_token choice;
            assert_int_equal(sampler_draw(&sampler, sequence, logits, &choice), 0);
            drawn[choice.token]++;
        }
        double statistic = chi_square(kept, count, drawn, draws, &cells);
        double freedom = cells > 1 ? (double)cells - 1 : 1; /* mean; its variance is twice that */
        assert_true(statistic < freedom + 4.5 * sqrt(2 * freedom) + 3);
        sequence_destroy(sequence);
    }
    sampler_destroy(&sampler);
}

static void test_greedy_takes_the_lowest_of_equals(void **state) {
    (void)state;
    const float logits[] = {NAN, 1, 7, -INFINITY, 7, 7, 2, NAN};
    struct sampler sampler = make_sampler(8);
    struct engine_request request = {.sampling = plain, .top_logprobs = 4};
    request.sampling.temperature = 0;
    request.sampling.top_k = 3; /* of no effect */
    struct sequence *sequence = make_sequence(&request, 1, 0);
    struct scored_token choice;
    assert_int_equal(sampler_draw(&sampler, sequence, logits, &choice), 0);
    assert_int_equal(choice.token, 2);
    const int32_t best[] = {2, 4, 5, 6};
    for (size_t i = 0; i < 4; i++) assert_int_equal(choice.top[i].token, best[i]);
    sequence_destroy(sequence);
    sampler_destroy(&sampler);
}

static void test_top_k_of_equals_keeps_the_lowest(void **state) {
    (void)state;
    float logits[50];
    for (size_t i = 0; i < 50; i++) logits[i] = i % 2 ? 3 : 1;
    struct sampler sampler = make_sampler(50);
    struct engine_request request = {.sampling = plain, .top_logprobs = -1};
    request.sampling.top_k = 4;
    struct sequence *sequence = make_sequence(&request, 1, 0);
    bool seen[50] = {false};
    for (uint64_t seed = 0; seed < 200; seed++) {
        struct scored_token choice;
        sequence->request.sampling.seed = seed;
        assert_int_equal(sampler_draw(&sampler, sequence, logits, &choice), 0);
        seen[choice.token] = true;
    }
    for (size_t i = 0; i < 50; i++) assert_int_equal(seen[i], i == 1 || i == 3 || i == 5 || i == 7);
    sequence_destroy(sequence);
    sampler_destroy(&sampler);
}

static void test_without_a_possible_token_there_is_no_choice(void **state) {
    (void)state;
    const float hopeless[] = {NAN, -INFINITY, NAN, -INFINITY};
    const float only_stops[] = {-INFINITY, 2, NAN, -INFINITY};
    const int32_t stop = 1;
    struct sampler sampler = make_sampler(4);
    struct engine_request request = {.sampling = plain,
                                     .top_logprobs = 2,
                                     .stop_tokens = &stop,
                                     .stop_token_count = 1,
                                     .min_tokens = 1};
    for (float temperature = 0; temperature < 2; temperature++) {
        request.sampling.temperature = temperature;
        struct sequence *early = make_sequence(&request, 1, 0);
        struct sequence *late = make_sequence(&request, 1, 1);
        struct scored_token choice;
        assert_int_equal(sampler_draw(&sampler, early, hopeless, &choice), FATHOM_INVALID);
        assert_int_equal(sampler_draw(&sampler, early, only_stops, &choice), FATHOM_INVALID);
        assert_int_equal(sampler_draw(&sampler, late, only_stops, &choice), 0);
        assert_int_equal(choice.token, 1);
        assert_true(choice.logprob == 0);
        sequence_destroy(early);
        sequence_destroy(late);
    }
    sampler_score(&sampler, hopeless, 2, 4, &(struct scored_token){0});
    sampler_destroy(&sampler);
}

static void test_scores_are_of_the_plain_distribution(void **state) {
    (void)state;
    const float logits[] = {0, logf(3), -INFINITY, 0};
    struct sampler sampler = make_sampler(4);
    struct scored_token choice;
    sampler_score(&sampler, logits, 1, 2, &choice);
    assert_true(fabs(choice.logprob - log(0.6)) < 1e-6);
    assert_int_equal(choice.top_count, 2);
    assert_int_equal(choice.top[0].token, 1);
    assert_int_equal(choice.top[1].token, 0);
    sampler_score(&sampler, logits, 2, 0, &choice);
    assert_true(choice.logprob == -INFINITY);
    assert_int_equal(choice.top_count, 0);
    sampler_destroy(&sampler);
}

/* The extremes of every range at once must give numbers, and a token that is possible. */
static void test_extremes_stay_finite(void **state) {
    (void)state;
    float logits[64];
    struct logit_bias bias[] = {{0, 100}, {1, -100}, {2, 100}};
    struct sampler sampler = make_sampler(64);
    const float repetition[] = {1e-45f, 2}, temperatures[] = {1e-45f, 1e-6f, 2};
    for (size_t i = 0; i < 64; i++) logits[i] = i % 3 ? 3e38f : -3e38f;
    logits[5] = INFINITY;
    for (size_t i = 0; i < 6; i++) {
        struct engine_request request = {.sampling = plain, .top_logprobs = 20};
        request.sampling.repetition_penalty = repetition[i % 2];
        request.sampling.temperature = temperatures[i / 2];
        request.sampling.presence_penalty = request.sampling.frequency_penalty = -2;
        request.sampling.top_p = 1e-45f;
        request.sampling.min_p = 1;
        request.sampling.top_k = INT32_MAX;
        request.sampling.bias = bias;
        request.sampling.bias_count = 3;
        struct sequence *sequence = make_sequence(&request, 10, 5);
        struct scored_token choice;
        assert_int_equal(sampler_draw(&sampler, sequence, logits, &choice), 0);
        assert_in_range(choice.token, 0, 63);
        assert_false(isnan(choice.logprob));
        assert_int_equal(choice.token, choice.top[0].token); /* such a top_p leaves the best one */
        for (size_t j = 0; j < choice.top_count; j++) assert_true(choice.top[j].logprob <= 0);
        sequence_destroy(sequence);
    }
    sampler_destroy(&sampler);
}

static void test_draw_is_a_function_of_seed_and_position(void **state) {
    (void)state;
    double sum = 0, products = 0, previous = 0;
    for (uint64_t seed = 0; seed < 200; seed++) {
        for (uint64_t position = 0; position < 200; position++) {
            double uniform = sampler_uniform(seed, position);
            assert_true(uniform >= 0 && uniform < 1);
            assert_true(uniform == sampler_uniform(seed, position));
            assert_true(uniform != sampler_uniform(position + 200, seed));
            sum += uniform;
            products += (uniform - 0.5) * (previous - 0.5);
            previous = uniform;
        }
    }
    assert_true(fabs(sum / 40000 - 0.5) < 4 * sqrt(1.0 / 12 / 40000));
    assert_true(fabs(products / 40000) < 4.0 / 12 / sqrt(40000));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_settings_match_sorting),
        cmocka_unit_test(test_draws_follow_the_distribution),
        cmocka_unit_test(test_greedy_takes_the_lowest_of_equals),
        cmocka_unit_test(test_top_k_of_equals_keeps_the_lowest),
        cmocka_unit_test(test_without_a_possible_token_there_is_no_choice),
        cmocka_unit_test(test_scores_are_of_the_plain_distribution),
        cmocka_unit_test(test_extremes_stay_finite),
        cmocka_unit_test(test_draw_is_a_function_of_seed_and_position),
    };
    return cmocka_run_group_tests_name("sampler", tests, NULL, NULL);
}
