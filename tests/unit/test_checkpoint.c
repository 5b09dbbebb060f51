/* Checkpoint folders, written here: config.json, the weights in one file and in shards, depth.json.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include <dirent.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/checkpoint.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- A folder to write into ------------------------------------------------------------------ */

static char folder[] = "/tmp/fathom-checkpoint-XXXXXX";

static const char *path_of(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const void *data, size_t size) {
    FILE *out = fopen(path_of(name), "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, size, out), size);
    assert_int_equal(fclose(out), 0);
}

static void write_text(const char *name, const char *text) {
    write_file(name, text, strlen(text));
}

static size_t write_tensors(const char *name, const char *header, const void *data, size_t size) {
    unsigned char bytes[4096];
    uint64_t length = strlen(header);
    assert_true(8 + length + size <= sizeof bytes);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, length);
    memcpy(bytes + 8 + length, data, size);
    write_file(name, bytes, 8 + length + size);
    return 8 + length + size;
}

static void remove_files(void) {
    DIR *open = opendir(folder);
    assert_non_null(open);
    for (struct dirent *entry; (entry = readdir(open));) {
        if (entry->d_name[0] != '.') remove(path_of(entry->d_name));
    }
    closedir(open);
}

static const char config_text[] = "{\n"
                                  "\"model_type\": \"nag\",\n"
                                  "\"vocab_size\": 300,\n"
                                  "\"hidden_size\": 8,\n"
                                  "\"num_hidden_layers\": 2,\n"
                                  "\"num_attention_heads\": 4,\n"
                                  "\"num_key_value_heads\": 2,\n"
                                  "\"head_dim\": 6,\n"
                                  "\"intermediate_size\": 16,\n"
                                  "\"hidden_act\": \"relu2\",\n"
                                  "\"rope_theta\": 100000.0,\n"
                                  "\"max_position_embeddings\": 64,\n"
                                  "\"qk_norm\": \"after_rope\",\n"
                                  "\"qk_scale\": 1.25,\n"
                                  "\"nag_directions\": 4,\n"
                                  "\"nag_head\": \"rmsnorm\",\n"
                                  "\"bos_token_id\": 1,\n"
                                  "\"eos_token_id\": [2, 3]\n"
                                  "}";

static const char depth_text[] =
    "{\n"
    "\"format\": 1,\n"
    "\"kv_policy\": \"omit\",\n"
    "\"tiers\": [\n"
    "{\"name\": \"fast\", \"target_skip\": 0.4, \"theta\": [0, 0.25, 1e-3, 1.5]},\n"
    "{\"name\": \"full\", \"target_skip\": 0, \"theta\": [0, 0, 0, 0.0]}\n"
    "],\n"
    "\"default\": \"full\",\n"
    "\"measured\": {\"fast\": {\"perplexity\": 3.5, \"attn_skip\": 0.25, \"mlp_skip\": 0.5, "
    "\"flops_per_token\": 1e6}}\n"
    "}";

static const char weights_header[] =
    "{\"model.log_gain\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
    "\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[4,6]},"
    "\"w\":{\"dtype\":\"F16\",\"shape\":[3,2],\"data_offsets\":[6,18]}}";
static const uint16_t weights[9] = {0,      0x3F80, 0x4000, 0x3C00, 0x4000,
                                    0x4200, 0x4400, 0x4500, 0x4600};

static size_t write_weights(void) {
    return write_tensors("model.safetensors", weights_header, weights, sizeof weights);
}

static int set_up(void **state) {
    (void)state;
    remove_files();
    write_text("config.json", config_text);
    write_weights();
    return 0;
}

static struct checkpoint *open_good(void) {
    struct checkpoint *checkpoint;
    struct error error = {0};
    if (checkpoint_open(folder, &checkpoint, &error) != 0) fail_msg("%s", error.message);
    return checkpoint;
}

static void expect_refusal(int code, const char *part, const char *shown) {
    struct checkpoint *checkpoint;
    struct error error = {0};
    int result = checkpoint_open(folder, &checkpoint, &error);
    if (result == 0) fail_msg("accepted: %s", shown);
    if (result != code || error.code != code) {
        fail_msg("%s: \"%s\" has code %d, %d", shown, error.message, result, error.code);
    }
    if (!strstr(error.message, part)) {
        fail_msg("%s: \"%s\" does not say \"%s\"", shown, error.message, part);
    }
    if (!strstr(error.message, folder)) fail_msg("\"%s\" names no path", error.message);
}

/* A text that is good but for one place. */
struct edit {
    const char *from, *to;
    int code;
    const char *part;
};

static void expect_edits_refused(const char *name, const char *text, const struct edit *edits,
                                 size_t count) {
    for (size_t i = 0; i < count; i++) {
        char edited[4096];
        const char *place = strstr(text, edits[i].from);
        if (!place) fail_msg("no %s to edit", edits[i].from);
        snprintf(edited, sizeof edited, "%.*s%s%s", (int)(place - text), text, edits[i].to,
                 place + strlen(edits[i].from));
        write_text(name, edited);
        expect_refusal(edits[i].code, edits[i].part, edits[i].to);
        expect_refusal(edits[i].code, name, edits[i].to);
    }
}

/* ---- config.json
 * --------------------------------------------------------------------------------- */

static void reads_every_key_of_config(void **state) {
    (void)state;
    struct checkpoint *checkpoint = open_good();
    const struct config *config = checkpoint_config(checkpoint);
    assert_int_equal(config->vocab, 300);
    assert_int_equal(config->hidden, 8);
    assert_int_equal(config->blocks, 2);
    assert_int_equal(config->heads, 4);
    assert_int_equal(config->kv_heads, 2);
    assert_int_equal(config->head_size, 6);
    assert_int_equal(config->inner, 16);
    assert_int_equal(config->context, 64);
    assert_int_equal(config->directions, 4);
    assert_int_equal(config->activation, ACTIVATION_RELU2);
    assert_int_equal(config->qk_norm, QK_NORM_AFTER_ROPE);
    assert_int_equal(config->head, NAG_HEAD_RMSNORM);
    assert_true(config->rope_theta == 100000);
    assert_true(config->qk_scale == 1.25f);
    assert_int_equal(config->bos, 1);
    assert_int_equal(config->eos, 2);
    checkpoint_close(checkpoint);
}

static void fills_in_defaults(void **state) {
    (void)state;
    write_text("config.json", "{\"model_type\":\"nag\",\"vocab_size\":300,\"hidden_size\":8,"
                              "\"num_hidden_layers\":2,\"num_attention_heads\":4,"
                              "\"intermediate_size\":16,\"max_position_embeddings\":64,"
                              "\"eos_token_id\":null,\"head_dim\":null,\"rope_scaling\":null}");
    struct checkpoint *checkpoint = open_good();
    const struct config *config = checkpoint_config(checkpoint);
    assert_int_equal(config->kv_heads, 4);
    assert_int_equal(config->head_size, 2);
    assert_int_equal(config->directions, 32);
    assert_int_equal(config->activation, ACTIVATION_SILU_GATED);
    assert_int_equal(config->qk_norm, QK_NORM_NONE);
    assert_int_equal(config->head, NAG_HEAD_COSINE);
    assert_true(config->rope_theta == 10000);
    assert_true(config->qk_scale == 1);
    assert_int_equal(config->bos, -1);
    assert_int_equal(config->eos, -1);
    checkpoint_close(checkpoint);
}

static void refuses_wrong_configs(void **state) {
    (void)state;
    static const struct edit edits[] = {
        {"\"nag\"", "\"llama\"", FATHOM_UNSUPPORTED, "model_type is \"llama\"; \"nag\""},
        {"\"nag\"", "7", FATHOM_INVALID, "model_type is 7"},
        {"\"nag\"", "null", FATHOM_INVALID, "model_type is missing"},
        {"\"vocab_size\"", "\"vocabsize\"", FATHOM_INVALID, "vocab_size is missing"},
        {"\"hidden_size\"", "\"x\"", FATHOM_INVALID, "hidden_size is missing"},
        {"\"num_hidden_layers\"", "\"x\"", FATHOM_INVALID, "num_hidden_layers is missing"},
        {"\"num_attention_heads\"", "\"x\"", FATHOM_INVALID, "num_attention_heads is missing"},
        {"\"intermediate_size\"", "\"x\"", FATHOM_INVALID, "intermediate_size is missing"},
        {"\"max_position_embeddings\"", "\"x\"", FATHOM_INVALID,
         "max_position_embeddings is missing"},
        {"300", "300.0", FATHOM_INVALID,
         "vocab_size is 300.0; a whole number from 1 to 4194304 is required"},
        {"300", "\"300\"", FATHOM_INVALID, "vocab_size is \"300\"; a whole number"},
        {"300", "0", FATHOM_INVALID, "vocab_size is 0; a whole number from 1"},
        {"300", "-300", FATHOM_INVALID, "vocab_size is -300"},
        {"300", "4194305", FATHOM_INVALID, "vocab_size is 4194305"},
        {"300", "9223372036854775807", FATHOM_INVALID, "vocab_size is 9223372036854775807"},
        {"300", "9223372036854775808", FATHOM_INVALID, "(64 bits are the limit), after"},
        {"300", "9223372036854775808", FATHOM_INVALID, "\"vocab_size\": 9223372036854775808"},
        {"300", "true", FATHOM_INVALID, "vocab_size is true"},
        {"300", "null", FATHOM_INVALID, "vocab_size is missing"},
        {"300", "[300]", FATHOM_INVALID, "vocab_size is an array"},
        {"300", "{}", FATHOM_INVALID, "vocab_size is an object"},
        {"300", "1e999", FATHOM_INVALID, "\"vocab_size\": 1e999"},
        {"300", "NaN", FATHOM_INVALID, "\"vocab_size\": NaN"},
        {"300", "\"a long text that would fill the line and hide what the message wants to say\"",
         FATHOM_INVALID, "vocab_size is a text of 75 bytes"},
        {"\"hidden_size\": 8", "\"hidden_size\": 32769", FATHOM_INVALID, "hidden_size is 32769"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1025", FATHOM_INVALID,
         "num_hidden_layers is 1025"},
        {"\"num_attention_heads\": 4", "\"num_attention_heads\": 1025", FATHOM_INVALID,
         "num_attention_heads is 1025"},
        {"\"num_attention_heads\": 4", "\"num_attention_heads\": 3", FATHOM_INVALID,
         "num_attention_heads is 3; a multiple of num_key_value_heads (2)"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 8", FATHOM_INVALID,
         "a multiple of num_key_value_heads (8)"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 0", FATHOM_INVALID,
         "num_key_value_heads is 0"},
        {"\"head_dim\": 6", "\"head_dim\": 5", FATHOM_INVALID, "head_dim is 5; an even number"},
        {"\"head_dim\": 6", "\"head_dim\": 1026", FATHOM_INVALID, "head_dim is 1026"},
        {"\"hidden_size\": 8,\n\"num_hidden_layers\": 2,\n\"num_attention_heads\": 4,\n"
         "\"num_key_value_heads\": 2,\n\"head_dim\": 6",
         "\"hidden_size\": 10,\n\"num_hidden_layers\": 2,\n\"num_attention_heads\": 4",
         FATHOM_INVALID, "head_dim is missing, and hidden_size / num_attention_heads = 10 / 4"},
        {"\"intermediate_size\": 16", "\"intermediate_size\": 262145", FATHOM_INVALID,
         "intermediate_size is 262145"},
        {"64", "16777217", FATHOM_INVALID, "max_position_embeddings is 16777217"},
        {"\"relu2\"", "\"gelu_new\"", FATHOM_UNSUPPORTED,
         "hidden_act is \"gelu_new\"; \"silu\" or \"relu2\" or \"gelu\""},
        {"\"relu2\"", "2", FATHOM_INVALID, "hidden_act is 2"},
        {"100000.0", "0", FATHOM_INVALID, "rope_theta is 0; a number from 1 to 1e+12"},
        {"100000.0", "\"1e5\"", FATHOM_INVALID, "rope_theta is \"1e5\""},
        {"\"after_rope\"", "\"rms\"", FATHOM_UNSUPPORTED, "qk_norm is \"rms\""},
        {"1.25", "0", FATHOM_INVALID, "qk_scale is 0"},
        {"1.25", "-1.25", FATHOM_INVALID, "qk_scale is -1.25"},
        {"\"nag_directions\": 4", "\"nag_directions\": 1025", FATHOM_INVALID,
         "nag_directions is 1025"},
        {"\"rmsnorm\"", "\"layernorm\"", FATHOM_UNSUPPORTED, "nag_head is \"layernorm\""},
        {"\"bos_token_id\": 1", "\"bos_token_id\": 300", FATHOM_INVALID,
         "bos_token_id is 300; a whole number from 0 to 299"},
        {"[2, 3]", "-1", FATHOM_INVALID, "eos_token_id is -1"},
        {"[2, 3]", "[]", FATHOM_INVALID, "eos_token_id is an array"},
        {"[2, 3]", "[2.0]", FATHOM_INVALID, "eos_token_id is 2.0"},
        {"\"bos_token_id\": 1", "\"rope_scaling\": {\"type\": \"yarn\"}", FATHOM_UNSUPPORTED,
         "rope_scaling is not supported"},
        {"\"bos_token_id\": 1", "\"num_attention_heads\": 1", FATHOM_INVALID,
         "\"num_attention_heads\""},
        {"{\n", "[\n", FATHOM_INVALID, "not valid JSON at line 2"},
    };
    expect_edits_refused("config.json", config_text, edits, COUNT(edits));
    write_text("config.json", "[]");
    expect_refusal(FATHOM_INVALID, "the JSON text is an array", "[]");
}

static void limits_the_size_of_config(void **state) {
    (void)state;
    static char spaces[(1 << 20) + 1];
    memset(spaces, ' ', sizeof spaces);
    write_file("config.json", spaces, sizeof spaces);
    expect_refusal(FATHOM_INVALID, "the limit is 1048576", "1 MiB and one byte");
}

/* ---- Folders and weights
 * ------------------------------------------------------------------------- */

static void says_what_is_expected_where(void **state) {
    (void)state;
    struct checkpoint *checkpoint;
    struct error error = {0};
    assert_int_equal(checkpoint_open("/nonexistent/model", &checkpoint, &error), FATHOM_NOT_FOUND);
    assert_non_null(
        strstr(error.message, "/nonexistent/model: No such file or directory; a checkpoint"));
    assert_int_equal(checkpoint_open(path_of("config.json"), &checkpoint, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "config.json is not a folder; a checkpoint folder"));

    remove(path_of("model.safetensors"));
    expect_refusal(FATHOM_NOT_FOUND, "neither model.safetensors nor model.safetensors.index.json",
                   "");
    write_text("model.safetensors", "");
    expect_refusal(FATHOM_INVALID, "model.safetensors is empty", "");
    remove(path_of("model.safetensors"));
    assert_int_equal(mkfifo(path_of("model.safetensors"), 0600), 0);
    expect_refusal(FATHOM_INVALID, "model.safetensors is not a regular file", "");
    remove(path_of("config.json"));
    expect_refusal(FATHOM_NOT_FOUND, "config.json is missing", "");
}

static void gives_tensors_of_the_implied_shape(void **state) {
    (void)state;
    struct checkpoint *checkpoint = open_good();
    struct error error = {0};
    struct tensor tensor;
    float out[6];
    assert_int_equal(checkpoint_parameters(checkpoint), 8);
    assert_int_equal(checkpoint_tensor(checkpoint, "w", 3, 2, &tensor, &error), 0);
    assert_string_equal(tensor.name, "w");
    assert_int_equal(tensor.type, DTYPE_F16);
    assert_int_equal(tensor_to_f32(&tensor, out, &error), 0);
    for (size_t i = 0; i < 6; i++) assert_true(out[i] == (float)(i + 1));

    /* Both ways to write a single number. */
    assert_int_equal(checkpoint_tensor(checkpoint, "model.log_gain", 1, 0, &tensor, &error), 0);
    assert_int_equal(tensor_to_f32(&tensor, out, &error), 0);
    assert_true(out[0] == 1);
    assert_int_equal(checkpoint_tensor(checkpoint, "model.norm.weight", 1, 0, &tensor, &error), 0);
    assert_int_equal(tensor_to_f32(&tensor, out, &error), 0);
    assert_true(out[0] == 2);

    static const struct {
        const char *name;
        size_t rows, columns;
        int code;
        const char *part;
    } wrong[] = {
        {"w", 2, 3, FATHOM_INVALID,
         "model.safetensors: tensor 'w' has shape [3, 2]; config.json implies [2, 3]"},
        {"w", 3, 3, FATHOM_INVALID, "tensor 'w' has shape [3, 2]; config.json implies [3, 3]"},
        {"w", 6, 0, FATHOM_INVALID, "tensor 'w' has shape [3, 2]; config.json implies [6]"},
        {"model.log_gain", 2, 0, FATHOM_INVALID,
         "'model.log_gain' has shape []; config.json implies [2]"},
        {"model.norm.weight", 1, 1, FATHOM_INVALID, "has shape [1]; config.json implies [1, 1]"},
        {"lm_head.weight", 300, 8, FATHOM_NOT_FOUND,
         "model.safetensors: tensor 'lm_head.weight' is missing; config.json implies it with shape "
         "[300, 8]"},
    };
    for (size_t i = 0; i < COUNT(wrong); i++) {
        assert_int_equal(checkpoint_tensor(checkpoint, wrong[i].name, wrong[i].rows,
                                           wrong[i].columns, &tensor, &error),
                         wrong[i].code);
        assert_int_equal(error.code, wrong[i].code);
        if (!strstr(error.message, wrong[i].part)) fail_msg("%s", error.message);
    }
    checkpoint_close(checkpoint);
}

static const char index_text[] = "{\"metadata\": {\"total_size\": 12}, \"weight_map\": {\n"
                                 "\"z\": \"one.safetensors\",\n"
                                 "\"a\": \"two.safetensors\",\n"
                                 "\"m\": \"one.safetensors\"}}";

static void write_shards(void) {
    const float values[3] = {1, 2, 3};
    remove(path_of("model.safetensors"));
    write_text("model.safetensors.index.json", index_text);
    write_tensors("one.safetensors",
                  "{\"m\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                  "\"z\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
                  values, 8);
    write_tensors("two.safetensors",
                  "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                  "\"unlisted\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
                  values + 1, 8);
}

static void reads_shards(void **state) {
    (void)state;
    write_shards();
    struct checkpoint *checkpoint = open_good();
    struct error error = {0};
    struct tensor tensor;
    assert_int_equal(checkpoint_parameters(checkpoint), 3);
    static const struct {
        const char *name;
        float value;
    } expected[] = {{"a", 2}, {"m", 1}, {"z", 2}};
    for (size_t i = 0; i < COUNT(expected); i++) {
        float out;
        assert_int_equal(checkpoint_tensor(checkpoint, expected[i].name, 1, 0, &tensor, &error), 0);
        assert_int_equal(tensor_to_f32(&tensor, &out, &error), 0);
        assert_true(out == expected[i].value);
    }
    assert_int_equal(checkpoint_tensor(checkpoint, "unlisted", 1, 0, &tensor, &error),
                     FATHOM_NOT_FOUND);
    assert_non_null(
        strstr(error.message, "model.safetensors.index.json: tensor 'unlisted' is missing"));
    assert_int_equal(checkpoint_tensor(checkpoint, "z", 2, 0, &tensor, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "/one.safetensors: tensor 'z' has shape [1]"));
    checkpoint_close(checkpoint);
}

static void refuses_wrong_indexes(void **state) {
    (void)state;
    static const struct edit edits[] = {
        {"weight_map", "weights", FATHOM_INVALID, "weight_map is missing"},
        {"{\n\"z\": \"one.safetensors\",\n\"a\": \"two.safetensors\",\n\"m\": \"one.safetensors\"}",
         "{}", FATHOM_INVALID, "weight_map is an object"},
        {"{\n\"z\": \"one.safetensors\",\n\"a\": \"two.safetensors\",\n\"m\": \"one.safetensors\"}",
         "[]", FATHOM_INVALID, "weight_map is an array"},
        {"\"two.safetensors\"", "2", FATHOM_INVALID, "weight_map: tensor 'a': the file is 2"},
        {"two.safetensors", "", FATHOM_INVALID, "tensor 'a': the file is \"\""},
        {"two.safetensors", ".", FATHOM_INVALID, "tensor 'a': the file is \".\""},
        {"two.safetensors", "..", FATHOM_INVALID, "tensor 'a': the file is \"..\""},
        {"two.safetensors", "../two.safetensors", FATHOM_INVALID,
         "tensor 'a': the file is \"../two.safetensors\""},
        {"two.safetensors", "/etc/passwd", FATHOM_INVALID,
         "tensor 'a': the file is \"/etc/passwd\""},
        {"two.safetensors", "a/two", FATHOM_INVALID, "tensor 'a': the file is \"a/two\""},
        {"two.safetensors", "six.safetensors", FATHOM_NOT_FOUND, "six.safetensors"},
        {"two.safetensors", "config.json", FATHOM_INVALID, "config.json: header length"},
        {"\"a\"", "\"b\"", FATHOM_INVALID, "weight_map puts tensor 'b' into"},
        {"\"two", "\"one", FATHOM_INVALID, "weight_map puts tensor 'a' into"},
        {"\"a\"", "\"z\"", FATHOM_INVALID, "\"z\""},
        {"}}", "}", FATHOM_INVALID, "not valid JSON"},
    };
    write_shards();
    expect_edits_refused("model.safetensors.index.json", index_text, edits, COUNT(edits));
}

static void limits_the_number_of_shards(void **state) {
    (void)state;
    static char text[64 * 1024];
    size_t used = (size_t)sprintf(text, "{\"weight_map\":{");
    for (int i = 0; i <= 1024; i++) {
        used += (size_t)sprintf(text + used, "%s\"%d\":\"f%d\"", i ? "," : "", i, i);
    }
    sprintf(text + used, "}}");
    write_shards();
    write_text("model.safetensors.index.json", text);
    expect_refusal(FATHOM_INVALID, "weight_map names more than 1024 files", "1025 shards");
}

/* Cut anywhere, a file is an error and nothing worse. */
static void refuses_every_truncation(void **state) {
    (void)state;
    write_text("depth.json", depth_text);
    struct {
        const char *name;
        size_t size;
    } files[] = {{"model.safetensors", write_weights()},
                 {"config.json", sizeof config_text - 1},
                 {"depth.json", sizeof depth_text - 1}};
    checkpoint_close(open_good());
    for (size_t i = 0; i < COUNT(files); i++) {
        for (size_t length = files[i].size; length-- > 0;) {
            assert_int_equal(truncate(path_of(files[i].name), (off_t)length), 0);
            expect_refusal(FATHOM_INVALID, files[i].name, "a prefix");
        }
        set_up(NULL);
        write_text("depth.json", depth_text);
    }
    write_shards();
    for (size_t length = sizeof index_text - 1; length-- > 0;) {
        assert_int_equal(truncate(path_of("model.safetensors.index.json"), (off_t)length), 0);
        expect_refusal(FATHOM_INVALID, "model.safetensors.index.json", "a prefix");
    }
}

/* ---- depth.json
 * ---------------------------------------------------------------------------------- */

static void has_full_depth_without_a_table(void **state) {
    (void)state;
    struct checkpoint *checkpoint = open_good();
    const struct depth_table *table = checkpoint_depth(checkpoint);
    assert_int_equal(table->kv_policy, KV_COMPUTE);
    assert_int_equal(table->tier_count, 1);
    assert_int_equal(table->default_tier, 0);
    assert_int_equal(table->sublayers, 4);
    assert_string_equal(table->tiers[0].name, "full");
    for (size_t i = 0; i < 4; i++) assert_true(table->theta[i] == 0);
    checkpoint_close(checkpoint);
}

static void reads_tiers(void **state) {
    (void)state;
    static const float fast[4] = {0, 0.25f, 1e-3f, 1.5f};
    write_text("depth.json", depth_text);
    struct checkpoint *checkpoint = open_good();
    const struct depth_table *table = checkpoint_depth(checkpoint);
    assert_int_equal(table->kv_policy, KV_OMIT);
    assert_int_equal(table->tier_count, 2);
    assert_int_equal(table->default_tier, 1);
    assert_string_equal(table->tiers[0].name, "fast");
    assert_true(table->tiers[0].target_skip == 0.4);
    assert_memory_equal(table->theta, fast, sizeof fast);
    assert_true(table->tiers[0].measured);
    assert_true(table->tiers[0].perplexity == 3.5);
    assert_true(table->tiers[0].attn_skip == 0.25);
    assert_true(table->tiers[0].mlp_skip == 0.5);
    assert_true(table->tiers[0].flops_per_token == 1e6);
    assert_false(table->tiers[1].measured);
    checkpoint_close(checkpoint);
}

static void refuses_wrong_tables(void **state) {
    (void)state;
    static const struct edit edits[] = {
        {"\"format\": 1", "\"format\": 2", FATHOM_INVALID,
         "format is 2; a whole number from 1 to 1"},
        {"\"format\": 1", "\"format\": 1.0", FATHOM_INVALID, "format is 1.0"},
        {"\"format\"", "\"version\"", FATHOM_INVALID, "format is missing"},
        {"\"omit\"", "\"recompute\"", FATHOM_UNSUPPORTED,
         "kv_policy is \"recompute\"; \"compute\" or \"omit\""},
        {"\"omit\"", "false", FATHOM_INVALID, "kv_policy is false"},
        {"\"tiers\"", "\"levels\"", FATHOM_INVALID, "tiers is missing"},
        {"\"name\": \"fast\"", "\"label\": \"fast\"", FATHOM_INVALID, "tiers[0]: name is missing"},
        {"\"name\": \"fast\"", "\"name\": 5", FATHOM_INVALID, "tiers[0]: name is 5"},
        {"\"name\": \"fast\"", "\"name\": \"\"", FATHOM_INVALID, "tier name ''"},
        {"\"name\": \"fast\"", "\"name\": \"Fast\"", FATHOM_INVALID, "tier name 'Fast'"},
        {"\"name\": \"fast\"", "\"name\": \"a:b\"", FATHOM_INVALID, "tier name 'a:b'"},
        {"\"name\": \"fast\"", "\"name\": \"a\\nb\"", FATHOM_INVALID, "tier name 'a?b'"},
        {"\"name\": \"fast\"", "\"name\": \"-fast\"", FATHOM_INVALID, "tier name '-fast'"},
        {"\"name\": \"fast\"", "\"name\": \"abcdefghijklmnopqrstuvwxyz012345\"", FATHOM_INVALID,
         "tiers[0]: name is \"abcdefghijklmnopqrstuvwxyz012345\"; a text of 1 to 31 bytes"},
        {"\"name\": \"fast\"", "\"name\": \"auto\"", FATHOM_INVALID,
         "tier name 'auto' is reserved"},
        {"\"name\": \"fast\"", "\"name\": \"full\"", FATHOM_INVALID,
         "tier name 'full' is used twice"},
        {"\"name\": \"full\"", "\"name\": \"fast\"", FATHOM_INVALID,
         "tier name 'fast' is used twice"},
        {"\"name\": \"full\", \"target_skip\": 0, \"theta\": [0, 0, 0, 0.0]}\n],\n\"default\": "
         "\"full\"",
         "\"name\": \"fast\", \"target_skip\": 0, \"theta\": [0, 0, 0, 0]}\n],\n\"default\": "
         "\"fast\"",
         FATHOM_INVALID, "tier name 'fast' is used twice"},
        {"\"name\": \"full\", \"target_skip\": 0, \"theta\": [0, 0, 0, 0.0]}\n],\n\"default\": "
         "\"full\"",
         "\"name\": \"slow\", \"target_skip\": 0, \"theta\": [0, 0, 0, 0]}\n],\n\"default\": "
         "\"slow\"",
         FATHOM_INVALID, "no tier named 'full'"},
        {"[0, 0, 0, 0.0]", "[0, 0, 0.125, 0]", FATHOM_INVALID, "tier 'full': theta[2] is 0.125"},
        {"[0, 0, 0, 0.0]", "[0, 0, 0]", FATHOM_INVALID,
         "tiers[1]: theta has 3 numbers; the model has 4 sub-layers"},
        {"[0, 0, 0, 0.0]", "[0, 0, 0, 0, 0]", FATHOM_INVALID, "tiers[1]: theta has 5 numbers"},
        {"[0, 0, 0, 0.0]", "0", FATHOM_INVALID, "tiers[1]: theta is 0"},
        {"1.5", "-1.5", FATHOM_INVALID, "tiers[0]: theta[3]: the number is -1.5"},
        {"1.5", "null", FATHOM_INVALID, "tiers[0]: theta[3]: the number is null"},
        {"1.5", "\"1\"", FATHOM_INVALID, "tiers[0]: theta[3]: the number is \"1\""},
        {"1.5", "1e400", FATHOM_INVALID, "1e400"},
        {"\"target_skip\": 0.4, ", "", FATHOM_INVALID, "tiers[0]: target_skip is missing"},
        {"0.4", "1.5", FATHOM_INVALID, "tiers[0]: target_skip is 1.5; a number from 0 to 1"},
        {"0.4", "-0.1", FATHOM_INVALID, "tiers[0]: target_skip is -0.1"},
        {"0.4", "\"40%\"", FATHOM_INVALID, "tiers[0]: target_skip is \"40%\""},
        {"\"default\": \"full\"", "\"default\": \"best\"", FATHOM_INVALID, "default is \"best\""},
        {"\"default\": \"full\"", "\"default\": 0", FATHOM_INVALID, "default is 0"},
        {"\"default\"", "\"preset\"", FATHOM_INVALID, "default is missing"},
        {"\"measured\": {\"fast\"", "\"measured\": {\"slow\"", FATHOM_INVALID, "measured 'slow'"},
        {"{\"perplexity\": 3.5, ", "{", FATHOM_INVALID, "measured 'fast': perplexity is missing"},
        {"3.5", "-3.5", FATHOM_INVALID,
         "measured 'fast': perplexity is -3.5; a number of at least 0"},
        {"\"attn_skip\": 0.25", "\"attn_skip\": 1.25", FATHOM_INVALID,
         "measured 'fast': attn_skip is 1.25"},
        {"\"mlp_skip\": 0.5", "\"mlp_skip\": []", FATHOM_INVALID,
         "measured 'fast': mlp_skip is an array"},
        {"1e6", "null", FATHOM_INVALID, "measured 'fast': flops_per_token is missing"},
        {"{\"perplexity\": 3.5, \"attn_skip\": 0.25, \"mlp_skip\": 0.5, \"flops_per_token\": 1e6}",
         "7", FATHOM_INVALID, "measured 'fast'"},
    };
    expect_edits_refused("depth.json", depth_text, edits, COUNT(edits));
    write_text("depth.json", "{\"format\":1,\"tiers\":[],\"default\":\"full\"}");
    expect_refusal(FATHOM_INVALID, "tiers has 0 entries", "no tiers");
    write_text("depth.json", "{\"format\":1,\"tiers\":[0,1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6]}");
    expect_refusal(FATHOM_INVALID, "tiers has 17 entries; 1 to 16", "17 tiers");
    write_text("depth.json", "{\"format\":1,\"tiers\":[\"full\"]}");
    expect_refusal(FATHOM_INVALID, "tiers[0]: the tier is \"full\"", "a tier that is a text");
}

static void make_table(struct depth_table *table, float *theta) {
    *table = (struct depth_table){.kv_policy = KV_OMIT,
                                  .tier_count = TIERS_MAX,
                                  .default_tier = 3,
                                  .sublayers = 4,
                                  .theta = theta};
    for (size_t tier = 0; tier < TIERS_MAX; tier++) {
        struct tier_info *info = &table->tiers[tier];
        snprintf(info->name, sizeof info->name, tier == 5 ? "full" : "tier-%zu.x_", tier);
        info->target_skip = tier == 5 ? 0 : 0.1 * (double)tier / 3;
        info->measured = tier % 2 == 0;
        if (!info->measured) continue;
        info->perplexity = 10.0 / 3 + (double)tier;
        info->attn_skip = 1.0 / (double)(tier + 3);
        info->mlp_skip = 1;
        info->flops_per_token = 1.23456789012345e12;
    }
    float next = 1.1e-5f; /* neighbours here are closer than 8 digits can tell */
    for (size_t i = 0; i < TIERS_MAX * 4; i++) {
        theta[i] = i / 4 == 5 ? 0 : next;
        next = nextafterf(next, 1);
    }
    theta[0] = FLT_MAX;
    theta[1] = FLT_TRUE_MIN;
    theta[2] = nextafterf(1, 2);
}

static void saves_what_it_reads(void **state) {
    (void)state;
    float theta[TIERS_MAX * 4];
    struct depth_table table;
    struct error error = {0};
    make_table(&table, theta);
    write_text("depth.json", "what was there before");
    if (depth_table_save(folder, &table, &error) != 0) fail_msg("%s", error.message);

    struct checkpoint *checkpoint = open_good();
    const struct depth_table *read = checkpoint_depth(checkpoint);
    assert_int_equal(read->kv_policy, KV_OMIT);
    assert_int_equal(read->tier_count, TIERS_MAX);
    assert_int_equal(read->default_tier, 3);
    assert_int_equal(read->sublayers, 4);
    assert_memory_equal(read->theta, theta, sizeof theta);
    for (size_t i = 0; i < TIERS_MAX; i++) {
        assert_string_equal(read->tiers[i].name, table.tiers[i].name);
        assert_true(read->tiers[i].target_skip == table.tiers[i].target_skip);
        assert_int_equal(read->tiers[i].measured, table.tiers[i].measured);
        assert_true(read->tiers[i].perplexity == table.tiers[i].perplexity);
        assert_true(read->tiers[i].attn_skip == table.tiers[i].attn_skip);
        assert_true(read->tiers[i].mlp_skip == table.tiers[i].mlp_skip);
        assert_true(read->tiers[i].flops_per_token == table.tiers[i].flops_per_token);
    }
    checkpoint_close(checkpoint);
}

static size_t count_files(void) {
    size_t count = 0;
    DIR *open = opendir(folder);
    assert_non_null(open);
    for (struct dirent *entry; (entry = readdir(open));) count += entry->d_name[0] != '.';
    closedir(open);
    return count;
}

/* A table that could not be read back is not written, and what was there stays. */
static void saves_nothing_that_is_wrong(void **state) {
    (void)state;
    float theta[TIERS_MAX * 4];
    struct depth_table table;
    struct error error = {0};
    write_text("depth.json", depth_text);
    make_table(&table, theta);
    theta[7] = NAN;
    assert_int_equal(depth_table_save(folder, &table, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "depth.json: tier 'tier-1.x_': theta[3] is nan"));
    make_table(&table, theta);
    table.tiers[4].perplexity = INFINITY;
    assert_int_equal(depth_table_save(folder, &table, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "tier 'tier-4.x_': measured figures must be finite"));
    make_table(&table, theta);
    table.tiers[1].target_skip = NAN;
    assert_int_equal(depth_table_save(folder, &table, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "tier 'tier-1.x_': target_skip is nan"));
    make_table(&table, theta);
    snprintf(table.tiers[2].name, sizeof table.tiers[2].name, "a\"b");
    assert_int_equal(depth_table_save(folder, &table, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "tier name 'a\"b'"));
    reads_tiers(state);
    make_table(&table, theta);
    assert_int_equal(depth_table_save("/nonexistent/model", &table, &error), FATHOM_IO);
    assert_non_null(strstr(error.message, "cannot write /nonexistent/model/depth.json"));

    remove(path_of("depth.json")); /* a folder in the way: rename fails, and the new file goes */
    assert_int_equal(mkdir(path_of("depth.json"), 0700), 0);
    assert_int_equal(depth_table_save(folder, &table, &error), FATHOM_IO);
    assert_non_null(strstr(error.message, "cannot replace"));
    assert_int_equal(count_files(), 3);
}

int main(void) {
    if (!mkdtemp(folder)) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(reads_every_key_of_config, set_up),
        cmocka_unit_test_setup(fills_in_defaults, set_up),
        cmocka_unit_test_setup(refuses_wrong_configs, set_up),
        cmocka_unit_test_setup(limits_the_size_of_config, set_up),
        cmocka_unit_test_setup(says_what_is_expected_where, set_up),
        cmocka_unit_test_setup(gives_tensors_of_the_implied_shape, set_up),
        cmocka_unit_test_setup(reads_shards, set_up),
        cmocka_unit_test_setup(refuses_wrong_indexes, set_up),
        cmocka_unit_test_setup(limits_the_number_of_shards, set_up),
        cmocka_unit_test_setup(refuses_every_truncation, set_up),
        cmocka_unit_test_setup(has_full_depth_without_a_table, set_up),
        cmocka_unit_test_setup(reads_tiers, set_up),
        cmocka_unit_test_setup(refuses_wrong_tables, set_up),
        cmocka_unit_test_setup(saves_what_it_reads, set_up),
        cmocka_unit_test_setup(saves_nothing_that_is_wrong, set_up),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    remove_files();
    rmdir(folder);
    return failed;
}
