/* The words of CUDA for a C++ compiler: the .cu files of kernels/cuda compile against this header
 * and run on the CPU, for tests. What it is for is in README.md.
 *
 * A launch runs its blocks one after another; the threads of a block are fibers that switch at
 * barriers, shuffles and votes only. The order of blocks, of warps and of lanes is drawn from a
 * seed, anew in every round, so that what depends on it shows. */
#ifndef FATHOM_EMULATION_H
#define FATHOM_EMULATION_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

extern "C" {
#include "kernels/number.h"
}

/* ---- Words ----------------------------------------------------------------------------------- */

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __shared__          static /* one block runs at a time */
#define __align__(n)        alignas(n)
#define SHARED_MEMORY(name) unsigned char *const name = emulation_shared_memory()
#define UNROLL
#define DEVICE_NOW_NS()     emulation_now_ns()
#define COUNT_BYTES(bytes)  emulation_count_bytes(bytes)
#define LAUNCH(kernel, ...) emulation_launch(#kernel, kernel, __VA_ARGS__)

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

/* ---- Numbers --------------------------------------------------------------------------------- */

struct __nv_bfloat16 {
    uint16_t bits;
};

static inline float __bfloat162float(__nv_bfloat16 value) {
    return number_from_bf16(value.bits);
}

static inline __nv_bfloat16 __float2bfloat16(float value) {
    return {number_to_bf16(value)};
}

static inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) {
    return value.bits;
}

struct __half {
    uint16_t bits;
};

static inline __half __float2half(float value) {
    return {number_to_f16(value)};
}
static inline uint16_t __half_as_ushort(__half value) {
    return value.bits;
}

/* Rounded one by one: never fused. */
static inline float __fmul_rn(float a, float b) {
    return a * b;
}
static inline float __fadd_rn(float a, float b) {
    return a + b;
}

/* sum + the product of four bytes with four. */
static inline int __dp4a(int a, int b, int sum) {
    for (int shift = 0; shift < 32; shift += 8)
        sum += (int)(int8_t)((unsigned)a >> shift) * (int8_t)((unsigned)b >> shift);
    return sum;
}

template <typename T> static inline T __ldcg(const T *at) {
    return *at;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- Threads of a block ---------------------------------------------------------------------- */

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffff);
static inline void __threadfence() {}

/* Leaves `value` with the warp and returns what `lane` left. All 32 lanes must come. */
uint64_t emulation_exchange(unsigned mask, uint64_t value, int lane);
/* The same value for all lanes: one bit for each lane whose predicate holds. */
unsigned __ballot_sync(unsigned mask, int predicate);
int emulation_lane();

template <typename T> T emulation_shuffle(unsigned mask, T value, int lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most eight bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulation_exchange(mask, bits, lane);
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <typename T> T __shfl_sync(unsigned mask, T value, int lane) {
    return emulation_shuffle(mask, value, lane & 31);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return emulation_shuffle(mask, value, emulation_lane() ^ bits);
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
    int lane = emulation_lane(), from = lane - (int)distance;
    return emulation_shuffle(mask, value, from < 0 ? lane : from);
}
static inline int __any_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) != 0;
}
static inline int __all_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, !predicate) == 0;
}

/* Fibers switch at barriers only: a plain update is atomic. */
template <typename T> T atomicAdd(T *at, T value) {
    T old = *at;
    *at = old + value;
    return old;
}
template <typename T> T atomicMax(T *at, T value) {
    T old = *at;
    if (value > old) *at = value;
    return old;
}
template <typename T> T atomicExch(T *at, T value) {
    T old = *at;
    *at = value;
    return old;
}

/* Tiles of 16 x 16 x 16 for tensor cores. A lane holds eight consecutive elements. */
namespace nvcuda {
namespace wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {
    enum { by_row = 1 };
};
struct col_major {
    enum { by_row = 0 };
};
enum layout_t { mem_row_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = row_major>
struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "one shape is emulated");
    float element[8]; /* of the tile in rows: lane * 8 + i */
};

static inline float value_of(float x) {
    return x;
}
static inline float value_of(__nv_bfloat16 x) {
    return __bfloat162float(x);
}

template <typename Use, typename T, typename Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout> &tile, const T *from, unsigned stride) {
    for (int i = 0; i < 8; i++) {
        int at = emulation_lane() * 8 + i, row = at / 16, column = at % 16;
        tile.element[i] =
            value_of(Layout::by_row ? from[row * stride + column] : from[column * stride + row]);
    }
    __syncwarp();
}
static inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, float> &tile,
                                    const float *from, unsigned stride, layout_t) {
    load_matrix_sync(tile, from, stride);
}
static inline void store_matrix_sync(float *to,
                                     const fragment<accumulator, 16, 16, 16, float> &tile,
                                     unsigned stride, layout_t) {
    for (int i = 0; i < 8; i++) {
        int at = emulation_lane() * 8 + i;
        to[at / 16 * stride + at % 16] = tile.element[i];
    }
    __syncwarp();
}
static inline void fill_fragment(fragment<accumulator, 16, 16, 16, float> &tile, float value) {
    for (float &element : tile.element) element = value;
}

/* The tiles of all lanes, gathered: [16][16] each. */
void emulation_gather(const float *a, const float *b, const float **whole_a, const float **whole_b);

template <typename T, typename LayoutA, typename LayoutB>
void mma_sync(fragment<accumulator, 16, 16, 16, float> &out,
              const fragment<matrix_a, 16, 16, 16, T, LayoutA> &a,
              const fragment<matrix_b, 16, 16, 16, T, LayoutB> &b,
              const fragment<accumulator, 16, 16, 16, float> &sum) {
    const float *whole_a, *whole_b;
    emulation_gather(a.element, b.element, &whole_a, &whole_b);
    for (int i = 0; i < 8; i++) {
        int at = emulation_lane() * 8 + i, row = at / 16, column = at % 16;
        float total = sum.element[i];
        for (int k = 0; k < 16; k++) total += whole_a[row * 16 + k] * whole_b[k * 16 + column];
        out.element[i] = total;
    }
    __syncwarp();
}
} // namespace wmma
} // namespace nvcuda

/* ---- Launches, memory, streams, graphs ------------------------------------------------------- */

enum cudaError_t {
    cudaSuccess,
    cudaErrorMemoryAllocation,
    cudaErrorInvalidValue,
    cudaErrorNoDevice
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaGraphNodeType { cudaGraphNodeTypeConditional };
enum cudaGraphConditionalNodeType { cudaGraphCondTypeIf, cudaGraphCondTypeSwitch = 2 };
enum { cudaStreamSetCaptureDependencies = 1 };

/* What was issued while a stream was captured. */
struct emulation_graph;
struct emulation_stream;
typedef emulation_stream *cudaStream_t;
typedef emulation_graph *cudaGraph_t;
typedef emulation_graph *cudaGraphExec_t;
typedef const void *cudaGraphNode_t;
typedef int32_t *cudaGraphConditionalHandle;

struct cudaGraphEdgeData {};
struct cudaConditionalNodeParams {
    cudaGraphConditionalHandle handle;
    cudaGraphConditionalNodeType type;
    unsigned size;
    cudaGraph_t *phGraph_out; /* [size] of the graph's own memory */
};
struct cudaGraphNodeParams {
    cudaGraphNodeType type;
    cudaConditionalNodeParams conditional;
};

struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
    size_t sharedMemPerBlockOptin;
};

const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
cudaError_t cudaMalloc(void **memory, size_t bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaMallocHost(void **memory, size_t bytes);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t *after, const cudaGraphEdgeData *,
                                          size_t count, cudaStreamCaptureMode mode);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **after, const cudaGraphEdgeData **edges,
                                     size_t *count);
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *after,
                                                const cudaGraphEdgeData *, size_t count,
                                                unsigned flags);
cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle *handle, cudaGraph_t graph,
                                             unsigned value, unsigned flags);
cudaError_t cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                             const cudaGraphEdgeData *, size_t count, cudaGraphNodeParams *params);
void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned value);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

template <typename Kernel> cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
    return cudaSuccess;
}

unsigned char *emulation_shared_memory();
void emulation_count_bytes(size_t bytes);
/* Runs `work` now, or adds it to the graph that the stream is captured into. */
void emulation_issue(cudaStream_t stream, std::function<void()> work);
void emulation_run_grid(const char *name, const std::function<void()> &thread, dim3 grid,
                        dim3 block, size_t shared);

/* Arguments are copied at launch, as CUDA does. */
template <typename... P, typename... A>
void emulation_launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                      cudaStream_t stream, A... arguments) {
    std::tuple<P...> copy(arguments...);
    emulation_issue(stream, [=] {
        emulation_run_grid(
            name, [&] { std::apply(kernel, copy); }, grid, block, shared);
    });
}

/* ---- For tests ------------------------------------------------------------------------------- */

struct emulation_counters {
    size_t launches; /* kernels, one per product included */
    size_t products; /* matrix products */
    size_t bytes;    /* of device memory that kernels say they read or wrote */
    size_t graphs;   /* graphs launched */
    size_t waits;    /* of the host for a stream */
    size_t copies;   /* to the host */
    size_t copied;   /* their bytes */
};
/* A device whose time is a matter of counting. */
struct emulation_clock {
    double launch_ns, byte_ns;
    double record_ns; /* of making a graph */
};
/* What a driver may lack. */
enum emulation_lack { LACKS_NOTHING, LACKS_GRAPHS, LACKS_BRANCHES };

extern "C" {
/* Another order of blocks, warps and lanes; 0: ascending. */
void emulation_set_schedule(uint64_t seed);
struct emulation_counters emulation_get_counters(void);
void emulation_clear_counters(void);
void emulation_set_lack(enum emulation_lack lack);
/* NULL: the host's own. */
void emulation_set_clock(const struct emulation_clock *clock);
uint64_t emulation_now_ns(void);
/* What to do about a damaged guard or a deadlock. NULL: print and abort. */
void emulation_set_fault_handler(void (*handler)(const char *message));
/* Checks the guard bytes around all allocations; returns how many are damaged. */
size_t emulation_check_memory(void);
}

#endif
