#include "api/chat.h"

#include <stdlib.h>
#include <string.h>

/* Each row is what the model family's published template writes; marks are the expressions that
 * write it, spaces and line ends included, so that a template which writes something else is not
 * taken for it. Rows of one name are variants: unless the template says which, the first is
 * meant. */
static const struct chat_format formats[] = {
    {
        .name = "chatml",
        .marks = {"\"<|im_start|>\"+message.role+\"\\n\"+message.content+\"<|im_end|>\\n\"",
                  "\"<|im_start|>assistant\\n\""},
        .tokens = {"<|im_end|>", "<|im_start|>"},
        .turns = {{"<|im_start|>system\n", "<|im_end|>\n"},
                  {"<|im_start|>user\n", "<|im_end|>\n"},
                  {"<|im_start|>assistant\n", "<|im_end|>\n"}},
        .generation = "<|im_start|>assistant\n",
    },
    {
        .name = "llama3",
        .marks = {"\"<|start_header_id|>\"+message.role+\"<|end_header_id|>\\n\\n\"+message.content"
                  "|trim+\"<|eot_id|>\"",
                  "\"<|start_header_id|>assistant<|end_header_id|>\\n\\n\""},
        .foreign = "<|start_header_id|>system", /* later ones write dates and tools into it */
        .tokens = {"<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"},
        .turns = {{"<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"},
                  {"<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"},
                  {"<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"}},
        .generation = "<|start_header_id|>assistant<|end_header_id|>\n\n",
        .begins_with_bos = true,
        .trims = true,
    },
    {
        .name = "mistral",
        .marks = {"\"[INST] \"+message.content+\" [/INST]\"", "{{message.content+eos_token}}"},
        .foreign = "<<SYS>>",
        .tokens = {CHAT_EOS, "[INST]", "[/INST]"},
        .turns = {{"", "\n\n"}, {"[INST] ", " [/INST]"}, {"", CHAT_EOS}},
        .generation = "",
        .system = SYSTEM_IN_FIRST_USER,
        .begins_with_bos = true,
    },
    {
        .name = "mistral", /* with the byte-level tokenizer that the family went over to */
        .marks = {"\"[INST]\"+message.content+\"[/INST]\"", "{{-message.content+eos_token}}",
                  "loop.lastandsystem_messageisdefined",
                  "\"[INST]\"+system_message+\"\\n\\n\"+message.content+\"[/INST]\""},
        .tokens = {CHAT_EOS, "[INST]", "[/INST]"},
        .turns = {{"", "\n\n"}, {"[INST]", "[/INST]"}, {"", CHAT_EOS}},
        .generation = "",
        .system = SYSTEM_IN_LAST_USER,
        .begins_with_bos = true,
    },
    {
        .name = "zephyr",
        .marks = {"\"<|system|>\\n\"+message.content+eos_token}}\\n",
                  "\"<|user|>\\n\"+message.content+eos_token}}\\n",
                  "\"<|assistant|>\\n\"+message.content+eos_token}}\\n",
                  "{{\"<|assistant|>\"}}\\n"},
        .tokens = {CHAT_EOS},
        .turns = {{"<|system|>\n", CHAT_EOS "\n"},
                  {"<|user|>\n", CHAT_EOS "\n"},
                  {"<|assistant|>\n", CHAT_EOS "\n"}},
        .generation = "<|assistant|>\n",
    },
    {
        .name = "plain", /* for models that were never taught to chat */
        .turns = {{"", "\n\n"}, {"User: ", "\n"}, {"Assistant: ", "\n"}},
        .generation = "Assistant:",
    },
};
#define FORMATS (sizeof formats / sizeof *formats)

const char chat_format_names[] = "chatml, llama3, mistral, zephyr, plain";

static const struct chat_format *find_by_name(const char *name) {
    for (size_t i = 0; i < FORMATS; i++) {
        if (strcmp(formats[i].name, name) == 0) return &formats[i];
    }
    return NULL;
}

bool chat_format_is_known(const char *name) {
    return find_by_name(name) != NULL;
}

static bool is_written_by(const struct chat_format *format, const char *normal) {
    if (!format->marks[0] || (format->foreign && strstr(normal, format->foreign))) return false;
    for (size_t i = 0; i < FORMAT_MARKS_MAX && format->marks[i]; i++) {
        if (!strstr(normal, format->marks[i])) return false;
    }
    return true;
}

/* What of a dialect only its template tells. False: not to be understood. */
static bool read_template(const char *normal, struct chat_dialect *dialect) {
    bool unclear = false;
    for (size_t i = 0; i < FORMATS && !dialect->format; i++) {
        if (is_written_by(&formats[i], normal)) dialect->format = &formats[i];
    }
    if (!dialect->format) return false;
    dialect->adds_bos = strstr(normal, "bos_token") != NULL;
    if (strcmp(dialect->format->name, "chatml") == 0) {
        dialect->system =
            chat_template_find_system(normal, "<|im_start|>system\\n", "<|im_end|>\\n", &unclear);
    }
    return !unclear;
}

static int refuse(struct api_error *error, const char *what, const char *name) {
    return api_error_set(error, 400, "chat_format_unknown", NULL,
                         "this server cannot tell how its model wants a chat written: %s%.64s; "
                         "start it with --chat-format and one of %s",
                         what, name, chat_format_names);
}

int chat_dialect_find(const struct api_context *context, struct chat_dialect *dialect,
                      struct api_error *error) {
    const struct tokenizer *tokenizer = context->tokenizer;
    const char *source = tokenizer_chat_template(tokenizer), *name = context->chat_format;
    struct text_buffer normal = {0};
    bool is_clear = false;
    *dialect = (struct chat_dialect){0};
    if (!name) name = tokenizer_chat_format(tokenizer);
    if (name && !chat_format_is_known(name)) return refuse(error, "unknown chat_format ", name);
    if (!name && !source) name = "plain";
    if (source) chat_template_normalize(source, &normal);
    if (normal.failed) {
        text_free(&normal);
        return refuse_no_memory(error);
    }
    if (source) is_clear = read_template(normal.data, dialect);
    text_free(&normal);
    bool is_named_so = !name || (is_clear && strcmp(dialect->format->name, name) == 0);
    if (is_clear && is_named_so) return 0;
    free(dialect->system);
    dialect->system = NULL;
    if (!name) return refuse(error, "its chat_template is none of those known here", "");
    dialect->format = find_by_name(name);
    dialect->adds_bos = dialect->format->begins_with_bos || tokenizer_adds_bos(tokenizer);
    return 0;
}

const char *chat_format_stated(const struct api_context *context) {
    const struct tokenizer *tokenizer = context->tokenizer;
    struct chat_dialect dialect;
    struct api_error error;
    if (!context->chat_format && !tokenizer_chat_format(tokenizer) &&
        !tokenizer_chat_template(tokenizer))
        return NULL;
    if (chat_dialect_find(context, &dialect, &error) != 0) return NULL;
    free(dialect.system);
    return dialect.format->name;
}
