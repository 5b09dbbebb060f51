/* What the suites of the CUDA backend share: the library under test with what its emulation tells,
 * and a golden model with what it is expected to answer. */
#ifndef FATHOM_TEST_CUDA_RUNS_H
#define FATHOM_TEST_CUDA_RUNS_H

#include "engine_runs.h"
#include "test_device.h"

#include <dlfcn.h>

/* As in kernels/emulation/emulation.h. */
struct emulation_counters {
    size_t launches, products, bytes, graphs, waits, copies, copied;
};
struct emulation_clock {
    double launch_ns, byte_ns, record_ns;
};
enum emulation_lack { LACKS_NOTHING, LACKS_GRAPHS, LACKS_BRANCHES };

struct emulation {
    struct emulation_counters (*get)(void);
    void (*clear)(void);
    void (*set_schedule)(uint64_t seed);
    void (*set_lack)(enum emulation_lack lack);
    void (*set_clock)(const struct emulation_clock *clock);
};

static inline void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    assert_non_null(found);
    return found;
}

/* The library under test, which may be that of a real device. */
static inline void *library_open(void) {
    const char *file = getenv("FATHOM_CUDA_LIBRARY");
    if (is_cpu_tested() || !file) skip();
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    return library;
}

/* All NULL where a device is real. */
static inline struct emulation emulation_find(void) {
    struct emulation emulation = {0};
    void *library = library_open();
    if (!dlsym(library, "emulation_clear_counters")) return emulation;
    *(void **)&emulation.get = symbol(library, "emulation_get_counters");
    *(void **)&emulation.clear = symbol(library, "emulation_clear_counters");
    *(void **)&emulation.set_schedule = symbol(library, "emulation_set_schedule");
    *(void **)&emulation.set_lack = symbol(library, "emulation_set_lack");
    *(void **)&emulation.set_clock = symbol(library, "emulation_set_clock");
    return emulation;
}

static inline struct emulation emulation_open(void) {
    struct emulation emulation = emulation_find();
    if (!emulation.get) skip();
    return emulation;
}

struct run {
    struct model *model;
    struct window_runner runner;
    int32_t tokens[128];
    size_t count;
    struct safetensors expected;
};

static inline void run_open_with(struct run *run, const char *name,
                                 const struct model_options *options) {
    char path[512];
    struct error error = {0};
    snprintf(path, sizeof path, "%s%s", GOLDEN_FOLDER, name);
    run->model = golden_model(path, options);
    must(window_runner_create(run->model, 0, &run->runner, &error), &error);
    golden_expected(name, &run->expected);
    run->count = golden_count(&run->expected, "tokens");
    assert_in_range(run->count, 1, 128);
    golden_copy(&run->expected, "tokens", run->tokens, run->count * sizeof(int32_t));
}

static inline void run_open(struct run *run, const char *name) {
    struct model_options options = {.device = "cuda", .weights = WEIGHTS_BF16};
    run_open_with(run, name, &options);
}

static inline void run_close(struct run *run) {
    safetensors_close(&run->expected);
    window_runner_destroy(&run->runner);
    model_destroy(run->model);
}

#endif
