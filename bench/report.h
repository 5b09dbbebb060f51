/* Results for people and for programs. */
#ifndef FATHOM_BENCH_REPORT_H
#define FATHOM_BENCH_REPORT_H

#include <stdio.h>

#include "bench/run.h"

/* All points of a benchmark. */
struct report {
    const struct bench_settings *settings;
    const char *model;
    struct slo slo;
    struct run_result *points;
    size_t point_count;
    int knee; /* index of a sweep's knee, or -1 */
};

void report_print_table(const struct report *report, FILE *out);
void report_write_json(const struct report *report, struct text_buffer *out);
void report_write_csv(const struct report *report, struct text_buffer *out); /* a line a request */
void report_write_html(const struct report *report, struct text_buffer *out);

/* The open point with the most throughput per latency (Kleinrock's power); -1: there is none. */
int report_find_knee(const struct report *report);

#endif
