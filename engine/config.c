/* config.json: Hugging Face keys to a struct config with every default resolved. Here is what all
 * models share, and NAG; config_standard.c reads the rest of the others. */
#include "engine/config_parts.h"

#include <string.h>

#define MEBI ((int64_t)1 << 20)

/* Counts. The lowest value of each is 1; `fallback` 0 means that the key must be there or, where
 * `derived`, that it follows from the others. */
static const struct {
    const char *key;
    size_t offset;
    int64_t maximum, fallback;
    bool derived;
} counts[] = {
    {"vocab_size", offsetof(struct config, vocab), 4 * MEBI, 0, false},
    {"hidden_size", offsetof(struct config, hidden), 32768, 0, false},
    {"num_hidden_layers", offsetof(struct config, blocks), 1024, 0, false},
    {"num_attention_heads", offsetof(struct config, heads), 1024, 0, false},
    {"num_key_value_heads", offsetof(struct config, kv_heads), 1024, 0, true},
    {"head_dim", offsetof(struct config, head_size), 1024, 0, true},
    {"intermediate_size", offsetof(struct config, inner), 262144, 0, false},
    {"max_position_embeddings", offsetof(struct config, context), MEBI, 0, false},
};

/* Settings of other architectures that change the result without changing a tensor: a checkpoint
 * that asks for one must not load as if it had not. */
static const char *const refused[] = {"rope_scaling", "rope_parameters", "sliding_window"};

static int read_config(const json_t *object, struct config *config, struct error *error);
static int check_nag(const json_t *object, struct config *config, struct error *error);
static int read_counts(const json_t *object, struct config *config, struct error *error);
static int derive_heads(struct config *config, struct error *error);
static int read_words(const json_t *object, struct config *config, struct error *error);
static int read_word(const json_t *object, const char *key, const char *const *words, size_t count,
                     size_t *word, struct error *error);
static int read_numbers(const json_t *object, struct config *config, struct error *error);
static int read_tokens(const json_t *object, struct config *config, struct error *error);
static int read_eos(const json_t *value, struct config *config, struct error *error);

int config_parse(const char *text, size_t size, struct config *config, struct error *error) {
    json_t *object;
    int result = json_object_parse(text, size, &object, error);
    if (result != 0) return result;
    memset(config, 0, sizeof *config);
    result = read_config(object, config, error);
    json_decref(object);
    return result;
}

int config_parse_generation(const char *text, size_t size, struct config *config,
                            struct error *error) {
    json_t *object;
    int result = json_object_parse(text, size, &object, error);
    if (result != 0) return result;
    result = read_tokens(object, config, error);
    json_decref(object);
    return result;
}

static int read_config(const json_t *object, struct config *config, struct error *error) {
    static const char *const types[] = {"nag", "llama", "mistral", "qwen2", "qwen3"};
    size_t type;
    int result = json_read_choice(json_object_field(object, "model_type"), "model_type", types,
                                  sizeof types / sizeof *types, &type, error);
    if (result != 0) return result;
    config->is_standard = type > 0;
    config->bos = -1;
    config->qk_scale = 1;
    config->rope_theta = 10000;
    result = config->is_standard ? 0 : check_nag(object, config, error);
    if (result == 0) result = read_counts(object, config, error);
    if (result == 0 && config->is_standard) {
        result = config_read_standard(object, types[type], config, error);
    }
    if (result == 0) result = derive_heads(config, error);
    if (result == 0 && !config->is_standard) result = read_words(object, config, error);
    if (result == 0 && !config->is_standard) result = read_numbers(object, config, error);
    return result ? result : read_tokens(object, config, error);
}

static int check_nag(const json_t *object, struct config *config, struct error *error) {
    const json_t *directions = json_object_field(object, "nag_directions");
    int64_t count = 32;
    int result = 0;
    if (directions) {
        result = json_read_integer(directions, "nag_directions", 1, 1024, &count, error);
    }
    config->directions = (size_t)count;
    for (size_t i = 0; result == 0 && i < sizeof refused / sizeof *refused; i++) {
        if (json_object_field(object, refused[i])) {
            result = error_set(error, FATHOM_UNSUPPORTED,
                               "%s is not supported: remove it or set it to null", refused[i]);
        }
    }
    return result;
}

static int read_counts(const json_t *object, struct config *config, struct error *error) {
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const json_t *value = json_object_field(object, counts[i].key);
        int64_t number = counts[i].fallback;
        if (value || (number == 0 && !counts[i].derived)) {
            int result =
                json_read_integer(value, counts[i].key, 1, counts[i].maximum, &number, error);
            if (result != 0) return result;
        }
        size_t count = (size_t)number;
        memcpy((char *)config + counts[i].offset, &count, sizeof count);
    }
    return 0;
}

static int derive_heads(struct config *config, struct error *error) {
    if (config->kv_heads == 0) config->kv_heads = config->heads;
    if (config->heads % config->kv_heads != 0) {
        return error_set(
            error, FATHOM_INVALID,
            "num_attention_heads is %zu; a multiple of num_key_value_heads (%zu) is required",
            config->heads, config->kv_heads);
    }
    if (config->head_size == 0) {
        config->head_size = config->hidden / config->heads;
        if (config->head_size * config->heads != config->hidden || config->head_size > 1024) {
            return error_set(error, FATHOM_INVALID,
                             "head_dim is missing, and hidden_size / num_attention_heads = %zu / "
                             "%zu is not a whole number from 1 to 1024",
                             config->hidden, config->heads);
        }
    }
    if (config->head_size % 2 != 0) { /* RoPE rotates its halves against each other */
        return error_set(error, FATHOM_INVALID, "head_dim is %zu; an even number is required",
                         config->head_size);
    }
    return 0;
}

/* Words in the order of the enum that they set; the first is the default. */
static int read_words(const json_t *object, struct config *config, struct error *error) {
    static const char *const activations[] = {"silu", "relu2", "gelu"};
    static const char *const norms[] = {"none", "before_rope", "after_rope"};
    static const char *const heads[] = {"cosine_scale", "rmsnorm"};
    size_t activation = 0, norm = 0, head = 0;
    int result = read_word(object, "hidden_act", activations, 3, &activation, error);
    if (result == 0) result = read_word(object, "qk_norm", norms, 3, &norm, error);
    if (result == 0) result = read_word(object, "nag_head", heads, 2, &head, error);
    config->activation = (enum activation)activation;
    config->qk_norm = (enum qk_norm)norm;
    config->head = (enum nag_head)head;
    return result;
}

static int read_word(const json_t *object, const char *key, const char *const *words, size_t count,
                     size_t *word, struct error *error) {
    const json_t *value = json_object_field(object, key);
    return value ? json_read_choice(value, key, words, count, word, error) : 0;
}

static int read_numbers(const json_t *object, struct config *config, struct error *error) {
    const json_t *theta = json_object_field(object, "rope_theta");
    const json_t *qk_scale = json_object_field(object, "qk_scale");
    double scale = 1;
    int result = 0;
    if (theta) result = json_read_number(theta, "rope_theta", 1, 1e12, &config->rope_theta, error);
    if (result == 0 && qk_scale) {
        result = json_read_number(qk_scale, "qk_scale", 1e-6, 1e6, &scale, error);
    }
    config->qk_scale = (float)scale;
    return result;
}

/* Replaces only what is there: generation_config.json comes after config.json. */
static int read_tokens(const json_t *object, struct config *config, struct error *error) {
    const json_t *bos = json_object_field(object, "bos_token_id");
    const json_t *eos = json_object_field(object, "eos_token_id");
    int64_t id = -1;
    if (bos) {
        if (json_is_array(bos) && json_array_size(bos) > 0) bos = json_array_get(bos, 0);
        int result =
            json_read_integer(bos, "bos_token_id", 0, (int64_t)config->vocab - 1, &id, error);
        if (result != 0) return result;
        config->bos = (int32_t)id;
    }
    return eos ? read_eos(eos, config, error) : 0;
}

/* An id, or a list of ids. */
static int read_eos(const json_t *value, struct config *config, struct error *error) {
    size_t count = json_is_array(value) ? json_array_size(value) : 1;
    if (count == 0) return json_refuse(value, "eos_token_id", "an id or a list of ids", error);
    if (count > EOS_MAX) {
        return error_set(error, FATHOM_INVALID, "eos_token_id lists %zu tokens; the limit is %d",
                         count, EOS_MAX);
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *one = json_is_array(value) ? json_array_get(value, i) : value;
        int64_t id;
        int result =
            json_read_integer(one, "eos_token_id", 0, (int64_t)config->vocab - 1, &id, error);
        if (result != 0) return result;
        config->eos[i] = (int32_t)id;
    }
    config->eos_count = count;
    return 0;
}
