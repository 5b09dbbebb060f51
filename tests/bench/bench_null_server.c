/* A server that answers every request at once with the same completion, for measuring what
 * `fathom bench` itself can do:
 *
 *   bench_null_server 8089 &
 *   fathom bench http://127.0.0.1:8089 --model null -c 32 -n 200000 -i 16 --no-stream
 */
#include <llhttp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#define BODY                                                                                       \
    "{\"id\":\"null\",\"object\":\"text_completion\",\"choices\":[{\"index\":0,\"text\":\"null\"," \
    "\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":1,"      \
    "\"total_tokens\":17}}"

struct peer {
    uv_tcp_t tcp;
    llhttp_t framing;
};

static char answer[512], input[65536];
static size_t answer_length;

static void on_closed(uv_handle_t *handle) {
    free(handle->data);
}

static int on_message(llhttp_t *framing) {
    struct peer *peer = framing->data;
    uv_buf_t bytes = uv_buf_init(answer, (unsigned)answer_length);
    return uv_try_write((uv_stream_t *)&peer->tcp, &bytes, 1) == (int)answer_length ? 0 : -1;
}

static void on_allocate(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer) {
    (void)handle;
    (void)suggested;
    *buffer = uv_buf_init(input, sizeof input);
}

static void on_read(uv_stream_t *stream, ssize_t length, const uv_buf_t *buffer) {
    struct peer *peer = stream->data;
    if (length == 0) return;
    if (length > 0 && llhttp_execute(&peer->framing, buffer->base, (size_t)length) == HPE_OK)
        return;
    uv_close((uv_handle_t *)stream, on_closed);
}

static void on_connection(uv_stream_t *listener, int status) {
    static const llhttp_settings_t settings = {.on_message_complete = on_message};
    struct peer *peer = status == 0 ? calloc(1, sizeof *peer) : NULL;
    if (!peer) return;
    uv_tcp_init(listener->loop, &peer->tcp);
    peer->tcp.data = peer;
    llhttp_init(&peer->framing, HTTP_REQUEST, &settings);
    peer->framing.data = peer;
    if (uv_accept(listener, (uv_stream_t *)&peer->tcp) != 0 ||
        uv_read_start((uv_stream_t *)&peer->tcp, on_allocate, on_read) != 0) {
        uv_close((uv_handle_t *)&peer->tcp, on_closed);
    }
}

int main(int argc, char **argv) {
    struct sockaddr_in address;
    uv_tcp_t listener;
    uv_loop_t *loop = uv_default_loop();
    answer_length = (size_t)snprintf(answer, sizeof answer,
                                     "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                                     "Content-Length: %zu\r\n\r\n%s",
                                     sizeof BODY - 1, BODY);
    uv_ip4_addr("127.0.0.1", argc > 1 ? atoi(argv[1]) : 8089, &address);
    uv_tcp_init(loop, &listener);
    uv_tcp_bind(&listener, (const struct sockaddr *)&address, 0);
    int result = uv_listen((uv_stream_t *)&listener, 1024, on_connection);
    if (result != 0) {
        fprintf(stderr, "bench_null_server: %s\n", uv_strerror(result));
        return 1;
    }
    return uv_run(loop, UV_RUN_DEFAULT);
}
