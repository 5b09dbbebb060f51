/* The points of a benchmark, one after another: what bench_run does. */
#include "bench/bench.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "bench/report.h"

enum {
    POINTS_MAX = 64,
    SWEEP_RATES = 8,          /* open points of a sweep, up to the peak that closed ones found */
    SWEEP_CONCURRENCY = 1024, /* most of a closed point */
};
#define SWEEP_GAIN 1.05 /* doubling the concurrency must bring so much, or the peak is found */

struct bench {
    const struct bench_settings *settings;
    struct target target;
    struct workload workload;
    struct report report;
    char *model;               /* malloc'd when the server named it */
    double values[POINTS_MAX]; /* of --concurrency or --rate */
    size_t value_count;
    uint64_t next_conversation;
};

/* ---- Settings -------------------------------------------------------------------------------- */

static int list_parse(const char *flag, const char *text, bool whole, double most,
                      struct bench *bench, struct error *error) {
    bench->value_count = 0;
    for (const char *at = text;;) {
        char *end;
        double value = strtod(at, &end);
        if (end == at || !isfinite(value) || value <= 0 || value > most ||
            (whole && value != floor(value)) || (*end && *end != ',') ||
            bench->value_count == POINTS_MAX) {
            return error_set(error, FATHOM_INVALID,
                             "--%s must be up to %d %snumbers above 0 and up to %.0f, with commas; "
                             "got '%s'",
                             flag, POINTS_MAX, whole ? "whole " : "", most, text);
        }
        bench->values[bench->value_count++] = value;
        if (!*end) return 0;
        at = end + 1;
    }
}

static int load_check(struct bench *bench, struct error *error) {
    const struct bench_settings *settings = bench->settings;
    if ((settings->concurrency != NULL) + (settings->rate != NULL) + settings->sweep > 1)
        return error_set(error, FATHOM_INVALID,
                         "--concurrency, --rate and --sweep exclude each other");
    if (strcmp(settings->arrivals, "poisson") != 0 && strcmp(settings->arrivals, "constant") != 0)
        return error_set(error, FATHOM_INVALID, "--arrivals must be poisson or constant; got '%s'",
                         settings->arrivals);
    if (settings->api_key && !*settings->api_key)
        return error_set(error, FATHOM_INVALID, "--api-key is empty; leave it out to send none");
    for (const char *c = settings->api_key; c && *c; c++) {
        if (*c > 0x20 && *c < 0x7f) continue;
        return error_set(error, FATHOM_INVALID,
                         "--api-key must consist of printable characters without spaces");
    }
    if (settings->requests == 0 && settings->duration <= 0)
        return error_set(error, FATHOM_INVALID,
                         "--requests and --duration are both 0: the run would never end");
    if (settings->sweep) return 0;
    if (settings->rate) return list_parse("rate", settings->rate, false, 1e6, bench, error);
    return list_parse("concurrency", settings->concurrency ? settings->concurrency : "8", true,
                      65536, bench, error);
}

/* The first model that the server lists, unless --model names one. */
static int model_find(struct bench *bench, struct error *error) {
    if (bench->settings->model) {
        bench->report.model = bench->settings->model;
        return 0;
    }
    char *body;
    int result = target_get(&bench->target, bench->target.models_path, bench->settings->api_key,
                            bench->settings->timeout, &body, error);
    if (result != 0) return error_prefix(error, "asking for the model's name (or give --model)");
    json_t *answer = json_loads(body, 0, NULL);
    const json_t *first = json_array_get(json_object_get(answer, "data"), 0);
    const char *id = json_string_value(json_object_get(first, "id"));
    bench->model = id ? strdup(id) : NULL;
    json_decref(answer);
    free(body);
    if (!bench->model)
        return error_set(error, FATHOM_IO, "%s names no model; give --model",
                         bench->target.models_path);
    bench->report.model = bench->model;
    return 0;
}

/* ---- Points ---------------------------------------------------------------------------------- */

static int run_point(struct bench *bench, size_t concurrency, double rate, bool is_warm_up,
                     struct run_result *result, struct error *error) {
    const struct bench_settings *settings = bench->settings;
    struct run_plan plan = {
        .settings = settings,
        .workload = &bench->workload,
        .target = &bench->target,
        .concurrency = concurrency,
        .rate = rate,
        .requests = is_warm_up ? settings->warm_up : settings->requests,
        .duration = is_warm_up ? 0 : settings->duration,
        .conversation = bench->next_conversation,
    };
    if (is_warm_up)
        snprintf(plan.label, sizeof plan.label, "warm-up");
    else if (concurrency)
        snprintf(plan.label, sizeof plan.label, "concurrency %zu", concurrency);
    else
        snprintf(plan.label, sizeof plan.label, "rate %.4g", rate);
    int status = run_execute(&plan, result, error);
    bench->next_conversation += result->started;
    return status;
}

static int warm_up(struct bench *bench, struct error *error) {
    if (bench->settings->warm_up == 0) return 0;
    size_t concurrency = bench->settings->warm_up < 8 ? bench->settings->warm_up : 8;
    struct run_result result;
    int status = run_point(bench, concurrency, 0, true, &result, error);
    if (status == 0) run_result_free(&result);
    return status;
}

/* Runs a point and keeps it. *interrupted: no further one is wanted. */
static int add_point(struct bench *bench, size_t concurrency, double rate, bool *interrupted,
                     struct error *error) {
    struct run_result *point = &bench->report.points[bench->report.point_count];
    int status = run_point(bench, concurrency, rate, false, point, error);
    if (status != 0) return status;
    bench->report.point_count++;
    *interrupted = point->interrupted;
    return 0;
}

static double last_rate(const struct bench *bench) {
    const struct run_result *point = &bench->report.points[bench->report.point_count - 1];
    size_t completed = 0;
    for (size_t i = 0; i < point->records.count; i++)
        completed += point->records.records[i].outcome == OUTCOME_COMPLETED;
    return point->seconds > 0 ? (double)completed / point->seconds : 0;
}

/* Closed points of doubled concurrency find the peak rate; open points of even parts of it show how
 * latency grows towards it. Where throughput per latency is largest is the knee. */
static int sweep(struct bench *bench, struct error *error) {
    bool interrupted = false;
    double peak = 0;
    int result = 0;
    for (size_t concurrency = 1; concurrency <= SWEEP_CONCURRENCY && !interrupted;
         concurrency *= 2) {
        result = add_point(bench, concurrency, 0, &interrupted, error);
        if (result != 0) return result;
        double rate = last_rate(bench);
        bool gained = rate >= peak * SWEEP_GAIN;
        if (rate > peak) peak = rate;
        if (!gained || rate <= 0) break;
    }
    for (int i = 1; i <= SWEEP_RATES && !interrupted && peak > 0; i++) {
        double conversations = peak / (double)bench->settings->turns;
        result = add_point(bench, 0, conversations * i / SWEEP_RATES, &interrupted, error);
        if (result != 0) return result;
    }
    bench->report.knee = report_find_knee(&bench->report);
    return 0;
}

static int run_points(struct bench *bench, struct error *error) {
    if (bench->settings->sweep) return sweep(bench, error);
    bool interrupted = false, is_open = bench->settings->rate != NULL;
    for (size_t i = 0; i < bench->value_count && !interrupted; i++) {
        double value = bench->values[i];
        int result =
            add_point(bench, is_open ? 0 : (size_t)value, is_open ? value : 0, &interrupted, error);
        if (result != 0) return result;
    }
    return 0;
}

/* ---- Reports --------------------------------------------------------------------------------- */

static int write_file(const struct report *report, const char *path,
                      void (*write)(const struct report *, struct text_buffer *),
                      struct error *error) {
    if (!path) return 0;
    struct text_buffer text = {0};
    write(report, &text);
    bool is_standard = strcmp(path, "-") == 0;
    FILE *file = is_standard ? stdout : fopen(path, "w");
    bool written = !text.failed && file && fwrite(text.data, 1, text.length, file) == text.length;
    if (file && (is_standard ? fflush(file) : fclose(file)) != 0) written = false;
    text_free(&text);
    return written ? 0 : error_set(error, FATHOM_IO, "%s: %s", path, strerror(errno));
}

static int write_reports(const struct report *report, struct error *error) {
    const struct bench_settings *settings = report->settings;
    bool uses_standard = (settings->json && strcmp(settings->json, "-") == 0) ||
                         (settings->csv && strcmp(settings->csv, "-") == 0) ||
                         (settings->html && strcmp(settings->html, "-") == 0);
    report_print_table(report, uses_standard ? stderr : stdout);
    int result = write_file(report, settings->json, report_write_json, error);
    if (result == 0) result = write_file(report, settings->csv, report_write_csv, error);
    if (result == 0) result = write_file(report, settings->html, report_write_html, error);
    return result;
}

static bool is_valid(const struct report *report) {
    size_t completed = 0;
    for (size_t i = 0; i < report->point_count; i++) {
        const struct run_records *records = &report->points[i].records;
        if (report->points[i].invalid[0]) return false;
        for (size_t j = 0; j < records->count; j++)
            completed += records->records[j].outcome == OUTCOME_COMPLETED;
    }
    return completed > 0;
}

int bench_run(const struct bench_settings *settings, bool *valid, struct error *error) {
    struct run_result points[POINTS_MAX] = {0};
    struct bench bench = {
        .settings = settings,
        .report = {.settings = settings, .points = points, .knee = -1},
    };
    signal(SIGPIPE, SIG_IGN); /* a connection that its server has left is an error like others */
    int result = load_check(&bench, error);
    if (result == 0) result = slo_parse(settings->slo, &bench.report.slo, error);
    if (result == 0) result = workload_open(&bench.workload, settings, error);
    if (result == 0)
        result = target_parse(settings->url, bench.workload.chat, &bench.target, error);
    if (result == 0) result = target_open(&bench.target, settings->insecure, error);
    if (result == 0) result = model_find(&bench, error);
    bench.workload.model = bench.report.model;
    if (result == 0) result = warm_up(&bench, error);
    if (result == 0) result = run_points(&bench, error);
    if (result == 0) result = write_reports(&bench.report, error);
    *valid = is_valid(&bench.report);
    for (size_t i = 0; i < bench.report.point_count; i++) run_result_free(&points[i]);
    workload_close(&bench.workload);
    target_close(&bench.target);
    free(bench.model);
    return result;
}
