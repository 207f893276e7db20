// Mixture-key attention on a CPU, forward and backward: docs/math.md has the derivations, docs/kernels.md an overview.
//
// The file is compiled once per instruction set (build.py), with ISA as its name.
//
// A work item is a range of query blocks of a head (backward: of all heads that read one key/value head). A block has 64
// queries, one per lane of the vectors, and meets tiles of 48 keys: scores, weights and their gradients are small
// matrices (keys, queries). So what belongs to a query is a vector, what belongs to a key is a number, and sums over
// keys are sums of vectors. All exponents have base 2.
//
// B batch, H query heads, G key/value heads, M components, Nq queries, Nk keys, D width of a head, Dv of a value.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "call.h"
#include "products.h"

namespace {

constexpr int Q = 64;     // queries of a block
constexpr int KEYS = 48;  // keys of a tile
constexpr int64_t FORWARD_BLOCKS = 8, BACKWARD_ITEMS = 16;
constexpr double LOG2E = 1.4426950408889634;

int64_t padded(int64_t width, int64_t to) { return (width + to - 1) / to * to; }

// Results smaller than the normal numbers become zero: the processor would take a hundred times as long for them.
struct FlushSubnormal {
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
      store(half_square + v, square / (p.variances ? T(2) : 2 * T(LOG2E) * p.one_rate));
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

// One head's queries against its keys. The tile functions are templates of what an exponent is made of:
//   SHARED     components share a score product, and their exponents differ by a number of the query and one of the key
//   VARIANCES  components have variances of their own
//   HARD       the largest component counts, not the sum
template <class T> struct Head {
  using V = Vector<T>;
  const Problem<T>& p;
  Keys<T> keys;
  Queries<T> queries;
  int64_t b = 0, h = 0;
  bool factored = false, diagonal = false;  // of the block: exponents are factored; of the tile: some pairs are hidden
  int64_t first_key = 0, last_key = 0;      // that some query of the block sees
  T* scores;                                // (P,KEYS,Q), later weights or their gradients
  T *offset, *total, *largest;              // (Q): subtracted from exponents, sums of weights, of the tile
  T* sums;                                  // (max(Dv,D),Q): sums over the keys of values, backward of keys
  T* rates;                                 // (M): log2(e) / s2_r
  const V lowest = all(Lanes<T>::lowest);

  explicit Head(const Problem<T>& problem) : p(problem) {}

  void take(Memory& memory) {
    keys.take(memory, p);
    queries.take(memory, p);
    scores = memory.take<T>(p.products * KEYS * Q);
    offset = memory.take<T>(Q), total = memory.take<T>(Q), largest = memory.take<T>(Q);
    sums = memory.take<T>(std::max(p.Dp, p.Dvp) * Q);
    rates = memory.take<T>(p.M);
  }

  void select_head(int64_t batch, int64_t head) {
    b = batch, h = head;
    keys.prepare(p, b, h);
    for (int64_t r = 0; r < p.M; ++r) rates[r] = T(LOG2E) * p.rate(h, r);
  }

  void select_block(int64_t first) {
    queries.prepare(p, keys, b, h, first);
    first_key = 0, last_key = keys.count;
    if (p.call.causal && queries.count) {
      const T last = queries.limit[queries.count - 1], start = queries.limit[0] - T(p.call.window) + 1;
      auto position = [&](T limit) { return int32_t(std::max<T>(limit, -1)); };
      last_key = std::upper_bound(keys.index, keys.index + keys.count, position(last)) - keys.index;
      if (p.call.window) first_key = std::lower_bound(keys.index, keys.index + keys.count, position(start)) - keys.index;
    }
  }

  void compute_scores(int64_t j, int count, bool find = true) {
    const T last = queries.limit[queries.count - 1], first = queries.limit[0];
    diagonal = p.call.causal && (keys.index[j + count - 1] > first ||
                                 (p.call.window && keys.index[j] <= last - T(p.call.window)));
    const bool in_bias = factored || (!p.shifted && !p.variances);  // the exponent is the score
    T* most = find && in_bias && !diagonal ? largest : nullptr;
    std::fill(largest, largest + queries.lanes, -std::numeric_limits<T>::infinity());
    for (int64_t r = 0; r < p.products; ++r) {
      const T* key = keys.key + r * keys.component_step + j * keys.key_step;
      T* out = scores + r * KEYS * Q;
      if (in_bias) {
        const T* bias = (factored ? keys.top : keys.bias + r * keys.step) + j;
        product<T, Order::ROWS, Start::BIAS>(key, keys.key_step, queries.columns, Q, out, Q, count, queries.lanes,
                                             int(p.D), bias, most);
      } else {
        product<T, Order::ROWS, Start::ZERO>(key, keys.key_step, queries.columns, Q, out, Q, count, queries.lanes,
                                             int(p.D));
      }
    }
    if (find && !most) find_largest(j, count);
  }

  // Which queries v, v+1, ... see the key at place j of the head.
  INLINE typename Lanes<T>::Signed sees(int64_t j, int v) const {
    V position = all(T(keys.index[j])), limit = load(queries.limit + v);
    auto seen = position <= limit;
    if (p.call.window) seen &= position > limit - T(p.call.window);
    return seen;
  }

  template <bool SHARED, bool VARIANCES> INLINE V exponent(int64_t r, int64_t j, int row, int v) const {
    V score = load(scores + ((SHARED ? 0 : r) * KEYS + row) * Q + v);
    if constexpr (SHARED || VARIANCES) {
      V other = load(queries.bias + r * Q + v) + keys.bias[r * keys.step + j + row];
      return VARIANCES ? score * rates[r] + other : score + other;
    }
    return score;
  }

  // Call use(shared, variances) with constants. Factored exponents are scores, too.
  template <class F> void with_kind(F&& use) {
    using Yes = std::true_type;
    using No = std::false_type;
    if (p.shifted && !factored) p.variances ? use(Yes{}, Yes{}) : use(Yes{}, No{});
    else p.variances ? use(No{}, Yes{}) : use(No{}, No{});
  }

  void find_largest(int64_t j, int count) {
    const int64_t components = factored ? 1 : p.M;
    with_kind([&](auto shared, auto variances) {
      for (int v = 0; v < queries.lanes; v += W<T>) {
        V most = load(largest + v);
        for (int row = 0; row < count; ++row) {
          V own = most;
          for (int64_t r = 0; r < components; ++r) own = at_least(exponent<shared(), variances()>(r, j, row, v), own);
          most = diagonal ? (sees(j + row, v) ? own : most) : own;
        }
        store(largest + v, most);
      }
    });
  }

  // --- Forward -------------------------------------------------------------------------------------------------------

  // Raise the offsets where a weight would exceed 2^16, and scale what was added up so far.
  void raise_offsets() {
    bool raise = false;
    for (int v = 0; v < queries.lanes; v += W<T>) {
      auto higher = load(largest + v) > load(offset + v) + T(16);
      for (int i = 0; i < W<T>; ++i) raise |= higher[i] != 0;
    }
    if (!raise) return;
    for (int v = 0; v < queries.lanes; v += W<T>) {
      V before = load(offset + v), after = at_least(before, load(largest + v));
      V scale = exp2<T>(at_least(before - after, lowest));
      store(offset + v, after);
      store(total + v, load(total + v) * scale);
      for (int64_t d = 0; d < p.Dv; ++d) store(sums + d * Q + v, load(sums + d * Q + v) * scale);
    }
  }

  INLINE V weight(V exponent, V shift) const { return exp2<T>(at_least(exponent - shift, lowest)); }

  template <int COMPONENTS> void factored_weights(int64_t j, int count) {
    const int64_t components = COMPONENTS ? COMPONENTS : p.M;
    for (int v = 0; v < queries.lanes; v += W<T>) {
      V shift = load(offset + v), added = load(total + v);
      for (int row = 0; row < count; ++row) {
        V mixture{};
        for (int64_t r = 0; r < components; ++r)
          mixture += load(queries.factor + r * Q + v) * keys.factor[r * keys.step + j + row];
        V w = weight(load(scores + row * Q + v), shift) * mixture;
        if (diagonal) w = sees(j + row, v) ? w : V{};
        added += w;
        store(scores + row * Q + v, w);
      }
      store(total + v, added);
    }
  }

  template <bool SHARED, bool VARIANCES> void mixture_weights(int64_t j, int count) {
    for (int v = 0; v < queries.lanes; v += W<T>) {
      V shift = load(offset + v), added = load(total + v);
      for (int row = 0; row < count; ++row) {
        V first = exponent<SHARED, VARIANCES>(0, j, row, v), w;
        if (p.hard) {
          for (int64_t r = 1; r < p.M; ++r) first = larger(first, exponent<SHARED, VARIANCES>(r, j, row, v));
          w = weight(first, shift);
        } else {
          w = weight(first, shift);
          for (int64_t r = 1; r < p.M; ++r) w += weight(exponent<SHARED, VARIANCES>(r, j, row, v), shift);
        }
        if (diagonal) w = sees(j + row, v) ? w : V{};
        added += w;
        store(scores + row * Q + v, w);
      }
      store(total + v, added);
    }
  }

  INLINE static V larger(V x, V y) { return (y > x ? y : x) + (y - y); }  // NaN if one of them is

  void compute_weights(int64_t j, int count) {
    if (factored)
      p.M == 2 ? factored_weights<2>(j, count) : factored_weights<0>(j, count);
    else
      with_kind([&](auto shared, auto variances) { mixture_weights<shared(), variances()>(j, count); });
  }

  void forward_block(int64_t first) {
    select_block(first);
    factored = p.factored;
    if (queries.count) {
      sum_values();
      if (factored && has_small_sum()) {  // query and key prefer different components
        factored = false;
        sum_values();
      }
      write_rows();
    }
    write_hidden(first);
  }

  void sum_values() {
    std::fill(offset, offset + Q, -std::numeric_limits<T>::max() / 2);
    std::fill(total, total + Q, T(0));
    std::fill(sums, sums + p.Dvp * Q, T(0));
    for (int64_t j = first_key; j < last_key; j += KEYS) {
      const int count = int(std::min<int64_t>(KEYS, last_key - j));
      compute_scores(j, count);
      raise_offsets();
      compute_weights(j, count);
      if (p.call.dropout > 0) drop(scores, j, count);
      product<T, Order::COLUMNS, Start::ADD>(keys.value + j * keys.value_step, keys.value_step, scores, Q, sums, Q,
                                             int(p.Dv), queries.lanes, count);
    }
  }

  bool has_small_sum() const {
    for (int i = 0; i < queries.count; ++i) {
      const bool empty = last_key <= first_key || (p.call.causal && total[i] == 0 && !sees_any(i));
      if (!empty && !(total[i] >= Lanes<T>::tiny)) return true;
    }
    return false;
  }

  bool sees_any(int i) const {  // a key between its window's start and its own position
    const int32_t last = int32_t(queries.limit[i]);
    if (last < 0) return false;
    const int32_t* after = std::upper_bound(keys.index, keys.index + keys.count, last);
    return after != keys.index && (!p.call.window || after[-1] > last - p.call.window);
  }

  int64_t row_of(int i) const { return (b * p.H + h) * p.Nq + queries.index[i]; }

  void write_rows() {
    const Call& c = p.call;
    const int64_t rows = p.B * p.H * p.Nq;
    T *lse = static_cast<T*>(c.lse), *offsets = static_cast<T*>(c.rows), *totals = offsets + rows;
    for (int i = 0; i < queries.count; ++i) {
      const int64_t at = row_of(i);
      const bool empty = total[i] == 0;
      T sum = offset[i] + std::log2(total[i]);
      if (factored) sum += queries.largest_bias[i];
      lse[at] = empty ? -std::numeric_limits<T>::infinity()
                      : sum / T(LOG2E) - (p.variances ? 0 : queries.half_square[i]);
      offsets[at] = empty ? std::numeric_limits<T>::max() / 2 : offset[i];
      totals[at] = factored ? total[i] : -total[i];  // the sign tells backward
      total[i] = empty ? 0 : 1 / total[i];
    }
    write_block(sums, p.Dv, p.Dvp, total, c.output, b * c.output_at.batch + h * c.output_at.head,
                c.output_at.position);
  }

  // Multiply the columns of sums (width,Q) by scale (Q) and write them as rows.
  void write_block(T* from, int64_t width, int64_t wide, const T* scale, void* to, int64_t start, int64_t step) {
    alignas(64) T row[W<T> * 512];
    for (int v = 0; v < queries.lanes; v += W<T>) {
      for (int64_t d = 0; d < width; ++d) store(from + d * Q + v, load(from + d * Q + v) * load(scale + v));
      transpose<T>(from + v, Q, row, wide, int(wide), W<T>);
      for (int i = v; i < std::min(v + W<T>, queries.count); ++i)
        write<T>(p.call.type, to, start + queries.index[i] * step, width, row + (i - v) * wide);
    }
  }

  void write_hidden(int64_t first) {
    const Call& c = p.call;
    if (!c.query_mask) return;
    const T zeros[256] = {};
    const int64_t rows = p.B * p.H * p.Nq;
    for (int64_t i = first; i < std::min(first + Q, p.Nq); ++i) {
      if (c.query_mask[b * p.Nq + i]) continue;
      const int64_t row = (b * p.H + h) * p.Nq + i;
      static_cast<T*>(c.lse)[row] = -std::numeric_limits<T>::infinity();
      static_cast<T*>(c.rows)[row] = static_cast<T*>(c.rows)[rows + row] = 0;
      const Strides& at = c.output_at;
      write(c.type, c.output, b * at.batch + h * at.head + i * at.position, p.Dv, zeros);
    }
  }

  // --- Dropout -------------------------------------------------------------------------------------------------------

  using Bits = typename Lanes<T>::Bits;
  using Word = typename Lanes<T>::Word;

  template <class X> INLINE static X mixed(X x) {  // a hash: every bit of x changes every bit of the result
    if constexpr (sizeof(Word) == 4) {
      x ^= x >> 16, x *= 0x7feb352dU, x ^= x >> 15, x *= 0x846ca68bU, x ^= x >> 16;
    } else {
      x ^= x >> 33, x *= 0xff51afd7ed558ccdULL, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ULL, x ^= x >> 33;
    }
    return x;
  }
  static uint64_t mixed64(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL, x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
  }

  // Zero what is dropped of a tile and scale the rest. Seed, head and positions decide, so backward draws the same.
  void drop(T* tile, int64_t j, int count) {
    const double share = p.call.dropout;
    const Word limit = Word(share * std::ldexp(1.0, 8 * sizeof(Word)));
    const T kept = T(1 / (1 - share));
    const uint64_t head = mixed64(uint64_t(p.call.seed) ^ mixed64(uint64_t(b * p.H + h)));
    alignas(64) Word of_query[Q];
    for (int i = 0; i < queries.lanes; ++i)
      of_query[i] = i < queries.count ? Word(mixed64(head + uint64_t(queries.index[i]) * 2 + 1)) : 0;
    for (int row = 0; row < count; ++row) {
      const Word of_key = Word(mixed64(head + uint64_t(keys.index[j + row]) * 2 + 2));
      for (int v = 0; v < queries.lanes; v += W<T>) {
        Bits bits;
        std::memcpy(&bits, of_query + v, sizeof bits);
        bits = mixed(bits ^ of_key);
        V x = load(tile + row * Q + v);
        store(tile + row * Q + v, bits >= limit ? x * kept : V{});
      }
    }
  }
};

// Gradients of one head, added to those of its key/value head and of its shift, prior and variance.
template <class T> struct Backward : Head<T> {
  using V = Vector<T>;
  using Head<T>::p;
  using Head<T>::keys;
  using Head<T>::queries;
  using Head<T>::scores;
  using Head<T>::b;
  using Head<T>::h;
  using Head<T>::sums;

  T *grad_rows, *grad_columns;   // (Q,Dvp), (Dvp,Q): the gradient of the output divided by the row sum
  T *delta, *grad_lse;           // (Q)
  T *grad_weights, *weights;     // (KEYS,Q)
  T *bias_sums, *score_sums;     // (M,Q): sums over keys of the gradients of exponents; the same times the scores
  T *key_sums, *partial;         // (M,Nk): sums over queries; (M,W): of a key, by lane
  T* part;                       // (KEYS,max(Dp,Dvp))
  T *grad_key, *grad_value;      // (P,Nk,Dp), (Nk,Dvp): sums of a work item
  T *grad_shift, *grad_prior, *grad_variance;  // (M,Dp), (M) or (M,Nk), (M): sums of a work item and head

  explicit Backward(const Problem<T>& problem) : Head<T>(problem) {}

  void take(Memory& memory) {
    Head<T>::take(memory);
    grad_rows = memory.take<T>(Q * p.Dvp), grad_columns = memory.take<T>(Q * p.Dvp);
    delta = memory.take<T>(Q), grad_lse = memory.take<T>(Q);
    grad_weights = memory.take<T>(KEYS * Q), weights = memory.take<T>(KEYS * Q);
    bias_sums = memory.take<T>(p.M * Q), score_sums = memory.take<T>(p.M * Q);
    key_sums = memory.take<T>(p.M * keys.step), partial = memory.take<T>(p.M * W<T>);
    part = memory.take<T>(KEYS * std::max(p.Dp, p.Dvp));
  }

  void start_head(int64_t batch, int64_t head) {
    this->select_head(batch, head);
    std::fill(key_sums, key_sums + p.M * keys.step, T(0));
  }

  void backward_block(int64_t first) {
    this->select_block(first);
    if (queries.count) {
      load_rows();
      std::fill(sums, sums + p.Dp * Q, T(0));
      std::fill(bias_sums, bias_sums + p.M * Q, T(0));
      std::fill(score_sums, score_sums + p.M * Q, T(0));
      for (int64_t j = this->first_key; j < this->last_key; j += KEYS)
        tile(j, int(std::min<int64_t>(KEYS, this->last_key - j)));
      finish_block();
    }
    if (!p.call.query_mask || !p.call.grad_query) return;
    const T zeros[256] = {};
    const Strides& at = p.call.grad_query_at;
    for (int64_t i = first; i < std::min(first + Q, p.Nq); ++i)
      if (!p.call.query_mask[b * p.Nq + i])
        write(p.call.type, p.call.grad_query, b * at.batch + h * at.head + i * at.position, p.D, zeros);
  }

  void load_rows() {
    const Call& c = p.call;
    const int64_t rows = p.B * p.H * p.Nq;
    const T *offsets = static_cast<const T*>(c.rows), *totals = offsets + rows;
    this->factored = p.factored;
    for (int i = 0; i < queries.lanes; ++i) {
      T* row = grad_rows + i * p.Dvp;
      std::fill(row, row + p.Dvp, T(0));
      this->offset[i] = std::numeric_limits<T>::max() / 2, delta[i] = grad_lse[i] = 0;
      if (i >= queries.count) continue;
      const int64_t at = this->row_of(i), position = queries.index[i];
      const T total = totals[at];
      if (std::signbit(total) || total != total) this->factored = false;
      const T scale = total == 0 ? 0 : 1 / std::abs(total);
      this->offset[i] = offsets[at];
      T* output = part;
      read(c.type, c.output, b * c.output_at.batch + h * c.output_at.head + position * c.output_at.position, p.Dv, output);
      read(c.type, c.grad, b * c.grad_at.batch + h * c.grad_at.head + position * c.grad_at.position, p.Dv, row);
      T sum = 0;
      for (int64_t d = 0; d < p.Dv; ++d) sum += (row[d] *= scale) * output[d];
      if (c.grad_lse && total != 0) grad_lse[i] = static_cast<const T*>(c.grad_lse)[at];
      delta[i] = sum - grad_lse[i] * scale;
    }
    transpose<T>(grad_rows, p.Dvp, grad_columns, Q, queries.lanes, int(p.Dvp));
  }

  void tile(int64_t j, int count) {
    const Call& c = p.call;
    const int lanes = queries.lanes;
    this->compute_scores(j, count, false);
    product<T, Order::ROWS, Start::ZERO>(keys.value + j * keys.value_step, keys.value_step, grad_columns, Q,
                                         grad_weights, Q, count, lanes, int(p.Dv));
    if (c.dropout > 0) this->drop(grad_weights, j, count);
    if (this->factored) factored_gradients(j, count);
    else
      this->with_kind([&](auto shared, auto variances) { mixture_gradients<shared(), variances()>(j, count); });
    if (c.grad_value) {
      if (c.dropout > 0) this->drop(weights, j, count);
      add_to_keys(weights, grad_rows, p.Dvp, grad_value, j, count);
    }
    for (int64_t r = 0; r < p.products; ++r) {
      const T* grad_scores = scores + r * KEYS * Q;
      if (c.grad_query)
        product<T, Order::COLUMNS, Start::ADD>(keys.key + r * keys.component_step + j * keys.key_step, keys.key_step,
                                               grad_scores, Q, sums, Q, int(p.D), lanes, count);
      if (c.grad_key) add_to_keys(grad_scores, queries.rows, p.Dp, grad_key + r * p.Nk * p.Dp, j, count);
    }
  }

  // to[index of the key] += sum over queries of from (KEYS,Q) times rows (Q,width)
  void add_to_keys(const T* from, const T* rows, int64_t width, T* to, int64_t j, int count) {
    if (keys.whole) {
      product<T, Order::ROWS, Start::ADD>(from, Q, rows, width, to + j * width, width, count, int(width), queries.count);
      return;
    }
    product<T, Order::ROWS, Start::ZERO>(from, Q, rows, width, part, width, count, int(width), queries.count);
    for (int row = 0; row < count; ++row)
      for (int64_t d = 0; d < width; ++d) to[keys.index[j + row] * width + d] += part[row * width + d];
  }

  void factored_gradients(int64_t j, int count) {
    const int lanes = queries.lanes;
    for (int row = 0; row < count; ++row)
      for (int v = 0; v < lanes; v += W<T>) {
        V mixture{}, exponential = this->weight(load(scores + row * Q + v), load(this->offset + v));
        for (int64_t r = 0; r < p.M; ++r)
          mixture += load(queries.factor + r * Q + v) * keys.factor[r * keys.step + j + row];
        V grad = exponential * (load(grad_weights + row * Q + v) - load(delta + v));
        if (this->diagonal) {
          auto seen = this->sees(j + row, v);
          exponential = seen ? exponential : V{}, grad = seen ? grad : V{};
        }
        store(weights + row * Q + v, exponential * mixture);
        store(scores + row * Q + v, grad * mixture);
        store(grad_weights + row * Q + v, grad);
      }
    for (int64_t r = 0; r < p.M; ++r) {
      const T *of_key = keys.factor + r * keys.step + j, *of_query = queries.factor + r * Q;
      T *by_key = key_sums + r * keys.step + j, *by_query = bias_sums + r * Q;
      for (int row = 0; row < count; ++row) {
        V total{};
        for (int v = 0; v < lanes; v += W<T>) {
          V grad = load(grad_weights + row * Q + v);
          total += grad * load(of_query + v);
          store(by_query + v, load(by_query + v) + grad * of_key[row]);
        }
        by_key[row] += of_key[row] * sum<T>(total);
      }
    }
  }

  template <bool SHARED, bool VARIANCES> void mixture_gradients(int64_t j, int count) {
    for (int row = 0; row < count; ++row) {
      std::fill(partial, partial + p.M * W<T>, T(0));
      for (int v = 0; v < queries.lanes; v += W<T>) {
        if (p.hard) hard_gradient<SHARED, VARIANCES>(j, row, v);
        else soft_gradient<SHARED, VARIANCES>(j, row, v);
      }
      for (int64_t r = 0; r < p.M; ++r) key_sums[r * keys.step + j + row] += sum<T>(load(partial + r * W<T>));
    }
  }

  template <bool SHARED, bool VARIANCES> INLINE void soft_gradient(int64_t j, int row, int v) {
    const int at = row * Q + v;
    const V offset = load(this->offset + v), grad_weight = load(grad_weights + at) - load(delta + v);
    V total{}, shared{}, score = load(scores + at);
    for (int64_t r = 0; r < p.M; ++r) {
      if (!SHARED) score = load(scores + r * KEYS * Q + at);
      V weight = this->weight(this->template exponent<SHARED, VARIANCES>(r, j, row, v), offset);
      V grad = weight * grad_weight;
      if (this->diagonal) {
        auto seen = this->sees(j + row, v);
        weight = seen ? weight : V{}, grad = seen ? grad : V{};
      }
      total += weight;
      add_gradient<SHARED, VARIANCES>(r, v, grad, score, shared, scores + r * KEYS * Q + at);
    }
    if (SHARED) store(scores + at, shared);
    store(weights + at, total);
  }

  template <bool SHARED, bool VARIANCES> INLINE void hard_gradient(int64_t j, int row, int v) {
    const int at = row * Q + v;
    V best = this->template exponent<SHARED, VARIANCES>(0, j, row, v);
    auto winner = best != best;
    winner ^= winner;
    for (int64_t r = 1; r < p.M; ++r) {  // the winner is the last component that exceeds all before it
      V other = this->template exponent<SHARED, VARIANCES>(r, j, row, v);
      winner = other > best ? winner * 0 + typename Lanes<T>::Word(r) : winner;
      best = this->larger(best, other);
    }
    V weight = this->weight(best, load(this->offset + v));
    V grad = weight * (load(grad_weights + at) - load(delta + v)), shared{}, score = load(scores + at);
    if (this->diagonal) {
      auto seen = this->sees(j + row, v);
      weight = seen ? weight : V{}, grad = seen ? grad : V{};
    }
    for (int64_t r = 0; r < p.M; ++r) {
      if (!SHARED) score = load(scores + r * KEYS * Q + at);
      V won = winner == typename Lanes<T>::Word(r) ? grad : V{};
      add_gradient<SHARED, VARIANCES>(r, v, won, score, shared, scores + r * KEYS * Q + at);
    }
    if (SHARED) store(scores + at, shared);
    store(weights + at, weight);
  }

  // Add the gradient of an exponent to all sums, and to that of the score.
  template <bool SHARED, bool VARIANCES>
  INLINE void add_gradient(int64_t r, int v, V grad, V score, V& shared, T* own) {
    store(partial + r * W<T>, load(partial + r * W<T>) + grad);
    if (SHARED || VARIANCES) store(bias_sums + r * Q + v, load(bias_sums + r * Q + v) + grad);
    if (VARIANCES) {
      store(score_sums + r * Q + v, load(score_sums + r * Q + v) + grad * score);
      grad *= this->rates[r] * T(1 / LOG2E);
    }
    if (SHARED) shared += grad;
    else store(own, grad);
  }

  void finish_block() {
    const Call& c = p.call;
    const int lanes = queries.lanes;
    const T from_base_2 = T(1 / LOG2E), scale = p.variances ? 1 : p.one_rate;
    T* row_terms = this->largest;  // what a query gets of itself
    for (int v = 0; v < lanes; v += W<T>) {
      V own = p.variances ? V{} : load(grad_lse + v) * from_base_2;
      for (int64_t r = 0; r < p.M; ++r) {
        T* by_query = bias_sums + r * Q + v;
        V x = load(by_query);
        if (this->factored) x *= load(queries.factor + r * Q + v);
        if (p.variances) {
          const T rate = this->rates[r] * from_base_2;
          grad_variance[r] += sum<T>(load(score_sums + r * Q + v) + x * load(queries.bias + r * Q + v) / this->rates[r]);
          x *= rate;
          own += x;
        }
        store(by_query, x);
      }
      store(row_terms + v, own);
    }
    if (p.shifted)
      product<T, Order::ROWS, Start::ADD>(bias_sums, Q, queries.rows, p.Dp, grad_shift, p.Dp, int(p.M), int(p.Dp),
                                          queries.count);
    if (!c.grad_query) return;
    for (int64_t d = 0; d < p.D; ++d)
      for (int v = 0; v < lanes; v += W<T>) {
        V x = load(sums + d * Q + v);
        for (int64_t r = 0; p.shifted && r < p.M; ++r) x += load(bias_sums + r * Q + v) * keys.shift[r * p.Dp + d];
        store(sums + d * Q + v, x * scale - load(row_terms + v) * load(queries.columns + d * Q + v));
      }
    std::fill(this->total, this->total + Q, T(1));
    const Strides& at = c.grad_query_at;
    this->write_block(sums, p.D, p.Dp, this->total, c.grad_query, b * at.batch + h * at.head, at.position);
  }

  // What keys, shifts, priors and variances get through the exponents' terms of a key alone.
  void finish_head() {
    for (int64_t r = 0; r < p.M; ++r) {
      const T rate = p.rate(h, r);
      T total = 0, moment = 0, *shift = keys.shift + r * p.Dp;
      T* to_key = grad_key + (p.shifted ? 0 : r) * p.Nk * p.Dp;
      for (int64_t j = 0; j < keys.count; ++j) {
        T own = key_sums[r * keys.step + j];
        if (keys.bias[r * keys.step + j] == -std::numeric_limits<T>::infinity()) own = 0;  // a prior of zero
        if (!p.hard) grad_prior[p.call.prior_by_position ? r * p.Nk + keys.index[j] : r] += own;
        moment += own * keys.half_square[r * keys.step + j];
        own *= rate;
        total += own;
        const T* key = keys.key + (p.shifted ? 0 : r) * keys.component_step + j * keys.key_step;
        T* to = to_key + keys.index[j] * p.Dp;
        for (int64_t d = 0; d < p.Dp; d += W<T>) {
          V x = load(key + d) * own;
          V y = load(to + d) - x;
          if (p.shifted) {
            y -= load(shift + d) * own;
            store(grad_shift + r * p.Dp + d, load(grad_shift + r * p.Dp + d) - x);
          }
          store(to + d, y);
        }
      }
      for (int64_t d = 0; p.shifted && d < p.Dp; ++d) grad_shift[r * p.Dp + d] -= total * shift[d];
      grad_variance[r] = -(grad_variance[r] - moment) * rate * rate;
    }
  }
};

// --- Work items ------------------------------------------------------------------------------------------------------

template <class T> struct ForwardWork {
  const Problem<T> p;
  const int64_t chunks;  // of a head's query blocks; results do not depend on it
  std::atomic<bool> failed{false};

  explicit ForwardWork(const Call& call)
      : p(call), chunks(std::max<int64_t>(1, std::max((p.blocks() + FORWARD_BLOCKS - 1) / FORWARD_BLOCKS,
                                                      std::min(p.blocks(), 4 * call.threads / std::max<int64_t>(1, p.B * p.H))))) {}

  static void run(void* self, int64_t index) {
    auto& work = *static_cast<ForwardWork*>(self);
    try {
      work.item(index);
    } catch (const std::bad_alloc&) {
      work.failed = true;
    }
  }

  void item(int64_t index) {
    FlushSubnormal flush;
    Head<T> head(p);
    Memory memory;
    head.take(memory);
    memory = {static_cast<char*>(reusable_memory(memory.used))};
    head.take(memory);
    const int64_t of_heads = p.B * p.H, chunk = chunks - 1 - index / of_heads, h = index % of_heads;  // long ones first
    head.select_head(h / p.H, h % p.H);
    for (int64_t i = chunk * p.blocks() / chunks; i < (chunk + 1) * p.blocks() / chunks; ++i) head.forward_block(i * Q);
  }
};

template <class T> struct BackwardWork {
  const Problem<T> p;
  const int64_t blocks;    // of all heads that read one key/value head
  const int64_t chunks;    // of these blocks; a function of the shapes alone, as the order of sums depends on it
  const int64_t per_head;  // numbers for shift, prior and variance
  const int64_t per_key;   // numbers for key and value
  std::vector<T> of_heads, of_keys;
  std::unique_ptr<std::atomic<int64_t>[]> left_of_keys, left_of_heads;
  std::atomic<bool> failed{false};

  explicit BackwardWork(const Call& call)
      : p(call), blocks(p.blocks() * p.group),
        chunks(std::max<int64_t>(1, std::min(blocks, BACKWARD_ITEMS / std::max<int64_t>(1, p.B * p.G)))),
        per_head(p.M * p.Dp + p.M * (call.prior_by_position ? p.Nk : 1) + p.M),
        per_key(p.products * p.Nk * p.Dp + p.Nk * p.Dvp), of_heads(p.B * p.G * chunks * p.group * per_head),
        of_keys(chunks > 1 ? p.B * p.G * chunks * per_key : 0), left_of_keys(new std::atomic<int64_t>[p.B * p.G]),
        left_of_heads(new std::atomic<int64_t>[p.G]) {
    for (int64_t i = 0; i < p.B * p.G; ++i) left_of_keys[i] = chunks;
    for (int64_t g = 0; g < p.G; ++g) left_of_heads[g] = p.B * chunks;
  }

  static void run(void* self, int64_t index) {
    auto& work = *static_cast<BackwardWork*>(self);
    try {
      work.item(index);
    } catch (const std::bad_alloc&) {
      work.failed = true;
    }
  }

  void item(int64_t index) {
    FlushSubnormal flush;
    Backward<T> head(p);
    const bool alone = chunks == 1;
    Memory memory;
    head.take(memory);
    memory.template take<T>(alone ? per_key : 0);
    memory = {static_cast<char*>(reusable_memory(memory.used))};
    head.take(memory);
    const int64_t pair = index % (p.B * p.G), chunk = index / (p.B * p.G), b = pair / p.G, g = pair % p.G;
    T* sums = alone ? memory.template take<T>(per_key) : of_keys.data() + (pair * chunks + chunk) * per_key;
    std::fill(sums, sums + per_key, T(0));
    head.grad_key = sums, head.grad_value = sums + p.products * p.Nk * p.Dp;
    int64_t before = -1;
    for (int64_t i = chunk * blocks / chunks; i < (chunk + 1) * blocks / chunks; ++i) {
      const int64_t of_group = i / p.blocks(), h = g * p.group + of_group;
      if (h != before) {
        if (before >= 0) head.finish_head();
        head.grad_shift = parameters(pair, chunk, of_group);
        head.grad_prior = head.grad_shift + p.M * p.Dp;
        head.grad_variance = head.grad_shift + per_head - p.M;
        head.start_head(b, before = h);
      }
      head.backward_block(i % p.blocks() * Q);
    }
    if (before >= 0) head.finish_head();
    if (left_of_keys[pair].fetch_sub(1) == 1) write_keys(b, g, alone ? sums : of_keys.data() + pair * chunks * per_key);
    if (left_of_heads[g].fetch_sub(1) == 1) write_parameters(g);
  }

  T* parameters(int64_t pair, int64_t chunk, int64_t of_group) {
    return of_heads.data() + ((pair * chunks + chunk) * p.group + of_group) * per_head;
  }

  void write_keys(int64_t b, int64_t g, T* parts) const {
    const Call& c = p.call;
    for (int64_t chunk = 1; chunk < chunks; ++chunk)
      for (int64_t i = 0; i < per_key; ++i) parts[i] += parts[chunk * per_key + i];
    const Strides &key = c.grad_key_at, &value = c.grad_value_at;
    for (int64_t r = 0; c.grad_key && r < p.products; ++r)
      for (int64_t j = 0; j < p.Nk; ++j)
        write(c.type, c.grad_key, b * key.batch + g * key.head + r * key.component + j * key.position, p.D,
              parts + (r * p.Nk + j) * p.Dp);
    for (int64_t j = 0; c.grad_value && j < p.Nk; ++j)
      write(c.type, c.grad_value, b * value.batch + g * value.head + j * value.position, p.Dv,
            parts + p.products * p.Nk * p.Dp + j * p.Dvp);
  }

  // Sum over the batch and the chunks for every head of a group.
  void write_parameters(int64_t g) {
    const Call& c = p.call;
    const int64_t priors = per_head - p.M * p.Dp - p.M;
    for (int64_t of_group = 0; of_group < p.group; ++of_group) {
      T* total = parameters(g, 0, of_group);
      for (int64_t part = 1; part < p.B * chunks; ++part) {
        const T* other = parameters(part / chunks * p.G + g, part % chunks, of_group);
        for (int64_t i = 0; i < per_head; ++i) total[i] += other[i];
      }
      const int64_t h = g * p.group + of_group;
      for (int64_t r = 0; c.grad_shift && r < p.M; ++r)
        std::copy(total + r * p.Dp, total + r * p.Dp + p.D, static_cast<T*>(c.grad_shift) + (h * p.M + r) * p.D);
      total += p.M * p.Dp;
      if (c.grad_log_prior) std::copy(total, total + priors, static_cast<T*>(c.grad_log_prior) + h * priors);
      if (c.grad_variance) std::copy(total + priors, total + priors + p.M, static_cast<T*>(c.grad_variance) + h * p.M);
    }
  }
};

template <template <class> class Job, class T> int run(const Call& call, int64_t items_of(const Job<T>&)) {
  try {
    Job<T> job(call);
    parallel_for(items_of(job), call.threads, Job<T>::run, &job);
    return job.failed;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

template <class T> int forward(const Call& call) {
  return run<ForwardWork, T>(call, [](const ForwardWork<T>& work) { return work.p.B * work.p.H * work.chunks; });
}
template <class T> int backward(const Call& call) {
  return run<BackwardWork, T>(call, [](const BackwardWork<T>& work) { return work.p.B * work.p.G * work.chunks; });
}

}  // namespace

#define JOINED(a, b) a##_##b
#define NAME(a, b) JOINED(a, b)
int NAME(forward, ISA)(const Call& call) { return call.type == 3 ? forward<double>(call) : forward<float>(call); }
int NAME(backward, ISA)(const Call& call) { return call.type == 3 ? backward<double>(call) : backward<float>(call); }
