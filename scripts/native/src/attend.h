// Attention over blocks of keys and values.
#pragma once
#include <algorithm>

#include "model.h"

namespace native {

// out[QUERIES][COUNT vectors] = sum over the tokens of weight * value.
template <int QUERIES, int COUNT, typename Blocks>
void mix(const KeyValues& kind, Blocks block, int64_t tokens, int64_t offset, const float* weights, int64_t stride,
         const V* inverse, float* out, int64_t out_stride) {
  V sums[QUERIES][COUNT] = {};
  int64_t width = padded(kind.head_width);
  for (int64_t first = 0; first < tokens; first += STEP) {
    const float* values = block(first / STEP) + offset;
    for (int64_t t = 0, count = std::min<int64_t>(STEP, tokens - first); t < count; t++) {
      V v[COUNT];
#pragma GCC unroll 8
      for (int j = 0; j < COUNT; j++) v[j] = load(values + t * width + j * LANES);
#pragma GCC unroll 4
      for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; j++) sums[m][j] += v[j] * weights[m * stride + first + t];
    }
  }
  for (int m = 0; m < QUERIES; m++)
    for (int j = 0; j < COUNT; j++) store(out + m * out_stride + j * LANES, sums[m][j] * inverse[m]);
}

template <int QUERIES, typename Blocks>
void attend(const KeyValues& kind, Blocks block, int64_t tokens, float scale, const float* queries,
            int64_t query_stride, float* out, int64_t out_stride, float* scores) {
  constexpr int N = STEP / LANES;
  int64_t stride = padded(tokens), width = kind.head_width, wide = padded(width);
  for (int64_t head = 0; head < kind.heads; head++) {
    const float* q = queries + head * width;
    V largest[QUERIES], inverse[QUERIES];
    for (int m = 0; m < QUERIES; m++) largest[m] = all(-INFINITY);
    for (int64_t first = 0; first < tokens; first += STEP) {
      const float* keys = block(first / STEP) + head * width * STEP;
      V sums[QUERIES][N] = {};
      for (int64_t i = 0; i < width; i++) {
        V k[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) k[j] = load(keys + i * STEP + j * LANES);
#pragma GCC unroll 4
        for (int m = 0; m < QUERIES; m++)
#pragma GCC unroll 4
          for (int j = 0; j < N; j++) sums[m][j] += k[j] * q[m * query_stride + i];
      }
      for (int m = 0; m < QUERIES; m++)
        for (int j = 0; j < N; j++) {
          V s = sums[m][j] * scale;
          for (int64_t t = std::max<int64_t>(tokens - first - j * LANES, 0); t < LANES; t++) s[t] = -INFINITY;
          largest[m] = larger(s, largest[m]);
          store(scores + m * stride + first + j * LANES, s);
        }
    }
    for (int m = 0; m < QUERIES; m++) {
      float top = largest_of(largest[m]);
      V sum{};
      for (int64_t t = 0; t < tokens; t += LANES) {
        V e = exp_of(load(scores + m * stride + t) - top);
        for (int64_t i = tokens - t; i < LANES; i++) e[i] = 0;
        sum += e;
        store(scores + m * stride + t, e);
      }
      inverse[m] = all(1 / sum_of(sum));
    }
    alignas(64) float padding[QUERIES * STEP];
    for (int64_t column = 0; column < width; column += STEP) {
      int64_t offset = kind.heads * width * STEP + head * STEP * wide + column;
      float* to = out + head * width + column;
      if (width - column >= STEP) {
        mix<QUERIES, N>(kind, block, tokens, offset, scores, stride, inverse, to, out_stride);
        continue;
      }
      mix<QUERIES, N>(kind, block, tokens, offset, scores, stride, inverse, padding, STEP);
      for (int m = 0; m < QUERIES; m++)
        memcpy(to + m * out_stride, padding + m * STEP, (width - column) * sizeof(float));
    }
  }
}

}  // namespace native
