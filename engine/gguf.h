/* One GGUF file, version 2 or 3: metadata, a list of tensors, the data.
 *
 * Private to the checkpoint. The file is hostile input: after parsing, every value and every array
 * is known to lie inside the file, and every tensor to have as many bytes as its dimensions and
 * type say, aligned, inside the data, and sharing none with another.
 */
#ifndef FATHOM_GGUF_H
#define FATHOM_GGUF_H

#include "engine/checkpoint.h"
#include "engine/file_map.h"

enum gguf_type {
    GGUF_UINT8,
    GGUF_INT8,
    GGUF_UINT16,
    GGUF_INT16,
    GGUF_UINT32,
    GGUF_INT32,
    GGUF_FLOAT32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_UINT64,
    GGUF_INT64,
    GGUF_FLOAT64,
};
#define GGUF_TYPES (GGUF_FLOAT64 + 1)

/* Bytes in the file, not NUL-terminated. */
struct gguf_string {
    const char *bytes;
    size_t length;
};

struct gguf_value {
    struct gguf_string key;
    enum gguf_type type, element; /* element: of an array, never itself an array */
    size_t count;                 /* elements of an array, else 1 */
    const unsigned char *data;    /* in the file, not aligned; strings with their lengths before */
};

struct gguf_tensor {
    struct gguf_string name;
    uint32_t type;            /* of one that we read, see tensor_format */
    size_t rank, shape[4];    /* outermost first: [out, in] */
    size_t elements, offset, bytes; /* offset: in the data */
};

/* Zero-filled is a valid, empty file. */
struct gguf {
    struct gguf_value *values; /* ascending by key */
    size_t value_count;
    struct gguf_tensor *tensors; /* ascending by name */
    size_t tensor_count;
    const unsigned char *data;
    size_t data_bytes;
    struct file_map map; /* none when the bytes belong to the caller */
};

/* Maps a file. It must not be truncated while it is mapped. */
int gguf_open(const char *path, struct gguf *file, struct error *error);
/* Reads bytes that stay the caller's and must outlive `file`. */
int gguf_parse(const void *bytes, size_t size, struct gguf *file, struct error *error);
void gguf_close(struct gguf *file);

/* NULL if there is none. `key` is NUL-terminated. */
const struct gguf_value *gguf_find(const struct gguf *file, const char *key);
const struct gguf_tensor *gguf_find_tensor(const struct gguf *file, const char *name);

/* The readers leave *out as it is where the key is absent, and refuse another type or range. */
int gguf_read_integer(const struct gguf *file, const char *key, int64_t minimum, int64_t maximum,
                      int64_t *out, struct error *error);
int gguf_read_number(const struct gguf *file, const char *key, double minimum, double maximum,
                     double *out, struct error *error);
int gguf_read_flag(const struct gguf *file, const char *key, bool *out, struct error *error);
int gguf_read_string(const struct gguf *file, const char *key, struct gguf_string *out,
                     struct error *error);

/* The string at *at of an array of strings; moves *at behind it. Start with value->data. */
struct gguf_string gguf_next_string(const unsigned char **at);

/* ---- What a model's file says (gguf_model.c, gguf_tokenizer.c) ------------------------------- */

int gguf_read_config(const struct gguf *file, struct config *config, struct error *error);

/* A tensor by the name that it has in a Hugging Face folder. */
int gguf_get_tensor(const struct gguf *file, const struct config *config, const char *name,
                    struct tensor *tensor, struct error *error);

/* FATHOM_NOT_FOUND if the file has none. */
int gguf_load_tokenizer(const struct gguf *file, struct tokenizer **tokenizer, struct error *error);

#endif
