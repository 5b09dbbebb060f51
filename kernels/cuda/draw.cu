/* Drawing tokens: what comes back of a row of logits is an id, and logprobs if they are asked for.
 *
 * The vocabulary is cut into parts whose length follows from its size alone, a block to each: first
 * the best logit of every part, then its weights, then one block per row that finds the part in
 * which the draw falls, and the token in it. Rows that ask for more than a temperature have their
 * logits changed before, and are cut by top_k and top_p (draw_cut.cu) in between. Weights are whole
 * numbers: the token is the one that the host would draw. */
#include "kernels/cuda/draw.h"

#include <limits.h>

#define PART_MIN 4096

/* ---- Changes --------------------------------------------------------------------------------- */

static __device__ __forceinline__ float penalised(float logit, const struct draw_row &asked,
                                                  uint32_t generated) {
    logit = logit > 0 ? logit / asked.repetition : __fmul_rn(logit, asked.repetition);
    if (generated == 0) return logit;
    float times = __fmul_rn(asked.frequency, (float)generated);
    return __fadd_rn(logit, -__fadd_rn(times, asked.presence));
}

/* Grid: rows. A thread does all the biases of its tokens, in their order: one may come twice. */
static __global__ void __launch_bounds__(THREADS) change_kernel(struct drawing drawing) {
    int row = drawing.first + (int)blockIdx.x, thread = (int)threadIdx.x;
    if (row >= active_count(drawing.rows) || drawing.asked[row].kind != DRAW_TOKEN) return;
    struct draw_row asked = drawing.asked[row];
    float *logits = logits_of(drawing, row);
    const struct draw_change *biases = drawing.changes + asked.changes;
    const struct draw_change *used = biases + asked.bias_count, *bans = used + asked.used_count;
    for (int i = 0; i < asked.bias_count; i++) {
        float *logit = &logits[biases[i].token];
        if (biases[i].token % THREADS == thread)
            *logit = logit_clean(__fadd_rn(logit_clean(*logit), biases[i].by.bias));
    }
    __syncthreads();
    for (int i = thread; i < asked.used_count; i += THREADS) {
        float *logit = &logits[used[i].token];
        *logit = logit_clean(penalised(logit_clean(*logit), asked, used[i].by.generated));
    }
    __syncthreads();
    for (int i = thread; i < asked.ban_count; i += THREADS) logits[bans[i].token] = -INFINITY;
    if (thread == 0)
        COUNT_BYTES((size_t)(asked.bias_count + asked.used_count + asked.ban_count) *
                    (sizeof *biases + 2 * sizeof *logits));
}

/* ---- The best -------------------------------------------------------------------------------- */

/* Of the block, in its first thread. */
static __device__ __forceinline__ void block_best(float *best, int *token) {
    __shared__ float bests[WARP];
    __shared__ int tokens[WARP];
    for (int bits = WARP / 2; bits > 0; bits /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, *best, bits);
        int id = __shfl_xor_sync(ALL_LANES, *token, bits);
        keep_better(best, token, other, id);
    }
    __syncthreads(); /* the best before this one has been read */
    if (threadIdx.x % WARP == 0) {
        bests[threadIdx.x / WARP] = *best;
        tokens[threadIdx.x / WARP] = *token;
    }
    __syncthreads();
    for (int i = 1; threadIdx.x == 0 && i < THREADS / WARP; i++)
        keep_better(best, token, bests[i], tokens[i]);
}

/* Of the ids first .. end - 1 that come after (logit, id) in the order of the best. */
static __device__ __forceinline__ void best_after(const float *logits, int first, int end,
                                                  float logit, int id, float *best, int *token) {
    *best = -INFINITY;
    *token = INT_MAX;
    for (int i = first + (int)threadIdx.x; i < end; i += THREADS) {
        float other = logit_clean(logits[i]);
        if (other < logit || (other == logit && i > id)) keep_better(best, token, other, i);
    }
    block_best(best, token);
}

/* Grid: parts, rows. */
static __global__ void __launch_bounds__(THREADS) best_kernel(struct drawing drawing) {
    int row = drawing.first + (int)blockIdx.y, token;
    if (row >= active_count(drawing.rows) || drawing.asked[row].kind == DRAW_NOTHING) return;
    int first = (int)blockIdx.x * drawing.part, end = first + drawing.part;
    float best;
    if (end > drawing.vocab) end = drawing.vocab;
    best_after(logits_of(drawing, row), first, end, INFINITY, -1, &best, &token);
    if (threadIdx.x != 0) return;
    struct draw_part *part = &drawing.states[blockIdx.y].parts[blockIdx.x];
    part->best = best;
    part->token = token;
    COUNT_BYTES((size_t)(end - first) * sizeof(float));
}

/* ---- Weights --------------------------------------------------------------------------------- */

/* What a row's candidates are chosen by. */
struct choice {
    float best, scale;
    uint32_t key, ties; /* of the cut */
    uint64_t least;     /* by min_p */
};

static __device__ __forceinline__ struct choice choice_of(const struct drawing &drawing,
                                                          const struct draw_state &state,
                                                          const struct draw_row &asked,
                                                          float best) {
    struct choice choice = {};
    choice.best = best;
    choice.scale = weight_scale(asked.temperature);
    if (drawing.is_plain) return choice;
    choice.key = state.cuts[CUT_TOP_P].key;
    choice.ties = state.cuts[CUT_TOP_P].ties;
    choice.least = weight_least(asked.min_p);
    return choice;
}

/* Its weight if it is a candidate before the cut, else 0; *ties counts one that is at the cut. */
static __device__ __forceinline__ uint64_t weight_before(const struct choice &choice, float logit,
                                                         uint64_t *ties) {
    uint32_t key = key_of(logit);
    if (logit == -INFINITY || key < choice.key) return 0;
    uint64_t weight = weight_of((logit - choice.best) * choice.scale);
    if (weight < choice.least) return 0;
    if (key > choice.key) return weight;
    ++*ties;
    return 0;
}

/* What one that is at the cut weighs. */
static __device__ __forceinline__ uint64_t weight_at_cut(const struct choice &choice) {
    if (choice.key == 0) return 0;
    return weight_of((logit_of(choice.key) - choice.best) * choice.scale);
}

/* Of `ties` with `before` of them earlier: those that stay. */
static __device__ __forceinline__ uint64_t ties_kept(const struct choice &choice, uint64_t before,
                                                     uint64_t ties) {
    if (before >= choice.ties) return 0;
    return ties < choice.ties - before ? ties : choice.ties - before;
}

/* Grid: parts, rows. */
static __global__ void __launch_bounds__(THREADS) weigh_kernel(struct drawing drawing) {
    __shared__ uint64_t scratch[WARP];
    int row = drawing.first + (int)blockIdx.y, token;
    if (row >= active_count(drawing.rows)) return;
    struct draw_row asked = drawing.asked[row];
    struct draw_state *state = &drawing.states[blockIdx.y];
    bool is_drawn = asked.kind == DRAW_TOKEN && asked.temperature > 0;
    if (asked.kind == DRAW_NOTHING || (!is_drawn && !asked.is_told)) return;
    int first = (int)blockIdx.x * drawing.part, end = first + drawing.part;
    float best = best_of_row(drawing, *state, &token);
    const float *logits = logits_of(drawing, row);
    struct choice choice = choice_of(drawing, *state, asked, best);
    uint64_t sum = 0, sum_told = 0, ties = 0;
    if (end > drawing.vocab) end = drawing.vocab;
    for (int id = first + (int)threadIdx.x; id < end; id += THREADS) {
        float logit = logit_clean(logits[id]);
        if (is_drawn) sum += weight_before(choice, logit, &ties);
        if (asked.is_told) sum_told += weight_of(logit - best);
    }
    sum = block_total(sum, scratch);
    sum_told = block_total(sum_told, scratch);
    ties = block_total(ties, scratch);
    if (threadIdx.x != 0) return;
    struct draw_part *part = &state->parts[blockIdx.x];
    part->sum = sum;
    part->sum_told = sum_told;
    part->ties = (int32_t)ties;
    COUNT_BYTES((size_t)(end - first) * sizeof(float));
}

/* ---- The draw -------------------------------------------------------------------------------- */

/* The thread whose share of a whole the draw falls into: what of it is left there, and ties before
 * it. */
struct place {
    int at;
    uint64_t rest, ties_before;
};

/* Each thread has a share: weight and ties. With `is_part` the draw falls anew, by `uniform`. */
static __device__ __forceinline__ void find_place(const struct choice &choice, uint64_t each,
                                                  uint64_t sum, uint64_t ties, bool is_part,
                                                  double uniform, struct place *shared) {
    __shared__ uint64_t scratch[WARP];
    uint64_t total, ignored, ties_earlier = is_part ? 0 : shared->ties_before;
    uint64_t before = ties_earlier + block_before(ties, scratch, &ignored);
    uint64_t share = sum + each * ties_kept(choice, before, ties);
    uint64_t start = block_before(share, scratch, &total);
    uint64_t drawn = is_part ? weight_drawn(uniform, total) : shared->rest;
    __syncthreads(); /* all have read the place, which is written from here on */
    if (start <= drawn && drawn - start < share) {
        shared->at = (int)threadIdx.x;
        shared->rest = drawn - start;
        shared->ties_before = before;
    }
    __syncthreads();
}

/* One block: the token, in shared memory. A part is cut again, a run of ids to each thread. */
static __device__ __forceinline__ void draw_token(const struct drawing &drawing,
                                                  const struct draw_state &state,
                                                  const struct draw_row &asked, const float *logits,
                                                  float best, int *token) {
    __shared__ struct place place;
    int thread = (int)threadIdx.x;
    struct choice choice = choice_of(drawing, state, asked, best);
    uint64_t each = weight_at_cut(choice), sum = 0, ties = 0;
    if (thread < drawing.part_count) {
        sum = state.parts[thread].sum;
        ties = (uint64_t)state.parts[thread].ties;
    }
    find_place(choice, each, sum, ties, true, asked.uniform, &place);
    int run = (drawing.part + THREADS - 1) / THREADS, start = place.at * drawing.part;
    int first = start + thread * run, end = start + drawing.part;
    if (end > drawing.vocab) end = drawing.vocab;
    if (end > first + run) end = first + run;
    sum = ties = 0;
    for (int id = first; id < end; id++)
        sum += weight_before(choice, logit_clean(logits[id]), &ties);
    find_place(choice, each, sum, ties, false, 0, &place);
    if (thread == place.at) {
        uint64_t rest = place.rest, before = place.ties_before;
        for (int id = first; id < end; id++) {
            ties = 0;
            uint64_t weight = weight_before(choice, logit_clean(logits[id]), &ties);
            weight += each * ties_kept(choice, before, ties);
            before += ties;
            if (rest < weight) {
                *token = id;
                break;
            }
            rest -= weight;
        }
    }
    __syncthreads();
    if (thread == 0) COUNT_BYTES((size_t)drawing.part * sizeof(float));
}

/* One block: the best of the row, one after the other. The next one is the best of the parts' next
 * ones; only the part that it was in is looked through again. */
static __device__ __forceinline__ void tell_best(const struct drawing &drawing,
                                                 const struct draw_state &state,
                                                 const float *logits, int wanted,
                                                 struct draw_best *told) {
    __shared__ float bests[DRAW_PARTS_MAX];
    __shared__ int tokens[DRAW_PARTS_MAX];
    int thread = (int)threadIdx.x;
    if (wanted > DRAW_BEST_MAX) wanted = DRAW_BEST_MAX;
    if (wanted > drawing.vocab) wanted = drawing.vocab;
    if (thread < drawing.part_count) {
        bests[thread] = state.parts[thread].best;
        tokens[thread] = state.parts[thread].token;
    }
    for (int i = 0; i < wanted; i++) {
        __syncthreads();
        float best = bests[0], next;
        int token = tokens[0], next_token;
        for (int part = 1; part < drawing.part_count; part++)
            keep_better(&best, &token, bests[part], tokens[part]);
        int part = token / drawing.part, first = part * drawing.part, end = first + drawing.part;
        if (end > drawing.vocab) end = drawing.vocab;
        best_after(logits, first, end, best, token, &next, &next_token);
        if (thread == 0) {
            told[i].token = token;
            told[i].logit = best;
            bests[part] = next;
            tokens[part] = next_token;
            COUNT_BYTES((size_t)(end - first) * sizeof(float));
        }
    }
}

/* Grid: rows. */
static __global__ void __launch_bounds__(THREADS) choose_kernel(struct drawing drawing) {
    __shared__ int chosen;
    int row = drawing.first + (int)blockIdx.x, token;
    if (row >= active_count(drawing.rows) || drawing.asked[row].kind == DRAW_NOTHING) return;
    struct draw_row asked = drawing.asked[row];
    const struct draw_state &state = drawing.states[blockIdx.x];
    const float *logits = logits_of(drawing, row);
    float best = best_of_row(drawing, state, &token);
    if (asked.kind == DRAW_SCORE) token = asked.token;
    if (threadIdx.x == 0) chosen = token;
    __syncthreads();
    if (asked.kind == DRAW_TOKEN && best > -INFINITY && asked.temperature > 0)
        draw_token(drawing, state, asked, logits, best, &chosen);
    if (asked.is_told)
        tell_best(drawing, state, logits, asked.best_count, drawing.best + row * DRAW_BEST_MAX);
    if (threadIdx.x != 0) return;
    struct draw_outcome outcome = {};
    outcome.token = asked.kind == DRAW_TOKEN && best == -INFINITY ? -1 : chosen;
    outcome.best = best;
    outcome.logit = logit_clean(logits[chosen]);
    for (int i = 0; asked.is_told && i < drawing.part_count; i++)
        outcome.sum += state.parts[i].sum_told;
    drawing.outcome[row] = outcome;
}

/* Rows are drawn from in slices, so that scratch is bounded. */
void cuda_draw(struct device *device, const struct draw *args) {
    struct cuda_device *cuda = cuda_of(device);
    cuda_flush(cuda);
    struct drawing drawing = {};
    drawing.rows = cuda_rows(cuda, args->list, 0);
    drawing.logits = (float *)args->logits->data;
    drawing.asked = (const struct draw_row *)args->asked->data;
    drawing.changes = (const struct draw_change *)args->changes->data;
    drawing.outcome = (struct draw_outcome *)args->outcome->data;
    drawing.best = (struct draw_best *)args->best->data;
    drawing.states = cuda->draw_states;
    drawing.is_plain = args->is_plain;
    drawing.vocab = (int)args->vocab;
    drawing.part = PART_MIN;
    while ((size_t)drawing.part * DRAW_PARTS_MAX < args->vocab) drawing.part *= 2;
    drawing.part_count = (drawing.vocab + drawing.part - 1) / drawing.part;
    for (; drawing.first < drawing.rows.most; drawing.first += DRAW_ROWS_MAX) {
        int rows = drawing.rows.most - drawing.first;
        if (rows > DRAW_ROWS_MAX) rows = DRAW_ROWS_MAX;
        dim3 parts((unsigned)drawing.part_count, (unsigned)rows), each_row((unsigned)rows);
        if (!drawing.is_plain)
            LAUNCH(change_kernel, each_row, dim3(THREADS), 0, cuda->stream, drawing);
        LAUNCH(best_kernel, parts, dim3(THREADS), 0, cuda->stream, drawing);
        if (!drawing.is_plain) draw_find_cuts(cuda, &drawing, rows);
        LAUNCH(weigh_kernel, parts, dim3(THREADS), 0, cuda->stream, drawing);
        LAUNCH(choose_kernel, each_row, dim3(THREADS), 0, cuda->stream, drawing);
    }
}

int cuda_draw_create(struct cuda_device *cuda, struct error *error) {
    size_t rows = cuda->max_rows < DRAW_ROWS_MAX ? cuda->max_rows : DRAW_ROWS_MAX;
    cuda->draw_states = (struct draw_state *)cuda_allocate(rows * sizeof *cuda->draw_states, error);
    return cuda->draw_states ? FATHOM_OK : FATHOM_NO_MEMORY;
}
