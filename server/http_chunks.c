#include "server/http_chunks.h"

#include "server/http_head.h"

static int chunks_take(struct http_chunks *chunks, unsigned char byte, struct error *error);

int http_chunks_feed(struct http_chunks *chunks, const char *bytes, size_t length, size_t *consumed,
                     size_t *data_length, struct error *error) {
    size_t at = 0;
    *data_length = 0;
    while (at < length && chunks->state != CHUNK_COMPLETE) {
        if (chunks->state == CHUNK_DATA) {
            size_t room = length - at;
            *data_length = chunks->left < room ? (size_t)chunks->left : room;
            chunks->left -= *data_length;
            if (chunks->left == 0) chunks->state = CHUNK_DATA_RETURN;
            at += *data_length;
            break;
        }
        int result = chunks_take(chunks, (unsigned char)bytes[at++], error);
        if (result != 0) return result;
        chunks->overhead++;
        if (chunks->state == CHUNK_DATA) break; /* the size may be more than is wanted */
    }
    *consumed = at;
    return 0;
}

static int refuse(struct error *error, const char *sentence) {
    return error_set(error, FATHOM_INVALID, "%s", sentence);
}

static bool is_blank(unsigned char byte) {
    return byte == ' ' || byte == '\t';
}

/* What may stand in an extension or a trailer's value. */
static bool is_text(unsigned char byte) {
    return byte == '\t' || (byte >= 0x20 && byte != 0x7f);
}

static int take_digit(struct http_chunks *chunks, unsigned char byte, struct error *error) {
    unsigned char lower = byte | 0x20;
    bool is_decimal = byte >= '0' && byte <= '9', is_letter = lower >= 'a' && lower <= 'f';
    if (!is_decimal && !is_letter) return refuse(error, "a chunk does not begin with its size");
    if (chunks->left >> 60) return refuse(error, "a chunk's size has more than 64 bits");
    chunks->left = chunks->left << 4 | (unsigned)(is_decimal ? byte - '0' : lower - 'a' + 10);
    chunks->state = CHUNK_MORE_SIZE;
    return 0;
}

/* Behind a size: BWS ";" extension, or the line's end. */
static int end_size(struct http_chunks *chunks, unsigned char byte, struct error *error) {
    bool was_blank = chunks->state == CHUNK_BLANK;
    if (is_blank(byte)) {
        chunks->state = CHUNK_BLANK;
    } else if (byte == ';') {
        chunks->state = CHUNK_EXTENSION;
    } else if (byte == '\r' && !was_blank) {
        chunks->state = CHUNK_SIZE_END;
    } else if (was_blank) {
        return refuse(error, "a chunk's size has blanks behind it and no extension");
    } else {
        return take_digit(chunks, byte, error);
    }
    return 0;
}

/* Inside a line: text, or CR, which leads to `end`. */
static int take_text(struct http_chunks *chunks, unsigned char byte, enum http_chunk_state end,
                     struct error *error) {
    if (byte == '\r') {
        chunks->state = end;
        return 0;
    }
    if (is_text(byte)) return 0;
    return refuse(error, "a control character stands in a chunk's extension or in a trailer");
}

static int take_trailer(struct http_chunks *chunks, unsigned char byte, struct error *error) {
    if (http_is_token_character(byte)) {
        chunks->state = CHUNK_TRAILER_NAME;
    } else if (byte == ':' && chunks->state == CHUNK_TRAILER_NAME) {
        chunks->state = CHUNK_TRAILER_VALUE;
    } else if (byte == '\r' && chunks->state == CHUNK_TRAILER) {
        chunks->state = CHUNK_LAST_END;
    } else {
        return refuse(error, "a trailer is not 'Name: value'");
    }
    return 0;
}

static int take_exactly(struct http_chunks *chunks, unsigned char byte, char expected,
                        enum http_chunk_state next, struct error *error) {
    if (byte != (unsigned char)expected) {
        return refuse(error, "a line of the chunked body does not end with CR LF where it must");
    }
    chunks->state = next;
    return 0;
}

static int chunks_take(struct http_chunks *chunks, unsigned char byte, struct error *error) {
    switch (chunks->state) {
    case CHUNK_SIZE:
        chunks->left = 0;
        return take_digit(chunks, byte, error);
    case CHUNK_MORE_SIZE:
    case CHUNK_BLANK:
        return end_size(chunks, byte, error);
    case CHUNK_EXTENSION:
        return take_text(chunks, byte, CHUNK_SIZE_END, error);
    case CHUNK_SIZE_END:
        return take_exactly(chunks, byte, '\n', chunks->left > 0 ? CHUNK_DATA : CHUNK_TRAILER,
                            error);
    case CHUNK_DATA_RETURN:
        return take_exactly(chunks, byte, '\r', CHUNK_DATA_END, error);
    case CHUNK_DATA_END:
        return take_exactly(chunks, byte, '\n', CHUNK_SIZE, error);
    case CHUNK_TRAILER:
    case CHUNK_TRAILER_NAME:
        return take_trailer(chunks, byte, error);
    case CHUNK_TRAILER_VALUE:
        return take_text(chunks, byte, CHUNK_TRAILER_END, error);
    case CHUNK_TRAILER_END:
        return take_exactly(chunks, byte, '\n', CHUNK_TRAILER, error);
    case CHUNK_LAST_END:
        return take_exactly(chunks, byte, '\n', CHUNK_COMPLETE, error);
    case CHUNK_DATA:
    case CHUNK_COMPLETE:
        break; /* no bytes of these come here */
    }
    return 0;
}
