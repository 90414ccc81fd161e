// Vectors of one instruction set. Every source file is compiled once per set, into a library of its own.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace native {

// BYTES of a vector; ROWS x VECTORS sums fit into the registers; GROUP integers share a lane of 32 bits.
#if defined(__AVX512VNNI__)
constexpr int BYTES = 64, ROWS = 6, VECTORS = 4, GROUP = 4;
#elif defined(__AVX2__)
constexpr int BYTES = 32, ROWS = 6, VECTORS = 2, GROUP = 2;
#elif defined(__ARM_NEON)
constexpr int BYTES = 16, ROWS = 6, VECTORS = 4, GROUP = 2;
#else
constexpr int BYTES = 16, ROWS = 4, VECTORS = 2, GROUP = 2;
#endif
constexpr int LANES = BYTES / 4, PANEL = VECTORS * LANES;
constexpr int STEP = 16;  // buffers have widths that are multiples of it, as all LANES divide it

typedef float V __attribute__((vector_size(BYTES)));
typedef int32_t I __attribute__((vector_size(BYTES)));
typedef float Unaligned __attribute__((vector_size(BYTES), aligned(4), may_alias));
// Integers that activations are rounded to: bytes, or 16 bits if the CPU cannot add products of bytes exactly.
typedef std::conditional_t<GROUP == 4, int8_t, int16_t> Narrow;
typedef Narrow Narrows __attribute__((vector_size(LANES * sizeof(Narrow))));

constexpr int64_t padded(int64_t width) { return (width + STEP - 1) / STEP * STEP; }
inline V load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, V v) { *reinterpret_cast<Unaligned*>(to) = v; }
inline V all(float x) { return x - V{}; }  // the compiler drops "- 0", but not "+ 0", which changes -0
inline V larger(V a, V b) {  // GCC would put `a > b ? a : b` on the stack in loops
#if defined(__AVX512VNNI__)
  return (V)_mm512_maskz_max_ps(-1, (__m512)a, (__m512)b);  // GCC 12 warns of `_mm512_max_ps`
#elif defined(__AVX2__)
  return (V)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (V)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

// Halves are combined until one number is left: fewer additions wait for each other than one by one.
template <typename T, int N>
struct Vector {
  typedef T Type __attribute__((vector_size(N * sizeof(T))));
};
template <typename T, int N, typename Combine>
T folded(typename Vector<T, N>::Type v, Combine combine) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    typename Vector<T, N / 2>::Type low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
    return folded<T, N / 2>(combine(low, high), combine);
  }
}
inline float sum_of(V v) {
  return folded<float, LANES>(v, [](auto a, auto b) { return a + b; });
}
inline int32_t sum_of(I v) {
  return folded<int32_t, LANES>(v, [](auto a, auto b) { return a + b; });
}
inline float largest_of(V v) {
  return folded<float, LANES>(v, [](auto a, auto b) { return a > b ? a : b; });
}

// Whether a number of `v` is larger than `x`.
inline bool has_larger(V v, float x) {
#if defined(__AVX512VNNI__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_GT_OQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)(v > x));
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)(v > x));
#else
  return vmaxvq_u32((uint32x4_t)(v > x));
#endif
}

// e^x by a polynomial (Cephes); NaN stays NaN.
inline V exp_of(V x) {
  x = larger(all(-87.f), x);
  x = x > 88.f ? all(88.f) : x;
  const V magic = all(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
  V shifted = x * 1.44269504f + magic, whole = shifted - magic;
  V r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  return p * (V)(((I)shifted << 23) + 0x3f800000);  // the low bits of `shifted` are the exponent
}

inline V sigmoid(V x) { return 1.f / (1.f + exp_of(-x)); }

// sum + the products of integers of `weights` and `x`, which has GROUP of them.
inline I dot(I sum, I weights, int32_t x) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  return sum + (I)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(x));
#elif defined(__SSE2__)
  return sum + (I)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(x));
#elif defined(__aarch64__)
  int16x8_t a = vreinterpretq_s16_s32((int32x4_t)weights), b = vreinterpretq_s16_s32(vdupq_n_s32(x));
  return sum + (I)vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
#else
#error "tfexport-native needs x86-64 or aarch64"
#endif
}

}  // namespace native
