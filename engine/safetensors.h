/* One safetensors file: 8 bytes of little-endian header length, a JSON header, the data.
 *
 * Private to the checkpoint. After parsing, every entry is known to lie inside the data section, to
 * have as many bytes as its shape and type say, and to share none with another entry.
 */
#ifndef FATHOM_SAFETENSORS_H
#define FATHOM_SAFETENSORS_H

#include "engine/checkpoint.h"
#include "engine/file_map.h"

#define SAFETENSORS_RANK_MAX 8

struct safetensors_entry {
    const char *name; /* owned by the file's `names` */
    size_t type;      /* index into the table of known types */
    size_t rank, shape[SAFETENSORS_RANK_MAX];
    size_t elements;
    size_t begin, end; /* bytes of the data section */
};

/* Zero-filled is a valid, empty file. */
struct safetensors {
    struct safetensors_entry *entries; /* ascending by name */
    size_t count;
    char *names;
    const unsigned char *data;
    size_t data_bytes;
    struct file_map map; /* none when the bytes belong to the caller */
};

/* Maps a file. It must not be truncated while it is mapped. */
int safetensors_open(const char *path, struct safetensors *file, struct error *error);

/* Reads bytes that stay the caller's and must outlive `file`. */
int safetensors_parse(const void *bytes, size_t size, struct safetensors *file,
                      struct error *error);

void safetensors_close(struct safetensors *file);

/* NULL if there is none. */
const struct safetensors_entry *safetensors_find(const struct safetensors *file, const char *name);

/* The entry as a tensor: F32, F16 or BF16 of rank 4 at most; a scalar becomes rank 1 with one
 * element. */
int safetensors_tensor(const struct safetensors *file, const struct safetensors_entry *entry,
                       struct tensor *tensor, struct error *error);

#endif
