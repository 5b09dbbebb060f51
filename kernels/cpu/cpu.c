/* The CPU device: opening it, its memory, and its table of operations. */
#include "kernels/cpu/cpu.h"

#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Memory ---------------------------------------------------------------------------------- */

static size_t cpu_buffer_bytes(const struct buffer *buffer) {
    return buffer->bytes;
}

/* A table of weights: its pages are new on both sides, and every thread brings in some of them. */
#define WRITE_PIECE ((size_t)1 << 20)

struct write {
    unsigned char *to;
    const unsigned char *from;
    size_t size;
};

static void write_pieces(void *context, size_t first, size_t end) {
    const struct write *write = context;
    size_t at = first * WRITE_PIECE, stop = end * WRITE_PIECE;
    if (end == write->size / WRITE_PIECE) stop = write->size; /* the last takes what is left over */
    memcpy(write->to + at, write->from + at, stop - at);
}

static void cpu_write(struct device *device, struct buffer *buffer, size_t offset, const void *data,
                      size_t size) {
    struct write write = {buffer->data + offset, data, size};
    size_t pieces = size / WRITE_PIECE;
    if (pieces > 1)
        pool_run(cpu_of(device)->pool, pieces, WRITE_PIECE / 64, write_pieces, &write);
    else if (size)
        memcpy(write.to, data, size);
}

static void cpu_share_out(struct device *device, size_t items, size_t cost,
                          void (*body)(void *context, size_t first, size_t end), void *context) {
    pool_run(cpu_of(device)->pool, items, cost, body, context);
}

static void *cpu_look(const struct buffer *buffer) {
    return buffer->data;
}

static void cpu_read(struct device *device, const struct buffer *buffer, size_t offset, void *data,
                     size_t size) {
    (void)device;
    if (size) memcpy(data, buffer->data + offset, size);
}

static void cpu_read_all(struct device *device, const struct copy *copies, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const struct copy *copy = &copies[i];
        for (size_t row = 0; row < copy->rows; row++) {
            size_t at = row * copy->stride;
            unsigned char *to = (unsigned char *)copy->to + at;
            cpu_read(device, copy->from, copy->offset + at, to, copy->width);
        }
    }
}

static struct buffer *cpu_activation_create(struct device *device, size_t rows, size_t width,
                                            enum dtype weights, struct error *error) {
    size_t bytes;
    (void)weights; /* f32 whatever they are */
    if (!size_multiply(rows, width, &bytes) || !size_multiply(bytes, sizeof(float), &bytes)) {
        error_set(error, FATHOM_NO_MEMORY, "an activation of %zu rows of %zu is too large", rows,
                  width);
        return NULL;
    }
    return cpu_buffer_create(device, bytes, error);
}

static void cpu_read_activation(struct device *device, const struct buffer *buffer, size_t first,
                                size_t count, float *out) {
    cpu_read(device, buffer, first * sizeof *out, out, count * sizeof *out);
}

static size_t cpu_row_count(struct device *device, const struct row_list *list) {
    (void)device;
    return (size_t)buffer_i32(list->count)[0];
}

/* ---- The device ------------------------------------------------------------------------------ */

static void cpu_close(struct device *device) {
    struct cpu_device *cpu = cpu_of(device);
    cpu_buffer_destroy(device, cpu->packed);
    pool_destroy(cpu->pool);
    free(cpu);
}

static const struct kernels cpu_kernels = {
    .name = "cpu",
    .close = cpu_close,
    .buffer_create = cpu_buffer_create,
    .buffer_destroy = cpu_buffer_destroy,
    .buffer_bytes = cpu_buffer_bytes,
    .write = cpu_write,
    .read = cpu_read,
    .read_all = cpu_read_all,
    .look = cpu_look,
    .share_out = cpu_share_out,
    .activation_create = cpu_activation_create,
    .read_activation = cpu_read_activation,
    .matrix_create = cpu_matrix_create,
    .matrix_destroy = cpu_matrix_destroy,
    .matrix_bytes = cpu_matrix_bytes,
    .preferred_weights = cpu_preferred_weights,
    .kv_block_bytes = cpu_kv_block_bytes,
    .row_count = cpu_row_count,
    .nag_begin = cpu_nag_begin,
    .nag_end_sublayer = cpu_nag_end_sublayer,
    .matmul = cpu_matmul,
    .rope = cpu_rope,
    .kv_append = cpu_kv_append,
    .attention = cpu_attention,
    .activate = cpu_activate,
    .scale_logits = cpu_scale_logits,
    .rmsnorm = cpu_rmsnorm,
    .standard_begin = cpu_standard_begin,
    .standard_end_sublayer = cpu_standard_end_sublayer,
    .add_bias = cpu_add_bias,
};

/* Best first. */
static const struct primitives *const instruction_sets[] = {
#if defined(__x86_64__)
    &primitives_avx512bf16, &primitives_avx512vnni, &primitives_avx512, &primitives_avx2,
#endif
    &primitives_portable,
};
#define INSTRUCTION_SETS (sizeof instruction_sets / sizeof *instruction_sets)

/* What the build flags of the file with these inner loops ask for. (F16C came before AVX2.) */
static bool processor_has(const struct primitives *set) {
#if defined(__x86_64__)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (set == &primitives_avx2) return avx2;
    if (set == &primitives_avx512) return avx512;
    bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (set == &primitives_avx512vnni) return vnni;
    if (set == &primitives_avx512bf16) return vnni && __builtin_cpu_supports("avx512bf16");
#endif
    return set == &primitives_portable;
}

static int isa_unavailable(const char *isa, struct error *error) {
    char here[96] = "";
    for (size_t i = 0; i < INSTRUCTION_SETS; i++) {
        size_t used = strlen(here);
        if (!processor_has(instruction_sets[i])) continue;
        snprintf(here + used, sizeof here - used, "%s%s", used ? ", " : "",
                 instruction_sets[i]->name);
    }
    return error_set(
        error, FATHOM_UNSUPPORTED,
        "instruction set \"%.32s\" cannot be used; choices are avx512bf16, avx512vnni, "
        "avx512, avx2 and portable, and this machine has %s",
        isa, here);
}

static int isa_choose(const char *isa, const struct primitives **primitives, struct error *error) {
    for (size_t i = 0; i < INSTRUCTION_SETS; i++) {
        const struct primitives *set = instruction_sets[i];
        if ((isa && strcmp(isa, set->name)) || !processor_has(set)) continue;
        *primitives = set;
        return FATHOM_OK;
    }
    return isa_unavailable(isa, error);
}

/* A container's quota in whole processors ("max 100000" or "150000 100000"); LONG_MAX: none. */
static long quota_processors(void) {
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    long quota, period, processors = LONG_MAX;
    if (!file) return processors;
    if (fscanf(file, "%ld %ld", &quota, &period) == 2 && quota > 0 && period > 0) {
        processors = quota / period + (quota % period != 0);
    }
    fclose(file);
    return processors;
}

/* Processors that this process may use: a container may have fewer than the machine, by a set of
 * processors or by a share of their time. */
static size_t processors_available(void) {
    cpu_set_t set;
    bool known = sched_getaffinity(0, sizeof set, &set) == 0;
    long count = known ? CPU_COUNT(&set) : sysconf(_SC_NPROCESSORS_ONLN),
         quota = quota_processors();
    if (count > quota) count = quota;
    if (count < 1) return 1;
    return count > POOL_THREADS_MAX ? POOL_THREADS_MAX : (size_t)count;
}

/* A row of x takes at most one float per input, when inputs are filled up to a group of int8. */
static int scratch_create(struct cpu_device *cpu, struct error *error) {
    size_t width;
    if (!size_add(cpu->max_width, INT8_GROUP - 1, &width)) {
        return error_set(error, FATHOM_INVALID, "max_width %zu is too large", cpu->max_width);
    }
    width = width / INT8_GROUP * INT8_GROUP;
    cpu->packed = cpu_activation_create(&cpu->base, cpu->max_rows, width, DTYPE_F32, error);
    return cpu->packed ? FATHOM_OK : FATHOM_NO_MEMORY;
}

int cpu_open(const struct device_options *options, struct device **device, struct error *error) {
    size_t threads = options->threads ? options->threads : processors_available();
    if (threads > POOL_THREADS_MAX) {
        return error_set(error, FATHOM_INVALID, "%zu compute threads; the limit is %d", threads,
                         POOL_THREADS_MAX);
    }
    const struct primitives *primitives = NULL;
    int status = isa_choose(options->isa, &primitives, error);
    if (status) return status;
    struct cpu_device *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return error_set(error, FATHOM_NO_MEMORY, "no memory for a device");
    cpu->base.kernels = &cpu_kernels;
    cpu->primitives = primitives;
    cpu->max_rows = options->max_rows;
    cpu->max_width = options->max_width;
    snprintf(cpu->base.isa, sizeof cpu->base.isa, "%s", primitives->name);
    snprintf(cpu->base.description, sizeof cpu->base.description, "cpu %s, %zu thread%s",
             primitives->name, threads, threads == 1 ? "" : "s");
    status = pool_create(threads, &cpu->pool, error); /* first: memory is touched by its threads */
    if (!status) status = scratch_create(cpu, error);
    if (status) {
        cpu_close(&cpu->base);
        return status;
    }
    *device = &cpu->base;
    return FATHOM_OK;
}

enum dtype cpu_preferred_weights(const struct device *device, enum dtype type) {
    return ((const struct cpu_device *)device)->primitives->halves_pay ? type : DTYPE_F32;
}
