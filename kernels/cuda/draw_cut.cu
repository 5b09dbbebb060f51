/* Where top_k and top_p cut a row: found without a sort.
 *
 * Candidates are ordered by the bits of their logit. The cut's bits are found in three digits, from
 * the first: candidates that share the digits known so far are counted and weighed by their next
 * one, and the digit is that at which enough are together. Counts and weights are whole numbers:
 * adding them up in any order gives the same. */
#include "kernels/cuda/draw.h"

#define PASSES     3
#define OWN_DIGITS (DRAW_DIGITS / THREADS) /* of a thread */
#define TIES_ALL   0xffffffffu

static __device__ __forceinline__ int shift_of(int pass) {
    return pass == 0 ? 21 : pass == 1 ? 10 : 0;
}
static __device__ __forceinline__ int bits_of(int pass) {
    return pass == 2 ? 10 : 11;
}

/* Weights of 41 bits, in halves: what is added is added to 32 bits, and may carry once. */
static __device__ __forceinline__ void add_weight(unsigned *low, unsigned *high, uint64_t weight) {
    unsigned part = (unsigned)weight, up = (unsigned)(weight >> 32);
    if (part && atomicAdd(low, part) > 0xffffffffu - part) up++;
    if (up) atomicAdd(high, up);
}

/* One of the last pass: the digit is chosen, and with it the whole key. */
static __device__ __forceinline__ void end_search(struct draw_cut *cut, int which, uint64_t weight,
                                                  unsigned count) {
    uint64_t each = weight / count;
    cut->ties = (uint32_t)(which == CUT_TOP_K ? cut->rest : (cut->rest + each - 1) / each);
    cut->weight += cut->ties * each;
}

/* The last block of a row: which digit is next? */
static __device__ void choose_digit(struct draw_state *state, int which, int pass,
                                    const struct draw_row &asked) {
    __shared__ uint64_t scratch[WARP];
    struct draw_cut *cut = &state->cuts[which];
    int thread = (int)threadIdx.x, highest = DRAW_DIGITS - 1 - thread * OWN_DIGITS;
    uint64_t count = 0, weight = 0, all_count, all_weight, rest = cut->rest;
    for (int i = 0; i < OWN_DIGITS; i++) {
        count += __ldcg(&state->counts[highest - i]);
        weight += __ldcg(&state->weights[highest - i]);
    }
    uint64_t count_before = block_before(count, scratch, &all_count);
    uint64_t weight_before = block_before(weight, scratch, &all_weight);
    if (pass == 0 && which == CUT_TOP_K) rest = (uint64_t)asked.top_k;
    if (pass == 0 && which == CUT_TOP_P) {
        const struct draw_cut *top_k = &state->cuts[CUT_TOP_K];
        rest = weight_to_reach(asked.top_p, top_k->key ? top_k->weight : all_weight);
    }
    uint64_t known = pass == 0 ? 0 : cut->weight, digits = pass == 0 ? 0 : cut->key;
    bool has_all = pass == 0 && which == CUT_TOP_K && all_count <= rest;
    __syncthreads(); /* all have read the cut, which is written from here on */
    if (thread == 0 && has_all) {
        cut->key = 0;
        cut->ties = TIES_ALL;
    }
    if (thread == 0) cut->is_found = has_all;
    for (int i = 0; i < OWN_DIGITS; i++) {
        unsigned own_count = __ldcg(&state->counts[highest - i]);
        uint64_t own_weight = __ldcg(&state->weights[highest - i]);
        uint64_t before = which == CUT_TOP_K ? count_before : weight_before;
        uint64_t own = which == CUT_TOP_K ? own_count : own_weight;
        if (!has_all && before < rest && rest - before <= own) {
            cut->key = (uint32_t)(digits << bits_of(pass)) | (uint32_t)(highest - i);
            cut->rest = rest - before;
            cut->weight = known + weight_before;
            if (pass == PASSES - 1) end_search(cut, which, own_weight, own_count);
        }
        count_before += own_count;
        weight_before += own_weight;
        state->counts[highest - i] = 0;
        state->weights[highest - i] = 0;
    }
}

/* Without a cut of its own, top_p leaves what top_k did. */
static __device__ __forceinline__ void pass_cut_on(struct draw_state *state, int which) {
    struct draw_cut none = {};
    none.ties = TIES_ALL;
    if (which == CUT_TOP_P) none = state->cuts[CUT_TOP_K];
    none.arrived = 0;
    none.is_found = 1;
    state->cuts[which] = none;
}

/* Grid: parts, rows. */
static __global__ void __launch_bounds__(THREADS)
    narrow_kernel(struct drawing drawing, int which, int pass) {
    __shared__ unsigned counts[DRAW_DIGITS], low[DRAW_DIGITS], high[DRAW_DIGITS];
    __shared__ int is_last;
    int row = drawing.first + (int)blockIdx.y, thread = (int)threadIdx.x, token;
    if (row >= active_count(drawing.rows)) return;
    struct draw_row asked = drawing.asked[row];
    struct draw_state *state = &drawing.states[blockIdx.y];
    struct draw_cut *cut = &state->cuts[which];
    float best = best_of_row(drawing, *state, &token);
    bool is_cut = asked.kind == DRAW_TOKEN && asked.temperature > 0 && best > -INFINITY &&
                  (which == CUT_TOP_K ? asked.top_k > 0 : asked.top_p < 1);
    if (!is_cut) {
        if (pass == 0 && blockIdx.x == 0 && thread == 0) pass_cut_on(state, which);
        return;
    }
    if (pass > 0 && cut->is_found) return;
    for (int i = thread; i < DRAW_DIGITS; i += THREADS) counts[i] = low[i] = high[i] = 0;
    __syncthreads();
    const float *logits = logits_of(drawing, row);
    int first = (int)blockIdx.x * drawing.part, end = first + drawing.part, shift = shift_of(pass);
    float scale = weight_scale(asked.temperature);
    uint32_t known = pass == 0 ? 0 : cut->key;
    uint32_t least = which == CUT_TOP_P ? state->cuts[CUT_TOP_K].key : 0;
    if (end > drawing.vocab) end = drawing.vocab;
    for (int id = first + thread; id < end; id += THREADS) {
        float logit = logit_clean(logits[id]);
        uint32_t key = key_of(logit), digit = key >> shift & ((1u << bits_of(pass)) - 1);
        bool is_near = pass == 0 || key >> (shift + bits_of(pass)) == known;
        if (logit == -INFINITY || !is_near || key < least) continue;
        atomicAdd(&counts[digit], 1u);
        add_weight(&low[digit], &high[digit], weight_of((logit - best) * scale));
    }
    __syncthreads();
    for (int i = thread; i < DRAW_DIGITS; i += THREADS) {
        unsigned long long weight = (unsigned long long)high[i] << 32 | low[i];
        if (counts[i]) atomicAdd(&state->counts[i], counts[i]);
        if (weight) atomicAdd(&state->weights[i], weight);
    }
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        is_last = atomicAdd(&cut->arrived, 1) == (int)gridDim.x - 1;
        if (is_last) cut->arrived = 0;
    }
    __syncthreads();
    __threadfence();
    if (is_last) choose_digit(state, which, pass, asked);
    if (thread == 0) COUNT_BYTES((size_t)(end - first) * sizeof(float));
}

void draw_find_cuts(struct cuda_device *cuda, const struct drawing *drawing, int rows) {
    dim3 parts((unsigned)drawing->part_count, (unsigned)rows);
    for (int which = 0; which < CUTS; which++) {
        for (int pass = 0; pass < PASSES; pass++)
            LAUNCH(narrow_kernel, parts, dim3(THREADS), 0, cuda->stream, *drawing, which, pass);
    }
}
