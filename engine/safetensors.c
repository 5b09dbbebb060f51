#include "engine/safetensors.h"

#include <stdlib.h>
#include <string.h>

#include "engine/json_field.h"

#define LENGTH_BYTES     ((size_t)8)
#define HEADER_BYTES_MAX ((size_t)100 << 20)
#define TENSORS_MAX      ((size_t)1 << 20)
#define NAME_BYTES_MAX   ((size_t)512)

/* Types that a file may hold. Those that we do not compute with may lie there, unread. */
static const struct type {
    const char *name;
    size_t bytes;
    int dtype; /* enum dtype, or -1 */
} types[] = {
    {"F32", 4, DTYPE_F32}, {"F16", 2, DTYPE_F16}, {"BF16", 2, DTYPE_BF16}, {"F64", 8, -1},
    {"I64", 8, -1},        {"U64", 8, -1},        {"C64", 8, -1},          {"I32", 4, -1},
    {"U32", 4, -1},        {"I16", 2, -1},        {"U16", 2, -1},          {"I8", 1, -1},
    {"U8", 1, -1},         {"BOOL", 1, -1},       {"F8_E4M3", 1, -1},      {"F8_E5M2", 1, -1},
    {"F8_E8M0", 1, -1},
};
#define TYPE_COUNT (sizeof types / sizeof *types)

static int read_entries(const json_t *header, struct safetensors *file, struct error *error);
static int check_metadata(const json_t *metadata, struct error *error);
static int read_entry(const json_t *object, size_t data_bytes, struct safetensors_entry *entry,
                      struct error *error);
static int read_type(const json_t *value, size_t *type, struct error *error);
static int read_shape(const json_t *array, struct safetensors_entry *entry, struct error *error);
static int read_offsets(const json_t *array, size_t data_bytes, struct safetensors_entry *entry,
                        struct error *error);
static int check_overlap(struct safetensors *file, struct error *error);
static int compare_places(const void *a, const void *b);
static int compare_names(const void *a, const void *b);

static int parse_mapped(const void *bytes, size_t size, void *file, struct error *error) {
    return safetensors_parse(bytes, size, file, error);
}

int safetensors_open(const char *path, struct safetensors *file, struct error *error) {
    return file_map_open(path, parse_mapped, file, &file->map, error);
}

int safetensors_parse(const void *bytes, size_t size, struct safetensors *file,
                      struct error *error) {
    memset(file, 0, sizeof *file);
    uint64_t length;
    if (size < LENGTH_BYTES) {
        return error_set(error, FATHOM_INVALID, "%zu bytes are too few for a safetensors file",
                         size);
    }
    memcpy(&length, bytes, LENGTH_BYTES);
    if (length > HEADER_BYTES_MAX || length > size - LENGTH_BYTES) {
        return error_set(
            error, FATHOM_INVALID,
            "header length is %llu bytes; the file has %zu after it and the limit is %zu",
            (unsigned long long)length, size - LENGTH_BYTES, HEADER_BYTES_MAX);
    }
    const char *text = (const char *)bytes + LENGTH_BYTES;
    file->data = (const unsigned char *)text + length;
    file->data_bytes = size - LENGTH_BYTES - (size_t)length;

    json_t *header;
    int result = json_object_parse(text, (size_t)length, &header, error);
    if (result != 0) {
        error_prefix(error, "header");
        return result;
    }
    result = read_entries(header, file, error);
    if (result == 0) result = check_overlap(file, error);
    json_decref(header);
    if (result != 0) safetensors_close(file);
    return result;
}

void safetensors_close(struct safetensors *file) {
    file_map_close(&file->map);
    free(file->entries);
    free(file->names);
    memset(file, 0, sizeof *file);
}

const struct safetensors_entry *safetensors_find(const struct safetensors *file, const char *name) {
    struct safetensors_entry key = {.name = name};
    if (file->count == 0) return NULL;
    return bsearch(&key, file->entries, file->count, sizeof key, compare_names);
}

int safetensors_tensor(const struct safetensors *file, const struct safetensors_entry *entry,
                       struct tensor *tensor, struct error *error) {
    const struct type *type = &types[entry->type];
    size_t rank_max = sizeof tensor->shape / sizeof *tensor->shape;
    if (type->dtype < 0) {
        return error_set(error, FATHOM_UNSUPPORTED,
                         "tensor '%s' has dtype %s; F32, F16 or BF16 is required", entry->name,
                         type->name);
    }
    if (entry->rank > rank_max) {
        return error_set(error, FATHOM_UNSUPPORTED,
                         "tensor '%s' has %zu dimensions; %zu are possible", entry->name,
                         entry->rank, rank_max);
    }
    *tensor = (struct tensor){.name = entry->name,
                              .type = (enum dtype)type->dtype,
                              .rank = entry->rank ? entry->rank : 1,
                              .shape = {1},
                              .data = file->data + entry->begin,
                              .bytes = entry->end - entry->begin};
    memcpy(tensor->shape, entry->shape, entry->rank * sizeof *entry->shape);
    return 0;
}

static int read_entries(const json_t *header, struct safetensors *file, struct error *error) {
    const json_t *metadata = json_object_get(header, "__metadata__");
    int result = check_metadata(metadata, error);
    if (result != 0) return result;
    size_t tensors = json_object_size(header) - (metadata ? 1 : 0), name_bytes = 0;
    if (tensors > TENSORS_MAX) {
        return error_set(error, FATHOM_INVALID, "%zu tensors; the limit is %zu", tensors,
                         TENSORS_MAX);
    }
    const char *name;
    json_t *object;
    json_object_foreach((json_t *)header, name, object) name_bytes += strlen(name) + 1;

    /* One more than needed: a request for nothing may answer NULL. */
    file->entries = calloc(tensors + 1, sizeof *file->entries);
    char *next = file->names = malloc(name_bytes + 1);
    if (!file->entries || !file->names) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory to list %zu tensors", tensors);
    }
    json_object_foreach((json_t *)header, name, object) {
        if (object == metadata) continue;
        struct safetensors_entry *entry = &file->entries[file->count++];
        size_t length = strlen(name);
        if (length > NAME_BYTES_MAX) {
            return error_set(error, FATHOM_INVALID,
                             "a tensor name has %zu bytes; the limit is %zu: '%s'", length,
                             NAME_BYTES_MAX, name);
        }
        entry->name = memcpy(next, name, length + 1);
        next += length + 1;
        result = read_entry(object, file->data_bytes, entry, error);
        if (result != 0) {
            error_prefix(error, "tensor '%s'", name);
            return result;
        }
    }
    return 0;
}

static int check_metadata(const json_t *metadata, struct error *error) {
    if (!metadata) return 0;
    if (!json_is_object(metadata)) return json_refuse(metadata, "__metadata__", "an object", error);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)metadata, key, value) {
        if (!json_is_string(value)) {
            json_refuse(value, "the value", "a text", error);
            return error_prefix(error, "__metadata__ '%s'", key);
        }
    }
    return 0;
}

static int read_entry(const json_t *object, size_t data_bytes, struct safetensors_entry *entry,
                      struct error *error) {
    if (!json_is_object(object)) return json_refuse(object, "the entry", "an object", error);
    int result = read_type(json_object_field(object, "dtype"), &entry->type, error);
    if (result == 0) result = read_shape(json_object_field(object, "shape"), entry, error);
    if (result == 0) {
        result = read_offsets(json_object_field(object, "data_offsets"), data_bytes, entry, error);
    }
    if (result != 0) return result;
    size_t bytes, held = entry->end - entry->begin;
    if (!size_multiply(entry->elements, types[entry->type].bytes, &bytes) || bytes != held) {
        return error_set(error, FATHOM_INVALID,
                         "data_offsets hold %zu bytes; %zu elements of dtype %s were to fill them",
                         held, entry->elements, types[entry->type].name);
    }
    return 0;
}

static int read_type(const json_t *value, size_t *type, struct error *error) {
    if (!json_is_string(value)) return json_refuse(value, "dtype", "a text", error);
    for (size_t i = 0; i < TYPE_COUNT; i++) {
        if (strcmp(json_string_value(value), types[i].name) == 0) {
            *type = i;
            return 0;
        }
    }
    return error_set(error, FATHOM_UNSUPPORTED, "dtype '%s' is not known",
                     json_string_value(value));
}

static int read_shape(const json_t *array, struct safetensors_entry *entry, struct error *error) {
    if (!json_is_array(array)) return json_refuse(array, "shape", "an array", error);
    entry->rank = json_array_size(array);
    entry->elements = 1;
    if (entry->rank > SAFETENSORS_RANK_MAX) {
        return error_set(error, FATHOM_INVALID, "shape has %zu dimensions; the limit is %d",
                         entry->rank, SAFETENSORS_RANK_MAX);
    }
    for (size_t i = 0; i < entry->rank; i++) {
        int64_t size;
        int result = json_read_integer(json_array_get(array, i), "a size in shape", 0, INT64_MAX,
                                       &size, error);
        if (result != 0) return result;
        entry->shape[i] = (size_t)size;
        if (!size_multiply(entry->elements, entry->shape[i], &entry->elements)) {
            return error_set(error, FATHOM_INVALID, "shape has too many elements for 64 bits");
        }
    }
    return 0;
}

static int read_offsets(const json_t *array, size_t data_bytes, struct safetensors_entry *entry,
                        struct error *error) {
    if (json_array_size(array) != 2) {
        return json_refuse(array, "data_offsets", "an array of begin and end", error);
    }
    int64_t begin, end;
    int result = json_read_integer(json_array_get(array, 0), "data_offsets begin", 0, INT64_MAX,
                                   &begin, error);
    if (result == 0) {
        result = json_read_integer(json_array_get(array, 1), "data_offsets end", begin, INT64_MAX,
                                   &end, error);
    }
    if (result != 0) return result;
    if ((size_t)end > data_bytes) {
        return error_set(
            error, FATHOM_INVALID,
            "data_offsets end at %lld; the file has %zu bytes of data: is it complete?",
            (long long)end, data_bytes);
    }
    entry->begin = (size_t)begin;
    entry->end = (size_t)end;
    return 0;
}

/* Sorts by place to compare neighbours, then by name for good. */
static int check_overlap(struct safetensors *file, struct error *error) {
    qsort(file->entries, file->count, sizeof *file->entries, compare_places);
    for (size_t i = 1; i < file->count; i++) {
        const struct safetensors_entry *entry = &file->entries[i], *before = entry - 1;
        if (entry->begin < before->end) {
            return error_set(
                error, FATHOM_INVALID,
                "tensor '%s': data_offsets begin at %zu, inside tensor '%s' which ends at %zu",
                entry->name, entry->begin, before->name, before->end);
        }
    }
    qsort(file->entries, file->count, sizeof *file->entries, compare_names);
    return 0;
}

static int compare_places(const void *a, const void *b) {
    const struct safetensors_entry *one = a, *two = b;
    if (one->begin != two->begin) return one->begin < two->begin ? -1 : 1;
    return (one->end > two->end) - (one->end < two->end);
}

static int compare_names(const void *a, const void *b) {
    const struct safetensors_entry *one = a, *two = b;
    return strcmp(one->name, two->name);
}
