/* Connections to one server, plain or TLS, kept alive and reused: requests out, judged answers
 * back.
 *
 * Loop thread only. A request that a reused connection dies under, before a byte of an answer, is
 * sent once more on a new one: that race is the client's, not the server's. */
#ifndef FATHOM_BENCH_CLIENT_H
#define FATHOM_BENCH_CLIENT_H

#include <uv.h>

#include "bench/answer.h"
#include "bench/target.h"

struct exchange_result {
    uint64_t started_ns, ended_ns;
    bool cancelled; /* left on purpose; the answer is what had come */
    const struct answer *answer;
};

/* Called once per request, never from within client_send. It may call client_send, which ends the
 * life of the answer. */
typedef void client_done(void *tag, const struct exchange_result *result);

struct connection;

struct client {
    uv_loop_t *loop;
    const struct target *target;
    uint64_t timeout_ns;
    client_done *done;
    struct connection *idle, *busy; /* lists */
    size_t busy_count, connects;
    char buffer[65536]; /* of whatever read is under way */
};

void client_init(struct client *client, uv_loop_t *loop, const struct target *target,
                 double timeout, client_done *done);

/* Sends the bytes of one whole request, which it copies. cancel_after: chunks after which the
 * answer is left, 0 for never. False: no memory, and `done` will not be called. */
bool client_send(struct client *client, const struct text_buffer *request, size_t cancel_after,
                 uint64_t started_ns, void *tag);

/* Ends the answers that take too long; to be called every so often. */
void client_check_timeouts(struct client *client, uint64_t now_ns);

/* Leaves every answer under way, as cancelled; `done` is called for each as the loop turns. */
void client_cancel_all(struct client *client);

/* Closes idle connections; when none is busy, the loop then runs out of handles. */
void client_close_idle(struct client *client);

#endif
