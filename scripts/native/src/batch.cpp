#include "batch.h"

#include <algorithm>
#include <stdexcept>

#include "attend.h"

namespace native {

constexpr int64_t ENCODED_TOGETHER = 256;  // tokens; more of them do not fit into the cache
constexpr int64_t BLOCKS_TOGETHER = 16;    // that are allocated at once
constexpr int MOST_QUERIES = 4;
constexpr int64_t FEWEST_ROWS = 4;             // of a thread, which reads all weights for them
constexpr int64_t FEWEST_WEIGHTS = 6'000'000;  // of the projection for a thread, if several take the same rows

static KeyValues kind_of(const StackConfig& stack) { return {stack.heads, stack.head_width}; }

Batch::Batch(std::shared_ptr<const Model> model, int64_t width, int64_t threads)
    : width(width),
      model_(std::move(model)),
      self_kind_(kind_of(model_->config.decoder)),
      cross_kind_(self_kind_),
      encoder_kind_(kind_of(model_->config.encoder)) {
  for (int64_t i = 0; i < threads; i++) parts_.push_back({{}, {}, Scratch(&model_->spare)});
}

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
  if (model_->config.decoder.mixer != ATTENTION) return;
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
  int64_t threads = std::min(count, int64_t(parts_.size()));
  on_threads(threads, [&](int64_t thread) {
    int64_t after = (thread + 1) * count / threads;
    for (int64_t i = thread * count / threads, end; i < after; i = end) {
      int64_t tokens = lengths[i];
      for (end = i + 1; end < after && tokens + lengths[end] <= ENCODED_TOGETHER; end++) tokens += lengths[end];
      encode(first + i, end - i, ids + i * stride, stride, parts_[thread].scratch);
    }
  });
  // One row of each source reads the prompt; the others share its cache.
  Part& part = parts_[0];
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
    part.rows.clear(), part.ids.clear();
    for (int64_t i = 0; i < count; i++)
      if (t < prompt_lengths[i] - 1) part.rows.push_back((first + i) * width), part.ids.push_back(from[i][t]);
    for (int64_t row : part.rows) extend(rows_[row]);
    read(part);
  }
  for (int64_t i = 0; i < count; i++)
    for (int64_t w = 1; w < width; w++) rows_[(first + i) * width + w] = share(rows_[(first + i) * width]);
}

void Batch::encode(int64_t first, int64_t count, const int64_t* ids, int64_t stride, Scratch& scratch) {
  const Model& model = *model_;
  const Stack& stack = model.encoder;
  int64_t tokens = 0, longest = 0, d = model.config.d_model, width = stack.config.heads * stack.config.head_width;
  std::vector<int64_t> read, positions;
  for (int64_t i = 0; i < count; i++) {
    int64_t length = sources_[first + i].length;
    tokens += length, longest = std::max(longest, length);
    for (int64_t t = 0; t < length; t++) read.push_back(ids[i * stride + t]), positions.push_back(t);
  }
  scratch.reserve(tokens, d, stack.config);
  scratch.scores.reserve(MOST_QUERIES * padded(longest));
  model.embed(stack, tokens, read.data(), positions.data(), scratch.x.get());
  int64_t wide = padded(3 * width), attended = padded(width), size = encoder_kind_.size();
  Array<float> blocks(padded(longest) / STEP * size, &model_->spare);
  for (auto& layer : stack.layers) {
    model.residual(stack, layer.norms[0], tokens, scratch, [&](const float* in, const Target& target) {
      float* joint = scratch.wide.get();
      layer.self(tokens, in, d, {joint, wide}, scratch.rounded);
      float* out = scratch.attended.get();
      auto block = [&](int64_t i) { return blocks.get() + i * size; };
      float scale = stack.config.attention_scale, *scores = scratch.scores.get();
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
      layer.self_out(tokens, out, attended, target, scratch.rounded);
    });
    model.feed_forward(stack, layer, 1, tokens, scratch);
  }
  float* x = scratch.x.get();
  if (stack.config.final_norm) model.normalize(stack, stack.final_norm, tokens, x, x);
  scratch.reserve(tokens, d, model.config.decoder);
  width = cross_kind_.heads * cross_kind_.head_width, wide = padded(2 * width);
  for (int64_t number = 0; number < model.config.decoder.layers; number++) {
    float* joint = scratch.wide.get();
    model.decoder.layers[number].cross_key_value(tokens, x, d, {joint, wide}, scratch.rounded);
    for (int64_t i = 0; i < count; i++) {
      Source& source = sources_[first + i];
      auto* to = const_cast<float*>(source_block(source, number));
      for (int64_t t = 0; t < source.length; t++, joint += wide)
        cross_kind_.put(joint, joint + width, to + t / STEP * cross_kind_.size(), t % STEP);
    }
  }
}

void Batch::self_attention(const Layer& layer, int64_t number, Part& part, const float* in, const Target& target) {
  int64_t count = int64_t(part.rows.size()), width = self_kind_.heads * self_kind_.head_width;
  int64_t wide = padded(3 * width), attended = padded(width), at = number * self_kind_.size();
  float *joint = part.scratch.wide.get(), *out = part.scratch.attended.get();
  layer.self(count, in, model_->config.d_model, {joint, wide}, part.scratch.rounded);
  for (int64_t i = 0; i < count; i++) {
    Row& row = rows_[part.rows[i]];
    const float* token = joint + i * wide;
    self_kind_.put(token + width, token + 2 * width, pool_[row.blocks.back()].data + at, row.length % STEP);
    auto block = [&](int64_t b) { return pool_[row.blocks[b]].data + at; };
    attend<1>(self_kind_, block, row.length + 1, model_->config.decoder.attention_scale, token, wide,
              out + i * attended, attended, part.scratch.scores.get());
  }
  layer.self_out(count, out, attended, target, part.scratch.rounded);
}

void Batch::recur(const Layer& layer, int64_t number, Part& part, const float* in, float* x) {
  int64_t count = int64_t(part.rows.size()), d = model_->config.d_model;
  float* joint = part.scratch.wide.get();
  layer.self(count, in, d, {joint, 2 * d}, part.scratch.rounded);
  for (int64_t i = 0; i < count; i++) {
    float *state = rows_[part.rows[i]].state.data() + number * d, *forget = joint + i * 2 * d, *to = x + i * d;
    for (int64_t k = 0; k < d; k += LANES) {
      V share = sigmoid(load(forget + k));
      V c = share * load(state + k) + (1.f - share) * load(forget + d + k);
      store(state + k, c);
      store(to + k, load(to + k) * model_->config.decoder.residual_scale + (c < 0 ? V{} : c));
    }
  }
}

void Batch::average(const Layer& layer, int64_t number, Part& part, const float* in, float* x) {
  int64_t count = int64_t(part.rows.size()), d = model_->config.d_model;
  float *mean = part.scratch.attended.get(), *read = part.scratch.averaged.get(), *gates = part.scratch.wide.get();
  for (int64_t i = 0; i < count; i++) {
    float *state = rows_[part.rows[i]].state.data() + number * d, before = float(rows_[part.rows[i]].length);
    for (int64_t k = 0; k < d; k += LANES) {
      V c = load(state + k) * (before / (before + 1)) + load(in + i * d + k) / (before + 1);
      store(state + k, c);
      store(mean + i * d + k, c);
    }
  }
  model_->apply(model_->decoder, layer.self_network, count, mean, {read, d}, part.scratch);
  layer.self(count, in, d, {gates, d}, part.scratch.rounded);
  layer.self_out(count, read, d, {gates + count * d, d}, part.scratch.rounded);
  for (int64_t i = 0; i < count * d; i += LANES) {
    V y = sigmoid(load(gates + i)) * load(in + i) + sigmoid(load(gates + count * d + i)) * load(read + i);
    store(x + i, load(x + i) * model_->config.decoder.residual_scale + y);
  }
}

void Batch::cross_attention(const Layer& layer, int64_t number, Part& part, const float* in, const Target& target) {
  int64_t count = int64_t(part.rows.size()), width = padded(cross_kind_.heads * cross_kind_.head_width);
  float *queries = part.scratch.wide.get(), *out = part.scratch.attended.get(), *scores = part.scratch.scores.get();
  float scale = model_->config.decoder.attention_scale;
  layer.cross_query(count, in, model_->config.d_model, {queries, width}, part.scratch.rounded);
  for (int64_t i = 0, end; i < count; i = end) {
    int64_t owner = rows_[part.rows[i]].source;
    const Source& source = sources_[owner];
    const float* first = source_block(source, number);
    auto block = [&](int64_t b) { return first + b * cross_kind_.size(); };
    for (end = i; end < count && end < i + MOST_QUERIES && rows_[part.rows[end]].source == owner;) end++;
    const float* q = queries + i * width;
    if (end - i == MOST_QUERIES) {
      attend<MOST_QUERIES>(cross_kind_, block, source.length, scale, q, width, out + i * width, width, scores);
      continue;
    }
    for (int64_t r = i; r < end; r++)
      attend<1>(cross_kind_, block, source.length, scale, queries + r * width, width, out + r * width, width, scores);
  }
  layer.cross_out(count, out, width, target, part.scratch.rounded);
}

void Batch::read(Part& part) {
  const Model& model = *model_;
  const Stack& stack = model.decoder;
  Scratch& scratch = part.scratch;
  int64_t count = int64_t(part.rows.size()), longest = 0;
  std::vector<int64_t> positions;
  for (int64_t row : part.rows) {
    positions.push_back(rows_[row].length);
    longest = std::max({longest, rows_[row].length + 1, sources_[rows_[row].source].length});
  }
  scratch.reserve(count, model.config.d_model, stack.config);
  scratch.scores.reserve(MOST_QUERIES * padded(longest));
  float* x = scratch.x.get();
  model.embed(stack, count, part.ids.data(), positions.data(), x);
  for (size_t number = 0; number < stack.layers.size(); number++) {
    const Layer& layer = stack.layers[number];
    model.residual(stack, layer.norms[0], count, scratch, [&](const float* in, const Target& target) {
      if (stack.config.mixer == SSRU)
        recur(layer, int64_t(number), part, in, x);
      else if (stack.config.mixer == AVERAGE)
        average(layer, int64_t(number), part, in, x);
      else
        self_attention(layer, int64_t(number), part, in, target);
    });
    model.residual(stack, layer.norms[1], count, scratch, [&](const float* in, const Target& target) {
      cross_attention(layer, int64_t(number), part, in, target);
    });
    model.feed_forward(stack, layer, 2, count, scratch);
  }
  if (stack.config.final_norm) model.normalize(stack, stack.final_norm, count, x, x);
  for (int64_t row : part.rows) rows_[row].length++;
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

// Write the candidates of a part, and of the rows that equal one of it.
void Batch::select(Part& part, const Candidates& to, int64_t threads) {
  constexpr int64_t FEW = 64;  // candidates up to which insertion is faster than sorting
  int64_t size = model_->config.target_vocab, count = int64_t(part.rows.size()), d = model_->config.d_model;
  threads = std::clamp<int64_t>(size * d / FEWEST_WEIGHTS, 1, threads);
  bool needs_all = to.given || to.count > FEW;
  int64_t most = needs_all || threads > 1 ? size : Selection::PART, wide = padded(std::min(most, size));
  Scratch& scratch = part.scratch;
  scratch.logits.reserve(count * wide);
  std::vector<Selection> selections;
  for (int64_t row : part.rows)
    selections.emplace_back(needs_all ? 1 : to.count, to.ids + row * to.count, to.logits + row * to.count);
  for (int64_t first = 0; first < size; first += most) {
    int64_t own = std::min(most, size - first);
    Target target{scratch.logits.get(), wide};
    target.first = first;
    model_->projection.part(count, scratch.x.get(), d, target, scratch.rounded, own, threads);
    for (int64_t i = 0; i < count; i++) {
      float *logits = scratch.logits.get() + i * wide, scale = model_->config.logit_scale;
      if (scale != 1)
        for (int64_t j = 0; j < own; j += LANES) store(logits + j, load(logits + j) * scale);
      std::fill(logits + own, logits + padded(own), -INFINITY);
      for (int64_t at = 0; at < own; at += Selection::PART)
        selections[i].add(logits + at, std::min(Selection::PART, own - at), first + at);
    }
  }
  for (int64_t i = 0; i < count; i++) {
    const float* logits = scratch.logits.get() + i * wide;
    int64_t row = part.rows[i], *best_ids = to.ids + row * to.count;
    float* best = to.logits + row * to.count;
    if (!to.given && needs_all) rank(logits, size, to.count, best_ids, best);
    int64_t equal = sources_[rows_[row].source].rows_are_equal ? width : 1;
    for (int64_t other = row; other < row + equal; other++) {
      to.log_normalizers[other] = selections[i].log_normalizer();
      if (to.given) {
        to.ids[other] = to.given[other], to.logits[other] = logits[to.given[other]];
      } else if (other != row) {
        std::copy_n(best_ids, to.count, to.ids + other * to.count);
        std::copy_n(best, to.count, to.logits + other * to.count);
      }
    }
  }
}

void Batch::step(const int64_t* ids, const Candidates& to) {
  std::vector<int64_t> rows;
  for (int64_t source = 0; source < num_sources(); source++) {
    int64_t first = source * width, next = first + 1;
    bool& are_equal = sources_[source].rows_are_equal;
    are_equal = are_equal && std::all_of(ids + first, ids + first + width, [&](int64_t id) { return id == ids[first]; });
    for (rows.push_back(first); !are_equal && next < first + width; next++) rows.push_back(next);
  }
  int64_t count = int64_t(rows.size()), most = std::max<int64_t>(count / FEWEST_ROWS, 1);
  int64_t threads = std::min(most, int64_t(parts_.size()));
  for (int64_t i = 0; i < threads; i++) {
    Part& part = parts_[i];
    part.rows.assign(rows.begin() + i * count / threads, rows.begin() + (i + 1) * count / threads);
    part.ids.clear();
    for (int64_t row : part.rows) extend(rows_[row]), part.ids.push_back(ids[row]);
  }
  on_threads(threads, [&](int64_t thread) {
    read(parts_[thread]);
    select(parts_[thread], to, int64_t(parts_.size()) / threads);
  });
  for (int64_t row : rows)
    for (int64_t w = 1; w < width && sources_[rows_[row].source].rows_are_equal; w++) {
      release(rows_[row + w]);
      rows_[row + w] = share(rows_[row]);
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
