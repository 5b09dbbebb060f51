/* What a run's records come to: counts, rates, distributions, goodput; of all and per tier.
 * Pure. */
#ifndef FATHOM_BENCH_SUMMARY_H
#define FATHOM_BENCH_SUMMARY_H

#include "bench/answer.h"

enum { GROUPS_MAX = 17 }; /* tiers that are told apart; further ones share the last */

enum outcome { OUTCOME_COMPLETED, OUTCOME_FAILED, OUTCOME_CANCELLED };

/* One request. Times in seconds; NAN where there is none. */
struct record {
    uint64_t conversation;
    double start, ttft, tpot, latency; /* start: since the run began */
    size_t gap_first, gap_count;       /* into run_records.gaps */
    uint32_t turn, prompt_tokens, output_tokens, cached_tokens, chunks;
    enum outcome outcome;
    enum failure failure;
    int status;
    uint32_t tier; /* index into run_records.tiers */
};

/* All of one run. */
struct run_records {
    struct record *records;
    float *gaps;
    size_t count, capacity, gap_count, gap_capacity;
    char tiers[GROUPS_MAX][ANSWER_QUALITY_MAX];
    size_t tier_count;
    char details[FAILURE_KINDS][120]; /* of the first failure of each kind */
    bool failed;                      /* memory ran out: records are missing */
};

void run_records_free(struct run_records *records);

/* Index of a tier's name, added when it is new. "": the server named none. */
uint32_t run_records_tier(struct run_records *records, const char *name);

/* Adds what became of a request. `asked` is the tier that was asked for, or NULL: it stands where
 * the answer names none. */
void run_records_add(struct run_records *records, const struct record *partial,
                     const struct answer *answer, const char *asked);

/* TTFT, TPOT and latency from an answer's times. `ended_ns` ends an answer without a stream. */
void record_measure(struct record *record, const struct answer *answer, uint64_t started_ns,
                    uint64_t ended_ns);

/* Linear interpolation between closest ranks, as numpy's default; values are ascending. */
double percentile(const double *sorted, size_t count, double percent);

struct distribution {
    size_t count; /* 0: the rest is NAN */
    double mean, p50, p90, p99;
};
struct distribution distribution_of(double *values, size_t count); /* sorts them */

/* Upper limits in seconds; INFINITY: none. */
struct slo {
    double ttft, tpot, latency;
    bool given;
};
int slo_parse(const char *text, struct slo *slo, struct error *error);

struct summary {
    size_t completed, failed, cancelled, good, failures[FAILURE_KINDS];
    uint64_t prompt_tokens, output_tokens, cached_tokens, chunks; /* of completed requests */
    double seconds;
    struct distribution ttft, tpot, itl, latency; /* of completed requests */
};

/* tier < 0: all. `seconds` is the run's duration. */
struct summary summary_of(const struct run_records *records, int tier, double seconds,
                          const struct slo *slo);

#endif
