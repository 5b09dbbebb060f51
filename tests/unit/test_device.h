/* The device that a suite runs on: one suite serves every backend. */
#ifndef FATHOM_TESTS_TEST_DEVICE_H
#define FATHOM_TESTS_TEST_DEVICE_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"

/* What the environment's FATHOM_TEST_DEVICE names; "cpu" unless set. */
static inline const char *test_device(void) {
    const char *name = getenv("FATHOM_TEST_DEVICE");
    return name ? name : "cpu";
}

static inline bool is_cpu_tested(void) {
    return strcmp(test_device(), "cpu") == 0;
}

/* Instruction sets are the CPU's. Other devices take part in a loop over them once, as
 * "portable". */
static inline bool is_isa_tested(const char *isa) {
    return is_cpu_tested() || !isa || strcmp(isa, "portable") == 0;
}

/* Calls check for every instruction set that is tested and that this processor has. */
static inline void for_each_isa(void (*check)(const char *isa)) {
    static const char *const sets[] = {"avx512bf16", "avx512vnni", "avx512", "avx2", "portable"};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        if (!is_isa_tested(sets[i])) continue;
        struct device_options options = {
            .name = "cpu", .isa = sets[i], .threads = 1, .max_rows = 1, .max_width = 16};
        struct device *device;
        if (device_open(&options, &device, NULL) != 0) {
            printf("this processor has no %s\n", sets[i]);
            continue;
        }
        device->kernels->close(device);
        check(sets[i]);
    }
}

#endif
