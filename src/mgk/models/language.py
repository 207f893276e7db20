"""A causal language model, for training, evaluation and generation.

B batch, N positions of this call, Nk positions so far, E width of the model, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mgk.models.config import LanguageModelConfig
from mgk.models.encoder import TokenEncoder, count_real
from mgk.nn import PagedCache, StackCache, TiedSoftmax
from mgk.nn.arguments import weight_of
from mgk.nn.documents import Documents
from mgk.nn.output import IGNORE
from mgk.ops.linear import never_waits
from mgk.variants import LINEAR

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

INITIAL_STD = 0.02


class LanguageModel(nn.Module):
    """log p(token | tokens before it).

    The initialisation is that of the Transformer-XL code, on which the paper's experiments are based: matrices are
    normal with std 0.02, biases are zero. With norm="pre" the matrices before a residual sum are smaller by
    sqrt(2 layers), as in GPT-2.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TokenEncoder(config, causal=True)
        self.dropout = nn.Dropout(config.dropout)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.width, config.embedding_rows, bias=False)
        self.output = TiedSoftmax(config.vocabulary, config.width, config.cutoffs, bias=config.output_bias)
        self._initialise()

    @property
    def output_weight(self) -> Tensor:
        """The weight of the output layer: the embedding of the tokens, or a matrix of its own."""
        return weight_of(self.encoder.tokens if self.lm_head is None else self.lm_head)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture `loss`: fixed shapes, no synchronisation with the host."""
        c = self.config
        scan = c.attention not in LINEAR or never_waits(c.width_of_head, c.max_length, c.feature_map)
        return self.output.capturable and scan

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b nk"] | None = None,
        *,
        positions: Int[Tensor, "b n"] | None = None,
        cache: StackCache | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "b n v"]:
        """Return the logits of the next token, in float32.

        Args:
            tokens: (B,N). With a cache, the tokens after those in it.
            mask: (B,Nk), True for real tokens, cached or new. Padding may be on either side.
            positions: (B,N); None numbers the real tokens.
            cache: from `new_cache`; the tokens are added to it. Such a call has no gradient.
            last: return only the logits of the last positions, (B,last,V).
        """
        return self.output(self.hidden(tokens, mask, positions, cache, last), self.output_weight)  # type: ignore[no-any-return]

    def new_cache(self, batch_size: int, capacity: int = 0) -> StackCache:
        """Return an empty cache for `forward`, with memory reserved for `capacity` positions."""
        return self.encoder.new_cache(batch_size, capacity)

    def new_paged_cache(
        self, rows: int, num_pages: int, page_size: int = 64, max_length: int | None = None
    ) -> PagedCache:
        """Return an empty cache in pages, for rows of different lengths that come and go; see `mgk.nn.PagedCache`."""
        return self.encoder.new_paged_cache(rows, num_pages, page_size, max_length)

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean loss in nats of a batch with "tokens" and "target", and the number of targets.

        A target of IGNORE (-100) does not count.
        """
        hidden, target = self.hidden(batch["tokens"], batch.get("mask")), batch["target"].long()
        count = (target != IGNORE).sum()
        total = self.output.total_loss(hidden.flatten(0, 1), self.output_weight, target.flatten())
        return {"loss": total / count.clamp(min=1), "count": count}

    def token_losses(self, batch: dict[str, Tensor], last: int | None = None) -> Float[Tensor, "b n"]:
        """Return the loss of each target in nats, or only of the `last` ones, for a sliding window."""
        hidden = self.hidden(batch["tokens"], batch.get("mask"), last=last)
        target = batch["target"][:, -hidden.shape[1] :].long()
        losses = self.output.losses(hidden.flatten(0, 1), self.output_weight, target.flatten())
        return losses.view_as(target)

    def hidden(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: StackCache | None = None,
        last: int | None = None,
        documents: Documents | None = None,
    ) -> Float[Tensor, "b n e"]:
        """Return the hidden states that the output layer reads; see `TokenEncoder.forward`."""
        if positions is None and mask is not None and self.encoder.ring is None:
            positions = count_real(mask)[:, -tokens.shape[1] :]
        x = self.encoder(tokens, mask, positions, cache, documents)
        return self.dropout(x if last is None else x[:, -last:])  # type: ignore[no-any-return]

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                writes = self.config.norm == "pre" and name.endswith(("out_proj", "down"))
                nn.init.normal_(module.weight, std=INITIAL_STD / (math.sqrt(2 * self.config.layers) if writes else 1))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
