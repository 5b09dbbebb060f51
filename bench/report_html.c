/* One self-contained page: figures and plots as inline SVG, nothing fetched. Everything that a
 * server or a user named is escaped. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/report.h"

enum {
    PLOT_WIDTH = 640,
    PLOT_HEIGHT = 300,
    PLOT_LEFT = 70,
    PLOT_RIGHT = 16,
    PLOT_TOP = 12,
    PLOT_BOTTOM = 44,
    TICKS = 5,
    DOTS_MAX = 2000, /* of one series; more are thinned evenly */
};

static const char style[] =
    ":root{color-scheme:light dark;--ink:#1b2733;--soft:#66788a;--line:#d8e0e8;--page:#fff;"
    "--a:#0b62a8;--b:#c2410c;--c:#15803d;--d:#7e22ce}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#93a4b5;--line:#2c3a47;"
    "--page:#10171e;--a:#5cb0f2;--b:#fb923c;--c:#4ade80;--d:#c084fc}}"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);"
    "max-width:1000px;margin:2rem auto;padding:0 1rem}"
    "h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}"
    "p{margin:.3rem 0;color:var(--soft)}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.25rem .7rem;text-align:right;white-space:nowrap;border-bottom:1px solid "
    "var(--line)}"
    "th:first-child,td:first-child{text-align:left}th{font-weight:600}"
    ".bad{color:var(--b)}svg{width:100%;max-width:720px;height:auto;display:block}"
    "svg text{fill:var(--soft);font:12px system-ui,sans-serif}"
    ".axis{stroke:var(--line);fill:none}.s0{color:var(--a)}.s1{color:var(--b)}.s2{color:var(--c)}"
    ".s3{color:var(--d)}.dot{fill:currentColor;fill-opacity:.55}"
    ".bar{fill:currentColor}.path{stroke:currentColor;fill:none;stroke-width:2}"
    "svg text.key{fill:currentColor}";

static void html_text(struct text_buffer *out, const char *text) {
    for (; *text; text++) {
        switch (*text) {
        case '<':
            text_append_string(out, "&lt;");
            break;
        case '>':
            text_append_string(out, "&gt;");
            break;
        case '&':
            text_append_string(out, "&amp;");
            break;
        case '"':
            text_append_string(out, "&quot;");
            break;
        default:
            text_append(out, text, 1);
        }
    }
}

/* ---- Plots ----------------------------------------------------------------------------------- */

struct plot {
    struct text_buffer *out;
    double x_max, y_max; /* both axes begin at 0 */
};

/* The round number (1, 2 or 5 times a power of ten) from which TICKS steps cover `most`. */
static double axis_end(double most) {
    if (!(most > 0)) return TICKS;
    double step = most / TICKS, power = pow(10, floor(log10(step)));
    double factor = step / power;
    return TICKS * power * (factor <= 1 ? 1 : factor <= 2 ? 2 : factor <= 5 ? 5 : 10);
}

static double plot_x(const struct plot *plot, double x) {
    return PLOT_LEFT + x / plot->x_max * (PLOT_WIDTH - PLOT_LEFT - PLOT_RIGHT);
}

static double plot_y(const struct plot *plot, double y) {
    return PLOT_HEIGHT - PLOT_BOTTOM - y / plot->y_max * (PLOT_HEIGHT - PLOT_TOP - PLOT_BOTTOM);
}

static void plot_begin(struct plot *plot, struct text_buffer *out, double x_most, double y_most,
                       const char *x_name, const char *y_name) {
    *plot = (struct plot){out, axis_end(x_most), axis_end(y_most)};
    text_append_format(out, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s over %s\">",
                       PLOT_WIDTH, PLOT_HEIGHT, y_name, x_name);
    for (int i = 0; i <= TICKS; i++) {
        double x = plot->x_max * i / TICKS, y = plot->y_max * i / TICKS;
        text_append_format(out, "<path class=\"axis\" d=\"M%d %.1fH%d\"/>", PLOT_LEFT,
                           plot_y(plot, y), PLOT_WIDTH - PLOT_RIGHT);
        text_append_format(out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g</text>",
                           PLOT_LEFT - 6, plot_y(plot, y) + 4, y);
        text_append_format(out, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%g</text>",
                           plot_x(plot, x), PLOT_HEIGHT - PLOT_BOTTOM + 16, x);
    }
    text_append_format(out, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>",
                       (PLOT_LEFT + PLOT_WIDTH) / 2, PLOT_HEIGHT - 8, x_name);
    text_append_format(out,
                       "<text transform=\"translate(14 %d) rotate(-90)\" text-anchor=\"middle\">"
                       "%s</text>",
                       (PLOT_HEIGHT - PLOT_BOTTOM) / 2, y_name);
}

static void plot_key(const struct plot *plot, int series, const char *name) {
    text_append_format(plot->out, "<text class=\"key s%d\" x=\"%d\" y=\"%d\">&#9679; ", series % 4,
                       PLOT_LEFT + 10, PLOT_TOP + 14 + 16 * series);
    html_text(plot->out, name);
    text_append_string(plot->out, "</text>");
}

static void plot_dot(const struct plot *plot, int series, double x, double y, double radius) {
    if (!isfinite(x) || !isfinite(y)) return;
    text_append_format(plot->out, "<circle class=\"dot s%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"%g\"/>",
                       series % 4, plot_x(plot, x), plot_y(plot, y), radius);
}

static void plot_end(const struct plot *plot) {
    text_append_string(plot->out, "</svg>\n");
}

/* ---- Throughput against latency -------------------------------------------------------------- */

static double latency_of(const struct summary *summary, int series) {
    return 1e3 * (series == 0   ? summary->latency.p50
                  : series == 1 ? summary->latency.p99
                                : summary->ttft.p50);
}

static void write_throughput(const struct summary *all, size_t count, struct text_buffer *out) {
    static const char *const names[] = {"E2E p50", "E2E p99", "TTFT p50"};
    double x_most = 0, y_most = 0;
    for (size_t i = 0; i < count; i++) {
        x_most = fmax(x_most, (double)all[i].output_tokens / all[i].seconds);
        y_most = fmax(y_most, latency_of(&all[i], 1)); /* fmax ignores a NAN */
    }
    struct plot plot;
    text_append_string(out, "<h2>Throughput against latency</h2>\n");
    plot_begin(&plot, out, x_most, y_most, "output tokens/s", "ms");
    for (int series = 0; series < 3; series++) {
        plot_key(&plot, series, names[series]);
        text_append_format(out, "<path class=\"path s%d\" d=\"", series);
        char command = 'M';
        for (size_t i = 0; i < count; i++) {
            double y = latency_of(&all[i], series);
            if (!isfinite(y)) continue;
            text_append_format(out, "%c%.1f %.1f", command,
                               plot_x(&plot, (double)all[i].output_tokens / all[i].seconds),
                               plot_y(&plot, y));
            command = 'L';
        }
        text_append_string(out, "\"/>");
        for (size_t i = 0; i < count; i++)
            plot_dot(&plot, series, (double)all[i].output_tokens / all[i].seconds,
                     latency_of(&all[i], series), 4);
    }
    plot_end(&plot);
}

/* ---- Latency over time ----------------------------------------------------------------------- */

static void write_over_time(const struct run_result *point, struct text_buffer *out) {
    const struct run_records *records = &point->records;
    double x_most = 0, y_most = 0;
    for (size_t i = 0; i < records->count; i++) {
        if (records->records[i].outcome != OUTCOME_COMPLETED) continue;
        x_most = fmax(x_most, records->records[i].start);
        y_most = fmax(y_most, records->records[i].latency * 1e3);
    }
    struct plot plot;
    size_t stride = records->count / DOTS_MAX + 1;
    text_append_string(out, "<h2>Latency over time: ");
    html_text(out, point->label);
    text_append_string(out, "</h2>\n");
    plot_begin(&plot, out, x_most, y_most, "s since the start, when the request was sent", "ms");
    plot_key(&plot, 0, "E2E");
    plot_key(&plot, 1, "TTFT");
    for (size_t i = 0; i < records->count; i += stride) {
        const struct record *record = &records->records[i];
        if (record->outcome != OUTCOME_COMPLETED) continue;
        plot_dot(&plot, 0, record->start, record->latency * 1e3, 2.5);
        plot_dot(&plot, 1, record->start, record->ttft * 1e3, 2.5);
    }
    plot_end(&plot);
}

/* ---- Tiers side by side ---------------------------------------------------------------------- */

static void write_bars(const struct run_records *records, const struct summary *tiers,
                       const char *title, size_t offset, struct text_buffer *out) {
    enum { BAR_HEIGHT = 22, NAME_WIDTH = 130 };
    double most = 0;
    for (size_t i = 0; i < records->tier_count; i++) {
        const struct distribution *d = (const void *)((const char *)&tiers[i] + offset);
        most = fmax(most, d->p90);
    }
    text_append_format(out, "<p>%s: p50 (full) and p90 (pale), ms</p>\n", title);
    text_append_format(out, "<svg viewBox=\"0 0 %d %zu\" role=\"img\" aria-label=\"%s per tier\">",
                       PLOT_WIDTH, records->tier_count * BAR_HEIGHT + 6, title);
    for (size_t i = 0; i < records->tier_count; i++) {
        const struct distribution *d = (const void *)((const char *)&tiers[i] + offset);
        size_t y = i * BAR_HEIGHT + 4;
        double scale = most > 0 ? (PLOT_WIDTH - NAME_WIDTH - 150) / most : 0;
        text_append_format(out, "<text x=\"%d\" y=\"%zu\" text-anchor=\"end\">", NAME_WIDTH - 8,
                           y + 13);
        html_text(out, records->tiers[i][0] ? records->tiers[i] : "(none named)");
        text_append_string(out, "</text>");
        if (d->count == 0) continue;
        text_append_format(out,
                           "<rect class=\"bar s%zu\" opacity=\".35\" x=\"%d\" y=\"%zu\" "
                           "width=\"%.1f\" height=\"16\"/><rect class=\"bar s%zu\" x=\"%d\" "
                           "y=\"%zu\" width=\"%.1f\" height=\"16\"/>",
                           i % 4, NAME_WIDTH, y, d->p90 * scale, i % 4, NAME_WIDTH, y,
                           d->p50 * scale);
        text_append_format(out, "<text x=\"%.1f\" y=\"%zu\">%.2f / %.2f</text>",
                           NAME_WIDTH + d->p90 * scale + 6, y + 13, d->p50 * 1e3, d->p90 * 1e3);
    }
    text_append_string(out, "</svg>\n");
}

static void write_tiers(const struct report *report, const struct run_result *point,
                        struct text_buffer *out) {
    if (point->records.tier_count < 2) return;
    struct summary tiers[GROUPS_MAX];
    for (size_t i = 0; i < point->records.tier_count; i++)
        tiers[i] = summary_of(&point->records, (int)i, point->seconds, &report->slo);
    text_append_string(out, "<h2>Tiers side by side: ");
    html_text(out, point->label);
    text_append_string(out, "</h2>\n");
    write_bars(&point->records, tiers, "TTFT", offsetof(struct summary, ttft), out);
    write_bars(&point->records, tiers, "TPOT", offsetof(struct summary, tpot), out);
    write_bars(&point->records, tiers, "E2E", offsetof(struct summary, latency), out);
}

/* ---- The table ------------------------------------------------------------------------------- */

static void html_milliseconds(struct text_buffer *out, double seconds) {
    if (isfinite(seconds))
        text_append_format(out, "<td>%.2f</td>", seconds * 1e3);
    else
        text_append_string(out, "<td>&ndash;</td>");
}

static void write_row(const struct report *report, size_t index, const struct summary *all,
                      struct text_buffer *out) {
    const struct run_result *point = &report->points[index];
    text_append_string(out, "<tr><td>");
    html_text(out, point->label);
    if ((int)index == report->knee) text_append_string(out, " &larr; knee");
    text_append_format(out, "</td><td>%zu</td><td%s>%zu</td><td>%.2f</td><td>%.1f</td>",
                       all->completed, all->failed ? " class=\"bad\"" : "", all->failed,
                       (double)all->completed / all->seconds,
                       (double)all->output_tokens / all->seconds);
    if (report->slo.given)
        text_append_format(out, "<td>%.2f</td>", (double)all->good / all->seconds);
    html_milliseconds(out, all->ttft.p50);
    html_milliseconds(out, all->ttft.p99);
    html_milliseconds(out, all->tpot.p50);
    html_milliseconds(out, all->itl.p50);
    html_milliseconds(out, all->itl.p99);
    html_milliseconds(out, all->latency.p50);
    html_milliseconds(out, all->latency.p99);
    text_append_string(out, point->invalid[0] ? "<td class=\"bad\">no</td></tr>\n"
                                              : "<td>yes</td></tr>\n");
}

static void write_table(const struct report *report, const struct summary *all,
                        struct text_buffer *out) {
    text_append_string(out, "<div class=\"wide\"><table><tr><th>point</th><th>completed</th>"
                            "<th>failed</th><th>requests/s</th><th>output tokens/s</th>");
    if (report->slo.given) text_append_string(out, "<th>goodput/s</th>");
    text_append_string(out, "<th>TTFT p50</th><th>p99</th><th>TPOT p50</th><th>ITL p50</th>"
                            "<th>p99</th><th>E2E p50</th><th>p99</th><th>valid</th></tr>\n");
    for (size_t i = 0; i < report->point_count; i++) write_row(report, i, &all[i], out);
    text_append_string(out, "</table></div>\n");
    for (size_t i = 0; i < report->point_count; i++) {
        if (!report->points[i].invalid[0]) continue;
        text_append_string(out, "<p class=\"bad\">Not valid: ");
        html_text(out, report->points[i].label);
        text_append_string(out, ": ");
        html_text(out, report->points[i].invalid);
        text_append_string(out, "</p>\n");
    }
}

void report_write_html(const struct report *report, struct text_buffer *out) {
    struct summary *all = calloc(report->point_count + 1, sizeof *all);
    if (!all) {
        out->failed = true;
        return;
    }
    for (size_t i = 0; i < report->point_count; i++) {
        const struct run_result *point = &report->points[i];
        all[i] = summary_of(&point->records, -1, point->seconds, &report->slo);
    }
    text_append_format(out,
                       "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
                       "<meta name=\"viewport\" content=\"width=device-width\">"
                       "<title>fathom bench</title><style>%s</style></head><body>\n<h1>",
                       style);
    html_text(out, report->model);
    text_append_string(out, "</h1>\n<p>");
    html_text(out, report->settings->url);
    text_append_format(out,
                       " &middot; fathom bench %s &middot; seed %llu &middot; times in ms</p>\n",
                       FATHOM_VERSION, (unsigned long long)report->settings->seed);
    write_table(report, all, out);
    if (report->point_count > 1) write_throughput(all, report->point_count, out);
    for (size_t i = 0; i < report->point_count; i++) {
        write_tiers(report, &report->points[i], out);
        write_over_time(&report->points[i], out);
    }
    text_append_string(out, "</body></html>\n");
    free(all);
}
