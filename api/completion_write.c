/* A completion -> JSON: the whole answer, or the chunks of a stream. Written straight into the
 * buffer: a chunk goes out for nearly every token. */
#include <math.h>
#include <string.h>

#include "api/completion.h"

/* JSON has no infinity; -9999.0 is what clients of this format expect instead. */
static void write_logprob(float logprob, struct text_buffer *out) {
    if (isfinite(logprob)) {
        text_append_format(out, "%.9g", (double)logprob);
    } else {
        text_append_string(out, "-9999.0");
    }
}

static bool is_utf8(const char *bytes, size_t length) {
    for (size_t at = 0, used; at < length; at += used) {
        if (utf8_scan(bytes + at, length - at, &used) != UTF8_VALID) return false;
    }
    return true;
}

/* A token as a string. A part of a character is written as "bytes:\xE2\x82", in a chat "\xE2\x82":
 * two such tokens would both be U+FFFD otherwise. */
static void write_token(const struct choice *choice, int32_t token, struct text_buffer *out) {
    size_t length;
    const char *bytes = tokenizer_bytes(choice->tokenizer, token, &length);
    if (is_utf8(bytes, length)) {
        text_append_json(out, bytes, length);
        return;
    }
    text_append_string(out, choice->request->is_chat ? "\"" : "\"bytes:");
    for (size_t i = 0; i < length; i++) {
        bool is_plain = bytes[i] >= 0x20 && bytes[i] < 0x7f && bytes[i] != '"' && bytes[i] != '\\';
        if (is_plain) {
            text_append(out, &bytes[i], 1);
        } else {
            text_append_format(out, "\\\\x%02x", (unsigned)(unsigned char)bytes[i]);
        }
    }
    text_append_string(out, "\"");
}

static bool same_text(const struct tokenizer *tokenizer, int32_t a, int32_t b) {
    size_t length_a, length_b;
    const char *bytes_a = tokenizer_bytes(tokenizer, a, &length_a);
    const char *bytes_b = tokenizer_bytes(tokenizer, b, &length_b);
    return length_a == length_b && memcmp(bytes_a, bytes_b, length_a) == 0;
}

/* {"text":logprob,...} of a record whose alternatives are choice->top[first...]: best first, and
 * the token that was drawn even if it is not among the best. Ids of one text share a key: the
 * first, and best, stays. */
static void write_top(const struct choice *choice, const struct token_record *record, size_t first,
                      struct text_buffer *out) {
    struct token_logprob entries[TOP_LOGPROBS_MAX + 1];
    size_t count = record->top_count;
    if (count > 0) memcpy(entries, choice->top + first, count * sizeof *entries);
    entries[count++] = (struct token_logprob){record->token, record->logprob};
    text_append_string(out, "{");
    for (size_t i = 0; i < count; i++) {
        bool is_repeated = false;
        for (size_t j = 0; j < i && !is_repeated; j++) {
            is_repeated = same_text(choice->tokenizer, entries[i].token, entries[j].token);
        }
        if (is_repeated) continue;
        if (i > 0) text_append_string(out, ",");
        write_token(choice, entries[i].token, out);
        text_append_string(out, ":");
        write_logprob(entries[i].logprob, out);
    }
    text_append_string(out, "}");
}

/* The four parallel arrays. The first token of a prompt has no logprob: null. */
static void write_logprobs(const struct choice *choice, size_t records, struct text_buffer *out) {
    text_append_string(out, "{\"tokens\":[");
    for (size_t i = 0; i < records; i++) {
        if (i > 0) text_append_string(out, ",");
        write_token(choice, choice->records[i].token, out);
    }
    text_append_string(out, "],\"token_logprobs\":[");
    for (size_t i = 0; i < records; i++) {
        if (i > 0) text_append_string(out, ",");
        if (isnan(choice->records[i].logprob)) {
            text_append_string(out, "null");
        } else {
            write_logprob(choice->records[i].logprob, out);
        }
    }
    text_append_string(out, "],\"top_logprobs\":[");
    for (size_t i = 0, top = 0; i < records; top += choice->records[i++].top_count) {
        if (i > 0) text_append_string(out, ",");
        if (isnan(choice->records[i].logprob)) {
            text_append_string(out, "null");
        } else {
            write_top(choice, &choice->records[i], top, out);
        }
    }
    text_append_string(out, "],\"text_offset\":[");
    for (size_t i = 0; i < records; i++) {
        if (i > 0) text_append(out, ",", 1);
        text_append_number(out, choice->records[i].offset);
    }
    text_append_string(out, "]}");
}

/* "token":...,"logprob":...,"bytes":[...]: what a chat says of a token, alternative or not. */
static void write_chat_token(const struct choice *choice, const struct token_logprob *token,
                             struct text_buffer *out) {
    size_t length;
    const char *bytes = tokenizer_bytes(choice->tokenizer, token->token, &length);
    text_append_string(out, "\"token\":");
    write_token(choice, token->token, out);
    text_append_string(out, ",\"logprob\":");
    write_logprob(token->logprob, out);
    text_append_string(out, ",\"bytes\":[");
    for (size_t i = 0; i < length; i++) {
        if (i > 0) text_append(out, ",", 1);
        text_append_number(out, (unsigned char)bytes[i]);
    }
    text_append_string(out, "]");
}

/* One entry per token of the message's content, so that the bytes add up to it: a token that wrote
 * nothing, the one that ended the answer, is not among them. */
static void write_chat_logprobs(const struct choice *choice, size_t records,
                                struct text_buffer *out) {
    const char *comma = "";
    text_append_string(out, "{\"content\":[");
    for (size_t i = 0, top = 0; i < records; top += choice->records[i++].top_count) {
        const struct token_record *record = &choice->records[i];
        if (record->end == record->start) continue;
        text_append_format(out, "%s{", comma);
        write_chat_token(choice, &(struct token_logprob){record->token, record->logprob}, out);
        text_append_string(out, ",\"top_logprobs\":[");
        for (size_t j = 0; j < record->top_count; j++) {
            text_append_string(out, j > 0 ? ",{" : "{");
            write_chat_token(choice, &choice->top[top + j], out);
            text_append_string(out, "}");
        }
        text_append_string(out, "]}");
        comma = ",";
    }
    text_append_string(out, "],\"refusal\":null}");
}

/* The visible text, as each endpoint wraps it. */
static void write_text(const struct choice *choice, struct text_buffer *out) {
    const struct completion_request *request = choice->request;
    const char *before = !request->is_chat ? "\"text\":"
                         : request->stream ? "\"delta\":{\"content\":"
                                           : "\"message\":{\"role\":\"assistant\",\"content\":";
    const char *after = !request->is_chat ? "" : request->stream ? "}" : ",\"refusal\":null}";
    text_append_string(out, before);
    text_append_json(out, choice->text.data, choice->visible - choice->forgotten);
    text_append_string(out, after);
}

/* What is visible of a choice and not yet forgotten. */
static void write_choice(const struct completion *completion, size_t index,
                         struct text_buffer *out) {
    const struct choice *choice = &completion->choices[index];
    size_t top_count, records = choice_visible_records(choice, &top_count);
    text_append_format(out, "{\"index\":%zu,", index);
    write_text(choice, out);
    text_append_string(out, ",\"logprobs\":");
    if (completion->request->top_logprobs < 0) {
        text_append_string(out, "null");
    } else if (completion->request->is_chat) {
        write_chat_logprobs(choice, records, out);
    } else {
        write_logprobs(choice, records, out);
    }
    if (choice->finish) {
        text_append_format(out, ",\"finish_reason\":\"%s\"", choice->finish);
    } else {
        text_append_string(out, ",\"finish_reason\":null");
    }
    if (completion->request->return_depth) {
        text_append_string(out, ",\"depth\":[");
        for (size_t i = 0; i < records; i++) {
            if (i > 0) text_append(out, ",", 1);
            text_append_number(out, choice->records[i].depth);
        }
        text_append_string(out, "]");
    }
    text_append_string(out, "}");
}

static double share_skipped(uint64_t run, uint64_t total) {
    return total == 0 || run > total ? 0 : 1 - (double)run / (double)total;
}

static void write_counts(size_t prompt, size_t completion, struct text_buffer *out) {
    text_append_format(out, "\"prompt_tokens\":%zu,\"completion_tokens\":%zu,\"total_tokens\":%zu",
                       prompt, completion, prompt + completion);
}

static void write_usage(const struct completion *completion, struct text_buffer *out) {
    struct engine_usage usage;
    completion_get_usage(completion, &usage);
    text_append_string(out, "{");
    write_counts(usage.prompt_tokens, usage.completion_tokens, out);
    text_append_format(out,
                       ",\"prompt_tokens_details\":{\"cached_tokens\":%zu},\"depth\":"
                       "{\"sublayers_run\":%llu,\"sublayers_total\":%llu,\"attn_skip\":%.6g,"
                       "\"mlp_skip\":%.6g}}",
                       usage.cached_tokens, (unsigned long long)(usage.attn_run + usage.mlp_run),
                       (unsigned long long)(usage.attn_total + usage.mlp_total),
                       share_skipped(usage.attn_run, usage.attn_total),
                       share_skipped(usage.mlp_run, usage.mlp_total));
}

static void write_prefix(const struct completion *completion, struct text_buffer *out) {
    text_append(out, completion->prefix.data, completion->prefix.length);
}

void completion_write_response(const struct completion *completion, struct text_buffer *out) {
    write_prefix(completion, out);
    for (size_t i = 0; i < completion->choice_count; i++) {
        if (i > 0) text_append_string(out, ",");
        write_choice(completion, i, out);
    }
    text_append_string(out, "],\"usage\":");
    write_usage(completion, out);
    text_append_string(out, "}");
}

/* A chunk's own usage is what is known in mid-stream: the counts of this choice so far. With
 * include_usage the field is in every chunk, null until the last. */
static void write_chunk_usage(const struct completion *completion, const struct choice *choice,
                              struct text_buffer *out) {
    if (completion->request->continuous_usage) {
        text_append_string(out, ",\"usage\":{");
        write_counts(choice->prompt->tokens.count, choice->completion_tokens, out);
        text_append_string(out, "}");
    } else if (completion->request->include_usage) {
        text_append_string(out, ",\"usage\":null");
    }
}

/* The first event of a choice of a chat. */
static void write_role_chunk(const struct completion *completion, size_t index,
                             struct text_buffer *out) {
    text_append_string(out, "data: ");
    write_prefix(completion, out);
    text_append_format(out,
                       "{\"index\":%zu,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
                       "\"logprobs\":null,\"finish_reason\":null}]",
                       index);
    write_chunk_usage(completion, &completion->choices[index], out);
    text_append_string(out, "}\n\n");
}

bool completion_write_chunk(struct completion *completion, size_t index, struct text_buffer *out) {
    struct choice *choice = &completion->choices[index];
    bool has_news =
        choice->visible > choice->forgotten || (choice->finish && !choice->finish_written);
    if (!has_news) return false;
    if (completion->request->is_chat && !choice->role_written) {
        write_role_chunk(completion, index, out);
        choice->role_written = true;
    }
    text_append_string(out, "data: ");
    write_prefix(completion, out);
    write_choice(completion, index, out);
    text_append_string(out, "]");
    write_chunk_usage(completion, choice, out);
    text_append_string(out, "}\n\n");
    choice->finish_written = choice->finish != NULL;
    choice_forget(choice);
    return true;
}

void completion_write_usage_chunk(const struct completion *completion, struct text_buffer *out) {
    text_append_string(out, "data: ");
    write_prefix(completion, out);
    text_append_string(out, "],\"usage\":");
    write_usage(completion, out);
    text_append_string(out, "}\n\n");
}

void stream_write_error(const struct api_error *error, struct text_buffer *out) {
    text_append_string(out, "data: ");
    api_error_write(error, out);
    text_append_string(out, "\n\n");
}

void stream_write_done(struct text_buffer *out) {
    text_append_string(out, "data: [DONE]\n\n");
}

void stream_write_ping(struct text_buffer *out) {
    text_append_string(out, ": ping\n\n");
}
