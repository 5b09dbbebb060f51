/* config.json of ordinary pre-norm models. What a family leaves out means what its published
 * implementation makes of that; what we cannot compute is refused by the name of its key. */
#include "engine/config_parts.h"

#include <string.h>

static int refuse_settings(const json_t *object, struct error *error);
static int check_counts(const char *family, const struct config *config, struct error *error);
static int check_window(const json_t *object, const char *family, const struct config *config,
                        struct error *error);
static int check_layers(const json_t *object, struct error *error);
static int read_flag(const json_t *object, const char *key, bool *flag, struct error *error);
static int read_rope(const json_t *object, struct config *config, struct error *error);
static int read_rope_scaling(const json_t *scaling, const char *key, struct config *config,
                             struct error *error);

int config_read_standard(const json_t *object, const char *family, struct config *config,
                         struct error *error) {
    static const char *const activations[] = {"silu"};
    const json_t *activation = json_object_field(object, "hidden_act");
    const json_t *epsilon = json_object_field(object, "rms_norm_eps");
    bool attention_bias = false, is_qwen2 = strcmp(family, "qwen2") == 0;
    double number = 1e-6;
    size_t word;
    int result = refuse_settings(object, error);
    if (result == 0) result = check_counts(family, config, error);
    if (result == 0) result = check_window(object, family, config, error);
    if (result == 0) result = check_layers(object, error);
    if (result == 0 && activation) {
        result = json_read_choice(activation, "hidden_act", activations, 1, &word, error);
    }
    if (result == 0 && epsilon) {
        result = json_read_number(epsilon, "rms_norm_eps", 1e-12, 1e-2, &number, error);
    }
    if (result == 0) result = read_flag(object, "tie_word_embeddings", &config->tied_head, error);
    if (result == 0) result = read_flag(object, "attention_bias", &attention_bias, error);
    if (result == 0) result = read_flag(object, "mlp_bias", &config->mlp_bias, error);
    if (result != 0) return result;
    config->activation = ACTIVATION_SILU_GATED;
    config->norm_epsilon = (float)number;
    config->qkv_bias = is_qwen2 || attention_bias; /* Qwen2 has no key for its own */
    config->output_bias = !is_qwen2 && attention_bias;
    config->qk_gain = strcmp(family, "qwen3") == 0;
    config->qk_norm = config->qk_gain ? QK_NORM_BEFORE_ROPE : QK_NORM_NONE;
    return read_rope(object, config, error);
}

/* Settings of relatives that change the result without changing the names of tensors. */
static int refuse_settings(const json_t *object, struct error *error) {
    static const char *const keys[] = {
        "quantization_config",    "num_experts",
        "num_local_experts",      "n_routed_experts",
        "attn_logit_softcapping", "final_logit_softcapping",
        "attention_multiplier",   "embedding_multiplier",
        "residual_multiplier",    "logits_scaling",
        "attention_chunk_size",   "no_rope_layers",
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (!json_object_field(object, keys[i])) continue;
        return error_set(error, FATHOM_UNSUPPORTED, "%s is not supported", keys[i]);
    }
    const json_t *part = json_object_field(object, "partial_rotary_factor");
    if (part && json_number_value(part) != 1) {
        return error_set(error, FATHOM_UNSUPPORTED,
                         "partial_rotary_factor other than 1 is not supported");
    }
    return 0;
}

/* Keys without which these families mean a constant of their own, never what follows from
 * others. */
static int check_counts(const char *family, const struct config *config, struct error *error) {
    bool is_llama = strcmp(family, "llama") == 0, is_qwen3 = strcmp(family, "qwen3") == 0;
    if (!is_llama && config->kv_heads == 0) {
        return json_refuse(NULL, "num_key_value_heads", "a whole number from 1 to 1024", error);
    }
    if (is_qwen3 && config->head_size == 0) {
        return json_refuse(NULL, "head_dim", "a whole number from 1 to 1024", error);
    }
    return 0;
}

/* A window that no text can reach is no window. */
static int check_window(const json_t *object, const char *family, const struct config *config,
                        struct error *error) {
    const json_t *window = json_object_field(object, "sliding_window");
    bool uses = true;
    int64_t size = (int64_t)config->context;
    if (strncmp(family, "qwen", 4) == 0) uses = false; /* unless it says so */
    int result = read_flag(object, "use_sliding_window", &uses, error);
    if (result != 0 || !uses) return result;
    if (window) {
        result = json_read_integer(window, "sliding_window", 1, INT64_MAX, &size, error);
        if (result != 0) return result;
    } else if (strcmp(family, "mistral") == 0 && !json_object_get(object, "sliding_window")) {
        size = 4096;
    }
    if (size >= (int64_t)config->context) return 0;
    return error_set(error, FATHOM_UNSUPPORTED,
                     "sliding_window is %lld, below max_position_embeddings (%zu): not supported; "
                     "with max_position_embeddings set to the window the model loads",
                     (long long)size, config->context);
}

static int check_layers(const json_t *object, struct error *error) {
    const json_t *types = json_object_field(object, "layer_types");
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (type && strcmp(type, "full_attention") == 0) continue;
        return error_set(error, FATHOM_UNSUPPORTED,
                         "layer_types[%zu] is not \"full_attention\", the only type supported", i);
    }
    return 0;
}

static int read_flag(const json_t *object, const char *key, bool *flag, struct error *error) {
    const json_t *value = json_object_field(object, key);
    if (!value) return 0;
    if (!json_is_boolean(value)) return json_refuse(value, key, "true or false", error);
    *flag = json_is_true(value);
    return 0;
}

/* The older spelling is rope_theta and rope_scaling, the newer one has both in rope_parameters. */
static int read_rope(const json_t *object, struct config *config, struct error *error) {
    const json_t *theta = json_object_field(object, "rope_theta");
    const json_t *scaling = json_object_field(object, "rope_scaling");
    const json_t *parameters = json_object_field(object, "rope_parameters");
    const json_t *inner = json_object_field(parameters, "rope_theta");
    const char *key = parameters ? "rope_parameters" : "rope_scaling";
    int result = 0;
    if (inner) theta = inner;
    if (parameters) scaling = parameters;
    if (theta) result = json_read_number(theta, "rope_theta", 1, 1e12, &config->rope_theta, error);
    if (result != 0 || !scaling) return result;
    if (!json_is_object(scaling)) return json_refuse(scaling, key, "an object", error);
    return read_rope_scaling(scaling, key, config, error);
}

static int read_rope_scaling(const json_t *scaling, const char *key, struct config *config,
                             struct error *error) {
    static const char *const types[] = {"default", "linear", "llama3"};
    struct rope_scaling *rope = &config->rope_scaling;
    const json_t *type = json_object_field(scaling, "rope_type");
    size_t kind = 0;
    if (!type) type = json_object_field(scaling, "type");
    bool needs_type =
        json_object_field(scaling, "factor") || !json_object_get(scaling, "rope_theta");
    int result = 0;
    if (type || needs_type) result = json_read_choice(type, "rope_type", types, 3, &kind, error);
    rope->kind = (enum rope_scaling_kind)kind;
    if (result == 0 && kind != ROPE_UNSCALED) {
        result = json_read_number(json_object_field(scaling, "factor"), "factor", 1, 1e6,
                                  &rope->factor, error);
    }
    if (result == 0 && kind == ROPE_LLAMA3) {
        const json_t *low = json_object_field(scaling, "low_freq_factor");
        const json_t *high = json_object_field(scaling, "high_freq_factor");
        const json_t *context = json_object_field(scaling, "original_max_position_embeddings");
        result = json_read_number(low, "low_freq_factor", 1e-3, 1e6, &rope->low_factor, error);
        if (result == 0) {
            result =
                json_read_number(high, "high_freq_factor", 1e-3, 1e6, &rope->high_factor, error);
        }
        if (result == 0) {
            result = json_read_number(context, "original_max_position_embeddings", 1, 1e9,
                                      &rope->original_context, error);
        }
        if (result == 0 && rope->high_factor <= rope->low_factor) {
            result = error_set(error, FATHOM_INVALID,
                               "high_freq_factor (%g) must be above low_freq_factor (%g)",
                               rope->high_factor, rope->low_factor);
        }
    }
    if (result != 0) error_prefix(error, "%s", key);
    return result;
}
