// The C interface. Every function checks its arguments and returns 0, or a number of `Status`.
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>

#include "batch.h"

#ifdef _WIN32
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

using native::Batch;
using native::Config;
using native::Model;

namespace {

enum Status : int32_t { OK, INVALID, NO_MEMORY };
constexpr int64_t MOST = int64_t(1) << 24;  // of every size, so that products of two of them do not overflow

struct Handle {
  std::shared_ptr<const Model> model;
};

bool is_size(int64_t size, int64_t least = 1) { return size >= least && size <= MOST; }

bool is_valid(const native::StackConfig& stack) {
  return is_size(stack.layers) && is_size(stack.heads) && is_size(stack.head_width) && is_size(stack.d_ff) &&
         stack.heads * stack.head_width <= MOST && stack.activation >= native::RELU &&
         stack.activation <= native::RELU2 && stack.mixer >= native::ATTENTION && stack.mixer <= native::AVERAGE;
}

bool is_valid(const Config& config) {
  return is_size(config.d_model) && config.d_model % native::STEP == 0 && is_size(config.source_vocab) &&
         is_size(config.target_vocab) && is_size(config.max_source_length) && is_size(config.max_target_length) &&
         config.norm >= native::LAYERNORM && config.norm <= native::RMS && is_valid(config.encoder) &&
         is_valid(config.decoder) && config.encoder.mixer == native::ATTENTION &&
         (!config.is_tied || config.source_vocab == config.target_vocab);
}

bool are_below(const int64_t* ids, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= end) return false;
  return true;
}

template <typename Call>
int32_t guarded(Batch* batch, Call call) {
  try {
    return call();
  } catch (const std::invalid_argument&) {
    return INVALID;
  } catch (...) {
    if (batch) batch->is_broken = true;
    return NO_MEMORY;
  }
}

bool can_step(const Batch* batch, const int64_t* ids, int64_t rows, int64_t steps, int64_t count, const void* to_ids,
              const void* to_logits, const void* to_normalizers) {
  return batch && !batch->is_broken && ids && to_ids && to_logits && to_normalizers && rows >= 1 &&
         rows == batch->num_rows() && count >= 1 && count <= batch->model().config.target_vocab && is_size(steps) &&
         batch->longest() + steps <= batch->model().config.max_target_length &&
         are_below(ids, rows, batch->model().config.target_vocab);
}

bool is_valid(const Batch& batch, const native::Beams& beams, int64_t steps) {
  const Config& config = batch.model().config;
  bool has_all = beams.ends && beams.divisors && beams.limits && beams.least && beams.num_new && beams.states &&
                 beams.tokens && beams.running && beams.finished && beams.sources && beams.lengths && beams.ids &&
                 beams.scores && beams.log_probs;
  if (!has_all || !is_size(beams.candidates) || beams.candidates > config.target_vocab || !is_size(beams.extensions) ||
      beams.extensions < batch.width || beams.extensions > beams.candidates * batch.width ||
      !is_size(beams.num_ends, 0) || !is_size(beams.room) || !is_size(beams.num_divisors) ||
      !is_size(beams.most_finished) || beams.most_finished < batch.num_rows())
    return false;
  for (int64_t source = 0; source < batch.num_sources(); source++) {
    if (!is_size(beams.limits[source]) || !is_size(beams.num_new[source], 0)) return false;
    if (beams.num_new[source] + steps > beams.limits[source] || beams.limits[source] >= beams.num_divisors) return false;
  }
  for (int64_t row = 0; row < batch.num_rows(); row++) {
    int64_t length = batch.length(row);
    if (length != batch.length(row / batch.width * batch.width) || length + 1 + steps > beams.room) return false;
    if (!are_below(beams.tokens + row * beams.room + length, 1, config.target_vocab)) return false;
  }
  return true;
}

}  // namespace

EXPORT int32_t tfexport_native_version() { return 3; }

// Whether this CPU has the instructions of this library; no other function may be called if it has not.
EXPORT int32_t tfexport_native_is_supported() {
#if defined(__AVX512VNNI__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__SSSE3__)
  return __builtin_cpu_supports("ssse3");
#else
  return 1;
#endif
}

EXPORT int32_t tfexport_native_model(const Config* config, native::Tensors::Next next, Handle** made) {
  if (!config || !next || !made || !is_valid(*config)) return INVALID;
  return guarded(nullptr, [&] {
    *made = new Handle{std::make_shared<const Model>(*config, native::Tensors(next))};
    return OK;
  });
}

EXPORT void tfexport_native_free_model(Handle* model) { delete model; }

EXPORT int32_t tfexport_native_batch(const Handle* model, int64_t width, int64_t threads, Batch** made) {
  if (!model || !made || !is_size(width) || threads < 1 || threads > 1024) return INVALID;
  return guarded(nullptr, [&] {
    *made = new Batch(model->model, width, threads);
    return OK;
  });
}

EXPORT void tfexport_native_free_batch(Batch* batch) { delete batch; }

EXPORT int32_t tfexport_native_add(Batch* batch, int64_t count, const int64_t* ids, int64_t stride,
                                   const int64_t* lengths, const int64_t* prompts, const int64_t* prompt_lengths) {
  if (!batch || batch->is_broken || !is_size(count) || !ids || !is_size(stride) || !lengths || !prompts ||
      !prompt_lengths)
    return INVALID;
  const Config& config = batch->model().config;
  if ((batch->num_sources() + count) > MOST / batch->width) return INVALID;
  int64_t read = 0;
  for (int64_t i = 0; i < count; i++) {
    if (lengths[i] < 1 || lengths[i] > stride || lengths[i] > config.max_source_length) return INVALID;
    if (!are_below(ids + i * stride, lengths[i], config.source_vocab)) return INVALID;
    if (prompt_lengths[i] < 1 || prompt_lengths[i] > config.max_target_length) return INVALID;
    if (!are_below(prompts + read, prompt_lengths[i], config.target_vocab)) return INVALID;
    read += prompt_lengths[i];
  }
  return guarded(batch, [&] {
    batch->add(count, ids, stride, lengths, prompts, prompt_lengths);
    return OK;
  });
}

// `given` is null, or the token to score of each row.
EXPORT int32_t tfexport_native_step(Batch* batch, const int64_t* ids, int64_t rows, int64_t count, const int64_t* given,
                                    int64_t* to_ids, float* to_logits, float* to_normalizers) {
  if (!can_step(batch, ids, rows, 1, count, to_ids, to_logits, to_normalizers)) return INVALID;
  if (given && (count != 1 || !are_below(given, rows, batch->model().config.target_vocab))) return INVALID;
  return guarded(batch, [&] {
    batch->step(ids, {count, to_ids, to_logits, to_normalizers, given});
    return OK;
  });
}

EXPORT int32_t tfexport_native_steps(Batch* batch, const int64_t* ids, int64_t rows, int64_t count, int64_t most,
                                     const int64_t* stops, int64_t num_stops, const int64_t* banned,
                                     int64_t num_banned, int64_t* to_ids, float* to_logits, float* to_normalizers,
                                     int64_t* taken) {
  if (!can_step(batch, ids, rows, most, count, to_ids, to_logits, to_normalizers)) return INVALID;
  if (batch->width != 1 || !taken || !is_size(num_stops, 0) || (num_stops && !stops) || !is_size(num_banned, 0) ||
      (num_banned && !banned))
    return INVALID;
  return guarded(batch, [&] {
    *taken = batch->steps(ids, {count, to_ids, to_logits, to_normalizers}, most, {stops, num_stops}, {banned, num_banned});
    return OK;
  });
}

EXPORT int32_t tfexport_native_beams(Batch* batch, native::Beams* beams, int64_t rows, int64_t most, int64_t* taken) {
  if (!batch || batch->is_broken || !beams || !taken || rows < 1 || rows != batch->num_rows() || !is_size(most) ||
      batch->longest() + most > batch->model().config.max_target_length || !is_valid(*batch, *beams, most))
    return INVALID;
  return guarded(batch, [&] {
    *taken = batch->beam_steps(*beams, most);
    return OK;
  });
}

EXPORT int32_t tfexport_native_reorder(Batch* batch, const int64_t* rows, int64_t count) {
  if (!batch || batch->is_broken || !rows || count != batch->num_rows() || !are_below(rows, count, count))
    return INVALID;
  for (int64_t row = 0; row < count; row++)
    if (rows[row] / batch->width != row / batch->width) return INVALID;
  return guarded(batch, [&] {
    batch->reorder(rows);
    return OK;
  });
}

EXPORT int32_t tfexport_native_remove(Batch* batch, const int64_t* kept, int64_t count) {
  if (!batch || batch->is_broken || !kept || !is_size(count, 0) || !are_below(kept, count, batch->num_sources()))
    return INVALID;
  return guarded(batch, [&] {
    std::vector<bool> seen(batch->num_sources());
    for (int64_t i = 0; i < count; i++) {
      if (seen[kept[i]]) return INVALID;
      seen[kept[i]] = true;
    }
    batch->remove(kept, count);
    return OK;
  });
}
