/* What every room stands on: error codes with sentences, checked sizes, files, time.
 *
 * Nothing here knows a model, a request or a socket. All functions may be called from any thread;
 * the objects they fill belong to the caller.
 */
#ifndef FATHOM_BASE_H
#define FATHOM_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A function that can fail returns 0 or one of these, negative, and fills a struct error. */
enum fathom_error {
    FATHOM_OK = 0,
    FATHOM_INVALID = -1,     /* what was given (a file, a flag, a field) is wrong */
    FATHOM_IO = -2,          /* the operating system said no */
    FATHOM_NO_MEMORY = -3,   /* memory is exhausted */
    FATHOM_UNSUPPORTED = -4, /* well-formed, but this build or machine cannot do it */
    FATHOM_FULL = -5,        /* a bounded queue has no room now; later may work */
    FATHOM_NOT_FOUND = -6,   /* a file, key or name that does not exist */
    FATHOM_TOO_LARGE = -7,   /* could never fit a budget, however long it waits */
    FATHOM_CANCELLED = -8,   /* the caller gave the work up before it was done */
};

/* A sentence that a user can act on: what is wrong, where, and what would be right. */
struct error {
    int code;          /* enum fathom_error; 0 when nothing went wrong */
    char message[480]; /* NUL-terminated UTF-8, cut to fit; control characters replaced by '?' */
};

/* Fills `error` (which may be NULL) and returns `code`, so that a caller can `return
 * error_set(...)`. */
int error_set(struct error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " before the message, to say in which file or field it happened. Returns the
 * error's code; FATHOM_INVALID where `error` is NULL. */
int error_prefix(struct error *error, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Checked arithmetic: true and *result on success, false (and *result untouched) on overflow. */
static inline bool size_add(size_t a, size_t b, size_t *result) {
    size_t value;
    if (__builtin_add_overflow(a, b, &value)) return false;
    *result = value;
    return true;
}
static inline bool size_multiply(size_t a, size_t b, size_t *result) {
    size_t value;
    if (__builtin_mul_overflow(a, b, &value)) return false;
    *result = value;
    return true;
}

/* Parses "4096", "4096B", "512KiB", "64MiB", "2GiB" (no sign, no fraction, no spaces) into bytes.
 * FATHOM_INVALID for anything else, or more than SIZE_MAX. */
int size_parse(const char *text, size_t *bytes, struct error *error);

/* Writes "640 B" or "17.2 MiB", up to TiB, into `out` (32 bytes are enough); returns `out`. */
const char *size_format(size_t bytes, char *out, size_t out_size);

/* Reads a whole regular file of at most `limit` bytes. *data is malloc'd, NUL-terminated after
 * *size bytes; the caller frees it. FATHOM_NOT_FOUND, FATHOM_IO, FATHOM_NO_MEMORY, or
 * FATHOM_INVALID for a file that is too long, or is no file; the error names the path. */
int file_read(const char *path, size_t limit, char **data, size_t *size, struct error *error);

enum utf8_state {
    UTF8_VALID,   /* a whole character */
    UTF8_INVALID, /* no character can start like this */
    UTF8_TORN,    /* all the bytes there are begin a character whose end is not there yet */
};

/* Looks at the first character of bytes[0..length), length >= 1: no overlong forms, no surrogates,
 * nothing above U+10FFFF. *used is how many bytes it covers: all of them when torn, the piece to be
 * replaced by one U+FFFD when invalid. */
enum utf8_state utf8_scan(const char *bytes, size_t length, size_t *used);

struct json_extent {
    size_t depth;          /* of the deepest bracket */
    size_t containers;     /* arrays and objects */
    size_t commas, colons; /* there are at most containers + commas + colons + 1 keys and values */
};

/* How large a JSON text is as a tree, from its punctuation outside of strings: a value of two bytes
 * of text becomes a hundred bytes of tree. Whether it is valid JSON is not looked at. Linear. */
struct json_extent json_measure(const char *text, size_t length);

/* The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit moves every output bit. To
 * be fed with multiples of MIX_STEP, which is 2^64 / phi, or with sums of them. */
#define MIX_STEP UINT64_C(0x9E3779B97F4A7C15)
static inline uint64_t mix_bits(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

/* Monotonic nanoseconds since some fixed point. */
uint64_t time_now_ns(void);

#endif
