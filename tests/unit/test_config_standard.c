/* config.json of ordinary model families: what each leaves out, and what is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "engine/checkpoint_parts.h"

#define SHAPE                                                                                      \
    "\"vocab_size\":300,\"hidden_size\":32,\"num_hidden_layers\":2,\"num_attention_heads\":4,"     \
    "\"intermediate_size\":48,\"max_position_embeddings\":8192"
#define CONFIG(family, more) "{\"model_type\":\"" family "\"," SHAPE more "}"

static struct config parse(const char *text) {
    struct config config;
    struct error error = {0};
    if (config_parse(text, strlen(text), &config, &error) != 0) {
        fail_msg("%s: %s", text, error.message);
    }
    return config;
}

static void refused(const char *text, int code, const char *part) {
    struct config config;
    struct error error = {0};
    int result = config_parse(text, strlen(text), &config, &error);
    if (result == 0) fail_msg("accepted: %s", text);
    if (result != code || !strstr(error.message, part)) {
        fail_msg("%s: %d \"%s\" does not say \"%s\"", text, result, error.message, part);
    }
}

static void families_have_their_defaults(void **state) {
    (void)state;
    struct config config = parse(CONFIG("llama", ""));
    assert_true(config.is_standard && !config.tied_head && !config.qkv_bias && !config.qk_gain);
    assert_true(!config.output_bias && !config.mlp_bias && config.directions == 0);
    assert_true(config.norm_epsilon == 1e-6f && config.rope_theta == 10000 && config.qk_scale == 1);
    assert_int_equal(config.kv_heads, 4);
    assert_int_equal(config.head_size, 8);
    assert_int_equal(config.activation, ACTIVATION_SILU_GATED);
    assert_int_equal(config.qk_norm, QK_NORM_NONE);

    config = parse(CONFIG("llama", ",\"attention_bias\":true,\"mlp_bias\":true,\"head_dim\":16,"
                                   "\"rms_norm_eps\":1e-5,\"tie_word_embeddings\":true"));
    assert_true(config.tied_head && config.qkv_bias && config.output_bias && config.mlp_bias);
    assert_true(config.norm_epsilon == 1e-5f && config.head_size == 16);

    config = parse(CONFIG("mistral", ",\"num_key_value_heads\":2,\"sliding_window\":null"));
    assert_true(!config.qkv_bias && config.kv_heads == 2);
    config = parse(CONFIG("qwen2", ",\"num_key_value_heads\":2,\"sliding_window\":64"));
    assert_true(config.qkv_bias && !config.output_bias);
    config = parse(CONFIG("qwen3", ",\"num_key_value_heads\":2,\"head_dim\":16"));
    assert_true(config.qk_gain && !config.qkv_bias);
    assert_int_equal(config.qk_norm, QK_NORM_BEFORE_ROPE);
}

static void rope_has_two_spellings(void **state) {
    (void)state;
    struct config config =
        parse(CONFIG("llama", ",\"rope_theta\":500000,\"rope_scaling\":{\"type\":\"linear\","
                              "\"factor\":4}"));
    assert_true(config.rope_theta == 500000 && config.rope_scaling.factor == 4);
    assert_int_equal(config.rope_scaling.kind, ROPE_LINEAR);
    config =
        parse(CONFIG("llama", ",\"rope_theta\":1,\"rope_parameters\":{\"rope_type\":\"llama3\","
                              "\"rope_theta\":20000,\"factor\":8,\"low_freq_factor\":1,"
                              "\"high_freq_factor\":4,"
                              "\"original_max_position_embeddings\":2048}"));
    assert_true(config.rope_theta == 20000 && config.rope_scaling.factor == 8);
    assert_true(config.rope_scaling.low_factor == 1 && config.rope_scaling.high_factor == 4);
    assert_true(config.rope_scaling.original_context == 2048);
    assert_int_equal(config.rope_scaling.kind, ROPE_LLAMA3);
    config = parse(CONFIG("llama", ",\"rope_parameters\":{\"rope_theta\":5000}"));
    assert_true(config.rope_theta == 5000);
    assert_int_equal(config.rope_scaling.kind, ROPE_UNSCALED);
}

#define SCALED(members) CONFIG("llama", ",\"rope_scaling\":{" members "}")

static void what_is_not_supported_is_named(void **state) {
    (void)state;
    static const struct {
        const char *text, *part;
        int code;
    } cases[] = {
        {CONFIG("llama", ",\"hidden_act\":\"gelu\""), "hidden_act is \"gelu\"", FATHOM_UNSUPPORTED},
        {CONFIG("llama", ",\"num_local_experts\":8"), "num_local_experts", FATHOM_UNSUPPORTED},
        {CONFIG("llama", ",\"num_experts\":8"), "num_experts", FATHOM_UNSUPPORTED},
        {CONFIG("llama", ",\"quantization_config\":{}"), "quantization_config", FATHOM_UNSUPPORTED},
        {CONFIG("llama", ",\"partial_rotary_factor\":0.5"), "partial_rotary_factor",
         FATHOM_UNSUPPORTED},
        {CONFIG("llama", ",\"rms_norm_eps\":0"), "rms_norm_eps is 0", FATHOM_INVALID},
        {CONFIG("llama", ",\"attention_bias\":1"), "attention_bias is 1", FATHOM_INVALID},
        {CONFIG("llama", ",\"layer_types\":[\"full_attention\",\"sliding_attention\"]"),
         "layer_types[1]", FATHOM_UNSUPPORTED},
        {CONFIG("mistral", ""), "num_key_value_heads is missing", FATHOM_INVALID},
        {CONFIG("mistral", ",\"num_key_value_heads\":2"), "sliding_window is 4096",
         FATHOM_UNSUPPORTED},
        {CONFIG("mistral", ",\"num_key_value_heads\":2,\"sliding_window\":8191"),
         "sliding_window is 8191, below max_position_embeddings (8192)", FATHOM_UNSUPPORTED},
        {CONFIG("qwen2", ",\"num_key_value_heads\":2,\"sliding_window\":64,"
                         "\"use_sliding_window\":true"),
         "sliding_window is 64", FATHOM_UNSUPPORTED},
        {CONFIG("qwen3", ",\"num_key_value_heads\":2"), "head_dim is missing", FATHOM_INVALID},
        {CONFIG("qwen3_moe", ""), "model_type is \"qwen3_moe\"", FATHOM_UNSUPPORTED},
        {SCALED("\"rope_type\":\"yarn\",\"factor\":4"), "rope_scaling: rope_type is \"yarn\"",
         FATHOM_UNSUPPORTED},
        {SCALED("\"type\":\"dynamic\",\"factor\":4"), "rope_type is \"dynamic\"",
         FATHOM_UNSUPPORTED},
        {SCALED("\"factor\":4"), "rope_type is missing", FATHOM_INVALID},
        {SCALED("\"type\":\"linear\""), "rope_scaling: factor is missing", FATHOM_INVALID},
        {SCALED("\"type\":\"linear\",\"factor\":0"), "factor is 0", FATHOM_INVALID},
        {SCALED("\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4,"
                "\"original_max_position_embeddings\":2048"),
         "high_freq_factor (4) must be above low_freq_factor (4)", FATHOM_INVALID},
        {SCALED("\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4"),
         "original_max_position_embeddings is missing", FATHOM_INVALID},
        {CONFIG("llama", ",\"rope_scaling\":4"), "rope_scaling is 4", FATHOM_INVALID},
        {CONFIG("llama", ",\"rope_parameters\":{\"full_attention\":{\"rope_theta\":1}}"),
         "rope_parameters: rope_type is missing", FATHOM_INVALID},
        {CONFIG("llama", ",\"eos_token_id\":[]"), "eos_token_id is an array", FATHOM_INVALID},
        {CONFIG("llama", ",\"eos_token_id\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]"),
         "eos_token_id lists 17 tokens; the limit is 16", FATHOM_INVALID},
        {CONFIG("llama", ",\"eos_token_id\":[1,300]"), "eos_token_id is 300", FATHOM_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refused(cases[i].text, cases[i].code, cases[i].part);
    }
}

static void generation_config_goes_first(void **state) {
    (void)state;
    struct config config = parse(CONFIG("llama", ",\"bos_token_id\":1,\"eos_token_id\":2"));
    static const char text[] = "{\"eos_token_id\":[3,4],\"temperature\":0.6}";
    struct error error = {0};
    assert_int_equal(config_parse_generation(text, sizeof text - 1, &config, &error), 0);
    assert_int_equal(config.bos, 1);
    assert_int_equal(config.eos_count, 2);
    assert_int_equal(config.eos[1], 4);
    static const char wrong[] = "{\"eos_token_id\":\"3\"}";
    assert_int_equal(config_parse_generation(wrong, sizeof wrong - 1, &config, &error),
                     FATHOM_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(families_have_their_defaults),
        cmocka_unit_test(rope_has_two_spellings),
        cmocka_unit_test(what_is_not_supported_is_named),
        cmocka_unit_test(generation_config_goes_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
