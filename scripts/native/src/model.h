// The weights of a model, and the parts that encoder and decoder share.
#pragma once
#include <vector>

#include "linear.h"

namespace native {

enum Norm : int32_t { LAYERNORM, STD, RMS };
enum Mixer : int32_t { ATTENTION, SSRU, AVERAGE };
enum Activation : int32_t { RELU, GELU, SILU, GELU_TANH, QUICK_GELU, RELU2 };

// The same fields in the same order as in tfexport/runtime/native/_library.py.
struct StackConfig {
  int64_t layers, heads, head_width, d_ff;
  int32_t is_pre, final_norm, embedding_norm, activation, glu, mixer;
  float embedding_scale, residual_scale, norm_eps, attention_scale;
};
struct Config {
  int64_t d_model, source_vocab, target_vocab, max_source_length, max_target_length;
  int32_t norm, has_positions, is_tied;  // is_tied: the decoder embeds with the encoder's table
  float logit_scale;
  StackConfig encoder, decoder;
};

// Asks the caller for tensors. The memory of tables has to outlive the model; that of others is copied at once.
class Tensors {
 public:
  using Next = int32_t (*)(Tensor* to);  // returns 0, or another number if there are no more
  explicit Tensors(Next next) : next_(next) {}
  Tensor take(int64_t rows, int64_t columns, bool may_be_bytes, bool optional = false);
  Array<float> vector(int64_t size, bool optional = false);  // empty if the caller gives none
  Linear linear(int64_t outputs, int64_t inputs);            // weight and bias
  Table table(int64_t rows, int64_t columns);
  bool is_done() const {
    Tensor more;
    return next_(&more);
  }

 private:
  Next next_;
};

struct NormWeights {
  Array<float> weight, bias;
  NormWeights() = default;
  NormWeights(Tensors& tensors, int64_t width) : weight(tensors.vector(width)), bias(tensors.vector(width, true)) {}
};

struct Network {
  Linear up, gate, down;
  Network() = default;
  Network(Tensors& tensors, int64_t width, const StackConfig& stack);
};

struct Layer {
  NormWeights norms[3];
  // Query, key and value, and output; in an SSRU forget and update; with average attention the gates and a network.
  Linear self, self_out;
  Network self_network;
  Linear cross_query, cross_key_value, cross_out;
  Network network;
  Layer(Tensors& tensors, const Config& config, const StackConfig& stack, bool is_decoder);
};

struct Stack {
  StackConfig config;
  Table embedding, positions;  // empty if it is the encoder's, or if there is none
  NormWeights embedding_norm, final_norm;
  std::vector<Layer> layers;
  Stack(Tensors& tensors, const Config& config, const StackConfig& stack, bool is_decoder);
};

// Buffers of one call, kept for the next one.
struct Scratch {
  Array<float> x, y, attended, wide, gate, scores, averaged, logits;
  Rounded rounded;
  explicit Scratch(Spare* spare)
      : x(spare), y(spare), attended(spare), wide(spare), gate(spare), scores(spare), averaged(spare), logits(spare),
        rounded(spare) {}
  void reserve(int64_t rows, int64_t d_model, const StackConfig& stack);
};

class Model {
 public:
  Model(const Config& config, Tensors tensors);
  // Write `x`: embeddings and positions of tokens.
  void embed(const Stack& stack, int64_t rows, const int64_t* ids, const int64_t* positions, float* x) const;
  // `x`, after a norm if `norm` is given, to `y` and on to a new value of `x`, by `sublayer(in, target)`.
  template <typename Sublayer>
  void residual(const Stack& stack, const NormWeights& norm, int64_t rows, Scratch& scratch, Sublayer sublayer) const;
  // Does not read `in` after the first write to the target.
  void apply(const Stack& stack, const Network& network, int64_t rows, const float* in, const Target& target,
             Scratch& scratch) const;
  void feed_forward(const Stack& stack, const Layer& layer, int number, int64_t rows, Scratch& scratch) const;
  void normalize(const Stack& stack, const NormWeights& norm, int64_t rows, const float* x, float* y) const;
  Config config;
  Stack encoder, decoder;
  Linear projection;
  mutable Spare spare;
};

template <typename Sublayer>
void Model::residual(const Stack& stack, const NormWeights& norm, int64_t rows, Scratch& scratch,
                     Sublayer sublayer) const {
  float *x = scratch.x.get(), *in = x;
  if (stack.config.is_pre) normalize(stack, norm, rows, x, in = scratch.y.get());
  sublayer(in, Target{x, config.d_model, false, x, stack.config.residual_scale});
  if (!stack.config.is_pre) normalize(stack, norm, rows, x, x);
}

// Keys and values of one layer come in blocks of STEP tokens: keys [heads][head_width][STEP], then values
// [heads][STEP][padded(head_width)].
struct KeyValues {
  int64_t heads, head_width;
  int64_t size() const { return heads * STEP * (head_width + padded(head_width)); }
  void put(const float* key, const float* value, float* block, int64_t place) const;
};

// Attention of QUERIES rows over the same tokens. block(i) is the i-th block; `scores` has QUERIES * padded(tokens).
template <int QUERIES, typename Blocks>
void attend(const KeyValues& kind, Blocks block, int64_t tokens, float scale, const float* queries,
            int64_t query_stride, float* out, int64_t out_stride, float* scores);

}  // namespace native
