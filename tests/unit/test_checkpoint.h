/* A checkpoint folder that tests write into: good texts, and edits of them that are refused. */
#ifndef FATHOM_TEST_CHECKPOINT_H
#define FATHOM_TEST_CHECKPOINT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include <dirent.h>
#include <stdio.h>
#include <string.h>

#include "engine/checkpoint.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- A folder to write into ------------------------------------------------------------------ */

static char folder[] = "/tmp/fathom-checkpoint-XXXXXX";

static inline const char *path_of(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static inline void write_file(const char *name, const void *data, size_t size) {
    FILE *out = fopen(path_of(name), "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, size, out), size);
    assert_int_equal(fclose(out), 0);
}

static inline void write_text(const char *name, const char *text) {
    write_file(name, text, strlen(text));
}

static inline size_t write_tensors(const char *name, const char *header, const void *data,
                                   size_t size) {
    unsigned char bytes[4096];
    uint64_t length = strlen(header);
    assert_true(8 + length + size <= sizeof bytes);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, length);
    memcpy(bytes + 8 + length, data, size);
    write_file(name, bytes, 8 + length + size);
    return 8 + length + size;
}

static inline void remove_files(void) {
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

static inline size_t write_weights(void) {
    return write_tensors("model.safetensors", weights_header, weights, sizeof weights);
}

static inline int set_up(void **state) {
    (void)state;
    remove_files();
    write_text("config.json", config_text);
    write_weights();
    return 0;
}

static inline struct checkpoint *open_good(void) {
    struct checkpoint *checkpoint;
    struct error error = {0};
    if (checkpoint_open(folder, &checkpoint, &error) != 0) fail_msg("%s", error.message);
    return checkpoint;
}

static inline void expect_refusal(int code, const char *part, const char *shown) {
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

static inline void expect_edits_refused(const char *name, const char *text,
                                        const struct edit *edits, size_t count) {
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

#endif
