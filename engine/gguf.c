#include "engine/gguf.h"

#include <stdlib.h>
#include <string.h>

#include "engine/tensor_format.h"

#define VALUES_MAX     ((size_t)65536)
#define TENSORS_MAX    ((size_t)65536)
#define NAME_BYTES_MAX ((size_t)256)
#define ALIGNMENT_MAX  ((size_t)65536)

static const unsigned char type_bytes[GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
static const char *const type_names[GGUF_TYPES] = {
    "uint8", "int8",     "uint16",   "int16",  "uint32", "int32",  "float32",
    "bool",  "a string", "an array", "uint64", "int64",  "float64"};

/* What of the file is not read yet. Every take checks that it is there. */
struct cursor {
    const unsigned char *at;
    size_t left;
    struct error *error;
};

static int read_values(struct cursor *cursor, size_t count, struct gguf *file);
static int read_value(struct cursor *cursor, struct gguf_value *value);
static int read_array(struct cursor *cursor, struct gguf_value *value);
static int read_tensors(struct cursor *cursor, size_t count, struct gguf *file);
static int read_tensor(struct cursor *cursor, struct gguf_tensor *tensor);
static int check_tensors(struct gguf *file, size_t alignment, struct error *error);
static int take(struct cursor *cursor, void *out, size_t size, const char *what);
static int take_string(struct cursor *cursor, size_t limit, struct gguf_string *string,
                       const char *what);
static int compare_strings(const struct gguf_string *a, const struct gguf_string *b);
static int compare_values(const void *a, const void *b);
static int compare_names(const void *a, const void *b);
static int compare_offsets(const void *a, const void *b);
static int refuse_type(const struct gguf_value *value, const char *expected, struct error *error);

static int parse_mapped(const void *bytes, size_t size, void *file, struct error *error) {
    return gguf_parse(bytes, size, file, error);
}

int gguf_open(const char *path, struct gguf *file, struct error *error) {
    return file_map_open(path, parse_mapped, file, &file->map, error);
}

int gguf_parse(const void *bytes, size_t size, struct gguf *file, struct error *error) {
    struct cursor cursor = {bytes, size, error};
    char magic[4];
    uint32_t version;
    uint64_t tensors, values;
    int64_t alignment = 32;
    memset(file, 0, sizeof *file);
    int result = take(&cursor, magic, sizeof magic, "the magic number");
    if (result == 0 && memcmp(magic, "GGUF", 4) != 0) {
        result = error_set(error, FATHOM_INVALID, "the file does not begin with \"GGUF\"");
    }
    if (result == 0) result = take(&cursor, &version, sizeof version, "the version");
    if (result == 0 && version != 2 && version != 3) {
        result = error_set(error, FATHOM_UNSUPPORTED,
                           "GGUF version %u%s; 2 and 3 of little-endian files are supported",
                           (unsigned)version, version > 0xFFFF ? " (big-endian?)" : "");
    }
    if (result == 0) result = take(&cursor, &tensors, sizeof tensors, "the number of tensors");
    if (result == 0) result = take(&cursor, &values, sizeof values, "the number of values");
    if (result == 0 && (tensors > TENSORS_MAX || values > VALUES_MAX)) {
        result = error_set(
            error, FATHOM_INVALID, "%llu tensors and %llu values; the limits are %zu and %zu",
            (unsigned long long)tensors, (unsigned long long)values, TENSORS_MAX, VALUES_MAX);
    }
    if (result == 0) result = read_values(&cursor, (size_t)values, file);
    if (result == 0) result = read_tensors(&cursor, (size_t)tensors, file);
    if (result == 0) {
        result = gguf_read_integer(file, "general.alignment", 1, (int64_t)ALIGNMENT_MAX, &alignment,
                                   error);
    }
    if (result == 0 && (alignment & (alignment - 1)) != 0) {
        result = error_set(error, FATHOM_INVALID,
                           "general.alignment is %lld; a power of two is required",
                           (long long)alignment);
    }
    if (result == 0) {
        size_t used = size - cursor.left, padding = -used & ((size_t)alignment - 1);
        if (padding > cursor.left) padding = cursor.left; /* a file without tensors may end here */
        file->data = cursor.at + padding;
        file->data_bytes = cursor.left - padding;
        result = check_tensors(file, (size_t)alignment, error);
    }
    if (result != 0) gguf_close(file);
    return result;
}

void gguf_close(struct gguf *file) {
    file_map_close(&file->map);
    free(file->values);
    free(file->tensors);
    memset(file, 0, sizeof *file);
}

const struct gguf_value *gguf_find(const struct gguf *file, const char *key) {
    struct gguf_value wanted = {.key = {key, strlen(key)}};
    if (file->value_count == 0) return NULL;
    return bsearch(&wanted, file->values, file->value_count, sizeof wanted, compare_values);
}

const struct gguf_tensor *gguf_find_tensor(const struct gguf *file, const char *name) {
    struct gguf_tensor wanted = {.name = {name, strlen(name)}};
    if (file->tensor_count == 0) return NULL;
    return bsearch(&wanted, file->tensors, file->tensor_count, sizeof wanted, compare_names);
}

struct gguf_string gguf_next_string(const unsigned char **at) {
    uint64_t length;
    memcpy(&length, *at, sizeof length); /* checked when the file was parsed */
    struct gguf_string string = {(const char *)*at + sizeof length, (size_t)length};
    *at += sizeof length + (size_t)length;
    return string;
}

/* ---- Reading values -------------------------------------------------------------------------- */

int gguf_read_integer(const struct gguf *file, const char *key, int64_t minimum, int64_t maximum,
                      int64_t *out, struct error *error) {
    const struct gguf_value *value = gguf_find(file, key);
    if (!value) return 0;
    uint64_t bits = 0;
    bool is_signed = value->type == GGUF_INT8 || value->type == GGUF_INT16 ||
                     value->type == GGUF_INT32 || value->type == GGUF_INT64;
    bool is_unsigned = value->type == GGUF_UINT8 || value->type == GGUF_UINT16 ||
                       value->type == GGUF_UINT32 || value->type == GGUF_UINT64;
    if (!is_signed && !is_unsigned) return refuse_type(value, "a whole number", error);
    size_t size = type_bytes[value->type];
    memcpy(&bits, value->data, size);
    if (is_signed && size < sizeof bits && bits >> (8 * size - 1) & 1)
        bits |= UINT64_MAX << 8 * size;
    bool fits = is_signed || bits <= INT64_MAX;
    if (!fits || (int64_t)bits < minimum || (int64_t)bits > maximum) {
        return error_set(error, FATHOM_INVALID,
                         "%s is out of range; a whole number from %lld to %lld is required", key,
                         (long long)minimum, (long long)maximum);
    }
    *out = (int64_t)bits;
    return 0;
}

int gguf_read_number(const struct gguf *file, const char *key, double minimum, double maximum,
                     double *out, struct error *error) {
    const struct gguf_value *value = gguf_find(file, key);
    if (!value) return 0;
    double number;
    if (value->type == GGUF_FLOAT32) {
        float narrow;
        memcpy(&narrow, value->data, sizeof narrow);
        number = (double)narrow;
    } else if (value->type == GGUF_FLOAT64) {
        memcpy(&number, value->data, sizeof number);
    } else {
        return refuse_type(value, "a number with a fraction", error);
    }
    if (!(number >= minimum && number <= maximum)) {
        return error_set(error, FATHOM_INVALID, "%s is %g; a number from %g to %g is required", key,
                         number, minimum, maximum);
    }
    *out = number;
    return 0;
}

int gguf_read_flag(const struct gguf *file, const char *key, bool *out, struct error *error) {
    const struct gguf_value *value = gguf_find(file, key);
    if (!value) return 0;
    if (value->type != GGUF_BOOL) return refuse_type(value, "a bool", error);
    *out = *value->data != 0;
    return 0;
}

int gguf_read_string(const struct gguf *file, const char *key, struct gguf_string *out,
                     struct error *error) {
    const struct gguf_value *value = gguf_find(file, key);
    if (!value) return 0;
    if (value->type != GGUF_STRING) return refuse_type(value, "a string", error);
    const unsigned char *at = value->data;
    *out = gguf_next_string(&at);
    return 0;
}

static int refuse_type(const struct gguf_value *value, const char *expected, struct error *error) {
    return error_set(error, FATHOM_INVALID, "%.*s is %s; %s is required", (int)value->key.length,
                     value->key.bytes, type_names[value->type], expected);
}

/* ---- Parsing --------------------------------------------------------------------------------- */

static int read_values(struct cursor *cursor, size_t count, struct gguf *file) {
    file->values = calloc(count + 1, sizeof *file->values);
    if (!file->values) {
        return error_set(cursor->error, FATHOM_NO_MEMORY, "no memory to list %zu values", count);
    }
    for (size_t i = 0; i < count; i++) {
        int result = read_value(cursor, &file->values[i]);
        if (result != 0) return error_prefix(cursor->error, "value %zu of %zu", i + 1, count);
    }
    file->value_count = count;
    qsort(file->values, count, sizeof *file->values, compare_values);
    for (size_t i = 1; i < count; i++) {
        const struct gguf_string *key = &file->values[i].key;
        if (compare_strings(key, &file->values[i - 1].key) != 0) continue;
        return error_set(cursor->error, FATHOM_INVALID, "the key %.*s is there twice",
                         (int)key->length, key->bytes);
    }
    return 0;
}

static int read_value(struct cursor *cursor, struct gguf_value *value) {
    uint32_t type;
    int result = take_string(cursor, NAME_BYTES_MAX, &value->key, "a key");
    if (result == 0) result = take(cursor, &type, sizeof type, "a type");
    if (result != 0) return result;
    if (type >= GGUF_TYPES) {
        return error_set(cursor->error, FATHOM_INVALID, "%.*s has the unknown type %u",
                         (int)value->key.length, value->key.bytes, (unsigned)type);
    }
    value->type = (enum gguf_type)type;
    value->count = 1;
    if (type == GGUF_ARRAY) return read_array(cursor, value);
    value->data = cursor->at;
    struct gguf_string skipped;
    if (type == GGUF_STRING) return take_string(cursor, SIZE_MAX, &skipped, "a string");
    return take(cursor, NULL, type_bytes[type], "a value");
}

static int read_array(struct cursor *cursor, struct gguf_value *value) {
    uint32_t element;
    uint64_t count;
    int result = take(cursor, &element, sizeof element, "an element type");
    if (result == 0) result = take(cursor, &count, sizeof count, "a length");
    if (result != 0) return result;
    if (element >= GGUF_TYPES || element == GGUF_ARRAY) {
        return error_set(cursor->error, FATHOM_UNSUPPORTED,
                         "%.*s is an array of type %u, which is not supported",
                         (int)value->key.length, value->key.bytes, (unsigned)element);
    }
    size_t least = element == GGUF_STRING ? sizeof(uint64_t) : type_bytes[element];
    if (count > cursor->left / least) {
        return error_set(cursor->error, FATHOM_INVALID,
                         "%.*s has %llu elements; the %zu bytes left cannot hold them",
                         (int)value->key.length, value->key.bytes, (unsigned long long)count,
                         cursor->left);
    }
    value->element = (enum gguf_type)element;
    value->count = (size_t)count;
    value->data = cursor->at;
    if (element != GGUF_STRING) return take(cursor, NULL, (size_t)count * least, "an array");
    for (size_t i = 0; i < value->count && result == 0; i++) {
        struct gguf_string skipped;
        result = take_string(cursor, SIZE_MAX, &skipped, "a string");
    }
    return result;
}

static int read_tensors(struct cursor *cursor, size_t count, struct gguf *file) {
    file->tensors = calloc(count + 1, sizeof *file->tensors);
    if (!file->tensors) {
        return error_set(cursor->error, FATHOM_NO_MEMORY, "no memory to list %zu tensors", count);
    }
    for (size_t i = 0; i < count; i++) {
        int result = read_tensor(cursor, &file->tensors[i]);
        if (result != 0) return error_prefix(cursor->error, "tensor %zu of %zu", i + 1, count);
    }
    file->tensor_count = count;
    return 0;
}

/* Dimensions come innermost first. */
static int read_tensor(struct cursor *cursor, struct gguf_tensor *tensor) {
    uint32_t rank;
    uint64_t dimensions[4], offset;
    int result = take_string(cursor, NAME_BYTES_MAX, &tensor->name, "a name");
    if (result == 0) result = take(cursor, &rank, sizeof rank, "a rank");
    if (result != 0) return result;
    if (rank < 1 || rank > 4) {
        return error_set(cursor->error, FATHOM_INVALID,
                         "%.*s has %u dimensions; 1 to 4 are possible", (int)tensor->name.length,
                         tensor->name.bytes, (unsigned)rank);
    }
    result = take(cursor, dimensions, rank * sizeof *dimensions, "dimensions");
    if (result == 0) result = take(cursor, &tensor->type, sizeof tensor->type, "a type");
    if (result == 0) result = take(cursor, &offset, sizeof offset, "an offset");
    if (result != 0) return result;
    tensor->rank = rank;
    tensor->elements = 1;
    for (size_t i = 0; i < rank; i++) {
        tensor->shape[rank - 1 - i] = (size_t)dimensions[i];
        if (dimensions[i] > 0 && dimensions[i] <= SIZE_MAX &&
            size_multiply(tensor->elements, (size_t)dimensions[i], &tensor->elements)) {
            continue;
        }
        return error_set(cursor->error, FATHOM_INVALID, "%.*s has an impossible dimension %llu",
                         (int)tensor->name.length, tensor->name.bytes,
                         (unsigned long long)dimensions[i]);
    }
    const struct tensor_format *format = tensor_format_find(tensor->type);
    if (!format) {
        return error_set(cursor->error, FATHOM_UNSUPPORTED,
                         "%.*s has type %u, which is not supported; those that are: %s",
                         (int)tensor->name.length, tensor->name.bytes, (unsigned)tensor->type,
                         tensor_format_names);
    }
    size_t inner = tensor->shape[rank - 1];
    if (inner % format->block != 0) {
        return error_set(cursor->error, FATHOM_INVALID,
                         "%.*s has rows of %zu elements; %s needs a multiple of %zu",
                         (int)tensor->name.length, tensor->name.bytes, inner, format->name,
                         format->block);
    }
    if (offset > SIZE_MAX ||
        !size_multiply(tensor->elements / format->block, format->bytes, &tensor->bytes)) {
        return error_set(cursor->error, FATHOM_INVALID, "%.*s is too large",
                         (int)tensor->name.length, tensor->name.bytes);
    }
    tensor->offset = (size_t)offset;
    return 0;
}

static int check_tensors(struct gguf *file, size_t alignment, struct error *error) {
    qsort(file->tensors, file->tensor_count, sizeof *file->tensors, compare_offsets);
    size_t end = 0;
    for (size_t i = 0; i < file->tensor_count; i++) {
        const struct gguf_tensor *tensor = &file->tensors[i];
        const char *fault = NULL;
        if (tensor->offset % alignment != 0) {
            fault = "is not aligned";
        } else if (tensor->offset > file->data_bytes ||
                   tensor->bytes > file->data_bytes - tensor->offset) {
            fault = "reaches beyond the end of the file";
        } else if (tensor->offset < end) {
            fault = "shares bytes with another";
        }
        if (fault) {
            return error_set(error, FATHOM_INVALID,
                             "tensor %.*s (%zu bytes at %zu of %zu of data) %s",
                             (int)tensor->name.length, tensor->name.bytes, tensor->bytes,
                             tensor->offset, file->data_bytes, fault);
        }
        end = tensor->offset + tensor->bytes;
    }
    qsort(file->tensors, file->tensor_count, sizeof *file->tensors, compare_names);
    for (size_t i = 1; i < file->tensor_count; i++) {
        const struct gguf_string *name = &file->tensors[i].name;
        if (compare_strings(name, &file->tensors[i - 1].name) != 0) continue;
        return error_set(error, FATHOM_INVALID, "tensor %.*s is there twice", (int)name->length,
                         name->bytes);
    }
    return 0;
}

/* ---- Bytes ----------------------------------------------------------------------------------- */

/* out NULL: skipped. */
static int take(struct cursor *cursor, void *out, size_t size, const char *what) {
    if (size > cursor->left) {
        error_set(cursor->error, FATHOM_INVALID,
                  "the file ends within %s: %zu bytes are needed, %zu are left", what, size,
                  cursor->left);
        return FATHOM_INVALID; /* said here, so that compilers see that what is read is set */
    }
    if (out) memcpy(out, cursor->at, size);
    cursor->at += size;
    cursor->left -= size;
    return 0;
}

static int take_string(struct cursor *cursor, size_t limit, struct gguf_string *string,
                       const char *what) {
    uint64_t length;
    int result = take(cursor, &length, sizeof length, what);
    if (result != 0) return result;
    if (length > cursor->left) {
        return error_set(cursor->error, FATHOM_INVALID,
                         "%s of %llu bytes, of which the file has only %zu more", what,
                         (unsigned long long)length, cursor->left);
    }
    if (length > limit) {
        return error_set(cursor->error, FATHOM_INVALID, "%s of %llu bytes; the limit is %zu", what,
                         (unsigned long long)length, limit);
    }
    *string = (struct gguf_string){(const char *)cursor->at, (size_t)length};
    return take(cursor, NULL, (size_t)length, what);
}

static int compare_strings(const struct gguf_string *a, const struct gguf_string *b) {
    size_t shorter = a->length < b->length ? a->length : b->length;
    int order = memcmp(a->bytes, b->bytes, shorter);
    return order ? order : (a->length > b->length) - (a->length < b->length);
}

static int compare_values(const void *a, const void *b) {
    const struct gguf_value *one = a, *two = b;
    return compare_strings(&one->key, &two->key);
}

static int compare_names(const void *a, const void *b) {
    const struct gguf_tensor *one = a, *two = b;
    return compare_strings(&one->name, &two->name);
}

static int compare_offsets(const void *a, const void *b) {
    const struct gguf_tensor *one = a, *two = b;
    return (one->offset > two->offset) - (one->offset < two->offset);
}
