"""The models that `benchmarks.training` compares: written in plain PyTorch, from Transformers, and ours.

Each has the same interface, `Trained`: a function that makes one training step on a batch, and facts about the model.

B batch, H heads, N positions, D width of a head, E width of the model, V vocabulary.
"""
# mypy: disallow-untyped-calls=False
# Transformers is typed in part.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from mgk.models import ClassifierConfig, LanguageModelConfig
from mgk.train.config import Config, DataConfig, OptimiserConfig
from mgk.train.fabric import launch
from mgk.train.learner import Learner

Batch = dict[str, Tensor]
RATE, BETAS, CLIP = 1e-6, (0.9, 0.95), 1.0  # weights stay near the initial ones, however many steps are timed


@dataclass(frozen=True)
class Size:
    """The size of a model. `heads` are those of the softmax baseline; D is the same for all."""

    layers: int
    width: int
    heads: int
    head_dim: int
    vocabulary: int
    hidden: int
    causal: bool = True

    def parameters(self, heads: int, key_heads: int) -> int:
        """Weights of the matrix products of all layers, with this number of heads (`key_heads`: of keys)."""
        attention = (3 * heads + key_heads) * self.head_dim * self.width
        return self.layers * (attention + 2 * self.width * self.hidden)

    def flops(self, attention: str, heads: int, length: int) -> float:
        """FLOPs of a training step for each token, without recomputation: products alone, forward and backward."""
        components = 2 if attention == "mgk" else 1
        dense = self.parameters(heads, components * heads) + (self.vocabulary * self.width if self.causal else 0)
        pairs = length / 2 if self.causal else length
        return 3 * (2 * dense + self.layers * 2 * heads * self.head_dim * (components + 1) * pairs)


SIZES = {
    "gpt2": Size(12, 768, 12, 64, 50304, 3072),
    "350m": Size(24, 1024, 8, 128, 50304, 4096),
    "nano": Size(6, 512, 8, 64, 50304, 2048),
    "lra": Size(2, 64, 8, 32, 512, 128, causal=False),
    "smoke": Size(1, 32, 2, 16, 64, 64),
    "smoke-lra": Size(1, 32, 2, 16, 64, 64, causal=False),
}


@dataclass
class Trained:
    """A model with its optimiser. `step` is one update; `loss` reads the last loss."""

    step: Callable[[Batch], None]
    loss: Callable[[], float]
    parameters: int


class PlainBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, inner = size, size.heads * size.head_dim
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * inner), nn.Linear(inner, size.width)
        self.up, self.down = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = batch, length, self.size.heads, self.size.head_dim
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.size.causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class PlainTransformer(nn.Module):
    """GPT-2 (tied embeddings, no output bias), or an encoder with mean pooling, as one writes it in plain PyTorch."""

    def __init__(self, size: Size, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(length, size.width)
        self.blocks = nn.ModuleList(PlainBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.classifier = None
        if not size.causal:
            self.classifier = nn.Sequential(nn.Linear(size.width, 128), nn.ReLU(), nn.Linear(128, 2))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.classifier is not None:
            return F.cross_entropy(self.classifier(x.mean(1)), target)
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), target.flatten())


def plain(size: Size, length: int, device: str, compiled: bool, target: str = "target") -> Trained:
    model = PlainTransformer(size, length).to(device)
    return user_trained(model, lambda call, batch: call(batch["tokens"], batch[target]), device, compiled)


def hugging_face(kind: str, size: Size, length: int, device: str, compiled: bool) -> Trained:
    """GPT-2, or a Llama of the same widths (its feed-forward network has a third matrix, and is narrower for it)."""
    import transformers

    shared: dict[str, Any] = {"vocab_size": size.vocabulary, "attn_implementation": "sdpa", "use_cache": False}
    if kind == "hf-gpt2":
        config: Any = transformers.GPT2Config(
            n_embd=size.width, n_layer=size.layers, n_head=size.heads, n_positions=length, n_inner=size.hidden,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared,
        )  # fmt: skip
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=size.width, num_hidden_layers=size.layers, num_attention_heads=size.heads,
            intermediate_size=size.hidden * 2 // 3, max_position_embeddings=length, tie_word_embeddings=True, **shared,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)

    def call(step: Any, batch: Batch) -> Tensor:
        return step(input_ids=batch["tokens"], labels=batch["tokens"]).loss  # type: ignore[no-any-return]

    return user_trained(model.to(device).train(), call, device, compiled)


def user_trained(model: nn.Module, call: Callable[[Any, Batch], Tensor], device: str, compiled: bool) -> Trained:
    """A training step as a user writes it: bf16 autocast, clipping, fused AdamW."""
    cuda = device == "cuda"
    forward: Any = torch.compile(model) if compiled else model
    parameters = list(model.parameters())
    optimiser = torch.optim.AdamW(parameters, RATE, BETAS, fused=True, capturable=cuda)
    last = torch.zeros((), device=device)

    def step(batch: Batch) -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            loss = call(forward, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimiser.step()
        last.copy_(loss.detach())

    return Trained(step, lambda: float(last), sum(parameter.numel() for parameter in parameters))


def ours(attention: str, heads: int, e_step: str, size: Size, length: int, device: str, compiled: bool) -> Trained:
    """Our model, with the steps of `mgk train`."""
    shared: dict[str, Any] = {
        "attention": attention, "e_step": e_step, "heads": heads, "head_dim": size.head_dim, "layers": size.layers,
        "width": size.width, "hidden": size.hidden, "vocabulary": size.vocabulary, "max_length": length,
        "dropout": 0.0, "attention_dropout": 0.0, "norm": "pre", "activation": "gelu", "positions": "learned",
        "attention_bias": True,
    }  # fmt: skip
    model: Any = ClassifierConfig(**shared)
    if size.causal:
        model = LanguageModelConfig(**shared, cutoffs=(), output_bias=False)
    settings: dict[str, Any] = {"device": device, "compile": "on" if compiled else "off", "graphs": "off"}
    config = Config(
        "benchmark", model, DataConfig("none", batch=1), OptimiserConfig(lr=RATE, betas=BETAS, clip=CLIP, eps=1e-8),
        **settings,
    )  # fmt: skip
    learner = Learner(launch(config), config)
    number = iter(range(1 << 30))

    def loss() -> float:
        if learner.failed_at() is not None:
            raise RuntimeError("the loss or a gradient is not finite")
        return learner.read()["loss"]

    learner.objective.train()

    def step(batch: Batch) -> None:
        learner.now.fill_(next(number))
        learner.run(batch)

    return Trained(step, loss, learner.parameters)


def make(method: str, size: Size, length: int, device: str, compiled: bool) -> Trained:
    """The model of a method: "plain", "hf-gpt2", "hf-llama", or an attention, its heads and its E-step: "smgk:6"."""
    torch.manual_seed(0)
    if method == "plain":
        return plain(size, length, device, compiled, "target" if size.causal else "label")
    if method.startswith("hf"):
        return hugging_face(method, size, length, device, compiled)
    attention, heads, *e_step = method.split(":")
    return ours(attention, int(heads), e_step[0] if e_step else "soft", size, length, device, compiled)


def make_batch(size: Size, rows: int, length: int, device: str) -> Batch:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, size.vocabulary, (rows, length + 1), generator=generator).to(device)
    if size.causal:
        return {"tokens": tokens[:, :-1].contiguous(), "target": tokens[:, 1:].contiguous()}
    return {"tokens": tokens[:, :-1].contiguous(), "label": tokens[:, 0] % 2}
