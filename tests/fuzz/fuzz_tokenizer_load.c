/* Any tokenizer.json and tokenizer_config.json are a tokenizer or an error.
 *
 * An input that is a JSON object is put over a small tokenizer, member by member, so that it says
 * only what is unusual; its member "config" becomes tokenizer_config.json. Any other input is the
 * file itself. */
#include <jansson.h>
#include <unistd.h>

#include "engine/tokenizer_private.h"
#include "tests/fuzz/fuzz.h"

static char folder[64], main_path[128], config_path[128];

static void remove_folder(void) {
    unlink(main_path);
    unlink(config_path);
    rmdir(folder);
}

static void make_folder(void) {
    if (folder[0]) return;
    strcpy(folder, "/tmp/fathom-fuzz-XXXXXX");
    check(mkdtemp(folder));
    snprintf(main_path, sizeof main_path, "%s/tokenizer.json", folder);
    snprintf(config_path, sizeof config_path, "%s/tokenizer_config.json", folder);
    atexit(remove_folder);
}

static void write_file(const char *path, const char *bytes, size_t length) {
    FILE *file = fopen(path, "wb");
    check(file && fwrite(bytes, 1, length, file) == length);
    check(fclose(file) == 0);
}

static void write_json(const char *path, const json_t *json) {
    char *text = json_dumps(json, JSON_COMPACT | JSON_ENCODE_ANY);
    check(text != NULL);
    write_file(path, text, strlen(text));
    free(text);
}

/* The tokens of all bytes, as byte-level vocabularies write them, then a few more. */
static json_t *small_tokenizer(void) {
    json_t *vocabulary = json_object();
    unsigned moved = 256;
    for (unsigned byte = 0; byte < 256; byte++) {
        bool shown = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
        unsigned c = shown ? byte : moved++;
        char name[3] = {(char)c};
        if (c >= 0x80) name[0] = (char)(0xC0 | c >> 6), name[1] = (char)(0x80 | (c & 63));
        json_object_set_new(vocabulary, name, json_integer(byte));
    }
    static const char *const more[] = {"th", "the", "\xC4\xA0t", "\xC4\xA0th", "\xC4\xA0the"};
    for (int i = 0; i < 5; i++) json_object_set_new(vocabulary, more[i], json_integer(256 + i));
    json_t *json = json_pack("{s:[{s:i,s:s,s:b}], s:{s:s,s:b}, s:{s:s}, s:{s:s,s:o,s:[s,s,s,s]}}",
                             "added_tokens", "id", 300, "content", "<end>", "special", 1,
                             "pre_tokenizer", "type", "ByteLevel", "add_prefix_space", 0, "decoder",
                             "type", "ByteLevel", "model", "type", "BPE", "vocab", vocabulary,
                             "merges", "t h", "th e", "\xC4\xA0 t", "\xC4\xA0t h");
    check(json != NULL);
    return json;
}

static void check_tokenizer(const struct tokenizer *tokenizer) {
    static const char text[] =
        "The the lamp's  12\n\xFF <end>e\xCC\x81 aaaaaaaaaaaaaaaaaaaaaaaaaaaa\t->Ab";
    size_t length = sizeof text - 1, at = 0, token_length;
    struct token_list ids = {0};
    struct error error = {0};
    int result = tokenizer_encode(tokenizer, text, length, true, &ids, &error);
    if (result != 0) check_error(result, &error);
    bool keeps = result == 0 && !tokenizer->normalizes && tokenizer->longest != SIZE_MAX &&
                 !pretokenizer_adds_prefix_space(tokenizer->pretokenizer);
    check(result != 0 || ids.count >= length / tokenizer->longest);
    for (size_t i = 0; i < ids.count; i++) {
        check(ids.ids[i] >= 0 && (size_t)ids.ids[i] < tokenizer_size(tokenizer));
        const char *bytes = tokenizer_bytes(tokenizer, ids.ids[i], &token_length);
        if (!keeps) continue;
        check(token_length <= length - at && memcmp(bytes, text + at, token_length) == 0);
        at += token_length;
    }
    check(!keeps || at == length);
    check(tokenizer_bos(tokenizer) < (int64_t)tokenizer_size(tokenizer));
    check(tokenizer_eos(tokenizer) < (int64_t)tokenizer_size(tokenizer));
    check(!tokenizer_adds_bos(tokenizer) || tokenizer_bos(tokenizer) >= 0);
    free(ids.ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    make_folder();
    unlink(config_path);
    json_t *input = json_loadb((const char *)data, size, JSON_REJECT_DUPLICATES, NULL);
    if (json_is_object(input)) {
        json_t *whole = small_tokenizer();
        const json_t *config = json_object_get(input, "config");
        if (config) write_json(config_path, config);
        json_object_del(input, "config");
        json_object_update_recursive(whole, input);
        write_json(main_path, whole);
        json_decref(whole);
    } else {
        write_file(main_path, (const char *)data, size);
    }
    json_decref(input);
    struct tokenizer *tokenizer = NULL;
    struct error error = {0};
    int result = tokenizer_load(folder, &tokenizer, &error);
    if (result == 0) {
        check_tokenizer(tokenizer);
        tokenizer_destroy(tokenizer);
    } else {
        check_error(result, &error);
        check(!tokenizer);
    }
    return 0;
}
