#include "engine/cost.h"

#include <stddef.h>

enum curve {
    CURVE_STEP = offsetof(struct cost_point, step_ns),
    CURVE_ATTN = offsetof(struct cost_point, attn_ns),
    CURVE_MLP = offsetof(struct cost_point, mlp_ns),
    CURVE_HEAD = offsetof(struct cost_point, head_ns),
};

static double curve_at(const struct cost_model *cost, enum curve curve, size_t point) {
    return *(const double *)(const void *)((const char *)&cost->points[point] + curve);
}

/* From the origin to the first point (a whole step: level), along the last two points beyond the
 * last. A share of a row is the chance that it runs, and costs that share. */
static double interpolate(const struct cost_model *cost, enum curve curve, double rows) {
    if (cost->count == 0 || rows <= 0) return 0;
    double left_rows = 0, left = curve == CURVE_STEP ? curve_at(cost, curve, 0) : 0;
    double right_rows = (double)cost->points[0].rows, right = curve_at(cost, curve, 0);
    for (size_t i = 1; i < cost->count && right_rows < rows; i++) {
        left_rows = right_rows;
        left = right;
        right_rows = (double)cost->points[i].rows;
        right = curve_at(cost, curve, i);
    }
    return left + (right - left) * (rows - left_rows) / (right_rows - left_rows);
}

double cost_predict(const struct cost_model *cost, const struct cost_load *load) {
    double blocks = (double)cost->blocks;
    return interpolate(cost, CURVE_STEP, load->rows) +
           blocks * interpolate(cost, CURVE_ATTN, load->attn_rows) +
           blocks * interpolate(cost, CURVE_MLP, load->mlp_rows) +
           blocks * cost->attended_ns * load->attended +
           interpolate(cost, CURVE_HEAD, load->logit_rows);
}

bool cost_prefers_gather(const struct cost_model *cost, size_t sublayer, size_t running,
                         size_t rows) {
    if (!cost || cost->count == 0) return running < rows;
    enum curve curve = sublayer % 2 ? CURVE_MLP : CURVE_ATTN;
    double packed = cost->gather_factor * interpolate(cost, curve, (double)running);
    return running < rows && packed < interpolate(cost, curve, (double)rows);
}

size_t cost_find_ridge(const struct cost_model *cost) {
    double first = interpolate(cost, CURVE_ATTN, 1) + interpolate(cost, CURVE_MLP, 1);
    for (size_t rows = 2; rows <= cost->points[cost->count - 1].rows; rows++) {
        double ns = interpolate(cost, CURVE_ATTN, (double)rows) +
                    interpolate(cost, CURVE_MLP, (double)rows);
        if (ns >= 2 * first) return rows;
    }
    return 0;
}
