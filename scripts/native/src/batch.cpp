#include "batch.h"

#include <algorithm>
#include <stdexcept>

#include "attend.h"

namespace native {

constexpr int64_t ENCODED_TOGETHER = 256;  // tokens; more of them do not fit into the cache
constexpr int64_t BLOCKS_TOGETHER = 16;    // that are allocated at once
constexpr int MOST_QUERIES = 4;

static KeyValues kind_of(const StackConfig& stack) { return {stack.heads, stack.head_width}; }

Batch::Batch(std::shared_ptr<const Model> model, int64_t width)
    : width(width),
      model_(std::move(model)),
      self_kind_(kind_of(model_->config.decoder)),
      cross_kind_(self_kind_),
      encoder_kind_(kind_of(model_->config.encoder)),
      scratch_(&model_->spare),
      logits_(&model_->spare) {}

int64_t Batch::longest() const {
  int64_t longest = 0;
  for (auto& row : rows_) longest = std::max(longest, row.length);
  return longest;
}

int32_t Batch::take() {
  if (free_.empty()) {
    int64_t size = self_kind_.size() * model_->config.decoder.layers;
    memory_.emplace_back(size * BLOCKS_TOGETHER, &model_->spare);
    for (int64_t i = 0; i < BLOCKS_TOGETHER; i++) {
      free_.push_back(int32_t(pool_.size()));
      pool_.push_back({memory_.back().get() + i * size, 0});
    }
  }
  int32_t found = free_.back();
  free_.pop_back();
  pool_[found].users = 1;
  return found;
}

void Batch::release(Row& row) {
  for (int32_t block : row.blocks)
    if (!--pool_[block].users) free_.push_back(block);
  row.blocks.clear();
}

Batch::Row Batch::share(const Row& row) {
  Row copy = row;
  for (int32_t block : copy.blocks) pool_[block].users++;
  return copy;
}

// Make room for one more token, in a block that no other row uses.
void Batch::extend(Row& row) {
  if (row.length % STEP == 0) {
    row.blocks.push_back(-1);
    row.blocks.back() = take();
  } else if (pool_[row.blocks.back()].users > 1) {
    int32_t old = row.blocks.back(), own = take();
    memcpy(pool_[own].data, pool_[old].data, self_kind_.size() * model_->config.decoder.layers * sizeof(float));
    pool_[old].users--;
    row.blocks.back() = own;
  }
}

const float* Batch::source_block(const Source& source, int64_t layer) const {
  return source.blocks.get() + layer * padded(source.length) / STEP * cross_kind_.size();
}

void Batch::add(int64_t count, const int64_t* ids, int64_t stride, const int64_t* lengths, const int64_t* prompts,
                const int64_t* prompt_lengths) {
  int64_t first = num_sources(), layers = model_->config.decoder.layers;
  for (int64_t i = 0; i < count; i++) {
    Source source;
    source.length = lengths[i];
    source.blocks = Array<float>(layers * padded(lengths[i]) / STEP * cross_kind_.size(), &model_->spare);
    sources_.push_back(std::move(source));
  }
  for (int64_t i = 0, end; i < count; i = end) {
    int64_t tokens = lengths[i];
    for (end = i + 1; end < count && tokens + lengths[end] <= ENCODED_TOGETHER; end++) tokens += lengths[end];
    encode(first + i, end - i, ids + i * stride, stride);
  }
  // One row of each source reads the prompt; the others share its cache.
  std::vector<int64_t> reading, next;
  std::vector<const int64_t*> from;
  int64_t longest = 0;
  for (int64_t i = 0; i < count; i++) {
    for (int64_t w = 0; w < width; w++) {
      Row row;
      row.source = first + i;
      if (model_->config.decoder.mixer != ATTENTION) row.state.assign(layers * model_->config.d_model, 0.f);
      rows_.push_back(std::move(row));
    }
    from.push_back(prompts);
    prompts += prompt_lengths[i];
    longest = std::max(longest, prompt_lengths[i] - 1);
  }
  for (int64_t t = 0; t < longest; t++) {
    reading.clear(), next.clear();
    for (int64_t i = 0; i < count; i++)
      if (t < prompt_lengths[i] - 1) reading.push_back((first + i) * width), next.push_back(from[i][t]);
    read(reading, next.data());
  }
  for (int64_t i = 0; i < count; i++)
    for (int64_t w = 1; w < width; w++) rows_[(first + i) * width + w] = share(rows_[(first + i) * width]);
}

void Batch::encode(int64_t first, int64_t count, const int64_t* ids, int64_t stride) {
  const Model& model = *model_;
  const Stack& stack = model.encoder;
  int64_t tokens = 0, longest = 0, d = model.config.d_model, width = stack.config.heads * stack.config.head_width;
  std::vector<int64_t> read, positions;
  for (int64_t i = 0; i < count; i++) {
    int64_t length = sources_[first + i].length;
    tokens += length, longest = std::max(longest, length);
    for (int64_t t = 0; t < length; t++) read.push_back(ids[i * stride + t]), positions.push_back(t);
  }
  scratch_.reserve(tokens, d, stack.config);
  scratch_.scores.reserve(MOST_QUERIES * padded(longest));
  model.embed(stack, tokens, read.data(), positions.data(), scratch_.x.get());
  int64_t wide = padded(3 * width), attended = padded(width), size = encoder_kind_.size();
  Array<float> blocks(padded(longest) / STEP * size, &model_->spare);
  for (auto& layer : stack.layers) {
    model.residual(stack, layer.norms[0], tokens, scratch_, [&](const float* in, const Target& target) {
      float* joint = scratch_.wide.get();
      layer.self(tokens, in, d, {joint, wide}, scratch_.rounded);
      float* out = scratch_.attended.get();
      auto block = [&](int64_t i) { return blocks.get() + i * size; };
      float scale = stack.config.attention_scale, *scores = scratch_.scores.get();
      for (int64_t i = 0, at = 0; i < count; at += sources_[first + i++].length) {
        int64_t length = sources_[first + i].length, t = 0;
        for (int64_t k = 0; k < length; k++) {
          const float* token = joint + (at + k) * wide;
          encoder_kind_.put(token + width, token + 2 * width, blocks.get() + k / STEP * size, k % STEP);
        }
        for (; t + MOST_QUERIES <= length; t += MOST_QUERIES)
          attend<MOST_QUERIES>(encoder_kind_, block, length, scale, joint + (at + t) * wide, wide,
                               out + (at + t) * attended, attended, scores);
        for (; t < length; t++)
          attend<1>(encoder_kind_, block, length, scale, joint + (at + t) * wide, wide, out + (at + t) * attended,
                    attended, scores);
      }
      layer.self_out(tokens, out, attended, target, scratch_.rounded);
    });
    model.feed_forward(stack, layer, 1, tokens, scratch_);
  }
  float* x = scratch_.x.get();
  if (stack.config.final_norm) model.normalize(stack, stack.final_norm, tokens, x, x);
  scratch_.reserve(tokens, d, model.config.decoder);
  width = cross_kind_.heads * cross_kind_.head_width, wide = padded(2 * width);
  for (int64_t number = 0; number < model.config.decoder.layers; number++) {
    float* joint = scratch_.wide.get();
    model.decoder.layers[number].cross_key_value(tokens, x, d, {joint, wide}, scratch_.rounded);
    for (int64_t i = 0; i < count; i++) {
      Source& source = sources_[first + i];
      auto* to = const_cast<float*>(source_block(source, number));
      for (int64_t t = 0; t < source.length; t++, joint += wide)
        cross_kind_.put(joint, joint + width, to + t / STEP * cross_kind_.size(), t % STEP);
    }
  }
}

void Batch::self_attention(const Layer& layer, int64_t number, const std::vector<int64_t>& rows, const float* in,
                           const Target& target) {
  int64_t count = int64_t(rows.size()), width = self_kind_.heads * self_kind_.head_width;
  int64_t wide = padded(3 * width), attended = padded(width), at = number * self_kind_.size();
  float *joint = scratch_.wide.get(), *out = scratch_.attended.get();
  layer.self(count, in, model_->config.d_model, {joint, wide}, scratch_.rounded);
  for (int64_t i = 0; i < count; i++) {
    Row& row = rows_[rows[i]];
    const float* token = joint + i * wide;
    self_kind_.put(token + width, token + 2 * width, pool_[row.blocks.back()].data + at, row.length % STEP);
    auto block = [&](int64_t b) { return pool_[row.blocks[b]].data + at; };
    attend<1>(self_kind_, block, row.length + 1, model_->config.decoder.attention_scale, token, wide,
              out + i * attended, attended, scratch_.scores.get());
  }
  layer.self_out(count, out, attended, target, scratch_.rounded);
}

void Batch::recur(const Layer& layer, int64_t number, const std::vector<int64_t>& rows, const float* in, float* x) {
  int64_t count = int64_t(rows.size()), d = model_->config.d_model;
  float* joint = scratch_.wide.get();
  layer.self(count, in, d, {joint, 2 * d}, scratch_.rounded);
  for (int64_t i = 0; i < count; i++) {
    float *state = rows_[rows[i]].state.data() + number * d, *forget = joint + i * 2 * d, *to = x + i * d;
    for (int64_t k = 0; k < d; k += LANES) {
      V share = sigmoid(load(forget + k));
      V c = share * load(state + k) + (1.f - share) * load(forget + d + k);
      store(state + k, c);
      store(to + k, load(to + k) * model_->config.decoder.residual_scale + (c < 0 ? V{} : c));
    }
  }
}

void Batch::average(const Layer& layer, int64_t number, const std::vector<int64_t>& rows, const float* in, float* x) {
  int64_t count = int64_t(rows.size()), d = model_->config.d_model;
  float *mean = scratch_.attended.get(), *read = scratch_.averaged.get(), *gates = scratch_.wide.get();
  for (int64_t i = 0; i < count; i++) {
    float *state = rows_[rows[i]].state.data() + number * d, before = float(rows_[rows[i]].length);
    for (int64_t k = 0; k < d; k += LANES) {
      V c = load(state + k) * (before / (before + 1)) + load(in + i * d + k) / (before + 1);
      store(state + k, c);
      store(mean + i * d + k, c);
    }
  }
  model_->apply(model_->decoder, layer.self_network, count, mean, {read, d}, scratch_);
  layer.self(count, in, d, {gates, d}, scratch_.rounded);
  layer.self_out(count, read, d, {gates + count * d, d}, scratch_.rounded);
  for (int64_t i = 0; i < count * d; i += LANES) {
    V y = sigmoid(load(gates + i)) * load(in + i) + sigmoid(load(gates + count * d + i)) * load(read + i);
    store(x + i, load(x + i) * model_->config.decoder.residual_scale + y);
  }
}

void Batch::cross_attention(const Layer& layer, int64_t number, const std::vector<int64_t>& rows, const float* in,
                            const Target& target) {
  int64_t count = int64_t(rows.size()), width = padded(cross_kind_.heads * cross_kind_.head_width);
  float *queries = scratch_.wide.get(), *out = scratch_.attended.get(), *scores = scratch_.scores.get();
  float scale = model_->config.decoder.attention_scale;
  layer.cross_query(count, in, model_->config.d_model, {queries, width}, scratch_.rounded);
  for (int64_t i = 0, end; i < count; i = end) {
    int64_t owner = rows_[rows[i]].source;
    const Source& source = sources_[owner];
    const float* first = source_block(source, number);
    auto block = [&](int64_t b) { return first + b * cross_kind_.size(); };
    for (end = i; end < count && end < i + MOST_QUERIES && rows_[rows[end]].source == owner;) end++;
    const float* q = queries + i * width;
    if (end - i == MOST_QUERIES) {
      attend<MOST_QUERIES>(cross_kind_, block, source.length, scale, q, width, out + i * width, width, scores);
      continue;
    }
    for (int64_t r = i; r < end; r++)
      attend<1>(cross_kind_, block, source.length, scale, queries + r * width, width, out + r * width, width, scores);
  }
  layer.cross_out(count, out, width, target, scratch_.rounded);
}

void Batch::read(const std::vector<int64_t>& rows, const int64_t* ids) {
  const Model& model = *model_;
  const Stack& stack = model.decoder;
  int64_t count = int64_t(rows.size()), longest = 0;
  std::vector<int64_t> positions;
  for (int64_t row : rows) {
    positions.push_back(rows_[row].length);
    longest = std::max({longest, rows_[row].length + 1, sources_[rows_[row].source].length});
    if (stack.config.mixer == ATTENTION) extend(rows_[row]);
  }
  scratch_.reserve(count, model.config.d_model, stack.config);
  scratch_.scores.reserve(MOST_QUERIES * padded(longest));
  float* x = scratch_.x.get();
  model.embed(stack, count, ids, positions.data(), x);
  for (size_t number = 0; number < stack.layers.size(); number++) {
    const Layer& layer = stack.layers[number];
    model.residual(stack, layer.norms[0], count, scratch_, [&](const float* in, const Target& target) {
      if (stack.config.mixer == SSRU)
        recur(layer, int64_t(number), rows, in, x);
      else if (stack.config.mixer == AVERAGE)
        average(layer, int64_t(number), rows, in, x);
      else
        self_attention(layer, int64_t(number), rows, in, target);
    });
    model.residual(stack, layer.norms[1], count, scratch_, [&](const float* in, const Target& target) {
      cross_attention(layer, int64_t(number), rows, in, target);
    });
    model.feed_forward(stack, layer, 2, count, scratch_);
  }
  if (stack.config.final_norm) model.normalize(stack, stack.final_norm, count, x, x);
  for (int64_t row : rows) rows_[row].length++;
}

// Reads the logits of a row in parts: the `count` best, of equal ones the lower id first, and log(sum(exp)).
class Selection {
 public:
  Selection(int64_t count, int64_t* ids, float* best) : count_(count), ids_(ids), best_(best) {}
  float log_normalizer() const { return top_ + std::log(total_); }

  // `logits` of ids from `first` on, padded by -inf.
  void add(const float* logits, int64_t size, int64_t first) {
    constexpr int64_t GROUP_SIZE = 8 * STEP, MOST_GROUPS = PART / GROUP_SIZE;
    float tops[MOST_GROUPS], top = top_;  // most groups have no number that is among the best
    for (int64_t i = 0; i < size; i += GROUP_SIZE) {
      V highest = all(-INFINITY);
      for (int64_t j = i; j < std::min(i + GROUP_SIZE, size); j += LANES) highest = larger(load(logits + j), highest);
      top = std::max(top, tops[i / GROUP_SIZE] = largest_of(highest));
    }
    V total{};
    float base = top > -INFINITY ? top : 0;
    for (int64_t i = 0; i < size; i += LANES) total += exp_of(load(logits + i) - base);
    total_ = (top > top_ ? total_ * std::exp(top_ - top) : total_) + sum_of(total);
    top_ = top;
    for (int64_t i = 0; i < size; i += GROUP_SIZE) {
      if (found_ == count_ && !(tops[i / GROUP_SIZE] > best_[count_ - 1])) continue;
      for (int64_t j = i; j < std::min(i + GROUP_SIZE, size); j += STEP) {
        V some = all(-INFINITY);
        for (int64_t k = j; k < j + STEP; k += LANES) some = larger(load(logits + k), some);
        if (found_ == count_ && !has_larger(some, best_[count_ - 1])) continue;
        for (int64_t k = j; k < std::min(j + STEP, size); k++) insert(first + k, logits[k]);
      }
    }
  }

  static constexpr int64_t PART = 2048;  // tokens; the logits of many rows then stay in the cache

 private:
  void insert(int64_t id, float value) {
    if (found_ == count_ && !(value > best_[count_ - 1])) return;
    int64_t place = found_ < count_ ? found_++ : count_ - 1;
    for (; place > 0 && best_[place - 1] < value; place--)
      best_[place] = best_[place - 1], ids_[place] = ids_[place - 1];
    best_[place] = value, ids_[place] = id;
  }
  int64_t count_, found_ = 0;
  int64_t* ids_;
  float* best_;
  float top_ = -INFINITY, total_ = 0;
};

// All logits in order, for as many candidates as there are tokens.
static void rank(const float* logits, int64_t size, int64_t count, int64_t* ids, float* best) {
  std::vector<int64_t> order(size);
  for (int64_t i = 0; i < size; i++) order[i] = i;
  auto key = [&](int64_t id) { return std::isnan(logits[id]) ? -INFINITY : logits[id]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) > key(b); });
  for (int64_t i = 0; i < count; i++) ids[i] = order[i], best[i] = logits[order[i]];
}

void Batch::step(const int64_t* ids, const Candidates& to) {
  constexpr int64_t FEW = 64;  // candidates up to which insertion is faster than sorting
  std::vector<int64_t> rows, read_ids;
  for (int64_t source = 0; source < num_sources(); source++) {
    const int64_t* own = ids + source * width;
    bool are_equal =
        sources_[source].rows_are_equal && std::all_of(own, own + width, [&](int64_t id) { return id == *own; });
    sources_[source].rows_are_equal = are_equal;
    for (int64_t w = 0; w < (are_equal ? 1 : width); w++)
      rows.push_back(source * width + w), read_ids.push_back(own[w]);
  }
  read(rows, read_ids.data());
  int64_t size = model_->config.target_vocab, count = int64_t(rows.size()), d = model_->config.d_model;
  bool needs_all = to.given || to.count > FEW;
  int64_t part = needs_all ? size : Selection::PART, wide = padded(std::min(part, size));
  logits_.reserve(count * wide);
  std::vector<int64_t> chosen(needs_all ? count : 0);
  std::vector<float> highest(needs_all ? count : 0);
  std::vector<Selection> selections;
  for (int64_t i = 0; i < count; i++)
    selections.push_back(needs_all ? Selection(1, &chosen[i], &highest[i])
                                   : Selection(to.count, to.ids + rows[i] * to.count, to.logits + rows[i] * to.count));
  for (int64_t first = 0; first < size; first += part) {
    int64_t own = std::min(part, size - first);
    Target target{logits_.get(), wide};
    target.first = first;
    model_->projection.part(count, scratch_.x.get(), d, target, scratch_.rounded, own);
    for (int64_t i = 0; i < count; i++) {
      float *logits = logits_.get() + i * wide, scale = model_->config.logit_scale;
      if (scale != 1)
        for (int64_t j = 0; j < own; j += LANES) store(logits + j, load(logits + j) * scale);
      std::fill(logits + own, logits + padded(own), -INFINITY);
      for (int64_t at = 0; at < own; at += Selection::PART)
        selections[i].add(logits + at, std::min(Selection::PART, own - at), first + at);
    }
  }
  for (int64_t i = 0; i < count; i++) {
    const float* logits = logits_.get() + i * wide;
    int64_t row = rows[i], *best_ids = to.ids + row * to.count;
    float* best = to.logits + row * to.count;
    to.log_normalizers[row] = selections[i].log_normalizer();
    if (!to.given && needs_all) rank(logits, size, to.count, best_ids, best);
    Source& source = sources_[rows_[row].source];
    for (int64_t w = 0; w < width; w++) {
      if (w && !source.rows_are_equal) break;
      int64_t other = row + w;
      if (to.given) to.ids[other] = to.given[other], to.logits[other] = logits[to.given[other]];
      if (!w) continue;
      release(rows_[other]);
      rows_[other] = share(rows_[row]);
      to.log_normalizers[other] = to.log_normalizers[row];
      if (to.given) continue;
      std::copy_n(best_ids, to.count, to.ids + other * to.count);
      std::copy_n(best, to.count, to.logits + other * to.count);
    }
  }
}

int64_t Batch::steps(const int64_t* ids, Candidates to, int64_t most, Ids stops, Ids banned) {
  std::vector<int64_t> next(ids, ids + num_rows());
  for (int64_t taken = 1;; taken++) {
    step(next.data(), to);
    bool is_last = taken == most;
    for (int64_t row = 0; row < num_rows(); row++) {
      const int64_t* own = to.ids + row * to.count;
      next[row] = *std::find_if(own, own + to.count - 1, [&](int64_t id) { return !banned.has(id); });
      is_last |= stops.has(next[row]);
    }
    if (is_last) return taken;
    to.ids += num_rows() * to.count, to.logits += num_rows() * to.count, to.log_normalizers += num_rows();
  }
}

void Batch::reorder(const int64_t* rows) {
  std::vector<Row> moved;
  for (int64_t first = 0; first < num_rows(); first += width) {
    bool moves = false;
    for (int64_t row = first; row < first + width; row++) moves |= rows[row] != row;
    if (!moves) continue;
    moved.clear();
    for (int64_t row = first; row < first + width; row++) moved.push_back(share(rows_[rows[row]]));
    for (int64_t row = first; row < first + width; row++) {
      release(rows_[row]);
      rows_[row] = std::move(moved[row - first]);
    }
  }
}

void Batch::remove(const int64_t* kept, int64_t count) {
  std::vector<Row> rows;
  std::vector<Source> sources;
  for (int64_t i = 0; i < count; i++) {
    sources.push_back(std::move(sources_[kept[i]]));
    for (int64_t w = 0; w < width; w++) {
      rows.push_back(share(rows_[kept[i] * width + w]));
      rows.back().source = i;
    }
  }
  for (Row& row : rows_) release(row);
  rows_.swap(rows), sources_.swap(sources);
}

}  // namespace native
