#include "bench/workload.h"

#include <ctype.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PROMPT_FILE_MAX  ((size_t)1 << 30)
#define PROMPT_BYTES_MAX ((size_t)4 << 20)
#define TOKEN_ID_MAX     16777215

/* Streams of the dice: one for the shared prefix, four for each turn of each conversation. */
enum { STREAM_INPUT, STREAM_OUTPUT, STREAM_TIER, STREAM_CANCEL, STREAMS_PER_TURN };
#define STREAM_PREFIX UINT64_MAX

static struct dice turn_dice(const struct workload *workload, uint64_t conversation, size_t turn,
                             unsigned purpose) {
    uint64_t number = conversation * workload->settings->turns + turn;
    return dice_make(workload->settings->seed, number * STREAMS_PER_TURN + purpose);
}

/* ---- Settings -------------------------------------------------------------------------------- */

int mix_parse(const char *text, struct mix *mix, struct error *error) {
    *mix = (struct mix){0};
    while (*text) {
        size_t item = strcspn(text, ","), name = strcspn(text, ":,");
        double weight = 1;
        char *end = (char *)(uintptr_t)(text + name);
        if (*end == ':') {
            if (!isdigit((unsigned char)end[1]) && end[1] != '.') item = 0;
            weight = strtod(end + 1, &end);
        }
        if (name == 0 || name >= MIX_NAME_MAX || end != text + item || !isfinite(weight) ||
            weight <= 0 || mix->count == MIX_MAX) {
            return error_set(error, FATHOM_INVALID,
                             "--quality must be a tier or up to %d of them with weights above 0, "
                             "full:1,balanced:3; it is wrong at '%s'",
                             MIX_MAX, text);
        }
        memcpy(mix->tiers[mix->count].name, text, name);
        mix->tiers[mix->count++].weight = weight;
        text += item + (text[item] == ',');
    }
    return 0;
}

static const char *mix_draw(const struct mix *mix, struct dice *dice) {
    double sum = 0;
    for (size_t i = 0; i < mix->count; i++) sum += mix->tiers[i].weight;
    double point = dice_unit(dice) * sum;
    for (size_t i = 0; i + 1 < mix->count; i++) {
        point -= mix->tiers[i].weight;
        if (point < 0) return mix->tiers[i].name;
    }
    return mix->count ? mix->tiers[mix->count - 1].name : NULL;
}

static int ids_parse(struct workload *workload, const char *text, struct error *error) {
    char *end;
    long low = strtol(text, &end, 10), high = *end == '-' ? strtol(end + 1, &end, 10) : low;
    if (*end != '\0' || end == text || low < 0 || high < low || high > TOKEN_ID_MAX) {
        return error_set(error, FATHOM_INVALID,
                         "--token-ids must be LOW-HIGH, of 0 to %d; got '%s'", TOKEN_ID_MAX, text);
    }
    workload->id_low = (int32_t)low;
    workload->id_high = (int32_t)high;
    return 0;
}

static int extra_check(struct workload *workload, const char *text, struct error *error) {
    json_error_t where;
    json_t *object = json_loads(text, 0, &where);
    bool is_json = object != NULL, valid = json_is_object(object);
    bool empty = json_object_size(object) == 0;
    json_decref(object);
    if (!valid)
        return error_set(error, FATHOM_INVALID, "--extra-body must be a JSON object: %s",
                         is_json ? "it is another JSON value" : where.text);
    if (empty) return 0;
    const char *open = strchr(text, '{') + 1;
    workload->extra = open;
    workload->extra_length = (size_t)(strrchr(text, '}') - open);
    return 0;
}

/* A line is a text, or a JSON object {"prompt": text, "max_tokens": number}. */
static int prompt_parse(struct workload_prompt *prompt, const char *line, size_t length,
                        size_t number, struct error *error) {
    if (length > PROMPT_BYTES_MAX)
        return error_set(error, FATHOM_INVALID, "--prompts: line %zu is over %zu bytes", number,
                         PROMPT_BYTES_MAX);
    *prompt = (struct workload_prompt){.text = line, .length = length};
    if (line[0] != '{') return 0;
    json_t *object = json_loadb(line, length, 0, NULL);
    const json_t *text = json_object_get(object, "prompt");
    const json_t *max_tokens = json_object_get(object, "max_tokens");
    json_int_t tokens = max_tokens ? json_integer_value(max_tokens) : 0;
    bool valid =
        json_is_string(text) && tokens >= 0 && tokens <= LENGTH_MAX && (!max_tokens || tokens > 0);
    char *copy = valid ? strdup(json_string_value(text)) : NULL;
    json_decref(object);
    if (!valid) {
        return error_set(error, FATHOM_INVALID,
                         "--prompts: line %zu begins like JSON; it must be {\"prompt\": a string, "
                         "\"max_tokens\": 1 to %d or none}",
                         number, LENGTH_MAX);
    }
    if (!copy) return error_set(error, FATHOM_NO_MEMORY, "no memory for the prompts");
    *prompt = (struct workload_prompt){copy, strlen(copy), (size_t)tokens, true};
    return 0;
}

static int prompts_read(struct workload *workload, const char *path, struct error *error) {
    size_t size, lines = 1;
    int result = file_read(path, PROMPT_FILE_MAX, &workload->file, &size, error);
    if (result != 0) {
        error_prefix(error, "--prompts");
        return result;
    }
    for (size_t i = 0; i < size; i++) lines += workload->file[i] == '\n';
    workload->prompts = calloc(lines, sizeof *workload->prompts);
    if (!workload->prompts) return error_set(error, FATHOM_NO_MEMORY, "no memory for the prompts");
    size_t number = 0;
    for (char *line = workload->file, *end = line + size; line < end;) {
        char *feed = memchr(line, '\n', (size_t)(end - line));
        size_t length = (size_t)((feed ? feed : end) - line);
        number++;
        if (length && line[length - 1] == '\r') length--;
        if (length) {
            struct workload_prompt *prompt = &workload->prompts[workload->prompt_count];
            result = prompt_parse(prompt, line, length, number, error);
            if (result != 0) return result;
            workload->prompt_count++;
        }
        line = feed ? feed + 1 : end;
    }
    if (workload->prompt_count == 0)
        return error_set(error, FATHOM_INVALID, "--prompts: %s has no line with text", path);
    return 0;
}

int workload_open(struct workload *workload, const struct bench_settings *settings,
                  struct error *error) {
    *workload = (struct workload){.settings = settings};
    workload->chat = strcmp(settings->endpoint, "chat") == 0;
    if (!workload->chat && strcmp(settings->endpoint, "completions") != 0)
        return error_set(error, FATHOM_INVALID, "--endpoint must be completions or chat; got '%s'",
                         settings->endpoint);
    if (settings->no_stream && settings->cancel > 0)
        return error_set(error, FATHOM_INVALID,
                         "--cancel counts chunks, so it cannot be used with --no-stream");
    int result = lengths_parse("input-tokens", settings->input_tokens, &workload->input, error);
    if (result == 0)
        result = lengths_parse("output-tokens", settings->output_tokens, &workload->output, error);
    if (result == 0) result = ids_parse(workload, settings->token_ids, error);
    if (result == 0 && settings->quality)
        result = mix_parse(settings->quality, &workload->mix, error);
    if (result == 0 && settings->extra_body)
        result = extra_check(workload, settings->extra_body, error);
    if (result == 0 && settings->prompts) result = prompts_read(workload, settings->prompts, error);
    if (result != 0) workload_close(workload);
    return result;
}

void workload_close(struct workload *workload) {
    for (size_t i = 0; i < workload->prompt_count; i++) {
        if (workload->prompts[i].owned) free((char *)(uintptr_t)workload->prompts[i].text);
    }
    free(workload->prompts);
    free(workload->file);
    *workload = (struct workload){0};
}

/* ---- Bodies ---------------------------------------------------------------------------------- */

static void write_id(struct text_buffer *body, int32_t id) {
    char digits[12];
    size_t at = sizeof digits;
    do digits[--at] = (char)('0' + id % 10);
    while (id /= 10);
    text_append(body, digits + at, sizeof digits - at);
}

static void write_ids(const struct workload *workload, struct dice *dice, size_t count,
                      struct text_buffer *body, bool *first) {
    uint64_t range = (uint64_t)(workload->id_high - workload->id_low) + 1;
    for (size_t i = 0; i < count; i++) {
        if (!*first) text_append(body, ",", 1);
        *first = false;
        write_id(body, workload->id_low + (int32_t)dice_below(dice, range));
    }
}

/* Words of two syllables: about one or two tokens each. Nothing in them needs an escape. */
static void write_words(struct dice *dice, size_t count, struct text_buffer *body) {
    static const char consonants[] = "bdfghklmnprstvwz", vowels[] = "aeiou";
    for (size_t i = 0; i < count; i++) {
        char word[5] = {consonants[dice_below(dice, 16)], vowels[dice_below(dice, 5)],
                        consonants[dice_below(dice, 16)], vowels[dice_below(dice, 5)], ' '};
        text_append(body, word, sizeof word);
    }
}

static const struct workload_prompt *file_prompt(const struct workload *workload,
                                                 uint64_t conversation, size_t turn) {
    uint64_t number = conversation * workload->settings->turns + turn;
    return &workload->prompts[number % workload->prompt_count];
}

/* "prompt": [ids]: the shared prefix, then what every turn so far added. */
static void write_id_prompt(const struct workload *workload, uint64_t conversation, size_t turn,
                            struct text_buffer *body) {
    bool first = true;
    struct dice prefix = dice_make(workload->settings->seed, STREAM_PREFIX);
    text_append_string(body, ",\"prompt\":[");
    write_ids(workload, &prefix, workload->settings->prefix_tokens, body, &first);
    for (size_t i = 0; i <= turn; i++) {
        struct dice dice = turn_dice(workload, conversation, i, STREAM_INPUT);
        size_t count = lengths_draw(&workload->input, &dice);
        write_ids(workload, &dice, count, body, &first);
    }
    text_append(body, "]", 1);
}

/* What one turn says, as a JSON string; the prefix comes before the first. */
static void write_text(const struct workload *workload, uint64_t conversation, size_t turn,
                       bool prefixed, struct text_buffer *body) {
    struct text_buffer text = {0};
    struct dice prefix = dice_make(workload->settings->seed, STREAM_PREFIX);
    struct dice dice = turn_dice(workload, conversation, turn, STREAM_INPUT);
    if (prefixed) write_words(&prefix, workload->settings->prefix_tokens, &text);
    if (workload->prompts) {
        const struct workload_prompt *prompt = file_prompt(workload, conversation, turn);
        text_append(&text, prompt->text, prompt->length);
    } else {
        write_words(&dice, lengths_draw(&workload->input, &dice), &text);
    }
    if (text.failed) body->failed = true;
    text_append_json(body, text.data, text.length);
    text_free(&text);
}

/* The answers in between stand for real ones: what is asked must not depend on what was
 * answered. */
static void write_messages(const struct workload *workload, uint64_t conversation, size_t turn,
                           struct text_buffer *body) {
    text_append_string(body, ",\"messages\":[");
    for (size_t i = 0; i <= turn; i++) {
        if (i > 0) text_append_string(body, ",{\"role\":\"assistant\",\"content\":\"Yes.\"},");
        text_append_string(body, "{\"role\":\"user\",\"content\":");
        write_text(workload, conversation, i, i == 0, body);
        text_append(body, "}", 1);
    }
    text_append(body, "]", 1);
}

static void write_text_prompt(const struct workload *workload, uint64_t conversation, size_t turn,
                              struct text_buffer *body) {
    struct text_buffer text = {0};
    struct dice prefix = dice_make(workload->settings->seed, STREAM_PREFIX);
    write_words(&prefix, workload->settings->prefix_tokens, &text);
    for (size_t i = 0; i <= turn; i++) {
        const struct workload_prompt *prompt = file_prompt(workload, conversation, i);
        if (i > 0) text_append(&text, "\n", 1);
        text_append(&text, prompt->text, prompt->length);
    }
    if (text.failed) body->failed = true;
    text_append_string(body, ",\"prompt\":");
    text_append_json(body, text.data, text.length);
    text_free(&text);
}

static void draw_request(const struct workload *workload, uint64_t conversation, size_t turn,
                         struct workload_request *request) {
    struct dice output = turn_dice(workload, conversation, turn, STREAM_OUTPUT);
    struct dice tier = turn_dice(workload, conversation, turn, STREAM_TIER);
    struct dice cancel = turn_dice(workload, conversation, turn, STREAM_CANCEL);
    size_t drawn = lengths_draw(&workload->output, &output), stated = 0;
    if (workload->prompts) stated = file_prompt(workload, conversation, turn)->max_tokens;
    *request = (struct workload_request){
        .quality = mix_draw(&workload->mix, &tier),
        .max_tokens = stated ? stated : drawn,
    };
    if (dice_unit(&cancel) < workload->settings->cancel)
        request->cancel_after = 1 + dice_below(&cancel, request->max_tokens);
}

void workload_write(const struct workload *workload, uint64_t conversation, size_t turn,
                    struct text_buffer *body, struct workload_request *request) {
    const struct bench_settings *settings = workload->settings;
    draw_request(workload, conversation, turn, request);
    text_append_string(body, "{\"model\":");
    text_append_json(body, workload->model, strlen(workload->model));
    if (workload->chat)
        write_messages(workload, conversation, turn, body);
    else if (workload->prompts)
        write_text_prompt(workload, conversation, turn, body);
    else
        write_id_prompt(workload, conversation, turn, body);
    text_append_format(body, ",\"%s\":%zu,\"temperature\":%.6g",
                       workload->chat ? "max_completion_tokens" : "max_tokens", request->max_tokens,
                       settings->temperature);
    if (!settings->no_stream)
        text_append_string(body, ",\"stream\":true,\"stream_options\":{\"include_usage\":true}");
    if (settings->ignore_eos) text_append_string(body, ",\"ignore_eos\":true");
    if (request->quality) {
        text_append_string(body, ",\"quality\":");
        text_append_json(body, request->quality, strlen(request->quality));
    }
    if (workload->extra) text_append(body, ",", 1);
    text_append(body, workload->extra, workload->extra_length);
    text_append(body, "}", 1);
}
