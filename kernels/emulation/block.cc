/* Runs the blocks of a launch: one fiber per thread, switched at barriers. */
#include "kernels/emulation/emulation.h"
#include "kernels/emulation/fiber.h"
#include "kernels/emulation/fault.h"

#include <cstdio>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

static const unsigned LANES = 32, THREADS_MAX = 1024;
static const size_t GUARD = 256;
static const unsigned char GUARD_BYTE = 0xa5;

enum thread_state { READY, IN_WARP, IN_BLOCK, DONE };

struct thread {
    struct fiber fiber;
    uint3 index;
    enum thread_state state;
};

/* Two banks of slots: a lane that is ahead writes into the other bank, and cannot come round to
 * this one before all lanes have read it. */
struct warp {
    unsigned arrived, bank;
    uint64_t slot[2][LANES];
    float tile[2][2][256];
};

static struct thread threads[THREADS_MAX];
static struct warp warps[THREADS_MAX / LANES];
static struct fiber scheduler;
static struct thread *current;
static struct {
    struct thread *first; /* of the warp whose turn it is */
    unsigned turn, taken; /* which of its lanes is first, and how many have had theirs */
} lanes;
static unsigned thread_count, in_block, done;
static const std::function<void()> *body;
static const char *kernel_name;
static std::vector<unsigned char> shared;
static uint64_t seed, random_state;
static struct emulation_counters counters;
static struct emulation_clock device_clock;
static bool has_clock;
static double now_ns;

/* ---- Barriers -------------------------------------------------------------------------------- */

static struct warp *current_warp() {
    return &warps[(unsigned)(current - threads) / LANES];
}

int emulation_lane() {
    return (int)((unsigned)(current - threads) % LANES);
}

/* Lanes in their order of this round, each once: the next that can go on, or NULL. */
static struct thread *next_lane() {
    while (lanes.taken < LANES) {
        struct thread *lane = &lanes.first[(lanes.turn + lanes.taken++) % LANES];
        if (lane->state == READY) return lane;
    }
    return NULL;
}

/* From lane to lane, and back to the scheduler behind the last: half of the switches that going by
 * way of it would take. */
static void leave_as(enum thread_state state) {
    struct thread *self = current, *next;
    self->state = state;
    next = next_lane();
    if (next) {
        current = next;
        threadIdx = next->index;
    }
    fiber_switch(&self->fiber, next ? &next->fiber : &scheduler, state == DONE);
}

void __syncthreads() {
    if (++in_block < thread_count) {
        leave_as(IN_BLOCK);
        return;
    }
    in_block = 0;
    for (unsigned t = 0; t < thread_count; t++) threads[t].state = READY;
}

/* The last lane to come frees the others and goes on. */
static void wait_warp(unsigned mask) {
    struct warp *warp = current_warp();
    if (mask != 0xffffffff) emulation_fault("a warp operation without all lanes in its mask");
    if (++warp->arrived < LANES) {
        leave_as(IN_WARP);
        return;
    }
    warp->arrived = 0;
    warp->bank ^= 1;
    struct thread *first = &threads[(warp - warps) * LANES];
    for (unsigned lane = 0; lane < LANES; lane++) first[lane].state = READY;
}

void __syncwarp(unsigned mask) {
    wait_warp(mask);
}

uint64_t emulation_exchange(unsigned mask, uint64_t value, int lane) {
    struct warp *warp = current_warp();
    unsigned bank = warp->bank;
    warp->slot[bank][emulation_lane()] = value;
    wait_warp(mask);
    return warp->slot[bank][lane];
}

unsigned __ballot_sync(unsigned mask, int predicate) {
    struct warp *warp = current_warp();
    unsigned bank = warp->bank, votes = 0;
    warp->slot[bank][emulation_lane()] = predicate != 0;
    wait_warp(mask);
    for (unsigned lane = 0; lane < LANES; lane++) votes |= (unsigned)warp->slot[bank][lane] << lane;
    return votes;
}

void nvcuda::wmma::emulation_gather(const float *a, const float *b, const float **whole_a,
                                    const float **whole_b) {
    struct warp *warp = current_warp();
    unsigned bank = warp->bank;
    memcpy(&warp->tile[bank][0][emulation_lane() * 8], a, 8 * sizeof *a);
    memcpy(&warp->tile[bank][1][emulation_lane() * 8], b, 8 * sizeof *b);
    *whole_a = warp->tile[bank][0];
    *whole_b = warp->tile[bank][1];
    wait_warp(0xffffffff);
}

/* ---- One block ------------------------------------------------------------------------------- */

static uint64_t random_draw(uint64_t range) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % range;
}

/* 0..count-1, in another order each time unless the seed is 0. */
static void permute(std::vector<unsigned> *order, unsigned count) {
    order->resize(count);
    for (unsigned i = 0; i < count; i++) (*order)[i] = i;
    for (unsigned i = count; seed && i > 1; i--)
        std::swap((*order)[i - 1], (*order)[random_draw(i)]);
}

static void thread_main() {
    fiber_arrived(&current->fiber);
    (*body)();
    done++;
    leave_as(DONE);
}

static bool resume_warp(unsigned warp) {
    lanes.first = &threads[warp * LANES];
    lanes.turn = seed ? (unsigned)random_draw(LANES) : 0;
    lanes.taken = 0;
    current = next_lane();
    if (!current) return false;
    threadIdx = current->index;
    fiber_switch(&scheduler, &current->fiber, false);
    return true;
}

static void report_deadlock() {
    char message[256];
    snprintf(message, sizeof message,
             "%s, block %u %u %u: %u of %u threads wait at a barrier, %u have ended", kernel_name,
             blockIdx.x, blockIdx.y, blockIdx.z, in_block, thread_count, done);
    emulation_fault(message);
}

static void run_block() {
    static std::vector<unsigned> order;
    in_block = done = 0;
    for (unsigned t = 0; t < thread_count; t++) {
        threads[t].index = {t % blockDim.x, t / blockDim.x % blockDim.y,
                            t / blockDim.x / blockDim.y};
        threads[t].state = READY;
        fiber_prepare(&threads[t].fiber, thread_main);
    }
    for (unsigned w = 0; w < thread_count / LANES; w++) warps[w].arrived = warps[w].bank = 0;
    while (done < thread_count) {
        bool progress = false;
        permute(&order, thread_count / LANES);
        for (unsigned warp : order) progress |= resume_warp(warp);
        if (!progress) {
            report_deadlock();
            return;
        }
    }
}

/* ---- Launches -------------------------------------------------------------------------------- */

unsigned char *emulation_shared_memory() {
    return shared.data() + GUARD;
}

/* What a block finds in its shared memory is noise: here, not-a-number. */
static void shared_prepare(size_t bytes) {
    shared.resize(bytes + 2 * GUARD);
    memset(shared.data(), GUARD_BYTE, GUARD);
    memset(shared.data() + GUARD, 0xff, bytes);
    memset(shared.data() + GUARD + bytes, GUARD_BYTE, GUARD);
}

static void shared_check(size_t bytes) {
    for (size_t i = 0; i < GUARD; i++) {
        if (shared[i] == GUARD_BYTE && shared[GUARD + bytes + i] == GUARD_BYTE) continue;
        char message[256];
        snprintf(message, sizeof message, "%s writes outside its %zu bytes of shared memory",
                 kernel_name, bytes);
        emulation_fault(message);
        return;
    }
}

static void count_launch() {
    counters.launches++;
    now_ns += device_clock.launch_ns;
}

void emulation_run_grid(const char *name, const std::function<void()> &thread, dim3 grid,
                        dim3 block, size_t shared_bytes) {
    static std::vector<unsigned> order;
    thread_count = block.x * block.y * block.z;
    kernel_name = name;
    body = &thread;
    gridDim = grid;
    blockDim = block;
    count_launch();
    if (thread_count == 0 || thread_count > THREADS_MAX || thread_count % LANES ||
        grid.x * grid.y * grid.z == 0 || grid.y > 65535 || grid.z > 65535) {
        emulation_fault("a launch without blocks, or not of whole warps, or too large");
        return;
    }
    random_state = seed + counters.launches;
    permute(&order, grid.x * grid.y * grid.z);
    for (unsigned at : order) {
        blockIdx = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
        shared_prepare(shared_bytes);
        run_block();
        shared_check(shared_bytes);
    }
}

void emulation_count_bytes(size_t bytes) {
    counters.bytes += bytes;
    now_ns += (double)bytes * device_clock.byte_ns;
}
void emulation_count_product(size_t bytes) {
    count_launch();
    counters.products++;
    emulation_count_bytes(bytes);
}
void emulation_count_record() {
    now_ns += device_clock.record_ns;
}
void emulation_count_graph() {
    counters.graphs++;
}
void emulation_count_wait() {
    counters.waits++;
}
void emulation_count_copy(size_t bytes) {
    counters.copies++;
    counters.copied += bytes;
}

extern "C" void emulation_set_schedule(uint64_t value) {
    seed = value;
}
extern "C" struct emulation_counters emulation_get_counters(void) {
    return counters;
}
extern "C" void emulation_clear_counters(void) {
    counters = {};
}

extern "C" void emulation_set_clock(const struct emulation_clock *value) {
    has_clock = value != NULL;
    device_clock = value ? *value : emulation_clock{};
}
extern "C" uint64_t emulation_now_ns(void) {
    return has_clock ? (uint64_t)now_ns : time_now_ns();
}
