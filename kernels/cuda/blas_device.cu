/* Matrix products by cuBLASLt. An algorithm is chosen once per shape and bucket of rows, without
 * splitting the inner dimension: a sum is made by one block, and a product is one launch. */
#include "kernels/cuda/blas.h"

#include <cublasLt.h>

#include <stdio.h>
#include <stdlib.h>

#define PLANS_MAX       1024
#define WORKSPACE_BYTES ((size_t)32 << 20)

struct plan {
    size_t out, in, bucket;
    enum dtype type, y_type;
    bool is_pair;
    cublasLtMatmulAlgo_t algorithm;
};

struct blas {
    cudaStream_t stream;
    cublasLtHandle_t handle;
    void *workspace;
    struct plan plans[PLANS_MAX];
    size_t plan_count;
};

int blas_open(cudaStream_t stream, struct blas **blas, struct error *error) {
    struct blas *made = (struct blas *)calloc(1, sizeof *made);
    if (!made) return error_set(error, FATHOM_NO_MEMORY, "no memory for cuBLASLt");
    made->stream = stream;
    *blas = made;
    cublasStatus_t status = cublasLtCreate(&made->handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return error_set(error, FATHOM_UNSUPPORTED, "cuBLASLt: %s",
                         cublasLtGetStatusString(status));
    }
    if (cudaMalloc(&made->workspace, WORKSPACE_BYTES) != cudaSuccess) {
        return error_set(error, FATHOM_NO_MEMORY, "no device memory for cuBLASLt");
    }
    return FATHOM_OK;
}

void blas_close(struct blas *blas) {
    if (!blas) return;
    if (blas->handle) cublasLtDestroy(blas->handle);
    cudaFree(blas->workspace);
    free(blas);
}

void blas_set_stream(struct blas *blas, cudaStream_t stream) {
    blas->stream = stream;
}

static void must(cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fprintf(stderr, "fathom: cuBLASLt: %s: %s\n", what, cublasLtGetStatusString(status));
    abort();
}

/* cuBLASLt is column-major: it is asked for Y^T = W X^T. Two products are a batch of two, whose
 * matrices may lie anywhere: the distance between them is the stride, and x has a stride of
 * zero. */
struct layouts {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t w, x, y;
};

static cudaDataType_t type_of(enum dtype type) {
    return type == DTYPE_F32 ? CUDA_R_32F : type == DTYPE_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

static void layout_init(cublasLtMatrixLayoutOpaque_t *layout, enum dtype type, size_t rows,
                        size_t columns, int batch, int64_t stride) {
    must(cublasLtMatrixLayoutInit(layout, type_of(type), rows, columns, (int64_t)rows), "layout");
    must(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                          sizeof batch),
         "batch");
    must(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                          &stride, sizeof stride),
         "stride");
}

static int64_t distance(const void *from, const void *to, enum dtype type) {
    if (!to) return 0;
    return ((const char *)to - (const char *)from) / (int64_t)dtype_size(type);
}

static void layouts_init(struct layouts *layouts, const struct product *product, size_t rows) {
    int batch = product->second_w ? 2 : 1;
    cublasOperation_t transposed = CUBLAS_OP_T;
    must(cublasLtMatmulDescInit(&layouts->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "operation");
    must(cublasLtMatmulDescSetAttribute(&layouts->operation, CUBLASLT_MATMUL_DESC_TRANSA,
                                        &transposed, sizeof transposed),
         "transposition");
    layout_init(&layouts->w, product->type, product->in, product->out, batch,
                distance(product->w, product->second_w, product->type));
    layout_init(&layouts->x, product->type, product->in, rows, batch, 0);
    layout_init(&layouts->y, product->y_type, product->out, rows, batch,
                distance(product->y, product->second_y, product->y_type));
}

static bool is_same(const struct plan *plan, const struct product *product) {
    return plan->out == product->out && plan->in == product->in &&
           plan->bucket == product->bucket && plan->type == product->type &&
           plan->y_type == product->y_type && plan->is_pair == (product->second_w != NULL);
}

static const struct plan *plan_find(struct blas *blas, const struct product *product) {
    for (size_t i = 0; i < blas->plan_count; i++) {
        if (is_same(&blas->plans[i], product)) return &blas->plans[i];
    }
    if (blas->plan_count == PLANS_MAX) blas->plan_count = 0; /* chosen anew: the same again */
    struct layouts layouts;
    layouts_init(&layouts, product, product->bucket);
    cublasLtMatmulPreferenceOpaque_t preference;
    must(cublasLtMatmulPreferenceInit(&preference), "preference");
    size_t workspace = WORKSPACE_BYTES;
    uint32_t no_split = CUBLASLT_REDUCTION_SCHEME_NONE;
    must(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                              &workspace, sizeof workspace),
         "workspace");
    must(cublasLtMatmulPreferenceSetAttribute(
             &preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &no_split, sizeof no_split),
         "reduction");
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    must(cublasLtMatmulAlgoGetHeuristic(blas->handle, &layouts.operation, &layouts.w, &layouts.x,
                                        &layouts.y, &layouts.y, &preference, 1, &result, &found),
         "choice of an algorithm");
    if (found == 0) must(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm");
    struct plan *plan = &blas->plans[blas->plan_count++];
    plan->out = product->out;
    plan->in = product->in;
    plan->bucket = product->bucket;
    plan->type = product->type;
    plan->y_type = product->y_type;
    plan->is_pair = product->second_w != NULL;
    plan->algorithm = result.algo;
    return plan;
}

void blas_multiply(struct blas *blas, const struct product *product) {
    const struct plan *plan = plan_find(blas, product);
    struct layouts layouts;
    float one = 1, zero = 0;
    layouts_init(&layouts, product, product->rows);
    must(cublasLtMatmul(blas->handle, &layouts.operation, &one, product->w, &layouts.w, product->x,
                        &layouts.x, &zero, product->y, &layouts.y, product->y, &layouts.y,
                        &plan->algorithm, blas->workspace, WORKSPACE_BYTES, blas->stream),
         "product");
}
