// Vectors of float or double for one instruction set, and the few operations on them that the kernels need.
//
// The file is compiled once per instruction set (build.py); VECTOR_BYTES is the width of its registers.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

template <class T> struct Lanes;
template <> struct Lanes<float> {
  static constexpr int count = VECTOR_BYTES / 4;
  typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
  typedef int32_t Signed __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint32_t Bits __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint32_t Word;
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float lowest = -110;         // of a binary exponent: with smaller weights, products underflow
  static constexpr float tiny = 0x1p-40f;       // a row sum below it is computed again without factors
  static constexpr float round = 0x1.8p23f;     // adding and subtracting it rounds to an integer
  static constexpr float polynomial[] = {1.0f,          0.69314700f,    0.24022242f,  // minimax, 1e-7 of 2^x
                                         0.055507336f, 0.009671513f, 0.0013264727f};
};
template <> struct Lanes<double> {
  static constexpr int count = VECTOR_BYTES / 8;
  typedef double Vector __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t Signed __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint64_t Bits __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint64_t Word;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double lowest = -1000, tiny = 0x1p-400, round = 0x1.8p52;
  static constexpr double polynomial[] = {  // ln(2)^n / n!
      1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477, 0.0013333558146428443,
      1.5403530393381608e-4, 1.5252733804059841e-5, 1.3215486790144307e-6, 1.0178086009239699e-7,
      7.054911620801121e-9, 4.4455382718708116e-10, 2.5678435993488206e-11, 1.3691488853904128e-12};
};

template <class T> using Vector = typename Lanes<T>::Vector;
template <class T> constexpr int W = Lanes<T>::count;

template <class T> INLINE Vector<T> load(const T* from) {
  Vector<T> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
template <class T> INLINE void store(T* to, Vector<T> x) { std::memcpy(to, &x, sizeof x); }
template <class T> INLINE Vector<T> all(T x) { return Vector<T>{} + x; }

// The larger of two numbers. A NaN in x stays; one in `bound` is left out.
INLINE Vector<float> at_least(Vector<float> x, Vector<float> bound) {
#if defined(__AVX512F__)
  return _mm512_max_ps(bound, x);
#elif defined(__AVX2__)
  return _mm256_max_ps(bound, x);
#else
  return bound > x ? bound : x;
#endif
}
INLINE Vector<double> at_least(Vector<double> x, Vector<double> bound) { return bound > x ? bound : x; }

// 2^x for x >= -126 (-1022 for double), to 2e-7 (4e-16) of it; NaN for NaN. x is at most 16 here.
template <class T> INLINE Vector<T> exp2(Vector<T> x) {
  using L = Lanes<T>;
  constexpr int degree = sizeof(L::polynomial) / sizeof(T) - 1;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    Vector<T> whole = _mm512_roundscale_ps(x, 0), f = x - whole, power = all<T>(L::polynomial[degree]);
    for (int n = degree; n-- > 0;) power = power * f + L::polynomial[n];
    return _mm512_scalef_ps(power, whole);
  }
#endif
  Vector<T> shifted = x + L::round, f = x - (shifted - L::round), power = all<T>(L::polynomial[degree]);
  for (int n = degree; n-- > 0;) power = power * f + L::polynomial[n];
  typename L::Bits bits;  // the integer is in the lowest bits of `shifted`
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + (typename L::Word)L::bias) << L::mantissa;
  Vector<T> scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return power * scale;
}

template <class T> INLINE T sum(Vector<T> x) {
  T total[W<T>];
  store(total, x);
  for (int step = W<T> / 2; step; step /= 2)
    for (int i = 0; i < step; ++i) total[i] += total[i + step];
  return total[0];
}

// --- Transposition -------------------------------------------------------------------------------------------------

template <int STEP, bool HIGH, class V, size_t... I> INLINE V exchange(V a, V b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  // Blocks of STEP lanes: the low half keeps those of a and takes b's into the odd blocks; the high half likewise.
  return __builtin_shufflevector(a, b, (HIGH ? ((I & STEP) ? int(I) + n : int(I) + STEP)
                                             : ((I & STEP) ? int(I) - STEP + n : int(I)))...);
}
template <int STEP, class T> INLINE void exchange_all(Vector<T>* x) {
  using Index = std::make_index_sequence<W<T>>;
  for (int i = 0; i < W<T>; ++i)
    if (!(i & STEP)) {
      Vector<T> low = exchange<STEP, false>(x[i], x[i + STEP], Index{});
      x[i + STEP] = exchange<STEP, true>(x[i], x[i + STEP], Index{});
      x[i] = low;
    }
  if constexpr (STEP > 1) exchange_all<STEP / 2, T>(x);
}

// to[c][r] = from[r][c] for r < rows and c < columns, both multiples of W
template <class T> void transpose(const T* from, long from_step, T* to, long to_step, int rows, int columns) {
  for (int r = 0; r < rows; r += W<T>)
    for (int c = 0; c < columns; c += W<T>) {
      Vector<T> x[W<T>];
      for (int i = 0; i < W<T>; ++i) x[i] = load(from + (r + i) * from_step + c);
      exchange_all<W<T> / 2, T>(x);
      for (int i = 0; i < W<T>; ++i) store(to + (c + i) * to_step + r, x[i]);
    }
}

// --- Numbers in memory ---------------------------------------------------------------------------------------------

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};
INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
INLINE float widen(bfloat16 x) { return from_bits((uint32_t)x.bits << 16); }
INLINE float widen(float16 x) {
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = (uint32_t)(x.bits & 0x7fff) << 13;
  float number = from_bits(rest) * 0x1p112f;  // moves the exponent's bias from 15 to 127, also of subnormal numbers
  uint32_t bits = (x.bits & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : to_bits(number);
  return from_bits(sign | bits);
}

INLINE void narrow(float x, float* to) { *to = x; }
INLINE void narrow(double x, double* to) { *to = x; }
INLINE void narrow(float x, bfloat16* to) {
  uint32_t bits = to_bits(x);
  to->bits = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;  // to the nearest, ties to even
}
INLINE void narrow(float x, float16* to) {
  uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff, half;
  if (x != x) half = 0x7e00;
  else if (size >= 0x477ff000) half = 0x7c00;  // rounds to 65,536 or more
  else if (size >= 0x38800000) half = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
  else half = to_bits(from_bits(size) + 0.5f) - 0x3f000000;  // a subnormal number: units of 2^-24 round at 0.5
  to->bits = sign | half;
}

}  // namespace
