#include "api/chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct rendering {
    const struct tokenizer *tokenizer;
    const struct chat_format *format;
    int32_t tokens[FORMAT_TOKENS_MAX]; /* ids of format->tokens; -1: not in the tokenizer */
    struct {
        const char *text;
        size_t length;
    } spellings[FORMAT_TOKENS_MAX]; /* of those that the tokenizer would find in plain text, too */
    size_t spelling_count;
    struct text_buffer text;
    struct prompt_mark *marks;
    size_t mark_count, mark_capacity;
    bool failed;
};

/* ---- Tokens ---------------------------------------------------------------------------------- */

/* The id if the tokenizer takes all of `text` for one token, else -1. */
static int32_t find_token(const struct tokenizer *tokenizer, const char *text) {
    struct token_list list = {0};
    int32_t id = tokenizer_eos(tokenizer);
    if (strcmp(text, CHAT_EOS) == 0 && id >= 0) return id;
    int result = tokenizer_encode(tokenizer, text, strlen(text), true, &list, NULL);
    id = result == 0 && list.count == 1 ? list.ids[0] : -1;
    free(list.ids);
    return id;
}

static void find_tokens(struct rendering *rendering) {
    for (size_t i = 0; i < FORMAT_TOKENS_MAX; i++) {
        size_t length;
        const char *text = rendering->format->tokens[i];
        int32_t id = text ? find_token(rendering->tokenizer, text) : -1;
        rendering->tokens[i] = id;
        if (id < 0 || tokenizer_is_special(rendering->tokenizer, id)) continue;
        text = tokenizer_bytes(rendering->tokenizer, id, &length);
        rendering->spellings[rendering->spelling_count].text = text;
        rendering->spellings[rendering->spelling_count++].length = length;
    }
}

/* Index of the format's token that a piece begins with, or -1; only those the tokenizer has. */
static int match_token(const struct rendering *rendering, const char *piece) {
    for (int i = 0; i < FORMAT_TOKENS_MAX; i++) {
        const char *text = rendering->format->tokens[i];
        if (rendering->tokens[i] >= 0 && strncmp(piece, text, strlen(text)) == 0) return i;
    }
    return -1;
}

static bool spells_token(const struct rendering *rendering, const char *bytes, size_t length) {
    for (size_t i = 0; i < rendering->spelling_count; i++) {
        size_t size = rendering->spellings[i].length;
        if (size <= length && memcmp(bytes, rendering->spellings[i].text, size) == 0) return true;
    }
    return false;
}

/* `token` -1: a cut. */
static void add_mark(struct rendering *rendering, int32_t token) {
    if (rendering->mark_count == rendering->mark_capacity) {
        size_t capacity = rendering->mark_capacity ? 2 * rendering->mark_capacity : 16;
        void *grown = realloc(rendering->marks, capacity * sizeof *rendering->marks);
        if (!grown) {
            rendering->failed = true;
            return;
        }
        rendering->marks = grown;
        rendering->mark_capacity = capacity;
    }
    rendering->marks[rendering->mark_count++] =
        (struct prompt_mark){.position = rendering->text.length, .token = token};
}

/* ---- Pieces ---------------------------------------------------------------------------------- */

/* The format's own text. Its tokens become marks, or text in a tokenizer that lacks them. */
static void add_piece(struct rendering *rendering, const char *piece) {
    while (*piece) {
        int token = match_token(rendering, piece);
        if (token >= 0) {
            add_mark(rendering, rendering->tokens[token]);
            piece += strlen(rendering->format->tokens[token]);
        } else {
            text_append(&rendering->text, piece++, 1);
        }
    }
}

/* A client's text. It is tokenized without special tokens, so that it cannot spell one. A token of
 * the format that is not marked special in the tokenizer would be recognised even so, or come out
 * of merges: such a spelling is cut behind its first byte. */
static void add_content(struct rendering *rendering, const char *content, size_t length) {
    size_t start = 0;
    for (size_t at = 0; at < length; at++) {
        if (!spells_token(rendering, content + at, length - at)) continue;
        text_append(&rendering->text, content + start, at + 1 - start);
        add_mark(rendering, -1);
        start = at + 1;
    }
    text_append(&rendering->text, content + start, length - start);
}

/* Bytes of the white space character that text[0..length) starts with (or, from_end, ends with);
 * 0: none. White space is what the templates' own language takes for it; the text is UTF-8. */
static size_t match_space(const char *text, size_t length, bool from_end) {
    static const char *const spaces[] = {
        "\t",           "\n",           "\v",           "\f",           "\r",
        "\x1C",         "\x1D",         "\x1E",         "\x1F",         " ",
        "\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80", "\xE2\x80\x80", "\xE2\x80\x81",
        "\xE2\x80\x82", "\xE2\x80\x83", "\xE2\x80\x84", "\xE2\x80\x85", "\xE2\x80\x86",
        "\xE2\x80\x87", "\xE2\x80\x88", "\xE2\x80\x89", "\xE2\x80\x8A", "\xE2\x80\xA8",
        "\xE2\x80\xA9", "\xE2\x80\xAF", "\xE2\x81\x9F", "\xE3\x80\x80"};
    for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++) {
        size_t size = strlen(spaces[i]);
        if (size > length) continue;
        const char *place = from_end ? text + length - size : text;
        if (memcmp(place, spaces[i], size) == 0) return size;
    }
    return 0;
}

static void add_text(struct rendering *rendering, const struct text_buffer *content) {
    const char *text = content->data;
    size_t length = content->length, space;
    if (length == 0) return;
    while (rendering->format->trims && (space = match_space(text, length, false)) > 0) {
        text += space;
        length -= space;
    }
    while (rendering->format->trims && (space = match_space(text, length, true)) > 0) {
        length -= space;
    }
    add_content(rendering, text, length);
}

/* ---- Turns ----------------------------------------------------------------------------------- */

/* `system`: text to go in front of the message's, within its turn; NULL: none. */
static void add_turn(struct rendering *rendering, const struct chat_message *message,
                     const struct chat_message *system, bool is_open) {
    const struct chat_format *format = rendering->format;
    add_piece(rendering, format->turns[message->role].open);
    if (system) {
        add_text(rendering, &system->content);
        add_piece(rendering, format->turns[ROLE_SYSTEM].close);
    }
    add_text(rendering, &message->content);
    if (!is_open) add_piece(rendering, format->turns[message->role].close);
}

/* Formats without a turn for the system: at most one such message, the first, then user and
 * assistant by turns. */
static int check_turns(const struct chat_format *format, const struct chat *chat,
                       struct api_error *error) {
    size_t first = chat->messages[0].role == ROLE_SYSTEM ? 1 : 0;
    if (format->system == SYSTEM_TURN) return 0;
    if (first == chat->count) {
        return api_error_set(error, 400, NULL, "messages",
                             "messages holds no user's message, which the %s format needs",
                             format->name);
    }
    for (size_t i = first; i < chat->count; i++) {
        bool is_users = (i - first) % 2 == 0;
        char name[64];
        if (chat->messages[i].role == (is_users ? ROLE_USER : ROLE_ASSISTANT)) continue;
        snprintf(name, sizeof name, "messages[%zu].role", i);
        return api_error_set(error, 400, NULL, name,
                             "%s must be '%s': in the %s format of this model a system message may "
                             "come first, then user and assistant take turns",
                             name, is_users ? "user" : "assistant", format->name);
    }
    return 0;
}

/* Index of the message whose turn takes the first one, a system message, in. */
static size_t find_system_place(const struct chat_format *format, const struct chat *chat) {
    size_t place = chat->count - 1;
    if (format->system == SYSTEM_IN_FIRST_USER) return 1;
    while (chat->messages[place].role != ROLE_USER) place--;
    return place;
}

static void render(struct rendering *rendering, const struct chat_dialect *dialect,
                   const struct chat *chat) {
    const struct chat_format *format = dialect->format;
    const struct chat_message *first = &chat->messages[0];
    int32_t bos = tokenizer_bos(rendering->tokenizer);
    if (dialect->adds_bos && bos >= 0) add_mark(rendering, bos);
    if (dialect->system && first->role != ROLE_SYSTEM) {
        struct chat_message system = {ROLE_SYSTEM,
                                      {.data = dialect->system, .length = strlen(dialect->system)}};
        add_turn(rendering, &system, NULL, false);
    }
    bool takes_in = format->system != SYSTEM_TURN && first->role == ROLE_SYSTEM;
    size_t place = takes_in ? find_system_place(format, chat) : 0;
    for (size_t i = takes_in ? 1 : 0; i < chat->count; i++) {
        bool is_open = chat->ending == END_IN_TURN && i + 1 == chat->count;
        add_turn(rendering, &chat->messages[i], takes_in && i == place ? first : NULL, is_open);
    }
    if (chat->ending == END_BEFORE_ANSWER) add_piece(rendering, format->generation);
}

int chat_render(const struct api_context *context, const struct chat_dialect *dialect,
                const struct chat *chat, struct completion_request *request,
                struct api_error *error) {
    struct rendering rendering = {.tokenizer = context->tokenizer, .format = dialect->format};
    int result = check_turns(dialect->format, chat, error);
    if (result != 0) return result;
    find_tokens(&rendering);
    render(&rendering, dialect, chat);
    text_append(&rendering.text, "", 1); /* a prompt's text is never NULL */
    request->prompts = calloc(1, sizeof *request->prompts);
    if (!request->prompts || rendering.text.failed || rendering.failed) {
        text_free(&rendering.text);
        free(rendering.marks);
        return refuse_no_memory(error);
    }
    request->prompt_count = 1;
    request->prompts[0] = (struct prompt){
        .text = rendering.text.data,
        .text_length = rendering.text.length - 1,
        .marks = rendering.marks,
        .mark_count = rendering.mark_count,
    };
    if (rendering.tokens[0] >= 0 && !request->ignore_eos) {
        request->stop_tokens[request->stop_token_count++] = rendering.tokens[0];
    }
    return 0;
}
