/* libFuzzer entry. The first byte chooses what the rest is: a text for the bundled tokenizer, which
 * must come back byte for byte; a tokenizer.json to load; or a pattern for the pre-tokenizer.
 */
#include "engine/engine.h"
#include "engine/pretokenizer.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerInitialize(int *argument_count, char ***arguments);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct tokenizer *bundled;
static char folder[64], file_path[128];

static void remove_folder(void) {
    unlink(file_path);
    rmdir(folder);
}

int LLVMFuzzerInitialize(int *argument_count, char ***arguments) {
    (void)argument_count;
    (void)arguments;
    if (tokenizer_load(FATHOM_SOURCE "/models/fathom-tiny", &bundled, NULL) != 0) abort();
    strcpy(folder, "/tmp/fathom-fuzz-XXXXXX");
    if (!mkdtemp(folder)) abort();
    snprintf(file_path, sizeof file_path, "%s/tokenizer.json", folder);
    atexit(remove_folder);
    return 0;
}

static void check_round_trip(const char *text, size_t length, bool parse_special) {
    struct token_list ids = {0};
    if (tokenizer_encode(bundled, text, length, parse_special, &ids, NULL) != 0) abort();
    size_t at = 0;
    for (size_t i = 0; i < ids.count; i++) {
        size_t token_length;
        const char *bytes = tokenizer_bytes(bundled, ids.ids[i], &token_length);
        if (token_length > length - at || memcmp(bytes, text + at, token_length) != 0) abort();
        at += token_length;
    }
    if (at != length) abort();
    free(ids.ids);
}

static void load_and_use(const char *json, size_t size) {
    FILE *file = fopen(file_path, "wb");
    if (!file || fwrite(json, 1, size, file) != size || fclose(file) != 0) abort();
    struct tokenizer *tokenizer = NULL;
    if (tokenizer_load(folder, &tokenizer, NULL) != 0) return;
    static const char text[] =
        "The lamp's  12\n\xFF <|endoftext|> e\xCC\x81 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\t->Ab";
    struct token_list ids = {0};
    (void)tokenizer_encode(tokenizer, text, sizeof text - 1, true, &ids, NULL);
    for (size_t i = 0; i < ids.count; i++) {
        if (ids.ids[i] < 0 || (size_t)ids.ids[i] >= tokenizer_size(tokenizer)) abort();
    }
    free(ids.ids);
    tokenizer_destroy(tokenizer);
}

/* The pieces are in order, inside the text, and without a gap (the behavior is Isolated). */
static void check_pieces(const struct pretokenizer *pretokenizer, const char *text, size_t length) {
    struct split_state state;
    split_state_init(&state, length);
    if (pretokenizer_split(pretokenizer, &state, text, length, NULL) != 0) abort();
    size_t at = 0;
    for (size_t i = 0; i < state.spans.count; i++) {
        if (state.spans.items[i].start != at || state.spans.items[i].end <= at) abort();
        at = state.spans.items[i].end;
    }
    if (at != length) abort();
    split_state_clear(&state);
}

static void split_by_pattern(const char *pattern, size_t size) {
    static const char text[] = "The lamp's  12\n 水深 e\xCC\x81 aaaaaaaaaaaaaaaaaaaaaaaaaaaa\t->Ab";
    json_t *description =
        json_pack("{s:s, s:[{s:s, s:{s:s%}, s:s}, {s:s, s:b, s:b}]}", "type", "Sequence",
                  "pretokenizers", "type", "Split", "pattern", "Regex", pattern, size, "behavior",
                  "Isolated", "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0);
    struct pretokenizer *pretokenizer = NULL;
    if (description && pretokenizer_create(description, &pretokenizer, NULL) == 0) {
        check_pieces(pretokenizer, text, sizeof text - 1);
        pretokenizer_destroy(pretokenizer);
    }
    json_decref(description);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    const char *rest = (const char *)data + 1;
    switch (data[0] % 4) {
    case 0:
        check_round_trip(rest, size - 1, false);
        break;
    case 1:
        check_round_trip(rest, size - 1, true);
        break;
    case 2:
        load_and_use(rest, size - 1);
        break;
    default:
        split_by_pattern(rest, size - 1);
        break;
    }
    return 0;
}
