/* Recorded steps: a decode step is one CUDA graph per bucket of rows.
 *
 * A shape is recorded when it comes for the second time: the first one, issued launch by launch, has
 * loaded the kernels and chosen the algorithms by then, and a shape that comes once is not worth a
 * graph. Everything that differs between steps of like shape is in memory: rows, block tables,
 * thresholds, lists and their counts. Kernels are launched for all rows of the bucket and leave off
 * behind the real ones. What follows a list is a branch of the graph, taken if the list, made on the
 * device just before, has anybody on it; in wide steps one of several branches, by its length.
 *
 * Where the driver cannot record, steps are issued as they come, with the same results. */
#include "kernels/cuda/cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS_MAX  64 /* shapes that are remembered; then the oldest is forgotten */
#define BLOCKS_MIN 16 /* blocks per slot: a chunk of attention */

/* Steps with the same are of like shape. */
struct step_key {
    size_t rows, logits, blocks; /* buckets; logits 0: none */
    const void *arena;
    bool is_packed, is_drawn, is_plain;
};

struct recorded {
    struct step_key key;
    cudaGraphExec_t exec; /* NULL: came once */
};

/* What is known of packed rows. */
struct packed_rows {
    const struct buffer *of, *list;
    enum dtype type;
    int rows;
};

struct recorder {
    cudaStream_t main, side; /* branches are captured on the side */
    struct recorded steps[STEPS_MAX];
    size_t count, next; /* next: to be forgotten when all are in use */
    bool is_off, has_no_branches;

    /* While recording. */
    struct recorded *step;
    bool is_broken, in_branch;
    struct condition condition; /* of the branches that come next; count 0: there are none */
    cudaGraph_t bodies[LENGTHS_MAX];
    struct packed_rows packed; /* when the first of them began: each finds the same */
};

int cuda_recorder_create(struct cuda_device *cuda, struct error *error) {
    const char *graphs = getenv("FATHOM_CUDA_GRAPHS");
    struct recorder *recorder = (struct recorder *)calloc(1, sizeof *recorder);
    if (!recorder) return error_set(error, FATHOM_NO_MEMORY, "no memory to record steps");
    cuda->recorder = recorder;
    recorder->main = cuda->stream;
    recorder->is_off = graphs && !strcmp(graphs, "0");
    cudaError_t status = cudaStreamCreate(&recorder->side);
    if (status == cudaSuccess) return FATHOM_OK;
    return error_set(error, FATHOM_UNSUPPORTED, "CUDA stream: %s", cudaGetErrorString(status));
}

void cuda_recorder_destroy(struct cuda_device *cuda) {
    struct recorder *recorder = cuda->recorder;
    if (!recorder) return;
    for (size_t i = 0; i < recorder->count; i++) {
        if (recorder->steps[i].exec) cudaGraphExecDestroy(recorder->steps[i].exec);
    }
    if (recorder->side) cudaStreamDestroy(recorder->side);
    free(recorder);
}

/* ---- Shapes ---------------------------------------------------------------------------------- */

static struct step_key key_of(const struct cuda_device *cuda, const struct step_shape *shape) {
    struct step_key key = {};
    key.rows = recorded_rows(cuda, shape->step->rows);
    key.logits = shape->logits ? recorded_rows(cuda, shape->logits) : 0;
    key.blocks = bucket_of(shape->step->blocks_per_slot);
    if (key.blocks < BLOCKS_MIN) key.blocks = BLOCKS_MIN;
    key.arena = shape->arena->data;
    key.is_packed = shape->is_packed;
    key.is_drawn = shape->is_drawn;
    key.is_plain = shape->is_plain;
    return key;
}

static struct recorded *step_find(struct recorder *recorder, const struct step_key *key) {
    for (size_t i = 0; i < recorder->count; i++) {
        const struct step_key *other = &recorder->steps[i].key;
        if (other->rows == key->rows && other->logits == key->logits &&
            other->blocks == key->blocks && other->arena == key->arena &&
            other->is_packed == key->is_packed && other->is_drawn == key->is_drawn &&
            other->is_plain == key->is_plain)
            return &recorder->steps[i];
    }
    return NULL;
}

static void step_note(struct recorder *recorder, const struct step_key *key) {
    struct recorded *step = &recorder->steps[recorder->next];
    if (recorder->count < STEPS_MAX) recorder->count++;
    recorder->next = (recorder->next + 1) % STEPS_MAX;
    if (step->exec) cudaGraphExecDestroy(step->exec);
    step->key = *key;
    step->exec = NULL;
}

static void write_shape(struct cuda_device *cuda, const struct step_rows *step) {
    int32_t ints[SHAPE_INTS];
    ints[SHAPE_ROWS] = (int32_t)step->rows;
    ints[SHAPE_SLOTS] = (int32_t)step->slots;
    ints[SHAPE_BLOCKS] = (int32_t)step->blocks_per_slot;
    cuda_send(cuda, cuda->shape, ints, sizeof ints);
}

/* ---- Recording ------------------------------------------------------------------------------- */

static void turn_off(struct recorder *recorder, cudaError_t status) {
    fprintf(stderr, "fathom: CUDA: steps are not recorded: %s\n", cudaGetErrorString(status));
    cudaGetLastError(); /* handled here */
    recorder->is_off = true;
}

bool cuda_step_begin(struct device *device, const struct step_shape *shape) {
    struct cuda_device *cuda = cuda_of(device);
    struct recorder *recorder = cuda->recorder;
    cuda_flush(cuda);
    bool is_wide = shape->step->rows > NARROW_ROWS;
    if (recorder->is_off || (is_wide && recorder->has_no_branches)) return true;
    struct step_key key = key_of(cuda, shape);
    struct recorded *step = step_find(recorder, &key);
    if (!step) {
        step_note(recorder, &key);
        return true;
    }
    write_shape(cuda, shape->step);
    cuda->packed_of = cuda->known_list = NULL; /* true of the step before */
    if (step->exec) {
        cuda_must(cudaGraphLaunch(step->exec, cuda->stream), "a recorded step");
        return false;
    }
    /* Relaxed: a kernel that is captured first may have to be loaded. */
    cudaError_t status = cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeRelaxed);
    if (status != cudaSuccess) {
        turn_off(recorder, status);
        return true;
    }
    cuda->bucket = key.rows;
    cuda->block_bucket = key.blocks;
    recorder->step = step;
    recorder->is_broken = false;
    recorder->condition.count = 0;
    return true;
}

bool cuda_step_end(struct device *device) {
    struct cuda_device *cuda = cuda_of(device);
    struct recorder *recorder = cuda->recorder;
    cudaGraph_t graph = NULL;
    cuda_flush(cuda);
    if (!cuda->bucket) return true;
    cuda->bucket = 0;
    cuda->packed_of = NULL;
    cudaError_t status = cudaStreamEndCapture(cuda->stream, &graph);
    if (status == cudaSuccess && !recorder->is_broken)
        status = cudaGraphInstantiate(&recorder->step->exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (status != cudaSuccess) {
        recorder->step->exec = NULL;
        turn_off(recorder, status);
        return false;
    }
    if (recorder->is_broken) return false;
    cuda_must(cudaGraphLaunch(recorder->step->exec, cuda->stream), "a recorded step");
    return true;
}

/* ---- Branches -------------------------------------------------------------------------------- */

static cudaError_t capture_at(cudaStream_t stream, cudaGraph_t *graph,
                              const cudaGraphNode_t **after, const cudaGraphEdgeData **edges,
                              size_t *count) {
    cudaStreamCaptureStatus status;
    unsigned long long id;
    return cudaStreamGetCaptureInfo(stream, &status, &id, graph, after, edges, count);
}

/* Without branches, kernels find nothing to do behind an empty list, and products are made. */
static void refuse_branches(struct recorder *recorder) {
    cudaGetLastError(); /* handled here */
    recorder->has_no_branches = true;
}

/* A narrow step has one branch per list. */
void cuda_condition(struct cuda_device *cuda, int rows, struct condition *condition) {
    struct recorder *recorder = cuda->recorder;
    const cudaGraphNode_t *after;
    const cudaGraphEdgeData *edges;
    cudaGraph_t graph;
    size_t count;
    condition->count = 0;
    if (!cuda->bucket || !recorder->step->key.is_packed || recorder->has_no_branches) return;
    cudaError_t status = capture_at(cuda->stream, &graph, &after, &edges, &count);
    if (status == cudaSuccess)
        status = cudaGraphConditionalHandleCreate(&condition->handle, graph, 0, 0);
    if (status != cudaSuccess) {
        if (rows > NARROW_ROWS) recorder->is_broken = true; /* without branches: too much work */
        refuse_branches(recorder);
        return;
    }
    condition->count = rows <= NARROW_ROWS ? 1 : LENGTHS_MAX;
    for (int i = 0; i < condition->count; i++)
        condition->length[i] = (rows * (i + 1) + condition->count - 1) / condition->count;
    recorder->condition = *condition;
}

/* A node behind what was captured so far, with a body for each branch. */
static cudaError_t add_branches(struct recorder *recorder) {
    const struct condition *condition = &recorder->condition;
    const cudaGraphNode_t *after;
    const cudaGraphEdgeData *edges;
    cudaGraph_t graph;
    cudaGraphNode_t node;
    size_t count;
    struct cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = condition->handle;
    params.conditional.type = condition->count == 1 ? cudaGraphCondTypeIf : cudaGraphCondTypeSwitch;
    params.conditional.size = (unsigned)condition->count;
    cudaError_t status = capture_at(recorder->main, &graph, &after, &edges, &count);
    if (status == cudaSuccess)
        status = cudaGraphAddNode(&node, graph, after, edges, count, &params);
    if (status != cudaSuccess) return status;
    for (int i = 0; i < condition->count; i++)
        recorder->bodies[i] = params.conditional.phGraph_out[i];
    return cudaStreamUpdateCaptureDependencies(recorder->main, &node, NULL, 1,
                                               cudaStreamSetCaptureDependencies);
}

/* The side captures what is in the branch. */
static cudaError_t enter_branch(struct recorder *recorder, size_t branch) {
    cudaError_t status = branch == 0 ? add_branches(recorder) : cudaSuccess;
    if (status != cudaSuccess) return status;
    return cudaStreamBeginCaptureToGraph(recorder->side, recorder->bodies[branch], NULL, NULL, 0,
                                         cudaStreamCaptureModeRelaxed);
}

static void issue_on(struct cuda_device *cuda, cudaStream_t stream) {
    cuda->stream = stream;
    blas_set_stream(cuda->blas, stream);
}

/* Rows that were packed in one branch are not in another. */
static void keep_packed(struct cuda_device *cuda, size_t attempt) {
    struct packed_rows *packed = &cuda->recorder->packed;
    if (attempt == 0) {
        packed->of = cuda->packed_of;
        packed->list = cuda->packed_list;
        packed->type = cuda->packed_type;
        packed->rows = cuda->packed_rows;
    } else {
        cuda->packed_of = packed->of;
        cuda->packed_list = packed->list;
        cuda->packed_type = packed->type;
        cuda->packed_rows = packed->rows;
    }
}

bool cuda_branch_begin(struct device *device, const struct row_list *list, size_t attempt) {
    struct cuda_device *cuda = cuda_of(device);
    struct recorder *recorder = cuda->recorder;
    struct condition *condition = &recorder->condition;
    (void)list; /* the one made last */
    if (!cuda->bucket || condition->count == 0) return attempt == 0;
    if (attempt == (size_t)condition->count) {
        condition->count = 0;
        return false;
    }
    cuda_flush(cuda);
    keep_packed(cuda, attempt);
    if (enter_branch(recorder, attempt) != cudaSuccess) {
        recorder->is_broken = true; /* a condition without a branch: once more, without any */
        refuse_branches(recorder);
        condition->count = 0;
        return attempt == 0;
    }
    cuda->branch_rows = (size_t)condition->length[attempt];
    recorder->in_branch = true;
    issue_on(cuda, recorder->side);
    return true;
}

void cuda_branch_end(struct device *device) {
    struct cuda_device *cuda = cuda_of(device);
    struct recorder *recorder = cuda->recorder;
    cudaGraph_t body;
    if (!recorder->in_branch) return;
    cuda_flush(cuda);
    recorder->in_branch = false;
    cuda->branch_rows = 0;
    issue_on(cuda, recorder->main);
    if (cudaStreamEndCapture(recorder->side, &body) != cudaSuccess) {
        recorder->is_broken = true;
        refuse_branches(recorder);
    }
}
