/* Golden files of the reference (tests/reference/README.md), for the tests that run a whole
 * model. */
#ifndef FATHOM_TESTS_GOLDEN_H
#define FATHOM_TESTS_GOLDEN_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "engine/measure.h"
#include "engine/safetensors.h"

#define GOLDEN_FOLDER FATHOM_SOURCE "/tests/reference/golden/"

static const char *const golden_cases[] = {"mha-silu",     "gqa-relu2",  "mqa-gelu-omit",
                                           "sharded-omit", "odd-shapes", "with-tokenizer",
                                           "no-depth"};
enum { GOLDEN_CASES = sizeof golden_cases / sizeof *golden_cases };

static inline void must(int result, const struct error *error) {
    if (result != 0) fail_msg("%s", error->message);
}

static inline struct model *golden_model(const char *folder, const struct model_options *options) {
    struct error error = {0};
    struct model *model = NULL;
    must(model_load(folder, options, &model, &error), &error);
    return model;
}

static inline void golden_expected(const char *name, struct safetensors *file) {
    char path[512];
    struct error error = {0};
    snprintf(path, sizeof path, "%s%s/expected.safetensors", GOLDEN_FOLDER, name);
    must(safetensors_open(path, file, &error), &error);
}

/* Data of an entry, which must have `bytes` bytes; copied, since the file does not align it. */
static inline void golden_copy(const struct safetensors *file, const char *name, void *out,
                               size_t bytes) {
    const struct safetensors_entry *entry = safetensors_find(file, name);
    if (!entry)
        fail_msg("no entry %s", name);
    else if (entry->end - entry->begin != bytes)
        fail_msg("%s: %zu bytes", name, entry->end - entry->begin);
    else
        memcpy(out, file->data + entry->begin, bytes);
}

static inline size_t golden_count(const struct safetensors *file, const char *name) {
    const struct safetensors_entry *entry = safetensors_find(file, name);
    if (!entry) fail_msg("no entry %s", name);
    return entry ? entry->elements : 0;
}

#endif
