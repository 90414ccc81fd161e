// Linear maps of float32 or of 8-bit weights.
#pragma once
#include <cmath>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

#include "vectors.h"

namespace native {

// Memory that batches give back for later ones: getting pages from the system takes longer than a step.
class Spare {
 public:
  ~Spare() {
    for (auto& one : free_) free(one.data);
  }
  void* take(size_t bytes) {
    std::lock_guard<std::mutex> lock{busy_};
    for (auto& one : free_)
      if (one.bytes == bytes) {
        void* found = one.data;
        one = free_.back();
        free_.pop_back(), bytes_ -= bytes;
        return found;
      }
    return make(bytes);
  }
  void give(void* data, size_t bytes) {
    std::lock_guard<std::mutex> lock{busy_};
    if (bytes_ + bytes > MOST || free_.size() == free_.capacity()) return free(data);
    free_.push_back({data, bytes}), bytes_ += bytes;
  }
  static void* make(size_t bytes) { return ::operator new[](bytes, std::align_val_t(64)); }
  static void free(void* data) { ::operator delete[](data, std::align_val_t(64)); }
  Spare() { free_.reserve(64); }

 private:
  static constexpr size_t MOST = size_t(1) << 24;
  struct Block {
    void* data;
    size_t bytes;
  };
  std::mutex busy_;
  std::vector<Block> free_;
  size_t bytes_ = 0;
};

// Memory that is aligned to a cache line: zeros, or with `spare` anything.
template <typename T>
class Array {
 public:
  Array() : Array(nullptr) {}
  explicit Array(Spare* spare) : data_(nullptr, Free{spare, 0}) {}
  explicit Array(size_t size, Spare* spare = nullptr) : size_(size), data_(nullptr, Free{spare, bytes(size, spare)}) {
    size_t room = data_.get_deleter().bytes;
    data_.reset(static_cast<T*>(spare ? spare->take(room) : Spare::make(room)));
    if (!spare) memset(static_cast<void*>(data_.get()), 0, room);
  }
  T* get() const { return data_.get(); }
  size_t size() const { return size_; }
  void reserve(size_t size) {  // the content is lost
    if (size > size_) *this = Array(size + size / 4, data_.get_deleter().spare);
  }

 private:
  struct Free {
    Spare* spare;
    size_t bytes;
    void operator()(T* data) const { spare ? spare->give(data, bytes) : Spare::free(data); }
  };
  static size_t bytes(size_t size, const Spare* spare) {
    if (size > (size_t(1) << 40) / sizeof(T)) throw std::bad_alloc();
    size_t step = 64, found = size * sizeof(T) + 64;
    while (spare && step * 8 < found) step *= 2;  // few different sizes, so that later arrays find them
    return (found + step - 1) / step * step;
  }
  size_t size_ = 0;
  std::unique_ptr<T[], Free> data_;
};

// call(0) to call(count - 1), each on a thread of its own.
template <typename Call>
void on_threads(int64_t count, Call call) {
  std::vector<std::future<void>> others;
  for (int64_t i = 1; i < count; i++) others.push_back(std::async(std::launch::async, call, i));
  call(0);
  for (auto& other : others) other.get();
}

// A tensor of the caller. With block 0 it is float32 [rows, columns]. Otherwise a weight is
// (values[row, column] - zeros[row, column / block]) * scales[row, column / block], and rows of `values` are padded to
// whole blocks.
struct Tensor {
  const void* values;
  const float* scales;
  const uint8_t* zeros;
  int64_t rows, columns, block;
  int64_t blocks() const { return (columns + block - 1) / block; }
};

// Rows of activations, rounded to 8 bits with a scale for each block.
struct Rounded {
  Array<int32_t> lanes;  // [rows][lanes of a row], of four bytes
  Array<float> scales;   // [rows][blocks]
  Array<int32_t> sums;   // [rows][blocks], of the integers
  explicit Rounded(Spare* spare) : lanes(spare), scales(spare), sums(spare) {}
};

struct Target {
  float* out;
  int64_t stride;
  bool relu = false;
  float* residual = nullptr;  // is added, times `residual_scale`; has the same stride
  float residual_scale = 1;
  int64_t first = 0;  // the output at `out`
};

class Linear {
 public:
  Linear() = default;
  explicit Linear(const Tensor& weight);
  void add(const Array<float>& bias) {  // which may be empty
    if (bias.get()) memcpy(bias_.get(), bias.get(), outputs * sizeof(float));
  }
  // out[rows, padded(outputs)] = x[rows, inputs] W^T + b. Values of `x` behind `inputs` are not used.
  void operator()(int64_t rows, const float* x, int64_t stride, const Target& target, Rounded& scratch) const {
    part(rows, x, stride, target, scratch, outputs);
  }
  // Only `count` outputs from that of the target on; the first part comes first, and later ones are of the same `x`.
  void part(int64_t rows, const float* x, int64_t stride, const Target& target, Rounded& scratch, int64_t count,
            int64_t threads = 1) const;
  int64_t inputs = 0, outputs = 0;

 private:
  template <int M, int P>
  void float_tile(int64_t panel, const float* x, int64_t stride, int64_t row, const Target& target) const;
  template <int M, int P>
  void byte_tile(int64_t panel, const Rounded& x, int64_t row, const Target& target) const;
  template <int M, int P>
  void finish(int64_t panel, int64_t row, V (&sums)[M][P * VECTORS], const Target& target) const;
  template <int M>
  void some_rows(int64_t rows, int64_t panel, const float* x, int64_t stride, int64_t row, const Target& target,
                 const Rounded& rounded) const;
  void round(int64_t rows, const float* x, int64_t stride, Rounded& to) const;
  int64_t panels_ = 0, block_ = 0, blocks_ = 0, lanes_ = 0;  // lanes_ of one row; 0 with float32
  Array<float> weights_, bias_;                              // [panels][inputs][PANEL]; [panels][PANEL]
  Array<int32_t> bytes_, zeros_;                             // [panels][lanes_][PANEL]; [panels][blocks_][PANEL]
  Array<float> scales_;                                      // [panels][blocks_][PANEL]
};

// A table of the caller, whose rows are read one at a time.
struct Table {
  Tensor tensor{};
  void read(int64_t row, float* to) const;
};

}  // namespace native
