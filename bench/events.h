/* Server-sent events (WHATWG HTML, 9.2): bytes in any pieces in, the data of whole events out. */
#ifndef FATHOM_BENCH_EVENTS_H
#define FATHOM_BENCH_EVENTS_H

#include "api/api.h"

#define EVENT_BYTES_MAX ((size_t)4 << 20) /* of one line, and of one event's data */

/* Zero-initialised is ready. */
struct event_reader {
    struct text_buffer line, data;
    bool has_data;       /* the event under way has a data line */
    bool after_carriage; /* the last byte was CR: a LF now belongs to it */
};

/* Non-zero ends the feeding and is what event_reader_feed returns. */
typedef int event_handler(void *context, const char *data, size_t length);

/* 0; FATHOM_INVALID for an event over the limit; FATHOM_NO_MEMORY; or the handler's. */
int event_reader_feed(struct event_reader *reader, const char *bytes, size_t length,
                      event_handler *handler, void *context);
void event_reader_reset(struct event_reader *reader); /* keeps the memory */
void event_reader_free(struct event_reader *reader);

#endif
