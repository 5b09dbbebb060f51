/* POST /tokenize and /detokenize: short texts at once, long ones on the thread pool. */
#include <stdlib.h>

#include "server/endpoints.h"
#include "server/server.h"

typedef int (*tokenize_function)(const struct api_context *context, const char *body, size_t length,
                                 struct text_buffer *out, struct api_error *error);

struct tokenize_job {
    uv_work_t work; /* owned by libuv until the after-callback, whatever the client does */
    struct server *server;
    struct exchange *exchange; /* NULL once the client has left */
    tokenize_function function;
    char *body;
    size_t length;
    struct text_buffer out;
    struct api_error error;
    int result;
};

static void job_run(uv_work_t *work) {
    struct tokenize_job *job = work->data;
    job->result = job->function(&job->server->context, job->body ? job->body : "", job->length,
                                &job->out, &job->error);
}

static void job_finish(uv_work_t *work, int status) {
    struct tokenize_job *job = work->data;
    (void)status;
    job->server->job_count--;
    if (job->exchange && job->result != 0) exchange_answer_error(job->exchange, &job->error);
    if (job->exchange && job->result == 0) exchange_answer_json(job->exchange, &job->out);
    text_free(&job->out);
    free(job->body);
    free(job);
}

static void job_abandon(void *context) {
    struct tokenize_job *job = context;
    job->exchange = NULL;
}

static void tokenize_start(struct exchange *exchange, tokenize_function function) {
    struct tokenize_job *job = calloc(1, sizeof *job);
    if (!job) {
        struct api_error error;
        api_error_set(&error, 500, NULL, NULL, "there is no memory for the request");
        exchange_answer_error(exchange, &error);
        return;
    }
    job->server = exchange->server;
    job->exchange = exchange;
    job->function = function;
    job->body = exchange_take_body(exchange, &job->length);
    job->work.data = job;
    job->server->job_count++;
    exchange_attach(exchange, job, job_abandon);
    if (job->length <= INLINE_BODY_BYTES) {
        job_run(&job->work);
        job_finish(&job->work, 0);
    } else {
        uv_queue_work(&job->server->loop, &job->work, job_run, job_finish);
    }
}

void tokenize_handle(struct exchange *exchange) {
    tokenize_start(exchange, tokenize_answer);
}

void detokenize_handle(struct exchange *exchange) {
    tokenize_start(exchange, detokenize_answer);
}
