/* A completion under way: its choices, and the part of the answer that never changes. Private to
 * api/. */
#ifndef FATHOM_COMPLETION_H
#define FATHOM_COMPLETION_H

#include "api/choice.h"

struct completion {
    const struct api_context *context;
    const struct completion_request *request;
    uint64_t seed;             /* of the first choice of each prompt */
    struct text_buffer prefix; /* {"id":... up to "choices":[ : the same in every chunk */
    size_t choice_count, ended;
    struct choice choices[];
};

#endif
