"""The operator in a model written by hand, without a module of mgk: it learns to copy what stands after a mark.

python examples/operator_alone.py
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import mgk

HEADS, WIDTH, COMPONENTS, TOKENS, LENGTH = 2, 32, 2, 12, 16


class Model(nn.Module):
    """One layer: sMGK attention from the last position to all, then the token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.before = nn.Embedding(TOKENS, WIDTH)  # of the token before each
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.shift = nn.Parameter(torch.randn(HEADS, COMPONENTS, WIDTH // HEADS))
        self.log_prior = nn.Parameter(torch.zeros(HEADS, COMPONENTS))
        self.output = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.before(tokens.roll(1, 1))
        heads = self.projections(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (3,B,H,N,D)
        query, key, value = heads
        attended = mgk.smgk_attention(query[:, :, -1:], key, self.shift, value, self.log_prior)
        return self.output(attended.transpose(1, 2).flatten(2))[:, 0]  # type: ignore[no-any-return]


def main(steps: int = 400) -> float:
    torch.manual_seed(0)
    model = Model()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps):
        tokens = torch.randint(1, TOKENS, (64, LENGTH))
        place = torch.randint(LENGTH - 2, (64,))
        tokens[torch.arange(64), place] = 0  # the mark
        logits, wanted = model(tokens), tokens[torch.arange(64), place + 1]
        loss = nn.functional.cross_entropy(logits, wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 100 == 99 or step == steps - 1:
            print(
                f"step {step + 1:4}  loss {loss.item():.3f}  right {(logits.argmax(-1) == wanted).float().mean():.2f}"
            )
    return loss.item()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
