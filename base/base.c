#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Messages quote names out of files and requests: a control character must not reach a terminal. */
static void replace_controls(char *text) {
    for (; *text; text++) {
        if ((unsigned char)*text < 0x20 || *text == 0x7f) *text = '?';
    }
}

/* A message cut in the middle of a UTF-8 character would be invalid UTF-8: drop the torn tail. */
static void trim_torn_utf8(char *text) {
    size_t length = strlen(text), used;
    for (size_t tail = 1; tail <= 3 && tail <= length; tail++) {
        if (utf8_scan(text + length - tail, tail, &used) != UTF8_TORN) continue;
        text[length - tail] = '\0';
        return;
    }
}

int error_set(struct error *error, int code, const char *format, ...) {
    if (!error) return code;
    error->code = code;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    replace_controls(error->message);
    if (length >= (int)sizeof error->message) trim_torn_utf8(error->message);
    return code;
}

int error_prefix(struct error *error, const char *format, ...) {
    if (!error) return FATHOM_INVALID;
    char prefix[sizeof error->message], rest[sizeof error->message];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(prefix, sizeof prefix, format, arguments);
    va_end(arguments);
    memcpy(rest, error->message, sizeof rest);
    return error_set(error, error->code, "%s: %s", prefix, rest);
}

int size_parse(const char *text, size_t *bytes, struct error *error) {
    static const struct {
        const char *suffix;
        unsigned shift;
    } units[] = {{"", 0}, {"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}};
    const char *digit = text;
    size_t value = 0;
    for (; *digit >= '0' && *digit <= '9'; digit++) {
        if (!size_multiply(value, 10, &value) || !size_add(value, (size_t)(*digit - '0'), &value)) {
            return error_set(error, FATHOM_INVALID, "size '%s' is too large", text);
        }
    }
    for (size_t i = 0; digit != text && i < sizeof units / sizeof *units; i++) {
        if (strcmp(digit, units[i].suffix) != 0) continue;
        if (!size_multiply(value, (size_t)1 << units[i].shift, bytes)) {
            return error_set(error, FATHOM_INVALID, "size '%s' is too large", text);
        }
        return 0;
    }
    return error_set(
        error, FATHOM_INVALID,
        "'%s' is not a size: give a whole number of bytes, KiB, MiB or GiB, as in 512MiB", text);
}

const char *size_format(size_t bytes, char *out, size_t out_size) {
    static const char *const names[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 1024 && unit + 1 < sizeof names / sizeof *names) {
        value /= 1024;
        unit++;
    }
    snprintf(out, out_size, unit ? "%.1f %s" : "%.0f %s", value, names[unit]);
    return out;
}

int file_read(const char *path, size_t limit, char **data, size_t *size, struct error *error) {
    /* Not blocking: a FIFO in the place of a file would never open. */
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) {
        int code = errno == ENOENT ? FATHOM_NOT_FOUND : FATHOM_IO;
        return error_set(error, code, "cannot open %s: %s", path, strerror(errno));
    }
    struct stat status;
    char *buffer = NULL;
    int result = 0;
    if (fstat(file, &status) != 0) {
        result = error_set(error, FATHOM_IO, "cannot read %s: %s", path, strerror(errno));
    } else if (!S_ISREG(status.st_mode)) {
        result = error_set(error, FATHOM_INVALID, "%s is not a regular file", path);
    } else if ((uint64_t)status.st_size > limit) {
        result = error_set(error, FATHOM_INVALID, "%s has %lld bytes; the limit is %zu", path,
                           (long long)status.st_size, limit);
    } else if (!(buffer = malloc((size_t)status.st_size + 1))) {
        result = error_set(error, FATHOM_NO_MEMORY, "no memory to read %s", path);
    }
    size_t filled = 0;
    while (result == 0 && filled < (size_t)status.st_size) {
        ssize_t got = read(file, buffer + filled, (size_t)status.st_size - filled);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            result = error_set(error, FATHOM_IO, "cannot read %s: %s", path, strerror(errno));
        if (got == 0) break; /* the file shrank: what there is */
        if (got > 0) filled += (size_t)got;
    }
    close(file);
    if (result != 0) {
        free(buffer);
        return result;
    }
    buffer[filled] = '\0';
    *data = buffer;
    *size = filled;
    return 0;
}

uint64_t time_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
