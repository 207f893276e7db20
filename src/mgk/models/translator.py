"""An encoder-decoder with cross-attention, for translation.

B batch, Ns source positions, N target positions of this call, E width of the model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mgk.models.config import TranslatorConfig
from mgk.models.encoder import TokenEncoder, look_up, make_attention
from mgk.nn import Block, KeyValueCache, MixtureAttention, SinusoidalPositions, StateCache, TiedSoftmax
from mgk.nn.norm import make_norm
from mgk.nn.output import IGNORE
from mgk.ops import arguments as check
from mgk.ops.linear import never_waits
from mgk.variants import LINEAR

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

INITIAL_STD = 0.02
END = 0  # the token before the first and after the last of a sentence


class DecoderBlock(Block):
    """A layer with causal self-attention, attention to the source, and a feed-forward network, each with a residual.

    Args:
        attention: self-attention.
        cross: attention to the source; its `kdim` and `vdim` are the width of the source's encoding.
        hidden, dropout, activation, norm, norm_type, bias: as in `Block`.
    """

    def __init__(
        self, attention: MixtureAttention, cross: MixtureAttention, hidden: int, *, dropout: float, activation: str,
        norm: str, norm_type: str, bias: bool,
    ) -> None:  # fmt: skip
        super().__init__(
            attention, hidden, dropout=dropout, activation=activation, norm=norm, norm_type=norm_type, bias=bias
        )
        self.cross = cross
        self.cross_norm = make_norm(norm_type, attention.embed_dim)

    def decode(
        self,
        x: Float[Tensor, "b n e"],
        memory: Float[Tensor, "b ns e"],
        memory_padding: Bool[Tensor, "b ns"] | None = None,
        cache: KeyValueCache | StateCache | None = None,
    ) -> Float[Tensor, "b n e"]:
        """Apply the layer.

        Args:
            x: (B,N,E). Padding comes after the real positions, which do not see it.
            memory: the encoding of the source.
            memory_padding: (B,Ns), True where the source is padding.
            cache: from `attention.new_cache`, with the positions before x.
        """
        if self.norm == "pre":
            x = x + self.dropout(self._attend(self.attention_norm(x), None, None, cache, None))
            x = x + self.dropout(self.cross(self.cross_norm(x), memory, key_padding_mask=memory_padding)[0])
            return x + self.dropout(self._feed_forward(self.feed_forward_norm(x)))  # type: ignore[no-any-return]
        x = self.attention_norm(x + self.dropout(self._attend(x, None, None, cache, None)))
        x = self.cross_norm(x + self.dropout(self.cross(x, memory, key_padding_mask=memory_padding)[0]))
        return self.feed_forward_norm(x + self.dropout(self._feed_forward(x)))  # type: ignore[no-any-return]


class Translator(nn.Module):
    """log p(target | source): an encoder of the source, and a decoder that reads its encoding by cross-attention.

    All attentions are those of the configuration, the ones to the source too. Source and target share a vocabulary and
    its embedding, which is the weight of the output, too. A target begins after token 0 and ends with it. The
    initialisation is that of `LanguageModel`.
    """

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TokenEncoder(config)
        self.positions = SinusoidalPositions(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(_decoder_block(config) for _ in range(config.decoder_layers))
        pre = config.norm == "pre"
        self.final_norm = make_norm(config.norm_type, config.width) if pre else nn.Identity()
        self.output = TiedSoftmax(config.vocabulary, config.width, bias=False)
        self._initialise()

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture `loss`: fixed shapes, no synchronisation with the host."""
        c = self.config
        return c.attention not in LINEAR or never_waits(c.width_of_head, c.max_length, c.feature_map)

    def forward(
        self,
        source: Int[Tensor, "b ns"],
        tokens: Int[Tensor, "b n"],
        source_mask: Bool[Tensor, "b ns"] | None = None,
    ) -> Float[Tensor, "b n v"]:
        """Return the logits of the token after each target token, in float32.

        Args:
            source: (B,Ns).
            tokens: (B,N), the target so far, which begins with token 0. Padding is at the end.
            source_mask: (B,Ns), True for real tokens.
        """
        hidden = self.decode(tokens, self.encoder(source, source_mask), source_mask)
        return self.output(hidden, self.encoder.tokens.weight)  # type: ignore[no-any-return]

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean loss in nats of a batch with "source", "source_mask", "tokens" and "target", and the number
        of targets. A target of IGNORE (-100) does not count.
        """
        mask, target = batch.get("source_mask"), batch["target"].long()
        hidden = self.decode(batch["tokens"], self.encoder(batch["source"], mask), mask)
        count = (target != IGNORE).sum()
        total = self.output.total_loss(hidden.flatten(0, 1), self.encoder.tokens.weight, target.flatten())
        return {"loss": total / count.clamp(min=1), "count": count}

    def decode(
        self,
        tokens: Int[Tensor, "b n"],
        memory: Float[Tensor, "b ns e"],
        source_mask: Bool[Tensor, "b ns"] | None = None,
        caches: list[KeyValueCache | StateCache] | None = None,
    ) -> Float[Tensor, "b n e"]:
        """Return the hidden states of the target, given the encoding of the source.

        With `caches`, one of each layer, `tokens` are those after the cached ones.
        """
        start = 0 if caches is None else caches[0].length
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = look_up("tokens", self.encoder.tokens, tokens.long()) * math.sqrt(self.config.width)
        x = self.dropout(x + self.positions(positions, x.dtype))
        padding = None if source_mask is None else ~source_mask
        for number, layer in enumerate(self._blocks()):
            x = layer.decode(x, memory, padding, None if caches is None else caches[number])
        return self.dropout(self.final_norm(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def translate(
        self, source: Int[Tensor, "b ns"], source_mask: Bool[Tensor, "b ns"] | None = None, *, max_length: int = 128
    ) -> Int[Tensor, "b n"]:
        """Return the most likely token after token, without the 0 at the start; all after the 0 at the end are 0."""
        check.check_count("max_length", max_length)
        memory = self.encoder(source, source_mask)
        caches = [layer.attention.new_cache(len(source), max_length) for layer in self._blocks()]
        tokens = torch.full((len(source), 1), END, device=source.device)
        ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        found: list[Tensor] = []
        while len(found) < max_length and not bool(ended.all()):
            hidden = self.decode(tokens, memory, source_mask, caches)
            tokens = self.output(hidden, self.encoder.tokens.weight).argmax(-1).masked_fill(ended[:, None], END)
            ended |= tokens[:, 0] == END
            found.append(tokens)
        return torch.cat(found, 1)

    def _blocks(self) -> Iterator[DecoderBlock]:
        return iter(self.layers)  # type: ignore[arg-type]

    @torch.no_grad()
    def _initialise(self) -> None:
        layers = self.config.layers + self.config.decoder_layers
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                writes = self.config.norm == "pre" and name.endswith(("out_proj", "down"))
                nn.init.normal_(module.weight, std=INITIAL_STD / (math.sqrt(2 * layers) if writes else 1))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def _decoder_block(config: TranslatorConfig) -> DecoderBlock:
    return DecoderBlock(
        make_attention(config, causal=True),
        make_attention(config),
        config.hidden,
        dropout=config.dropout,
        activation=config.activation,
        norm=config.norm,
        norm_type=config.norm_type,
        bias=config.mlp_bias,
    )
