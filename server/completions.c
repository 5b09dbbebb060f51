/* POST /v1/completions and /v1/chat/completions: from a body to engine requests, from engine events
 * to an answer or a stream.
 *
 * A job is one request. It lives from its acceptance until the engine has said its last word on
 * every choice, which may be long after the client has left. Its choices' addresses are the
 * engine's ids: an address is not used again while the engine may still speak of it. Loop thread
 * only, but for job_prepare.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server/body_work.h"
#include "server/endpoints.h"
#include "server/server.h"

#define RETRY_AFTER_MAX 120 /* seconds: whatever the queue, things change */

struct job_choice {
    struct completion_job *job;
    size_t index;  /* of the completion's choices */
    bool is_live;  /* accepted by the engine, EVENT_FINISHED not yet seen */
    bool is_ready; /* in the job's list */
    struct job_choice *next_ready;
    uint64_t last_token_ns; /* 0: none yet */
};

/* completion_request_parse or chat_request_parse. */
typedef int (*request_parser)(const struct api_context *context, const char *body, size_t length,
                              const char *quality_header, struct completion_request *request,
                              struct api_error *error);

struct completion_job {
    request_parser parse;
    struct server *server;
    struct exchange *exchange; /* NULL once it is over: answered, or the client left */
    struct body_work work;
    char *body;
    size_t body_length;
    char quality_header[2 * TIER_NAME_MAX];
    struct completion_request request;
    bool has_request;
    struct api_error error; /* status != 0: the answer */
    struct completion *completion;
    struct job_choice *choices; /* [completion_choice_count] */
    size_t live_count;
    struct job_choice *ready_choices; /* list: events came, to be written */
    bool is_ready;                    /* in the server's list */
    bool failed;
    bool expired; /* failed because it waited too long in the queue */
    struct completion_job *next_ready;
    uint64_t first_token_ns, last_token_ns;
};

static void job_prepare(struct body_work *work);
static void job_begin(struct body_work *work);
static int job_submit(struct completion_job *job);
static void job_take_event(struct job_choice *choice, const struct engine_event *event);
static void job_write(struct completion_job *job);
static void job_fail(struct completion_job *job);
static void job_cancel(struct completion_job *job);
static void job_release_if_done(struct completion_job *job);
static void job_abandon(void *context);

/* ---- Acceptance ------------------------------------------------------------------------------ */

static void completion_start(struct exchange *exchange, request_parser parse) {
    struct completion_job *job = calloc(1, sizeof *job);
    if (!job) {
        exchange_answer_no_memory(exchange);
        return;
    }
    struct http_slice quality;
    job->server = exchange->server;
    job->exchange = exchange;
    job->parse = parse;
    job->body = exchange_take_body(exchange, &job->body_length);
    job->work = (struct body_work){
        .server = job->server, .bytes = job->body_length, .run = job_prepare, .done = job_begin};
    job->server->job_count++;
    http_head_find(exchange->head, "X-Quality", &quality);
    snprintf(job->quality_header, sizeof job->quality_header, "%.*s", (int)quality.length,
             quality.data);
    exchange_attach(exchange, job, job_abandon);
    if (body_work_start(&job->work, &job->error) != 0) job_begin(&job->work);
}

void completions_handle(struct exchange *exchange) {
    completion_start(exchange, completion_request_parse);
}

void chat_completions_handle(struct exchange *exchange) {
    completion_start(exchange, chat_request_parse);
}

/* Loop thread or, for long bodies, pool thread: touches only the job and what never changes. */
static struct completion_job *job_of_work(struct body_work *work) {
    return (struct completion_job *)((char *)work - offsetof(struct completion_job, work));
}

static void job_prepare(struct body_work *work) {
    struct completion_job *job = job_of_work(work);
    const struct api_context *context = &job->server->context;
    const char *quality = *job->quality_header ? job->quality_header : NULL;
    if (job->parse(context, job->body ? job->body : "", job->body_length, quality, &job->request,
                   &job->error) != 0) {
        return;
    }
    job->has_request = true;
    free(job->body);
    job->body = NULL;
    completion_request_tokenize(context, &job->request, &work->is_abandoned, &job->error);
}

static void job_begin(struct body_work *work) {
    struct completion_job *job = job_of_work(work);
    if (job->exchange && job->error.status == 0) job_submit(job);
    if (job->exchange && job->error.status != 0) job_fail(job);
    if (job->exchange && job->request.stream) exchange_begin_stream(job->exchange);
    job_release_if_done(job);
}

/* When a client that is told to come back may find room: once those waiting now have started. */
static unsigned retry_after(const struct server *server) {
    struct engine_stats stats;
    engine_get_stats(server->engine, &stats);
    if (!(stats.drain_seconds > 1)) return 1;
    return stats.drain_seconds < RETRY_AFTER_MAX ? (unsigned)stats.drain_seconds + 1
                                                 : RETRY_AFTER_MAX;
}

/* The tier is chosen here and never changes: an answer is of one quality throughout. */
static void job_choose_tier(struct completion_job *job) {
    static const char *const reasons[AUTO_REASONS] = {
        [AUTO_WITHIN] = "within the objectives",
        [AUTO_FIRST_TOKEN] = "time to first token",
        [AUTO_PER_TOKEN] = "time per token",
    };
    struct server *server = job->server;
    struct auto_choice choice;
    size_t tokens = 0;
    for (size_t i = 0; i < job->request.prompt_count; i++) {
        tokens += job->request.prompts[i].tokens.count;
    }
    engine_choose_tier(server->engine, &server->auto_quality, tokens, &choice);
    server->auto_quality.previous = choice.tier;
    server->metrics.auto_choices[choice.tier][choice.reason]++;
    job->request.tier = choice.tier;
    job->request.tier_reason = reasons[choice.reason];
}

/* All choices or none: on failure job->error is set, and what was accepted is cancelled by
 * job_fail. */
static int job_submit(struct completion_job *job) {
    struct server *server = job->server;
    if (job->request.tier_is_auto && server->settings->auto_quality.first_token > 0) {
        job_choose_tier(job);
    }
    if (completion_create(&server->context, &job->request, job->exchange->request_id, time(NULL),
                          server_random(), &job->completion, &job->error) != 0) {
        return FATHOM_NO_MEMORY;
    }
    size_t count = completion_choice_count(job->completion);
    job->choices = calloc(count, sizeof *job->choices);
    if (!job->choices) {
        return api_error_set(&job->error, 500, NULL, NULL, "there is no memory for the choices");
    }
    job->exchange->tier = server->context.model->tiers[job->request.tier].name;
    for (size_t i = 0; i < count; i++) {
        struct job_choice *choice = &job->choices[i];
        struct engine_request request;
        struct error error;
        choice->job = job;
        choice->index = i;
        completion_fill(job->completion, i, (uint64_t)(uintptr_t)choice, &request);
        int result = engine_submit(server->engine, &request, &error);
        if (result != 0) {
            api_error_from_engine(&job->error, &error);
            if (result == FATHOM_FULL) job->error.retry_after_s = retry_after(server);
            return result;
        }
        choice->is_live = true;
        job->live_count++;
    }
    return 0;
}

/* ---- Events ---------------------------------------------------------------------------------- */

static void job_make_ready(struct completion_job *job, struct job_choice *choice) {
    if (!choice->is_ready) {
        choice->is_ready = true;
        choice->next_ready = job->ready_choices;
        job->ready_choices = choice;
    }
    if (!job->is_ready) {
        job->is_ready = true;
        job->next_ready = job->server->ready_jobs;
        job->server->ready_jobs = job;
    }
}

/* A batch of events first, then one write per job with all that they brought. */
void completions_take_events(struct server *server) {
    if (!server->engine) return;
    size_t count = engine_take_events(server->engine, server->events, EVENT_BATCH);
    for (size_t i = 0; i < count; i++) {
        struct job_choice *choice = (struct job_choice *)(uintptr_t)server->events[i].id;
        job_take_event(choice, &server->events[i]);
    }
    while (server->ready_jobs) {
        struct completion_job *job = server->ready_jobs;
        server->ready_jobs = job->next_ready;
        job->is_ready = false;
        if (job->exchange) job_write(job);
        job_release_if_done(job);
    }
    /* More may be waiting: let the loop serve its sockets in between. */
    if (count == EVENT_BATCH) uv_async_send(&server->engine_wakeup);
}

static void job_observe_token(struct completion_job *job, struct job_choice *choice) {
    struct request_metrics *metrics = &job->server->metrics.tiers[job->request.tier];
    uint64_t now = time_now_ns();
    if (job->first_token_ns == 0) {
        job->first_token_ns = now;
        histogram_observe_ns(&metrics->time_to_first_token, now - job->exchange->started_ns);
        job->exchange->ttft_ms = (double)(now - job->exchange->started_ns) / 1e6;
    }
    if (choice->last_token_ns != 0) {
        histogram_observe_ns(&metrics->inter_token, now - choice->last_token_ns);
    }
    choice->last_token_ns = job->last_token_ns = now;
}

static void job_take_event(struct job_choice *choice, const struct engine_event *event) {
    struct completion_job *job = choice->job;
    if (event->kind == EVENT_FINISHED) {
        choice->is_live = false;
        job->live_count--;
    }
    job_make_ready(job, choice);
    if (!job->exchange) return;
    if (event->kind == EVENT_TOKEN) job_observe_token(job, choice);
    unsigned flags = completion_push(job->completion, choice->index, event);
    if (flags & PUSH_FAILED) job->failed = true;
    if (event->kind == EVENT_FINISHED && event->finish == FINISH_EXPIRED) job->expired = true;
    if ((flags & PUSH_CANCEL) && choice->is_live) engine_cancel(job->server->engine, event->id);
}

/* ---- Answers --------------------------------------------------------------------------------- */

/* For the log line, of what failed or was left too. */
static void job_count_tokens(struct completion_job *job, struct engine_usage *usage) {
    completion_get_usage(job->completion, usage);
    job->exchange->prompt_tokens = usage->prompt_tokens;
    job->exchange->completion_tokens = usage->completion_tokens;
}

/* Counts what is known at the end of a request, for its log line and the metrics. */
static void job_account(struct completion_job *job) {
    struct request_metrics *metrics = &job->server->metrics.tiers[job->request.tier];
    struct exchange *exchange = job->exchange;
    struct engine_usage usage;
    size_t choices = completion_choice_count(job->completion);
    job_count_tokens(job, &usage);
    if (usage.completion_tokens > choices) {
        double steps = (double)(usage.completion_tokens - choices) / (double)choices;
        exchange->tpot_ms = (double)(job->last_token_ns - job->first_token_ns) / 1e6 / steps;
    }
    for (size_t i = 0; i < choices; i++) {
        const char *reason = completion_finish_reason(job->completion, i);
        bool is_length = reason && strcmp(reason, "length") == 0;
        metrics->finished[is_length ? FINISH_LENGTH : FINISH_STOP]++;
    }
    histogram_observe_ns(&metrics->end_to_end, time_now_ns() - exchange->started_ns);
    histogram_observe_ns(&metrics->queue, usage.queue_ns);
    histogram_observe_ns(&metrics->prefill, usage.prefill_ns);
    histogram_observe_ns(&metrics->decode, usage.decode_ns);
}

/* Takes the exchange away from the job: what the caller does with it is the last thing done. */
static struct exchange *job_detach(struct completion_job *job) {
    struct exchange *exchange = job->exchange;
    job->exchange = NULL;
    exchange_attach(exchange, NULL, NULL);
    return exchange;
}

static void job_write_stream(struct completion_job *job, bool is_done) {
    struct text_buffer out = {0};
    for (struct job_choice *choice = job->ready_choices, *next; choice; choice = next) {
        next = choice->next_ready;
        choice->is_ready = false;
        completion_write_chunk(job->completion, choice->index, &out);
    }
    job->ready_choices = NULL;
    if (is_done && job->request.include_usage) completion_write_usage_chunk(job->completion, &out);
    if (is_done) stream_write_done(&out);
    if (out.failed) {
        text_free(&out);
        api_error_set(&job->error, 500, NULL, NULL, "there is no memory for the answer");
        job_fail(job);
        return;
    }
    exchange_send(job->exchange, out.data, out.length);
    text_free(&out);
    if (is_done) exchange_end_stream(job_detach(job));
}

static void job_write_failure(struct completion_job *job) {
    enum finish_reason reason = job->expired ? FINISH_EXPIRED : FINISH_ERROR;
    job->server->metrics.tiers[job->request.tier].finished[reason]++;
    if (job->expired) {
        api_error_set(&job->error, 503, "queue_timeout", NULL,
                      "the request waited in the queue for more than %.15g s; try again",
                      (double)job->server->settings->engine.queue_timeout_ms / 1e3);
        job->error.retry_after_s = retry_after(job->server);
    } else {
        api_error_set(&job->error, 500, NULL, NULL, "the engine could not finish this request");
    }
    job_fail(job);
}

static void job_write(struct completion_job *job) {
    if (job->failed) {
        job_write_failure(job);
        return;
    }
    bool is_done = completion_is_done(job->completion);
    if (is_done) job_account(job);
    if (job->request.stream) {
        job_write_stream(job, is_done);
    } else if (is_done) {
        struct text_buffer out = {0};
        completion_write_response(job->completion, &out);
        exchange_answer_json(job_detach(job), &out);
    }
}

/* Ends the exchange with job->error, in the stream if that has begun; cancels what still runs. */
static void job_fail(struct completion_job *job) {
    struct engine_usage usage;
    if (job->completion) job_count_tokens(job, &usage);
    struct exchange *exchange = job_detach(job);
    job_cancel(job);
    if (exchange->streams) {
        exchange_fail_stream(exchange, &job->error);
    } else {
        exchange_answer_error(exchange, &job->error);
    }
}

static void job_cancel(struct completion_job *job) {
    size_t count = job->choices ? completion_choice_count(job->completion) : 0;
    for (size_t i = 0; i < count; i++) {
        struct job_choice *choice = &job->choices[i];
        if (!choice->is_live) continue;
        job->server->metrics.choices_cancelled++;
        engine_cancel(job->server->engine, (uint64_t)(uintptr_t)choice);
    }
}

/* The client left: in the queue, in prefill, while decoding, or while the pool still tokenizes. */
static void job_abandon(void *context) {
    struct completion_job *job = context;
    struct engine_usage usage;
    if (job->completion) job_count_tokens(job, &usage);
    job->exchange = NULL;
    body_work_abandon(&job->work);
    if (!job->completion) return; /* job_begin will find nobody to answer */
    job->server->metrics.tiers[job->request.tier].finished[FINISH_CANCELLED]++;
    job_cancel(job);
}

static void job_release_if_done(struct completion_job *job) {
    if (job->exchange || job->live_count > 0 || job->is_ready) return;
    job->server->job_count--;
    completion_destroy(job->completion);
    if (job->has_request) completion_request_free(&job->request);
    free(job->choices);
    free(job->body);
    free(job);
}
