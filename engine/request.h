/* The check of an engine_request: every field, before anything is copied or computed from it. */
#ifndef FATHOM_REQUEST_H
#define FATHOM_REQUEST_H

#include "engine/engine.h"

struct request_limits {
    size_t vocab, context, tiers;
    size_t kv_tokens; /* positions that the whole KV cache holds */
};

/* 0, FATHOM_INVALID, or FATHOM_NO_MEMORY when the KV cache could never hold it. The message begins
 * with the field's name. */
int request_check(const struct engine_request *request, const struct request_limits *limits,
                  struct error *error);

#endif
