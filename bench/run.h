/* One point of a benchmark: a load, kept up for a number of requests or a time. */
#ifndef FATHOM_BENCH_RUN_H
#define FATHOM_BENCH_RUN_H

#include <uv.h>

#include "bench/client.h"
#include "bench/summary.h"
#include "bench/workload.h"

struct run_plan {
    const struct bench_settings *settings;
    const struct workload *workload;
    const struct target *target;
    char label[48];        /* "concurrency 8", "rate 2.5" */
    size_t concurrency;    /* closed loop; 0: open */
    double rate;           /* open loop: conversations per second */
    size_t requests;       /* 0: until the duration is over */
    double duration;       /* of starting requests; 0: until the number is reached */
    uint64_t conversation; /* number of the first: each point asks something new */
};

struct run_result {
    char label[48];
    size_t concurrency;
    double rate;
    double seconds; /* from the first request to the last answer */
    struct run_records records;
    size_t started, held; /* held: requests that waited for --max-in-flight */
    size_t connects;
    double lag_p99, lag_max; /* seconds that our own timer came late */
    double busy;             /* processor time of this thread / seconds */
    bool interrupted;        /* by SIGINT or SIGTERM */
    char invalid[160];       /* why the figures are not the server's; empty: they are */
};

int run_execute(const struct run_plan *plan, struct run_result *result, struct error *error);
void run_result_free(struct run_result *result);

#endif
