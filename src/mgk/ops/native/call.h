// A call as Python packs it (operators.py), and what the compiled kernels and the library share.
#pragma once
#include <cstdint>

struct Strides {  // in numbers; the last dimension is contiguous
  int64_t batch, head, component, position;
};

struct Call {
  // Inputs. Query (B,H,Nq,D), key (B,G,Nk,D) or (B,G,M,Nk,D), value (B,G,Nk,Dv); of the compute type and contiguous:
  // shift (H,M,D), log_prior (H,M) or (H,M,Nk), variance (H,M). Null where there is none.
  const void *query, *key, *value, *shift, *log_prior, *variance;
  const uint8_t *key_mask, *query_mask;  // (B,Nk), (B,Nq)
  // Results: output (B,H,Nq,Dv), and of the compute type lse (B,H,Nq) and rows (2,B,H,Nq), which backward reads: what is
  // subtracted from a row's exponents, and the sum of the weights, negative if they were not factored.
  void *output, *lse, *rows;
  // Backward: gradients that come in (grad_lse may be null), and those that are wanted; null where one is not.
  const void *grad, *grad_lse;
  void *grad_query, *grad_key, *grad_value, *grad_shift, *grad_log_prior, *grad_variance;
  Strides query_at, key_at, value_at, output_at, grad_at, grad_query_at, grad_key_at, grad_value_at;
  int64_t B, H, G, M, Nq, Nk, D, Dv;
  int64_t type;               // of query, key, value and output: 0 float32, 1 bfloat16, 2 float16, 3 float64
  int64_t hard, causal;       // 0 or 1
  int64_t window;             // how many keys up to its own position a query sees; 0 for all
  int64_t prior_by_position;  // log_prior is (H,M,Nk)
  int64_t seed, threads;
  double one_variance, dropout;  // one_variance where there is no tensor
};

// A parallel loop: work(context, index) for every index below `count`, in any order.
using Work = void (*)(void* context, int64_t index);
void parallel_for(int64_t count, int64_t threads, Work work, void* context);
void* reusable_memory(int64_t bytes);  // of the calling thread, aligned to 64 bytes; kept from call to call

// One pair for each instruction set that was compiled. They return 0, or 1 if memory ran out.
#define DECLARE(isa)                      \
  int forward_##isa(const Call& call);    \
  int backward_##isa(const Call& call);
DECLARE(avx512) DECLARE(avx2) DECLARE(portable)
#undef DECLARE
