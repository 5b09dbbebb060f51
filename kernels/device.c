/* Choice of a backend by name. */
#include "kernels/kernels.h"

#include "kernels/cpu/cpu.h"

#include <string.h>

int device_open(const struct device_options *options, struct device **device, struct error *error) {
    const char *name = options->name ? options->name : "auto";
    *device = NULL;
    if (!strcmp(name, "auto") || !strcmp(name, "cpu")) return cpu_open(options, device, error);
    if (!strncmp(name, "cuda", 4)) {
        return error_set(error, FATHOM_UNSUPPORTED,
                         "device \"%.32s\": this build has no CUDA; use \"cpu\" or \"auto\"", name);
    }
    return error_set(error, FATHOM_INVALID, "device \"%.32s\" is unknown; use \"auto\" or \"cpu\"",
                     name);
}

enum dtype device_preferred_weights(const struct device *device, enum dtype type) {
    return device->kernels->preferred_weights(device, type);
}

const char *dtype_name(enum dtype type) {
    static const char *const names[DTYPE_COUNT] = {"f32", "bf16", "f16", "int8"};
    return names[type];
}
