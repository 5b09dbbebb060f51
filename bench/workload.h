/* What is asked: prompts, lengths, tiers, conversations. A function of the settings, the seed and
 * the request's number alone, so that two servers, or two runs, are asked the same. */
#ifndef FATHOM_BENCH_WORKLOAD_H
#define FATHOM_BENCH_WORKLOAD_H

#include "api/api.h"
#include "bench/bench.h"
#include "bench/lengths.h"

enum { MIX_MAX = 16, MIX_NAME_MAX = 64 };

/* A weighted choice of quality tiers. */
struct mix {
    struct {
        char name[MIX_NAME_MAX];
        double weight;
    } tiers[MIX_MAX];
    size_t count;
};

struct workload_prompt {
    const char *text;          /* into `file`, or malloc'd when `owned` */
    size_t length, max_tokens; /* max_tokens 0: drawn */
    bool owned;
};

struct workload {
    const struct bench_settings *settings;
    const char *model; /* set by the caller before the first workload_write */
    bool chat;
    struct lengths input, output;
    int32_t id_low, id_high;
    struct mix mix;
    char *file;
    struct workload_prompt *prompts;
    size_t prompt_count;
    const char *extra; /* members of the extra object, without its braces */
    size_t extra_length;
};

/* What a request is, beside its body. */
struct workload_request {
    const char *quality; /* asked for, or NULL */
    size_t max_tokens;
    size_t cancel_after; /* chunks; 0: it is not cancelled */
};

int mix_parse(const char *text, struct mix *mix, struct error *error);

/* Checks the settings of the workload and reads its files. */
int workload_open(struct workload *workload, const struct bench_settings *settings,
                  struct error *error);
void workload_close(struct workload *workload);

/* Appends the JSON body of turn `turn` of a conversation. */
void workload_write(const struct workload *workload, uint64_t conversation, size_t turn,
                    struct text_buffer *body, struct workload_request *request);

#endif
