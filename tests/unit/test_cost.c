/* The arithmetic of predictions by hand, and that what is measured on a real device makes sense. */
#include "engine/cost.h"
#include "engine/cost_cache.h"

#include "golden.h"
#include "test_device.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct cost_model simple = {
    .blocks = 10,
    .count = 3,
    .points = {{1, 100, 10, 20, 5}, {4, 110, 16, 26, 8}, {16, 200, 40, 74, 20}},
    .attended_ns = 0.5,
    .gather_factor = 1.2,
};

static void check_near(double value, double expected) {
    if (fabs(value - expected) > 1e-9 * fabs(expected)) fail_msg("%g, not %g", value, expected);
}

static void test_parts_add_up(void **state) {
    (void)state;
    struct cost_load load = {0};
    check_near(cost_predict(&simple, &load), 0);
    load.rows = 1;
    check_near(cost_predict(&simple, &load), 100);
    load.attn_rows = 0.5; /* half a chance that it runs */
    check_near(cost_predict(&simple, &load), 100 + 10 * 5);
    load = (struct cost_load){.rows = 10, .attn_rows = 4, .mlp_rows = 16, .attended = 100};
    check_near(cost_predict(&simple, &load), 155 + 10 * 16 + 10 * 74 + 10 * 50);
    load = (struct cost_load){.rows = 4, .logit_rows = 2.5};
    check_near(cost_predict(&simple, &load), 110 + 6.5);
    load = (struct cost_load){.rows = 28, .mlp_rows = 28}; /* the last slope goes on */
    check_near(cost_predict(&simple, &load), 290 + 10 * 122);
}

static void test_more_work_never_takes_less(void **state) {
    (void)state;
    double last = 0;
    for (double rows = 0; rows < 60; rows += 0.25) {
        struct cost_load load = {rows, rows, rows, rows * rows, rows};
        double now = cost_predict(&simple, &load);
        assert_true(now >= last);
        last = now;
    }
}

static void test_bodies_follow_the_times(void **state) {
    (void)state;
    assert_true(cost_prefers_gather(&simple, 1, 4, 16));   /* 31.2 against 74 */
    assert_false(cost_prefers_gather(&simple, 1, 15, 16)); /* 84 against 74 */
    assert_false(cost_prefers_gather(&simple, 0, 16, 16)); /* nobody skips */
    assert_true(cost_prefers_gather(NULL, 0, 15, 16));
    struct cost_model nothing = {0};
    assert_true(cost_prefers_gather(&nothing, 0, 15, 16));
}

static void test_ridge(void **state) {
    (void)state;
    assert_int_equal(cost_find_ridge(&simple), 7); /* 42 at four rows, 60 at seven */
    struct cost_model flat = simple;
    flat.count = 2;
    assert_int_equal(cost_find_ridge(&flat), 0);
}

static void test_measured(void **state) {
    (void)state;
    static const char *const names[] = {"gqa-relu2", "mqa-gelu-omit"};
    for (size_t i = 0; i < 2; i++) {
        char folder[512];
        snprintf(folder, sizeof folder, "%s%s", GOLDEN_FOLDER, names[i]);
        struct model_options options = {
            .device = test_device(), .threads = 1, .max_step_rows = 64};
        struct model *model = golden_model(folder, &options);
        struct error error = {0};
        assert_int_equal(model_get_cost(model)->count, 0);
        must(model_measure_cost(model, &error), &error);
        const struct cost_model *cost = model_get_cost(model);
        assert_in_range(cost->count, 3, COST_POINTS_MAX);
        assert_int_equal(cost->blocks, model_get_info(model)->blocks);
        for (size_t j = 0; j < cost->count; j++) {
            const struct cost_point *point = &cost->points[j];
            assert_true(point->step_ns > 0 && point->attn_ns > 0 && point->mlp_ns > 0);
            assert_true(point->head_ns >= 0);
            if (j > 0) assert_true(point->rows > point[-1].rows);
            if (j > 0) assert_true(point->step_ns >= point[-1].step_ns);
        }
        assert_true(cost->attended_ns >= 0);
        assert_true(cost->gather_factor >= 1 && cost->gather_factor <= 2);
        model_destroy(model);
    }
}

/* ---- The cache ------------------------------------------------------------------------------- */

static struct model *cached_model_of(const char *name, const char *folder) {
    char path[512];
    struct model_options options = {
        .device = "cpu", .threads = 1, .max_step_rows = 8, .cost_cache = folder};
    snprintf(path, sizeof path, "%s%s", GOLDEN_FOLDER, name);
    return golden_model(path, &options);
}

static struct model *cached_model(const char *folder) {
    return cached_model_of("gqa-relu2", folder);
}

/* The one file in a folder. */
static void find_file(const char *folder, char *path, size_t size) {
    DIR *list = opendir(folder);
    size_t found = 0;
    assert_non_null(list);
    for (struct dirent *entry; (entry = readdir(list));) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, size, "%s/%s", folder, entry->d_name);
        found++;
    }
    closedir(list);
    assert_int_equal(found, 1);
}

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void check_cache_of(const char *name) {
    char parent[] = "/tmp/fathom-cost-XXXXXX", folder[64], path[512];
    struct error error = {0};
    assert_non_null(mkdtemp(parent));
    snprintf(folder, sizeof folder, "%s/new", parent);
    struct model *first = cached_model_of(name, folder),
                 *second = cached_model_of(name, folder);
    assert_string_equal(model_get_cost_note(first), "");
    must(model_measure_cost(first, &error), &error);
    must(model_measure_cost(second, &error), &error);
    assert_non_null(strstr(model_get_cost_note(first), "measured in"));
    assert_null(strstr(model_get_cost_note(first), "not kept"));
    assert_non_null(strstr(model_get_cost_note(second), "read from"));
    const struct cost_model *a = model_get_cost(first), *b = model_get_cost(second);
    assert_int_equal(a->count, b->count);
    assert_int_equal(a->blocks, b->blocks);
    assert_int_equal(a->ridge, b->ridge);
    for (size_t i = 0; i < a->count; i++) {
        assert_int_equal(a->points[i].rows, b->points[i].rows);
        assert_true(fabs(a->points[i].mlp_ns - b->points[i].mlp_ns) < 1e-6 * a->points[i].mlp_ns);
    }
    model_destroy(first);
    model_destroy(second);
    find_file(folder, path, sizeof path);
    unlink(path);
    rmdir(folder);
    rmdir(parent);
}

/* Of a standard model too, where no part of a step is left when every sub-layer is taken off. */
static void test_the_cache_gives_back_what_was_measured(void **state) {
    (void)state;
    check_cache_of("gqa-relu2");
    check_cache_of("llama/mistral");
}

static const char good_points[] =
    "{\"rows\": 1, \"step_ns\": 9, \"attn_ns\": 2, \"mlp_ns\": 3, \"head_ns\": 0}";

static void test_a_hostile_cache_is_not_believed(void **state) {
    (void)state;
    static const struct {
        const char *format, *attended, *gather, *points; /* NULL: as it should be */
        const char *message;                             /* NULL: accepted */
    } cases[] = {
        {.message = NULL},
        {.format = "2", .message = "format is 2"},
        {.format = "\"3\"", .message = "format"},
        {.attended = "-1", .message = "attended_ns is -1"},
        {.attended = "1e300", .message = "attended_ns"},
        {.attended = "null", .message = "attended_ns is missing"},
        {.gather = "0.5", .message = "gather_factor is 0.5"},
        {.gather = "1e5", .message = "gather_factor"},
        {.points = "", .message = "points must be an array of 1 to 9"},
        {.points = "7", .message = "points"},
        {.points = "{}", .message = "rows is missing"},
        {.points = "{\"rows\": 0}", .message = "rows is 0"},
        {.points = "{\"rows\": 1e3}", .message = "rows"},
        {.points = "{\"rows\": 99999999999999999999}", .message = ""},
        {.points = "{\"rows\": 1, \"step_ns\": 0, \"attn_ns\": 2, \"mlp_ns\": 3, "
                   "\"head_ns\": 0}",
         .message = "takes no time"},
        {.points = "{\"rows\": 1, \"step_ns\": 9, \"attn_ns\": 1e11, \"mlp_ns\": 3, "
                   "\"head_ns\": 0}",
         .message = "attn_ns"},
        {.points = "{\"rows\": 2, \"step_ns\": 9, \"attn_ns\": 2, \"mlp_ns\": 3, \"head_ns\": 0}, "
                   "{\"rows\": 2, \"step_ns\": 9, \"attn_ns\": 2, \"mlp_ns\": 3, \"head_ns\": 0}",
         .message = "rows is 2"},
        {.points = "{\"rows\": 2, \"step_ns\": 9, \"attn_ns\": 2, \"mlp_ns\": 3, \"head_ns\": 0}, "
                   "{\"rows\": 4, \"step_ns\": 8, \"attn_ns\": 2, \"mlp_ns\": 3, \"head_ns\": 0}",
         .message = "step_ns is 8"},
    };
    char folder[] = "/tmp/fathom-cost-XXXXXX", path[512], text[4096], key[1024];
    struct error error = {0};
    struct cost_model cost = {0};
    assert_non_null(mkdtemp(folder));
    struct model *model = cached_model(folder);
    assert_int_equal(cost_cache_read(model, &cost, &error), FATHOM_NOT_FOUND);
    must(cost_cache_write(model, &simple, &error), &error);
    find_file(folder, path, sizeof path);
    char *data, *begin;
    size_t size;
    must(file_read(path, 4096, &data, &size, &error), &error);
    begin = strstr(data, "\"key\"");
    snprintf(key, sizeof key, "%.*s", (int)(strchr(begin, '\n') - begin), begin);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(
            text, sizeof text,
            "{\"format\": %s, %s \"attended_ns\": %s, \"gather_factor\": %s, \"points\": [%s]}",
            cases[i].format ? cases[i].format : "3", key,
            cases[i].attended ? cases[i].attended : "1.5", cases[i].gather ? cases[i].gather : "1",
            cases[i].points ? cases[i].points : good_points);
        write_file(path, text);
        memset(&cost, 0, sizeof cost);
        int result = cost_cache_read(model, &cost, &error);
        assert_int_equal(result, cases[i].message ? FATHOM_INVALID : 0);
        if (!cases[i].message) continue;
        assert_int_equal(cost.count, 0); /* untouched */
        if (!strstr(error.message, cases[i].message) || !strstr(error.message, path)) {
            fail_msg("case %zu: %s", i, error.message);
        }
    }
    static const char *const texts[] = {"", "[]", "{", "{\"format\": 3, \"key\": \"another\"}",
                                        "{\"format\": 3, \"format\": 3}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_file(path, texts[i]);
        assert_int_equal(cost_cache_read(model, &cost, &error), FATHOM_INVALID);
    }
    unlink(path);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(cost_cache_read(model, &cost, &error), FATHOM_INVALID);
    must(model_measure_cost(model, &error), &error); /* and says both */
    assert_non_null(strstr(model_get_cost_note(model), "not a regular file"));
    assert_non_null(strstr(model_get_cost_note(model), "not kept"));
    rmdir(path);
    rmdir(folder);
    model_destroy(model);
    free(data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts_add_up),
        cmocka_unit_test(test_more_work_never_takes_less),
        cmocka_unit_test(test_bodies_follow_the_times),
        cmocka_unit_test(test_ridge),
        cmocka_unit_test(test_measured),
        cmocka_unit_test(test_the_cache_gives_back_what_was_measured),
        cmocka_unit_test(test_a_hostile_cache_is_not_believed),
    };
    return cmocka_run_group_tests_name("cost", tests, NULL, NULL);
}
