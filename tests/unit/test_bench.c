/* The load generator's pure parts: draws, arrivals, lengths, workload, statistics. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "bench/arrivals.h"
#include "bench/report.h"

enum { DRAWS = 200000 };

static void assert_near(double value, double expected, double tolerance) {
    if (fabs(value - expected) <= tolerance) return;
    fail_msg("%g is not within %g of %g", value, tolerance, expected);
}

/* ---- Draws ----------------------------------------------------------------------------------- */

static void streams_are_apart_and_repeat(void **state) {
    (void)state;
    struct dice a = dice_make(1, 1), again = dice_make(1, 1), b = dice_make(1, 2),
                c = dice_make(2, 1);
    uint64_t first = dice_next(&a);
    assert_int_equal(first, dice_next(&again));
    assert_int_not_equal(first, dice_next(&b));
    assert_int_not_equal(first, dice_next(&c));
    for (int i = 0; i < DRAWS; i++) {
        double unit = dice_unit(&a);
        assert_true(unit > 0 && unit < 1);
        assert_true(dice_below(&a, 7) < 7);
    }
}

/* Mean and standard deviation of the gaps, in seconds. */
static void gaps_of(double rate, double burstiness, double *mean, double *deviation) {
    struct arrivals arrivals;
    double sum = 0, squares = 0;
    arrivals_init(&arrivals, rate, burstiness, 5);
    assert_true(arrivals.at == 0);
    for (int i = 0; i < DRAWS; i++) {
        double before = arrivals.at;
        arrivals_advance(&arrivals);
        double gap = arrivals.at - before;
        assert_true(gap >= 0);
        sum += gap;
        squares += gap * gap;
    }
    *mean = sum / DRAWS;
    *deviation = sqrt(fmax(squares / DRAWS - *mean * *mean, 0));
}

/* A gamma gap of shape k and mean 1 / rate deviates by mean / sqrt(k). */
static void arrivals_have_their_rate_and_burstiness(void **state) {
    (void)state;
    const double shapes[] = {0.25, 1, 4};
    double mean, deviation;
    for (size_t i = 0; i < 3; i++) {
        gaps_of(50, shapes[i], &mean, &deviation);
        assert_near(mean, 0.02, 0.0004);
        assert_near(deviation, 0.02 / sqrt(shapes[i]), 0.001);
    }
    gaps_of(50, INFINITY, &mean, &deviation);
    assert_near(mean, 0.02, 1e-9);
    assert_near(deviation, 0, 1e-6);
}

static void lengths_follow_their_distribution(void **state) {
    (void)state;
    const struct {
        const char *text;
        double mean, deviation;
    } cases[] = {
        {"128", 128, 0},
        {"100-200", 150, 29.15}, /* sqrt((101^2 - 1) / 12) */
        {"normal:1000:50", 1000, 50},
        {"lognormal:1000:300", 1000, 300},
        {"exponential:1000", 1000, 1000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct lengths lengths;
        struct dice dice = dice_make(3, i);
        double sum = 0, squares = 0;
        assert_int_equal(lengths_parse("input-tokens", cases[i].text, &lengths, NULL), 0);
        for (int j = 0; j < DRAWS; j++) {
            double length = (double)lengths_draw(&lengths, &dice);
            assert_true(length >= 1 && length <= LENGTH_MAX);
            sum += length;
            squares += length * length;
        }
        double mean = sum / DRAWS;
        assert_near(mean, cases[i].mean, 0.01 * cases[i].mean);
        assert_near(sqrt(squares / DRAWS - mean * mean), cases[i].deviation,
                    0.03 * cases[i].deviation + 1e-6);
    }
}

static void lengths_refuse_what_they_cannot_draw(void **state) {
    (void)state;
    const char *const wrong[] = {
        "",         "0",         "-5",          "1048577",      "5-",           "9-8",
        "normal:5", "normal:5:", "5:6",         "exponential:", "1e999",        "nan",
        "12x",      " 5",        "normal:5:-1", "zipf:1:2",     "lognormal:0:1"};
    struct lengths lengths;
    struct error error;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(lengths_parse("output-tokens", wrong[i], &lengths, &error),
                         FATHOM_INVALID);
        assert_non_null(strstr(error.message, "--output-tokens"));
    }
}

/* ---- Workload -------------------------------------------------------------------------------- */

static const struct bench_settings plain = {
    .endpoint = "completions",
    .input_tokens = "5-9",
    .output_tokens = "normal:20:5",
    .token_ids = "10-99",
    .turns = 3,
    .quality = "full:1,fast:3",
    .cancel = 0.5,
    .seed = 7,
};

static char *body_of(const struct bench_settings *settings, uint64_t conversation, size_t turn,
                     struct workload_request *request) {
    struct workload workload;
    struct text_buffer body = {0};
    assert_int_equal(workload_open(&workload, settings, NULL), 0);
    workload.model = "m\"";
    workload_write(&workload, conversation, turn, &body, request);
    workload_close(&workload);
    assert_false(body.failed);
    char *text = strndup(body.data, body.length);
    text_free(&body);
    return text;
}

static void the_seed_decides_the_workload(void **state) {
    (void)state;
    struct bench_settings other = plain;
    struct workload_request a, b, c;
    other.seed = 8;
    for (uint64_t i = 0; i < 20; i++) {
        char *first = body_of(&plain, i, 1, &a), *second = body_of(&plain, i, 1, &b);
        char *third = body_of(&other, i, 1, &c);
        assert_string_equal(first, second);
        assert_string_not_equal(first, third);
        assert_int_equal(a.cancel_after, b.cancel_after);
        assert_true(a.cancel_after <= a.max_tokens);
        free(first);
        free(second);
        free(third);
    }
}

static void a_turn_begins_with_the_earlier_ones(void **state) {
    (void)state;
    struct bench_settings settings = plain;
    struct workload_request request;
    settings.prefix_tokens = 4;
    settings.quality = NULL;
    char *first = body_of(&settings, 2, 0, &request), *second = body_of(&settings, 2, 1, &request);
    char *other = body_of(&settings, 3, 0, &request);
    size_t shared = (size_t)(strchr(first, ']') - first);
    assert_memory_equal(first, second, shared);
    assert_int_equal(second[shared], ',');
    size_t prefix = 0;
    while (first[prefix] == other[prefix]) prefix++;
    assert_true(prefix >= strlen("{\"model\":\"m\\\"\",\"prompt\":[10,10,10,10"));
    free(first);
    free(second);
    free(other);
}

static void a_mix_has_its_weights(void **state) {
    (void)state;
    size_t fast = 0, cancelled = 0;
    struct workload workload;
    struct text_buffer body = {0};
    assert_int_equal(workload_open(&workload, &plain, NULL), 0);
    workload.model = "m";
    for (uint64_t i = 0; i < 4000; i++) {
        struct workload_request request;
        body.length = 0;
        workload_write(&workload, i, 0, &body, &request);
        fast += strcmp(request.quality, "fast") == 0;
        cancelled += request.cancel_after > 0;
    }
    assert_near((double)fast / 4000, 0.75, 0.03);
    assert_near((double)cancelled / 4000, 0.5, 0.03);
    text_free(&body);
    workload_close(&workload);
}

static void wrong_settings_are_named(void **state) {
    (void)state;
    const struct {
        struct bench_settings settings;
        const char *named;
    } cases[] = {
        {{.endpoint = "embeddings"}, "--endpoint"},
        {{.quality = "full:0"}, "--quality"},
        {{.quality = "full:1,:2"}, "--quality"},
        {{.quality = "full: 1"}, "--quality"},
        {{.quality = "full:nan"}, "--quality"},
        {{.token_ids = "9-3"}, "--token-ids"},
        {{.token_ids = "0-99999999"}, "--token-ids"},
        {{.extra_body = "[1]"}, "--extra-body"},
        {{.extra_body = "{\"a\":1} x"}, "--extra-body"},
        {{.prompts = "/nonexistent"}, "--prompts"},
        {{.no_stream = true, .cancel = 0.5}, "--cancel"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct bench_settings settings = cases[i].settings;
        struct workload workload;
        struct error error = {0};
        if (!settings.endpoint) settings.endpoint = "completions";
        if (!settings.token_ids) settings.token_ids = "1-2";
        settings.input_tokens = settings.output_tokens = "1";
        settings.turns = 1;
        assert_int_not_equal(workload_open(&workload, &settings, &error), 0);
        if (!strstr(error.message, cases[i].named)) fail_msg("%s", error.message);
    }
}

/* ---- Statistics ------------------------------------------------------------------------------ */

/* The expected values are numpy.percentile's. */
static void percentiles_interpolate(void **state) {
    (void)state;
    double values[] = {15, 20, 35, 40, 50};
    assert_near(percentile(values, 5, 50), 35, 1e-12);
    assert_near(percentile(values, 5, 90), 46, 1e-12);
    assert_near(percentile(values, 5, 99), 49.6, 1e-12);
    assert_near(percentile(values, 1, 99), 15, 1e-12);
    assert_true(isnan(percentile(values, 0, 50)));
    double mixed[] = {50, 15, 40, 20, 35};
    struct distribution d = distribution_of(mixed, 5);
    assert_near(d.mean, 32, 1e-12);
    assert_near(d.p90, 46, 1e-12);
}

static void slos_are_parsed(void **state) {
    (void)state;
    struct slo slo;
    assert_int_equal(slo_parse(NULL, &slo, NULL), 0);
    assert_false(slo.given);
    assert_int_equal(slo_parse("tpot:50,ttft:200", &slo, NULL), 0);
    assert_true(slo.given && isinf(slo.latency));
    assert_near(slo.ttft, 0.2, 1e-12);
    assert_near(slo.tpot, 0.05, 1e-12);
    const char *const wrong[] = {"ttft", "ttft:", "ttft:-1", "ttft:nan", "tpot:5;", "e2el:5", ","};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(slo_parse(wrong[i], &slo, NULL), FATHOM_INVALID);
}

static void a_record_measures_as_defined(void **state) {
    (void)state;
    struct record record;
    struct answer answer = {
        .is_stream = true, .first_ns = 1100000000, .last_ns = 1500000000, .output_tokens = 5};
    record_measure(&record, &answer, 1000000000, 1900000000);
    assert_near(record.ttft, 0.1, 1e-12);
    assert_near(record.latency, 0.5, 1e-12);
    assert_near(record.tpot, 0.1, 1e-12);
    answer.output_tokens = 1;
    record_measure(&record, &answer, 1000000000, 1900000000);
    assert_true(isnan(record.tpot));
    answer = (struct answer){.last_ns = 1500000000};
    record_measure(&record, &answer, 1000000000, 1900000000);
    assert_true(isnan(record.ttft));
    assert_near(record.latency, 0.9, 1e-12);
}

static void add(struct run_records *records, enum outcome outcome, const char *tier, double latency,
                size_t tokens) {
    float gaps[] = {0.01f, 0.03f};
    struct answer answer = {.output_tokens = tokens,
                            .prompt_tokens = 2,
                            .gaps = gaps,
                            .gap_count = 2,
                            .chunks = 3,
                            .detail = "why",
                            .failure = outcome == OUTCOME_FAILED ? FAILURE_CLOSED : FAILURE_NONE};
    struct record record = {.outcome = outcome,
                            .failure = answer.failure,
                            .ttft = latency / 2,
                            .tpot = NAN,
                            .latency = latency};
    run_records_add(records, &record, &answer, tier);
}

static void summaries_tell_tiers_apart(void **state) {
    (void)state;
    struct run_records records = {0};
    struct slo slo;
    slo_parse("e2e:250", &slo, NULL);
    add(&records, OUTCOME_COMPLETED, "full", 0.2, 10);
    add(&records, OUTCOME_COMPLETED, "full", 0.4, 10);
    add(&records, OUTCOME_COMPLETED, "fast", 0.1, 7);
    add(&records, OUTCOME_FAILED, "fast", 9, 7);
    add(&records, OUTCOME_CANCELLED, NULL, 9, 7);
    struct summary all = summary_of(&records, -1, 2, &slo);
    struct summary full = summary_of(&records, 0, 2, &slo);
    struct summary fast = summary_of(&records, 1, 2, &slo);
    assert_int_equal(records.tier_count, 3);
    assert_int_equal(all.completed, 3);
    assert_int_equal(all.failed, 1);
    assert_int_equal(all.cancelled, 1);
    assert_int_equal(all.good, 2);
    assert_int_equal(all.output_tokens, 27);
    assert_int_equal(all.prompt_tokens, 6);
    assert_int_equal(all.chunks, 9);
    assert_int_equal(all.itl.count, 6);
    assert_near(all.itl.mean, 0.02, 1e-6);
    assert_int_equal(all.tpot.count, 0);
    assert_int_equal(full.completed, 2);
    assert_near(full.latency.mean, 0.3, 1e-12);
    assert_int_equal(fast.failures[FAILURE_CLOSED], 1);
    assert_string_equal(records.details[FAILURE_CLOSED], "why");
    run_records_free(&records);
}

/* A server may invent as many tiers as it likes. */
static void tiers_beyond_the_last_share_it(void **state) {
    (void)state;
    struct run_records records = {0};
    for (int i = 0; i < 100; i++) {
        char name[16];
        snprintf(name, sizeof name, "tier%d", i);
        add(&records, OUTCOME_COMPLETED, name, 1, 1);
    }
    assert_int_equal(records.tier_count, GROUPS_MAX);
    assert_string_equal(records.tiers[GROUPS_MAX - 1], "others");
    run_records_free(&records);
}

static void the_knee_is_where_power_is_largest(void **state) {
    (void)state;
    const double rates[] = {1, 2, 4, 5}, latencies[] = {1, 1.1, 1.5, 4};
    struct run_result points[4] = {0};
    struct report report = {.points = points, .point_count = 4};
    slo_parse(NULL, &report.slo, NULL);
    for (size_t i = 0; i < 4; i++) {
        points[i].rate = rates[i];
        points[i].seconds = 10 / rates[i];
        for (int j = 0; j < 10; j++)
            add(&points[i].records, OUTCOME_COMPLETED, NULL, latencies[i], 1);
    }
    assert_int_equal(report_find_knee(&report), 2); /* 4 / 1.5 beats 2 / 1.1 and 5 / 4 */
    points[2].concurrency = 1;
    assert_int_equal(report_find_knee(&report), 1);
    for (size_t i = 0; i < 4; i++) run_result_free(&points[i]);
}

/* ---- Where requests go ----------------------------------------------------------------------- */

static void urls_become_paths(void **state) {
    (void)state;
    const struct {
        const char *url, *host, *port, *path;
    } cases[] = {
        {"http://127.0.0.1:8080", "127.0.0.1", "8080", "/v1/completions"},
        {"http://127.0.0.1/", "127.0.0.1", "80", "/v1/completions"},
        {"http://[::1]:9/v1/", "::1", "9", "/v1/completions"},
        {"http://127.0.0.1:9/api/v2", "127.0.0.1", "9", "/api/v2/completions"},
        {"http://127.0.0.1:9/v1/completions", "127.0.0.1", "9", "/v1/completions"},
        {"https://127.0.0.1", "127.0.0.1", "443", "/v1/completions"},
        {"https://[::1]:9/x", "::1", "9", "/x/completions"},
    };
    struct target target;
    struct error error;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(target_parse(cases[i].url, false, &target, &error), 0);
        assert_int_equal(target.is_https, strncmp(cases[i].url, "https", 5) == 0);
        assert_string_equal(target.host, cases[i].host);
        assert_string_equal(target.port, cases[i].port);
        assert_string_equal(target.path, cases[i].path);
    }
    assert_int_equal(target_parse("http://127.0.0.1", true, &target, &error), 0);
    assert_string_equal(target.path, "/v1/chat/completions");
    const char *const wrong[] = {"127.0.0.1:80", "http://",    "http:///x",   "http://[::1",
                                 "http://a:b",   "http://a:",  "http://a b/", "http://a/\r\nX: y",
                                 "https://",     "httpsx://a", "ftp://a"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(target_parse(wrong[i], false, &target, &error), FATHOM_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_are_apart_and_repeat),
        cmocka_unit_test(arrivals_have_their_rate_and_burstiness),
        cmocka_unit_test(lengths_follow_their_distribution),
        cmocka_unit_test(lengths_refuse_what_they_cannot_draw),
        cmocka_unit_test(the_seed_decides_the_workload),
        cmocka_unit_test(a_turn_begins_with_the_earlier_ones),
        cmocka_unit_test(a_mix_has_its_weights),
        cmocka_unit_test(wrong_settings_are_named),
        cmocka_unit_test(percentiles_interpolate),
        cmocka_unit_test(slos_are_parsed),
        cmocka_unit_test(a_record_measures_as_defined),
        cmocka_unit_test(summaries_tell_tiers_apart),
        cmocka_unit_test(tiers_beyond_the_last_share_it),
        cmocka_unit_test(the_knee_is_where_power_is_largest),
        cmocka_unit_test(urls_become_paths),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
