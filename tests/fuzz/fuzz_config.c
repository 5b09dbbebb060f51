/* Any text is a config.json (and a depth.json) or an error; what is accepted keeps its limits. */
#include <math.h>

#include "engine/checkpoint_parts.h"
#include "tests/fuzz/fuzz.h"

#define SUBLAYERS 4

static void check_config(const struct config *config) {
    check(config->vocab - 1 < (size_t)4 << 20 && config->context - 1 < (size_t)1 << 20);
    check(config->hidden - 1 < 32768 && config->blocks - 1 < 1024 && config->inner - 1 < 262144);
    check(config->heads - 1 < 1024 && config->directions <= 1024);
    check(config->is_standard == (config->directions == 0));
    check(config->head_size - 1 < 1024 && config->head_size % 2 == 0);
    check(config->kv_heads > 0 && config->heads % config->kv_heads == 0);
    check(config->bos >= -1 && config->bos < (int64_t)config->vocab &&
          config->eos_count <= EOS_MAX);
    for (size_t i = 0; i < config->eos_count; i++) {
        check(config->eos[i] >= 0 && config->eos[i] < (int64_t)config->vocab);
    }
    const struct rope_scaling *scaling = &config->rope_scaling;
    check(scaling->kind == ROPE_UNSCALED || scaling->factor >= 1);
    check(scaling->kind != ROPE_LLAMA3 || scaling->high_factor > scaling->low_factor);
    check(config->rope_theta >= 1 && config->rope_theta <= 1e12);
    check(config->qk_scale >= 1e-6f && config->qk_scale <= 1e6f);
}

static void check_table(const struct depth_table *table) {
    struct error error = {0};
    check(table->tier_count - 1 < TIERS_MAX && table->default_tier < table->tier_count);
    check(table->sublayers == SUBLAYERS);
    for (size_t i = 0; i < table->tier_count * SUBLAYERS; i++) {
        check(isfinite(table->theta[i]) && table->theta[i] >= 0);
    }
    for (size_t i = 0; i < table->tier_count; i++) {
        const struct tier_info *tier = &table->tiers[i];
        check(memchr(tier->name, '\0', sizeof tier->name) && tier->name[0] != '\0');
        check(tier->target_skip >= 0 && tier->target_skip <= 1);
    }
    check(depth_table_check(table, &error) == 0); /* what was read may be written */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct config config;
    struct depth_table table;
    struct error error = {0};
    int result = config_parse((const char *)data, size, &config, &error);
    if (result == 0) {
        check_config(&config);
    } else {
        check_error(result, &error);
    }
    error = (struct error){0};
    result = depth_table_parse((const char *)data, size, SUBLAYERS, &table, &error);
    if (result == 0) {
        check_table(&table);
        free(table.theta);
    } else {
        check_error(result, &error);
    }
    return 0;
}
