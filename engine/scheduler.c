#include "engine/scheduler.h"

#include "engine/prefix.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void schedule_decodes(struct scheduler *scheduler);
static void schedule_prefills(struct scheduler *scheduler, uint64_t now);
static double predict_plainly(const struct scheduler *scheduler, const struct cost_load *load);
static double find_drift(const struct scheduler *scheduler, const struct cost_load *load);
static void stop_running(struct scheduler *scheduler, struct sequence *sequence);
static void write_tables(struct scheduler *scheduler);

int scheduler_create(struct scheduler *scheduler, const struct scheduler_limits *limits,
                     struct error *error) {
    memset(scheduler, 0, sizeof *scheduler);
    scheduler->limits = *limits;
    size_t rows = limits->max_step_rows, slots = limits->max_sequences;
    if (slots > rows) slots = rows;
    scheduler->limits.max_sequences = slots;
    if (limits->kv_groups == 0) scheduler->limits.kv_groups = 1;
    size_t groups = scheduler->limits.kv_groups, per_slot = kv_blocks_for(limits->max_tokens);
    assert(groups == 1 || !limits->prefix_cache);
    int result = kv_create(&scheduler->kv, limits->kv_blocks, groups, slots, per_slot, error);
    if (result != 0) return result;
    struct step *step = &scheduler->step;
    scheduler->free_slots = calloc(slots, sizeof *scheduler->free_slots);
    step->token = calloc(rows, sizeof *step->token);
    step->position = calloc(rows, sizeof *step->position);
    step->tier = calloc(rows, sizeof *step->tier);
    step->slot = calloc(rows, sizeof *step->slot);
    step->logit_rows = calloc(rows, sizeof *step->logit_rows);
    step->parts = calloc(rows, sizeof *step->parts);
    step->block_table = calloc(slots * groups * per_slot, sizeof *step->block_table);
    step->places = calloc(slots * groups, sizeof *step->places);
    if (!scheduler->free_slots || !step->token || !step->position || !step->tier || !step->slot ||
        !step->logit_rows || !step->parts || !step->block_table || !step->places) {
        scheduler_destroy(scheduler);
        return error_set(error, FATHOM_NO_MEMORY, "no memory for steps of %zu rows", rows);
    }
    for (size_t i = 0; i < slots; i++) scheduler->free_slots[i] = (int32_t)(slots - 1 - i);
    scheduler->free_slot_count = slots;
    return 0;
}

void scheduler_destroy(struct scheduler *scheduler) {
    kv_destroy(&scheduler->kv);
    free(scheduler->free_slots);
    free(scheduler->step.token);
    free(scheduler->step.position);
    free(scheduler->step.tier);
    free(scheduler->step.slot);
    free(scheduler->step.logit_rows);
    free(scheduler->step.parts);
    free(scheduler->step.block_table);
    free(scheduler->step.places);
    memset(scheduler, 0, sizeof *scheduler);
}

/* Almost always a later arrival goes to the end, so the place is looked for from there. */
static void list_insert(struct sequence_list *list, struct sequence *sequence) {
    struct sequence *before = list->last;
    while (before && sequence_before(sequence, before)) before = before->previous;
    struct sequence *after = before ? before->next : list->first;
    sequence->previous = before;
    sequence->next = after;
    *(before ? &before->next : &list->first) = sequence;
    *(after ? &after->previous : &list->last) = sequence;
    list->count++;
}

static void list_remove(struct sequence_list *list, struct sequence *sequence) {
    struct sequence *before = sequence->previous, *after = sequence->next;
    *(before ? &before->next : &list->first) = after;
    *(after ? &after->previous : &list->last) = before;
    sequence->previous = sequence->next = NULL;
    list->count--;
}

void scheduler_add(struct scheduler *scheduler, struct sequence *sequence) {
    assert(sequence->slot < 0 && sequence_limit(sequence) <= scheduler->limits.max_tokens);
    list_insert(&scheduler->waiting, sequence);
}

void scheduler_remove(struct scheduler *scheduler, struct sequence *sequence) {
    if (sequence->slot >= 0) {
        stop_running(scheduler, sequence);
    } else {
        list_remove(&scheduler->waiting, sequence);
    }
}

const struct step *scheduler_next_step(struct scheduler *scheduler, uint64_t now) {
    struct step *step = &scheduler->step;
    step->rows = step->part_count = step->logit_count = 0;
    scheduler->load = (struct cost_load){0};
    schedule_decodes(scheduler);
    schedule_prefills(scheduler, now);
    write_tables(scheduler);
    step->modelled_ns = predict_plainly(scheduler, &scheduler->load);
    step->predicted_ns = step->modelled_ns * find_drift(scheduler, &scheduler->load);
    assert(step->rows > 0 || scheduler_is_empty(scheduler));
    return step;
}

void scheduler_complete_step(struct scheduler *scheduler, const uint32_t *skips) {
    const struct step *step = &scheduler->step;
    size_t groups = scheduler->limits.kv_groups;
    for (size_t i = 0; i < step->part_count; i++) {
        struct sequence *sequence = step->parts[i].sequence;
        size_t rows = step->parts[i].rows;
        sequence->computed += rows;
        if (sequence->computed > sequence->reached) sequence->reached = sequence->computed;
        if (scheduler->limits.prefix_cache) prefix_settle(&scheduler->kv, sequence, rows);
        for (size_t group = 0; groups > 1 && group < groups; group++) {
            kv_skip(&scheduler->kv, (size_t)sequence->slot, group, skips[i * groups + group],
                    sequence->length);
        }
    }
}

static size_t size_min(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t rows_left(const struct scheduler *scheduler) {
    return scheduler->limits.max_step_rows - scheduler->step.rows;
}

/* ---- Time ------------------------------------------------------------------------------------ */

/* The work of the sequence's next rows; what they will skip is not known, what the last ones
 * skipped is. */
static void load_add(struct cost_load *load, const struct sequence *sequence, size_t rows) {
    double count = (double)rows, first = (double)sequence->computed;
    load->rows += count;
    load->attn_rows += count * sequence->attn_rate;
    load->mlp_rows += count * sequence->mlp_rate;
    load->attended += count * (first + (count + 1) / 2) * sequence->attn_rate;
    if (sequence->computed + rows == sequence->length) load->logit_rows++;
}

static size_t drift_class(const struct cost_load *load) {
    size_t class = 0;
    for (double rows = load->rows; rows >= 2 && class + 1 < SCHEDULER_DRIFTS; rows /= 2) class ++;
    return class;
}

/* The drift of steps of this size or, when there were none, of the nearest smaller or larger. */
static double find_drift(const struct scheduler *scheduler, const struct cost_load *load) {
    size_t class = drift_class(load);
    for (size_t i = class + 1; i-- > 0;) {
        if (scheduler->drift[i] > 0) return scheduler->drift[i];
    }
    for (size_t i = class; i < SCHEDULER_DRIFTS; i++) {
        if (scheduler->drift[i] > 0) return scheduler->drift[i];
    }
    return 1;
}

static double predict_plainly(const struct scheduler *scheduler, const struct cost_load *load) {
    return scheduler->limits.cost ? cost_predict(scheduler->limits.cost, load) : 0;
}

static double predict(const struct scheduler *scheduler, const struct cost_load *load) {
    return predict_plainly(scheduler, load) * find_drift(scheduler, load);
}

void scheduler_observe_step(struct scheduler *scheduler, double real_ns) {
    if (scheduler->step.modelled_ns <= 0) return;
    double ratio = real_ns / scheduler->step.modelled_ns;
    double *drift = &scheduler->drift[drift_class(&scheduler->load)];
    if (*drift > 0 && ratio > 2 * *drift) ratio = 2 * *drift; /* a stall says little of the next */
    *drift += *drift > 0 ? (ratio - *drift) / 4 : ratio;
}

/* The most rows, up to `rows`, with which the step is still within `target` ns. */
static size_t rows_in_time(const struct scheduler *scheduler, const struct sequence *sequence,
                           size_t rows, double target) {
    size_t low = 0, high = rows; /* low fits, more than high does not */
    while (low < high) {
        size_t middle = high - (high - low) / 2;
        struct cost_load load = scheduler->load;
        load_add(&load, sequence, middle);
        if (predict(scheduler, &load) <= target) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* The next `rows` rows of a sequence become part of the step. */
static void step_add(struct scheduler *scheduler, struct sequence *sequence, size_t rows,
                     size_t reused) {
    struct step *step = &scheduler->step;
    load_add(&scheduler->load, sequence, rows);
    size_t known = sequence->reached - sequence->computed;
    int32_t slot = (int32_t)step->part_count;
    step->parts[step->part_count++] = (struct step_part){
        .sequence = sequence,
        .first_row = step->rows,
        .rows = rows,
        .recomputed = size_min(rows, known),
        .reused = reused,
        .first_logit = step->logit_count,
    };
    for (size_t i = 0; i < rows; i++) {
        size_t position = sequence->computed + i, row = step->rows++;
        step->token[row] = sequence->tokens[position];
        step->position[row] = (int32_t)position;
        step->tier[row] = sequence->request.tier;
        step->slot[row] = slot;
        if (sequence_wants_logits(sequence, position)) {
            step->logit_rows[step->logit_count++] = (int32_t)row;
        }
    }
    if (scheduler->limits.prefix_cache) prefix_announce(&scheduler->kv, sequence, rows);
}

/* The part of the block tables that the step touches: a device gets no more to copy. */
static void write_tables(struct scheduler *scheduler) {
    struct step *step = &scheduler->step;
    const struct kv *kv = &scheduler->kv;
    step->blocks_per_part = 0;
    for (size_t i = 0; i < step->part_count; i++) {
        const struct step_part *part = &step->parts[i];
        size_t blocks = kv_blocks_for(part->sequence->computed + part->rows);
        if (blocks > step->blocks_per_part) step->blocks_per_part = blocks;
    }
    for (size_t group = 0; group < kv->groups; group++) {
        for (size_t i = 0; i < step->part_count; i++) {
            const struct sequence *sequence = step->parts[i].sequence;
            size_t slot = (size_t)sequence->slot, at = group * step->part_count + i;
            size_t held = size_min(kv_held(kv, slot, group), step->blocks_per_part);
            int32_t *row = step->block_table + at * step->blocks_per_part;
            memcpy(row, kv_table(kv, slot, group), held * sizeof *row);
            memset(row + held, 0, (step->blocks_per_part - held) * sizeof *row);
            step->places[at] =
                (int32_t)(sequence->computed - kv->skipped[slot * kv->groups + group]);
        }
    }
}

/* Gives up everything that a running sequence holds; its slot is the next one to be used. */
static void stop_running(struct scheduler *scheduler, struct sequence *sequence) {
    kv_release(&scheduler->kv, (size_t)sequence->slot);
    scheduler->free_slots[scheduler->free_slot_count++] = sequence->slot;
    sequence->slot = -1;
    sequence->computed = 0;
    list_remove(&scheduler->running, sequence);
}

static void preempt_last(struct scheduler *scheduler) {
    struct sequence *victim = scheduler->running.last;
    stop_running(scheduler, victim);
    victim->usage.preemptions++;
    scheduler->preemptions++;
    list_insert(&scheduler->waiting, victim);
}

/* Finds a block for the next token, at the expense of sequences later in the order; these have no
 * row in the step yet. False: the sequence was itself the last, and now waits. */
static bool grow_or_preempt(struct scheduler *scheduler, struct sequence *sequence) {
    while (!kv_reserve(&scheduler->kv, (size_t)sequence->slot, sequence->length)) {
        preempt_last(scheduler);
        if (sequence->slot < 0) return false;
    }
    return true;
}

static void schedule_decodes(struct scheduler *scheduler) {
    struct sequence *sequence = scheduler->running.first;
    while (sequence) {
        if (sequence_is_decoding(sequence)) {
            if (!grow_or_preempt(scheduler, sequence)) return;
            step_add(scheduler, sequence, 1, 0);
        }
        sequence = sequence->next; /* read now: growing may have taken the old next off the list */
    }
}

/* Groups in which running sequences will ask for another block some day. One is kept for each, or
 * the newcomer would be preempted a few steps after its prefill. */
static size_t count_growing(const struct scheduler *scheduler) {
    const struct kv *kv = &scheduler->kv;
    size_t growing = 0;
    const struct sequence *sequence = scheduler->running.first;
    for (; sequence; sequence = sequence->next) {
        size_t slot = (size_t)sequence->slot, limit = sequence_limit(sequence);
        for (size_t group = 0; group < kv->groups; group++) {
            growing += kv_missing(kv, slot, group, limit) > 0;
        }
    }
    return growing;
}

/* Blocks for all tokens known and one more, of which the prefix cache may have some. */
static bool take_blocks(struct scheduler *scheduler, struct sequence *sequence, size_t *reused) {
    struct kv *kv = &scheduler->kv;
    size_t slot = (size_t)sequence->slot, reached = sequence->reached;
    size_t tokens = size_min(sequence->length + 1, sequence_limit(sequence));
    *reused = scheduler->limits.prefix_cache ? prefix_reuse(kv, sequence) : 0;
    size_t missing = kv_missing_all(kv, slot, tokens);
    if (missing + count_growing(scheduler) <= kv_blocks_available(kv)) {
        return kv_reserve(kv, slot, tokens);
    }
    kv_release(kv, slot);
    sequence->computed = 0;
    sequence->reached = reached;
    return false;
}

static void count_reuse(struct scheduler *scheduler, const struct sequence *sequence,
                        size_t reused) {
    bool is_first = sequence->reached == reused; /* no row of it has run yet */
    if (!scheduler->limits.prefix_cache || sequence->request.prompt_logprobs || !is_first) return;
    scheduler->prefix_queries += sequence->request.prompt_length;
}

/* Lets a waiting sequence run, if there is a slot and blocks for it. */
static bool admit(struct scheduler *scheduler, struct sequence *sequence, uint64_t now,
                  size_t *reused) {
    if (scheduler->free_slot_count == 0) return false;
    sequence->slot = scheduler->free_slots[scheduler->free_slot_count - 1];
    if (!take_blocks(scheduler, sequence, reused)) {
        sequence->slot = -1;
        return false;
    }
    scheduler->free_slot_count--;
    list_remove(&scheduler->waiting, sequence);
    list_insert(&scheduler->running, sequence);
    if (sequence->started_ns == 0) sequence->started_ns = now;
    count_reuse(scheduler, sequence, *reused);
    return true;
}

/* Rows that prefill may still have in this step. */
struct prefill_room {
    double target;  /* ns: somebody decodes, and would feel a longer step; 0: nobody */
    size_t untimed; /* rows that it gets whatever the time */
};

static void add_prefill(struct scheduler *scheduler, struct sequence *sequence, size_t reused,
                        struct prefill_room *room) {
    /* Another sequence with the same prompt may have come further. */
    if (scheduler->limits.prefix_cache) reused += prefix_reuse(&scheduler->kv, sequence);
    size_t rows = size_min(sequence->length - sequence->computed, rows_left(scheduler));
    size_t chunk = scheduler->limits.prefill_chunk;
    if (chunk) rows = size_min(rows, chunk);
    if (room->target > 0) {
        size_t in_time = rows_in_time(scheduler, sequence, rows, room->target);
        size_t least = room->untimed ? room->untimed : 1; /* has_room said so */
        rows = size_min(rows, in_time > least ? in_time : least);
        room->untimed -= size_min(rows, room->untimed);
    }
    sequence->usage.cached_tokens += reused;
    scheduler->prefix_hits += reused;
    step_add(scheduler, sequence, rows, reused);
}

/* Whether the step has room for at least one more row. */
static bool has_room(const struct scheduler *scheduler, const struct prefill_room *room) {
    if (rows_left(scheduler) == 0) return false;
    if (room->target <= 0 || room->untimed > 0) return true;
    struct cost_load load = scheduler->load;
    load.rows++;
    load.attn_rows++;
    load.mlp_rows++;
    load.logit_rows++;
    return predict(scheduler, &load) <= room->target;
}

/* Where decoding alone takes most of the target, prompts would be read a few rows at a time, and
 * first tokens come later than if everybody had waited for them. */
static double step_target(const struct scheduler *scheduler) {
    const struct scheduler_limits *limits = &scheduler->limits;
    if (scheduler->step.rows == 0 || limits->step_target_ns <= 0 || !limits->cost) return 0;
    double shared = predict(scheduler, &scheduler->load) / (1 - limits->prefill_share);
    return shared > limits->step_target_ns ? shared : limits->step_target_ns;
}

static struct sequence *skip_decoding(struct sequence *sequence) {
    while (sequence && sequence_is_decoding(sequence)) sequence = sequence->next;
    return sequence;
}

/* Running and waiting sequences in one order, so that who is admitted finds the blocks that those
 * before it complete in this very step. Needs no block for a running one: admission reserved for
 * all tokens known, and a prefill adds none. */
static void schedule_prefills(struct scheduler *scheduler, uint64_t now) {
    struct sequence *running = skip_decoding(scheduler->running.first);
    struct prefill_room room = {
        .target = step_target(scheduler),
        .untimed = KV_BLOCK_TOKENS,
    };
    bool admits = true;
    while (has_room(scheduler, &room)) {
        struct sequence *waiting = admits ? scheduler->waiting.first : NULL;
        size_t reused = 0;
        if (waiting && (!running || sequence_before(waiting, running))) {
            admits = admit(scheduler, waiting, now, &reused);
            if (admits) add_prefill(scheduler, waiting, reused, &room);
        } else if (running) {
            struct sequence *next = skip_decoding(running->next);
            add_prefill(scheduler, running, 0, &room);
            running = next;
        } else {
            return;
        }
    }
}
