"""The loss of rows of logits that are in memory, and its gradient in their place.

    loss_t = log sum_v exp(s_tv) - s_t[target]        ds_tv = exp(s_tv) / sum_v' exp(s_tv') - [v = target]

A program has one row and reads it twice. Few programs with many warps run at a time, so that the second time the row
is still in the second-level cache. Logarithms in the kernel are to the base 2.

T rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk.ops.triton.launch import launch
from mgk.ops.triton.primitives import LOG2E, NEVER

BLOCK = 8192  # logits in registers
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3e38)  # a maximum before any logit, but not -inf, from which no -inf could be subtracted


@triton.jit(do_not_specialize=["ignore"])
def gradient_kernel(LOGITS, TARGET, LOSS, num_tokens, ignore, BLOCK: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    p_row, target = LOGITS + i_t * num_tokens, tl.load(TARGET + i_t).to(tl.int32)
    o_v, real = tl.arange(0, BLOCK), target != ignore
    # Here, because the second loop overwrites it: the reductions of the first are barriers between the two.
    picked = tl.load(p_row + target, mask=real, other=0.0).to(tl.float32) * LOG2E
    m, l = tl.full([1], LOWEST, tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, num_tokens, BLOCK):
        s = tl.load(p_row + start + o_v, mask=start + o_v < num_tokens, other=NEVER).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, tl.max(s, 0))
        l = l * tl.exp2(m - m_new) + tl.sum(tl.exp2(s - m_new), 0)
        m = m_new
    lse = m + tl.log2(l)
    tl.store(LOSS + i_t + tl.arange(0, 1), tl.where(real, (lse - picked) * LN2, 0.0))
    for start in range(0, num_tokens, BLOCK):
        inside = start + o_v < num_tokens
        s = tl.load(p_row + start + o_v, mask=inside, other=NEVER).to(tl.float32) * LOG2E
        gradient = tl.exp2(s - lse) - tl.where(start + o_v == target, 1.0, 0.0)
        gradient = tl.where(real, gradient, 0.0).to(LOGITS.dtype.element_ty)
        tl.store(p_row + start + o_v, gradient, mask=inside)


def losses_and_gradients(logits: Tensor, target: Tensor, ignore: int) -> Tensor:
    """Return the losses (T,), zero where the target (T,) is `ignore`, and replace `logits` (T,V) by their gradient."""
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    block = min(BLOCK, triton.next_power_of_2(logits.shape[1]))
    launch(
        gradient_kernel, logits.shape[:1], logits, target.contiguous(), losses, logits.shape[1], ignore, block,
        num_warps=16 if block == BLOCK else 4,
    )  # fmt: skip
    return losses
