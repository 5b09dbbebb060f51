/* The tokenizer in a GGUF file's metadata, written as the tokenizer.json that would mean the same,
 * so that one loader checks both. */
#include <stdlib.h>
#include <string.h>

#include "engine/gguf.h"
#include "engine/tokenizer_private.h"

#define CHAT_TEMPLATE_LIMIT ((size_t)256 << 10)

/* tokenizer.ggml.token_type */
enum { KIND_NORMAL = 1, KIND_UNKNOWN = 2, KIND_CONTROL = 3, KIND_USER = 4, KIND_LAST = 6 };

#define LLAMA3                                                                                     \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}"           \
    "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define QWEN2                                                                                      \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}"                \
    "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define TEKKEN                                                                                     \
    "[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?[\\\\p{Lu}\\\\p{Lt}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]*"                \
    "[\\\\p{Ll}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]+|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?"                        \
    "[\\\\p{Lu}\\\\p{Lt}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]+[\\\\p{Ll}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]*"        \
    "|\\\\p{N}| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n/]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"

#define BYTE_LEVEL(regex)                                                                          \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":" regex "}"
#define SEQUENCE(first, second)                                                                    \
    "{\"type\":\"Sequence\",\"pretokenizers\":[" first "," second "]}"
#define SPLIT(regex)                                                                               \
    SEQUENCE("{\"type\":\"Split\",\"behavior\":\"Isolated\",\"invert\":false,"                     \
             "\"pattern\":{\"Regex\":\"" regex "\"}}",                                             \
             BYTE_LEVEL("false"))

/* tokenizer.ggml.pre: how the family's own tokenizer.json cuts text, and whether a whole word in
 * the vocabulary goes before its merges. */
static const struct pre {
    const char *name, *json;
    bool nfc, ignore_merges;
} pres[] = {
    {"gpt-2", BYTE_LEVEL("true"), false, false},
    {"smollm", SEQUENCE("{\"type\":\"Digits\",\"individual_digits\":true}", BYTE_LEVEL("true")),
     false, false},
    {"llama-bpe", SPLIT(LLAMA3), false, true},
    {"llama3", SPLIT(LLAMA3), false, true},
    {"llama-v3", SPLIT(LLAMA3), false, true},
    {"qwen2", SPLIT(QWEN2), true, false},
    {"deepseek-r1-qwen", SPLIT(QWEN2), true, false},
    {"tekken", SPLIT(TEKKEN), false, true},
};

/* The space mark is U+2581. */
#define PIECE_NORMALIZER                                                                           \
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\xE2\x96\x81\"}"
#define PIECE_PREFIX                                                                               \
    "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"\xE2\x96\x81\"}," \
    PIECE_NORMALIZER "]}"
#define PIECE_DECODER(strip)                                                                       \
    "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\","                                  \
    "\"pattern\":{\"String\":\"\xE2\x96\x81\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},"    \
    "{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" \",\"start\":" strip ",\"stop\":0}]}"

struct source {
    const struct gguf *file;
    const struct gguf_value *tokens, *kinds, *merges, *scores; /* kinds, merges: NULL if absent */
    bool has_pieces;
    struct error *error;
};

static int find_parts(struct source *source);
static int find_array(const struct source *source, const char *key, enum gguf_type element,
                      const struct gguf_value **value);
static int write_json(const struct source *source, json_t **json);
static int write_rules(const struct source *source, json_t *json, json_t *model);
static int write_tokens(const struct source *source, json_t *vocab, json_t *added);
static int write_merges(const struct source *source, json_t *merges);
static int read_settings(const struct source *source, struct tokenizer *tokenizer);

int gguf_load_tokenizer(const struct gguf *file, struct tokenizer **tokenizer,
                        struct error *error) {
    struct source source = {.file = file, .error = error};
    if (!gguf_find(file, "tokenizer.ggml.model")) {
        return error_set(error, FATHOM_NOT_FOUND, "the file has no tokenizer.ggml.model");
    }
    int result = find_parts(&source);
    if (result != 0) return result;
    json_t *json = NULL;
    float *scores = NULL;
    struct tokenizer *made = NULL;
    if (source.has_pieces) {
        scores = malloc((source.scores->count + 1) * sizeof *scores);
        if (!scores) return error_set(error, FATHOM_NO_MEMORY, "no memory for the scores");
        memcpy(scores, source.scores->data, source.scores->count * sizeof *scores);
        for (size_t i = 0; i < source.scores->count; i++) {
            if (scores[i] != scores[i]) scores[i] = -1e30f; /* a strict order has no NaN */
        }
    }
    result = write_json(&source, &json);
    if (result == 0) {
        result = tokenizer_create(json, scores, source.has_pieces ? source.scores->count : 0, &made,
                                  error);
        if (result != 0) error_prefix(error, "tokenizer");
    }
    if (result == 0) result = read_settings(&source, made);
    json_decref(json);
    free(scores);
    if (result != 0) {
        tokenizer_destroy(made);
        return result;
    }
    *tokenizer = made;
    return 0;
}

static int find_parts(struct source *source) {
    struct gguf_string model = {"", 0};
    int result = gguf_read_string(source->file, "tokenizer.ggml.model", &model, source->error);
    if (result != 0) return result;
    source->has_pieces = model.length == 5 && memcmp(model.bytes, "llama", 5) == 0;
    if (!source->has_pieces && (model.length != 4 || memcmp(model.bytes, "gpt2", 4) != 0)) {
        return error_set(source->error, FATHOM_UNSUPPORTED,
                         "tokenizer.ggml.model is \"%.*s\"; gpt2 and llama are supported",
                         (int)(model.length < 64 ? model.length : 64), model.bytes);
    }
    result = find_array(source, "tokenizer.ggml.tokens", GGUF_STRING, &source->tokens);
    if (result == 0) {
        result = find_array(source, "tokenizer.ggml.token_type", GGUF_INT32, &source->kinds);
    }
    if (result == 0) {
        result = find_array(source, "tokenizer.ggml.merges", GGUF_STRING, &source->merges);
    }
    if (result == 0) {
        result = find_array(source, "tokenizer.ggml.scores", GGUF_FLOAT32, &source->scores);
    }
    if (result != 0) return result;
    const char *missing = !source->tokens                       ? "tokens"
                          : source->has_pieces && !source->scores ? "scores"
                          : !source->has_pieces && !source->merges ? "merges"
                                                                   : NULL;
    if (missing) {
        return error_set(source->error, FATHOM_INVALID, "tokenizer.ggml.%s is missing", missing);
    }
    size_t count = source->tokens->count;
    if (count > TOKENIZER_IDS_MAX || (source->kinds && source->kinds->count != count) ||
        (source->has_pieces && source->scores->count != count)) {
        return error_set(source->error, FATHOM_INVALID,
                         "%zu tokens (the limit is %zu) with types or scores for another number",
                         count, TOKENIZER_IDS_MAX);
    }
    return 0;
}

static int find_array(const struct source *source, const char *key, enum gguf_type element,
                      const struct gguf_value **value) {
    *value = gguf_find(source->file, key);
    if (!*value || ((*value)->type == GGUF_ARRAY && (*value)->element == element)) return 0;
    return error_set(source->error, FATHOM_INVALID, "%s is not an array of the right type", key);
}

static int refuse_memory(const struct source *source) {
    return error_set(source->error, FATHOM_NO_MEMORY, "no memory for the tokenizer");
}

static int write_json(const struct source *source, json_t **json) {
    json_t *model = json_object(), *vocab = json_object(), *merges = json_array();
    json_t *added = json_array();
    *json = json_object();
    bool done = json_object_set_new(model, "type", json_string("BPE")) == 0;
    /* What fails to be set is freed by the setter. */
    done = json_object_set_new(model, "vocab", vocab) == 0 && done;
    done = json_object_set_new(model, "merges", merges) == 0 && done;
    done = json_object_set_new(*json, "model", model) == 0 && done;
    done = json_object_set_new(*json, "added_tokens", added) == 0 && done;
    if (!done) return refuse_memory(source);
    int result = write_rules(source, *json, model);
    if (result == 0) result = write_tokens(source, vocab, added);
    if (result == 0 && !source->has_pieces) result = write_merges(source, merges);
    return result;
}

static int write_rules(const struct source *source, json_t *json, json_t *model) {
    const char *normalizer = "null", *pretokenizer = "null", *decoder = "{\"type\":\"ByteLevel\"}";
    bool ignore_merges = false;
    if (source->has_pieces) {
        bool prefix = true;
        int result = gguf_read_flag(source->file, "tokenizer.ggml.add_space_prefix", &prefix,
                                    source->error);
        if (result != 0) return result;
        normalizer = prefix ? PIECE_PREFIX : PIECE_NORMALIZER;
        decoder = prefix ? PIECE_DECODER("1") : PIECE_DECODER("0");
    } else {
        struct gguf_string name = {"(none)", 6};
        const struct pre *pre = NULL;
        int result = gguf_read_string(source->file, "tokenizer.ggml.pre", &name, source->error);
        if (result != 0) return result;
        for (size_t i = 0; i < sizeof pres / sizeof *pres; i++) {
            bool same = strlen(pres[i].name) == name.length &&
                        memcmp(pres[i].name, name.bytes, name.length) == 0;
            if (same) pre = &pres[i];
        }
        if (!pre) {
            return error_set(source->error, FATHOM_UNSUPPORTED,
                             "tokenizer.ggml.pre is %.*s; gpt-2, smollm, llama-bpe, qwen2, "
                             "deepseek-r1-qwen and tekken are supported",
                             (int)(name.length < 64 ? name.length : 64), name.bytes);
        }
        if (pre->nfc) normalizer = "{\"type\":\"NFC\"}";
        pretokenizer = pre->json;
        ignore_merges = pre->ignore_merges;
    }
    const struct {
        json_t *object;
        const char *key, *text;
    } parts[] = {
        {json, "normalizer", normalizer},
        {json, "pre_tokenizer", pretokenizer},
        {json, "decoder", decoder},
        {model, "ignore_merges", ignore_merges ? "true" : "false"},
        {model, "byte_fallback", source->has_pieces ? "true" : "false"},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        json_t *value = json_loads(parts[i].text, JSON_DECODE_ANY, NULL);
        if (json_object_set_new(parts[i].object, parts[i].key, value) != 0) {
            return refuse_memory(source);
        }
    }
    return 0;
}

static int write_tokens(const struct source *source, json_t *vocab, json_t *added) {
    const unsigned char *at = source->tokens->data;
    for (size_t i = 0; i < source->tokens->count; i++) {
        struct gguf_string name = gguf_next_string(&at);
        int32_t kind = KIND_NORMAL;
        if (source->kinds) memcpy(&kind, source->kinds->data + i * sizeof kind, sizeof kind);
        if (kind < KIND_NORMAL || kind > KIND_LAST) {
            return error_set(source->error, FATHOM_INVALID, "token %zu has the unknown type %d", i,
                             (int)kind);
        }
        json_t *text = json_stringn(name.bytes, name.length);
        const char *key = json_string_value(text);
        if (!text || strlen(key) != name.length || json_object_get(vocab, key)) {
            json_decref(text);
            return error_set(source->error, FATHOM_INVALID,
                             "token %zu is no UTF-8 text, or an earlier token has the same", i);
        }
        int failed = json_object_set_new(vocab, key, json_integer((json_int_t)i));
        bool is_added = kind == KIND_CONTROL || kind == KIND_USER || kind == KIND_UNKNOWN;
        if (is_added && name.length > 0) {
            json_t *entry = json_pack("{s:I,s:O,s:b,s:b}", "id", (json_int_t)i, "content", text,
                                      "special", kind != KIND_USER, "normalized", 0);
            failed |= json_array_append_new(added, entry);
        }
        json_decref(text);
        if (failed) return refuse_memory(source);
    }
    return 0;
}

static int write_merges(const struct source *source, json_t *merges) {
    const unsigned char *at = source->merges->data;
    if (source->merges->count > TOKENIZER_MERGES_MAX) {
        return error_set(source->error, FATHOM_INVALID, "%zu merges; the limit is %zu",
                         source->merges->count, TOKENIZER_MERGES_MAX);
    }
    for (size_t i = 0; i < source->merges->count; i++) {
        struct gguf_string merge = gguf_next_string(&at);
        if (json_array_append_new(merges, json_stringn(merge.bytes, merge.length)) == 0) continue;
        return error_set(source->error, FATHOM_INVALID, "merge %zu is no UTF-8 text", i);
    }
    return 0;
}

static int read_id(const struct source *source, const char *key, int32_t *id) {
    int64_t number = -1;
    int result = gguf_read_integer(source->file, key, 0, (int64_t)source->tokens->count - 1,
                                   &number, source->error);
    *id = (int32_t)number;
    return result;
}

/* A family's BPE tokenizer begins texts with bos where its file says so; pieces do unless it says
 * not. */
static int read_settings(const struct source *source, struct tokenizer *tokenizer) {
    struct gguf_string template = {NULL, 0};
    tokenizer->adds_bos = source->has_pieces;
    int result = read_id(source, "tokenizer.ggml.bos_token_id", &tokenizer->bos);
    if (result == 0) result = read_id(source, "tokenizer.ggml.eos_token_id", &tokenizer->eos);
    if (result == 0) {
        result = gguf_read_flag(source->file, "tokenizer.ggml.add_bos_token", &tokenizer->adds_bos,
                                source->error);
    }
    if (result == 0) {
        result =
            gguf_read_string(source->file, "tokenizer.chat_template", &template, source->error);
    }
    if (result != 0) return result;
    if (tokenizer->bos < 0) tokenizer->adds_bos = false;
    if (!template.bytes) return 0;
    if (template.length > CHAT_TEMPLATE_LIMIT || memchr(template.bytes, 0, template.length)) {
        return error_set(source->error, FATHOM_INVALID,
                         "tokenizer.chat_template is not a text of at most %zu bytes",
                         CHAT_TEMPLATE_LIMIT);
    }
    tokenizer->chat_template = strndup(template.bytes, template.length);
    return tokenizer->chat_template ? 0 : refuse_memory(source);
}
