// Vectors of one instruction set. Every source file is compiled once per set, into a library of its own.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__SSSE3__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace native {

// BYTES of a vector; ROWS x VECTORS sums, and BYTE_ROWS x VECTORS of products of bytes, fit into the registers. 8-bit
// weights are stored minus OFFSET.
#if defined(__AVX512VNNI__)
constexpr int BYTES = 64, ROWS = 6, BYTE_ROWS = 6, VECTORS = 4, OFFSET = 0;
#elif defined(__AVX2__)
constexpr int BYTES = 32, ROWS = 6, BYTE_ROWS = 5, VECTORS = 2, OFFSET = 128;
#elif defined(__ARM_NEON)
constexpr int BYTES = 16, ROWS = 6, BYTE_ROWS = 6, VECTORS = 4, OFFSET = 128;
#else
constexpr int BYTES = 16, ROWS = 4, BYTE_ROWS = 4, VECTORS = 2, OFFSET = 128;
#endif
constexpr int LANES = BYTES / 4, PANEL = VECTORS * LANES;
constexpr int STEP = 16;  // buffers have widths that are multiples of it, as all LANES divide it

typedef float V __attribute__((vector_size(BYTES)));
typedef int32_t I __attribute__((vector_size(BYTES)));
typedef float Unaligned __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int16_t Half __attribute__((vector_size(2 * LANES)));
typedef int8_t Quarter __attribute__((vector_size(LANES)));

constexpr int64_t padded(int64_t width) { return (width + STEP - 1) / STEP * STEP; }
inline V load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, V v) { *reinterpret_cast<Unaligned*>(to) = v; }
inline V all(float x) { return x - V{}; }  // the compiler drops "- 0", but not "+ 0", which changes -0
inline V larger(V a, V b) {  // GCC would put `a > b ? a : b` on the stack in loops
#if defined(__AVX512VNNI__)
  return (V)_mm512_maskz_max_ps(-1, (__m512)a, (__m512)b);  // GCC 12 warns of `_mm512_max_ps`
#elif defined(__AVX2__)
  return (V)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSSE3__)
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
#elif defined(__SSSE3__)
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

// sum + the products of four bytes of each lane: weights, unsigned if OFFSET is 0, and x from -127 to 127. If weights
// have a sign, 16 bits hold two products, at most 2 * 128 * 127.
inline I dot(I sum, I weights, int32_t x) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  __m256i w = (__m256i)weights, signs = _mm256_sign_epi8(_mm256_set1_epi32(x), w);
  return sum + (I)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), signs), _mm256_set1_epi16(1));
#elif defined(__SSSE3__)
  __m128i w = (__m128i)weights, signs = _mm_sign_epi8(_mm_set1_epi32(x), w);
  return sum + (I)_mm_madd_epi16(_mm_maddubs_epi16(_mm_abs_epi8(w), signs), _mm_set1_epi16(1));
#elif defined(__aarch64__)
  int8x16_t a = vreinterpretq_s8_s32((int32x4_t)weights), b = vreinterpretq_s8_s32(vdupq_n_s32(x));
  int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
  return (I)vpadalq_s16((int32x4_t)sum, pairs);
#else
#error "tfexport-native needs x86-64 with SSSE3, or aarch64"
#endif
}

}  // namespace native
