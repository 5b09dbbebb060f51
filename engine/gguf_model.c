/* What a GGUF file of a llama, qwen2 or qwen3 model says: its configuration, and its tensors by the
 * names and in the order of rows that Hugging Face folders have. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/gguf.h"
#include "engine/tensor_format.h"

#define KEY_BYTES_MAX 96

/* Names of a block's tensors there and here; the rest are in outer_names. */
static const struct {
    const char *theirs, *ours;
} block_names[] = {
    {"attn_norm.weight", "input_layernorm.weight"},
    {"ffn_norm.weight", "post_attention_layernorm.weight"},
    {"attn_q.weight", "self_attn.q_proj.weight"},
    {"attn_k.weight", "self_attn.k_proj.weight"},
    {"attn_v.weight", "self_attn.v_proj.weight"},
    {"attn_output.weight", "self_attn.o_proj.weight"},
    {"attn_q.bias", "self_attn.q_proj.bias"},
    {"attn_k.bias", "self_attn.k_proj.bias"},
    {"attn_v.bias", "self_attn.v_proj.bias"},
    {"attn_output.bias", "self_attn.o_proj.bias"},
    {"attn_q_norm.weight", "self_attn.q_norm.weight"},
    {"attn_k_norm.weight", "self_attn.k_norm.weight"},
    {"ffn_gate.weight", "mlp.gate_proj.weight"},
    {"ffn_up.weight", "mlp.up_proj.weight"},
    {"ffn_down.weight", "mlp.down_proj.weight"},
    {"ffn_gate.bias", "mlp.gate_proj.bias"},
    {"ffn_up.bias", "mlp.up_proj.bias"},
    {"ffn_down.bias", "mlp.down_proj.bias"},
};
#define BLOCK_NAMES (sizeof block_names / sizeof *block_names)

static const struct {
    const char *theirs, *ours;
} outer_names[] = {
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "lm_head.weight"},
    {"rope_freqs.weight", "rope_freqs.weight"},
};
#define OUTER_NAMES (sizeof outer_names / sizeof *outer_names)

/* One file being read. */
struct reading {
    const struct gguf *file;
    char arch[16];
    char key[KEY_BYTES_MAX]; /* the last one made */
    struct error *error;
};

static int read_architecture(struct reading *reading);
static int check_settings(struct reading *reading);
static int read_shape(struct reading *reading, struct config *config);
static int read_count(struct reading *reading, const char *name, int64_t maximum, size_t *count,
                      bool required);
static int read_numbers(struct reading *reading, struct config *config);
static int read_ends(struct reading *reading, struct config *config);
static int check_tensors(struct reading *reading, struct config *config);
static bool tensor_is_known(const struct gguf_string *name, size_t blocks);
static const char *make_key(struct reading *reading, const char *name);

int gguf_read_config(const struct gguf *file, struct config *config, struct error *error) {
    struct reading reading = {.file = file, .error = error};
    *config = (struct config){
        .is_standard = true,
        .activation = ACTIVATION_SILU_GATED,
        .rope_theta = 10000,
        .qk_scale = 1,
        .bos = -1,
    };
    int result = read_architecture(&reading);
    if (result == 0) result = check_settings(&reading);
    if (result == 0) result = read_shape(&reading, config);
    if (result == 0) result = read_numbers(&reading, config);
    if (result == 0) result = read_ends(&reading, config);
    return result ? result : check_tensors(&reading, config);
}

static int read_architecture(struct reading *reading) {
    static const char *const known[] = {"llama", "qwen2", "qwen3"};
    struct gguf_string arch = {"", 0};
    int result =
        gguf_read_string(reading->file, "general.architecture", &arch, reading->error);
    if (result != 0) return result;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (arch.length != strlen(known[i]) || memcmp(arch.bytes, known[i], arch.length) != 0)
            continue;
        snprintf(reading->arch, sizeof reading->arch, "%s", known[i]);
        return 0;
    }
    return error_set(reading->error, FATHOM_UNSUPPORTED,
                     "general.architecture is \"%.*s\"; llama, qwen2 and qwen3 are supported",
                     (int)(arch.length < 64 ? arch.length : 64), arch.bytes);
}

/* Settings that change the result without changing the names of tensors. */
static int check_settings(struct reading *reading) {
    static const char *const refused[] = {
        "attention.clamp_kqv",     "attention.max_alibi_bias",  "attention.scale",
        "attn_logit_softcapping",  "final_logit_softcapping",   "embedding_scale",
        "residual_scale",          "logit_scale",               "tensor_data_layout",
        "attention.temperature_scale", "expert_used_count",
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        if (!gguf_find(reading->file, make_key(reading, refused[i]))) continue;
        return error_set(reading->error, FATHOM_UNSUPPORTED, "%s is not supported", reading->key);
    }
    int64_t experts = 0;
    make_key(reading, "expert_count");
    int result =
        gguf_read_integer(reading->file, reading->key, 0, INT64_MAX, &experts, reading->error);
    if (result == 0 && experts > 0) {
        result =
            error_set(reading->error, FATHOM_UNSUPPORTED, "%s is %lld: experts are not supported",
                      reading->key, (long long)experts);
    }
    return result;
}

static int read_shape(struct reading *reading, struct config *config) {
    const struct {
        const char *name;
        int64_t maximum;
        size_t *count;
        bool required;
    } counts[] = {
        {"embedding_length", 32768, &config->hidden, true},
        {"block_count", 1024, &config->blocks, true},
        {"attention.head_count", 1024, &config->heads, true},
        {"attention.head_count_kv", 1024, &config->kv_heads, false},
        {"attention.key_length", HEAD_SIZE_MAX, &config->head_size, false},
        {"feed_forward_length", 262144, &config->inner, true},
        {"context_length", 1 << 20, &config->context, true},
    };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int result = read_count(reading, counts[i].name, counts[i].maximum, counts[i].count,
                                counts[i].required);
        if (result != 0) return result;
    }
    if (config->kv_heads == 0) config->kv_heads = config->heads;
    bool derived = config->head_size == 0;
    if (derived) config->head_size = config->hidden / config->heads;
    size_t value_length = config->head_size, rotated = config->head_size;
    int64_t window = (int64_t)config->context;
    int result = read_count(reading, "attention.value_length", HEAD_SIZE_MAX, &value_length, false);
    if (result == 0) {
        result = read_count(reading, "rope.dimension_count", HEAD_SIZE_MAX, &rotated, false);
    }
    if (result == 0) {
        make_key(reading, "attention.sliding_window");
        result =
            gguf_read_integer(reading->file, reading->key, 0, INT64_MAX, &window, reading->error);
    }
    if (result != 0) return result;
    if (config->heads % config->kv_heads != 0 || config->head_size < 2 ||
        config->head_size > HEAD_SIZE_MAX || config->head_size % 2 != 0 ||
        (derived && config->head_size * config->heads != config->hidden)) {
        return error_set(reading->error, FATHOM_INVALID,
                         "%zu query and %zu key/value heads of %zu elements are not possible",
                         config->heads, config->kv_heads, config->head_size);
    }
    if (value_length != config->head_size || rotated != config->head_size) {
        return error_set(reading->error, FATHOM_UNSUPPORTED,
                         "keys of %zu elements, values of %zu, %zu rotated: all must be the same",
                         config->head_size, value_length, rotated);
    }
    if (window > 0 && window < (int64_t)config->context) {
        return error_set(reading->error, FATHOM_UNSUPPORTED,
                         "%s is %lld, below the context of %zu: not supported", reading->key,
                         (long long)window, config->context);
    }
    return 0;
}

static int read_count(struct reading *reading, const char *name, int64_t maximum, size_t *count,
                      bool required) {
    int64_t number = (int64_t)*count;
    make_key(reading, name);
    if (required && !gguf_find(reading->file, reading->key)) {
        return error_set(reading->error, FATHOM_INVALID, "%s is missing", reading->key);
    }
    int result = 0;
    if (gguf_find(reading->file, reading->key)) {
        result =
            gguf_read_integer(reading->file, reading->key, 1, maximum, &number, reading->error);
    }
    *count = (size_t)number;
    return result;
}

static int read_numbers(struct reading *reading, struct config *config) {
    double epsilon = 0, factor = 1;
    struct gguf_string scaling = {"none", 4};
    make_key(reading, "attention.layer_norm_rms_epsilon");
    if (!gguf_find(reading->file, reading->key)) {
        return error_set(reading->error, FATHOM_INVALID, "%s is missing", reading->key);
    }
    int result =
        gguf_read_number(reading->file, reading->key, 1e-12, 1e-2, &epsilon, reading->error);
    config->norm_epsilon = (float)epsilon;
    if (result == 0) {
        result = gguf_read_number(reading->file, make_key(reading, "rope.freq_base"), 1, 1e12,
                                  &config->rope_theta, reading->error);
    }
    if (result == 0) {
        result = gguf_read_number(reading->file, make_key(reading, "rope.scaling.factor"), 0, 1e6,
                                  &factor, reading->error);
    }
    if (result == 0) {
        result = gguf_read_string(reading->file, make_key(reading, "rope.scaling.type"), &scaling,
                                  reading->error);
    }
    if (result != 0) return result;
    bool is_linear = scaling.length == 6 && memcmp(scaling.bytes, "linear", 6) == 0;
    bool is_none = scaling.length == 4 && memcmp(scaling.bytes, "none", 4) == 0;
    if (!is_linear && !is_none) {
        return error_set(reading->error, FATHOM_UNSUPPORTED,
                         "%s is \"%.*s\"; none and linear are supported", reading->key,
                         (int)(scaling.length < 64 ? scaling.length : 64), scaling.bytes);
    }
    if (is_linear && factor < 1) {
        return error_set(reading->error, FATHOM_INVALID, "%s.rope.scaling.factor is %g, below 1",
                         reading->arch, factor);
    }
    config->rope_scaling.kind = is_linear ? ROPE_LINEAR : ROPE_UNSCALED;
    config->rope_scaling.factor = factor;
    return 0;
}

/* Where a chat's turn ends, the text does. Ids are checked against the vocabulary once it is
 * known. */
static int read_ends(struct reading *reading, struct config *config) {
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    const struct gguf_tensor *table = gguf_find_tensor(reading->file, "token_embd.weight");
    if (!table || table->rank != 2 || table->shape[0] > (size_t)4 << 20) {
        return error_set(reading->error, FATHOM_INVALID,
                         "token_embd.weight is missing, or has not two dimensions with at most "
                         "4194304 entries");
    }
    config->vocab = table->shape[0];
    int64_t last = (int64_t)config->vocab - 1, id = -1;
    int result = gguf_read_integer(reading->file, "tokenizer.ggml.bos_token_id", 0, last, &id,
                                   reading->error);
    config->bos = (int32_t)id;
    for (size_t i = 0; i < 3 && result == 0; i++) {
        id = -1;
        result = gguf_read_integer(reading->file, keys[i], 0, last, &id, reading->error);
        if (result == 0 && id >= 0) config->eos[config->eos_count++] = (int32_t)id;
    }
    return result;
}

/* What there is says what the model is: a head of its own, biases, Q/K norms. */
static int check_tensors(struct reading *reading, struct config *config) {
    const struct gguf *file = reading->file;
    for (size_t i = 0; i < file->tensor_count; i++) {
        const struct gguf_string *name = &file->tensors[i].name;
        if (tensor_is_known(name, config->blocks)) continue;
        return error_set(reading->error, FATHOM_UNSUPPORTED,
                         "tensor %.*s belongs to no model that is supported", (int)name->length,
                         name->bytes);
    }
    config->tied_head = !gguf_find_tensor(file, "output.weight");
    config->qkv_bias = gguf_find_tensor(file, "blk.0.attn_q.bias") != NULL;
    config->output_bias = gguf_find_tensor(file, "blk.0.attn_output.bias") != NULL;
    config->mlp_bias = gguf_find_tensor(file, "blk.0.ffn_up.bias") != NULL;
    config->qk_gain = gguf_find_tensor(file, "blk.0.attn_q_norm.weight") != NULL;
    config->qk_norm = config->qk_gain ? QK_NORM_BEFORE_ROPE : QK_NORM_NONE;
    config->rope_factors = gguf_find_tensor(file, "rope_freqs.weight") != NULL;
    /* The rows of Q and K of a llama file are in the order of interleaved pairs. */
    config->is_interleaved = strcmp(reading->arch, "llama") == 0;
    return 0;
}

static bool equals(const char *bytes, size_t length, const char *text) {
    return strlen(text) == length && memcmp(bytes, text, length) == 0;
}

static bool tensor_is_known(const struct gguf_string *name, size_t blocks) {
    for (size_t i = 0; i < OUTER_NAMES; i++) {
        if (equals(name->bytes, name->length, outer_names[i].theirs)) return true;
    }
    size_t block = 0, at = 4;
    if (name->length < 6 || memcmp(name->bytes, "blk.", 4) != 0) return false;
    while (at < name->length && name->bytes[at] >= '0' && name->bytes[at] <= '9' && at < 9) {
        block = 10 * block + (size_t)(name->bytes[at++] - '0');
    }
    if (at == 4 || block >= blocks || at >= name->length || name->bytes[at++] != '.') return false;
    for (size_t i = 0; i < BLOCK_NAMES; i++) {
        if (equals(name->bytes + at, name->length - at, block_names[i].theirs)) return true;
    }
    return false;
}

static const char *make_key(struct reading *reading, const char *name) {
    snprintf(reading->key, sizeof reading->key, "%s.%s", reading->arch, name);
    return reading->key;
}

/* ---- Tensors --------------------------------------------------------------------------------- */

/* Their name for one of ours, or false. */
static bool translate_name(const char *name, char *out, size_t size) {
    static const char prefix[] = "model.layers.";
    for (size_t i = 0; i < OUTER_NAMES; i++) {
        if (strcmp(name, outer_names[i].ours) != 0) continue;
        snprintf(out, size, "%s", outer_names[i].theirs);
        return true;
    }
    if (strncmp(name, prefix, sizeof prefix - 1) != 0) return false;
    char *part;
    unsigned long block = strtoul(name + sizeof prefix - 1, &part, 10);
    for (size_t i = 0; i < BLOCK_NAMES && *part == '.'; i++) {
        if (strcmp(part + 1, block_names[i].ours) != 0) continue;
        snprintf(out, size, "blk.%lu.%s", block, block_names[i].theirs);
        return true;
    }
    return false;
}

int gguf_get_tensor(const struct gguf *file, const struct config *config, const char *name,
                    struct tensor *tensor, struct error *error) {
    char theirs[KEY_BYTES_MAX];
    const struct gguf_tensor *found =
        translate_name(name, theirs, sizeof theirs) ? gguf_find_tensor(file, theirs) : NULL;
    if (!found) {
        return error_set(error, FATHOM_NOT_FOUND, "the tensor for '%s' is missing", name);
    }
    const struct tensor_format *format = tensor_format_find(found->type);
    if (format->unpack && found->rank == 1) { /* a block may hold more than a vector has */
        return error_set(error, FATHOM_UNSUPPORTED, "the vector for '%s' is stored as %s", name,
                         format->name);
    }
    bool is_qk = strstr(name, ".q_proj.") || strstr(name, ".k_proj.");
    *tensor = (struct tensor){
        .name = name,
        .type = format->type,
        .format = format->unpack ? format : NULL,
        .interleaved = is_qk && config->is_interleaved ? config->head_size : 0,
        .rank = found->rank,
        .data = file->data + found->offset,
        .bytes = found->bytes,
    };
    memcpy(tensor->shape, found->shape, sizeof tensor->shape);
    return 0;
}
