// The gradients of attention of one head: the weights are computed again, tile by tile.
//
// B batch, H query heads, G key/value heads, M components, Nq queries, Nk keys, D width of a head, Dv of a value.
#pragma once
#include "forward.h"

namespace {

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
    V winner{};
    for (int64_t r = 1; r < p.M; ++r) {  // the winner is the last component that exceeds all before it
      V other = this->template exponent<SHARED, VARIANCES>(r, j, row, v);
      winner = other > best ? all(T(r)) : winner;
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
      V won = winner == all(T(r)) ? grad : V{};
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

}  // namespace
