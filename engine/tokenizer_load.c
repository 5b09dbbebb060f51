#include "engine/tokenizer_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static int load_tokenizer(struct tokenizer *tokenizer, const json_t *json, const float *scores,
                          size_t score_count, struct error *error);

/* NFC composes at most 7 bytes to 2 (U+1FBE U+0308 U+0301 to U+0390): a factor below 4. */
#define NFC_SHRINKS_MAX 4
/* The three bytes of U+2581 are taken for a space. */
#define PIECE_SHRINKS_MAX 3
/* Bytes of a piece that merges can make; bounds the pairs of a file with scores. */
#define PIECE_LENGTH_MAX 256

static size_t find_longest(const struct tokenizer *tokenizer) {
    const struct vocabulary *vocabulary = &tokenizer->vocabulary;
    if (added_matcher_takes_space(&tokenizer->raw_added) ||
        added_matcher_takes_space(&tokenizer->normalized_added) ||
        (tokenizer->pretokenizer && pretokenizer_removes(tokenizer->pretokenizer))) {
        return SIZE_MAX;
    }
    for (size_t byte = 0; byte < 256; byte++) {
        if (tokenizer->byte_tokens[byte] < 0) return SIZE_MAX;
    }
    size_t longest = 1;
    for (size_t id = 0; id < vocabulary->size; id++) {
        size_t length = vocabulary->offsets[id + 1] - vocabulary->offsets[id];
        if (length > longest) longest = length;
    }
    if (tokenizer->has_pieces) return PIECE_SHRINKS_MAX * longest;
    return tokenizer->normalizes ? NFC_SHRINKS_MAX * longest : longest;
}

int tokenizer_create(const json_t *json, const float *scores, size_t count,
                     struct tokenizer **tokenizer, struct error *error) {
    struct tokenizer *loaded = calloc(1, sizeof *loaded);
    if (!loaded) return error_set(error, FATHOM_NO_MEMORY, "no memory for the tokenizer");
    int result = load_tokenizer(loaded, json, scores, count, error);
    if (result != 0) {
        tokenizer_destroy(loaded);
        return result;
    }
    loaded->longest = find_longest(loaded);
    *tokenizer = loaded;
    return 0;
}

int tokenizer_load(const char *folder, struct tokenizer **tokenizer, struct error *error) {
    json_t *json = NULL;
    int result = tokenizer_load_json(folder, "tokenizer.json", &json, error);
    if (result != 0) return result;
    struct tokenizer *loaded = NULL;
    if ((result = tokenizer_create(json, NULL, 0, &loaded, error)) != 0) {
        error_prefix(error, "tokenizer.json");
    } else {
        result = tokenizer_load_config(loaded, folder, error);
    }
    json_decref(json);
    if (result != 0) {
        tokenizer_destroy(loaded);
        return result;
    }
    *tokenizer = loaded;
    return 0;
}

/* ---- Byte-level names: bytes written as characters (GPT-2's bytes_to_unicode) ---------------- */

#define BYTE_CHARACTERS 324 /* 256 + the 68 bytes that do not stand for themselves */

/* Bytes that print in Latin-1 stand for themselves; the others are U+0100, U+0101, ... in order. */
static void fill_byte_characters(int16_t byte_of[BYTE_CHARACTERS]) {
    int next = 256;
    for (int i = 0; i < BYTE_CHARACTERS; i++) byte_of[i] = -1;
    for (int byte = 0; byte < 256; byte++) {
        bool prints = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
        byte_of[prints ? byte : next++] = (int16_t)byte;
    }
}

/* Turns `length` bytes of a name (valid UTF-8) into the bytes it stands for, written to `out`
 * (which has room for `length`). False if the name has a character that stands for no byte. */
static bool name_to_bytes(const int16_t byte_of[BYTE_CHARACTERS], const char *name, size_t length,
                          char *out, size_t *out_length) {
    *out_length = 0;
    for (size_t at = 0; at < length; at++) {
        int character = (unsigned char)name[at];
        if (character >= 0xE0) return false;
        if (character >= 0x80) {
            character = (character & 0x1F) << 6 | ((unsigned char)name[++at] & 0x3F);
        }
        if (character >= BYTE_CHARACTERS || byte_of[character] < 0) return false;
        out[(*out_length)++] = (char)byte_of[character];
    }
    return true;
}

/* ---- Vocabulary ------------------------------------------------------------------------------ */

/* What is needed while loading only. */
struct loading {
    struct tokenizer *tokenizer;
    const json_t *vocab, *merges, *added;
    int32_t unknown;     /* id of model.unk_token, or -1 */
    const float *scores; /* [score_count], in place of merges; NULL: none */
    size_t score_count;
    const char **names; /* by id, as model.vocab or added_tokens write them; owned by the JSON */
    size_t longest;     /* bytes of the longest name */
    int16_t byte_of[BYTE_CHARACTERS];
    struct error *error;
};

static int check_id(const struct loading *loading, const json_t *value, const char *name) {
    if (json_is_integer(value) && json_integer_value(value) >= 0 &&
        json_integer_value(value) < (json_int_t)TOKENIZER_IDS_MAX) {
        return 0;
    }
    return error_set(loading->error, FATHOM_INVALID, "token '%.80s' has no id in 0..%zu", name,
                     TOKENIZER_IDS_MAX - 1);
}

static const char *added_content(const json_t *added) {
    return json_string_value(json_object_get(added, "content"));
}

/* Finds how many ids there are; checks that every one is a number in range. */
static int measure_ids(struct loading *loading) {
    size_t *size = &loading->tokenizer->vocabulary.size;
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)loading->vocab, name, value) {
        if (check_id(loading, value, name) != 0) return FATHOM_INVALID;
        if ((size_t)json_integer_value(value) >= *size) {
            *size = (size_t)json_integer_value(value) + 1;
        }
    }
    for (size_t i = 0; i < json_array_size(loading->added); i++) {
        const json_t *added = json_array_get(loading->added, i);
        const json_t *id = json_object_get(added, "id");
        name = added_content(added);
        if (!name || !*name || strlen(name) > ADDED_TEXT_MAX) {
            return error_set(loading->error, FATHOM_INVALID,
                             "added_tokens[%zu] has no content of 1..%d bytes", i, ADDED_TEXT_MAX);
        }
        if (check_id(loading, id, name) != 0) return FATHOM_INVALID;
        if ((size_t)json_integer_value(id) >= *size) *size = (size_t)json_integer_value(id) + 1;
    }
    return 0;
}

/* Notes the name of every id; no id has two. */
static int collect_names(struct loading *loading) {
    struct vocabulary *vocabulary = &loading->tokenizer->vocabulary;
    loading->names = calloc(vocabulary->size + 1, sizeof *loading->names);
    vocabulary->flags = calloc(vocabulary->size + 1, 1);
    if (!loading->names || !vocabulary->flags) {
        return error_set(loading->error, FATHOM_NO_MEMORY, "no memory for %zu tokens",
                         vocabulary->size);
    }
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)loading->vocab, name, value) {
        const char **place = &loading->names[json_integer_value(value)];
        if (*place) {
            return error_set(loading->error, FATHOM_INVALID,
                             "tokens '%.80s' and '%.80s' have the same id", *place, name);
        }
        *place = name;
        if (strlen(name) > loading->longest) loading->longest = strlen(name);
    }
    for (size_t i = 0; i < json_array_size(loading->added); i++) {
        const json_t *added = json_array_get(loading->added, i);
        json_int_t id = json_integer_value(json_object_get(added, "id"));
        name = added_content(added);
        const json_t *ordinary = json_object_get(loading->vocab, name);
        bool taken = loading->names[id] && strcmp(loading->names[id], name) != 0;
        if (taken || (ordinary && json_integer_value(ordinary) != id) ||
            (vocabulary->flags[id] & TOKEN_ADDED)) {
            return error_set(
                loading->error, FATHOM_INVALID,
                "added token '%.80s': its id or its content is in the vocabulary already", name);
        }
        loading->names[id] = name;
        vocabulary->flags[id] |= TOKEN_ADDED;
    }
    return 0;
}

static bool token_bytes(const struct loading *loading, const char *name, size_t length, char *out,
                        size_t *out_length) {
    if (!loading->tokenizer->has_pieces) {
        return name_to_bytes(loading->byte_of, name, length, out, out_length);
    }
    *out_length = piece_bytes(name, length, out);
    return true;
}

/* Writes the bytes of all tokens into the pool and indexes those that merges can name. */
static int fill_vocabulary(struct loading *loading) {
    struct vocabulary *vocabulary = &loading->tokenizer->vocabulary;
    size_t room = 1;
    for (size_t id = 0; id < vocabulary->size; id++) {
        if (loading->names[id]) room += strlen(loading->names[id]); /* below FILE_LIMIT together */
    }
    vocabulary->pool = malloc(room);
    vocabulary->offsets = malloc((vocabulary->size + 1) * sizeof *vocabulary->offsets);
    if (!vocabulary->pool || !vocabulary->offsets) {
        return error_set(loading->error, FATHOM_NO_MEMORY, "no memory for %zu tokens",
                         vocabulary->size);
    }
    int result = vocabulary_create_index(vocabulary, loading->error);
    uint32_t at = 0;
    vocabulary->offsets[0] = 0;
    for (size_t id = 0; id < vocabulary->size && result == 0; id++) {
        const char *name = loading->names[id] ? loading->names[id] : "";
        size_t name_length = strlen(name), length = 0;
        char *out = vocabulary->pool + at;
        unsigned char byte;
        if (loading->tokenizer->has_pieces && !(vocabulary->flags[id] & TOKEN_ADDED) &&
            piece_is_byte(name, name_length, &byte)) {
            out[0] = (char)byte; /* reached by its byte alone: never merged, so not indexed */
            loading->tokenizer->byte_tokens[byte] = (int32_t)id;
            vocabulary->offsets[id + 1] = ++at;
            continue;
        }
        bool named = token_bytes(loading, name, name_length, out, &length);
        /* An added token is what it is written as, also where that could stand for bytes. */
        bool literal = !named || (vocabulary->flags[id] & TOKEN_ADDED);
        bool same = named && length == name_length && memcmp(out, name, length) == 0;
        if (literal) {
            memcpy(out, name, name_length);
            length = name_length;
        }
        at += (uint32_t)length;
        vocabulary->offsets[id + 1] = at;
        bool ordinary =
            !(vocabulary->flags[id] & TOKEN_ADDED) || json_object_get(loading->vocab, name);
        /* In a text of pieces every space is a marked one. */
        if (loading->tokenizer->has_pieces && strchr(name, ' ')) ordinary = false;
        if (length > 0 && ordinary && (same || !literal)) vocabulary_index(vocabulary, (int32_t)id);
    }
    return result;
}

/* Small vocabularies lack bytes that their training never saw: such a byte is model.unk_token, or
 * is dropped, as by others. Without the printable ones it is no vocabulary of bytes. */
static int find_byte_tokens(struct loading *loading) {
    struct tokenizer *tokenizer = loading->tokenizer;
    int missing = -1;
    bool refused = false;
    for (int byte = 0; byte < 256; byte++) {
        char text = (char)byte;
        int32_t id = tokenizer->has_pieces ? tokenizer->byte_tokens[byte]
                                           : vocabulary_find(&tokenizer->vocabulary, &text, 1);
        tokenizer->byte_tokens[byte] = id >= 0 ? id : loading->unknown;
        if (id < 0 && missing < 0) missing = byte;
        refused |= id < 0 && (tokenizer->has_pieces || (byte >= 0x20 && byte < 0x7F));
    }
    if (!refused) return 0;
    return error_set(loading->error, FATHOM_UNSUPPORTED,
                     "the vocabulary has no token for byte 0x%02X", (unsigned)missing);
}

/* ---- Merges ---------------------------------------------------------------------------------- */

/* The two names of a merge: ["a", "b"] or "a b". */
static bool merge_names(const json_t *merge, const char *names[2], size_t lengths[2]) {
    const char *line = json_string_value(merge);
    if (line) {
        const char *space = strchr(line, ' ');
        if (!space) return false;
        names[0] = line;
        lengths[0] = (size_t)(space - line);
        names[1] = space + 1;
        lengths[1] = strlen(names[1]);
        return true;
    }
    if (json_array_size(merge) != 2) return false;
    for (size_t i = 0; i < 2; i++) {
        names[i] = json_string_value(json_array_get(merge, i));
        if (!names[i]) return false;
        lengths[i] = strlen(names[i]);
    }
    return true;
}

/* `bytes` has room for two of the longest names. */
static int load_merge(struct loading *loading, size_t rank, char *bytes) {
    const struct vocabulary *vocabulary = &loading->tokenizer->vocabulary;
    const char *names[2];
    size_t name_lengths[2], length = 0;
    int32_t parts[2] = {-1, -1}, merged = -1;
    if (!merge_names(json_array_get(loading->merges, rank), names, name_lengths)) {
        return error_set(loading->error, FATHOM_INVALID,
                         "merges[%zu] is neither \"a b\" nor [\"a\", \"b\"]", rank);
    }
    for (size_t i = 0; i < 2; i++) {
        size_t part_length;
        bool known = name_lengths[i] <= loading->longest &&
                     token_bytes(loading, names[i], name_lengths[i], bytes + length, &part_length);
        if (known) parts[i] = vocabulary_find(vocabulary, bytes + length, part_length);
        if (parts[i] < 0) break;
        length += part_length;
    }
    if (parts[0] >= 0 && parts[1] >= 0) merged = vocabulary_find(vocabulary, bytes, length);
    if (merged < 0) {
        return error_set(loading->error, FATHOM_INVALID,
                         "merges[%zu]: '%.*s', '%.*s' or both together are not in the vocabulary",
                         rank, (int)(name_lengths[0] < 80 ? name_lengths[0] : 80), names[0],
                         (int)(name_lengths[1] < 80 ? name_lengths[1] : 80), names[1]);
    }
    merge_table_add(&loading->tokenizer->merges, parts[0], parts[1], (uint32_t)rank, merged);
    return 0;
}

/* Tokens by falling score, then by id. */
static int compare_scores(const void *a, const void *b, void *context) {
    const float *scores = context;
    int32_t one = *(const int32_t *)a, two = *(const int32_t *)b;
    if (scores[one] != scores[two]) return scores[one] > scores[two] ? -1 : 1;
    return (one > two) - (one < two);
}

/* Every pair of tokens that makes up `id`; all have its rank. Only counts them with `add` false. */
static size_t score_pairs(struct loading *loading, int32_t id, uint32_t rank, bool add) {
    const struct vocabulary *vocabulary = &loading->tokenizer->vocabulary;
    size_t length, pairs = 0;
    const char *bytes = vocabulary_bytes(vocabulary, id, &length);
    if (vocabulary_find(vocabulary, bytes, length) != id || length > PIECE_LENGTH_MAX) return 0;
    for (size_t at = 1; at < length; at++) {
        if (((unsigned char)bytes[at] & 0xC0) == 0x80) continue; /* inside a character */
        int32_t left = vocabulary_find(vocabulary, bytes, at);
        int32_t right = vocabulary_find(vocabulary, bytes + at, length - at);
        if (left < 0 || right < 0) continue;
        if (add) merge_table_add(&loading->tokenizer->merges, left, right, rank, id);
        pairs++;
    }
    return pairs;
}

static int load_scores(struct loading *loading) {
    struct tokenizer *tokenizer = loading->tokenizer;
    size_t size = tokenizer->vocabulary.size, count = size;
    int32_t *order = malloc((size + 1) * sizeof *order);
    if (!order) return error_set(loading->error, FATHOM_NO_MEMORY, "no memory for the merges");
    if (loading->score_count < size) {
        free(order);
        return error_set(loading->error, FATHOM_INVALID, "%zu scores for %zu tokens",
                         loading->score_count, size);
    }
    for (size_t id = 0; id < size; id++) {
        order[id] = (int32_t)id;
        count += score_pairs(loading, (int32_t)id, 0, false);
    }
    qsort_r(order, size, sizeof *order, compare_scores, (void *)(uintptr_t)loading->scores);
    int result =
        merge_table_create(&tokenizer->merges, count, tokenizer->vocabulary.seed, loading->error);
    for (size_t rank = 0; rank < size && result == 0; rank++) {
        score_pairs(loading, order[rank], (uint32_t)rank, true);
    }
    free(order);
    return result;
}

static int load_merges(struct loading *loading) {
    struct tokenizer *tokenizer = loading->tokenizer;
    if (loading->scores) return load_scores(loading);
    size_t count = json_array_size(loading->merges);
    if (count > TOKENIZER_MERGES_MAX) {
        return error_set(loading->error, FATHOM_INVALID, "%zu merges; the limit is %zu", count,
                         TOKENIZER_MERGES_MAX);
    }
    int result =
        merge_table_create(&tokenizer->merges, count, tokenizer->vocabulary.seed, loading->error);
    if (result != 0) return result;
    char *bytes = malloc(2 * loading->longest + 1);
    if (!bytes) return error_set(loading->error, FATHOM_NO_MEMORY, "no memory for the merges");
    for (size_t rank = 0; rank < count && result == 0; rank++) {
        result = load_merge(loading, rank, bytes);
    }
    free(bytes);
    return result;
}

/* Marks the tokens that merging their own bytes gives: encoding finds them without merging. With
 * ignore_merges every token is taken whole. A special token never comes out of ordinary text so. */
static int mark_whole_tokens(struct loading *loading, bool ignore_merges) {
    struct tokenizer *tokenizer = loading->tokenizer;
    struct token_list merged = {0};
    int result = 0;
    for (size_t i = 0; i < tokenizer->vocabulary.size && result == 0; i++) {
        size_t length;
        int32_t id = (int32_t)i;
        const char *bytes = vocabulary_bytes(&tokenizer->vocabulary, id, &length);
        if (length == 0 || (tokenizer->vocabulary.flags[i] & TOKEN_SPECIAL)) continue;
        merged.count = 0;
        if (!ignore_merges) {
            result = merge_encode(tokenizer, bytes, length, NULL, &merged, loading->error);
        }
        bool whole = ignore_merges || (merged.count == 1 && merged.ids[0] == id);
        if (result == 0 && whole) tokenizer->vocabulary.flags[i] |= TOKEN_WHOLE;
    }
    free(merged.ids);
    return result;
}

/* ---- Added tokens ---------------------------------------------------------------------------- */

static int load_added_token(struct loading *loading, const json_t *description) {
    struct tokenizer *tokenizer = loading->tokenizer;
    struct added_token token = {
        .id = (int32_t)json_integer_value(json_object_get(description, "id"))};
    bool normalized, single_word;
    struct error *error = loading->error;
    int result = json_read_flag(description, "special", false, &token.special, error);
    if (result == 0) {
        result = json_read_flag(description, "normalized", !token.special, &normalized, error);
    }
    if (result == 0) {
        result = json_read_flag(description, "lstrip", false, &token.takes_left, error);
    }
    if (result == 0) {
        result = json_read_flag(description, "rstrip", false, &token.takes_right, error);
    }
    if (result == 0) {
        result = json_read_flag(description, "single_word", false, &single_word, error);
    }
    if (result == 0 && single_word) {
        result = error_set(error, FATHOM_UNSUPPORTED, "single_word is not supported");
    }
    if (result != 0) return result;
    if (token.special) tokenizer->vocabulary.flags[token.id] |= TOKEN_SPECIAL;
    const char *text = added_content(description);
    if (!normalized) {
        return added_matcher_add(&tokenizer->raw_added, text, strlen(text), &token, error);
    }
    if (tokenizer->has_pieces) {
        struct byte_buffer piece = {0};
        result = piece_text(text, strlen(text), tokenizer->pieces.prepends, &piece, error);
        if (result == 0) {
            result = added_matcher_add(&tokenizer->normalized_added, piece.bytes, piece.length,
                                       &token, error);
        }
        free(piece.bytes);
        return result;
    }
    if (!tokenizer->normalizes) {
        return added_matcher_add(&tokenizer->normalized_added, text, strlen(text), &token, error);
    }
    struct byte_buffer normal = {0};
    result = text_normalize_nfc(text, strlen(text), &normal, error);
    if (result == 0) {
        result = added_matcher_add(&tokenizer->normalized_added, normal.bytes, normal.length,
                                   &token, error);
    }
    free(normal.bytes);
    return result;
}

static int load_added_tokens(struct loading *loading) {
    int result = 0;
    for (size_t i = 0; i < json_array_size(loading->added) && result == 0; i++) {
        const json_t *description = json_array_get(loading->added, i);
        result = load_added_token(loading, description);
        if (result != 0) {
            error_prefix(loading->error, "added token '%.80s'", added_content(description));
        }
    }
    return result;
}

/* ---- The other members of tokenizer.json ----------------------------------------------------- */

static int load_normalizer(struct tokenizer *tokenizer, const json_t *normalizer,
                           struct error *error) {
    const char *type = json_type_name(normalizer);
    if (!normalizer || json_is_null(normalizer)) return 0;
    if (strcmp(type, "NFC") == 0) {
        tokenizer->normalizes = true;
        return 0;
    }
    return error_set(error, FATHOM_UNSUPPORTED, "normalizer type '%.40s' is not supported", type);
}

static int load_decoder(const json_t *decoder, struct error *error) {
    const char *type = json_type_name(decoder);
    if (strcmp(type, "ByteLevel") == 0) return 0;
    return error_set(error, FATHOM_UNSUPPORTED, "decoder type '%.40s' is not supported", type);
}

/* "single" of a TemplateProcessing: the text, or one special token and the text. */
static int load_template(struct tokenizer *tokenizer, const json_t *processor,
                         struct error *error) {
    const json_t *single = json_object_get(processor, "single");
    size_t count = json_array_size(single);
    const json_t *first = json_object_get(json_array_get(single, 0), "SpecialToken");
    const json_t *last = json_object_get(json_array_get(single, count - 1), "Sequence");
    if (count < 1 || count > 2 || !last || (count == 2 && !first)) {
        return error_set(
            error, FATHOM_UNSUPPORTED,
            "a TemplateProcessing other than one special token before the text is not supported");
    }
    if (count == 1) return 0;
    const char *name = json_string_value(json_object_get(first, "id"));
    tokenizer->bos = name ? tokenizer_find(tokenizer, name) : -1;
    tokenizer->adds_bos = true;
    if (tokenizer->bos >= 0) return 0;
    return error_set(error, FATHOM_INVALID,
                     "the token of TemplateProcessing is not in the vocabulary");
}

static int load_processor(void *tokenizer, const json_t *processor, struct error *error) {
    const char *type = json_type_name(processor);
    if (!processor || json_is_null(processor) || strcmp(type, "ByteLevel") == 0) return 0;
    if (strcmp(type, "TemplateProcessing") == 0) return load_template(tokenizer, processor, error);
    return error_set(error, FATHOM_UNSUPPORTED, "post_processor type '%.40s' is not supported",
                     type);
}

/* A prefix or suffix that BPE would add to parts of words: byte-level tokenizers have none. */
static int check_no_affix(const json_t *model, const char *key, struct error *error) {
    const json_t *value = json_object_get(model, key);
    const char *text = json_string_value(value);
    if (!value || json_is_null(value) || (text && !*text)) return 0;
    return error_set(error, FATHOM_UNSUPPORTED, "model.%s is not supported", key);
}

static int check_model(const json_t *model, struct error *error) {
    const json_t *dropout = json_object_get(model, "dropout");
    if (strcmp(json_type_name(model), "BPE") != 0) {
        return error_set(error, FATHOM_UNSUPPORTED, "model type '%.40s' is not supported",
                         json_type_name(model));
    }
    if (dropout && !json_is_null(dropout) && json_number_value(dropout) != 0.0) {
        return error_set(error, FATHOM_UNSUPPORTED, "model.dropout is not supported");
    }
    if (!json_is_object(json_object_get(model, "vocab")) ||
        !json_is_array(json_object_get(model, "merges"))) {
        return error_set(error, FATHOM_INVALID, "model has no object 'vocab' or no list 'merges'");
    }
    int result = check_no_affix(model, "continuing_subword_prefix", error);
    return result ? result : check_no_affix(model, "end_of_word_suffix", error);
}

static int load_model(struct loading *loading, const json_t *json) {
    struct tokenizer *tokenizer = loading->tokenizer;
    const json_t *model = json_object_get(json, "model");
    bool ignore_merges = false;
    int result = json_read_flag(model, "ignore_merges", false, &ignore_merges, loading->error);
    if (result == 0) result = measure_ids(loading);
    if (result == 0) result = collect_names(loading);
    if (result == 0) result = fill_vocabulary(loading);
    if (result == 0) result = find_byte_tokens(loading);
    if (result == 0) result = load_merges(loading);
    if (result == 0 && !tokenizer->has_pieces) {
        result = load_normalizer(tokenizer, json_object_get(json, "normalizer"), loading->error);
    }
    if (result == 0) result = load_added_tokens(loading);
    if (result == 0) result = mark_whole_tokens(loading, ignore_merges);
    return result;
}

static int load_tokenizer(struct tokenizer *tokenizer, const json_t *json, const float *scores,
                          size_t score_count, struct error *error) {
    const json_t *model = json_object_get(json, "model"),
                 *added = json_object_get(json, "added_tokens");
    tokenizer->bos = tokenizer->eos = -1;
    if (added && !json_is_array(added)) {
        return error_set(error, FATHOM_INVALID, "added_tokens is not a list");
    }
    if (getrandom(&tokenizer->vocabulary.seed, sizeof tokenizer->vocabulary.seed, 0) < 0) {
        return error_set(error, FATHOM_IO, "the system gives no random numbers");
    }
    int result = check_model(model, error);
    if (result == 0) {
        result = json_read_flag(model, "byte_fallback", false, &tokenizer->has_pieces, error);
    }
    if (result != 0) return result;
    for (size_t i = 0; i < 256; i++) tokenizer->byte_tokens[i] = -1;
    if (tokenizer->has_pieces) {
        result = piece_rules_read(&tokenizer->pieces, json, error);
    } else {
        result = pretokenizer_create(json_object_get(json, "pre_tokenizer"),
                                     &tokenizer->pretokenizer, error);
        if (result == 0) result = load_decoder(json_object_get(json, "decoder"), error);
    }
    if (result != 0) return result;
    const json_t *unknown = json_object_get(
        json_object_get(model, "vocab"),
        json_is_string(json_object_get(model, "unk_token"))
            ? json_string_value(json_object_get(model, "unk_token"))
            : "");
    struct loading loading = {
        .tokenizer = tokenizer,
        .unknown = -1,
        .vocab = json_object_get(model, "vocab"),
        .merges = json_object_get(model, "merges"),
        .added = added,
        .scores = scores,
        .score_count = score_count,
        .error = error,
    };
    if (json_is_integer(unknown) && json_integer_value(unknown) >= 0 &&
        json_integer_value(unknown) < (json_int_t)TOKENIZER_IDS_MAX) {
        loading.unknown = (int32_t)json_integer_value(unknown);
    }
    fill_byte_characters(loading.byte_of);
    result = load_model(&loading, json);
    free(loading.names);
    if (result != 0) return result;
    return json_read_steps(json_object_get(json, "post_processor"), "processors", load_processor,
                           tokenizer, error);
}
