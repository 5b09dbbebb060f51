/* The residual of NAG: where a token starts, the end of a sub-layer, and who runs the next one. */
#include "kernels/cpu/cpu.h"
#include "kernels/number.h"

#include <math.h>

/* mix of a row's direction and the decision: skip iff mix < theta. Written as !(mix < theta), so
 * that a mix that is no number runs: a broken model must not look like a fast one. */
static void decide(const struct primitives *primitives, const struct decisions *decisions,
                   const struct gate *gate, const struct step_rows *step, size_t sublayer,
                   size_t row, const float *r, size_t width) {
    size_t at = sublayer * decisions->max_rows + row;
    size_t tier = (size_t)buffer_i32(step->tier)[row];
    float theta = buffer_f32(decisions->theta)[tier * decisions->sublayers + sublayer];
    float mix = primitives->gate_mix(r, width, buffer_f32(gate->directions), buffer_f32(gate->bias),
                                     buffer_f32(gate->weight), gate->count);
    buffer_f32(decisions->mix)[at] = mix;
    decisions->run->data[at] = !(mix < theta);
}

static void place_rows(const struct kv_place *place, const struct step_rows *step,
                       const uint8_t *run) {
    const int32_t *taken = buffer_i32(place->taken) + place->layer * step->slots;
    int32_t *places = buffer_i32(place->place), slot = -1, next = 0;
    for (size_t row = 0; row < step->rows; row++) {
        if (buffer_i32(step->slot)[row] != slot) {
            slot = buffer_i32(step->slot)[row];
            next = taken[slot];
        }
        places[row] = run[row] || next == 0 ? next : next - 1;
        next += run[row];
    }
}

/* The list of running rows, ascending: one pass in order, after all rows have decided. */
static void list_running(const struct decisions *decisions, size_t sublayer,
                         const struct step_rows *step, const struct kv_place *place) {
    const uint8_t *run = decisions->run->data + sublayer * decisions->max_rows;
    int32_t *indices = buffer_i32(decisions->running.indices);
    int32_t count = 0;
    for (size_t row = 0; row < step->rows; row++) {
        if (run[row]) indices[count++] = (int32_t)row;
    }
    buffer_i32(decisions->running.count)[0] = count;
    if (place) place_rows(place, step, run);
}

/* Operations on 16 floats that a decision takes, for pool_run. */
static size_t decide_cost(const struct gate *gate, size_t width) {
    return gate ? gate->count * (width / PANEL + 8) : 0;
}

/* ---- Start ----------------------------------------------------------------------------------- */

struct begin_loop {
    const struct primitives *primitives;
    const struct nag_begin *begin;
};

static void begin_rows(void *context, size_t first, size_t end) {
    const struct begin_loop *loop = context;
    const struct nag_begin *begin = loop->begin;
    size_t width = begin->width;
    for (size_t row = first; row < end; row++) {
        size_t token = (size_t)buffer_i32(begin->step->token)[row];
        float *r = buffer_f32(begin->r) + row * width;
        for (size_t i = 0; i < width; i++) {
            r[i] = number_load(begin->table->data, begin->table_type, token * width + i);
        }
        float rho = sqrtf(loop->primitives->sum_squares(r, width) / (float)width);
        if (rho != 0) loop->primitives->scale(r, NULL, 1 / rho, r, width);
        buffer_f32(begin->s)[row] = (rho != 0 ? logf(rho) : 0) + begin->log_gain;
        decide(loop->primitives, begin->decisions, begin->next, begin->step, 0, row, r, width);
    }
}

void cpu_nag_begin(struct device *device, const struct nag_begin *begin) {
    struct cpu_device *cpu = cpu_of(device);
    struct begin_loop loop = {cpu->primitives, begin};
    size_t cost = begin->width + decide_cost(begin->next, begin->width);
    pool_run(cpu->pool, begin->step->rows, cost, begin_rows, &loop);
    list_running(begin->decisions, 0, begin->step, begin->place);
}

/* ---- End of a sub-layer ---------------------------------------------------------------------- */

struct end_loop {
    const struct primitives *primitives;
    const struct nag_end_sublayer *end;
};

/* How many of the ascending running rows are below `row`: the place of its f when f is packed. */
static size_t running_before(const struct row_list *running, size_t row) {
    const int32_t *indices = buffer_i32(running->indices);
    size_t low = 0, high = (size_t)buffer_i32(running->count)[0];
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((size_t)indices[middle] < row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* r and s of one row that ran: (14), (16), (17). */
static void step_row(const struct end_loop *loop, size_t row, const float *f) {
    const struct nag_end_sublayer *end = loop->end;
    const struct decisions *decisions = end->decisions;
    float mix = buffer_f32(decisions->mix)[end->sublayer * decisions->max_rows + row];
    float g = end->gate->alpha * powf(mix, end->gate->beta);
    loop->primitives->nag_step(f, buffer_f32(end->r) + row * end->width, end->width, g);
    buffer_f32(end->s)[row] += 0.5f * log1pf(g * g);
}

static void end_rows(void *context, size_t first, size_t last) {
    const struct end_loop *loop = context;
    const struct nag_end_sublayer *end = loop->end;
    const struct decisions *decisions = end->decisions;
    const uint8_t *run = decisions->run->data + end->sublayer * decisions->max_rows;
    size_t packed = end->packed ? running_before(&decisions->running, first) : 0;
    for (size_t row = first; row < last; row++) {
        if (run[row]) {
            size_t from = end->packed ? packed++ : row;
            step_row(loop, row, buffer_f32(end->f) + from * end->width);
        }
        if (end->next) {
            decide(loop->primitives, decisions, end->next, end->step, end->sublayer + 1, row,
                   buffer_f32(end->r) + row * end->width, end->width);
        }
    }
}

void cpu_nag_end_sublayer(struct device *device, const struct nag_end_sublayer *end) {
    struct cpu_device *cpu = cpu_of(device);
    struct end_loop loop = {cpu->primitives, end};
    size_t cost = end->width + decide_cost(end->next, end->width);
    pool_run(cpu->pool, end->step->rows, cost, end_rows, &loop);
    if (end->next) list_running(end->decisions, end->sublayer + 1, end->step, end->place);
}
