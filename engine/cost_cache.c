#include "engine/cost_cache.h"

#include "engine/cost.h"
#include "engine/json_field.h"
#include "engine/model.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define FORMAT     3                 /* another way of measuring makes another number */
#define FILE_BYTES ((size_t)1 << 16) /* no file of ours is longer */
#define NS_MAX     1e10
#define KEY_BYTES  512
#define PATH_BYTES 1024

static const char *const point_times[] = {"step_ns", "attn_ns", "mlp_ns", "head_ns"};

static double *point_time(struct cost_point *point, size_t i) {
    double *const times[] = {&point->step_ns, &point->attn_ns, &point->mlp_ns, &point->head_ns};
    return times[i];
}

/* ---- Which file ------------------------------------------------------------------------------ */

/* "model name : AMD EPYC" of /proc/cpuinfo, or nothing. */
static void read_processor(char *name, size_t size) {
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "re");
    name[0] = '\0';
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, "model name", 10) != 0 || !strchr(line, ':')) continue;
        snprintf(name, size, "%.100s", strchr(line, ':') + 2);
        name[strcspn(name, "\n\"\\")] = '\0';
        break;
    }
    if (file) fclose(file);
}

/* Everything that times depend on. The device's description has its instruction set and threads. */
static void describe(const struct model *model, char *key) {
    const struct model_info *info = &model->info;
    char processor[128];
    read_processor(processor, sizeof processor);
    snprintf(key, KEY_BYTES,
             "fathom %s; %s; %s x %ld; %s weights; %s, %zu x %zu, heads %zu/%zu x %zu, inner %zu, "
             "vocabulary %zu, directions %zu, kv_policy %s; %zu rows",
             FATHOM_VERSION, info->device, processor, sysconf(_SC_NPROCESSORS_ONLN), info->weights,
             info->residual, info->blocks, info->hidden, info->heads, info->kv_heads,
             info->head_size, info->inner, info->vocab, info->directions,
             info->kv_policy == KV_OMIT ? "omit" : "compute", info->max_step_rows);
}

static int find_path(const struct model *model, const char *key, char *path, struct error *error) {
    unsigned long long name = (unsigned long long)XXH3_64bits(key, strlen(key));
    int length = snprintf(path, PATH_BYTES, "%s/cost-%016llx.json", model->cost_cache, name);
    if (length < PATH_BYTES) return 0;
    return error_set(error, FATHOM_INVALID, "the path of the cost cache is too long");
}

/* ---- Reading --------------------------------------------------------------------------------- */

/* As measuring makes them: what more rows add is never less. */
static int parse_point(const json_t *value, struct cost_point before, struct cost_point *point,
                       struct error *error) {
    int64_t rows = 0;
    if (!json_is_object(value)) return json_refuse(value, "points", "an array of objects", error);
    int result = json_read_integer(json_object_field(value, "rows"), "rows",
                                   (int64_t)before.rows + 1, STEP_ROWS_MAX, &rows, error);
    point->rows = (size_t)rows;
    for (size_t i = 0; result == 0 && i < sizeof point_times / sizeof *point_times; i++) {
        result = json_read_number(json_object_field(value, point_times[i]), point_times[i],
                                  *point_time(&before, i), NS_MAX, point_time(point, i), error);
    }
    return result;
}

static int parse_points(const struct model *model, const json_t *array, struct cost_model *cost,
                        struct error *error) {
    size_t count = json_array_size(array);
    if (count < 1 || count > COST_POINTS_MAX) {
        return error_set(error, FATHOM_INVALID, "points must be an array of 1 to %d",
                         COST_POINTS_MAX);
    }
    for (size_t i = 0; i < count; i++) {
        struct cost_point before = i > 0 ? cost->points[i - 1] : (struct cost_point){0};
        int result = parse_point(json_array_get(array, i), before, &cost->points[i], error);
        if (result != 0) return result;
    }
    cost->count = count;
    /* Where nothing is skipped, all of a step is in its sub-layers. */
    bool is_whole = cost->points[0].step_ns > 0 || !residual_skips(model->residual);
    if (is_whole && cost->points[0].attn_ns > 0 && cost->points[0].mlp_ns > 0) return 0;
    return error_set(error, FATHOM_INVALID, "points say that work takes no time");
}

static int parse(const struct model *model, const json_t *object, const char *key,
                 struct cost_model *cost, struct error *error) {
    const char *said = json_string_value(json_object_field(object, "key"));
    int64_t format = 0;
    int result = json_read_integer(json_object_field(object, "format"), "format", FORMAT, FORMAT,
                                   &format, error);
    if (result != 0) return result;
    if (!said || strcmp(said, key) != 0) {
        return error_set(error, FATHOM_INVALID, "key is not \"%s\"", key);
    }
    result = json_read_number(json_object_field(object, "attended_ns"), "attended_ns", 0, 1e6,
                              &cost->attended_ns, error);
    if (result != 0) return result;
    result = json_read_number(json_object_field(object, "gather_factor"), "gather_factor", 1, 2,
                              &cost->gather_factor, error);
    if (result != 0) return result;
    return parse_points(model, json_object_field(object, "points"), cost, error);
}

int cost_cache_read(const struct model *model, struct cost_model *cost, struct error *error) {
    char key[KEY_BYTES], path[PATH_BYTES], *text;
    size_t size;
    if (!model->cost_cache[0]) return FATHOM_NOT_FOUND;
    describe(model, key);
    int result = find_path(model, key, path, error);
    if (result != 0) return result;
    result = file_read(path, FILE_BYTES, &text, &size, error);
    if (result != 0) return result;
    json_t *object = NULL;
    struct cost_model read = {.blocks = model->info.blocks};
    result = json_object_parse(text, size, &object, error);
    if (result == 0) result = parse(model, object, key, &read, error);
    json_decref(object);
    free(text);
    if (result != 0) {
        error_prefix(error, "%s", path);
        return FATHOM_INVALID;
    }
    read.ridge = cost_find_ridge(&read);
    *cost = read;
    return 0;
}

/* ---- Writing --------------------------------------------------------------------------------- */

static void print_cost(FILE *out, const char *key, const struct cost_model *cost) {
    fprintf(out,
            "{\n  \"format\": %d,\n  \"key\": \"%s\",\n  \"attended_ns\": %.9g,\n"
            "  \"gather_factor\": %.9g,\n  \"points\": [",
            FORMAT, key, cost->attended_ns, cost->gather_factor);
    for (size_t i = 0; i < cost->count; i++) {
        struct cost_point point = cost->points[i];
        fprintf(out, "%s\n    {\"rows\": %zu", i ? "," : "", point.rows);
        for (size_t j = 0; j < sizeof point_times / sizeof *point_times; j++) {
            fprintf(out, ", \"%s\": %.9g", point_times[j], *point_time(&point, j));
        }
        fprintf(out, "}");
    }
    fprintf(out, "\n  ]\n}\n");
}

/* And its parent: a new home has no .cache yet. */
static int make_folder(const char *path) {
    char parent[PATH_BYTES];
    if (mkdir(path, 0777) == 0) return 0;
    if (errno != ENOENT) return -1;
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (!slash || slash == parent) return -1;
    *slash = '\0';
    return mkdir(parent, 0777) == 0 ? mkdir(path, 0777) : -1;
}

/* A file of its own for every process that writes: the last rename wins, and each is whole. */
int cost_cache_write(const struct model *model, const struct cost_model *cost,
                     struct error *error) {
    char key[KEY_BYTES], path[PATH_BYTES], temporary[PATH_BYTES + 8];
    if (!model->cost_cache[0]) return 0;
    describe(model, key);
    int result = find_path(model, key, path, error);
    if (result != 0) return result;
    if (make_folder(model->cost_cache) != 0 && errno != EEXIST) {
        return error_set(error, FATHOM_IO, "cannot make %s: %s", model->cost_cache,
                         strerror(errno));
    }
    snprintf(temporary, sizeof temporary, "%s.XXXXXX", path);
    int file = mkostemp(temporary, O_CLOEXEC);
    FILE *out = file < 0 ? NULL : fdopen(file, "w");
    if (!out) {
        result = error_set(error, FATHOM_IO, "cannot write %s: %s", path, strerror(errno));
        if (file >= 0) close(file);
        return result;
    }
    print_cost(out, key, cost);
    bool written = fflush(out) == 0 && !ferror(out);
    written = fclose(out) == 0 && written;
    if (written && rename(temporary, path) == 0) return 0;
    result = error_set(error, FATHOM_IO, "cannot write %s: %s", path, strerror(errno));
    unlink(temporary);
    return result;
}
