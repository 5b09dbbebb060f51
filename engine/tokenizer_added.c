#include "engine/tokenizer_private.h"

#include <stdlib.h>
#include <string.h>

/* Makes room for one more item in a doubling array; false if there is no memory. */
static bool array_grow(void **items, size_t count, size_t *capacity, size_t item_size) {
    if (count < *capacity) return true;
    size_t wanted = *capacity ? 2 * *capacity : 16, bytes;
    void *grown = size_multiply(wanted, item_size, &bytes) ? realloc(*items, bytes) : NULL;
    if (!grown) return false;
    *items = grown;
    *capacity = wanted;
    return true;
}

/* Appends a node without child, sibling or token; 0 (the root's number) if there is no memory. */
static uint32_t matcher_new_node(struct added_matcher *matcher, unsigned char byte) {
    void *nodes = matcher->nodes;
    if (!array_grow(&nodes, matcher->node_count, &matcher->node_capacity, sizeof *matcher->nodes)) {
        return 0;
    }
    matcher->nodes = nodes;
    if (matcher->node_count == 0) {
        matcher->nodes[matcher->node_count++] = (struct added_node){.token = -1};
    }
    matcher->nodes[matcher->node_count] = (struct added_node){.token = -1, .byte = byte};
    return (uint32_t)matcher->node_count++;
}

static uint32_t matcher_child(const struct added_matcher *matcher, uint32_t node,
                              unsigned char byte) {
    if (node == 0) return matcher->first[byte];
    uint32_t child = matcher->nodes[node].child;
    while (child != 0 && matcher->nodes[child].byte != byte) child = matcher->nodes[child].sibling;
    return child;
}

int added_matcher_add(struct added_matcher *matcher, const char *text, size_t length,
                      const struct added_token *token, struct error *error) {
    uint32_t node = 0;
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)text[i];
        uint32_t child = matcher_child(matcher, node, byte);
        if (child == 0) {
            child = matcher_new_node(matcher, byte);
            if (child == 0) {
                return error_set(error, FATHOM_NO_MEMORY, "no memory for the added tokens");
            }
            if (node == 0) {
                matcher->first[byte] = child;
            } else {
                matcher->nodes[child].sibling = matcher->nodes[node].child;
                matcher->nodes[node].child = child;
            }
        }
        node = child;
    }
    if (matcher->nodes[node].token >= 0) {
        return error_set(error, FATHOM_INVALID, "added token '%.*s' is there twice", (int)length,
                         text);
    }
    void *tokens = matcher->tokens;
    if (!array_grow(&tokens, matcher->token_count, &matcher->token_capacity, sizeof *token)) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory for the added tokens");
    }
    matcher->tokens = tokens;
    matcher->nodes[node].token = (int32_t)matcher->token_count;
    matcher->tokens[matcher->token_count++] = *token;
    return 0;
}

void added_matcher_clear(struct added_matcher *matcher) {
    free(matcher->tokens);
    free(matcher->nodes);
}

/* The longest token that starts exactly at `start`, or NULL; *end is behind it. */
static const struct added_token *matcher_longest(const struct added_matcher *matcher,
                                                 const char *text, size_t length, size_t start,
                                                 bool special, size_t *end) {
    const struct added_token *longest = NULL;
    uint32_t node = 0;
    for (size_t at = start; at < length;) {
        node = matcher_child(matcher, node, (unsigned char)text[at++]);
        if (node == 0) break;
        int32_t index = matcher->nodes[node].token;
        if (index < 0 || (matcher->tokens[index].special && !special)) continue;
        longest = &matcher->tokens[index];
        *end = at;
    }
    return longest;
}

bool added_matcher_takes_space(const struct added_matcher *matcher) {
    for (size_t i = 0; i < matcher->token_count; i++) {
        if (matcher->tokens[i].takes_left || matcher->tokens[i].takes_right) return true;
    }
    return false;
}

bool added_matcher_find(const struct added_matcher *matcher, const char *text, size_t length,
                        size_t from, bool special, struct added_match *match) {
    if (matcher->token_count == 0) return false;
    for (size_t start = from; start < length; start++) {
        if (matcher->first[(unsigned char)text[start]] == 0) continue;
        size_t end = start;
        const struct added_token *token =
            matcher_longest(matcher, text, length, start, special, &end);
        if (!token) continue;
        *match = (struct added_match){start, end, token->id};
        size_t space;
        while (token->takes_left && match->start > from &&
               (space = utf8_trailing_space(text + from, match->start - from)) > 0) {
            match->start -= space;
        }
        while (token->takes_right &&
               (space = utf8_leading_space(text + match->end, length - match->end)) > 0) {
            match->end += space;
        }
        return true;
    }
    return false;
}
