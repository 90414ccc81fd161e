// A bundle in ONNX Runtime: texts in, texts out, decoded greedily.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <onnxruntime_cxx_api.h>

#include "bundle.hpp"
#include "vocabulary.hpp"

struct Answer {
  std::string text;
  Ids token_ids;
  std::string finish_reason;  // "eos" or "length"
};

class Model {
 public:
  Model(Bundle bundle, int threads)
      : bundle_(std::move(bundle)),
        source_(Json::parse(bundle_.checked("tokenizer.json")), bundle_.special_of_sources()),
        target_(Json::parse(bundle_.checked(bundle_.target_tokenizer())), bundle_.ends()) {
    const auto [encoder, decoder] = bundle_.graphs();
    for (const auto& name : {encoder, decoder, std::string("weights.safetensors")}) bundle_.checked(name);
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(threads);
    encoder_ = Ort::Session(environment_, bundle_.path(encoder).c_str(), options);
    decoder_ = Ort::Session(environment_, bundle_.path(decoder).c_str(), options);
    inputs_ = decoder_.GetInputNames();
    caches_ = encoder_.GetOutputNames();
    for (auto& name : caches_) name.erase(0, std::strlen("cross_"));
    is_fixed_ = takes("positions") || takes("cache_lengths");
  }

  std::vector<Answer> generate(const std::vector<std::string>& texts, size_t batch_size) {
    const size_t limit = bundle_.spec("max_source_length");
    const Ids suffix = bundle_.around("source_suffix");
    std::vector<Ids> sources;
    for (const auto& text : texts) {
      Ids ids = bundle_.around("source_prefix");
      for (const auto id : source_.encode(text)) ids.push_back(id);
      ids.insert(ids.end(), suffix.begin(), suffix.end());
      if (ids.size() > limit) refuse("a text has more than " + std::to_string(limit) + " tokens: " + text);
      sources.push_back(ids);
    }
    std::vector<Answer> answers;
    for (size_t first = 0; first < sources.size(); first += batch_size) {
      const auto last = sources.begin() + std::min(first + batch_size, sources.size());
      for (const auto& ids : decode({sources.begin() + first, last})) {
        const bool is_end = !ids.empty() && ids.back() == bundle_.token("eos");
        answers.push_back({target_.decode(ids), ids, is_end ? "eos" : "length"});
      }
    }
    return answers;
  }

 private:
  std::vector<Ids> decode(const std::vector<Ids>& sources) {
    const int64_t rows = sources.size(), capacity = bundle_.spec("max_target_length"), eos = bundle_.token("eos");
    const Ids prefix = bundle_.around("target_prefix");
    Ids begin{bundle_.token("start")}, next;
    begin.insert(begin.end(), prefix.begin(), prefix.end());
    for (int64_t row = 0; row < rows; ++row) next.insert(next.end(), begin.begin(), begin.end());
    std::vector<Ids> written(rows, prefix);
    std::vector<bool> ended(rows);
    const auto is_done = [&](int64_t row) { return ended[row] || int64_t(written[row].size()) >= capacity; };
    auto step = encode(sources);
    int64_t past = 0;
    for (int64_t num_done = 0; num_done < rows;) {
      const int64_t count = next.size() / rows;
      next = run(step, next, rows, past);
      past += count;
      num_done = 0;
      for (int64_t row = 0; row < rows; ++row) {
        if (!is_done(row)) {
          written[row].push_back(next[row]);
          ended[row] = next[row] == eos;
        }
        num_done += is_done(row);
      }
    }
    return written;
  }

  // Read sources, padded to one length; return what a step reads and writes, with empty caches.
  Ort::IoBinding encode(const std::vector<Ids>& sources) {
    const int64_t rows = sources.size(), capacity = bundle_.spec("max_target_length");
    size_t length = 0;
    for (const auto& source : sources) length = std::max(length, source.size());
    Ids ids;
    std::vector<bool> is_token;
    for (const auto& source : sources) {
      for (size_t i = 0; i < length; ++i) {
        ids.push_back(i < source.size() ? source[i] : bundle_.token("pad"));
        is_token.push_back(i < source.size());
      }
    }
    const Ids shape{rows, int64_t(length)};
    const auto mask = tensor(is_token, shape);
    Ort::IoBinding binding(encoder_), step(decoder_);
    binding.BindInput("source_ids", tensor(ids, shape));
    binding.BindInput("source_mask", mask);
    for (const auto& name : caches_) binding.BindOutput(("cross_" + name).c_str(), memory_);
    encoder_.Run({}, binding);
    const auto cross = binding.GetOutputValues();
    for (size_t i = 0; i < caches_.size(); ++i) {
      // Caches grow with each step, or are as long as the longest target from the beginning and written in place.
      const auto past = zeros(cross[i], rows, is_fixed_ ? capacity : 0);
      step.BindInput(("cross_" + caches_[i]).c_str(), cross[i]);
      step.BindInput(("past_" + caches_[i]).c_str(), past);
      if (is_fixed_) step.BindOutput(("present_" + caches_[i]).c_str(), past);
    }
    step.BindInput("source_mask", mask);
    step.BindInput("num_candidates", tensor(Ids{1}, {1}));
    return step;
  }

  // Read the newest tokens of all rows, behind `past` others; return the best next token of each.
  Ids run(Ort::IoBinding& step, const Ids& next, int64_t rows, int64_t past) {
    const int64_t count = next.size() / rows;
    const int32_t total = past + count;
    Ids positions;
    for (size_t i = 0; i < next.size(); ++i) positions.push_back(past + i % count);
    step.BindInput("target_ids", tensor(next, {rows, count}));
    if (takes("cache_lengths")) step.BindInput("cache_lengths", tensor(Ids(rows, past), {rows}));
    if (takes("positions")) {
      step.BindInput("positions", tensor(positions, {rows, count}));
      step.BindInput("last_position", tensor(std::vector<int32_t>(rows, total - 1), {rows}));
      step.BindInput("total_length", tensor(std::vector<int32_t>{total}, {1}));
    }
    step.BindOutput("candidate_ids", memory_);
    for (size_t i = 0; !is_fixed_ && i < caches_.size(); ++i) {
      step.BindOutput(("present_" + caches_[i]).c_str(), memory_);
    }
    decoder_.Run({}, step);
    const auto names = step.GetOutputNames();
    const auto outputs = step.GetOutputValues();
    const int64_t* best = nullptr;
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i] == "candidate_ids") {
        best = outputs[i].GetTensorData<int64_t>();
      } else {
        step.BindInput(("past_" + names[i].substr(std::strlen("present_"))).c_str(), outputs[i]);
      }
    }
    return {best, best + rows};
  }

  bool takes(const std::string& name) const { return std::find(inputs_.begin(), inputs_.end(), name) != inputs_.end(); }

  template <typename T>
  Ort::Value tensor(const std::vector<T>& data, const Ids& shape) {
    auto value = Ort::Value::CreateTensor<T>(allocator_, shape.data(), shape.size());
    std::copy(data.begin(), data.end(), value.template GetTensorMutableData<T>());
    return value;
  }

  // A cache of the heads, the width and the type of `cross`.
  Ort::Value zeros(const Ort::Value& cross, int64_t rows, int64_t places) {
    const auto info = cross.GetTensorTypeAndShapeInfo();
    auto shape = info.GetShape();
    shape[0] = rows;
    shape[2] = places;
    const auto type = info.GetElementType();
    auto value = Ort::Value::CreateTensor(allocator_, shape.data(), shape.size(), type);
    const size_t width = type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : 2;
    std::memset(value.GetTensorMutableRawData(), 0, rows * shape[1] * places * shape[3] * width);
    return value;
  }

  Bundle bundle_;
  Vocabulary source_, target_;
  Ort::Env environment_;
  Ort::AllocatorWithDefaultOptions allocator_;
  Ort::MemoryInfo memory_ = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU);
  Ort::Session encoder_{nullptr}, decoder_{nullptr};
  std::vector<std::string> inputs_, caches_;
  bool is_fixed_;
};
