"""Compare a vision transformer with mixture keys to one with softmax attention, on images of shapes in noise.

python examples/vision.py        (for Fashion-MNIST: mgk compare fashion-mnist --attentions softmax:4 smgk:2)
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import mgk.hf

SIDE, CLASSES = 16, 4


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of a horizontal line, a vertical line, a cross or a square at a random place in noise."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 1, SIDE, SIDE, generator=draw) * 0.5
    labels = torch.randint(CLASSES, (count,), generator=draw)
    for image, label, (row, column) in zip(
        pixels[:, 0], labels.tolist(), torch.randint(SIDE - 6, (count, 2), generator=draw).tolist(), strict=True
    ):
        part = image[row : row + 6, column : column + 6]
        if label in (0, 2):
            part[2:4] += 1.5
        if label in (1, 2):
            part[:, 2:4] += 1.5
        if label == 3:
            part[[0, 5]] += 1.5
            part[:, [0, 5]] += 1.5
    return pixels, labels


def main(steps: int = 200) -> dict[str, float]:
    pixels, labels = images(1024, 0)
    test_pixels, test_labels = images(512, 1)
    batches = [{"pixel_values": p, "labels": y} for p, y in zip(pixels.split(64), labels.split(64), strict=True)]
    found = {}
    for attention, heads in (("softmax", 4), ("smgk", 2)):
        torch.manual_seed(0)
        model = mgk.hf.MGKForImageClassification(
            mgk.hf.MGKConfig(
                kind="vision",
                attention=attention,
                heads=heads,
                head_dim=16,
                width=64,
                image_size=SIDE,
                patch_size=4,
                channels=1,
                num_labels=CLASSES,
                dropout=0.0,
                attention_dropout=0.0,
            )
        )
        mgk.hf.finetune(model, batches, steps=steps, lr=2e-3)
        with torch.no_grad():
            found[attention] = float((model.eval()(test_pixels).logits.argmax(-1) == test_labels).float().mean())
        print(f"{attention}, {heads} heads, {model.num_parameters():,} parameters: accuracy {found[attention]:.3f}")
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
