// The inputs of a head as the kernels read them: keys, and blocks of queries, with what depends on one position alone.
//
// B batch, H query heads, G key/value heads, M components, Nq queries, Nk keys, D width of a head, Dv of a value.
#pragma once
#include <algorithm>
#include <cmath>

#include "call.h"
#include "products.h"

namespace {

constexpr int Q = 64;     // queries of a block
constexpr int KEYS = 48;  // keys of a tile
constexpr double LOG2E = 1.4426950408889634;

int64_t padded(int64_t width, int64_t to) { return (width + to - 1) / to * to; }

// Results smaller than the normal numbers become zero: the processor would take a hundred times as long for them.
struct [[maybe_unused]] FlushSubnormal {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  FlushSubnormal() { _mm_setcsr(before | 0x8000); }
  ~FlushSubnormal() { _mm_setcsr(before); }
#endif
};

// What does not depend on the position of a work item.
template <class T> struct Problem {
  const Call& call;
  const bool shifted, variances, hard, factored;
  const int64_t B, H, G, M, Nq, Nk, D, Dv, group;
  const int64_t products;  // score products of a pair: the components of shifted keys share one
  const int64_t Dp, Dvp;   // widths in memory, multiples of a vector's
  const T one_rate;        // 1 / s2

  explicit Problem(const Call& c)
      : call(c), shifted(c.shift), variances(c.variance), hard(c.hard),
        factored(c.shift && !c.variance && !c.hard && c.M > 1), B(c.B), H(c.H), G(c.G), M(c.M), Nq(c.Nq), Nk(c.Nk),
        D(c.D), Dv(c.Dv), group(c.G ? c.H / c.G : 0), products(shifted ? 1 : M), Dp(padded(D, W<T>)),
        Dvp(padded(Dv, W<T>)), one_rate(T(1 / c.one_variance)) {}

  int64_t blocks() const { return (Nq + Q - 1) / Q; }
  T rate(int64_t h, int64_t r) const {
    return variances ? 1 / static_cast<const T*>(call.variance)[h * M + r] : one_rate;
  }
  T log_prior(int64_t h, int64_t r, int64_t j) const {
    const T* prior = static_cast<const T*>(call.log_prior);
    if (!prior || hard) return 0;
    return call.prior_by_position ? prior[(h * M + r) * Nk + j] : prior[h * M + r];
  }
};

template <class F> void with_type(int64_t type, const void* at, F&& use) {
  if (type == 0) use(static_cast<const float*>(at));
  if (type == 1) use(static_cast<const bfloat16*>(at));
  if (type == 2) use(static_cast<const float16*>(at));
  if (type == 3) use(static_cast<const double*>(at));
}

template <class T> void read(int64_t type, const void* base, int64_t at, int64_t width, T* to) {
  with_type(type, base, [&](auto* from) {
    for (int64_t d = 0; d < width; ++d) to[d] = T(widen(from[at + d]));
  });
}

template <class T> void write(int64_t type, void* base, int64_t at, int64_t width, const T* from) {
  with_type(type, base, [&](auto* typed) {
    auto* to = const_cast<std::remove_const_t<std::remove_pointer_t<decltype(typed)>>*>(typed) + at;
    using Wide = decltype(widen(*to));
    for (int64_t d = 0; d < width; ++d) narrow(Wide(from[d]), to + d);
  });
}

// Takes pieces of a block of memory; without one it adds up how much they need.
struct Memory {
  char* base = nullptr;
  int64_t used = 0;
  template <class T> T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base ? base + used : nullptr);
    used += padded(count * sizeof(T), 64);
    return piece;
  }
};

// The keys and values of one head that queries may see, in the order of their positions.
template <class T> struct Keys {
  int64_t count = 0;
  bool whole = false;               // none is left out
  int32_t* index;                   // (count): positions
  const T *key, *value;             // packed, or where the caller has them
  int64_t key_step, component_step, value_step;
  T *packed_key, *packed_value;     // (P,Nk,Dp), (Nk,Dv)
  T* shift;                         // (M,Dp)
  T* bias;                          // (M,Nk): log prior - |k_r|^2 / 2 s2_r
  T* half_square;                   // (M,Nk): |k_r|^2 / 2
  T *top, *factor;                  // factored: the largest bias of a key (Nk), and 2^(bias - top) (M,Nk)
  int64_t step;                     // of rows of Nk numbers in memory

  void take(Memory& memory, const Problem<T>& p) {
    step = padded(p.Nk, 16);
    index = memory.take<int32_t>(p.Nk);
    packed_key = memory.take<T>(p.products * p.Nk * p.Dp);
    packed_value = memory.take<T>(p.Nk * p.Dv);
    shift = memory.take<T>(p.M * p.Dp);
    bias = memory.take<T>(p.M * step);
    half_square = memory.take<T>(p.M * step);
    top = memory.take<T>(p.factored ? step : 0);
    factor = memory.take<T>(p.factored ? p.M * step : 0);
  }

  void prepare(const Problem<T>& p, int64_t b, int64_t h) {
    const Call& c = p.call;
    const int64_t g = h / p.group;
    count = 0;
    for (int64_t j = 0; j < p.Nk; ++j) {
      bool seen = !c.key_mask || c.key_mask[b * p.Nk + j];
      if (seen && c.log_prior && !p.hard) {
        seen = false;
        for (int64_t r = 0; r < p.M; ++r) seen |= p.log_prior(h, r, j) != -std::numeric_limits<T>::infinity();
      }
      if (seen) index[count++] = int32_t(j);
    }
    whole = count == p.Nk;
    place(p, b * c.key_at.batch + g * c.key_at.head, b * c.value_at.batch + g * c.value_at.head);
    for (int64_t r = 0; p.shifted && r < p.M; ++r)
      for (int64_t d = 0; d < p.Dp; ++d) {
        T x = d < p.D ? static_cast<const T*>(c.shift)[(h * p.M + r) * p.D + d] : 0;
        shift[r * p.Dp + d] = x + (x - x);  // an infinity counts as NaN
      }
    for (int64_t r = 0; r < p.M; ++r) {
      const T rate = p.rate(h, r);
      for (int64_t j = 0; j < count; ++j) {
        const T* k = key + (p.shifted ? 0 : r) * component_step + j * key_step;
        Vector<T> total{};
        for (int64_t d = 0; d < p.Dp; d += W<T>) {
          Vector<T> x = load(k + d);
          if (p.shifted) x += load(shift + r * p.Dp + d);
          total += x * x;
        }
        T half = sum<T>(total) / 2;
        half += half - half;
        half_square[r * step + j] = half;
        bias[r * step + j] = T(LOG2E) * (p.log_prior(h, r, index[j]) - half * rate);
      }
    }
    if (p.factored) factorise(p);
  }

 private:
  // Find keys and values, or pack them: converted, without those that are left out, and filled up to a vector.
  void place(const Problem<T>& p, int64_t key_start, int64_t value_start) {
    const Call& c = p.call;
    const bool same = c.type == (sizeof(T) == 8 ? 3 : 0);
    if (same && whole && p.D == p.Dp) {
      key = static_cast<const T*>(c.key) + key_start;
      key_step = c.key_at.position, component_step = c.key_at.component;
    } else {
      for (int64_t r = 0; r < p.products; ++r)
        for (int64_t j = 0; j < count; ++j) {
          T* to = packed_key + (r * p.Nk + j) * p.Dp;
          read(c.type, c.key, key_start + r * c.key_at.component + index[j] * c.key_at.position, p.D, to);
          std::fill(to + p.D, to + p.Dp, T(0));
        }
      key = packed_key, key_step = p.Dp, component_step = p.Nk * p.Dp;
    }
    if (same && whole) {
      value = static_cast<const T*>(c.value) + value_start, value_step = c.value_at.position;
    } else {
      for (int64_t j = 0; j < count; ++j)
        read(c.type, c.value, value_start + index[j] * c.value_at.position, p.Dv, packed_value + j * p.Dv);
      value = packed_value, value_step = p.Dv;
    }
  }

  void factorise(const Problem<T>& p) {
    for (int64_t j = 0; j < count; j += W<T>) {
      Vector<T> most = load(bias + j);
      for (int64_t r = 1; r < p.M; ++r) most = at_least(load(bias + r * step + j), most);
      store(top + j, most);
      for (int64_t r = 0; r < p.M; ++r) store(factor + r * step + j, fraction(load(bias + r * step + j) - most));
    }
  }

 public:
  // 2^x for x <= 0, zero where it is very small
  static Vector<T> fraction(Vector<T> x) {
    const Vector<T> lowest = all(Lanes<T>::lowest);
    return x < lowest ? Vector<T>{} : exp2<T>(at_least(x, lowest));
  }
};

// Queries of a block, and what belongs to them.
template <class T> struct Queries {
  int count, lanes;       // real queries, and that number filled up to a vector
  int32_t index[Q];       // positions
  T limit[Q];             // causal: the last position that a query sees
  T *rows, *columns;      // (Q,Dp) and (Dp,Q): q / s2, and log2(e) times it; q itself with a variance per component
  T* bias;                // (M,Q): what l has for a query and a component alone
  T* factor;              // (M,Q) 2^(bias - largest)
  T *largest_bias, *half_square;  // (Q): subtracted from all exponents of a row, |q|^2 / 2 s2 in base 2 likewise

  void take(Memory& memory, const Problem<T>& p) {
    rows = memory.take<T>(Q * p.Dp), columns = memory.take<T>(Q * p.Dp);
    bias = memory.take<T>(p.M * Q), factor = memory.take<T>(p.M * Q);
    largest_bias = memory.take<T>(Q), half_square = memory.take<T>(Q);
  }

  void prepare(const Problem<T>& p, const Keys<T>& keys, int64_t b, int64_t h, int64_t first) {
    const Call& c = p.call;
    count = 0;
    for (int64_t i = first; i < std::min(first + Q, p.Nq); ++i)
      if (!c.query_mask || c.query_mask[b * p.Nq + i]) {
        index[count] = int32_t(i);
        limit[count++] = T(i + p.Nk - p.Nq);
      }
    lanes = int(padded(count, W<T>));
    std::fill(limit + count, limit + lanes, T(-1));
    const T rate = p.variances ? 1 : p.one_rate, unit = p.variances ? 1 : T(LOG2E);
    for (int i = 0; i < lanes; ++i) {
      T* row = rows + i * p.Dp;
      std::fill(row, row + p.Dp, T(0));
      if (i >= count) continue;
      read(c.type, c.query, b * c.query_at.batch + h * c.query_at.head + index[i] * c.query_at.position, p.D, row);
      for (int64_t d = 0; d < p.D; ++d) row[d] = row[d] * rate + (row[d] - row[d]);  // an infinity counts as NaN
    }
    transpose<T>(rows, p.Dp, columns, Q, lanes, int(p.Dp));
    for (int v = 0; v < lanes; v += W<T>) {
      Vector<T> square{};
      for (int64_t d = 0; d < p.D; ++d) {
        Vector<T> x = load(columns + d * Q + v) * unit;
        store(columns + d * Q + v, x);
        square += x * x;
      }
      store(half_square + v, square / (p.variances ? T(2) : T(2 * LOG2E * LOG2E) * p.one_rate));
    }
    if (p.shifted)
      product<T, Order::ROWS, Start::ZERO>(keys.shift, p.Dp, columns, Q, bias, Q, int(p.M), lanes, int(p.D));
    for (int v = 0; v < lanes; v += W<T>) scale_bias(p, h, v);
  }

 private:
  void scale_bias(const Problem<T>& p, int64_t h, int v) {
    for (int64_t r = 0; p.variances && r < p.M; ++r) {
      Vector<T> product = p.shifted ? load(bias + r * Q + v) : Vector<T>{};
      store(bias + r * Q + v, (product - load(half_square + v)) * T(LOG2E) * p.rate(h, r));
    }
    if (!p.factored) return;
    Vector<T> most = load(bias + v);
    for (int64_t r = 1; r < p.M; ++r) most = at_least(load(bias + r * Q + v), most);
    store(largest_bias + v, most);
    for (int64_t r = 0; r < p.M; ++r) store(factor + r * Q + v, Keys<T>::fraction(load(bias + r * Q + v) - most));
  }
};

}  // namespace
