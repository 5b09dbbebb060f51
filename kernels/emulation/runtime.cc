/* The part of the CUDA runtime that kernels/cuda uses. Everything is done when its call returns,
 * but for what a captured stream puts into a graph. */
#include "kernels/emulation/emulation.h"
#include "kernels/emulation/fault.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <sys/mman.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(memory, bytes)   ASAN_POISON_MEMORY_REGION(memory, bytes)
#define UNPOISON(memory, bytes) ASAN_UNPOISON_MEMORY_REGION(memory, bytes)
#define GUARDS_ARE_READABLE     0
#else
#define POISON(memory, bytes)   ((void)0)
#define UNPOISON(memory, bytes) ((void)0)
#define GUARDS_ARE_READABLE     1
#endif

/* ---- Faults ---------------------------------------------------------------------------------- */

static void (*fault_handler)(const char *message);

void emulation_fault(const char *message) {
    if (fault_handler) {
        fault_handler(message);
        return;
    }
    fprintf(stderr, "emulation: %s\n", message);
    abort();
}

extern "C" void emulation_set_fault_handler(void (*handler)(const char *message)) {
    fault_handler = handler;
}

/* ---- Two devices, of which each thread has one ----------------------------------------------- */

static const int DEVICES = 2;
static thread_local int current_device;
static int stream_counts[DEVICES];

cudaError_t cudaGetDeviceCount(int *count) {
    *count = DEVICES;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= DEVICES) return cudaErrorInvalidValue;
    current_device = device;
    return cudaSuccess;
}

/* ---- Memory: guards before and after, not-a-number inside ------------------------------------ */

static const size_t GUARD = 256;
static const unsigned char GUARD_BYTE = 0xa5;
static std::map<unsigned char *, size_t> allocations;

/* Large ones are pages that cost nothing until they are used, and zero as they come. */
static const size_t LARGE = (size_t)1 << 20;

static size_t whole_bytes(size_t bytes) {
    return (bytes + 2 * GUARD + GUARD - 1) / GUARD * GUARD;
}

static unsigned char *map_create(size_t whole) {
    if (whole < LARGE) return (unsigned char *)aligned_alloc(GUARD, whole);
    void *map = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return map == MAP_FAILED ? NULL : (unsigned char *)map;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    if (stream_counts[current_device] == 0)
        emulation_fault("memory is taken on a device without a stream");
    if (bytes > (size_t)1 << 40) return cudaErrorMemoryAllocation;
    size_t whole = whole_bytes(bytes);
    unsigned char *map = map_create(whole);
    if (!map) return cudaErrorMemoryAllocation;
    memset(map, GUARD_BYTE, GUARD);
    memset(map + GUARD + bytes, GUARD_BYTE, whole - GUARD - bytes);
    if (whole < LARGE) memset(map + GUARD, 0xff, bytes);
    allocations[map + GUARD] = bytes;
    POISON(map, GUARD);
    POISON(map + GUARD + bytes, whole - GUARD - bytes);
    *memory = map + GUARD;
    return cudaSuccess;
}

static bool is_damaged(const unsigned char *data, size_t bytes) {
    for (size_t i = 0; GUARDS_ARE_READABLE && i < GUARD; i++) {
        if (data[i - GUARD] != GUARD_BYTE || data[bytes + i] != GUARD_BYTE) return true;
    }
    return false;
}

extern "C" size_t emulation_check_memory(void) {
    size_t damaged = 0;
    for (const auto &allocation : allocations) {
        damaged += is_damaged(allocation.first, allocation.second);
    }
    return damaged;
}

cudaError_t cudaFree(void *memory) {
    if (!memory) return cudaSuccess;
    auto found = allocations.find((unsigned char *)memory);
    if (found == allocations.end()) return cudaErrorInvalidValue;
    if (is_damaged(found->first, found->second)) {
        emulation_fault("something was written outside of an allocation");
    }
    size_t whole = whole_bytes(found->second);
    UNPOISON(found->first - GUARD, whole);
    if (whole < LARGE)
        free(found->first - GUARD);
    else
        munmap(found->first - GUARD, whole);
    allocations.erase(found);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **memory, size_t bytes) {
    *memory = malloc(bytes);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *memory) {
    free(memory);
    return cudaSuccess;
}

/* ---- What a device is ------------------------------------------------------------------------ */

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "emulated error";
}
cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    *properties = {};
    snprintf(properties->name, sizeof properties->name, "emulation");
    properties->major = 9;
    properties->multiProcessorCount = 4;
    properties->sharedMemPerBlockOptin = (size_t)227 << 10;
    const char *seed = getenv("FATHOM_EMULATION_SCHEDULE");
    if (seed) emulation_set_schedule(strtoull(seed, NULL, 10));
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = *total = (size_t)3 << 30;
    return cudaSuccess;
}

/* ---- Streams and graphs ---------------------------------------------------------------------- */

static const int32_t NOT_SET = -1;

/* A list of work. A branch is a list of its own, behind a condition that the work before it sets
 * anew in every run. */
struct emulation_branch;
struct emulation_graph {
    std::vector<std::function<void()>> work;
    std::vector<std::shared_ptr<int32_t>> conditions;
    std::vector<std::shared_ptr<emulation_branch>> branches;
    bool has_loose_node = false; /* added, but nothing was ordered behind it yet */
};
struct emulation_branch {
    std::vector<emulation_graph> bodies; /* one, or those that a switch chooses from */
    std::vector<cudaGraph_t> addresses;  /* of them, for whom the params point to them */
};
struct emulation_stream {
    std::shared_ptr<emulation_graph> own; /* what its capture makes */
    emulation_graph *capturing = nullptr; /* that, or somebody's branch */
    int device = current_device;
};

static enum emulation_lack lack;

extern "C" void emulation_set_lack(enum emulation_lack value) {
    lack = value;
}

static void graph_run(const emulation_graph &graph) {
    for (const auto &condition : graph.conditions) *condition = NOT_SET;
    for (const auto &work : graph.work) work();
}

void emulation_issue(cudaStream_t stream, std::function<void()> work) {
    if (stream->device != current_device)
        emulation_fault("a thread gives work to a stream of another device than its own");
    if (!stream->capturing) {
        work();
        return;
    }
    if (stream->capturing->has_loose_node)
        emulation_fault("work is captured that is not ordered behind the node before it");
    stream->capturing->work.push_back(std::move(work));
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = new emulation_stream;
    stream_counts[current_device]++;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    stream_counts[stream->device]--;
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (stream->capturing) emulation_fault("a captured stream cannot be waited for");
    if (emulation_check_memory()) emulation_fault("something was written outside of an allocation");
    emulation_count_wait();
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    if (whole_bytes(bytes) < LARGE || value != 0) memset(to, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    emulation_issue(stream, [=] { memset(to, value, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    emulation_issue(stream, [=] {
        if (kind == cudaMemcpyDeviceToHost) emulation_count_copy(bytes);
        memcpy(to, from, bytes);
    });
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
    if (width > to_pitch || width > from_pitch) return cudaErrorInvalidValue;
    emulation_issue(stream, [=] {
        if (kind == cudaMemcpyDeviceToHost) emulation_count_copy(width * height);
        for (size_t i = 0; i < height; i++) {
            memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
        }
    });
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (stream->capturing) return cudaErrorInvalidValue;
    stream->own = std::make_shared<emulation_graph>();
    stream->capturing = stream->own.get();
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t *, const cudaGraphEdgeData *,
                                          size_t, cudaStreamCaptureMode) {
    if (stream->capturing || !graph) return cudaErrorInvalidValue;
    stream->capturing = graph;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (!stream->capturing) return cudaErrorInvalidValue;
    *graph = stream->own ? new emulation_graph(*stream->own) : stream->capturing;
    stream->own.reset();
    stream->capturing = nullptr;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                     unsigned long long *, cudaGraph_t *graph,
                                     const cudaGraphNode_t **after, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    *graph = stream->capturing;
    *after = NULL;
    *edges = NULL;
    *count = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *,
                                                const cudaGraphEdgeData *, size_t, unsigned) {
    stream->capturing->has_loose_node = false;
    return cudaSuccess;
}

cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle *handle, cudaGraph_t graph,
                                             unsigned, unsigned) {
    if (lack == LACKS_BRANCHES) return cudaErrorInvalidValue;
    graph->conditions.push_back(std::make_shared<int32_t>(NOT_SET));
    *handle = graph->conditions.back().get();
    return cudaSuccess;
}
void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned value) {
    *handle = (int32_t)value;
}
cudaError_t cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *,
                             const cudaGraphEdgeData *, size_t, cudaGraphNodeParams *params) {
    std::shared_ptr<emulation_branch> branch = std::make_shared<emulation_branch>();
    int32_t *condition = params->conditional.handle;
    bool is_switch = params->conditional.type == cudaGraphCondTypeSwitch;
    if (params->conditional.size < 1 || (!is_switch && params->conditional.size != 1))
        return cudaErrorInvalidValue;
    branch->bodies.resize(params->conditional.size);
    for (emulation_graph &body : branch->bodies) branch->addresses.push_back(&body);
    params->conditional.phGraph_out = branch->addresses.data();
    graph->branches.push_back(branch);
    graph->work.push_back([=] {
        if (*condition == NOT_SET) emulation_fault("a branch whose condition nobody set");
        size_t chosen = (size_t)(is_switch ? *condition : *condition ? 0 : 1);
        if (chosen < branch->bodies.size()) graph_run(branch->bodies[chosen]);
    });
    graph->has_loose_node = true;
    *node = branch.get();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    if (lack == LACKS_GRAPHS || graph->conditions.size() != graph->branches.size())
        return cudaErrorInvalidValue;
    *exec = new emulation_graph(*graph);
    emulation_count_record();
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    emulation_count_graph();
    emulation_issue(stream, [=] { graph_run(*exec); });
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}
