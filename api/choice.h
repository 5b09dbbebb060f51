/* One choice of a completion: the tokens of one sequence on their way to text. Private to api/.
 *
 *   token bytes -> UTF-8 decoder -> stop matcher -> text, of which a prefix is visible
 *
 * Positions in the text are bytes from its start, counted over what was already written and
 * forgotten. What is behind `visible` is held back: it may be the start of a stop string. A torn
 * character is held in the decoder and is not yet text.
 */
#ifndef FATHOM_CHOICE_H
#define FATHOM_CHOICE_H

#include "api/stop.h"
#include "api/utf8.h"

/* What is told about one token beside its text. A token belongs to the text that it begins in; it
 * is shown when its last byte is. */
struct token_record {
    int32_t token;
    float logprob; /* NAN: none, the first token of a prompt */
    uint16_t depth;
    uint16_t top_count; /* of the entries of choice.top that are this token's, in order */
    size_t offset;      /* of its first character, in characters from the start of the text */
    size_t start, end;  /* positions: the text begins to be this token's; all of it is there */
};

struct choice {
    const struct completion_request *request;
    const struct prompt *prompt;
    const struct tokenizer *tokenizer;

    struct utf8_decoder decoder;
    struct stop_matcher matcher;
    struct text_buffer text; /* from position `forgotten` */
    size_t forgotten, visible;
    size_t matched;    /* position up to which stop strings have been looked for */
    size_t characters; /* decoded so far */

    struct token_record *records; /* malloc'd; not yet forgotten; empty unless they are asked for */
    size_t record_count, record_capacity;
    struct token_logprob *top; /* malloc'd */
    size_t top_count, top_capacity;

    size_t prompt_seen;       /* EVENT_PROMPTs so far */
    size_t completion_tokens; /* up to the one that finished the choice, itself included */
    const char *finish;       /* "stop", "length"; NULL: not yet known */
    /* Rows that ran after a stop string ended the choice, until the engine heard of it: how many is
     * chance, so they are no part of the answer's usage. Sub-layers of them that ran, by kind. */
    size_t overrun_rows, overrun_attn, overrun_mlp;
    bool finish_written;
    bool role_written;         /* of a chat's stream */
    bool ended;                /* EVENT_FINISHED was taken */
    bool failed;               /* memory ran out */
    struct engine_usage usage; /* once ended */
};

/* With echo, and if no EVENT_PROMPT will bring it, the prompt's text is there from the start. */
void choice_init(struct choice *choice, const struct completion_request *request,
                 const struct prompt *prompt, const struct tokenizer *tokenizer);
void choice_free(struct choice *choice);

/* Will the engine be asked for the prompt's logprobs? */
bool choice_scores_prompt(const struct completion_request *request);

/* PUSH_* flags. */
unsigned choice_push(struct choice *choice, const struct engine_event *event);

/* How many of `records` may be shown now, and how many entries of `top` belong to them. */
size_t choice_visible_records(const struct choice *choice, size_t *top_count);

/* Forgets the visible text and records: they have been written. */
void choice_forget(struct choice *choice);

#endif
