"""Train a text classifier, save it, load it with the Auto classes of Transformers and classify a text.

python examples/finetune_classifier.py          (`transformers.Trainer(model, ...)` works in place of `finetune`)
"""

from __future__ import annotations

import random
import sys
import tempfile

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import mgk.hf
from mgk.hf.tokenizer import byte_tokenizer

GOOD, BAD = ("a fine film", "great fun", "we loved it"), ("a dull mess", "an awful waste", "we left early")


def reviews(count: int) -> tuple[list[str], torch.Tensor]:
    draw = random.Random(0)
    labels = [draw.randrange(2) for _ in range(count)]
    return [", ".join(draw.choices((BAD, GOOD)[label], k=3)) for label in labels], torch.tensor(labels)


def main(steps: int = 150) -> float:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(shift=1)
    model = mgk.hf.MGKForSequenceClassification(
        mgk.hf.MGKConfig(
            attention="smgk",
            heads=2,
            width=64,
            vocabulary=257,
            max_position_embeddings=64,
            pad_token_id=0,
            id2label={0: "bad", 1: "good"},
        )
    )
    texts, labels = reviews(512)
    batches = []
    for start in range(0, len(texts), 32):
        inputs = tokenizer(texts[start : start + 32], padding=True, return_tensors="pt")
        batches.append({**inputs, "labels": labels[start : start + 32]})
    mgk.hf.finetune(model, batches[:-2], steps=steps, lr=2e-3)

    with tempfile.TemporaryDirectory() as folder:  # or on the hub: model.push_to_hub("me/reviews")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = AutoModelForSequenceClassification.from_pretrained(folder)
        reader = AutoTokenizer.from_pretrained(folder)

    with torch.no_grad():
        right = sum(int((loaded(**batch).logits.argmax(-1) == batch["labels"]).sum()) for batch in batches[-2:])
        asked = "great fun, we loved it"
        answer = loaded(**reader(asked, return_tensors="pt")).logits.argmax(-1).item()
    print(f"accuracy on held-out reviews: {right / 64:.2f}; {asked!r} is {loaded.config.id2label[answer]}")
    return right / 64


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
