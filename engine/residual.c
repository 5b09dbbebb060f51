/* What kinds of residual have in common. */
#include "engine/residual.h"

void norm_head_run(struct device *device, const struct norm_head *head, const struct buffer *x,
                   const struct row_list *wanted, struct buffer *logits) {
    const struct kernels *kernels = device->kernels;
    struct rmsnorm norm = {
        .x = x,
        .gain = head->gain,
        .y = head->normed,
        .list = wanted,
        .width = head->width,
        .epsilon = head->epsilon,
    };
    kernels->rmsnorm(device, &norm);
    struct matmul product = {
        .x = head->normed,
        .w = head->matrix,
        .y = logits,
        .rows = kernels->row_count(device, wanted),
    };
    kernels->matmul(device, &product, 1);
}
