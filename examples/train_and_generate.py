"""Train a small language model on the bytes of a text and generate from it, with a cache of half the size.

python examples/train_and_generate.py [STEPS [FILE]]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import mgk.hf
from mgk.hf.tokenizer import byte_tokenizer

TEXT = Path(__file__).parent.parent / "LICENSE"
LENGTH, BATCH = 64, 16


def main(steps: int = 400, path: Path = TEXT) -> str:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(shift=0)
    tokens = torch.tensor(tokenizer(Path(path).read_text())["input_ids"])
    model = mgk.hf.MGKForCausalLM(
        mgk.hf.MGKConfig(
            kind="language",
            attention="smgk",
            heads=2,
            head_dim=32,
            layers=2,
            width=128,
            qk_norm=True,
            hidden=256,
            activation="swiglu",
            mlp_bias=False,
            norm="pre",
            norm_type="rms",
            vocabulary=256,
            cutoffs=(),
            output_bias=False,
            positions="rotary",
            dropout=0.0,
        )
    )

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            starts = torch.randint(len(tokens) - LENGTH, (BATCH,)).tolist()
            rows = torch.stack([tokens[start : start + LENGTH] for start in starts])
            yield {"input_ids": rows, "labels": rows}  # the model shifts the labels

    losses = mgk.hf.finetune(model, batches(), steps=steps, lr=2e-3)
    print(f"{losses[0]:.2f} -> {losses[-1]:.2f} nats per byte after {steps} steps")

    prompt = tokenizer("The Licens", return_tensors="pt", return_token_type_ids=False)
    written = model.eval().generate(
        **prompt, max_new_tokens=80, do_sample=True, top_p=0.9, pad_token_id=0, return_dict_in_generate=True
    )
    text = tokenizer.decode(written.sequences[0])
    print(text)
    print(f"cache: {written.past_key_values.bytes:,} bytes; softmax with 4 heads needs twice that")
    return text


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *map(Path, sys.argv[2:3]))
