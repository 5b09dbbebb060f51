/* SentencePiece-style tokenizers: pieces of characters, a space written as U+2581 in their names,
 * and bytes for characters that have no piece.
 *
 * Here a piece is kept as what it stands for, with spaces; a text's own U+2581 becomes a space
 * before it is cut, which is what the replacement in such a tokenizer.json amounts to. */
#include "engine/tokenizer_private.h"

#include <string.h>

#define SPACE_MARK        "\xE2\x96\x81" /* U+2581 */
#define SPACE_MARK_LENGTH 3

static bool is_mark(const char *text, size_t length) {
    return length >= SPACE_MARK_LENGTH && memcmp(text, SPACE_MARK, SPACE_MARK_LENGTH) == 0;
}

size_t piece_bytes(const char *name, size_t length, char *out) {
    size_t used = 0;
    for (size_t at = 0; at < length;) {
        bool mark = is_mark(name + at, length - at);
        out[used++] = mark ? ' ' : name[at];
        at += mark ? SPACE_MARK_LENGTH : 1;
    }
    return used;
}

bool piece_is_byte(const char *name, size_t length, unsigned char *byte) {
    if (length != 6 || memcmp(name, "<0x", 3) != 0 || name[5] != '>') return false;
    unsigned value = 0;
    for (size_t i = 3; i < 5; i++) {
        const char *digits = "0123456789ABCDEF", *digit = name[i] ? strchr(digits, name[i]) : NULL;
        if (!digit) return false;
        value = value << 4 | (unsigned)(digit - digits);
    }
    *byte = (unsigned char)value;
    return true;
}

/* ---- Loading --------------------------------------------------------------------------------- */

static bool is_string(const json_t *object, const char *key, const char *text) {
    const char *value = json_string_value(json_object_get(object, key));
    return value && strcmp(value, text) == 0;
}

static bool replaces(const json_t *step, const char *from, const char *to) {
    return is_string(json_object_get(step, "pattern"), "String", from) &&
           is_string(step, "content", to);
}

static int refuse(const char *what, const json_t *step, struct error *error) {
    return error_set(error, FATHOM_UNSUPPORTED,
                     "%s type '%.40s', so set, is not supported beside byte_fallback", what,
                     json_type_name(step));
}

/* All parts are optional. */
static int read_part(struct piece_rules *rules, const json_t *json, const char *part,
                     const char *steps, json_step_reader *read, struct error *error) {
    const json_t *found = json_object_get(json, part);
    if (!found || json_is_null(found)) return 0;
    return json_read_steps(found, steps, read, rules, error);
}

static int read_normalizer(void *context, const json_t *step, struct error *error) {
    struct piece_rules *rules = context;
    const char *type = json_type_name(step);
    if (strcmp(type, "Prepend") == 0 && is_string(step, "prepend", SPACE_MARK) &&
        !rules->prepends) {
        rules->prepends = true;
        return 0;
    }
    if (strcmp(type, "Replace") == 0 && replaces(step, " ", SPACE_MARK)) {
        rules->marks_spaces = rules->marks_early = true;
        return 0;
    }
    return refuse("normalizer", step, error);
}

static int read_metaspace(struct piece_rules *rules, const json_t *step, struct error *error) {
    const json_t *scheme = json_object_get(step, "prepend_scheme");
    bool adds, splits;
    int result = json_read_flag(step, "add_prefix_space", true, &adds, error);
    if (result == 0) result = json_read_flag(step, "split", true, &splits, error);
    if (result != 0) return result;
    if (!is_string(step, "replacement", SPACE_MARK)) return refuse("pre_tokenizer", step, error);
    rules->space = adds ? PREFIX_ALWAYS : PREFIX_NEVER;
    if (scheme) {
        if (is_string(step, "prepend_scheme", "always")) {
            rules->space = PREFIX_ALWAYS;
        } else if (is_string(step, "prepend_scheme", "first")) {
            rules->space = PREFIX_FIRST;
        } else if (is_string(step, "prepend_scheme", "never")) {
            rules->space = PREFIX_NEVER;
        } else {
            return refuse("pre_tokenizer", step, error);
        }
    }
    rules->splits_words = splits;
    rules->marks_spaces = true;
    return 0;
}

static int read_pretokenizer(void *context, const json_t *step, struct error *error) {
    struct piece_rules *rules = context;
    const char *type = json_type_name(step);
    if (strcmp(type, "Metaspace") == 0) return read_metaspace(rules, step, error);
    /* At a space, when the normalizer has left none: never. */
    if (strcmp(type, "Split") == 0 && rules->marks_early &&
        is_string(json_object_get(step, "pattern"), "String", " ")) {
        return 0;
    }
    return refuse("pre_tokenizer", step, error);
}

static int read_decoder(void *context, const json_t *step, struct error *error) {
    struct piece_rules *rules = context;
    const char *type = json_type_name(step);
    if (strcmp(type, "ByteFallback") == 0) {
        rules->decodes_bytes = true;
    } else if (strcmp(type, "Replace") == 0 && replaces(step, SPACE_MARK, " ")) {
        rules->decodes_spaces = true;
    } else if (strcmp(type, "Metaspace") == 0 && is_string(step, "replacement", SPACE_MARK)) {
        rules->decodes_spaces = true;
        rules->strips = !is_string(step, "prepend_scheme", "never");
    } else if (strcmp(type, "Strip") == 0 && is_string(step, "content", " ") &&
               json_integer_value(json_object_get(step, "stop")) == 0 &&
               json_integer_value(json_object_get(step, "start")) >= 0 &&
               json_integer_value(json_object_get(step, "start")) <= 1) {
        rules->strips = json_integer_value(json_object_get(step, "start")) == 1;
    } else if (strcmp(type, "Fuse") != 0) {
        return refuse("decoder", step, error);
    }
    return 0;
}

int piece_rules_read(struct piece_rules *rules, const json_t *json, struct error *error) {
    int result = read_part(rules, json, "normalizer", "normalizers", read_normalizer, error);
    if (result == 0) {
        result = read_part(rules, json, "pre_tokenizer", "pretokenizers", read_pretokenizer, error);
    }
    if (result == 0) {
        result = read_part(rules, json, "decoder", "decoders", read_decoder, error);
    }
    if (result != 0) return result;
    if (rules->marks_spaces && rules->decodes_spaces && rules->decodes_bytes) return 0;
    return error_set(
        error, FATHOM_UNSUPPORTED,
        "byte_fallback is supported where spaces are replaced by U+2581 and the decoder "
        "has ByteFallback and puts spaces back");
}

/* ---- Encoding -------------------------------------------------------------------------------- */

int piece_text(const char *text, size_t length, bool prefix, struct byte_buffer *out,
               struct error *error) {
    out->length = 0;
    int result = byte_buffer_reserve(out, length + 1, error);
    if (result != 0) return result;
    if (prefix) out->bytes[out->length++] = ' ';
    out->length += piece_bytes(text, length, out->bytes + out->length);
    return 0;
}

bool piece_needs_text(const char *text, size_t length) {
    return memmem(text, length, SPACE_MARK, SPACE_MARK_LENGTH) != NULL;
}

size_t piece_word(const char *text, size_t length) {
    const char *space = length > 1 ? memchr(text + 1, ' ', length - 1) : NULL;
    return space ? (size_t)(space - text) : length;
}

int piece_start(const struct tokenizer *tokenizer, const char *text, size_t length,
                struct token_list *out, struct error *error) {
    int result = token_list_reserve(out, length, error); /* at most one token per byte */
    for (size_t at = 0; at < length && result == 0;) {
        size_t next = at + 1;
        while (next < length && ((unsigned char)text[next] & 0xC0) == 0x80) next++;
        int32_t id = vocabulary_find(&tokenizer->vocabulary, text + at, next - at);
        if (id >= 0) {
            out->ids[out->count++] = id;
        } else {
            for (size_t i = at; i < next; i++) {
                int32_t token = tokenizer->byte_tokens[(unsigned char)text[i]];
                if (token >= 0) out->ids[out->count++] = token;
            }
        }
        at = next;
    }
    return result;
}
