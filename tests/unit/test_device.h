/* The device that a suite runs on: one suite serves every backend. */
#ifndef FATHOM_TESTS_TEST_DEVICE_H
#define FATHOM_TESTS_TEST_DEVICE_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

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

#endif
