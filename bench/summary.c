#include "bench/summary.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Records --------------------------------------------------------------------------------- */

void run_records_free(struct run_records *records) {
    free(records->records);
    free(records->gaps);
    *records = (struct run_records){0};
}

uint32_t run_records_tier(struct run_records *records, const char *name) {
    uint32_t i = 0;
    while (i < records->tier_count && strcmp(records->tiers[i], name) != 0) i++;
    if (i < records->tier_count) return i;
    if (i == GROUPS_MAX) return GROUPS_MAX - 1;
    if (i == GROUPS_MAX - 1) name = "others";
    strncpy(records->tiers[i], name, ANSWER_QUALITY_MAX - 1);
    records->tier_count++;
    return i;
}

/* Room for `more` further items. */
static void *grow(void *items, size_t item_size, size_t count, size_t more, size_t *capacity) {
    size_t needed, bytes;
    if (!size_add(count, more, &needed)) return NULL;
    if (needed <= *capacity) return items;
    size_t enlarged = *capacity ? *capacity : 1024;
    while (enlarged < needed) {
        if (!size_multiply(enlarged, 2, &enlarged)) return NULL;
    }
    if (!size_multiply(enlarged, item_size, &bytes)) return NULL;
    void *grown = realloc(items, bytes);
    if (grown) *capacity = enlarged;
    return grown;
}

void record_measure(struct record *record, const struct answer *answer, uint64_t started_ns,
                    uint64_t ended_ns) {
    uint64_t last_ns = answer->is_stream && answer->last_ns ? answer->last_ns : ended_ns;
    record->ttft = record->tpot = NAN;
    record->latency = (double)(last_ns - started_ns) / 1e9;
    if (answer->first_ns == 0) return;
    record->ttft = (double)(answer->first_ns - started_ns) / 1e9;
    if (answer->output_tokens > 1)
        record->tpot = (record->latency - record->ttft) / (double)(answer->output_tokens - 1);
}

void run_records_add(struct run_records *records, const struct record *partial,
                     const struct answer *answer, const char *asked) {
    struct record *grown =
        grow(records->records, sizeof *grown, records->count, 1, &records->capacity);
    float *gaps = NULL;
    if (grown) records->records = grown;
    if (grown)
        gaps = grow(records->gaps, sizeof *gaps, records->gap_count, answer->gap_count + 1,
                    &records->gap_capacity);
    if (gaps) records->gaps = gaps;
    if (!gaps) {
        records->failed = true;
        return;
    }
    struct record *record = &records->records[records->count++];
    *record = *partial;
    record->status = answer->status;
    record->prompt_tokens = (uint32_t)answer->prompt_tokens;
    record->output_tokens = (uint32_t)answer->output_tokens;
    record->cached_tokens = (uint32_t)answer->cached_tokens;
    record->chunks = (uint32_t)answer->chunks;
    record->tier = run_records_tier(records, answer->quality[0] ? answer->quality
                                             : asked            ? asked
                                                                : "");
    record->gap_first = records->gap_count;
    record->gap_count = answer->gap_count;
    if (answer->gap_count)
        memcpy(gaps + records->gap_count, answer->gaps, answer->gap_count * sizeof *gaps);
    records->gap_count += answer->gap_count;
    if (record->outcome == OUTCOME_FAILED && !records->details[record->failure][0])
        memcpy(records->details[record->failure], answer->detail, sizeof answer->detail);
}

/* ---- Statistics ------------------------------------------------------------------------------ */

double percentile(const double *sorted, size_t count, double percent) {
    if (count == 0) return NAN;
    double rank = percent / 100 * (double)(count - 1);
    size_t below = (size_t)rank;
    if (below + 1 >= count) return sorted[count - 1];
    return sorted[below] + (rank - (double)below) * (sorted[below + 1] - sorted[below]);
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct distribution distribution_of(double *values, size_t count) {
    struct distribution result = {.count = count, .mean = NAN};
    if (count) qsort(values, count, sizeof *values, compare);
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += values[i];
    if (count) result.mean = sum / (double)count;
    result.p50 = percentile(values, count, 50);
    result.p90 = percentile(values, count, 90);
    result.p99 = percentile(values, count, 99);
    return result;
}

int slo_parse(const char *text, struct slo *slo, struct error *error) {
    *slo = (struct slo){INFINITY, INFINITY, INFINITY, false};
    const struct {
        const char *name;
        double *limit;
    } limits[] = {{"ttft:", &slo->ttft}, {"tpot:", &slo->tpot}, {"e2e:", &slo->latency}};
    while (text && *text) {
        size_t i = 0;
        while (i < 3 && strncmp(text, limits[i].name, strlen(limits[i].name)) != 0) i++;
        char *end = NULL;
        double milliseconds = i < 3 ? strtod(text + strlen(limits[i].name), &end) : NAN;
        if (!isfinite(milliseconds) || milliseconds <= 0 || (*end && *end != ',')) {
            return error_set(error, FATHOM_INVALID,
                             "--slo must be ttft:MS,tpot:MS,e2e:MS or some of them, above 0; it is "
                             "wrong at '%s'",
                             text);
        }
        *limits[i].limit = milliseconds / 1e3;
        slo->given = true;
        text = end + (*end == ',');
    }
    return 0;
}

/* What was not measured (no stream, one token) breaks no limit. */
static bool is_good(const struct record *record, const struct slo *slo) {
    return !(record->ttft > slo->ttft) && !(record->tpot > slo->tpot) &&
           !(record->latency > slo->latency);
}

/* The values of one measure of the completed requests of a tier. */
static struct distribution measure(const struct run_records *records, int tier, size_t offset,
                                   double *values) {
    size_t count = 0;
    for (size_t i = 0; i < records->count; i++) {
        const struct record *record = &records->records[i];
        double value = *(const double *)((const char *)record + offset);
        if (record->outcome != OUTCOME_COMPLETED || isnan(value)) continue;
        if (tier < 0 || record->tier == (uint32_t)tier) values[count++] = value;
    }
    return distribution_of(values, count);
}

static struct distribution measure_gaps(const struct run_records *records, int tier,
                                        double *values) {
    size_t count = 0;
    for (size_t i = 0; i < records->count; i++) {
        const struct record *record = &records->records[i];
        if (record->outcome != OUTCOME_COMPLETED) continue;
        if (tier >= 0 && record->tier != (uint32_t)tier) continue;
        for (size_t j = 0; j < record->gap_count; j++)
            values[count++] = (double)records->gaps[record->gap_first + j];
    }
    return distribution_of(values, count);
}

struct summary summary_of(const struct run_records *records, int tier, double seconds,
                          const struct slo *slo) {
    struct summary summary = {.seconds = seconds};
    for (size_t i = 0; i < records->count; i++) {
        const struct record *record = &records->records[i];
        if (tier >= 0 && record->tier != (uint32_t)tier) continue;
        summary.failed += record->outcome == OUTCOME_FAILED;
        summary.cancelled += record->outcome == OUTCOME_CANCELLED;
        if (record->outcome == OUTCOME_FAILED) summary.failures[record->failure]++;
        if (record->outcome != OUTCOME_COMPLETED) continue;
        summary.completed++;
        summary.good += is_good(record, slo);
        summary.prompt_tokens += record->prompt_tokens;
        summary.output_tokens += record->output_tokens;
        summary.cached_tokens += record->cached_tokens;
        summary.chunks += record->chunks;
    }
    size_t most = records->count > records->gap_count ? records->count : records->gap_count;
    double *values = calloc(most + 1, sizeof *values);
    if (!values) return summary;
    summary.ttft = measure(records, tier, offsetof(struct record, ttft), values);
    summary.tpot = measure(records, tier, offsetof(struct record, tpot), values);
    summary.latency = measure(records, tier, offsetof(struct record, latency), values);
    summary.itl = measure_gaps(records, tier, values);
    free(values);
    return summary;
}
