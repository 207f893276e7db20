// Small matrix products of row-major float or double matrices, on one thread.
#pragma once
#include "vectors.h"

namespace {

// Rows of a block of results that stays in registers; it is two vectors wide.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int BLOCK_ROWS = 12;
#else
constexpr int BLOCK_ROWS = 4;
#endif

enum class Start { ZERO, ADD, BIAS };  // results start from zero, from what is there, or from a number for each row

// How A is stored: its rows follow each other (A[r][k] is a[r * step + k]), or its columns do (a[k * step + r]).
enum class Order { ROWS, COLUMNS };

template <class T, int ROWS, int VECTORS, Order ORDER, Start START>
INLINE void block(const T* a, long step, const T* b, long b_step, T* out, long out_step, int depth, const T* bias,
                  T* largest) {
  Vector<T> sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) {
      if (START == Start::ZERO) sums[r][v] = Vector<T>{};
      if (START == Start::ADD) sums[r][v] = load(out + r * out_step + v * W<T>);
      if (START == Start::BIAS) sums[r][v] = all(bias[r]);
    }
  for (int k = 0; k < depth; ++k) {
    Vector<T> right[VECTORS];
    for (int v = 0; v < VECTORS; ++v) right[v] = load(b + k * b_step + v * W<T>);
    for (int r = 0; r < ROWS; ++r) {
      Vector<T> left = all(ORDER == Order::ROWS ? a[r * step + k] : a[k * step + r]);
      for (int v = 0; v < VECTORS; ++v) sums[r][v] += left * right[v];
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) store(out + r * out_step + v * W<T>, sums[r][v]);
  if (largest)
    for (int v = 0; v < VECTORS; ++v) {
      Vector<T> most = load(largest + v * W<T>);
      for (int r = 0; r < ROWS; ++r) most = at_least(sums[r][v], most);
      store(largest + v * W<T>, most);
    }
}

template <class T, int VECTORS, Order ORDER, Start START>
INLINE void columns(const T* a, long step, const T* b, long b_step, T* out, long out_step, int rows, int depth,
                    const T* bias, T* largest) {
  const long next = ORDER == Order::ROWS ? step : 1;
  int r = 0;
  auto blocks = [&](auto size) {
    for (; r + size() <= rows; r += size())
      block<T, size(), VECTORS, ORDER, START>(a + r * next, step, b, b_step, out + r * out_step, out_step, depth,
                                              bias + (START == Start::BIAS ? r : 0), largest);
  };
  blocks(std::integral_constant<int, BLOCK_ROWS>{});
  if constexpr (BLOCK_ROWS > 8) blocks(std::integral_constant<int, 8>{});
  if constexpr (BLOCK_ROWS > 4) blocks(std::integral_constant<int, 4>{});
  blocks(std::integral_constant<int, 2>{});
  blocks(std::integral_constant<int, 1>{});
}

// out (rows, width) = start + A (rows, depth) B (depth, width), with a width that is a multiple of W. `largest`, if it
// is not null, becomes the largest result of each column, or stays if that is smaller.
template <class T, Order ORDER, Start START>
__attribute__((noinline)) void product(const T* a, long step, const T* b, long b_step, T* out, long out_step, int rows,
                                       int width, int depth, const T* bias = nullptr, T* largest = nullptr) {
  int c = 0;
  for (; c + 2 * W<T> <= width; c += 2 * W<T>)
    columns<T, 2, ORDER, START>(a, step, b + c, b_step, out + c, out_step, rows, depth, bias,
                                largest ? largest + c : nullptr);
  for (; c + W<T> <= width; c += W<T>)
    columns<T, 1, ORDER, START>(a, step, b + c, b_step, out + c, out_step, rows, depth, bias,
                                largest ? largest + c : nullptr);
}

}  // namespace
