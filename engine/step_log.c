#include "engine/step_log.h"

#include <stdlib.h>

int step_log_create(struct step_log *log, size_t capacity, struct error *error) {
    *log = (struct step_log){.capacity = capacity};
    if (capacity == 0) return 0;
    log->records = calloc(capacity, sizeof *log->records);
    if (log->records) return 0;
    log->capacity = 0;
    return error_set(error, FATHOM_NO_MEMORY, "no memory for a log of %zu steps", capacity);
}

void step_log_destroy(struct step_log *log) {
    free(log->records);
    *log = (struct step_log){0};
}

void step_log_add(struct step_log *log, const struct step_record *record) {
    if (log->capacity == 0) return;
    log->records[log->written++ % log->capacity] = *record;
}

size_t step_log_copy(const struct step_log *log, struct step_record *out, size_t capacity) {
    uint64_t count = log->written < log->capacity ? log->written : log->capacity;
    if (count > capacity) count = capacity;
    for (uint64_t i = 0; i < count; i++) {
        out[i] = log->records[(log->written - count + i) % log->capacity];
    }
    return (size_t)count;
}
