#include "api/choice.h"

#include <stdlib.h>
#include <string.h>

static void take_token(struct choice *choice, int32_t token, bool is_shown,
                       const struct engine_event *event);
static bool match_stops(struct choice *choice);
static void finish(struct choice *choice, const char *reason);

static size_t text_end(const struct choice *choice) {
    return choice->forgotten + choice->text.length;
}

bool choice_scores_prompt(const struct completion_request *request) {
    return request->echo && request->top_logprobs >= 0;
}

/* Of a text prompt the client sees again what it wrote, special tokens included (and as the
 * tokenizer normalised it, where tokens are listed one by one); ids are decoded as completions are,
 * without special tokens. */
static bool prompt_token_is_shown(const struct choice *choice, size_t index) {
    const struct prompt *prompt = choice->prompt;
    if (index < prompt->hidden || index >= prompt->tokens.count) return false;
    return prompt->text || !tokenizer_is_special(choice->tokenizer, prompt->tokens.ids[index]);
}

void choice_init(struct choice *choice, const struct completion_request *request,
                 const struct prompt *prompt, const struct tokenizer *tokenizer) {
    *choice = (struct choice){.request = request, .prompt = prompt, .tokenizer = tokenizer};
    if (!request->echo || choice_scores_prompt(request)) return;
    if (prompt->text) {
        text_append(&choice->text, prompt->text, prompt->text_length);
    } else {
        for (size_t i = 0; i < prompt->tokens.count; i++) {
            take_token(choice, prompt->tokens.ids[i], prompt_token_is_shown(choice, i), NULL);
        }
    }
    choice->visible = choice->matched = text_end(choice);
}

void choice_free(struct choice *choice) {
    text_free(&choice->text);
    free(choice->records);
    free(choice->top);
    *choice = (struct choice){0};
}

static unsigned push_token(struct choice *choice, const struct engine_event *event) {
    if (choice->finish) {
        choice->overrun_rows++;
        choice->overrun_attn += event->attn_depth;
        choice->overrun_mlp += (size_t)event->depth - event->attn_depth;
        return 0;
    }
    choice->completion_tokens++;
    bool is_shown = !event->is_stop && !tokenizer_is_special(choice->tokenizer, event->token);
    take_token(choice, event->token, is_shown, event);
    if (choice->completion_tokens <= choice->request->min_tokens) {
        choice->visible = choice->matched = text_end(choice);
    } else if (match_stops(choice)) {
        finish(choice, "stop");
        return PUSH_READY | PUSH_CANCEL;
    }
    if (event->is_stop) {
        finish(choice, "stop");
    } else if (choice->completion_tokens == choice->prompt->max_tokens) {
        finish(choice, "length");
    }
    return choice->visible > choice->forgotten || choice->finish ? PUSH_READY : 0;
}

static unsigned push_finished(struct choice *choice, const struct engine_event *event) {
    bool completed = event->finish == FINISH_STOP || event->finish == FINISH_LENGTH;
    unsigned flags = PUSH_DONE;
    choice->ended = true;
    choice->usage = event->usage;
    if (!choice->finish && !completed) return flags | PUSH_FAILED;
    if (!choice->finish) {
        /* Only where no token said so: max_tokens 0. */
        finish(choice, event->finish == FINISH_STOP ? "stop" : "length");
        flags |= PUSH_READY;
    }
    return flags;
}

unsigned choice_push(struct choice *choice, const struct engine_event *event) {
    unsigned flags = 0;
    switch (event->kind) {
    case EVENT_PROMPT:
        take_token(choice, event->token, prompt_token_is_shown(choice, choice->prompt_seen), event);
        choice->prompt_seen++;
        choice->visible = choice->matched = text_end(choice);
        break;
    case EVENT_TOKEN:
        flags = push_token(choice, event);
        break;
    case EVENT_FINISHED:
        flags = push_finished(choice, event);
        break;
    }
    return flags | (choice->failed || choice->text.failed ? PUSH_FAILED : 0);
}

/* Room for `extra` more elements; realloc as it doubles. */
static void *grow(void *array, size_t count, size_t extra, size_t element, size_t *capacity) {
    size_t need, bytes;
    if (!size_add(count, extra, &need)) return NULL;
    if (need <= *capacity) return array;
    need = need < 16 ? 16 : need;
    if (need < *capacity * 2) need = *capacity * 2;
    if (!size_multiply(need, element, &bytes)) return NULL;
    void *grown = realloc(array, bytes);
    if (grown) *capacity = need;
    return grown;
}

static void add_record(struct choice *choice, const struct token_record *record,
                       const struct engine_event *event) {
    size_t wanted = choice->request->top_logprobs > 0 ? (size_t)choice->request->top_logprobs : 0;
    size_t top_count = event->top_count < wanted ? event->top_count : wanted;
    if (top_count > TOP_LOGPROBS_MAX) top_count = TOP_LOGPROBS_MAX;
    void *records = grow(choice->records, choice->record_count, 1, sizeof *choice->records,
                         &choice->record_capacity);
    if (records) choice->records = records;
    void *top = top_count == 0 ? choice->top
                               : grow(choice->top, choice->top_count, top_count,
                                      sizeof *choice->top, &choice->top_capacity);
    if (top) choice->top = top;
    if (!records || (top_count > 0 && !top)) {
        choice->failed = true;
        return;
    }
    choice->records[choice->record_count] = *record;
    choice->records[choice->record_count++].top_count = (uint16_t)top_count;
    if (top_count > 0) {
        memcpy(choice->top + choice->top_count, event->top, top_count * sizeof *event->top);
    }
    choice->top_count += top_count;
}

/* The end of the text once the character under way is there too: it becomes at least one byte. */
static size_t torn_end(const struct choice *choice) {
    return text_end(choice) + (choice->decoder.length > 0);
}

/* Appends a token's bytes to the text. `event` brings what is recorded beside it; NULL: nothing. */
static void take_token(struct choice *choice, int32_t token, bool is_shown,
                       const struct engine_event *event) {
    size_t length = 0;
    const char *bytes = is_shown ? tokenizer_bytes(choice->tokenizer, token, &length) : "";
    struct token_record record = {.start = torn_end(choice)};
    record.offset = choice->characters + (choice->decoder.length > 0);
    for (size_t i = 0; i < length; i++) {
        choice->characters += utf8_resync(&choice->decoder, bytes[i], &choice->text);
        if (i == 0) record.start = text_end(choice), record.offset = choice->characters;
        choice->characters += utf8_take(&choice->decoder, bytes[i], &choice->text);
    }
    if (!event || (choice->request->top_logprobs < 0 && !choice->request->return_depth)) return;
    record.token = token;
    record.logprob = event->logprob;
    record.depth = event->depth;
    record.end = torn_end(choice);
    add_record(choice, &record, event);
}

/* Cuts the text at `cut`, and with it the tokens that begin there or later. */
static void cut_text(struct choice *choice, size_t cut) {
    choice->text.length = cut - choice->forgotten;
    while (choice->record_count > 0 && choice->records[choice->record_count - 1].start >= cut) {
        choice->top_count -= choice->records[--choice->record_count].top_count;
    }
}

/* Looks at the text that is new. True if a stop string is complete: then the text ends before it.
 * Else everything is visible but what may be the start of one. */
static bool match_stops(struct choice *choice) {
    const struct completion_request *request = choice->request;
    for (; choice->matched < text_end(choice); choice->matched++) {
        char byte = choice->text.data[choice->matched - choice->forgotten];
        size_t length = stop_take(&choice->matcher, request->stops, request->stop_count, byte);
        if (length == 0) continue;
        cut_text(choice, choice->matched + 1 - length);
        choice->decoder.length = 0; /* what was torn came after the match */
        return true;
    }
    choice->visible = text_end(choice) - stop_held(&choice->matcher, request->stop_count);
    return false;
}

/* No more text: what was held back is shown, and a torn character with it. */
static void finish(struct choice *choice, const char *reason) {
    choice->finish = reason;
    if (utf8_finish(&choice->decoder, &choice->text) > 0 && match_stops(choice)) {
        choice->finish = "stop"; /* U+FFFD can be a stop string, too */
    }
    choice->visible = text_end(choice);
}

size_t choice_visible_records(const struct choice *choice, size_t *top_count) {
    size_t count = 0;
    *top_count = 0;
    while (count < choice->record_count &&
           (choice->finish || choice->records[count].end <= choice->visible)) {
        *top_count += choice->records[count++].top_count;
    }
    return count;
}

void choice_forget(struct choice *choice) {
    size_t shown = choice->visible - choice->forgotten, top_count;
    size_t records = choice_visible_records(choice, &top_count);
    choice->forgotten = choice->visible;
    choice->text.length -= shown;
    choice->record_count -= records;
    choice->top_count -= top_count;
    if (choice->text.length > 0) {
        memmove(choice->text.data, choice->text.data + shown, choice->text.length);
    }
    if (choice->record_count > 0) {
        memmove(choice->records, choice->records + records,
                choice->record_count * sizeof *choice->records);
    }
    if (choice->top_count > 0) {
        memmove(choice->top, choice->top + top_count, choice->top_count * sizeof *choice->top);
    }
}
