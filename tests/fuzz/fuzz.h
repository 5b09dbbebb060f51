/* What every target shares. */
#ifndef FATHOM_FUZZ_H
#define FATHOM_FUZZ_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Says what did not hold; the abort is what a fuzzer keeps the input of. */
#define check(condition)                                                                           \
    do {                                                                                           \
        if (condition) break;                                                                      \
        fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                    \
        abort();                                                                                   \
    } while (0)

/* An error that was given must be one that can be shown. */
static inline void check_error(int result, const struct error *error) {
    check(result < 0 && error->code == result && error->message[0] != '\0');
    check(strlen(error->message) < sizeof error->message);
}

/* Numbers that follow from the input alone: choices that need no bytes of it. */
struct choices {
    uint64_t state;
};

static inline struct choices choices_of(const uint8_t *data, size_t size) {
    struct choices choices = {size};
    for (size_t i = 0; i < size; i++) choices.state = mix_bits(choices.state + MIX_STEP + data[i]);
    return choices;
}

static inline size_t choose(struct choices *choices, size_t below) {
    choices->state += MIX_STEP;
    return mix_bits(choices->state) % below;
}

/* A copy of its own size, so that a sanitizer sees a byte read too far. The caller frees it. */
static inline char *copy_exact(const char *bytes, size_t length) {
    char *copy = malloc(length > 0 ? length : 1);
    check(copy != NULL);
    if (length > 0) memcpy(copy, bytes, length);
    return copy;
}

#endif
