#include "engine/tokenizer_private.h"

#include <stdlib.h>
#include <string.h>

/* One call of tokenizer_encode. The buffers are reused from piece to piece. */
struct encoding {
    const struct tokenizer *tokenizer;
    bool parse_special;
    struct token_list *out;
    struct split_state split;
    struct byte_buffer normalized, prefixed;
    struct error *error;
};

int token_list_push(struct token_list *list, int32_t id, struct error *error) {
    int result = token_list_reserve(list, 1, error);
    if (result == 0) list->ids[list->count++] = id;
    return result;
}

static int push_token(struct encoding *encoding, int32_t id) {
    return token_list_push(encoding->out, id, encoding->error);
}

static int encode_pretoken(struct encoding *encoding, const char *bytes, size_t length) {
    const struct tokenizer *tokenizer = encoding->tokenizer;
    int32_t whole = vocabulary_find(&tokenizer->vocabulary, bytes, length);
    if (whole >= 0 && (tokenizer->vocabulary.flags[whole] & TOKEN_WHOLE)) {
        return push_token(encoding, whole);
    }
    return merge_encode(tokenizer, bytes, length, encoding->split.stop, encoding->out,
                        encoding->error);
}

/* Where a stretch of text stands: behind bytes that are no text, behind an added token, or
 * first. */
enum place { PLACE_INSIDE, PLACE_BEHIND, PLACE_FIRST };

static int encode_pieces(struct encoding *encoding, const char *text, size_t length,
                         enum place place) {
    const struct piece_rules *rules = &encoding->tokenizer->pieces;
    bool prefix = text[0] != ' ' &&
                  ((rules->space == PREFIX_ALWAYS && place != PLACE_INSIDE) ||
                   (rules->space == PREFIX_FIRST && place == PLACE_FIRST));
    if (prefix) {
        int result = piece_text(text, length, true, &encoding->prefixed, encoding->error);
        if (result != 0) return result;
        text = encoding->prefixed.bytes;
        length = encoding->prefixed.length;
    }
    int result = 0;
    for (size_t at = 0; at < length && result == 0;) {
        if ((result = stop_check(encoding->split.stop, encoding->error)) != 0) break;
        size_t word = rules->splits_words ? piece_word(text + at, length - at) : length;
        result = encode_pretoken(encoding, text + at, word);
        at += word;
    }
    return result;
}

/* Text without added tokens. */
static int encode_words(struct encoding *encoding, const char *text, size_t length,
                        enum place place) {
    const struct pretokenizer *pretokenizer = encoding->tokenizer->pretokenizer;
    if (encoding->tokenizer->has_pieces) return encode_pieces(encoding, text, length, place);
    if (place != PLACE_INSIDE && text[0] != ' ' && pretokenizer_adds_prefix_space(pretokenizer)) {
        struct byte_buffer *prefixed = &encoding->prefixed;
        prefixed->length = 0;
        int result = byte_buffer_reserve(prefixed, length + 1, encoding->error);
        if (result != 0) return result;
        prefixed->bytes[0] = ' ';
        memcpy(prefixed->bytes + 1, text, length);
        text = prefixed->bytes;
        length++;
    }
    int result = pretokenizer_split(pretokenizer, &encoding->split, text, length, encoding->error);
    const struct span_list *spans = &encoding->split.spans;
    for (size_t i = 0; i < spans->count && result == 0; i++) {
        if ((result = stop_check(encoding->split.stop, encoding->error)) != 0) break;
        struct span span = spans->items[i];
        result = encode_pretoken(encoding, text + span.start, span.end - span.start);
    }
    return result;
}

typedef int encode_part(struct encoding *encoding, const char *text, size_t length,
                        enum place place);

/* Cuts out the matcher's added tokens; what is between them (never empty) goes to `part`. */
static int encode_between(struct encoding *encoding, const struct added_matcher *matcher,
                          const char *text, size_t length, enum place place, encode_part *part) {
    size_t at = 0;
    int result = 0;
    while (at < length && result == 0) {
        struct added_match match = {length, length, -1};
        bool found = added_matcher_find(matcher, text, length, at, encoding->parse_special, &match);
        if (match.start > at) result = part(encoding, text + at, match.start - at, place);
        if (found && result == 0) result = push_token(encoding, match.id);
        at = match.end;
        place = PLACE_BEHIND;
    }
    return result;
}

static int encode_normalized(struct encoding *encoding, const char *text, size_t length,
                             enum place place) {
    const struct tokenizer *tokenizer = encoding->tokenizer;
    bool prepends = tokenizer->pieces.prepends && place != PLACE_INSIDE;
    if (prepends || (tokenizer->has_pieces && piece_needs_text(text, length))) {
        int result = piece_text(text, length, prepends, &encoding->normalized, encoding->error);
        if (result != 0) return result;
        text = encoding->normalized.bytes;
        length = encoding->normalized.length;
    }
    if (tokenizer->normalizes && !text_is_surely_nfc(text, length)) {
        int result = text_normalize_nfc(text, length, &encoding->normalized, encoding->error);
        if (result != 0) return result;
        text = encoding->normalized.bytes;
        length = encoding->normalized.length;
    }
    return encode_between(encoding, &tokenizer->normalized_added, text, length, place,
                          encode_words);
}

/* Alternates valid stretches and invalid bytes. A stretch behind an invalid byte gets no prefix
 * space: it is no new text. */
static int encode_bytes(struct encoding *encoding, const char *text, size_t length) {
    const struct tokenizer *tokenizer = encoding->tokenizer;
    int result = 0;
    for (size_t at = 0; at < length && result == 0;) {
        size_t valid = utf8_valid_prefix(text + at, length - at);
        result = encode_between(encoding, &tokenizer->raw_added, text + at, valid,
                                at == 0 ? PLACE_FIRST : PLACE_INSIDE, encode_normalized);
        at += valid;
        if (result == 0 && at < length) {
            int32_t id = tokenizer->byte_tokens[(unsigned char)text[at++]];
            if (id >= 0) result = push_token(encoding, id);
        }
    }
    return result;
}

int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length,
                     bool parse_special, struct token_list *out, struct error *error) {
    return tokenizer_encode_until(tokenizer, text, length, parse_special, NULL, out, error);
}

int tokenizer_encode_until(const struct tokenizer *tokenizer, const char *text, size_t length,
                           bool parse_special, const atomic_bool *stop, struct token_list *out,
                           struct error *error) {
    if (length > TOKENIZER_TEXT_MAX) {
        return error_set(error, FATHOM_INVALID, "text has %zu bytes; the limit is %zu", length,
                         TOKENIZER_TEXT_MAX);
    }
    struct encoding encoding = {
        .tokenizer = tokenizer, .parse_special = parse_special, .out = out, .error = error};
    size_t count_before = out->count;
    split_state_init(&encoding.split, length, stop);
    int result = encode_bytes(&encoding, text, length);
    if (result != 0) out->count = count_before;
    split_state_clear(&encoding.split);
    free(encoding.normalized.bytes);
    free(encoding.prefixed.bytes);
    return result;
}

const char *tokenizer_bytes(const struct tokenizer *tokenizer, int32_t id, size_t *length) {
    return vocabulary_bytes(&tokenizer->vocabulary, id, length);
}

bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id) {
    if (id < 0 || (size_t)id >= tokenizer->vocabulary.size) return false;
    return tokenizer->vocabulary.flags[id] & TOKEN_SPECIAL;
}

size_t tokenizer_size(const struct tokenizer *tokenizer) {
    return tokenizer->vocabulary.size;
}

size_t tokenizer_longest(const struct tokenizer *tokenizer) {
    return tokenizer->longest;
}

/* Added tokens first: they may have the bytes of an ordinary one, and are what is looked for. */
int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text) {
    const struct vocabulary *vocabulary = &tokenizer->vocabulary;
    size_t text_length = strlen(text), length;
    for (size_t id = 0; id < vocabulary->size; id++) {
        if (!(vocabulary->flags[id] & TOKEN_ADDED)) continue;
        const char *bytes = vocabulary_bytes(vocabulary, (int32_t)id, &length);
        if (length == text_length && memcmp(bytes, text, length) == 0) return (int32_t)id;
    }
    return vocabulary_find(vocabulary, text, text_length);
}

bool tokenizer_strips_space(const struct tokenizer *tokenizer) {
    return tokenizer->pieces.strips;
}

bool tokenizer_adds_bos(const struct tokenizer *tokenizer) {
    return tokenizer->adds_bos;
}

int32_t model_start_token(const struct model_info *model, const struct tokenizer *tokenizer,
                          bool is_empty) {
    if (!is_empty && !tokenizer->adds_bos) return -1;
    if (model->bos >= 0 || !is_empty) return model->bos;
    return model->eos_count ? model->eos[0] : -1;
}

int32_t tokenizer_bos(const struct tokenizer *tokenizer) {
    return tokenizer->bos;
}

int32_t tokenizer_eos(const struct tokenizer *tokenizer) {
    return tokenizer->eos;
}

const char *tokenizer_chat_format(const struct tokenizer *tokenizer) {
    return tokenizer->chat_format;
}

const char *tokenizer_chat_template(const struct tokenizer *tokenizer) {
    return tokenizer->chat_template;
}

void tokenizer_destroy(struct tokenizer *tokenizer) {
    if (!tokenizer) return;
    vocabulary_clear(&tokenizer->vocabulary);
    merge_table_clear(&tokenizer->merges);
    added_matcher_clear(&tokenizer->raw_added);
    added_matcher_clear(&tokenizer->normalized_added);
    pretokenizer_destroy(tokenizer->pretokenizer);
    free(tokenizer->chat_template);
    free(tokenizer->chat_format);
    free(tokenizer);
}
