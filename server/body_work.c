#include "server/body_work.h"

#include "server/server.h"

/* A body up to this many bytes takes well under a millisecond, so the loop thread does it. */
#define INLINE_BYTES 4096
/* Bodies on the pool, running or waiting. A single one may have more bytes than that: its length
 * has a limit of its own, --max-body. */
#define QUEUED_MAX       ((size_t)256)
#define QUEUED_BYTES_MAX ((size_t)64 << 20)

/* Pool thread. */
static void on_run(uv_work_t *request) {
    struct body_work *work = request->data;
    if (!atomic_load(&work->is_abandoned)) work->run(work);
}

static void on_done(uv_work_t *request, int status) {
    struct body_work *work = request->data;
    (void)status; /* cancelled only when abandoned */
    work->is_queued = false;
    work->server->queued_bodies--;
    work->server->queued_body_bytes -= work->bytes;
    work->done(work);
}

int body_work_start(struct body_work *work, struct api_error *error) {
    struct server *server = work->server;
    if (work->bytes <= INLINE_BYTES) {
        work->run(work);
        work->done(work);
        return 0;
    }
    size_t bytes = server->queued_body_bytes + work->bytes; /* both are held in memory */
    if (server->queued_bodies >= QUEUED_MAX ||
        (server->queued_bodies > 0 && bytes > QUEUED_BYTES_MAX)) {
        api_error_set(error, 429, "server_overloaded", NULL,
                      "%zu request bodies of %zu bytes wait to be read; try again",
                      server->queued_bodies, server->queued_body_bytes);
        return FATHOM_FULL;
    }
    work->request.data = work;
    work->is_queued = true;
    server->queued_bodies++;
    server->queued_body_bytes = bytes;
    uv_queue_work(&server->loop, &work->request, on_run, on_done); /* fails only without on_run */
    return 0;
}

void body_work_abandon(struct body_work *work) {
    atomic_store(&work->is_abandoned, true);
    if (work->is_queued) uv_cancel((uv_req_t *)&work->request); /* if it runs already: in vain */
}
