/* The last steps, for GET /debug/steps: a ring that the engine thread writes and others copy. The
 * lock is the caller's. */
#ifndef FATHOM_STEP_LOG_H
#define FATHOM_STEP_LOG_H

#include "engine/engine.h"

struct step_log {
    struct step_record *records; /* [capacity] */
    size_t capacity;             /* 0: off */
    uint64_t written;
};

int step_log_create(struct step_log *log, size_t capacity, struct error *error);
void step_log_destroy(struct step_log *log);
void step_log_add(struct step_log *log, const struct step_record *record);

/* Copies the last ones, oldest first; returns how many. */
size_t step_log_copy(const struct step_log *log, struct step_record *out, size_t capacity);

#endif
