// Steps of beam searches, with the results of tfexport/decode/_beam.py.
#include <algorithm>

#include "batch.h"

namespace native {

namespace {

struct Extension {
  int64_t row, id;  // row of the source
  float log_prob;
  bool ends;
};

// Candidates of the `width` rows of a source; log-probabilities are made of logits in place.
struct Found {
  int64_t width, count;
  int64_t* ids;
  float *log_probs, *log_normalizers;

  bool is_broken() const {
    for (int64_t row = 0; row < width; row++)
      if (!std::isfinite(log_normalizers[row])) return true;
    return std::any_of(log_probs, log_probs + width * count, [](float logit) { return std::isnan(logit); });
  }

  void normalize(bool bans_ends, Ids ends) {
    std::vector<int64_t> banned;
    for (int64_t row = 0; row < width; row++) {
      int64_t *own = ids + row * count, at = 0;
      float* values = log_probs + row * count;
      banned.clear();
      for (int64_t i = 0; i < count; i++) {
        if (bans_ends && ends.has(own[i])) {
          banned.push_back(own[i]);
          continue;
        }
        values[at] = values[i] - log_normalizers[row], own[at++] = own[i];
      }
      for (int64_t id : banned) values[at] = -INFINITY, own[at++] = id;
    }
  }

  // The best extensions; of equal ones first those of earlier rows, then of better candidates.
  std::vector<Extension> best(const float* running, int64_t most) const {
    std::vector<Extension> best;
    for (int64_t row = 0; row < width; row++)
      for (int64_t i = row * count; i < (row + 1) * count; i++) {
        float total = running[row] + log_probs[i];
        if (int64_t(best.size()) == most) {
          if (!(total > best.back().log_prob)) break;  // the others of this row are worse
          best.pop_back();
        }
        auto place = best.end();
        while (place != best.begin() && place[-1].log_prob < total) place--;
        best.insert(place, {row, ids[i], total, false});
      }
    return best;
  }
};

// Append to each row the token of one of the first `width` extensions that do not end.
void continue_rows(int64_t width, const std::vector<Extension>& best, int64_t* tokens, int64_t room, int64_t length,
                   float* running, int64_t* order) {
  bool moves = false;
  std::vector<int64_t> added;
  for (int pass = 0; pass < 2; pass++)  // those that end come last, as missing rows
    for (auto& one : best) {
      int64_t row = int64_t(added.size());
      if (one.ends != bool(pass) || row == width) continue;
      running[row] = one.ends ? -INFINITY : one.log_prob;
      order[row] = one.row, moves |= one.row != row;
      added.push_back(one.id);
    }
  if (moves) {
    std::vector<int64_t> before(width * length);
    for (int64_t row = 0; row < width; row++) std::copy_n(tokens + row * room, length, before.data() + row * length);
    for (int64_t row = 0; row < width; row++)
      std::copy_n(before.data() + order[row] * length, length, tokens + row * room);
  }
  for (int64_t row = 0; row < width; row++) tokens[row * room + length] = added[row];
}

}  // namespace

// Extend the rows of a source by one token each; return whether the source is done.
bool Batch::advance(Beams& to, int64_t source, int64_t* ids, float* logits, float* log_normalizers, int64_t* order) {
  int64_t first = source * width, length = rows_[first].length, &num_new = to.num_new[source];
  for (int64_t row = 0; row < width; row++) order[row] = row;
  Found found{width, to.candidates, ids, logits, log_normalizers};
  if (found.is_broken()) {
    to.states[source] = BROKEN;
    return true;
  }
  Ids ends{to.ends, to.num_ends};
  found.normalize(num_new < to.least[source], ends);
  float *running = to.running + first, *finished = to.finished + first, &worst = finished[width - 1];
  auto best = found.best(running, to.extensions);
  bool is_full = ++num_new == to.limits[source];
  float least = worst;  // of the steps before
  int64_t* tokens = to.tokens + first * to.room;
  for (int64_t i = 0; i < to.extensions; i++) {
    best[i].ends = is_full || ends.has(best[i].id);
    float score = best[i].log_prob / to.divisors[num_new];
    if (!best[i].ends || i >= width || !(score > least)) continue;  // spare extensions cannot finish
    int64_t number = to.num_finished++, *copy = to.ids + number * to.room;
    std::copy_n(tokens + best[i].row * to.room + 1, length - 1, copy);
    copy[length - 1] = best[i].id;
    to.sources[number] = source, to.lengths[number] = length;
    to.scores[number] = score, to.log_probs[number] = best[i].log_prob;
    if (!(score > worst)) continue;
    int64_t place = width - 1;
    for (; place > 0 && finished[place - 1] < score; place--) finished[place] = finished[place - 1];
    finished[place] = score;
  }
  continue_rows(width, best, tokens, to.room, length, running, order);
  float attainable = running[0] / to.divisors[to.early == HOPEFUL ? to.limits[source] : num_new];
  if (!is_full && !(attainable <= worst) && !(to.early == AT_ONCE && worst > -INFINITY)) return false;
  to.states[source] = DONE;
  for (int64_t row = 0; row < width; row++) order[row] = row;
  return true;
}

int64_t Batch::beam_steps(Beams& to, int64_t most) {
  int64_t rows = num_rows(), count = to.candidates;
  std::vector<int64_t> newest(rows), ids(rows * count), order(rows);
  std::vector<float> logits(rows * count), log_normalizers(rows);
  to.num_finished = 0;
  for (int64_t taken = 1;; taken++) {
    for (int64_t row = 0; row < rows; row++) newest[row] = to.tokens[row * to.room + rows_[row].length];
    step(newest.data(), {count, ids.data(), logits.data(), log_normalizers.data()});
    bool is_last = taken == most;
    for (int64_t source = 0; source < num_sources(); source++) {
      int64_t at = source * width;
      is_last |= advance(to, source, &ids[at * count], &logits[at * count], &log_normalizers[at], &order[at]);
      for (int64_t row = at; row < at + width; row++) order[row] += at;
    }
    reorder(order.data());
    if (is_last || to.num_finished + rows > to.most_finished) return taken;
  }
}

}  // namespace native
