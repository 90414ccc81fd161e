// Sources that are being decoded: the caches of their rows, and the next tokens.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "model.h"

namespace native {

// Where the candidates of a step go: [rows][count] ids and logits, [rows] log of the sum of exp(logits).
struct Candidates {
  int64_t count;
  int64_t* ids;
  float *logits, *log_normalizers;
  const int64_t* given = nullptr;  // [rows]: tokens to score instead of the best ones; count is 1
};

// The beam searches of all sources; the arrays belong to the caller, and steps change them. The same fields in the same
// order as in tfexport/runtime/native/_library.py.
enum Early : int64_t { HEURISTIC, AT_ONCE, HOPEFUL };
enum State : int64_t { RUNNING, DONE, BROKEN };
struct Beams {
  int64_t candidates, extensions, early, room, num_ends, num_divisors, most_finished, num_finished;
  const int64_t* ends;              // tokens that end a text
  const float* divisors;            // of log-probabilities, by the number of new tokens
  const int64_t *limits, *least;    // [sources]: most new tokens, and those before which no text may end
  int64_t *num_new, *states;        // [sources]
  int64_t* tokens;                  // [rows][room]
  float *running, *finished;        // [rows]: sums of log p; scores of finished texts, best first, -inf for none
  int64_t *sources, *lengths, *ids;  // of texts that finish: [most_finished], ids [most_finished][room]
  float *scores, *log_probs;        // [most_finished]
};

struct Ids {
  const int64_t* ids;
  int64_t count;
  bool has(int64_t id) const { return std::find(ids, ids + count, id) != ids + count; }
};

class Batch {
 public:
  Batch(std::shared_ptr<const Model> model, int64_t width, int64_t threads);
  int64_t num_rows() const { return int64_t(rows_.size()); }
  int64_t num_sources() const { return int64_t(sources_.size()); }
  int64_t longest() const;
  const Model& model() const { return *model_; }
  // Sources are [count][stride] ids; prompts are [sum of prompt_lengths] ids, of which the last of each is not read.
  void add(int64_t count, const int64_t* ids, int64_t stride, const int64_t* lengths, const int64_t* prompts,
           const int64_t* prompt_lengths);
  void step(const int64_t* ids, const Candidates& to);
  int64_t steps(const int64_t* ids, Candidates to, int64_t most, Ids stops, Ids banned);
  int64_t beam_steps(Beams& to, int64_t most);  // until a source is done; returns the number of steps
  void reorder(const int64_t* rows);
  int64_t length(int64_t row) const { return rows_[row].length; }
  void remove(const int64_t* kept, int64_t count);  // source i becomes what source kept[i] is
  bool is_broken = false;                           // after memory ran out within a call
  const int64_t width;

 private:
  struct Source {
    int64_t length = 0;
    bool rows_are_equal = true;
    Array<float> blocks;  // [layers][blocks of KeyValues]
  };
  struct Row {
    int64_t length = 0, source = 0;
    std::vector<int32_t> blocks;
    std::vector<float> state;  // of an SSRU or average attention, [layers][d_model]
  };
  struct Block {
    float* data;  // [layers] of KeyValues
    int32_t users;
  };
  struct Part {  // of the rows of a step, for one thread
    std::vector<int64_t> rows, ids;
    Scratch scratch;
  };
  void encode(int64_t first, int64_t count, const int64_t* ids, int64_t stride, Scratch& scratch);
  void self_attention(const Layer& layer, int64_t number, Part& part, const float* in, const Target& target);
  void recur(const Layer& layer, int64_t number, Part& part, const float* in, float* x);
  void average(const Layer& layer, int64_t number, Part& part, const float* in, float* x);
  void cross_attention(const Layer& layer, int64_t number, Part& part, const float* in, const Target& target);
  void read(Part& part);  // leaves the decoder's output in `x`; the rows have been extended
  void select(Part& part, const Candidates& to, int64_t threads);
  bool advance(Beams& to, int64_t source, int64_t* ids, float* logits, float* log_normalizers, int64_t* order);
  int32_t take();
  void release(Row& row);
  Row share(const Row& row);
  void extend(Row& row);
  const float* source_block(const Source& source, int64_t layer) const;

  std::shared_ptr<const Model> model_;
  KeyValues self_kind_, cross_kind_, encoder_kind_;
  std::vector<Source> sources_;
  std::vector<Row> rows_;
  std::vector<Array<float>> memory_;
  std::vector<Block> pool_;
  std::vector<int32_t> free_;
  std::vector<Part> parts_;  // one for each thread
};

}  // namespace native
