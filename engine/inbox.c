#include "engine/inbox.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int inbox_create(struct inbox *inbox, size_t limit, size_t token_limit, struct error *error) {
    size_t count = 16;
    while (count < limit) count *= 2;
    memset(inbox, 0, sizeof *inbox);
    inbox->buckets = calloc(count, sizeof *inbox->buckets);
    if (!inbox->buckets) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory for %zu requests", limit);
    }
    inbox->bucket_count = count;
    inbox->limit = limit;
    inbox->token_limit = token_limit;
    pthread_mutex_init(&inbox->lock, NULL);
    pthread_cond_init(&inbox->asked, NULL);
    return 0;
}

void inbox_destroy(struct inbox *inbox) {
    if (!inbox->buckets) return;
    while (inbox->first) {
        struct sequence *sequence = inbox->first;
        inbox->first = sequence->inbox_next;
        sequence_destroy(sequence);
    }
    pthread_cond_destroy(&inbox->asked);
    pthread_mutex_destroy(&inbox->lock);
    free(inbox->buckets);
    inbox->buckets = NULL;
}

/* Where the link to the sequence of this id is, or would be: its bucket's end. */
static struct sequence **find_link(struct inbox *inbox, uint64_t id) {
    size_t bucket = id * UINT64_C(0x9E3779B97F4A7C15) >> 32 & (inbox->bucket_count - 1);
    struct sequence **link = &inbox->buckets[bucket];
    while (*link && (*link)->request.id != id) link = &(*link)->bucket_next;
    return link;
}

static double recent_arrivals(const struct inbox *inbox, uint64_t now) {
    double age = now > inbox->recent_ns ? (double)(now - inbox->recent_ns) / 1e9 : 0;
    return inbox->recent * exp(-age / ARRIVAL_S);
}

static int accept_sequence(struct inbox *inbox, struct sequence *sequence, struct error *error) {
    struct sequence **link = find_link(inbox, sequence->request.id);
    if (*link) {
        return error_set(error, FATHOM_INVALID, "id %" PRIu64 " is in use", sequence->request.id);
    }
    if (inbox->accepted == inbox->limit) {
        return error_set(error, FATHOM_FULL,
                         "%zu requests are unfinished, which is the limit; try again later",
                         inbox->limit);
    }
    size_t prompt = sequence->request.prompt_length;
    size_t room = inbox->tokens < inbox->token_limit ? inbox->token_limit - inbox->tokens : 0;
    if (prompt > room && inbox->accepted > 0) {
        return error_set(error, FATHOM_FULL,
                         "the prompts of unfinished requests hold %zu tokens; with %zu more the "
                         "limit of %zu would be passed; try again later",
                         inbox->tokens, prompt, inbox->token_limit);
    }
    *link = sequence;
    inbox->tokens += prompt;
    if (!inbox->first) inbox->first_ns = time_now_ns();
    sequence->arrival = inbox->arrivals++;
    inbox->recent = recent_arrivals(inbox, sequence->submitted_ns) + 1;
    inbox->recent_ns = sequence->submitted_ns;
    *(inbox->last ? &inbox->last->inbox_next : &inbox->first) = sequence;
    inbox->last = sequence;
    inbox->accepted++;
    pthread_cond_signal(&inbox->asked);
    return 0;
}

int inbox_submit(struct inbox *inbox, struct sequence *sequence, struct error *error) {
    pthread_mutex_lock(&inbox->lock);
    int result = accept_sequence(inbox, sequence, error);
    pthread_mutex_unlock(&inbox->lock);
    return result;
}

void inbox_cancel(struct inbox *inbox, uint64_t id) {
    pthread_mutex_lock(&inbox->lock);
    struct sequence *sequence = *find_link(inbox, id);
    if (sequence) {
        atomic_store(&sequence->cancelled, true);
        inbox->cancel = true;
        pthread_cond_signal(&inbox->asked);
    }
    pthread_mutex_unlock(&inbox->lock);
}

struct inbox_count inbox_count(struct inbox *inbox, uint64_t now) {
    pthread_mutex_lock(&inbox->lock);
    struct inbox_count count = {inbox->accepted, inbox->tokens,
                                recent_arrivals(inbox, now) / ARRIVAL_S};
    pthread_mutex_unlock(&inbox->lock);
    return count;
}

uint64_t inbox_waits_since(struct inbox *inbox) {
    pthread_mutex_lock(&inbox->lock);
    uint64_t since = inbox->first ? inbox->first_ns : 0;
    pthread_mutex_unlock(&inbox->lock);
    return since;
}

void inbox_stop(struct inbox *inbox) {
    pthread_mutex_lock(&inbox->lock);
    inbox->stop = true;
    pthread_cond_signal(&inbox->asked);
    pthread_mutex_unlock(&inbox->lock);
}

bool inbox_collect(struct inbox *inbox, bool sleep, struct inbox_contents *contents) {
    pthread_mutex_lock(&inbox->lock);
    while (sleep && !inbox->stop && !inbox->cancel && !inbox->first) {
        pthread_cond_wait(&inbox->asked, &inbox->lock);
    }
    bool go_on = !inbox->stop;
    if (go_on) {
        *contents = (struct inbox_contents){inbox->first, inbox->cancel};
        inbox->first = inbox->last = NULL;
        inbox->cancel = false;
    }
    pthread_mutex_unlock(&inbox->lock);
    return go_on;
}

void inbox_retire(struct inbox *inbox, struct sequence *sequence) {
    pthread_mutex_lock(&inbox->lock);
    *find_link(inbox, sequence->request.id) = sequence->bucket_next;
    inbox->accepted--;
    inbox->tokens -= sequence->request.prompt_length;
    pthread_mutex_unlock(&inbox->lock);
}
