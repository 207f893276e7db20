"""Tokens out of a language model: a softmax over the vocabulary, tied to the embedding, plain or adaptive.

T positions, E width of the model, V tokens, C clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from mgk.ops import arguments as check

if TYPE_CHECKING:
    from jaxtyping import Float, Int

IGNORE = -100  # a target that is not one, as in torch's cross-entropy
MOST_LOGITS = 1 << 26  # held at once: 256 MB in float32


class TiedSoftmax(nn.Module):
    """log p(v) = log softmax(W h + bias)[v], where W (V,E) is the embedding, passed in.

    With cutoffs it is adaptive (Grave et al. 2017, all clusters of full width): tokens below the first cutoff share one
    softmax with the clusters, and a token of cluster c has log p(c) + log p(v | c). The weights of the clusters' tails
    are used only for the targets in them, so `losses` reads on the host how many these are: it cannot be captured in a
    CUDA graph, and it is `capturable` only without cutoffs.

    Args:
        vocabulary: V.
        width: E.
        cutoffs: first tokens of the clusters, increasing; tokens are numbered by falling frequency. None: plain.
    """

    edges: Tensor

    def __init__(self, vocabulary: int, width: int, cutoffs: Sequence[int] = ()) -> None:
        super().__init__()
        check.check_count("vocabulary", vocabulary)
        starts = [cutoff for cutoff in cutoffs if cutoff < vocabulary]
        ends = [*starts, vocabulary]
        self.sizes = [stop - start for start, stop in pairwise([0, *ends])]
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.cluster_weight = nn.Parameter(torch.empty(len(starts), width)) if starts else None
        self.cluster_bias = nn.Parameter(torch.zeros(len(starts))) if starts else None
        self.register_buffer("edges", torch.tensor(starts, dtype=torch.int64), persistent=False)
        if self.cluster_weight is not None:
            nn.init.normal_(self.cluster_weight, std=0.02)

    @property
    def capturable(self) -> bool:
        return self.cluster_weight is None

    def forward(self, hidden: Float[Tensor, "... e"], weight: Float[Tensor, "v e"]) -> Float[Tensor, "... v"]:
        """Logits over the vocabulary in float32; those of an adaptive softmax are log-probabilities."""
        if self.cluster_weight is None:
            return linear(hidden, weight, self.bias).float()
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
        """-log p(target) in float32, zero where the target is IGNORE, without all T x V logits in memory at once."""
        if self.cluster_weight is None:
            return _losses(hidden, weight, self.bias, target)
        (head, head_bias), *tails = self._clusters(weight)
        cluster = torch.bucketize(target.contiguous(), self.edges, right=True)  # 0 is the head, and IGNORE too
        first = torch.where(cluster > 0, cluster + (self.sizes[0] - 1), target)
        losses = _losses(hidden, head, head_bias, first)
        # One look at the numbers, and then every token goes to its cluster.
        counts = torch.bincount(cluster, minlength=len(self.sizes)).tolist()
        members = torch.split(cluster.argsort(stable=True), counts)[1:]
        start = self.sizes[0]
        for (tail, tail_bias), index in zip(tails, members, strict=True):
            if len(index):
                within = _losses(hidden[index], tail, tail_bias, target[index] - start)
                losses = losses.index_add(0, index, within)
            start += len(tail)
        return losses

    def _clusters(self, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases: the head with the clusters, then each tail. One split has one backward over V rows."""
        assert self.cluster_weight is not None  # the caller has looked
        assert self.cluster_bias is not None
        weights, biases = list(torch.split(weight, self.sizes)), list(torch.split(self.bias, self.sizes))
        weights[0] = torch.cat((weights[0], self.cluster_weight))
        biases[0] = torch.cat((biases[0], self.cluster_bias))
        return list(zip(weights, biases, strict=True))


def _losses(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    rows = max(1, MOST_LOGITS // len(weight))
    if len(hidden) <= rows:
        return _token_losses(hidden, weight, bias, target)
    parts = [
        checkpoint(_token_losses, part, weight, bias, wanted, use_reentrant=False, preserve_rng_state=False)
        for part, wanted in zip(torch.split(hidden, rows), torch.split(target, rows), strict=True)
    ]
    return torch.cat(parts)


def _token_losses(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(linear(hidden, weight, bias).float(), target, ignore_index=IGNORE, reduction="none")
