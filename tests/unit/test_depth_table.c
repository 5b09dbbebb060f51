/* depth.json of a checkpoint folder: reading it, refusing it, saving it. */
#include "test_checkpoint.h"

#include <float.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

static void has_full_depth_without_a_table(void **state) {
    (void)state;
    struct checkpoint *checkpoint = open_good();
    const struct depth_table *table = checkpoint_depth(checkpoint);
    assert_int_equal(table->kv_policy, KV_COMPUTE);
    assert_int_equal(table->tier_count, 1);
    assert_int_equal(table->default_tier, 0);
    assert_int_equal(table->sublayers, 4);
    assert_string_equal(table->tiers[0].name, "full");
    for (size_t i = 0; i < 4; i++) assert_true(table->theta[i] == 0);
    checkpoint_close(checkpoint);
}

static void reads_tiers(void **state) {
    (void)state;
    static const float fast[4] = {0, 0.25f, 1e-3f, 1.5f};
    write_text("depth.json", depth_text);
    struct checkpoint *checkpoint = open_good();
    const struct depth_table *table = checkpoint_depth(checkpoint);
    assert_int_equal(table->kv_policy, KV_OMIT);
    assert_int_equal(table->tier_count, 2);
    assert_int_equal(table->default_tier, 1);
    assert_string_equal(table->tiers[0].name, "fast");
    assert_true(table->tiers[0].target_skip == 0.4);
    assert_memory_equal(table->theta, fast, sizeof fast);
    assert_true(table->tiers[0].measured);
    assert_true(table->tiers[0].perplexity == 3.5);
    assert_true(table->tiers[0].attn_skip == 0.25);
    assert_true(table->tiers[0].mlp_skip == 0.5);
    assert_true(table->tiers[0].flops_per_token == 1e6);
    assert_false(table->tiers[1].measured);
    checkpoint_close(checkpoint);
}

static void refuses_wrong_tables(void **state) {
    (void)state;
    static const struct edit edits[] = {
        {"\"format\": 1", "\"format\": 2", FATHOM_INVALID,
         "format is 2; a whole number from 1 to 1"},
        {"\"format\": 1", "\"format\": 1.0", FATHOM_INVALID, "format is 1.0"},
        {"\"format\"", "\"version\"", FATHOM_INVALID, "format is missing"},
        {"\"omit\"", "\"recompute\"", FATHOM_UNSUPPORTED,
         "kv_policy is \"recompute\"; \"compute\" or \"omit\""},
        {"\"omit\"", "false", FATHOM_INVALID, "kv_policy is false"},
        {"\"tiers\"", "\"levels\"", FATHOM_INVALID, "tiers is missing"},
        {"\"name\": \"fast\"", "\"label\": \"fast\"", FATHOM_INVALID, "tiers[0]: name is missing"},
        {"\"name\": \"fast\"", "\"name\": 5", FATHOM_INVALID, "tiers[0]: name is 5"},
        {"\"name\": \"fast\"", "\"name\": \"\"", FATHOM_INVALID, "tier name ''"},
        {"\"name\": \"fast\"", "\"name\": \"Fast\"", FATHOM_INVALID, "tier name 'Fast'"},
        {"\"name\": \"fast\"", "\"name\": \"a:b\"", FATHOM_INVALID, "tier name 'a:b'"},
        {"\"name\": \"fast\"", "\"name\": \"a\\nb\"", FATHOM_INVALID, "tier name 'a?b'"},
        {"\"name\": \"fast\"", "\"name\": \"-fast\"", FATHOM_INVALID, "tier name '-fast'"},
        {"\"name\": \"fast\"", "\"name\": \"abcdefghijklmnopqrstuvwxyz012345\"", FATHOM_INVALID,
         "tiers[0]: name is \"abcdefghijklmnopqrstuvwxyz012345\"; a text of 1 to 31 bytes"},
        {"\"name\": \"fast\"", "\"name\": \"auto\"", FATHOM_INVALID,
         "tier name 'auto' is reserved"},
        {"\"name\": \"fast\"", "\"name\": \"full\"", FATHOM_INVALID,
         "tier name 'full' is used twice"},
        {"\"name\": \"full\"", "\"name\": \"fast\"", FATHOM_INVALID,
         "tier name 'fast' is used twice"},
        {"\"name\": \"full\", \"target_skip\": 0, \"theta\": [0, 0, 0, 0.0]}\n],\n\"default\": "
         "\"full\"",
         "\"name\": \"fast\", \"target_skip\": 0, \"theta\": [0, 0, 0, 0]}\n],\n\"default\": "
         "\"fast\"",
         FATHOM_INVALID, "tier name 'fast' is used twice"},
        {"\"name\": \"full\", \"target_skip\": 0, \"theta\": [0, 0, 0, 0.0]}\n],\n\"default\": "
         "\"full\"",
         "\"name\": \"slow\", \"target_skip\": 0, \"theta\": [0, 0, 0, 0]}\n],\n\"default\": "
         "\"slow\"",
         FATHOM_INVALID, "no tier named 'full'"},
        {"[0, 0, 0, 0.0]", "[0, 0, 0.125, 0]", FATHOM_INVALID, "tier 'full': theta[2] is 0.125"},
        {"[0, 0, 0, 0.0]", "[0, 0, 0]", FATHOM_INVALID,
         "tiers[1]: theta has 3 numbers; the model has 4 sub-layers"},
        {"[0, 0, 0, 0.0]", "[0, 0, 0, 0, 0]", FATHOM_INVALID, "tiers[1]: theta has 5 numbers"},
        {"[0, 0, 0, 0.0]", "0", FATHOM_INVALID, "tiers[1]: theta is 0"},
        {"1.5", "-1.5", FATHOM_INVALID, "tiers[0]: theta[3]: the number is -1.5"},
        {"1.5", "null", FATHOM_INVALID, "tiers[0]: theta[3]: the number is null"},
        {"1.5", "\"1\"", FATHOM_INVALID, "tiers[0]: theta[3]: the number is \"1\""},
        {"1.5", "1e400", FATHOM_INVALID, "1e400"},
        {"\"target_skip\": 0.4, ", "", FATHOM_INVALID, "tiers[0]: target_skip is missing"},
        {"0.4", "1.5", FATHOM_INVALID, "tiers[0]: target_skip is 1.5; a number from 0 to 1"},
        {"0.4", "-0.1", FATHOM_INVALID, "tiers[0]: target_skip is -0.1"},
        {"0.4", "\"40%\"", FATHOM_INVALID, "tiers[0]: target_skip is \"40%\""},
        {"\"default\": \"full\"", "\"default\": \"best\"", FATHOM_INVALID, "default is \"best\""},
        {"\"default\": \"full\"", "\"default\": 0", FATHOM_INVALID, "default is 0"},
        {"\"default\"", "\"preset\"", FATHOM_INVALID, "default is missing"},
        {"\"measured\": {\"fast\"", "\"measured\": {\"slow\"", FATHOM_INVALID, "measured 'slow'"},
        {"{\"perplexity\": 3.5, ", "{", FATHOM_INVALID, "measured 'fast': perplexity is missing"},
        {"3.5", "-3.5", FATHOM_INVALID,
         "measured 'fast': perplexity is -3.5; a number of at least 0"},
        {"\"attn_skip\": 0.25", "\"attn_skip\": 1.25", FATHOM_INVALID,
         "measured 'fast': attn_skip is 1.25"},
        {"\"mlp_skip\": 0.5", "\"mlp_skip\": []", FATHOM_INVALID,
         "measured 'fast': mlp_skip is an array"},
        {"1e6", "null", FATHOM_INVALID, "measured 'fast': flops_per_token is missing"},
        {"{\"perplexity\": 3.5, \"attn_skip\": 0.25, \"mlp_skip\": 0.5, \"flops_per_token\": 1e6}",
         "7", FATHOM_INVALID, "measured 'fast'"},
    };
    expect_edits_refused("depth.json", depth_text, edits, COUNT(edits));
    write_text("depth.json", "{\"format\":1,\"tiers\":[],\"default\":\"full\"}");
    expect_refusal(FATHOM_INVALID, "tiers has 0 entries", "no tiers");
    write_text("depth.json", "{\"format\":1,\"tiers\":[0,1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6]}");
    expect_refusal(FATHOM_INVALID, "tiers has 17 entries; 1 to 16", "17 tiers");
    write_text("depth.json", "{\"format\":1,\"tiers\":[\"full\"]}");
    expect_refusal(FATHOM_INVALID, "tiers[0]: the tier is \"full\"", "a tier that is a text");
}

static void make_table(struct depth_table *table, float *theta) {
    *table = (struct depth_table){.kv_policy = KV_OMIT,
                                  .tier_count = TIERS_MAX,
                                  .default_tier = 3,
                                  .sublayers = 4,
                                  .theta = theta};
    for (size_t tier = 0; tier < TIERS_MAX; tier++) {
        struct tier_info *info = &table->tiers[tier];
        snprintf(info->name, sizeof info->name, tier == 5 ? "full" : "tier-%zu.x_", tier);
        info->target_skip = tier == 5 ? 0 : 0.1 * (double)tier / 3;
        info->measured = tier % 2 == 0;
        if (!info->measured) continue;
        info->perplexity = 10.0 / 3 + (double)tier;
        info->attn_skip = 1.0 / (double)(tier + 3);
        info->mlp_skip = 1;
        info->flops_per_token = 1.23456789012345e12;
    }
    float next = 1.1e-5f; /* neighbours here are closer than 8 digits can tell */
    for (size_t i = 0; i < TIERS_MAX * 4; i++) {
        theta[i] = i / 4 == 5 ? 0 : next;
        next = nextafterf(next, 1);
    }
    theta[0] = FLT_MAX;
    theta[1] = FLT_TRUE_MIN;
    theta[2] = nextafterf(1, 2);
}

static void saves_what_it_reads(void **state) {
    (void)state;
    float theta[TIERS_MAX * 4];
    struct depth_table table;
    struct error error = {0};
    make_table(&table, theta);
    write_text("depth.json", "what was there before");
    if (depth_table_save(folder, &table, &error) != 0) fail_msg("%s", error.message);

    struct checkpoint *checkpoint = open_good();
    const struct depth_table *read = checkpoint_depth(checkpoint);
    assert_int_equal(read->kv_policy, KV_OMIT);
    assert_int_equal(read->tier_count, TIERS_MAX);
    assert_int_equal(read->default_tier, 3);
    assert_int_equal(read->sublayers, 4);
    assert_memory_equal(read->theta, theta, sizeof theta);
    for (size_t i = 0; i < TIERS_MAX; i++) {
        assert_string_equal(read->tiers[i].name, table.tiers[i].name);
        assert_true(read->tiers[i].target_skip == table.tiers[i].target_skip);
        assert_int_equal(read->tiers[i].measured, table.tiers[i].measured);
        assert_true(read->tiers[i].perplexity == table.tiers[i].perplexity);
        assert_true(read->tiers[i].attn_skip == table.tiers[i].attn_skip);
        assert_true(read->tiers[i].mlp_skip == table.tiers[i].mlp_skip);
        assert_true(read->tiers[i].flops_per_token == table.tiers[i].flops_per_token);
    }
    checkpoint_close(checkpoint);
}

static size_t count_files(void) {
    size_t count = 0;
    DIR *open = opendir(folder);
    assert_non_null(open);
    for (struct dirent *entry; (entry = readdir(open));) count += entry->d_name[0] != '.';
    closedir(open);
    return count;
}

/* A table that could not be read back is not written, and what was there stays. */
static void saves_nothing_that_is_wrong(void **state) {
    (void)state;
    float theta[TIERS_MAX * 4];
    struct depth_table table;
    struct error error = {0};
    write_text("depth.json", depth_text);
    make_table(&table, theta);
    theta[7] = NAN;
    assert_int_equal(depth_table_save(folder, &table, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "depth.json: tier 'tier-1.x_': theta[3] is nan"));
    make_table(&table, theta);
    table.tiers[4].perplexity = INFINITY;
    assert_int_equal(depth_table_save(folder, &table, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "tier 'tier-4.x_': measured figures must be finite"));
    make_table(&table, theta);
    table.tiers[1].target_skip = NAN;
    assert_int_equal(depth_table_save(folder, &table, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "tier 'tier-1.x_': target_skip is nan"));
    make_table(&table, theta);
    snprintf(table.tiers[2].name, sizeof table.tiers[2].name, "a\"b");
    assert_int_equal(depth_table_save(folder, &table, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "tier name 'a\"b'"));
    reads_tiers(state);
    make_table(&table, theta);
    assert_int_equal(depth_table_save("/nonexistent/model", &table, &error), FATHOM_IO);
    assert_non_null(strstr(error.message, "cannot write /nonexistent/model/depth.json"));

    remove(path_of("depth.json")); /* a folder in the way: rename fails, and the new file goes */
    assert_int_equal(mkdir(path_of("depth.json"), 0700), 0);
    assert_int_equal(depth_table_save(folder, &table, &error), FATHOM_IO);
    assert_non_null(strstr(error.message, "cannot replace"));
    assert_int_equal(count_files(), 3);
}

int main(void) {
    if (!mkdtemp(folder)) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(has_full_depth_without_a_table, set_up),
        cmocka_unit_test_setup(reads_tiers, set_up),
        cmocka_unit_test_setup(refuses_wrong_tables, set_up),
        cmocka_unit_test_setup(saves_what_it_reads, set_up),
        cmocka_unit_test_setup(saves_nothing_that_is_wrong, set_up),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    remove_files();
    rmdir(folder);
    return failed;
}
