/* Checkpoint folders, written here: config.json, the weights in one file and in shards. */
#include "test_checkpoint.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- config.json ----------------------------------------------------------------------------- */

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
    assert_int_equal(config->eos_count, 2);
    assert_int_equal(config->eos[0], 2);
    assert_int_equal(config->eos[1], 3);
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
    assert_int_equal(config->eos_count, 0);
    checkpoint_close(checkpoint);
}

static void refuses_wrong_configs(void **state) {
    (void)state;
    static const struct edit edits[] = {
        {"\"nag\"", "\"mamba\"", FATHOM_UNSUPPORTED, "model_type is \"mamba\"; \"nag\""},
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

/* ---- Folders and weights --------------------------------------------------------------------- */

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
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    remove_files();
    rmdir(folder);
    return failed;
}
