#include "linear.h"

#include <algorithm>

namespace native {

Linear::Linear(const Tensor& weight) : inputs(weight.columns), outputs(weight.rows) {
  panels_ = (outputs + PANEL - 1) / PANEL;
  bias_ = Array<float>(panels_ * PANEL);
  if (!weight.block) {
    weights_ = Array<float>(panels_ * inputs * PANEL);
    auto* from = static_cast<const float*>(weight.values);
    for (int64_t n = 0; n < outputs; n++)
      for (int64_t k = 0; k < inputs; k++)
        weights_.get()[(n / PANEL * inputs + k) * PANEL + n % PANEL] = from[n * inputs + k];
    return;
  }
  block_ = weight.block, blocks_ = weight.blocks(), lanes_ = block_ * blocks_ / 4;
  bytes_ = Array<int32_t>(panels_ * lanes_ * PANEL);
  zeros_ = Array<int32_t>(panels_ * blocks_ * PANEL);
  scales_ = Array<float>(panels_ * blocks_ * PANEL);
  auto* from = static_cast<const uint8_t*>(weight.values);
  auto* to = reinterpret_cast<uint8_t*>(bytes_.get());
  for (int64_t n = 0; n < outputs; n++)
    for (int64_t k = 0; k < inputs; k++) {  // padding of the last block stays 0, and its activations are 0
      int64_t at = n * blocks_ + k / block_, own = (n / PANEL * blocks_ + k / block_) * PANEL + n % PANEL;
      int64_t place = ((n / PANEL * lanes_ + k / 4) * PANEL + n % PANEL) * 4 + k % 4;
      to[place] = uint8_t(from[n * blocks_ * block_ + k] - OFFSET);
      zeros_.get()[own] = weight.zeros[at] - OFFSET, scales_.get()[own] = weight.scales[at];
    }
}

void Linear::round(int64_t rows, const float* x, int64_t stride, Rounded& to) const {
  to.lanes.reserve(rows * lanes_);
  to.scales.reserve(rows * blocks_);
  to.sums.reserve(rows * blocks_);
  const V magic = all(12582912.f);
  for (int64_t row = 0; row < rows; row++) {
    const float* from = x + row * stride;
    auto* lanes = reinterpret_cast<int8_t*>(to.lanes.get() + row * lanes_);
    for (int64_t b = 0; b < blocks_; b++) {
      int64_t begin = b * block_, end = std::min(begin + block_, inputs), whole = end - (end - begin) % LANES;
      V largest{}, broken{};
      for (int64_t k = begin; k < whole; k += LANES) {
        V v = load(from + k);
        broken += v * 0.f;  // NaN if a value is NaN or infinite, which integers cannot be
        largest = larger((V)((I)v & 0x7fffffff), largest);
      }
      float top = largest_of(largest), nan = sum_of(broken);
      for (int64_t k = whole; k < end; k++) nan += from[k] * 0.f, top = std::max(top, std::fabs(from[k]));
      float inverse = top > 0 ? 127 / top : 0;
      to.scales.get()[row * blocks_ + b] = top / 127 + nan;
      I sum{};
      int32_t rest = 0;
      for (int64_t k = begin; k < whole; k += LANES) {
        I q = (I)(load(from + k) * inverse + magic) - (I)magic;
        sum += q;
        Quarter bytes = __builtin_convertvector(__builtin_convertvector(q, Half), Quarter);  // at once is slow in GCC
        memcpy(lanes + k, &bytes, sizeof bytes);
      }
      for (int64_t k = whole; k < begin + block_; k++) {
        int value = k < end && nan == 0 ? int(std::nearbyint(from[k] * inverse)) : 0;
        rest += value, lanes[k] = int8_t(value);
      }
      to.sums.get()[row * blocks_ + b] = rest + sum_of(sum);
    }
  }
}

template <int M, int P>
[[gnu::always_inline]] inline void Linear::finish(int64_t panel, int64_t row, V (&sums)[M][P * VECTORS],
                                                  const Target& target) const {
  const float* bias = bias_.get() + panel * PANEL;
  int64_t first = panel * PANEL, width = padded(outputs);
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int j = 0; j < P * VECTORS; j++) {
      int64_t column = first + j * LANES;
      if (column >= width) continue;
      V v = sums[m][j] + load(bias + j * LANES);
      if (target.relu) v = v < 0 ? V{} : v;
      int64_t at = (row + m) * target.stride + column - target.first;
      if (target.residual) v += load(target.residual + at) * target.residual_scale;
      store(target.out + at, v);
    }
}

template <int M, int P>
void Linear::float_tile(int64_t panel, const float* x, int64_t stride, int64_t row, const Target& target) const {
  constexpr int N = P * VECTORS;
  V sums[M][N] = {};
  const float* w = weights_.get() + panel * inputs * PANEL;
  x += row * stride;
#pragma GCC unroll 2
  for (int64_t k = 0; k < inputs; k++, w += PANEL) {
    V v[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) v[j] = load(w + j / VECTORS * inputs * PANEL + j % VECTORS * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      V value = all(x[m * stride + k]);
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) sums[m][j] += value * v[j];
    }
  }
  finish<M, P>(panel, row, sums, target);
}

template <int M, int P>
void Linear::byte_tile(int64_t panel, const Rounded& x, int64_t row, const Target& target) const {
  constexpr int N = P * VECTORS;
  V sums[M][N] = {};
  int64_t lanes = block_ / 4;
  for (int64_t b = 0; b < blocks_; b++) {
    const int32_t* w = bytes_.get() + (panel * lanes_ + b * lanes) * PANEL;
    const int32_t* from = x.lanes.get() + row * lanes_ + b * lanes;
    I whole[M][N] = {};
    for (int64_t k = 0; k < lanes; k++, w += PANEL) {
      I v[N];
#pragma GCC unroll 16
      for (int j = 0; j < N; j++)
        v[j] = (I)load(reinterpret_cast<const float*>(w + j / VECTORS * lanes_ * PANEL + j % VECTORS * LANES));
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) whole[m][j] = dot(whole[m][j], v[j], from[m * lanes_ + k]);
    }
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) {
      int64_t at = ((panel + j / VECTORS) * blocks_ + b) * PANEL + j % VECTORS * LANES;
      V scale = load(scales_.get() + at);
      I zero = (I)load(reinterpret_cast<const float*>(zeros_.get() + at));
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        int64_t own = (row + m) * blocks_ + b;
        I exact = whole[m][j] - zero * x.sums.get()[own];
        sums[m][j] += __builtin_convertvector(exact, V) * (scale * x.scales.get()[own]);
      }
    }
  }
  finish<M, P>(panel, row, sums, target);
}

template <int M>
void Linear::some_rows(int64_t rows, int64_t panel, const float* x, int64_t stride, int64_t row, const Target& target,
                       const Rounded& rounded) const {
  if constexpr (M > 0) {
    if (rows != M) return some_rows<M - 1>(rows, panel, x, stride, row, target, rounded);
    if (!lanes_)
      float_tile<M, 1>(panel, x, stride, row, target);
    else if constexpr (M <= BYTE_ROWS)
      byte_tile<M, 1>(panel, rounded, row, target);
  }
}

void Linear::part(int64_t rows, const float* x, int64_t stride, const Target& target, Rounded& scratch,
                  int64_t count, int64_t threads) const {
  if (lanes_ && !target.first) round(rows, x, stride, scratch);
  int64_t begin = target.first / PANEL, size = std::min(panels_, (target.first + count + PANEL - 1) / PANEL) - begin;
  int64_t most = lanes_ ? BYTE_ROWS : ROWS, tiles = (rows + most - 1) / most;
  on_threads(threads, [&](int64_t thread) {
    int64_t panel = begin + thread * size / threads, end = begin + (thread + 1) * size / threads;
    if (rows == 1)  // more sums than one panel has, because each addition waits for the one before
      for (; panel + 2 <= end; panel += 2)
        lanes_ ? byte_tile<1, 2>(panel, scratch, 0, target) : float_tile<1, 2>(panel, x, stride, 0, target);
    for (; panel < end; panel++)
      for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t row = tile * rows / tiles;
        some_rows<ROWS>((tile + 1) * rows / tiles - row, panel, x, stride, row, target, scratch);
      }
  });
}

void Table::read(int64_t row, float* to) const {
  int64_t columns = tensor.columns, block = tensor.block, blocks = block ? tensor.blocks() : 0;
  if (!block) memcpy(to, static_cast<const float*>(tensor.values) + row * columns, columns * sizeof(float));
  auto* bytes = static_cast<const uint8_t*>(tensor.values) + row * blocks * block;
  for (int64_t b = 0, at = row * blocks; b < blocks; b++, at++)
    for (int64_t k = b * block; k < std::min((b + 1) * block, columns); k++)
      to[k] = float(bytes[k] - tensor.zeros[at]) * tensor.scales[at];
}

}  // namespace native
