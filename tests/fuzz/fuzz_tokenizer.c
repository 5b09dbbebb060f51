/* Any bytes come back from the bundled tokenizer, byte for byte, with and without special tokens
 * recognised, and in no more tokens than bytes. */
#include "engine/engine.h"
#include "tests/fuzz/fuzz.h"

static struct tokenizer *bundled; /* lives as long as the process */

static size_t check_round_trip(const char *text, size_t length, bool parse_special) {
    struct token_list ids = {0};
    size_t at = 0, token_length;
    check(tokenizer_encode(bundled, text, length, parse_special, &ids, NULL) == 0);
    for (size_t i = 0; i < ids.count; i++) {
        const char *bytes = tokenizer_bytes(bundled, ids.ids[i], &token_length);
        check(ids.ids[i] >= 0 && (size_t)ids.ids[i] < tokenizer_size(bundled));
        check(parse_special || !tokenizer_is_special(bundled, ids.ids[i]));
        check(token_length > 0 && token_length <= length - at);
        check(memcmp(bytes, text + at, token_length) == 0);
        at += token_length;
    }
    check(at == length && ids.count >= length / tokenizer_longest(bundled));
    size_t count = ids.count;
    free(ids.ids);
    return count;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!bundled) {
        check(tokenizer_load(FATHOM_SOURCE "/models/fathom-tiny", &bundled, NULL) == 0);
    }
    char *text = copy_exact((const char *)data, size);
    size_t plain = check_round_trip(text, size, false);
    check(check_round_trip(text, size, true) <= plain);
    free(text);
    return 0;
}
