/* What the emulation promises to find: it must, or the tests over it prove nothing. */
#include "kernels/emulation/emulation.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

static char fault[256];

/* The first: others may follow from it. */
static void note_fault(const char *message) {
    if (!fault[0]) snprintf(fault, sizeof fault, "%s", message);
}

static void check(bool is_so, const char *what) {
    if (is_so) return;
    fprintf(stderr, "not so: %s (last fault: \"%s\")\n", what, fault);
    exit(1);
}

static void check_fault(const char *says, const char *what) {
    check(strstr(fault, says) != NULL, what);
    fault[0] = '\0';
}

template <typename T> static T *device_array(size_t count) {
    void *memory = NULL;
    check(cudaMalloc(&memory, count * sizeof(T)) == cudaSuccess, "memory is allocated");
    return (T *)memory;
}

/* ---- Right kernels --------------------------------------------------------------------------- */

static void shuffle_kernel(int *sums, unsigned *votes) {
    int lane = (int)threadIdx.x % 32, sum = (int)threadIdx.x;
    for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bits);
    sums[threadIdx.x] = sum + __shfl_sync(0xffffffff, lane, 3);
    votes[threadIdx.x] = __ballot_sync(0xffffffff, threadIdx.x % 3 == 0);
}

static void check_warps(cudaStream_t stream) {
    int *sums = device_array<int>(64);
    unsigned *votes = device_array<unsigned>(64), expected[2] = {0, 0};
    LAUNCH(shuffle_kernel, dim3(1), dim3(64), 0, stream, sums, votes);
    for (unsigned t = 0; t < 64; t += 3) expected[t / 32] |= 1u << t % 32;
    for (int t = 0; t < 64; t++) {
        check(sums[t] == (t < 32 ? 496 : 496 + 1024) + 3, "shuffles move what lanes gave");
        check(votes[t] == expected[t / 32], "a vote has a bit for each lane");
    }
    cudaFree(sums);
    cudaFree(votes);
}

static void reverse_kernel(int *out, bool with_barrier) {
    SHARED_MEMORY(memory);
    int *shared = (int *)memory, t = (int)threadIdx.x, last = (int)blockDim.x - 1;
    shared[t] = t;
    if (with_barrier) __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = shared[last - t];
}

static bool is_reversed(cudaStream_t stream, int *out, bool with_barrier) {
    LAUNCH(reverse_kernel, dim3(3), dim3(128), 128 * sizeof(int), stream, out, with_barrier);
    for (int i = 0; i < 3 * 128; i++) {
        if (out[i] != 127 - i % 128) return false;
    }
    return true;
}

static void count_kernel(int *count) {
    atomicAdd(count, 1);
    COUNT_BYTES(4);
}

static void condition_kernel(cudaGraphConditionalHandle handle, const int *value, bool sets) {
    if (threadIdx.x == 0 && sets) cudaGraphSetConditional(handle, (unsigned)*value);
}

/* Counts once, then twice more in a branch that is taken if *value. */
static cudaGraphExec_t capture_branch(cudaStream_t stream, cudaStream_t side, int *count,
                                      const int *value, bool sets) {
    cudaStreamCaptureStatus status;
    unsigned long long id;
    cudaGraph_t graph, body;
    cudaGraphExec_t exec;
    const cudaGraphNode_t *after;
    const cudaGraphEdgeData *edges;
    size_t edge_count;
    cudaGraphNode_t node;
    cudaGraphNodeParams params = {};
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
    LAUNCH(count_kernel, dim3(1), dim3(32), 0, stream, count);
    cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &after, &edges, &edge_count);
    check(status == cudaStreamCaptureStatusActive, "a stream says that it is captured");
    cudaGraphConditionalHandleCreate(&params.conditional.handle, graph, 0, 0);
    LAUNCH(condition_kernel, dim3(1), dim3(32), 0, stream, params.conditional.handle, value, sets);
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.type = cudaGraphCondTypeIf;
    params.conditional.size = 1;
    cudaGraphAddNode(&node, graph, after, edges, edge_count, &params);
    cudaStreamUpdateCaptureDependencies(stream, &node, NULL, 1, cudaStreamSetCaptureDependencies);
    cudaStreamBeginCaptureToGraph(side, params.conditional.phGraph_out[0], NULL, NULL, 0,
                                  cudaStreamCaptureModeRelaxed);
    LAUNCH(count_kernel, dim3(2), dim3(32), 0, side, count);
    cudaStreamEndCapture(side, &body);
    check(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "a capture ends");
    check(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "a graph can be run");
    cudaGraphDestroy(graph);
    return exec;
}

/* A graph runs later what was issued while its stream was captured, and a branch if it should. */
static void check_graphs(cudaStream_t stream) {
    int *count = device_array<int>(1), *value = device_array<int>(1);
    cudaStream_t side;
    cudaStreamCreate(&side);
    *count = *value = 0;
    cudaGraphExec_t exec = capture_branch(stream, side, count, value, true);
    check(*count == 0, "nothing runs yet");
    emulation_clear_counters();
    cudaGraphLaunch(exec, stream);
    check(*count == 32, "a graph runs, without its branch");
    *value = 1;
    cudaGraphLaunch(exec, stream);
    check(*count == 32 + 96, "a graph runs, with its branch");
    cudaStreamSynchronize(stream);
    cudaMemcpyAsync(value, count, sizeof *value, cudaMemcpyDeviceToHost, stream);
    emulation_counters counters = emulation_get_counters();
    check(counters.graphs == 2 && counters.launches == 5 && counters.bytes == 4 * 128, "counters");
    check(counters.waits == 1 && counters.copies == 1 && counters.copied == sizeof *value,
          "counters of the host");
    cudaGraphExecDestroy(exec);
    exec = capture_branch(stream, side, count, value, false);
    cudaGraphLaunch(exec, stream);
    check_fault("condition", "a condition that nobody sets is found");
    cudaGraphExecDestroy(exec);
    cudaStreamDestroy(side);
    cudaFree(count);
    cudaFree(value);
}

/* ---- Wrong ones ------------------------------------------------------------------------------ */

static void absent_kernel(int *) {
    if (threadIdx.x < 40) __syncthreads();
}

static void masked_kernel(int *) {
    if (threadIdx.x < 16) __shfl_sync(0x0000ffff, 1, 0);
}

static void overflow_kernel(int *out, int at) {
    if (threadIdx.x == 0) out[at] = 1;
}

static void shared_overflow_kernel(int *) {
    SHARED_MEMORY(memory);
    if (threadIdx.x == 0) memory[64] = 1;
}

static void check_faults(cudaStream_t stream) {
    int *out = device_array<int>(4);
    LAUNCH(absent_kernel, dim3(1), dim3(64), 0, stream, out);
    check_fault("absent_kernel", "a barrier that some threads miss is found");
    LAUNCH(masked_kernel, dim3(1), dim3(32), 0, stream, out);
    check_fault("without all lanes", "a shuffle of half a warp is found");
    LAUNCH(shared_overflow_kernel, dim3(1), dim3(32), 64, stream, out);
    check_fault("shared memory", "a write behind shared memory is found");
    check(out[0] == -1, "memory is noise until it is written");
    LAUNCH(overflow_kernel, dim3(1), dim3(32), 0, stream, out, 3);
    check(emulation_check_memory() == 0, "writing the last element is right");
#if !defined(__SANITIZE_ADDRESS__) /* which stops the program at once */
    LAUNCH(overflow_kernel, dim3(1), dim3(32), 0, stream, out, 4);
    check(emulation_check_memory() == 1, "a write behind an allocation is found");
    cudaStreamSynchronize(stream);
    check_fault("outside of an allocation", "and reported");
#endif
    cudaFree(out);
}

/* A thread works on the device that it has chosen, and on no other. */
static void check_devices(cudaStream_t stream) {
    int *count = device_array<int>(1);
    check(cudaSetDevice(2) != cudaSuccess, "there are two devices");
    check(cudaSetDevice(1) == cudaSuccess, "the second can be chosen");
    int *other = device_array<int>(1);
    check_fault("without a stream", "memory of a device that nobody uses is found");
    LAUNCH(count_kernel, dim3(1), dim3(32), 0, stream, count);
    check_fault("another device", "work on another device is found");
    cudaSetDevice(0);
    cudaFree(other);
    cudaFree(count);
}

int main() {
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    emulation_set_fault_handler(note_fault);
    int *out = device_array<int>(3 * 128);
    bool always_right = true;
    for (uint64_t seed = 0; seed < 20; seed++) {
        emulation_set_schedule(seed);
        check_warps(stream);
        check(is_reversed(stream, out, true), "a barrier holds under every schedule");
        always_right = always_right && is_reversed(stream, out, false);
    }
    check(!always_right, "a missing barrier shows");
    cudaFree(out);
    check_graphs(stream);
    check_devices(stream);
    check_faults(stream);
    cudaStreamDestroy(stream);
    return 0;
}
