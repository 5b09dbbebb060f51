#include "base/json.h"

#include <setjmp.h>
#include <stdlib.h>

/* The parse under way on this thread: where its first failed allocation jumps to, and the blocks
 * that it holds, which are freed there. */
static _Thread_local struct {
    bool is_active;
    jmp_buf failed;
    void **blocks;
    size_t count, capacity;
} parse;

static bool remember(void *block) {
    if (parse.count == parse.capacity) {
        size_t capacity = parse.capacity ? 2 * parse.capacity : 64;
        void **grown = realloc(parse.blocks, capacity * sizeof *grown);
        if (!grown) return false;
        parse.blocks = grown;
        parse.capacity = capacity;
    }
    parse.blocks[parse.count++] = block;
    return true;
}

static void *parse_malloc(size_t size) {
    void *block = malloc(size);
    if (!parse.is_active || (block && remember(block))) return block;
    free(block);
    longjmp(parse.failed, 1);
}

/* Mostly the latest block or one near it: keys. Tables that grew are few. */
static void parse_free(void *block) {
    for (size_t i = parse.is_active && block ? parse.count : 0; i > 0; i--) {
        if (parse.blocks[i - 1] != block) continue;
        parse.blocks[i - 1] = parse.blocks[--parse.count];
        break;
    }
    free(block);
}

/* Before any thread can parse. What jansson gives out may be freed with free(), as before. */
__attribute__((constructor)) static void json_set_allocator(void) {
    json_set_alloc_funcs(parse_malloc, parse_free);
}

json_t *json_parse(const char *text, size_t length, size_t flags, json_error_t *syntax,
                   bool *no_memory) {
    json_t *volatile value = NULL;
    parse.count = 0;
    *no_memory = setjmp(parse.failed) != 0;
    parse.is_active = !*no_memory;
    if (parse.is_active) {
        value = json_loadb(text, length, flags, syntax);
        parse.is_active = false;
    } else {
        for (size_t i = 0; i < parse.count; i++) free(parse.blocks[i]);
    }
    free(parse.blocks);
    parse.blocks = NULL;
    parse.count = parse.capacity = 0;
    return value;
}
