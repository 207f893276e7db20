// Attention of the queries of one head, block by block.
//
// A block has 64 queries, one per lane of the vectors, and meets tiles of 48 keys: scores, weights and their gradients are
// small matrices (keys, queries). So what belongs to a query is a vector, what belongs to a key is a number, and sums over
// keys are sums of vectors. All exponents have base 2.
//
// B batch, H query heads, G key/value heads, M components, Nq queries, Nk keys, D width of a head, Dv of a value.
#pragma once
#include "inputs.h"

namespace {

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

}  // namespace
