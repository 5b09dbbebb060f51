#include "bench/answer.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/json.h"

const char *failure_name(enum failure failure) {
    static const char *const names[FAILURE_KINDS] = {
        [FAILURE_NONE] = "none",
        [FAILURE_CONNECT] = "connect",
        [FAILURE_CLOSED] = "closed",
        [FAILURE_TIMEOUT] = "timeout",
        [FAILURE_OVERLOADED] = "overloaded",
        [FAILURE_CLIENT_ERROR] = "client_error",
        [FAILURE_SERVER_ERROR] = "server_error",
        [FAILURE_HTTP] = "http",
        [FAILURE_TOO_LARGE] = "too_large",
        [FAILURE_CONTENT] = "content",
        [FAILURE_ERROR_EVENT] = "error_event",
        [FAILURE_TRUNCATED] = "truncated",
    };
    return names[failure];
}

/* The detail goes to terminals and pages: printable ASCII only. */
static void set_detail(struct answer *answer, const char *detail, size_t length) {
    size_t i = 0;
    for (; i < length && i + 1 < sizeof answer->detail; i++)
        answer->detail[i] = detail[i] >= 0x20 && detail[i] < 0x7f ? detail[i] : '?';
    answer->detail[i] = '\0';
}

void answer_fail(struct answer *answer, enum failure failure, const char *detail) {
    if (answer->complete) return;
    answer->complete = true;
    answer->keeps_alive = false;
    answer->failure = failure;
    if (detail) set_detail(answer, detail, strlen(detail));
}

/* ---- What an answer says --------------------------------------------------------------------- */

/* A count that a usage states, or 0 when it states none; false: it cannot be one. */
static bool take_count(const json_t *usage, const char *name, size_t *count) {
    const json_t *value = json_object_get(usage, name);
    if (!value || json_is_null(value)) return true;
    json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < 0 || number > ANSWER_TOKENS_MAX) return false;
    *count = (size_t)number;
    return true;
}

static bool take_usage(struct answer *answer, const json_t *usage) {
    if (!json_is_object(usage)) return true;
    return take_count(usage, "prompt_tokens", &answer->prompt_tokens) &&
           take_count(usage, "completion_tokens", &answer->output_tokens) &&
           take_count(json_object_get(usage, "prompt_tokens_details"), "cached_tokens",
                      &answer->cached_tokens);
}

static void take_quality(struct answer *answer, const json_t *quality) {
    const char *name = json_string_value(quality);
    if (!name) return;
    size_t i = 0;
    for (; name[i] && i + 1 < sizeof answer->quality; i++)
        answer->quality[i] = name[i] > 0x20 && name[i] < 0x7f ? name[i] : '?';
    answer->quality[i] = '\0';
}

/* false: there is something else than text. */
static bool take_text(const json_t *object, const char *name, bool *has_text) {
    const json_t *value = json_object_get(object, name);
    if (!value || json_is_null(value)) return true;
    if (json_string_length(value) > 0) *has_text = true;
    return json_is_string(value);
}

/* Text of a completion, of a chat's message or of a stream's delta, reasoning included; false: it
 * is no choice. */
static bool take_choice(struct answer *answer, const json_t *choice, bool *has_text) {
    const json_t *delta = json_object_get(choice, "delta");
    if (!delta) delta = json_object_get(choice, "message");
    if (json_is_string(json_object_get(choice, "finish_reason"))) answer->got_finish = true;
    return json_is_object(choice) && (!delta || json_is_null(delta) || json_is_object(delta)) &&
           take_text(choice, "text", has_text) && take_text(delta, "content", has_text) &&
           take_text(delta, "reasoning_content", has_text) &&
           take_text(delta, "reasoning", has_text);
}

/* As vLLM's benchmark counts: a token may show no text, and its time is one all the same. */
static void count_chunk(struct answer *answer, bool has_text) {
    answer->chunks++;
    answer->text_chunks += has_text;
    if (answer->chunks == 1) {
        answer->first_ns = answer->now_ns;
        return;
    }
    if (answer->gap_count == answer->gap_capacity) {
        size_t capacity = answer->gap_capacity ? 2 * answer->gap_capacity : 64;
        float *grown = realloc(answer->gaps, capacity * sizeof *grown);
        if (!grown) return; /* one gap fewer is known */
        answer->gaps = grown;
        answer->gap_capacity = capacity;
    }
    double gap = (double)(answer->now_ns - answer->last_ns) / 1e9;
    answer->gaps[answer->gap_count++] = (float)gap;
}

/* An event may have none; false: they cannot be read. */
static bool take_choices(struct answer *answer, const json_t *choices) {
    size_t index;
    json_t *choice;
    bool text = false;
    if (!choices || json_is_null(choices)) return true;
    if (!json_is_array(choices)) return false;
    json_array_foreach(choices, index, choice) {
        if (!take_choice(answer, choice, &text)) return false;
    }
    if (json_array_size(choices) == 0) return true;
    if (answer->is_stream) count_chunk(answer, text);
    answer->last_ns = answer->now_ns;
    return true;
}

static const char *error_message(const json_t *error) {
    if (json_is_string(error)) return json_string_value(error);
    const char *message = json_string_value(json_object_get(error, "message"));
    return message ? message : "an error without a message";
}

/* A value takes a hundred bytes of memory, however little text it was. */
static bool is_bounded(const char *data, size_t length) {
    struct json_extent extent = json_measure(data, length);
    return extent.containers + extent.commas + extent.colons <= ANSWER_VALUES_MAX;
}

/* An event's data or a whole body. */
static void take_object(struct answer *answer, const char *data, size_t length) {
    json_error_t where;
    bool no_memory = false, bounded = is_bounded(data, length);
    json_t *object = bounded ? json_parse(data ? data : "", length, 0, &where, &no_memory) : NULL;
    const json_t *error = json_object_get(object, "error");
    if (!bounded) {
        answer_fail(answer, FAILURE_TOO_LARGE, "JSON with over a million keys and values");
    } else if (no_memory) {
        answer_fail(answer, FAILURE_TOO_LARGE, "no memory for the answer's JSON");
    } else if (!object) {
        answer_fail(answer, FAILURE_CONTENT, where.text);
    } else if (!json_is_object(object)) {
        answer_fail(answer, FAILURE_CONTENT, "JSON that is not an object");
    } else if (error && !json_is_null(error)) {
        answer_fail(answer, FAILURE_ERROR_EVENT, error_message(error));
    } else {
        take_quality(answer, json_object_get(object, "quality"));
        if (!take_choices(answer, json_object_get(object, "choices")))
            answer_fail(answer, FAILURE_CONTENT, "choices that are no list of texts");
        else if (!take_usage(answer, json_object_get(object, "usage")))
            answer_fail(answer, FAILURE_CONTENT, "a usage with a count that cannot be");
    }
    json_decref(object);
}

static int take_event(void *context, const char *data, size_t length) {
    struct answer *answer = context;
    if (length == 6 && memcmp(data, "[DONE]", 6) == 0) {
        answer->got_done = true;
        return 0;
    }
    if (answer->got_done) return 0; /* nothing counts after the end */
    take_object(answer, data, length);
    return answer->complete ? FATHOM_INVALID : 0;
}

/* ---- HTTP ------------------------------------------------------------------------------------ */

static int add_head_bytes(struct answer *answer, size_t length) {
    answer->head_bytes += length;
    if (answer->head_bytes <= ANSWER_HEAD_MAX) return 0;
    answer_fail(answer, FAILURE_TOO_LARGE, "a head over 64 KiB");
    return -1;
}

static void keep(char *kept, size_t size, size_t *kept_length, const char *at, size_t length) {
    size_t room = size - *kept_length;
    if (length > room) length = room;
    memcpy(kept + *kept_length, at, length);
    *kept_length += length;
}

static int on_status(llhttp_t *framing, const char *at, size_t length) {
    (void)at;
    return add_head_bytes(framing->data, length);
}

static int on_header_field(llhttp_t *framing, const char *at, size_t length) {
    struct answer *answer = framing->data;
    keep(answer->field, sizeof answer->field, &answer->field_length, at, length);
    return add_head_bytes(answer, length);
}

static int on_header_value(llhttp_t *framing, const char *at, size_t length) {
    struct answer *answer = framing->data;
    keep(answer->value, sizeof answer->value, &answer->value_length, at, length);
    return add_head_bytes(answer, length);
}

static int on_header_value_complete(llhttp_t *framing) {
    static const char name[] = "content-type", type[] = "text/event-stream";
    struct answer *answer = framing->data;
    if (answer->field_length == sizeof name - 1 && answer->value_length >= sizeof type - 1 &&
        strncasecmp(answer->field, name, sizeof name - 1) == 0 &&
        strncasecmp(answer->value, type, sizeof type - 1) == 0) {
        answer->is_stream = true;
    }
    answer->field_length = answer->value_length = 0;
    return add_head_bytes(answer, strlen(": \r\n"));
}

static int on_headers_complete(llhttp_t *framing) {
    struct answer *answer = framing->data;
    answer->status = framing->status_code;
    if (answer->status == 101) {
        answer_fail(answer, FAILURE_HTTP, "a change of protocol that nobody asked for");
        return -1;
    }
    if (answer->status != 200) answer->is_stream = false; /* an error's body is one object */
    return add_head_bytes(answer, strlen("HTTP/1.1 100 \r\n\r\n"));
}

static int on_body(llhttp_t *framing, const char *at, size_t length) {
    struct answer *answer = framing->data;
    if (answer->is_stream) {
        int result = event_reader_feed(&answer->events, at, length, take_event, answer);
        if (result == FATHOM_INVALID)
            answer_fail(answer, FAILURE_TOO_LARGE, "an event over 4 MiB");
        else if (result != 0)
            answer_fail(answer, FAILURE_TOO_LARGE, "no memory for an event");
        return result == 0 ? 0 : -1;
    }
    if (length > ANSWER_BODY_MAX - answer->body.length) {
        answer_fail(answer, FAILURE_TOO_LARGE, "a body over 64 MiB");
        return -1;
    }
    text_append(&answer->body, at, length);
    if (!answer->body.failed) return 0;
    answer_fail(answer, FAILURE_TOO_LARGE, "no memory for the body");
    return -1;
}

/* The failure that a status other than 200 is. */
static void judge_status(struct answer *answer) {
    char said[sizeof answer->detail];
    const char *body = answer->body.data ? answer->body.data : "";
    json_t *object = is_bounded(body, answer->body.length)
                         ? json_loadb(body, answer->body.length, 0, NULL)
                         : NULL;
    const json_t *error = json_object_get(object, "error");
    snprintf(said, sizeof said, "%d%s%s", answer->status, error ? ": " : "",
             error ? error_message(error) : "");
    json_decref(object);
    enum failure failure = FAILURE_HTTP;
    if (answer->status == 429 || answer->status == 503)
        failure = FAILURE_OVERLOADED;
    else if (answer->status >= 500)
        failure = FAILURE_SERVER_ERROR;
    else if (answer->status >= 400)
        failure = FAILURE_CLIENT_ERROR;
    bool keeps_alive = answer->keeps_alive;
    answer_fail(answer, failure, said);
    answer->keeps_alive = keeps_alive; /* an error, but well framed */
}

static void judge(struct answer *answer) {
    if (answer->status != 200) {
        judge_status(answer);
        return;
    }
    if (!answer->is_stream) take_object(answer, answer->body.data, answer->body.length);
    if (answer->complete) return;
    if (answer->is_stream && !answer->got_done && !answer->got_finish)
        answer_fail(answer, FAILURE_TRUNCATED, "neither finish_reason nor [DONE] came");
    else if (answer->last_ns == 0)
        answer_fail(answer, FAILURE_CONTENT, "no choices came");
    if (answer->output_tokens == 0) answer->output_tokens = answer->text_chunks;
    answer->complete = true;
}

static int on_message_complete(llhttp_t *framing) {
    struct answer *answer = framing->data;
    if (answer->status < 200) return 0; /* 1xx: the answer is still to come */
    answer->keeps_alive = llhttp_should_keep_alive(framing);
    judge(answer);
    return HPE_PAUSED;
}

static const llhttp_settings_t framing_settings = {
    .on_status = on_status,
    .on_header_field = on_header_field,
    .on_header_value = on_header_value,
    .on_header_value_complete = on_header_value_complete,
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

/* ---- One answer ------------------------------------------------------------------------------ */

void answer_init(struct answer *answer) {
    *answer = (struct answer){0};
}

void answer_begin(struct answer *answer) {
    struct answer fresh = {
        .gaps = answer->gaps,
        .gap_capacity = answer->gap_capacity,
        .events = answer->events,
        .body = answer->body,
    };
    *answer = fresh;
    event_reader_reset(&answer->events);
    answer->body.length = 0;
    answer->body.failed = false;
    llhttp_init(&answer->framing, HTTP_RESPONSE, &framing_settings);
    answer->framing.data = answer;
}

void answer_free(struct answer *answer) {
    free(answer->gaps);
    event_reader_free(&answer->events);
    text_free(&answer->body);
    *answer = (struct answer){0};
}

bool answer_feed(struct answer *answer, const char *data, size_t length, uint64_t now_ns) {
    answer->now_ns = now_ns;
    enum llhttp_errno result = llhttp_execute(&answer->framing, data, length);
    if (answer->complete) {
        /* Bytes behind the end belong to nothing that was asked. */
        const char *end = llhttp_get_error_pos(&answer->framing);
        if (end && end != data + length) answer->keeps_alive = false;
    } else if (result != HPE_OK) {
        answer_fail(answer, FAILURE_HTTP, llhttp_get_error_reason(&answer->framing));
    }
    return answer->complete;
}

bool answer_end(struct answer *answer) {
    if (answer->complete) return true;
    /* Framed by the connection's end, this is where the message is complete. */
    llhttp_finish(&answer->framing);
    answer_fail(answer, FAILURE_CLOSED, "the connection ended before the answer");
    answer->keeps_alive = false;
    return true;
}
