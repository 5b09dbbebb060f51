#include "api/unsupported.h"

/* What would change the answer and is not done here must be refused, or a client would take an
 * answer for something that it is not. A value that asks for nothing is let through: clients send
 * their defaults. */
enum neutral { NEVER, IF_EMPTY, IF_FALSE, IF_TRUE, IF_ZERO, IF_ONE, IF_NONE, IF_TEXT_ONLY };
enum endpoint { BOTH, COMPLETIONS, CHAT };

static const struct {
    const char *name;
    enum neutral neutral;
    enum endpoint endpoint;
} unsupported[] = {
    {"suffix", IF_EMPTY, COMPLETIONS},
    {"tools", IF_EMPTY, BOTH},
    {"tool_choice", IF_NONE, BOTH},
    {"parallel_tool_calls", NEVER, CHAT}, /* without tools it is an error elsewhere, too */
    {"functions", IF_EMPTY, BOTH},
    {"function_call", IF_NONE, BOTH},
    {"audio", NEVER, BOTH},
    {"modalities", IF_TEXT_ONLY, BOTH},
    {"prediction", NEVER, BOTH},
    {"reasoning_effort", NEVER, BOTH},
    {"verbosity", NEVER, CHAT},
    {"web_search_options", NEVER, BOTH},
    {"chat_template", NEVER, CHAT},
    {"chat_template_kwargs", IF_EMPTY, CHAT},
    {"documents", IF_EMPTY, CHAT},
    {"prompt_embeds", NEVER, COMPLETIONS},
    {"prompt_logprobs", NEVER, BOTH},
    {"truncate_prompt_tokens", NEVER, BOTH},
    {"structured_outputs", NEVER, BOTH},
    {"guided_json", NEVER, BOTH},
    {"guided_regex", NEVER, BOTH},
    {"guided_choice", NEVER, BOTH},
    {"guided_grammar", NEVER, BOTH},
    {"guided_decoding_backend", NEVER, BOTH},
    {"json_schema", NEVER, BOTH},
    {"grammar", NEVER, BOTH},
    {"allowed_token_ids", NEVER, BOTH},
    {"bad_words", IF_EMPTY, BOTH},
    {"logits_processors", IF_EMPTY, BOTH},
    {"include_stop_str_in_output", IF_FALSE, BOTH},
    {"skip_special_tokens", IF_TRUE, BOTH},
    {"add_special_tokens", IF_TRUE, COMPLETIONS},
    {"add_special_tokens", IF_FALSE, CHAT}, /* the format has all that belong there */
    {"return_tokens_as_token_ids", IF_FALSE, BOTH},
    {"return_token_ids", IF_FALSE, BOTH},
    {"use_beam_search", IF_FALSE, BOTH},
    {"early_stopping", IF_FALSE, BOTH},
    {"length_penalty", IF_ONE, BOTH},
    {"typical_p", IF_ONE, BOTH},
    {"mirostat", IF_ZERO, BOTH},
};

static bool asks_for_nothing(const json_t *value, enum neutral neutral) {
    switch (neutral) {
    case IF_EMPTY:
        return (json_is_string(value) && json_string_length(value) == 0) ||
               (json_is_array(value) && json_array_size(value) == 0) ||
               (json_is_object(value) && json_object_size(value) == 0);
    case IF_FALSE:
        return json_is_false(value);
    case IF_TRUE:
        return json_is_true(value);
    case IF_ZERO:
        return json_is_number(value) && json_number_value(value) == 0;
    case IF_ONE:
        return json_is_number(value) && json_number_value(value) == 1;
    case IF_NONE:
        return value_is_word(value, "none");
    case IF_TEXT_ONLY:
        return json_array_size(value) == 1 && value_is_word(json_array_get(value, 0), "text");
    default:
        return false;
    }
}

int unsupported_refuse(const json_t *body, bool is_chat, struct api_error *error) {
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported; i++) {
        if (unsupported[i].endpoint == (is_chat ? COMPLETIONS : CHAT)) continue;
        const char *name = unsupported[i].name;
        const json_t *value = field_get(body, name);
        if (!value || asks_for_nothing(value, unsupported[i].neutral)) continue;
        return refuse_unsupported(name, error);
    }
    const json_t *format = field_get(body, "response_format");
    if (format && !value_is_word(json_object_get(format, "type"), "text")) {
        return api_error_set(
            error, 400, "unsupported_parameter", "response_format",
            "response_format other than {\"type\":\"text\"} is not supported here");
    }
    return 0;
}
