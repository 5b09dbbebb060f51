/* Any text is a config.json (and a depth.json) or an error; what is accepted keeps its limits. */
#include <math.h>
#include <stdlib.h>

#include "engine/checkpoint_parts.h"

#define SUBLAYERS 4

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds) {
    if (!holds) abort();
}

static void check_config(const struct config *config) {
    check(config->vocab - 1 < (size_t)4 << 20 && config->context - 1 < (size_t)16 << 20);
    check(config->hidden - 1 < 32768 && config->blocks - 1 < 1024 && config->inner - 1 < 262144);
    check(config->heads - 1 < 1024 && config->directions - 1 < 1024);
    check(config->head_size - 1 < 1024 && config->head_size % 2 == 0);
    check(config->kv_heads > 0 && config->heads % config->kv_heads == 0);
    check(config->bos >= -1 && config->eos >= -1);
    check(config->bos < (int64_t)config->vocab && config->eos < (int64_t)config->vocab);
    check(isfinite(config->rope_theta) && isfinite(config->qk_scale) && config->qk_scale > 0);
}

static void check_table(const struct depth_table *table) {
    check(table->tier_count - 1 < TIERS_MAX && table->default_tier < table->tier_count);
    for (size_t i = 0; i < table->tier_count * SUBLAYERS; i++) {
        check(isfinite(table->theta[i]) && table->theta[i] >= 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct config config;
    struct depth_table table;
    struct error error = {0};
    int result = config_parse((const char *)data, size, &config, &error);
    check(result == 0 || (error.code == result && error.message[0] != '\0'));
    if (result == 0) check_config(&config);

    error = (struct error){0};
    result = depth_table_parse((const char *)data, size, SUBLAYERS, &table, &error);
    check(result == 0 || (error.code == result && error.message[0] != '\0'));
    if (result == 0) {
        check_table(&table);
        free(table.theta);
    }
    return 0;
}
