/* What stands beside tokenizer.json: tokenizer_config.json, chat_template.jinja. */
#include "engine/tokenizer_private.h"

#include "engine/json_field.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILE_LIMIT          ((size_t)64 << 20)
#define PATH_LENGTH_MAX     4096
#define CHAT_TEMPLATE_LIMIT ((size_t)256 << 10) /* it is looked through for every chat */

static int load_members(struct tokenizer *tokenizer, const json_t *config, struct error *error);
static int load_template_file(struct tokenizer *tokenizer, const char *folder, struct error *error);

int tokenizer_load_config(struct tokenizer *tokenizer, const char *folder, struct error *error) {
    json_t *config = NULL;
    int result = tokenizer_load_json(folder, "tokenizer_config.json", &config, error);
    if (result == 0) {
        result = load_members(tokenizer, config, error);
        if (result != 0) error_prefix(error, "tokenizer_config.json");
        json_decref(config);
    } else if (result == FATHOM_NOT_FOUND) {
        result = error_set(error, 0, "%s", "");
    }
    return result ? result : load_template_file(tokenizer, folder, error);
}

static int read_file(const char *folder, const char *name, size_t limit, char **data, size_t *size,
                     struct error *error) {
    char path[PATH_LENGTH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (length < 0 || (size_t)length >= sizeof path) {
        return error_set(error, FATHOM_INVALID, "the path of %s is longer than %d bytes", name,
                         PATH_LENGTH_MAX);
    }
    return file_read(path, limit, data, size, error);
}

int tokenizer_load_json(const char *folder, const char *name, json_t **json, struct error *error) {
    char *data;
    size_t size;
    int result = read_file(folder, name, FILE_LIMIT, &data, &size, error);
    if (result != 0) return result;
    result = json_object_parse(data, size, json, error);
    free(data);
    return result == 0 ? 0 : error_prefix(error, "%s", name);
}

/* "bos_token": a string, or an object with "content", or null. */
static int load_named_token(const struct tokenizer *tokenizer, const json_t *config,
                            const char *key, int32_t *id, struct error *error) {
    const json_t *value = json_object_get(config, key);
    if (!value || json_is_null(value)) return 0;
    const char *text =
        json_string_value(json_is_object(value) ? json_object_get(value, "content") : value);
    if (!text) {
        return error_set(error, FATHOM_INVALID, "'%s' is neither a string nor has it 'content'",
                         key);
    }
    *id = tokenizer_find(tokenizer, text);
    if (*id >= 0) return 0;
    return error_set(error, FATHOM_INVALID, "%s '%.80s' is not in the vocabulary", key, text);
}

/* A copy of an optional string. */
static int load_string(const json_t *value, const char *key, char **out, struct error *error) {
    if (!value || json_is_null(value)) return 0;
    if (!json_is_string(value) || json_string_length(value) > CHAT_TEMPLATE_LIMIT) {
        return error_set(error, FATHOM_INVALID, "%s is not a string of at most %zu bytes", key,
                         CHAT_TEMPLATE_LIMIT);
    }
    *out = strdup(json_string_value(value));
    return *out ? 0 : error_set(error, FATHOM_NO_MEMORY, "no memory for %s", key);
}

/* "chat_template": the template, or a list of {"name", "template"}, of which "default" is meant.
 * A list without it gives the empty template, which is none that anybody knows. */
static int load_chat_template(const json_t *value, char **out, struct error *error) {
    static const char key[] = "chat_template";
    if (!json_is_array(value)) return load_string(value, key, out, error);
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *entry = json_array_get(value, i), *text = json_object_get(entry, "template");
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (name && strcmp(name, "default") == 0 && json_is_string(text)) {
            return load_string(text, key, out, error);
        }
    }
    *out = strdup("");
    return *out ? 0 : error_set(error, FATHOM_NO_MEMORY, "no memory for %s", key);
}

static int load_members(struct tokenizer *tokenizer, const json_t *config, struct error *error) {
    int result = load_named_token(tokenizer, config, "bos_token", &tokenizer->bos, error);
    if (result == 0) {
        result = load_named_token(tokenizer, config, "eos_token", &tokenizer->eos, error);
    }
    if (result == 0) {
        result = json_read_flag(config, "add_bos_token", tokenizer->adds_bos, &tokenizer->adds_bos,
                                error);
    }
    if (result == 0 && tokenizer->adds_bos && tokenizer->bos < 0) {
        result =
            error_set(error, FATHOM_INVALID, "add_bos_token is true, but there is no bos_token");
    }
    if (result == 0) {
        result = load_string(json_object_get(config, "chat_format"), "chat_format",
                             &tokenizer->chat_format, error);
    }
    if (result == 0) {
        result = load_chat_template(json_object_get(config, "chat_template"),
                                    &tokenizer->chat_template, error);
    }
    return result;
}

/* The file goes before the member, as it does where these files come from. */
static int load_template_file(struct tokenizer *tokenizer, const char *folder,
                              struct error *error) {
    char *text;
    size_t size;
    int result = read_file(folder, "chat_template.jinja", CHAT_TEMPLATE_LIMIT, &text, &size, error);
    if (result == FATHOM_NOT_FOUND) return error_set(error, 0, "%s", "");
    if (result != 0) return result;
    free(tokenizer->chat_template);
    tokenizer->chat_template = text;
    return 0;
}
