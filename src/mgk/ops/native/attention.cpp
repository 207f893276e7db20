// Mixture-key attention on a CPU, forward and backward: docs/math.md has the derivations, docs/kernels.md an overview.
//
// The file is compiled once per instruction set (build.py), with ISA as its name. A work item is a range of query blocks
// of a head (backward: of all heads that read one key/value head).
//
// B batch, H query heads, G key/value heads, M components, Nq queries, Nk keys, D width of a head, Dv of a value.
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "backward.h"

namespace {

constexpr int64_t FORWARD_BLOCKS = 8;   // query blocks of a work item
constexpr int64_t BACKWARD_ITEMS = 16;  // work items at least, as far as there are blocks

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

// How many threads a call is worth: waking one takes as long as some millions of multiply-adds.
int64_t useful_threads(const Call& c) {
  const double pairs = double(c.B) * c.H * c.Nq * c.Nk * (c.causal ? 0.5 : 1);
  const double work = pairs * (c.D * (c.shift ? 1 : c.M) + c.Dv);
  return std::min(c.threads, int64_t(1 + work / 2e6));
}

template <template <class> class Job, class T> int run(const Call& call, int64_t items_of(const Job<T>&)) {
  try {
    Job<T> job(call);
    parallel_for(items_of(job), useful_threads(call), Job<T>::run, &job);
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
