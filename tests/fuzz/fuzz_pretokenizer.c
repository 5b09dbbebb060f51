/* Any text is a pattern for the pre-tokenizer or an error; the pieces that a pattern makes are in
 * order, inside the text and, since they are isolated, without a gap. */
#include <jansson.h>

#include "engine/pretokenizer.h"
#include "tests/fuzz/fuzz.h"

static const char *const texts[] = {
    "",
    "a",
    "The lamp's  12\n \xE6\xB0\xB4\xE6\xB7\xB1 e\xCC\x81 aaaaaaaaaaaaaaaaaaaaaaaaaaaa\t->Ab",
    "   \r\n\r\n\t \xC2\xA0 12345678901234567890 ab,cd;ef've'LL --- ((()))",
};

static void check_pieces(const struct pretokenizer *pretokenizer, const char *text) {
    struct split_state state;
    size_t length = strlen(text), at = 0;
    split_state_init(&state, length, NULL);
    check(pretokenizer_split(pretokenizer, &state, text, length, NULL) == 0);
    for (size_t i = 0; i < state.spans.count; i++) {
        check(state.spans.items[i].start == at && state.spans.items[i].end > at);
        at = state.spans.items[i].end;
    }
    check(at == length);
    split_state_clear(&state);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    json_t *description = json_pack("{s:s, s:[{s:s, s:{s:s%}, s:s}, {s:s, s:b, s:b}]}", "type",
                                    "Sequence", "pretokenizers", "type", "Split", "pattern",
                                    "Regex", (const char *)data, size, "behavior", "Isolated",
                                    "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0);
    struct pretokenizer *pretokenizer = NULL;
    struct error error = {0};
    if (!description) return 0; /* not UTF-8 */
    int result = pretokenizer_create(description, &pretokenizer, &error);
    if (result != 0) {
        check_error(result, &error);
        check(!pretokenizer);
    } else {
        for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
            check_pieces(pretokenizer, texts[i]);
        }
        pretokenizer_destroy(pretokenizer);
    }
    json_decref(description);
    return 0;
}
