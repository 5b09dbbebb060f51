/* Chat: messages -> one prompt. Private to api/.
 *
 *   chat.c           the field `messages` -> struct chat, every member checked
 *   chat_format.c    the formats there are, and which of them this model speaks
 *   chat_template.c  a template in one spelling, so that a format can be recognised in it
 *   chat_render.c    chat + format -> text, and the places of its tokens
 *
 * No template is ever run: it is a program out of a file, and mixes a client's text with the
 * format's tokens before anyone can tell them apart.
 */
#ifndef FATHOM_CHAT_H
#define FATHOM_CHAT_H

#include "api/fields.h"

#define CHAT_MESSAGES_MAX 1024

enum chat_role { ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT };
#define CHAT_ROLES 3

struct chat_message {
    enum chat_role role;
    struct text_buffer content;
};

/* Where the prompt ends. */
enum chat_ending {
    END_BEFORE_ANSWER, /* the assistant's turn has begun: what a chat is for */
    END_AFTER_TURN,    /* the last message is complete, and nothing follows */
    END_IN_TURN,       /* the last message goes on */
};

struct chat {
    struct chat_message *messages;
    size_t count; /* 1..CHAT_MESSAGES_MAX */
    enum chat_ending ending;
};

/* `messages`, add_generation_prompt and continue_final_message into request->prompts, the format's
 * stop token into request->stop_tokens unless ignore_eos is set. On failure what was filled is
 * still the request's to free. */
int messages_read(const struct api_context *context, const json_t *body,
                  struct completion_request *request, struct api_error *error);

/* ---- Formats (chat_format.c) ----------------------------------------------------------------- */

/* Stands in pieces and tokens for the tokenizer's own end-of-text token, however it is written. */
#define CHAT_EOS "</s>"

#define FORMAT_TOKENS_MAX 3
#define FORMAT_MARKS_MAX  4

/* Where a system message goes: a turn of its own, or in front of a user's. The latter formats also
 * insist on turns taken in turn, a user's first. */
enum chat_system { SYSTEM_TURN, SYSTEM_IN_FIRST_USER, SYSTEM_IN_LAST_USER };

struct chat_format {
    const char *name;
    const char *marks[FORMAT_MARKS_MAX];   /* each is in every template of this format (normal form,
                                            chat_template.h) ... */
    const char *foreign;                   /* ... and this is in none */
    const char *tokens[FORMAT_TOKENS_MAX]; /* what of the pieces below is a token where the
                                              tokenizer has it; the first ends an answer */
    struct {
        const char *open, *close;
    } turns[CHAT_ROLES];
    const char *generation; /* opens the turn that is to be written */
    enum chat_system system;
    bool begins_with_bos; /* where no template tells */
    bool trims;           /* white space around a message's content is dropped */
};

/* A format as one model speaks it. */
struct chat_dialect {
    const struct chat_format *format;
    bool adds_bos;
    char *system; /* malloc'd; what a chat without a system message gets; NULL: nothing */
};

/* By context->chat_format, else by the tokenizer's chat_format, else by its chat_template, else
 * "plain". 400 chat_format_unknown if that leads nowhere. The caller frees dialect->system. */
int chat_dialect_find(const struct api_context *context, struct chat_dialect *dialect,
                      struct api_error *error);

/* The format, where --chat-format or the model's files say one that is known; else NULL: the model
 * has most likely not been taught to chat. */
const char *chat_format_stated(const struct api_context *context);

/* ---- Templates (chat_template.c) ------------------------------------------------------------- */

/* The template in normal form, NUL-terminated: no comments, no white space in code, strings in
 * double quotes and joined where they are added up, line ends as \n, members as .name. Linear. */
void chat_template_normalize(const char *source, struct text_buffer *out);

/* The system message that a template has ready for chats without one: what stands between `open`
 * and `close` in one string. NULL if there is none. Sets *unclear if there is something that cannot
 * be told, or no memory. */
char *chat_template_find_system(const char *normal, const char *open, const char *close,
                                bool *unclear);

/* ---- Rendering (chat_render.c) --------------------------------------------------------------- */

/* `chat` as the prompt's text and marks. A message's text never becomes a token of the format. */
int chat_render(const struct api_context *context, const struct chat_dialect *dialect,
                const struct chat *chat, struct completion_request *request,
                struct api_error *error);

#endif
