/* The bounds that keep a small text from becoming a large tree: what json_measure counts holds for
 * every text that the parser accepts, and both parsers keep to it. */
#include "api/fields.h"
#include "engine/json_field.h"
#include "tests/fuzz/fuzz.h"

struct tree {
    size_t depth, containers, values; /* values: keys too */
};

static void count_tree(const json_t *value, size_t depth, struct tree *tree) {
    tree->values++;
    if (!json_is_array(value) && !json_is_object(value)) return;
    tree->containers++;
    if (++depth > tree->depth) tree->depth = depth;
    size_t index;
    json_t *member;
    const char *key;
    json_array_foreach(value, index, member) count_tree(member, depth, tree);
    json_object_foreach((json_t *)value, key, member) {
        tree->values++;
        count_tree(member, depth, tree);
    }
}

/* Without duplicates the counts are exact: then nothing of the text is missing in the tree. */
static void check_measure(const char *text, size_t length, const struct json_extent *extent) {
    json_t *value = json_loadb(text, length, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL);
    struct tree tree = {0};
    if (!value) return;
    count_tree(value, 0, &tree);
    json_decref(value);
    check(tree.depth == extent->depth && tree.containers == extent->containers);
    check(tree.values <= extent->containers + extent->commas + extent->colons + 1);
    check(tree.values >= extent->commas + extent->colons + 1);
}

static void check_body(const char *text, size_t length, const struct json_extent *extent) {
    struct api_error error = {0};
    json_t *body;
    if (body_parse(text, length, &body, &error) != 0) {
        check(error.status == 400 && error.message[0] != '\0');
        return;
    }
    check(json_is_object(body) && extent->depth <= JSON_DEPTH_MAX);
    json_decref(body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *text = (const char *)data;
    struct json_extent extent = json_measure(text, size);
    struct error error = {0};
    json_t *object;
    check(extent.containers + extent.commas + extent.colons <= size);
    check_measure(text, size, &extent);
    check_body(text, size, &extent);
    int result = json_object_parse(text, size, &object, &error);
    if (result != 0) {
        check_error(result, &error);
    } else {
        check(json_is_object(object));
        json_decref(object);
    }
    return 0;
}
