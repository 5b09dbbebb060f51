/* POST /tokenize and /detokenize: short texts at once, long ones on the thread pool. */
#include <stddef.h>
#include <stdlib.h>

#include "server/body_work.h"
#include "server/endpoints.h"
#include "server/server.h"

struct tokenize_job {
    struct body_work work;
    struct server *server;
    struct exchange *exchange; /* NULL once the client has left */
    char *body;
    size_t length;
    struct text_buffer out;
    struct api_error error;
    int result;
};

static struct tokenize_job *job_of_work(struct body_work *work) {
    return (struct tokenize_job *)((char *)work - offsetof(struct tokenize_job, work));
}

/* A large body takes long to free, too. */
static void free_body(struct tokenize_job *job) {
    free(job->body);
    job->body = NULL;
}

static void job_tokenize(struct body_work *work) {
    struct tokenize_job *job = job_of_work(work);
    job->result = tokenize_answer(&job->server->context, job->body ? job->body : "", job->length,
                                  &work->is_abandoned, &job->out, &job->error);
    free_body(job);
}

static void job_detokenize(struct body_work *work) {
    struct tokenize_job *job = job_of_work(work);
    job->result = detokenize_answer(&job->server->context, job->body ? job->body : "", job->length,
                                    &job->out, &job->error);
    free_body(job);
}

static void job_finish(struct body_work *work) {
    struct tokenize_job *job = job_of_work(work);
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
    body_work_abandon(&job->work);
}

static void tokenize_start(struct exchange *exchange, void (*run)(struct body_work *work)) {
    struct tokenize_job *job = calloc(1, sizeof *job);
    if (!job) {
        exchange_answer_no_memory(exchange);
        return;
    }
    job->server = exchange->server;
    job->exchange = exchange;
    job->body = exchange_take_body(exchange, &job->length);
    job->work = (struct body_work){
        .server = job->server, .bytes = job->length, .run = run, .done = job_finish};
    job->server->job_count++;
    exchange_attach(exchange, job, job_abandon);
    int result = body_work_start(&job->work, &job->error);
    if (result == 0) return; /* the job may be gone by now */
    job->result = result;
    job_finish(&job->work);
}

void tokenize_handle(struct exchange *exchange) {
    tokenize_start(exchange, job_tokenize);
}

void detokenize_handle(struct exchange *exchange) {
    tokenize_start(exchange, job_detokenize);
}
