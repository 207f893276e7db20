"""The log of the row sums that `return_lse` asks for, from what the forward kernels leave for the backward pass.

The kernels store it per head of each sequence, padded, to the base 2, and +inf where a query sees no key. Beside it
these are a few operations on vectors along the queries.

B batch, H heads, G = B H, M components, Nq queries (padded: Nq'), T rows of all packed sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mgk.ops.triton.problem import LOG2E, Problem


def shifted_log_of_sums(p: Problem, rows: Tensor, overflow: Tensor) -> Tensor:
    """Of shifted keys, (B,H,Nq): the rows (G,1+2M,Nq') leave out what all components share. Empty if not asked for."""
    if not p.lse:
        return p.empty(0)
    lse, shared = rows[:, 0], rows[:, 1 + p.components]  # log_u of the first component
    if not p.hard:  # the fallback path leaves nothing out
        fell_back = (overflow.sum(1) > 0).repeat_interleave(p.group, 0)
        shared = shared.masked_fill(fell_back[:, None], 0)
        if p.log_prior is not None and p.log_prior.dim() == 2:  # divided by its largest entry, see bias.py
            top = p.log_prior.float().amax(1) * LOG2E
            lse = lse + top.masked_fill(top == -torch.inf, 0).repeat(p.lengths[0])[:, None]
    return log_of_sums(p, torch.where(lse == torch.inf, lse, lse + shared))


def log_of_sums(p: Problem, rows: Tensor) -> Tensor:
    """Natural logarithms (B,H,Nq), -inf where a query sees no key, from (G,Nq'). Packed: (1,H,T)."""
    if not p.lse:
        return p.empty(0)
    (batch, num_queries, _), rows = p.lengths, torch.where(rows == torch.inf, -torch.inf, rows / LOG2E)
    rows = rows.view(batch, p.heads, -1)
    if p.cu_seq_q is None:
        return rows[..., :num_queries].contiguous()
    places = torch.arange(p.query.shape[2], device=rows.device, dtype=torch.int32)
    sequence = torch.searchsorted(p.cu_seq_q, places, right=True).clamp(1, batch) - 1
    within = (places - p.cu_seq_q[sequence]).clamp(max=rows.shape[-1] - 1)
    packed = rows[sequence, :, within].masked_fill((places >= p.cu_seq_q[-1])[:, None], -math.inf)  # (T,H)
    return packed.T[None].contiguous()


def padded_gradient(p: Problem, grad_lse: Tensor | None, rows: Tensor) -> Tensor | None:
    """The gradient (B,H,Nq) as the query pass reads it, (G,Nq'): zero where `rows` (G,Nq') says that none is seen."""
    if grad_lse is None:
        return None
    batch = p.lengths[0]
    if p.cu_seq_q is None:
        grad = torch.nn.functional.pad(grad_lse.float(), (0, rows.shape[-1] - grad_lse.shape[-1]))
    else:
        starts, stops = p.cu_seq_q[:-1, None], p.cu_seq_q[1:, None]
        places = starts + torch.arange(rows.shape[-1], device=rows.device)  # (B,Nq')
        grad = grad_lse[0].float()[:, places.clamp(max=max(0, grad_lse.shape[-1] - 1))].transpose(0, 1)  # (B,H,Nq')
        grad = grad.masked_fill((places >= stops)[:, None], 0)
    return grad.reshape(batch * p.heads, -1).masked_fill(rows == torch.inf, 0).contiguous()
