/* Weights that are numbers, and yet too large to compute with: refused when the model loads. */
#include "golden.h"
#include "test_device.h"

#include <stdlib.h>
#include <unistd.h>

#include "engine/engine.h"

#define SOURCE GOLDEN_FOLDER "mha-silu"

static char folder[] = "/tmp/fathom-trial-XXXXXX";

static const char *path_of(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const char *data, size_t size) {
    FILE *file = fopen(path_of(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

/* The golden checkpoint with every element of one tensor replaced. */
static void write_checkpoint(const char *tensor, float value) {
    struct error error = {0};
    struct safetensors file;
    char *data;
    size_t size;
    must(file_read(SOURCE "/config.json", 1 << 20, &data, &size, &error), &error);
    write_file("config.json", data, size);
    free(data);
    must(file_read(SOURCE "/model.safetensors", 64 << 20, &data, &size, &error), &error);
    must(safetensors_parse(data, size, &file, &error), &error);
    const struct safetensors_entry *entry = safetensors_find(&file, tensor);
    assert_non_null(entry);
    assert_int_equal(entry->end - entry->begin, entry->elements * sizeof value);
    size_t begin = size - file.data_bytes + entry->begin;
    for (size_t i = 0; i < entry->elements; i++) {
        memcpy(data + begin + i * sizeof value, &value, sizeof value);
    }
    write_file("model.safetensors", data, size);
    safetensors_close(&file);
    free(data);
}

static void overflowing_weights_do_not_load(void **state) {
    (void)state;
    static const struct {
        const char *tensor;
        float value;
        bool loads;
    } cases[] = {
        {"model.layers.0.self_attn.v_proj.weight", 0.5f, true},
        {"model.layers.0.self_attn.v_proj.weight", 3e38f, false},
        {"model.layers.1.self_attn.q_proj.weight", 3e38f, false},
        {"model.layers.1.mlp.down_proj.weight", 3e38f, false},
        {"lm_head.weight", 3e38f, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct model_options options = {.device = test_device()};
        struct model *model = NULL;
        struct error error = {0};
        write_checkpoint(cases[i].tensor, cases[i].value);
        int result = model_load(folder, &options, &model, &error);
        if (result != (cases[i].loads ? 0 : FATHOM_INVALID)) {
            fail_msg("%s = %g: %d %s", cases[i].tensor, (double)cases[i].value, result,
                     error.message);
        }
        assert_true(cases[i].loads || strstr(error.message, "too large to compute with"));
        model_destroy(model);
    }
}

int main(void) {
    if (!mkdtemp(folder)) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(overflowing_weights_do_not_load),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path_of("config.json"));
    unlink(path_of("model.safetensors"));
    rmdir(folder);
    return failed;
}
