/* Whatever a server sends to the load generator is judged, once, within limits, and the pieces in
 * which it comes do not matter. */
#include "bench/answer.h"
#include "tests/fuzz/fuzz.h"

#define PIECE_NS 10000000

static void feed(struct answer *answer, const char *data, size_t size, size_t most,
                 struct choices choices) {
    uint64_t now = 1000000000;
    bool complete = false;
    answer_begin(answer);
    for (size_t at = 0; at < size && !complete; now += PIECE_NS) {
        size_t length = most == SIZE_MAX ? size : 1 + choose(&choices, most);
        if (length > size - at) length = size - at;
        char *piece = copy_exact(data + at, length);
        complete = answer_feed(answer, piece, length, now);
        free(piece);
        at += length;
    }
    if (!complete) check(answer_end(answer));
    check(answer->complete);
}

static void check_answer(const struct answer *answer) {
    check(answer->failure < FAILURE_KINDS && failure_name(answer->failure));
    check(memchr(answer->detail, '\0', sizeof answer->detail));
    check(memchr(answer->quality, '\0', sizeof answer->quality));
    for (const char *c = answer->detail; *c; c++) check(*c >= 0x20 && *c < 0x7f);
    for (const char *c = answer->quality; *c; c++) check(*c > 0x20 && *c < 0x7f);
    check(answer->failure != FAILURE_NONE || (answer->status == 200 && answer->last_ns > 0));
    check(answer->prompt_tokens <= ANSWER_TOKENS_MAX && answer->cached_tokens <= ANSWER_TOKENS_MAX);
    check(answer->chunks == 0 || answer->is_stream);
    check(answer->text_chunks <= answer->chunks);
    check(answer->chunks == 0 ? answer->gap_count == 0 : answer->gap_count == answer->chunks - 1);
    check(answer->first_ns <= answer->last_ns);
    for (size_t i = 0; i < answer->gap_count; i++) check(answer->gaps[i] >= 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const size_t most[] = {1, 8, 256};
    const char *bytes = (const char *)data;
    struct choices choices = choices_of(data, size);
    struct answer whole, pieces;
    answer_init(&whole);
    answer_init(&pieces);
    feed(&whole, bytes, size, SIZE_MAX, choices);
    check_answer(&whole);
    for (size_t i = 0; i < sizeof most / sizeof *most; i++) {
        feed(&pieces, bytes, size, most[i], choices);
        check_answer(&pieces);
        check(pieces.failure == whole.failure && pieces.status == whole.status);
        check(pieces.chunks == whole.chunks && pieces.is_stream == whole.is_stream);
        check(pieces.output_tokens == whole.output_tokens);
        check(pieces.prompt_tokens == whole.prompt_tokens);
        check(strcmp(pieces.quality, whole.quality) == 0);
    }
    answer_free(&whole);
    answer_free(&pieces);
    return 0;
}
