/* Counters and histograms, and their Prometheus text. Loop thread only.
 *
 * Names are ours, meanings and bucket edges are those of vLLM, so that its dashboards need only a
 * new prefix. Per-request figures carry the tier as the label `quality`.
 */
#ifndef FATHOM_METRICS_H
#define FATHOM_METRICS_H

#include "api/api.h"

#define HISTOGRAM_EDGES_MAX 24

enum histogram_edges { EDGES_FIRST_TOKEN, EDGES_INTER_TOKEN, EDGES_REQUEST };

/* Seconds. counts[i]: observations up to edge i and above edge i - 1; the last one is +Inf. */
struct histogram {
    enum histogram_edges edges;
    uint64_t counts[HISTOGRAM_EDGES_MAX + 1];
    uint64_t count;
    double sum;
};

struct request_metrics {
    struct histogram time_to_first_token, inter_token, end_to_end, queue, prefill, decode;
    uint64_t finished[FINISH_REASONS]; /* choices, by enum finish_reason; cancelled: requests */
};

#define STATUS_CODES 600

struct metrics {
    struct request_metrics tiers[TIERS_MAX];
    uint64_t auto_choices[TIERS_MAX][AUTO_REASONS];
    uint64_t responses[STATUS_CODES]; /* by HTTP status; 499: the client left first */
    uint64_t choices_cancelled;       /* not those that a stop string ended */
    struct histogram loop_lag;        /* how late the loop comes to what is due */
};

void metrics_init(struct metrics *metrics);
void metrics_count_response(struct metrics *metrics, int status);
void histogram_observe_ns(struct histogram *histogram, uint64_t nanoseconds);

struct server;
void metrics_write(struct server *server, struct text_buffer *out);

#endif
