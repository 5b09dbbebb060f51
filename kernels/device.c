/* Choice of a backend by name. CUDA is a library of its own, so that a program without it starts
 * where there is neither toolkit nor driver. */
#include "kernels/kernels.h"

#include "kernels/cpu/cpu.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CUDA_LIBRARY "libfathom_cuda.so"

typedef int open_function(const struct device_options *options, struct device **device,
                          struct error *error);

/* The library's path: as the environment says, beside this program, or just its name. */
static const char *find_library(char path[PATH_MAX]) {
    const char *named = getenv("FATHOM_CUDA_LIBRARY");
    if (named && *named) return named;
    ssize_t length = readlink("/proc/self/exe", path, PATH_MAX - sizeof CUDA_LIBRARY);
    if (length <= 0) return CUDA_LIBRARY;
    path[length] = '\0';
    char *slash = strrchr(path, '/');
    if (!slash) return CUDA_LIBRARY;
    memcpy(slash + 1, CUDA_LIBRARY, sizeof CUDA_LIBRARY);
    return access(path, R_OK) == 0 ? path : CUDA_LIBRARY;
}

/* It stays loaded for the life of the process: a second device uses it too. */
static int cuda_open(const struct device_options *options, struct device **device,
                     struct error *error) {
    char path[PATH_MAX];
    const char *file = find_library(path);
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        return error_set(error, FATHOM_UNSUPPORTED,
                         "the CUDA backend cannot be loaded (built with -DFATHOM_CUDA=ON?): %s",
                         reason ? reason : file);
    }
    open_function *open_device;
    *(void **)&open_device = dlsym(library, "fathom_cuda_open");
    if (!open_device) {
        return error_set(error, FATHOM_UNSUPPORTED, "%s is not Fathom's CUDA backend", file);
    }
    return open_device(options, device, error);
}

int device_open(const struct device_options *options, struct device **device, struct error *error) {
    const char *name = options->name ? options->name : "auto";
    *device = NULL;
    if (!strcmp(name, "cpu")) return cpu_open(options, device, error);
    if (!strcmp(name, "cuda") || !strncmp(name, "cuda:", 5)) {
        int result = cuda_open(options, device, error);
        if (result) error_prefix(error, "device \"%.32s\"", name);
        return result;
    }
    if (!strcmp(name, "auto")) {
        /* An instruction set is asked of a CPU. */
        if (!options->isa && cuda_open(options, device, NULL) == FATHOM_OK) return FATHOM_OK;
        return cpu_open(options, device, error);
    }
    return error_set(error, FATHOM_INVALID,
                     "device \"%.32s\" is unknown; use \"auto\", \"cpu\" or \"cuda:N\"", name);
}

enum dtype device_preferred_weights(const struct device *device, enum dtype type) {
    return device->kernels->preferred_weights(device, type);
}

const char *dtype_name(enum dtype type) {
    static const char *const names[DTYPE_COUNT] = {"f32", "bf16", "f16", "int8"};
    return names[type];
}
