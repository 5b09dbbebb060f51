#include "bench/report.h"

#include <math.h>
#include <string.h>

int report_find_knee(const struct report *report) {
    double best = 0;
    int knee = -1;
    for (size_t i = 0; i < report->point_count; i++) {
        const struct run_result *point = &report->points[i];
        if (point->concurrency) continue;
        struct summary all = summary_of(&point->records, -1, point->seconds, &report->slo);
        double power = (double)all.completed / point->seconds / all.latency.mean;
        if (!(power > best)) continue; /* also of a point without answers */
        best = power;
        knee = (int)i;
    }
    return knee;
}

/* ---- The table ------------------------------------------------------------------------------- */

static double rate(uint64_t count, double seconds) {
    return seconds > 0 ? (double)count / seconds : 0;
}

static void print_milliseconds(FILE *out, double seconds) {
    if (isfinite(seconds))
        fprintf(out, " %10.2f", seconds * 1e3);
    else
        fprintf(out, " %10s", "-");
}

static void print_distribution(FILE *out, const char *name, const struct distribution *d) {
    fprintf(out, "  %-10s", name);
    print_milliseconds(out, d->mean);
    print_milliseconds(out, d->p50);
    print_milliseconds(out, d->p90);
    print_milliseconds(out, d->p99);
    fprintf(out, "\n");
}

static void print_failures(FILE *out, const struct run_records *records,
                           const struct summary *summary) {
    for (int kind = 1; kind < FAILURE_KINDS; kind++) {
        if (summary->failures[kind] == 0) continue;
        fprintf(out, "  failed     %10zu %s", summary->failures[kind],
                failure_name((enum failure)kind));
        fprintf(out, records->details[kind][0] ? " (%s)\n" : "\n", records->details[kind]);
    }
}

static void print_point(const struct report *report, const struct run_result *point, FILE *out) {
    struct summary all = summary_of(&point->records, -1, point->seconds, &report->slo);
    fprintf(out, "\n%s: %.2f s, %zu requests: %zu completed, %zu failed, %zu cancelled\n",
            point->label, point->seconds, point->records.count, all.completed, all.failed,
            all.cancelled);
    print_failures(out, &point->records, &all);
    fprintf(out,
            "  requests/s %10.2f      tokens/s: output %.1f, total %.1f, prompts cached %.0f %%\n",
            rate(all.completed, point->seconds), rate(all.output_tokens, point->seconds),
            rate(all.output_tokens + all.prompt_tokens, point->seconds),
            all.prompt_tokens ? 100.0 * (double)all.cached_tokens / (double)all.prompt_tokens : 0);
    if (report->slo.given)
        fprintf(out, "  goodput/s  %10.2f      (%zu of %zu within --slo %s)\n",
                rate(all.good, point->seconds), all.good, point->records.count - all.cancelled,
                report->settings->slo);
    fprintf(out, "  %-10s %10s %10s %10s %10s\n", "ms", "mean", "p50", "p90", "p99");
    print_distribution(out, "TTFT", &all.ttft);
    print_distribution(out, "TPOT", &all.tpot);
    print_distribution(out, "ITL", &all.itl);
    print_distribution(out, "E2E", &all.latency);
    if (all.chunks && all.chunks != all.output_tokens)
        fprintf(out, "  ITL is between chunks, which held %.2f tokens each\n",
                (double)all.output_tokens / (double)all.chunks);
    if (point->held)
        fprintf(out, "  %zu requests waited for --max-in-flight; their wait is in the latency\n",
                point->held);
    fprintf(out, "  this program: late by %.2f ms (p99) and %.2f ms (most), busy %.0f %%\n",
            point->lag_p99 * 1e3, point->lag_max * 1e3, 100 * point->busy);
    if (point->invalid[0]) fprintf(out, "  NOT VALID: %s\n", point->invalid);
}

static void print_tiers(const struct report *report, const struct run_result *point, FILE *out) {
    if (point->records.tier_count < 2) return;
    fprintf(out, "  %-16s %9s %7s %9s %9s %10s %10s %10s\n", "tier", "completed", "failed", "req/s",
            "output/s", "TTFT p50", "TPOT p50", "E2E p50");
    for (size_t i = 0; i < point->records.tier_count; i++) {
        struct summary tier = summary_of(&point->records, (int)i, point->seconds, &report->slo);
        const char *name = point->records.tiers[i];
        fprintf(out, "  %-16s %9zu %7zu %9.2f %9.1f", *name ? name : "(none named)", tier.completed,
                tier.failed, rate(tier.completed, point->seconds),
                rate(tier.output_tokens, point->seconds));
        print_milliseconds(out, tier.ttft.p50);
        print_milliseconds(out, tier.tpot.p50);
        print_milliseconds(out, tier.latency.p50);
        fprintf(out, "\n");
    }
}

static void print_overview(const struct report *report, FILE *out) {
    fprintf(out, "\n%-20s %10s %10s %10s %10s %10s %7s\n", "point", "req/s", "output/s", "TTFT p50",
            "E2E p50", "E2E p99", "failed");
    for (size_t i = 0; i < report->point_count; i++) {
        const struct run_result *point = &report->points[i];
        struct summary all = summary_of(&point->records, -1, point->seconds, &report->slo);
        fprintf(out, "%-20s %10.2f %10.1f", point->label, rate(all.completed, point->seconds),
                rate(all.output_tokens, point->seconds));
        print_milliseconds(out, all.ttft.p50);
        print_milliseconds(out, all.latency.p50);
        print_milliseconds(out, all.latency.p99);
        fprintf(out, " %7zu%s%s\n", all.failed, (int)i == report->knee ? "  <- the knee" : "",
                point->invalid[0] ? "  NOT VALID" : "");
    }
}

void report_print_table(const struct report *report, FILE *out) {
    for (size_t i = 0; i < report->point_count; i++) {
        print_point(report, &report->points[i], out);
        print_tiers(report, &report->points[i], out);
    }
    if (report->point_count > 1) print_overview(report, out);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void json_number(struct text_buffer *out, const char *name, double value) {
    if (isfinite(value))
        text_append_format(out, ",\"%s\":%.9g", name, value);
    else
        text_append_format(out, ",\"%s\":null", name);
}

static void json_text(struct text_buffer *out, const char *name, const char *text) {
    text_append_format(out, "\"%s\":", name);
    text_append_json(out, text, strlen(text));
}

static void json_distribution(struct text_buffer *out, const char *name,
                              const struct distribution *d) {
    text_append_format(out, ",\"%s\":{\"count\":%zu", name, d->count);
    json_number(out, "mean", d->mean * 1e3);
    json_number(out, "p50", d->p50 * 1e3);
    json_number(out, "p90", d->p90 * 1e3);
    json_number(out, "p99", d->p99 * 1e3);
    text_append_string(out, "}");
}

static void json_summary(const struct report *report, const struct summary *summary,
                         struct text_buffer *out) {
    double seconds = summary->seconds;
    text_append_format(out, ",\"completed\":%zu,\"failed\":%zu,\"cancelled\":%zu,\"failures\":{",
                       summary->completed, summary->failed, summary->cancelled);
    const char *separator = "";
    for (int kind = 1; kind < FAILURE_KINDS; kind++) {
        if (summary->failures[kind] == 0) continue;
        text_append_format(out, "%s\"%s\":%zu", separator, failure_name((enum failure)kind),
                           summary->failures[kind]);
        separator = ",";
    }
    text_append_string(out, "}");
    json_number(out, "prompt_tokens", (double)summary->prompt_tokens);
    json_number(out, "output_tokens", (double)summary->output_tokens);
    json_number(out, "cached_tokens", (double)summary->cached_tokens);
    json_number(out, "chunks", (double)summary->chunks);
    json_number(out, "requests_per_second", rate(summary->completed, seconds));
    json_number(out, "output_tokens_per_second", rate(summary->output_tokens, seconds));
    json_number(out, "total_tokens_per_second",
                rate(summary->output_tokens + summary->prompt_tokens, seconds));
    if (report->slo.given) json_number(out, "good", (double)summary->good);
    if (report->slo.given) json_number(out, "goodput_per_second", rate(summary->good, seconds));
    json_distribution(out, "ttft_ms", &summary->ttft);
    json_distribution(out, "tpot_ms", &summary->tpot);
    json_distribution(out, "itl_ms", &summary->itl);
    json_distribution(out, "e2e_ms", &summary->latency);
}

static void json_point(const struct report *report, const struct run_result *point,
                       struct text_buffer *out) {
    struct summary all = summary_of(&point->records, -1, point->seconds, &report->slo);
    text_append_string(out, "{");
    json_text(out, "label", point->label);
    if (point->concurrency) json_number(out, "concurrency", (double)point->concurrency);
    if (!point->concurrency) json_number(out, "rate", point->rate);
    text_append_format(out, ",\"valid\":%s", point->invalid[0] ? "false" : "true");
    if (point->invalid[0]) {
        text_append_string(out, ",");
        json_text(out, "invalid", point->invalid);
    }
    json_number(out, "seconds", point->seconds);
    json_number(out, "lag_p99_ms", point->lag_p99 * 1e3);
    json_number(out, "lag_max_ms", point->lag_max * 1e3);
    json_number(out, "busy", point->busy);
    json_number(out, "held", (double)point->held);
    json_number(out, "connections", (double)point->connects);
    json_summary(report, &all, out);
    text_append_string(out, ",\"tiers\":[");
    for (size_t i = 0; i < point->records.tier_count; i++) {
        struct summary tier = summary_of(&point->records, (int)i, point->seconds, &report->slo);
        text_append_string(out, i ? ",{" : "{");
        json_text(out, "quality", point->records.tiers[i]);
        json_summary(report, &tier, out);
        text_append_string(out, "}");
    }
    text_append_string(out, "]}");
}

void report_write_json(const struct report *report, struct text_buffer *out) {
    text_append_string(out, "{");
    json_text(out, "fathom_version", FATHOM_VERSION);
    text_append_string(out, ",");
    json_text(out, "url", report->settings->url);
    text_append_string(out, ",");
    json_text(out, "model", report->model);
    text_append_format(out, ",\"seed\":%llu,\"knee\":", (unsigned long long)report->settings->seed);
    if (report->knee >= 0)
        text_append_json(out, report->points[report->knee].label,
                         strlen(report->points[report->knee].label));
    else
        text_append_string(out, "null");
    text_append_string(out, ",\"points\":[");
    for (size_t i = 0; i < report->point_count; i++) {
        if (i) text_append_string(out, ",\n");
        json_point(report, &report->points[i], out);
    }
    text_append_string(out, "]}\n");
}

/* ---- CSV ------------------------------------------------------------------------------------- */

/* Tiers and labels have no quotes to escape but what a server invents: those become '. */
static void csv_text(struct text_buffer *out, const char *text) {
    text_append_string(out, "\"");
    for (; *text; text++) text_append(out, *text == '"' ? "'" : text, 1);
    text_append_string(out, "\"");
}

static void csv_number(struct text_buffer *out, double value) {
    text_append_string(out, ",");
    if (isfinite(value)) text_append_format(out, "%.6f", value);
}

void report_write_csv(const struct report *report, struct text_buffer *out) {
    static const char *const outcomes[] = {"completed", "failed", "cancelled"};
    text_append_string(out, "point,conversation,turn,quality,outcome,failure,status,start_s,ttft_s,"
                            "tpot_s,e2e_s,prompt_tokens,output_tokens,cached_tokens,chunks\n");
    for (size_t i = 0; i < report->point_count; i++) {
        const struct run_result *point = &report->points[i];
        for (size_t j = 0; j < point->records.count; j++) {
            const struct record *record = &point->records.records[j];
            csv_text(out, point->label);
            text_append_format(out, ",%llu,%u,", (unsigned long long)record->conversation,
                               record->turn);
            csv_text(out, point->records.tiers[record->tier]);
            text_append_format(out, ",%s,%s,%d", outcomes[record->outcome],
                               failure_name(record->failure), record->status);
            csv_number(out, record->start);
            csv_number(out, record->ttft);
            csv_number(out, record->tpot);
            csv_number(out, record->latency);
            text_append_format(out, ",%u,%u,%u,%u\n", record->prompt_tokens, record->output_tokens,
                               record->cached_tokens, record->chunks);
        }
    }
}
