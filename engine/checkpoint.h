/* What a checkpoint folder or a GGUF file holds, checked: configuration, tensors by name,
 * depth.json.
 *
 * It is hostile input. Every count, shape, offset and type is checked against limits and
 * against the file sizes before use; an error names the file, the key or tensor, and the limit.
 */
#ifndef FATHOM_CHECKPOINT_H
#define FATHOM_CHECKPOINT_H

#include "engine/engine.h"
#include "kernels/kernels.h"

enum nag_head { NAG_HEAD_COSINE, NAG_HEAD_RMSNORM };

/* How the rotary frequencies differ from theta^(-2i/D): not; all divided by factor; or as in Llama
 * 3.1, where those of long wavelengths are, with a smooth passage from short ones. */
enum rope_scaling_kind { ROPE_UNSCALED, ROPE_LINEAR, ROPE_LLAMA3 };
struct rope_scaling {
    enum rope_scaling_kind kind;
    double factor, low_factor, high_factor;
    double original_context; /* positions that the model was first trained on */
};

#define HEAD_SIZE_MAX 1024

/* config.json, with every default resolved. Limits: vocab <= 4 Mi, hidden <= 32768, blocks <= 1024,
 * heads <= 1024, head size <= 1024 and even, inner <= 262144, directions <= 1024, context <= 1 Mi,
 * rope_theta 1..1e12, qk_scale 1e-6..1e6, norm_epsilon 1e-12..1e-2. */
struct config {
    size_t vocab, hidden, blocks, heads, kv_heads, head_size, inner, context, directions;
    enum activation activation;
    enum qk_norm qk_norm;
    enum nag_head head;
    double rope_theta;
    float qk_scale;
    bool is_standard; /* an ordinary pre-norm model; false: NAG */
    /* Of standard models alone. */
    float norm_epsilon;
    struct rope_scaling rope_scaling;
    bool tied_head;                       /* the head is the embedding */
    bool qkv_bias, output_bias, mlp_bias; /* on Q, K and V; on O; on gate, up and down */
    bool qk_gain;                         /* the Q/K norm has gains [D] */
    bool rope_factors;   /* rope_freqs.weight [D / 2] divides the frequencies */
    bool is_interleaved; /* rows of Q and K are stored in the order of interleaved RoPE */
    int32_t bos;                          /* -1: none */
    int32_t eos[EOS_MAX];
    size_t eos_count;
};

/* Thresholds: theta [tier_count][2 * blocks]; a file without depth.json has the one tier "full". */
struct depth_table {
    enum kv_policy kv_policy;
    size_t tier_count, default_tier, sublayers;
    struct tier_info tiers[TIERS_MAX];
    float *theta; /* malloc'd */
};

struct tensor_format;

/* A tensor in the mapped file. Data is little-endian, not necessarily aligned. */
struct tensor {
    const char *name;
    enum dtype type;                    /* of the elements; of packed ones, what stands for them */
    const struct tensor_format *format; /* how elements are packed; NULL: they are not */
    size_t interleaved; /* rows of one head, if they are in the order of interleaved RoPE; else 0 */
    size_t rank, shape[4];
    const void *data; /* valid while the checkpoint is open */
    size_t bytes;
};

struct checkpoint; /* mapped files; immutable */

/* `path` is a folder, or a GGUF file. */
int checkpoint_open(const char *path, struct checkpoint **checkpoint, struct error *error);
void checkpoint_close(struct checkpoint *checkpoint); /* NULL is allowed */
const struct config *checkpoint_config(const struct checkpoint *checkpoint);
const struct depth_table *checkpoint_depth(const struct checkpoint *checkpoint);
size_t checkpoint_parameters(const struct checkpoint *checkpoint);
/* From the folder, or the file's metadata; FATHOM_NOT_FOUND if there is none. */
int checkpoint_load_tokenizer(const struct checkpoint *checkpoint, struct tokenizer **tokenizer,
                              struct error *error);

/* Finds a tensor and checks its shape (rank 1 or 2; `columns` 0 means rank 1 with `rows` elements;
 * a scalar counts as [1]). */
int checkpoint_tensor(const struct checkpoint *checkpoint, const char *name, size_t rows,
                      size_t columns, struct tensor *tensor, struct error *error);

/* Lets the mapped files go from memory. What is read again comes back from the files. */
void checkpoint_let_go(const struct checkpoint *checkpoint);

/* Writes a tensor's elements as f32 into out[rows * columns], packed ones unpacked, rows of Q and K
 * in the order of RoPE on split halves; NaN or infinity is FATHOM_INVALID. */
int tensor_to_f32(const struct tensor *tensor, float *out, struct error *error);

/* The same of some rows, by several threads at once: false where one holds NaN or infinity. What
 * has no rows is one. */
size_t tensor_rows(const struct tensor *tensor);
bool tensor_read_rows(const struct tensor *tensor, size_t first, size_t end, float *out);

/* What must hold for any table, one that was read and one that is to be written: tier names, one
 * "full" with thresholds of zero, a default, figures in range. */
int depth_table_check(const struct depth_table *table, struct error *error);

/* Replaces FOLDER/depth.json (written beside it, synced, renamed). */
int depth_table_save(const char *folder, const struct depth_table *table, struct error *error);

#endif
