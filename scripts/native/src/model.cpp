#include "model.h"

#include <algorithm>

namespace native {

Tensor Tensors::take(int64_t rows, int64_t columns, bool may_be_bytes, bool optional) {
  Tensor found{};
  if (next_(&found)) throw std::invalid_argument("too few tensors");
  if (optional && !found.values) return found;
  bool is_valid = found.values && found.rows == rows && found.columns == columns && found.block >= 0;
  if (found.block)
    is_valid &= may_be_bytes && found.block % STEP == 0 && found.block <= 65536 && found.scales && found.zeros;
  if (!is_valid) throw std::invalid_argument("a tensor has the wrong shape");
  return found;
}

Array<float> Tensors::vector(int64_t size, bool optional) {
  Tensor found = take(1, size, false, optional);
  if (!found.values) return {};
  Array<float> copy(padded(size));
  memcpy(copy.get(), found.values, size * sizeof(float));
  return copy;
}

Linear Tensors::linear(int64_t outputs, int64_t inputs) {
  Linear made(take(outputs, inputs, true));
  made.add(vector(outputs, true));
  return made;
}

Table Tensors::table(int64_t rows, int64_t columns) { return {take(rows, columns, true)}; }

Layer::Layer(Tensors& tensors, const Config& config, const StackConfig& stack, bool is_decoder) {
  int64_t d = config.d_model, width = stack.heads * stack.head_width;
  int count = 0;
  norms[count++] = NormWeights(tensors, d);
  if (stack.mixer == AVERAGE) self_network = Network(tensors, d, stack);
  self = tensors.linear(stack.mixer == ATTENTION ? 3 * width : stack.mixer == SSRU ? 2 * d : d, d);
  if (stack.mixer != SSRU) self_out = tensors.linear(d, stack.mixer == ATTENTION ? width : d);
  if (is_decoder) {
    norms[count++] = NormWeights(tensors, d);
    cross_query = tensors.linear(width, d);
    cross_key_value = tensors.linear(2 * width, d);
    cross_out = tensors.linear(d, width);
  }
  norms[count] = NormWeights(tensors, d);
  network = Network(tensors, d, stack);
}

Network::Network(Tensors& tensors, int64_t width, const StackConfig& stack) {
  up = tensors.linear(stack.d_ff, width);
  if (stack.glu) gate = tensors.linear(stack.d_ff, width);
  down = tensors.linear(width, stack.d_ff);
}

Stack::Stack(Tensors& tensors, const Config& config, const StackConfig& stack, bool is_decoder) : config(stack) {
  if (!(is_decoder && config.is_tied))
    embedding = tensors.table(is_decoder ? config.target_vocab : config.source_vocab, config.d_model);
  if (config.has_positions)
    positions = tensors.table(is_decoder ? config.max_target_length : config.max_source_length, config.d_model);
  if (stack.embedding_norm) embedding_norm = NormWeights(tensors, config.d_model);
  for (int64_t i = 0; i < stack.layers; i++) layers.emplace_back(tensors, config, stack, is_decoder);
  if (stack.final_norm) final_norm = NormWeights(tensors, config.d_model);
}

Model::Model(const Config& given, Tensors tensors)
    : config(given), encoder(tensors, given, given.encoder, false), decoder(tensors, given, given.decoder, true) {
  projection = tensors.linear(config.target_vocab, config.d_model);
  if (!tensors.is_done()) throw std::invalid_argument("too many tensors");
}

void Scratch::reserve(int64_t rows, int64_t d_model, const StackConfig& stack) {
  int64_t width = padded(stack.heads * stack.head_width);
  x.reserve(rows * d_model), y.reserve(rows * d_model);
  attended.reserve(rows * std::max(width, d_model));
  wide.reserve(rows * std::max({padded(stack.d_ff), 3 * width, 2 * d_model}));
  if (stack.glu) gate.reserve(rows * padded(stack.d_ff));
  if (stack.mixer == AVERAGE) averaged.reserve(rows * d_model);
}

void Model::embed(const Stack& stack, int64_t rows, const int64_t* ids, const int64_t* positions, float* x) const {
  const Table& table = stack.embedding.tensor.rows ? stack.embedding : encoder.embedding;
  int64_t d = config.d_model;
  Array<float> position(d);
  for (int64_t row = 0; row < rows; row++) {
    float* to = x + row * d;
    table.read(ids[row], to);
    if (config.has_positions) stack.positions.read(positions[row], position.get());
    for (int64_t i = 0; i < d; i += LANES)
      store(to + i, load(to + i) * stack.config.embedding_scale + load(position.get() + i));
  }
  if (stack.config.embedding_norm) normalize(stack, stack.embedding_norm, rows, x, x);
}

void Model::normalize(const Stack& stack, const NormWeights& norm, int64_t rows, const float* x, float* y) const {
  int64_t d = config.d_model;
  float eps = stack.config.norm_eps;
  const float *weight = norm.weight.get(), *bias = norm.bias.get();
  for (int64_t row = 0; row < rows; row++, x += d, y += d) {
    V total{}, squares{};
    float mean = 0, scale;
    if (config.norm != RMS) {
      for (int64_t i = 0; i < d; i += LANES) total += load(x + i);
      mean = sum_of(total) / float(d);
    }
    for (int64_t i = 0; i < d; i += LANES) {
      V v = load(x + i) - mean;
      squares += v * v;
    }
    float sum = sum_of(squares);
    if (config.norm == STD)
      scale = 1 / (std::sqrt(sum / float(d - 1)) + eps);
    else
      scale = 1 / std::sqrt(sum / float(d) + eps);
    for (int64_t i = 0; i < d; i += LANES) {
      V v = (load(x + i) - mean) * scale * load(weight + i);
      store(y + i, bias ? v + load(bias + i) : v);
    }
  }
}

static V erf_of(V x) {  // Abramowitz and Stegun, 7.1.26; its error is below 1.5e-7
  V sign = x < 0 ? all(-1.f) : all(1.f), size = x * sign, t = 1.f / (1.f + size * 0.3275911f);
  V p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  return sign * (1.f - p * t * exp_of(-size * size));
}

static V activated(int32_t kind, V x) {
  switch (kind) {
    case GELU:
      return x * 0.5f * (1.f + erf_of(x * 0.70710678f));
    case SILU:
      return x * sigmoid(x);
    case GELU_TANH:
      return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));  // (1 + tanh(u)) / 2 = sigmoid(2u)
    case QUICK_GELU:
      return x * sigmoid(1.702f * x);
    case RELU2:
      x = x < 0 ? V{} : x;
      return x * x;
    default:
      return x < 0 ? V{} : x;
  }
}

void Model::apply(const Stack& stack, const Network& network, int64_t rows, const float* in, const Target& target,
                  Scratch& scratch) const {
  int64_t width = padded(stack.config.d_ff);
  float *hidden = scratch.wide.get(), *gate = scratch.gate.get();
  bool is_fused = stack.config.activation == RELU;
  network.up(rows, in, config.d_model, {hidden, width, is_fused}, scratch.rounded);
  if (stack.config.glu) network.gate(rows, in, config.d_model, {gate, width}, scratch.rounded);
  if (!is_fused || stack.config.glu)
    for (int64_t i = 0; i < rows * width; i += LANES) {
      V v = is_fused ? load(hidden + i) : activated(stack.config.activation, load(hidden + i));
      store(hidden + i, stack.config.glu ? v * load(gate + i) : v);
    }
  network.down(rows, hidden, width, target, scratch.rounded);
}

void Model::feed_forward(const Stack& stack, const Layer& layer, int number, int64_t rows, Scratch& scratch) const {
  residual(stack, layer.norms[number], rows, scratch, [&](const float* in, const Target& target) {
    apply(stack, layer.network, rows, in, target, scratch);
  });
}

void KeyValues::put(const float* key, const float* value, float* block, int64_t place) const {
  for (int64_t i = 0; i < heads * head_width; i++) block[i * STEP + place] = key[i];
  float* values = block + heads * head_width * STEP;
  for (int64_t head = 0; head < heads; head++)
    memcpy(values + (head * STEP + place) * padded(head_width), value + head * head_width, head_width * sizeof(float));
}

}  // namespace native
