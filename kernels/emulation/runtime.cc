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

/* ---- The device ------------------------------------------------------------------------------ */

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "emulated error";
}
cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
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
    *free_bytes = *total = (size_t)1 << 30;
    return cudaSuccess;
}

/* ---- Streams and graphs ---------------------------------------------------------------------- */

/* A list of work; a branch is a list of its own that runs if its count is above zero. */
struct emulation_graph {
    std::vector<std::function<void()>> work;
};
struct emulation_stream {
    std::vector<std::shared_ptr<emulation_graph>> capturing; /* the graph, and open branches */
    std::vector<const int32_t *> counts;                     /* of the branches */
};

static void graph_run(const emulation_graph &graph) {
    for (const auto &work : graph.work) work();
}

void emulation_issue(cudaStream_t stream, std::function<void()> work) {
    if (stream->capturing.empty())
        work();
    else
        stream->capturing.back()->work.push_back(std::move(work));
}

void emulation_branch_begin(cudaStream_t stream, const int32_t *count) {
    stream->counts.push_back(count);
    stream->capturing.push_back(std::make_shared<emulation_graph>());
}

void emulation_branch_end(cudaStream_t stream) {
    std::shared_ptr<emulation_graph> branch = stream->capturing.back();
    const int32_t *count = stream->counts.back();
    stream->capturing.pop_back();
    stream->counts.pop_back();
    emulation_issue(stream, [=] {
        if (*count > 0) graph_run(*branch);
    });
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = new emulation_stream;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (!stream->capturing.empty()) emulation_fault("a captured stream cannot be waited for");
    if (emulation_check_memory()) emulation_fault("something was written outside of an allocation");
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
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
    emulation_issue(stream, [=] { memcpy(to, from, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
    emulation_issue(stream, [=] {
        for (size_t i = 0; i < height; i++) {
            memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
        }
    });
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream->capturing.empty()) return cudaErrorInvalidValue;
    stream->capturing.push_back(std::make_shared<emulation_graph>());
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (stream->capturing.size() != 1) return cudaErrorInvalidValue;
    *graph = new emulation_graph(*stream->capturing.back());
    stream->capturing.clear();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    *exec = new emulation_graph(*graph);
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
