#include "bench/events.h"

#include <string.h>

static int buffer_add(struct text_buffer *buffer, const char *bytes, size_t length) {
    if (length > EVENT_BYTES_MAX - buffer->length) return FATHOM_INVALID;
    text_append(buffer, bytes, length);
    return buffer->failed ? FATHOM_NO_MEMORY : 0;
}

/* Fields other than data (event, id, retry) and comments mean nothing to us. */
static int take_line(struct event_reader *reader, const char *line, size_t length,
                     event_handler *handler, void *context) {
    if (length == 0) {
        bool whole = reader->has_data;
        size_t data_length = reader->data.length;
        reader->has_data = false;
        reader->data.length = 0;
        return whole ? handler(context, reader->data.data, data_length) : 0;
    }
    if (length < 5 || memcmp(line, "data:", 5) != 0) return 0;
    size_t start = length > 5 && line[5] == ' ' ? 6 : 5;
    int result = reader->has_data ? buffer_add(&reader->data, "\n", 1) : 0;
    reader->has_data = true;
    return result != 0 ? result : buffer_add(&reader->data, line + start, length - start);
}

/* Length of the bytes before the first CR or LF, or `length`. */
static size_t line_length(const char *bytes, size_t length) {
    size_t i = 0;
    while (i < length && bytes[i] != '\n' && bytes[i] != '\r') i++;
    return i;
}

int event_reader_feed(struct event_reader *reader, const char *bytes, size_t length,
                      event_handler *handler, void *context) {
    while (length) {
        if (reader->after_carriage && *bytes == '\n') {
            bytes++;
            length--;
        }
        reader->after_carriage = false;
        if (!length) break;
        size_t piece = line_length(bytes, length);
        if (piece == length) return buffer_add(&reader->line, bytes, length);
        int result;
        if (reader->line.length == 0) { /* the usual case: a line lies whole in the bytes */
            if (piece > EVENT_BYTES_MAX) return FATHOM_INVALID;
            result = take_line(reader, bytes, piece, handler, context);
        } else {
            result = buffer_add(&reader->line, bytes, piece);
            size_t whole = reader->line.length;
            reader->line.length = 0;
            if (result == 0) result = take_line(reader, reader->line.data, whole, handler, context);
        }
        if (result != 0) return result;
        reader->after_carriage = bytes[piece] == '\r';
        bytes += piece + 1;
        length -= piece + 1;
    }
    return 0;
}

void event_reader_reset(struct event_reader *reader) {
    reader->line.length = reader->data.length = 0;
    reader->line.failed = reader->data.failed = false;
    reader->has_data = reader->after_carriage = false;
}

void event_reader_free(struct event_reader *reader) {
    text_free(&reader->line);
    text_free(&reader->data);
    event_reader_reset(reader);
}
