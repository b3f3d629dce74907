// Cross-attention from text tokens to image rows. Steps without images skip it.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "executor.h"

namespace tw {
namespace {

constexpr int64_t kImageRows = 64;  // rows per block; blocks start with each image

float dot(const float* x, const float* y, int64_t count) {
    float lanes[kLanes] = {}, sum = 0.0f;
    int64_t at = 0;
    for (; at + kLanes <= count; at += kLanes)
        for (int i = 0; i < kLanes; i++) lanes[i] += x[at + i] * y[at + i];
    for (int i = 0; at + i < count; i++) lanes[i] += x[at + i] * y[at + i];
    for (int i = 0; i < kLanes; i++) sum += lanes[i];
    return sum;
}

// A head's keys or values in a block of image rows, with their distance. Bfloat16 is unpacked to
// `unpacked`.
struct HeadRows {
    const float* from;
    int64_t stride;
};

HeadRows head_rows(const TwStep& step, int32_t image, int64_t row, int64_t count, int64_t column, int64_t dim, float* unpacked) {
    const int64_t width = step.cross_width, at = row * width + column;
    if (step.cross_bits == 32) return {(const float*)step.cross[image] + at, width};
    const uint16_t* from = (const uint16_t*)step.cross[image] + at;
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < dim; d++) {
            const uint32_t bits = (uint32_t)from[i * width + d] << 16;
            std::memcpy(unpacked + i * dim + d, &bits, 4);
        }
    return {unpacked, dim};
}

// A head of a token. The sums have a fixed order for each image.
void attend_images(Worker& worker, const TwInstruction& each, int64_t row, int64_t head) {
    const TwStep& step = worker.step;
    const Kernels& kernels = worker.kernels();
    const int64_t dim = worker.engine.tensors[each.norm].rows;
    static thread_local float unpacked[kImageRows * kMaxCrossHead];
    const int64_t keys = each.window + head / (each.num_heads / each.num_key_heads) * dim;
    const int64_t values = keys + (int64_t)each.num_key_heads * dim;
    float q[kMaxCrossHead], all[kMaxCrossHead] = {}, part[kMaxCrossHead], scores[kImageRows];
    kernels.norm(worker.at(each.x, row) + head * dim, worker.vector(each.norm), each.eps, dim, q);
    float largest = -INFINITY, total = 0.0f;
    for (int32_t image = step.visible[2 * row]; image < step.visible[2 * row + 1]; image++)
        for (int64_t first = 0; first < step.cross_rows[image]; first += kImageRows) {
            const int64_t count = std::min(kImageRows, step.cross_rows[image] - first);
            const HeadRows key = head_rows(step, image, first, count, keys, dim, unpacked);
            float most = largest, sum = 0.0f;
            for (int64_t i = 0; i < count; i++) {
                scores[i] = each.scale * dot(q, key.from + i * key.stride, dim);
                most = std::max(most, scores[i]);
            }
            for (int64_t i = 0; i < count; i++) sum += scores[i] = std::exp(scores[i] - most);
            const float kept = std::exp(largest - most);
            total = total * kept + sum;
            const HeadRows value = head_rows(step, image, first, count, values, dim, unpacked);
            kernels.weigh(value.from, scores, count, value.stride, dim, part);
            kernels.blend(kept, 1.0f, part, dim, all);
            largest = most;
        }
    float* out = worker.at(each.out, row) + head * dim;
    if (total == 0.0f) std::memset(out, 0, dim * 4);
    else kernels.divide(all, total, dim, out);
    if (each.flags & TW_ROUNDED) kernels.round_bf16(out, dim);
}

}  // namespace

void run_cross_attend(Worker& worker, const TwInstruction& each) {
    worker.share((int64_t)worker.num_rows * each.num_heads, [&](int64_t item) {
        attend_images(worker, each, item / each.num_heads, item % each.num_heads);
    });
}

}  // namespace tw
