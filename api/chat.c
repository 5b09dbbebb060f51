#include "api/chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_SIZE 64 /* of "messages[1023].content[65535].text" and its like */

/* Members of a message that an assistant's answer may carry back, and that would be lost here. */
static const char *const unsupported[] = {"tool_calls", "tool_call_id", "function_call", "audio",
                                          "refusal"};

static int read_role(const json_t *message, const char *path, enum chat_role *role,
                     struct api_error *error) {
    static const struct {
        const char *name;
        enum chat_role role;
    } roles[] = {
        {"system", ROLE_SYSTEM},
        {"developer", ROLE_SYSTEM}, /* its newer name */
        {"user", ROLE_USER},
        {"assistant", ROLE_ASSISTANT},
    };
    const json_t *value = field_get(message, "role");
    const char *found = json_string_value(value);
    char name[NAME_SIZE];
    snprintf(name, sizeof name, "%s.role", path);
    if (!found) return field_refuse(name, value, error, "a string");
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
        if (!value_is_word(value, roles[i].name)) continue;
        *role = roles[i].role;
        return 0;
    }
    return api_error_set(error, 400, NULL, name,
                         "%s is '%.32s'; supported are system, developer, user and assistant "
                         "(tools are not supported here)",
                         name, found);
}

static int read_part(const json_t *part, const char *path, struct text_buffer *content,
                     struct api_error *error) {
    char name[NAME_SIZE];
    if (!json_is_object(part)) return field_refuse(path, part, error, "an object");
    const json_t *type = field_get(part, "type"), *text = field_get(part, "text");
    snprintf(name, sizeof name, "%s.type", path);
    if (!json_is_string(type)) return field_refuse(name, type, error, "\"text\"");
    if (!value_is_word(type, "text")) {
        return api_error_set(error, 400, "unsupported_parameter", name,
                             "%s is '%.32s'; only text is supported here", name,
                             json_string_value(type));
    }
    snprintf(name, sizeof name, "%s.text", path);
    if (!json_is_string(text)) return field_refuse(name, text, error, "a string");
    text_append(content, json_string_value(text), json_string_length(text));
    return 0;
}

/* A string, or parts of text, which are put on lines of their own as other servers do. */
static int read_content(const json_t *message, const char *path, struct text_buffer *content,
                        struct api_error *error) {
    const json_t *value = field_get(message, "content");
    char name[NAME_SIZE], part[NAME_SIZE];
    snprintf(name, sizeof name, "%s.content", path);
    if (json_is_string(value)) {
        text_append(content, json_string_value(value), json_string_length(value));
    } else if (json_array_size(value) == 0) {
        return field_refuse(name, value, error, "a string or a non-empty array of text parts");
    }
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (i > 0) text_append_string(content, "\n");
        int result =
            read_part(json_array_get(value, i), field_element(name, i, part), content, error);
        if (result != 0) return result;
    }
    return content->failed ? refuse_no_memory(error) : 0;
}

/* `name` and whatever else a message holds is ignored. */
static int read_message(const json_t *value, const char *path, struct chat_message *message,
                        struct api_error *error) {
    if (!json_is_object(value)) return field_refuse(path, value, error, "an object");
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported; i++) {
        char name[NAME_SIZE];
        const json_t *member = field_get(value, unsupported[i]);
        bool is_empty = json_is_array(member) && json_array_size(member) == 0;
        if (!member || is_empty) continue;
        snprintf(name, sizeof name, "%s.%s", path, unsupported[i]);
        return refuse_unsupported(name, error);
    }
    int result = read_role(value, path, &message->role, error);
    return result ? result : read_content(value, path, &message->content, error);
}

static int read_list(const json_t *list, struct chat *chat, struct api_error *error) {
    static const char name[] = "messages";
    size_t count = json_array_size(list);
    if (!json_is_array(list)) return field_refuse(name, list, error, "an array of messages");
    if (count == 0) {
        return api_error_set(error, 400, NULL, name, "messages is empty: give at least one");
    }
    if (count > CHAT_MESSAGES_MAX) {
        return api_error_set(error, 400, NULL, name, "messages holds %zu messages; the limit is %d",
                             count, CHAT_MESSAGES_MAX);
    }
    chat->messages = calloc(count, sizeof *chat->messages);
    if (!chat->messages) return refuse_no_memory(error);
    chat->count = count;
    for (size_t i = 0; i < count; i++) {
        char path[NAME_SIZE];
        int result = read_message(json_array_get(list, i), field_element(name, i, path),
                                  &chat->messages[i], error);
        if (result != 0) return result;
    }
    return 0;
}

static int read_ending(const json_t *body, enum chat_ending *ending, struct api_error *error) {
    bool continues = false;
    int result = field_read_bool(body, "continue_final_message", &continues, error);
    bool generates = !continues;
    if (!result) result = field_read_bool(body, "add_generation_prompt", &generates, error);
    if (result != 0) return result;
    if (continues && generates) {
        return api_error_set(error, 400, NULL, "continue_final_message",
                             "continue_final_message and add_generation_prompt cannot both be "
                             "true: the last message goes on, or a new one begins");
    }
    *ending = continues ? END_IN_TURN : generates ? END_BEFORE_ANSWER : END_AFTER_TURN;
    return 0;
}

static int read_chat(const struct api_context *context, const json_t *body, struct chat *chat,
                     struct completion_request *request, struct api_error *error) {
    struct chat_dialect dialect = {0};
    int result = read_list(field_get(body, "messages"), chat, error);
    if (!result) result = read_ending(body, &chat->ending, error);
    if (!result) result = chat_dialect_find(context, &dialect, error);
    if (!result) result = chat_render(context, &dialect, chat, request, error);
    free(dialect.system);
    return result;
}

int messages_read(const struct api_context *context, const json_t *body,
                  struct completion_request *request, struct api_error *error) {
    struct chat chat = {0};
    int result = read_chat(context, body, &chat, request, error);
    for (size_t i = 0; i < chat.count; i++) text_free(&chat.messages[i].content);
    free(chat.messages);
    return result;
}
