"""The output layer of a language model: a softmax over the vocabulary, tied to the embedding, plain or adaptive.

T positions, E width of the model, V vocabulary, C clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils.checkpoint import checkpoint

from mgk.nn.packing import reorder
from mgk.ops import arguments as check
from mgk.ops.api import HAS_TRITON
from mgk.ops.common import autocasts, dtype_name
from mgk.ops.dispatch import TRITON_DTYPES
from mgk.ops.linear_cross_entropy import linear_cross_entropy

if TYPE_CHECKING:
    from jaxtyping import Float, Int

IGNORE = -100  # a target that does not count, as in torch's cross-entropy
MAX_LOGITS = 1 << 26  # in memory at once: 256 MB in float32
FUSED_WIDTH = 256  # the widest model that the kernels support


class TiedSoftmax(nn.Module):
    """log p(v) = log softmax(W h + b)[v], where W (V,E) is passed in: the embedding, or a matrix of its own.

    W may have more rows than V, for products of a size that a GPU computes faster. A plain softmax ignores them.

    With cutoffs it is adaptive (Grave et al. 2017, all clusters of full width): tokens below the first cutoff share one
    softmax with the clusters, and a token of cluster c has log p(c) + log p(v | c). The weights of a cluster are used
    only for the targets in it. The number of these targets is known only on the device. Our kernels read it there, so
    a CUDA graph can capture them; PyTorch's operators need it on the host.

    Args:
        vocabulary: V.
        width: E.
        cutoffs: first tokens of the clusters, increasing; tokens are sorted by falling frequency. Empty: plain.
        bias: whether a plain softmax has the bias b (V,). An adaptive one has it always.
    """

    edges: Tensor

    def __init__(self, vocabulary: int, width: int, cutoffs: Sequence[int] = (), *, bias: bool = True) -> None:
        super().__init__()
        check.check_count("vocabulary", vocabulary)
        check.check_count("width", width)
        starts = [cutoff for cutoff in check.check_cutoffs(cutoffs) if cutoff < vocabulary]
        ends = [*starts, vocabulary]
        self.sizes = [stop - start for start, stop in pairwise([0, *ends])]
        if starts and not check.check_flag("bias", bias):
            raise ValueError("bias: expected True with cutoffs, got False")
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if bias else None
        self.cluster_weight = nn.Parameter(torch.empty(len(starts), width)) if starts else None
        self.cluster_bias = nn.Parameter(torch.zeros(len(starts))) if starts else None
        self.register_buffer("edges", torch.tensor(starts, dtype=torch.int64), persistent=False)
        if self.cluster_weight is not None:
            nn.init.normal_(self.cluster_weight, std=0.02)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture `losses`: it does not synchronise with the host."""
        return self.cluster_weight is None or (HAS_TRITON and self.cluster_weight.shape[1] <= FUSED_WIDTH)

    def forward(self, hidden: Float[Tensor, "... e"], weight: Float[Tensor, "v e"]) -> Float[Tensor, "... v"]:
        """Return logits over the vocabulary in float32; those of an adaptive softmax are log-probabilities."""
        if self.cluster_weight is None:
            return linear(hidden, weight, self._bias(weight))[..., : self.sizes[0]].float()
        (head, head_bias), *tails = self._clusters(weight)
        first = linear(hidden, head, head_bias).float().log_softmax(-1)
        parts = [first[..., : self.sizes[0]]]
        for place, (tail, tail_bias) in enumerate(tails, self.sizes[0]):
            within = linear(hidden, tail, tail_bias).float().log_softmax(-1)
            parts.append(within + first[..., place : place + 1])
        return torch.cat(parts, -1)

    def losses(
        self, hidden: Float[Tensor, "t e"], weight: Float[Tensor, "v e"], target: Int[Tensor, " t"]
    ) -> Float[Tensor, " t"]:
        """Return -log p(target) in float32, zero where the target is IGNORE.

        The T x V logits are never in memory all at once.
        """
        if self.cluster_weight is None:
            return _losses(hidden, weight, self._bias(weight), target)
        if is_fused(hidden):
            return self._fused_losses(hidden, weight, target)
        (head, head_bias), *tails = self._clusters(weight)
        cluster, first = self._head_targets(target)
        losses = _losses(hidden, head, head_bias, first)
        # One synchronisation with the host, then every token goes to its cluster.
        counts = torch.bincount(cluster, minlength=len(self.sizes)).tolist()
        members = torch.split(cluster.argsort(stable=True), counts)[1:]
        start = self.sizes[0]
        for (tail, tail_bias), index in zip(tails, members, strict=True):
            if len(index):
                within = _losses(hidden[index], tail, tail_bias, target[index] - start)
                losses = losses.index_add(0, index, within)
            start += len(tail)
        return losses

    def total_loss(
        self, hidden: Float[Tensor, "t e"], weight: Float[Tensor, "v e"], target: Int[Tensor, " t"]
    ) -> Float[Tensor, ""]:
        """Return the sum of `losses`. For training: a plain softmax computes its gradients with the loss."""
        if self.cluster_weight is None:
            return linear_cross_entropy(hidden, weight, self._bias(weight), target, IGNORE)
        return self.losses(hidden, weight, target).sum()

    def _bias(self, weight: Tensor) -> Tensor | None:
        """Return the bias of a plain softmax, -inf for the rows of W behind the vocabulary."""
        behind = len(weight) - self.sizes[0]
        if not behind:
            return self.bias
        bias = weight.new_zeros(self.sizes[0]) if self.bias is None else self.bias
        return pad(bias, (0, behind), value=-torch.inf)

    def _fused_losses(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        from mgk.ops.triton.cross_entropy import losses_of_rows  # imported only where it is used

        if autocasts(hidden):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        (head, head_bias), *tails = self._clusters(weight)
        cluster, first = self._head_targets(target)
        losses = losses_of_rows(hidden, head, head_bias, first)
        order = cluster.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = (cluster[:, None] <= torch.arange(len(self.sizes), device=cluster.device)).sum(0).int()
        rows, wanted, start = reorder(hidden, order, place), target[order], self.sizes[0]
        within = torch.zeros_like(losses)
        for number, (tail, tail_bias) in enumerate(tails):
            within = within + losses_of_rows(rows, tail, tail_bias, wanted - start, ends[number : number + 2])
            start += len(tail)
        return losses + reorder(within, place, order)

    def _head_targets(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cluster of each target (0 is the head, also for IGNORE), and the target in the head's softmax."""
        cluster = torch.bucketize(target.contiguous(), self.edges, right=True)
        return cluster, torch.where(cluster > 0, cluster + (self.sizes[0] - 1), target)

    def _clusters(self, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return weights and biases of the head with the clusters, then of each tail.

        One split instead of several slices has one backward pass over V rows.
        """
        assert self.cluster_weight is not None
        assert self.cluster_bias is not None
        assert self.bias is not None
        weights, biases = list(torch.split(weight, self.sizes)), list(torch.split(self.bias, self.sizes))
        weights[0] = torch.cat((weights[0], self.cluster_weight.to(weight.dtype)))
        biases[0] = torch.cat((biases[0], self.cluster_bias))
        return list(zip(weights, biases, strict=True))


def is_fused(hidden: Tensor) -> bool:
    """Whether a kernel computes the losses of an adaptive softmax, without storing logits."""
    supported = HAS_TRITON and dtype_name(hidden.dtype) in TRITON_DTYPES and hidden.shape[1] <= FUSED_WIDTH
    return hidden.is_cuda and supported


def _losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    rows = max(1, MAX_LOGITS // len(weight))
    if len(hidden) <= rows:
        return _token_losses(hidden, weight, bias, target)
    parts = [
        checkpoint(_token_losses, part, weight, bias, wanted, use_reentrant=False, preserve_rng_state=False)
        for part, wanted in zip(torch.split(hidden, rows), torch.split(target, rows), strict=True)
    ]
    return torch.cat(parts)


def _token_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    return cross_entropy(linear(hidden, weight, bias).float(), target, ignore_index=IGNORE, reduction="none")
