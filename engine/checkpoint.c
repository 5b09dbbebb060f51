#include "engine/checkpoint.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/checkpoint_parts.h"
#include "engine/gguf.h"
#include "engine/json_field.h"
#include "engine/safetensors.h"
#include "engine/tensor_format.h"
#include "kernels/number.h"

#define INDEX_BYTES_MAX ((size_t)16 << 20)
#define SHARDS_MAX      ((size_t)1024)
#define EXPECTED_FOLDER \
    "a checkpoint folder with config.json and model.safetensors, or a GGUF file, is expected"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "tensors are read in the file's byte order");

struct shard {
    char *path;
    struct safetensors file;
};

/* Where a name leads: the entries of one file, or what the index of a sharded checkpoint lists. */
struct place {
    const struct safetensors_entry *entry;
    const struct shard *shard;
};

struct checkpoint {
    char *path;
    bool is_gguf; /* `gguf` is all there is; else a folder, and the shards */
    struct gguf gguf;
    struct config config;
    struct depth_table depth;
    struct shard *shards; /* fixed once opened: places point into it */
    size_t shard_count;
    struct place *places; /* ascending by name */
    size_t place_count;
    size_t parameters;
    char *list; /* path of the file that says which tensors there are */
};

static int open_folder(const char *folder, struct checkpoint *checkpoint, struct error *error);
static int open_gguf(const char *path, struct checkpoint *checkpoint, struct error *error);
static int check_path(const char *path, bool *is_gguf, struct error *error);
static int join_path(const char *folder, const char *name, char **path, struct error *error);
static int load_config(const char *folder, struct config *config, struct error *error);
static int load_generation_config(const char *folder, struct config *config, struct error *error);
static int load_depth(const char *folder, const struct config *config, struct depth_table *table,
                      struct error *error);
static int load_weights(const char *folder, struct checkpoint *checkpoint, struct error *error);
static int load_single(const char *folder, struct checkpoint *checkpoint, struct error *error);
static int load_sharded(const char *folder, struct checkpoint *checkpoint, struct error *error);
static int load_index(const char *folder, const json_t *map, json_t *numbers,
                      struct checkpoint *checkpoint, struct error *error);
static int number_shards(const json_t *map, json_t *numbers, struct error *error);
static bool is_plain_name(const char *name);
static int open_shard(const char *folder, const char *name, struct checkpoint *checkpoint,
                      struct error *error);
static int place_tensors(const json_t *map, const json_t *numbers, struct checkpoint *checkpoint,
                         struct error *error);
static int compare_places(const void *a, const void *b);
static bool shape_matches(const struct tensor *tensor, size_t rows, size_t columns);
static void print_shape(const size_t *shape, size_t rank, char *out, size_t size);

int checkpoint_open(const char *path, struct checkpoint **checkpoint, struct error *error) {
    bool is_gguf;
    int result = check_path(path, &is_gguf, error);
    if (result != 0) return result;
    struct checkpoint *opened = calloc(1, sizeof *opened);
    if (!opened || !(opened->path = strdup(path))) {
        free(opened);
        return error_set(error, FATHOM_NO_MEMORY, "no memory to open %s", path);
    }
    opened->is_gguf = is_gguf;
    result = is_gguf ? open_gguf(path, opened, error) : open_folder(path, opened, error);
    if (result != 0) {
        checkpoint_close(opened);
        return result;
    }
    *checkpoint = opened;
    return 0;
}

static int open_folder(const char *folder, struct checkpoint *checkpoint, struct error *error) {
    int result = load_config(folder, &checkpoint->config, error);
    if (result == 0) result = load_generation_config(folder, &checkpoint->config, error);
    if (result == 0) result = load_depth(folder, &checkpoint->config, &checkpoint->depth, error);
    if (result == 0) result = load_weights(folder, checkpoint, error);
    for (size_t i = 0; i < checkpoint->place_count && result == 0; i++) {
        checkpoint->parameters +=
            checkpoint->places[i].entry->elements; /* at most the bytes mapped */
    }
    return result;
}

static int open_gguf(const char *path, struct checkpoint *checkpoint, struct error *error) {
    int result = gguf_open(path, &checkpoint->gguf, error);
    if (result != 0) return result;
    result = gguf_read_config(&checkpoint->gguf, &checkpoint->config, error);
    if (result == 0) {
        result = depth_table_full(2 * checkpoint->config.blocks, &checkpoint->depth, error);
    }
    for (size_t i = 0; i < checkpoint->gguf.tensor_count; i++) {
        checkpoint->parameters +=
            checkpoint->gguf.tensors[i].elements; /* at most twice the bytes */
    }
    if (result != 0) error_prefix(error, "%s", path);
    return result;
}

void checkpoint_close(struct checkpoint *checkpoint) {
    if (!checkpoint) return;
    for (size_t i = 0; i < checkpoint->shard_count; i++) {
        safetensors_close(&checkpoint->shards[i].file);
        free(checkpoint->shards[i].path);
    }
    gguf_close(&checkpoint->gguf);
    free(checkpoint->path);
    free(checkpoint->shards);
    free(checkpoint->places);
    free(checkpoint->list);
    free(checkpoint->depth.theta);
    free(checkpoint);
}

const struct config *checkpoint_config(const struct checkpoint *checkpoint) {
    return &checkpoint->config;
}

const struct depth_table *checkpoint_depth(const struct checkpoint *checkpoint) {
    return &checkpoint->depth;
}

size_t checkpoint_parameters(const struct checkpoint *checkpoint) {
    return checkpoint->parameters;
}

int checkpoint_load_tokenizer(const struct checkpoint *checkpoint, struct tokenizer **tokenizer,
                              struct error *error) {
    if (!checkpoint->is_gguf) return tokenizer_load(checkpoint->path, tokenizer, error);
    int result = gguf_load_tokenizer(&checkpoint->gguf, tokenizer, error);
    if (result != 0) error_prefix(error, "%s", checkpoint->path);
    return result;
}

void checkpoint_let_go(const struct checkpoint *checkpoint) {
    for (size_t i = 0; i < checkpoint->shard_count; i++) {
        file_map_let_go(&checkpoint->shards[i].file.map);
    }
    file_map_let_go(&checkpoint->gguf.map);
}

static int find_gguf_tensor(const struct checkpoint *checkpoint, const char *name, size_t rows,
                            size_t columns, struct tensor *tensor, struct error *error) {
    char wanted[96], found[96];
    int result = gguf_get_tensor(&checkpoint->gguf, &checkpoint->config, name, tensor, error);
    if (result == 0 && !shape_matches(tensor, rows, columns)) {
        print_shape((size_t[]){rows, columns}, columns ? 2 : 1, wanted, sizeof wanted);
        print_shape(tensor->shape, tensor->rank, found, sizeof found);
        result = error_set(error, FATHOM_INVALID,
                           "the tensor for '%s' has shape %s; the metadata imply %s", name, found,
                           wanted);
    }
    if (result != 0) error_prefix(error, "%s", checkpoint->path);
    return result;
}

int checkpoint_tensor(const struct checkpoint *checkpoint, const char *name, size_t rows,
                      size_t columns, struct tensor *tensor, struct error *error) {
    char wanted[96], found[96];
    if (checkpoint->is_gguf) {
        return find_gguf_tensor(checkpoint, name, rows, columns, tensor, error);
    }
    print_shape((size_t[]){rows, columns}, columns ? 2 : 1, wanted, sizeof wanted);
    const struct safetensors_entry key_entry = {.name = name};
    const struct place key = {.entry = &key_entry};
    const struct place *place =
        bsearch(&key, checkpoint->places, checkpoint->place_count, sizeof key, compare_places);
    if (!place) {
        return error_set(error, FATHOM_NOT_FOUND,
                         "%s: tensor '%s' is missing; config.json implies it with shape %s",
                         checkpoint->list, name, wanted);
    }
    int result = safetensors_tensor(&place->shard->file, place->entry, tensor, error);
    if (result == 0 && !shape_matches(tensor, rows, columns)) {
        print_shape(place->entry->shape, place->entry->rank, found, sizeof found);
        result = error_set(error, FATHOM_INVALID,
                           "tensor '%s' has shape %s; config.json implies %s", name, found, wanted);
    }
    if (result != 0) error_prefix(error, "%s", place->shard->path);
    return result;
}

/* One row: `columns` elements from `data` on. */
static void read_row(const struct tensor *tensor, const unsigned char *data, size_t columns,
                     float *out) {
    const struct tensor_format *format = tensor->format;
    if (!format) {
        for (size_t i = 0; i < columns; i++) out[i] = number_load(data, tensor->type, i);
        return;
    }
    for (size_t i = 0; i < columns; i += format->block, data += format->bytes) {
        format->unpack(data, out + i);
    }
}

/* Row `to` of a head in the order of split halves is this one in that of interleaved pairs. */
static size_t interleaved_row(size_t row, size_t head) {
    size_t within = row % head, half = head / 2;
    return row - within + (within < half ? 2 * within : 2 * (within - half) + 1);
}

static size_t count_elements(const struct tensor *tensor) {
    const struct tensor_format *format = tensor->format;
    return format ? tensor->bytes / format->bytes * format->block
                  : tensor->bytes / dtype_size(tensor->type);
}

size_t tensor_rows(const struct tensor *tensor) {
    /* A bias of Q or K is permuted element by element. */
    bool is_list = tensor->rank == 1 && tensor->interleaved;
    return tensor->rank == 2 || is_list ? tensor->shape[0] : 1;
}

bool tensor_read_rows(const struct tensor *tensor, size_t first, size_t end, float *out) {
    size_t rows = tensor_rows(tensor), columns = rows ? count_elements(tensor) / rows : 0;
    size_t stride = rows ? tensor->bytes / rows : 0;
    float *to = out;
    for (size_t row = first; row < end; row++, to += columns) {
        size_t from = tensor->interleaved ? interleaved_row(row, tensor->interleaved) : row;
        read_row(tensor, (const unsigned char *)tensor->data + from * stride, columns, to);
    }
    uint32_t top = 0;
    for (size_t i = 0; i < (end - first) * columns; i++) {
        uint32_t size = number_bits(out[i]) & 0x7fffffff;
        top = size > top ? size : top;
    }
    return top < 0x7f800000;
}

int tensor_to_f32(const struct tensor *tensor, float *out, struct error *error) {
    if (tensor_read_rows(tensor, 0, tensor_rows(tensor), out)) return 0;
    size_t count = count_elements(tensor), i = 0;
    while (isfinite(out[i])) i++;
    return error_set(error, FATHOM_INVALID, "tensor '%s' has %s at element %zu of %zu",
                     tensor->name, isnan(out[i]) ? "NaN" : "an infinity", i, count);
}

static int check_path(const char *path, bool *is_gguf, struct error *error) {
    struct stat status;
    char magic[4] = "";
    *is_gguf = false;
    if (stat(path, &status) != 0) {
        int code = errno == ENOENT || errno == ENOTDIR ? FATHOM_NOT_FOUND : FATHOM_IO;
        return error_set(error, code, "%s: %s; " EXPECTED_FOLDER, path, strerror(errno));
    }
    if (S_ISDIR(status.st_mode)) return 0;
    FILE *file = S_ISREG(status.st_mode) ? fopen(path, "re") : NULL;
    if (file) {
        *is_gguf = fread(magic, 1, sizeof magic, file) == sizeof magic &&
                   memcmp(magic, "GGUF", sizeof magic) == 0;
        fclose(file);
    }
    if (*is_gguf) return 0;
    return error_set(error, FATHOM_INVALID, "%s is not a folder; " EXPECTED_FOLDER, path);
}

static int join_path(const char *folder, const char *name, char **path, struct error *error) {
    if (asprintf(path, "%s/%s", folder, name) >= 0) return 0;
    *path = NULL;
    return error_set(error, FATHOM_NO_MEMORY, "no memory for the path of %s", name);
}

static int load_config(const char *folder, struct config *config, struct error *error) {
    char *path, *text = NULL;
    size_t size;
    int result = join_path(folder, "config.json", &path, error);
    if (result != 0) return result;
    result = file_read(path, CONFIG_BYTES_MAX, &text, &size, error);
    if (result == FATHOM_NOT_FOUND) {
        error_set(error, result, "%s is missing: a checkpoint folder describes its model there",
                  path);
    } else if (result == 0 && (result = config_parse(text, size, config, error)) != 0) {
        error_prefix(error, "%s", path);
    }
    free(text);
    free(path);
    return result;
}

static int load_generation_config(const char *folder, struct config *config, struct error *error) {
    char *path, *text = NULL;
    size_t size;
    int result = join_path(folder, "generation_config.json", &path, error);
    if (result != 0) return result;
    result = file_read(path, CONFIG_BYTES_MAX, &text, &size, error);
    if (result == FATHOM_NOT_FOUND) {
        result = error_set(error, 0, "%s", "");
    } else if (result == 0 && (result = config_parse_generation(text, size, config, error)) != 0) {
        error_prefix(error, "%s", path);
    }
    free(text);
    free(path);
    return result;
}

static int load_depth(const char *folder, const struct config *config, struct depth_table *table,
                      struct error *error) {
    char *path, *text = NULL;
    size_t size, sublayers = 2 * config->blocks;
    int result = join_path(folder, "depth.json", &path, error);
    if (result != 0) return result;
    result = file_read(path, DEPTH_BYTES_MAX, &text, &size, error);
    if (result == FATHOM_NOT_FOUND) {
        result = depth_table_full(sublayers, table, error);
    } else if (result == 0 && config->is_standard) {
        result = error_set(error, FATHOM_UNSUPPORTED,
                           "%s: tiers are of NAG models; this model runs every sub-layer for every "
                           "token: remove the file",
                           path);
    } else if (result == 0 &&
               (result = depth_table_parse(text, size, sublayers, table, error)) != 0) {
        error_prefix(error, "%s", path);
    }
    free(text);
    free(path);
    return result;
}

/* Where there are both, the single file wins, as it does for other readers of such folders. */
static int load_weights(const char *folder, struct checkpoint *checkpoint, struct error *error) {
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    for (size_t i = 0; i < 2; i++) {
        int result = join_path(folder, names[i], &checkpoint->list, error);
        if (result != 0) return result;
        if (access(checkpoint->list, F_OK) == 0) {
            return i == 0 ? load_single(folder, checkpoint, error)
                          : load_sharded(folder, checkpoint, error);
        }
        free(checkpoint->list);
        checkpoint->list = NULL;
    }
    return error_set(error, FATHOM_NOT_FOUND,
                     "%s holds neither %s nor %s: the weights are expected there", folder, names[0],
                     names[1]);
}

static int load_single(const char *folder, struct checkpoint *checkpoint, struct error *error) {
    checkpoint->shards = calloc(1, sizeof *checkpoint->shards);
    if (!checkpoint->shards) return error_set(error, FATHOM_NO_MEMORY, "no memory for %s", folder);
    int result = open_shard(folder, "model.safetensors", checkpoint, error);
    if (result != 0) return result;
    const struct shard *shard = &checkpoint->shards[0];
    checkpoint->places = calloc(shard->file.count + 1, sizeof *checkpoint->places);
    if (!checkpoint->places) return error_set(error, FATHOM_NO_MEMORY, "no memory for %s", folder);
    for (size_t i = 0; i < shard->file.count; i++) { /* in the order of names already */
        checkpoint->places[i] = (struct place){&shard->file.entries[i], shard};
    }
    checkpoint->place_count = shard->file.count;
    return 0;
}

static int load_sharded(const char *folder, struct checkpoint *checkpoint, struct error *error) {
    char *text;
    size_t size;
    json_t *index = NULL;
    int result = file_read(checkpoint->list, INDEX_BYTES_MAX, &text, &size, error);
    if (result != 0) return result;
    result = json_object_parse(text, size, &index, error);
    free(text);
    if (result == 0) {
        json_t *numbers = json_object(); /* file name -> number of its shard, in that order */
        const json_t *map = json_object_field(index, "weight_map");
        if (!numbers) {
            result = error_set(error, FATHOM_NO_MEMORY, "no memory to list shards");
        } else if (!json_is_object(map) || json_object_size(map) == 0) {
            result = json_refuse(map, "weight_map", "an object with tensors", error);
        } else {
            result = load_index(folder, map, numbers, checkpoint, error);
        }
        json_decref(numbers);
        json_decref(index);
    }
    if (result != 0) error_prefix(error, "%s", checkpoint->list);
    return result;
}

static int load_index(const char *folder, const json_t *map, json_t *numbers,
                      struct checkpoint *checkpoint, struct error *error) {
    int result = number_shards(map, numbers, error);
    if (result != 0) return result;
    checkpoint->shards = calloc(json_object_size(numbers), sizeof *checkpoint->shards);
    checkpoint->places = calloc(json_object_size(map), sizeof *checkpoint->places);
    if (!checkpoint->shards || !checkpoint->places) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory to list %zu tensors",
                         json_object_size(map));
    }
    const char *name;
    json_t *number;
    json_object_foreach(numbers, name, number) {
        result = open_shard(folder, name, checkpoint, error);
        if (result != 0) return result;
    }
    return place_tensors(map, numbers, checkpoint, error);
}

static int number_shards(const json_t *map, json_t *numbers, struct error *error) {
    const char *name;
    json_t *file;
    json_object_foreach((json_t *)map, name, file) {
        if (!json_is_string(file) || !is_plain_name(json_string_value(file))) {
            json_refuse(file, "the file", "a plain name of a file in the folder", error);
            return error_prefix(error, "weight_map: tensor '%s'", name);
        }
        if (json_object_get(numbers, json_string_value(file))) continue;
        size_t count = json_object_size(numbers);
        if (count == SHARDS_MAX) {
            return error_set(error, FATHOM_INVALID, "weight_map names more than %zu files",
                             SHARDS_MAX);
        }
        if (json_object_set_new(numbers, json_string_value(file),
                                json_integer((json_int_t)count)) != 0) {
            return error_set(error, FATHOM_NO_MEMORY, "no memory to list shards");
        }
    }
    return 0;
}

/* Nothing that could lead out of the folder. */
static bool is_plain_name(const char *name) {
    return name[0] != '\0' && strlen(name) <= 255 && !strchr(name, '/') && !strstr(name, "..") &&
           strcmp(name, ".") != 0;
}

static int open_shard(const char *folder, const char *name, struct checkpoint *checkpoint,
                      struct error *error) {
    struct shard *shard = &checkpoint->shards[checkpoint->shard_count];
    int result = join_path(folder, name, &shard->path, error);
    if (result != 0) return result;
    checkpoint->shard_count++; /* from here on checkpoint_close frees the path */
    return safetensors_open(shard->path, &shard->file, error);
}

static int place_tensors(const json_t *map, const json_t *numbers, struct checkpoint *checkpoint,
                         struct error *error) {
    const char *name;
    json_t *file;
    json_object_foreach((json_t *)map, name, file) {
        const json_t *number = json_object_get(numbers, json_string_value(file));
        const struct shard *shard = &checkpoint->shards[json_integer_value(number)];
        const struct safetensors_entry *entry = safetensors_find(&shard->file, name);
        if (!entry) {
            return error_set(error, FATHOM_INVALID,
                             "weight_map puts tensor '%s' into %s, which has none", name,
                             shard->path);
        }
        checkpoint->places[checkpoint->place_count++] = (struct place){entry, shard};
    }
    qsort(checkpoint->places, checkpoint->place_count, sizeof *checkpoint->places, compare_places);
    return 0;
}

static int compare_places(const void *a, const void *b) {
    const struct place *one = a, *two = b;
    return strcmp(one->entry->name, two->entry->name);
}

static bool shape_matches(const struct tensor *tensor, size_t rows, size_t columns) {
    if (tensor->rank != (columns ? 2u : 1u) || tensor->shape[0] != rows) return false;
    return columns == 0 || tensor->shape[1] == columns;
}

static void print_shape(const size_t *shape, size_t rank, char *out, size_t size) {
    size_t used = (size_t)snprintf(out, size, "[");
    for (size_t i = 0; i < rank && used < size; i++) {
        used += (size_t)snprintf(out + used, size - used, "%s%zu", i ? ", " : "", shape[i]);
    }
    if (used < size) snprintf(out + used, size - used, "]");
}
