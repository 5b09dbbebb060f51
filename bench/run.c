#include "bench/run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench/arrivals.h"

enum {
    BEAT_MS = 10,       /* of the timer that measures our own lateness */
    TIMEOUT_BEATS = 10, /* between looks for answers that take too long */
    PROGRESS_BEATS = 20,
};
#define BUSY_MAX     0.9 /* a loop busier than this measures itself */
#define BUSY_SECONDS 0.5 /* a shorter run says nothing about it */

/* A conversation under way: its turns go out one after another. */
struct conversation {
    struct run *run;
    uint64_t number;
    size_t turn;
    uint64_t due_ns; /* when it should have gone out, of one that is held */
    struct workload_request request;
    struct conversation *next; /* of those held, or those unused */
};

struct run {
    const struct run_plan *plan;
    struct run_result *result;
    uv_loop_t loop;
    uv_timer_t beat, arrival;
    uv_signal_t interrupt, terminate;
    struct client client;
    struct arrivals arrivals;
    uint64_t next_conversation;
    uint64_t start_ns, last_ns, beat_ns, processor_ns;
    uint64_t beats, output_tokens, failures;
    float *lags;
    size_t lag_count, lag_capacity;
    struct text_buffer body, message;
    struct conversation *unused, *held_first, **held_last;
    bool ended;
};

static void start_turn(struct conversation *conversation, uint64_t started_ns);
static void run_end_if_idle(struct run *run);

/* ---- Starting requests ----------------------------------------------------------------------- */

static bool may_start(const struct run *run) {
    const struct run_plan *plan = run->plan;
    if (run->ended || run->result->interrupted || run->result->records.failed) return false;
    if (plan->requests && run->result->started >= plan->requests) return false;
    double elapsed = (double)(time_now_ns() - run->start_ns) / 1e9;
    return plan->duration <= 0 || elapsed < plan->duration;
}

static struct conversation *conversation_take(struct run *run) {
    struct conversation *conversation = run->unused;
    if (conversation)
        run->unused = conversation->next;
    else
        conversation = malloc(sizeof *conversation);
    if (!conversation) {
        run->result->records.failed = true;
        return NULL;
    }
    *conversation = (struct conversation){.run = run, .number = run->next_conversation++};
    return conversation;
}

static void conversation_leave(struct conversation *conversation) {
    conversation->next = conversation->run->unused;
    conversation->run->unused = conversation;
}

static void start_conversation(struct run *run) {
    struct conversation *conversation = conversation_take(run);
    if (conversation) start_turn(conversation, time_now_ns());
}

/* An open loop's request that finds --max-in-flight under way waits; its wait counts. */
static void hold(struct run *run, struct conversation *conversation) {
    conversation->due_ns = time_now_ns();
    conversation->next = NULL;
    *run->held_last = conversation;
    run->held_last = &conversation->next;
    run->result->held++;
    run->result->started++;
}

static void start_held(struct run *run) {
    struct conversation *conversation = run->held_first;
    if (!conversation) return;
    run->held_first = conversation->next;
    if (!run->held_first) run->held_last = &run->held_first;
    run->result->started--; /* it is counted again where it starts */
    start_turn(conversation, conversation->due_ns);
}

static void write_message(struct run *run, struct conversation *conversation) {
    const struct target *target = run->plan->target;
    const char *key = run->plan->settings->api_key;
    bool is_v6 = strchr(target->host, ':') != NULL;
    struct text_buffer *message = &run->message;
    run->body.length = message->length = 0;
    workload_write(run->plan->workload, conversation->number, conversation->turn, &run->body,
                   &conversation->request);
    text_append_format(message, "POST %s HTTP/1.1\r\nHost: %s%s%s:%s\r\n", target->path,
                       is_v6 ? "[" : "", target->host, is_v6 ? "]" : "", target->port);
    if (key) text_append_format(message, "Authorization: Bearer %s\r\n", key);
    text_append_format(message,
                       "Content-Type: application/json\r\nUser-Agent: fathom-bench/%s\r\n"
                       "Content-Length: %zu\r\n\r\n",
                       FATHOM_VERSION, run->body.length);
    text_append(message, run->body.data, run->body.length);
    if (run->body.failed || message->failed) run->result->records.failed = true;
}

static void start_turn(struct conversation *conversation, uint64_t started_ns) {
    struct run *run = conversation->run;
    write_message(run, conversation);
    run->result->started++;
    if (run->result->records.failed ||
        !client_send(&run->client, &run->message, conversation->request.cancel_after, started_ns,
                     conversation)) {
        run->result->records.failed = true;
        conversation_leave(conversation);
    }
}

/* ---- An answer came -------------------------------------------------------------------------- */

static void record_result(struct run *run, const struct conversation *conversation,
                          const struct exchange_result *result) {
    const struct answer *answer = result->answer;
    struct record record = {
        .conversation = conversation->number,
        .turn = (uint32_t)conversation->turn,
        .start = (double)(result->started_ns - run->start_ns) / 1e9,
        .outcome = result->cancelled                 ? OUTCOME_CANCELLED
                   : answer->failure != FAILURE_NONE ? OUTCOME_FAILED
                                                     : OUTCOME_COMPLETED,
        .failure = result->cancelled ? FAILURE_NONE : answer->failure,
    };
    record_measure(&record, answer, result->started_ns, result->ended_ns);
    run_records_add(&run->result->records, &record, answer, conversation->request.quality);
    if (record.outcome == OUTCOME_COMPLETED) run->output_tokens += answer->output_tokens;
    run->failures += record.outcome == OUTCOME_FAILED;
    run->last_ns = result->ended_ns;
}

static void on_done(void *tag, const struct exchange_result *result) {
    struct conversation *conversation = tag;
    struct run *run = conversation->run;
    bool completed = !result->cancelled && result->answer->failure == FAILURE_NONE;
    record_result(run, conversation, result);
    if (completed && conversation->turn + 1 < run->plan->settings->turns && may_start(run)) {
        conversation->turn++;
        start_turn(conversation, time_now_ns());
    } else {
        conversation_leave(conversation);
        if (run->held_first && !run->result->interrupted)
            start_held(run);
        else if (run->plan->concurrency && may_start(run))
            start_conversation(run);
    }
    run_end_if_idle(run);
}

/* ---- Timers ---------------------------------------------------------------------------------- */

static void on_arrival(uv_timer_t *timer) {
    struct run *run = timer->data;
    double now = (double)(time_now_ns() - run->start_ns) / 1e9;
    while (run->arrivals.at <= now && may_start(run)) {
        if (run->client.busy_count < run->plan->settings->max_in_flight) {
            start_conversation(run);
        } else {
            struct conversation *conversation = conversation_take(run);
            if (conversation) hold(run, conversation);
        }
        arrivals_advance(&run->arrivals);
    }
    run_end_if_idle(run);
    if (run->ended || !may_start(run)) return;
    double wait = (run->arrivals.at - now) * 1e3;
    uv_timer_start(timer, on_arrival, wait > 0 ? (uint64_t)ceil(wait) : 0, 0);
}

static void show_progress(const struct run *run) {
    if (!isatty(STDERR_FILENO)) return;
    double seconds = (double)(time_now_ns() - run->start_ns) / 1e9;
    size_t done = run->result->records.count;
    fprintf(stderr,
            "\r%s: %.0f s, %zu done, %zu failed, %zu in flight, %.1f requests/s, %.0f tokens/s"
            "\x1b[K",
            run->plan->label, seconds, done, (size_t)run->failures, run->client.busy_count,
            (double)done / seconds, (double)run->output_tokens / seconds);
}

static void record_lag(struct run *run, uint64_t now_ns) {
    double late = (double)(now_ns - run->beat_ns) / 1e9 - BEAT_MS / 1e3;
    if (run->lag_count == run->lag_capacity) {
        size_t capacity = run->lag_capacity ? 2 * run->lag_capacity : 1024;
        float *grown = realloc(run->lags, capacity * sizeof *grown);
        if (!grown) return;
        run->lags = grown;
        run->lag_capacity = capacity;
    }
    run->lags[run->lag_count++] = late > 0 ? (float)late : 0;
    run->beat_ns = now_ns;
}

static void on_beat(uv_timer_t *timer) {
    struct run *run = timer->data;
    uint64_t now_ns = time_now_ns();
    record_lag(run, now_ns);
    run->beats++;
    if (run->beats % TIMEOUT_BEATS == 0) client_check_timeouts(&run->client, now_ns);
    if (run->beats % PROGRESS_BEATS == 0) show_progress(run);
    run_end_if_idle(run);
}

static void on_signal(uv_signal_t *signal, int number) {
    struct run *run = signal->data;
    (void)number;
    run->result->interrupted = true;
    client_cancel_all(&run->client);
    run_end_if_idle(run);
}

/* Nothing is under way and nothing may follow: the loop loses its handles and returns. */
static void run_end_if_idle(struct run *run) {
    bool waits = run->held_first && !run->result->interrupted && !run->result->records.failed;
    if (run->ended || run->client.busy_count || waits || may_start(run)) return;
    run->ended = true;
    uv_close((uv_handle_t *)&run->beat, NULL);
    uv_close((uv_handle_t *)&run->arrival, NULL);
    uv_close((uv_handle_t *)&run->interrupt, NULL);
    uv_close((uv_handle_t *)&run->terminate, NULL);
    client_close_idle(&run->client);
}

/* Of this thread alone: what other processes take shows as lateness. */
static uint64_t processor_time_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* ---- One run --------------------------------------------------------------------------------- */

static int run_prepare(struct run *run, struct error *error) {
    const struct run_plan *plan = run->plan;
    int result = uv_loop_init(&run->loop);
    if (result != 0) return error_set(error, FATHOM_IO, "no event loop: %s", uv_strerror(result));
    client_init(&run->client, &run->loop, plan->target, plan->settings->timeout, on_done);
    arrivals_init(&run->arrivals, plan->rate,
                  strcmp(plan->settings->arrivals, "constant") == 0 ? INFINITY
                                                                    : plan->settings->burstiness,
                  plan->settings->seed);
    run->held_last = &run->held_first;
    run->next_conversation = plan->conversation;
    uv_timer_init(&run->loop, &run->beat);
    uv_timer_init(&run->loop, &run->arrival);
    uv_signal_init(&run->loop, &run->interrupt);
    uv_signal_init(&run->loop, &run->terminate);
    run->beat.data = run->arrival.data = run->interrupt.data = run->terminate.data = run;
    uv_signal_start(&run->interrupt, on_signal, SIGINT);
    uv_signal_start(&run->terminate, on_signal, SIGTERM);
    return 0;
}

static void run_load(struct run *run) {
    const struct run_plan *plan = run->plan;
    run->processor_ns = processor_time_ns();
    run->start_ns = run->last_ns = run->beat_ns = time_now_ns();
    uv_update_time(&run->loop);
    uv_timer_start(&run->beat, on_beat, BEAT_MS, BEAT_MS);
    if (plan->concurrency == 0) uv_timer_start(&run->arrival, on_arrival, 0, 0);
    for (size_t i = 0; i < plan->concurrency && may_start(run); i++) start_conversation(run);
    uv_run(&run->loop, UV_RUN_DEFAULT);
    if (isatty(STDERR_FILENO)) fprintf(stderr, "\r\x1b[K");
}

static void judge_lag(struct run *run) {
    struct run_result *result = run->result;
    double *lags = calloc(run->lag_count + 1, sizeof *lags);
    for (size_t i = 0; lags && i < run->lag_count; i++) {
        lags[i] = (double)run->lags[i];
        if (lags[i] > result->lag_max) result->lag_max = lags[i];
    }
    if (lags) result->lag_p99 = run->lag_count ? distribution_of(lags, run->lag_count).p99 : 0;
    free(lags);
}

static void judge(struct run *run) {
    struct run_result *result = run->result;
    double limit = run->plan->settings->lag_limit;
    result->seconds = fmax((double)(run->last_ns - run->start_ns) / 1e9, 1e-9); /* a divisor */
    result->busy = (double)(processor_time_ns() - run->processor_ns) / 1e9 / result->seconds;
    judge_lag(run);
    if (result->interrupted)
        snprintf(result->invalid, sizeof result->invalid, "it was interrupted");
    else if (result->records.failed)
        snprintf(result->invalid, sizeof result->invalid, "memory ran out");
    else if (result->lag_p99 * 1e3 > limit)
        snprintf(result->invalid, sizeof result->invalid,
                 "this program itself was late: %.1f ms at the 99th percentile, over "
                 "--lag-limit %.3g",
                 result->lag_p99 * 1e3, limit);
    else if (result->busy > BUSY_MAX && result->seconds > BUSY_SECONDS)
        snprintf(result->invalid, sizeof result->invalid,
                 "this program itself was busy %.0f %% of the time: it, not the server, was "
                 "measured",
                 100 * result->busy);
}

static void conversations_free(struct conversation *list) {
    while (list) {
        struct conversation *next = list->next;
        free(list);
        list = next;
    }
}

int run_execute(const struct run_plan *plan, struct run_result *result, struct error *error) {
    *result = (struct run_result){.concurrency = plan->concurrency, .rate = plan->rate};
    memcpy(result->label, plan->label, sizeof result->label);
    struct run *run = calloc(1, sizeof *run);
    if (!run) return error_set(error, FATHOM_NO_MEMORY, "no memory for a run");
    run->plan = plan;
    run->result = result;
    int status = run_prepare(run, error);
    if (status == 0) {
        run_load(run);
        result->connects = run->client.connects;
        judge(run);
        uv_loop_close(&run->loop);
    }
    conversations_free(run->unused);
    conversations_free(run->held_first);
    text_free(&run->body);
    text_free(&run->message);
    free(run->lags);
    free(run);
    return status;
}

void run_result_free(struct run_result *result) {
    run_records_free(&result->records);
}
