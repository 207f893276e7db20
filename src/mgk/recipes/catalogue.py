"""Recipes with the settings of the paper. Where the paper's evaluation is unsound, the default differs from it;
`paper=True` restores it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from mgk.models import ClassifierConfig, LanguageModelConfig, MatcherConfig, TranslatorConfig, VisionConfig
from mgk.train.config import Config, DataConfig, OptimiserConfig, replace


def lra_listops() -> Config:
    """LRA ListOps: the value of nested MIN, MAX, MED and SM of digits, 500 to 2,000 symbols."""
    return Config(
        "lra-listops",
        ClassifierConfig(vocabulary=32, max_length=2000, classes=10),
        DataConfig("listops"),
        OptimiserConfig(warmup=1000),
        steps=5000,
        eval_every=50,
    )


def lra_text() -> Config:
    """LRA Text: IMDb reviews as bytes, positive or negative; 2,500 training reviews select the checkpoint."""
    return Config(
        "lra-text",
        ClassifierConfig(vocabulary=512, max_length=4000, classes=2),
        DataConfig("imdb"),
        OptimiserConfig(warmup=8000),
        steps=20_000,
        eval_every=500,
    )


def lra_retrieval() -> Config:
    """LRA Retrieval: whether one ACL paper cites another, as bytes; --data.name aan-rebuilt for rebuilt pairs."""
    return Config(
        "lra-retrieval",
        MatcherConfig(vocabulary=512, max_length=4000, classes=2),
        DataConfig("aan"),
        OptimiserConfig(warmup=800),
        steps=30_000,
        eval_every=300,
    )


def lra_image() -> Config:
    """LRA Image: CIFAR-10 as a sequence of 1,024 grey pixels (not in the paper; Nystromformer's settings)."""
    return Config(
        "lra-image",
        ClassifierConfig(vocabulary=512, max_length=1024, classes=10),
        DataConfig("lra-image", batch=256),
        OptimiserConfig(warmup=175),
        steps=35_000,
        eval_every=175,
    )


def wikitext103() -> Config:
    """WikiText-103: words, 16 layers, tied adaptive softmax."""
    return Config(
        "wikitext103",
        LanguageModelConfig(heads=4),
        DataConfig("wikitext-103", batch=96),
        OptimiserConfig("adam", lr=2.5e-4, eps=1e-8, clip=0.25, schedule="cosine", warmup=2000),
        steps=500_000,
        eval_every=4000,
        log_every=200,
    )


def wikitext2() -> Config:
    """WikiText-2: the model of wikitext103 on two million words (not in the paper)."""
    return replace(
        wikitext103(),
        recipe="wikitext2",
        model__vocabulary=33_278,
        model__dropout=0.2,
        data__name="wikitext-2",
        steps=8000,
        optimiser__warmup=400,
        eval_every=400,
        log_every=50,
    )


def enwiki() -> Config:
    """Long Wikipedia articles: the model of wikitext103, if WikiText-103 is not available; not comparable."""
    return replace(wikitext103(), recipe="enwiki", data__name="enwiki", steps=100_000)


def enwik8() -> Config:
    """Bytes of Wikipedia: 8 layers, a plain softmax (not in the paper)."""
    return Config(
        "enwik8",
        LanguageModelConfig(heads=4, layers=8, hidden=512, vocabulary=256, cutoffs=()),
        DataConfig("enwik8", batch=96),
        OptimiserConfig("adam", lr=1e-3, eps=1e-8, clip=0.25, schedule="cosine", warmup=500),
        steps=5000,
        eval_every=500,
        eval_batches=50,
    )


def fashion_mnist() -> Config:
    """Fashion-MNIST: a small vision transformer on 49 patches, which the paper names as future work."""
    return Config(
        "fashion-mnist",
        VisionConfig(heads=2, layers=4, image_size=28, channels=1, attention_dropout=0.0),
        DataConfig("fashion-mnist", batch=128),
        OptimiserConfig(lr=1e-3, eps=1e-8, weight_decay=0.05, clip=1.0, schedule="cosine", warmup=400),
        steps=8000,
        eval_every=400,
    )


def cifar10() -> Config:
    """CIFAR-10: a small vision transformer on 64 patches, without augmentation."""
    return Config(
        "cifar10",
        VisionConfig(heads=2, layers=6, width=128, hidden=256, attention_dropout=0.0),
        DataConfig("cifar10", batch=128),
        OptimiserConfig(lr=1e-3, eps=1e-8, weight_decay=0.05, clip=1.0, schedule="cosine", warmup=500),
        steps=15_000,
        eval_every=500,
    )


def multi30k() -> Config:
    """Multi30k: translate captions of pictures from English to German, 3 + 3 layers, 10,000 tokens for both."""
    return Config(
        "multi30k",
        TranslatorConfig(heads=4, dropout=0.3),
        DataConfig("multi30k", batch=256, pad_multiple=32),
        OptimiserConfig(
            lr=1e-3, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.01, decay="matrices", clip=1.0, schedule="cosine",
            warmup=400,
        ),
        steps=5000,
        eval_every=250,
    )  # fmt: skip


def lm() -> Config:
    """A modern language model, nano: 6 layers, 19 M weights with softmax at 8 heads; bytes of enwik8."""
    return _lm(
        "lm",
        _decoder(layers=6, width=512, hidden=1408, heads=4, vocabulary=256),
        DataConfig("enwik8", batch=32),
        lr=1e-3,
        steps=10_000,
    )


def lm_small() -> Config:
    """The language model of lm, small: 12 layers, 124 M weights with softmax at 12 heads; articles, 32,768 tokens."""
    return _lm(
        "lm-small",
        _decoder(layers=12, width=768, hidden=2560, heads=6, vocabulary=32_768),
        DataConfig("enwiki", ("bpe=32768",), batch=128),
        lr=6e-4,
        steps=20_000,
    )


def lm_medium() -> Config:
    """The language model of lm, medium: 24 layers, 350 M weights with softmax at 8 heads; articles, 32,768 tokens."""
    return _lm(
        "lm-medium",
        _decoder(layers=24, width=1024, hidden=2944, heads=4, head_dim=128, vocabulary=32_768),
        DataConfig("enwiki", ("bpe=32768",), batch=128),
        lr=3e-4,
        steps=20_000,
    )


def lm_nano_cpu() -> Config:
    """The language model of lm, for minutes on two CPU cores: 4 layers of width 128; enwik8 with 4,096 tokens."""
    return _lm(
        "lm-nano-cpu",
        _decoder(layers=4, width=128, hidden=384, heads=2, head_dim=32, vocabulary=4096, max_length=128),
        DataConfig("enwik8", ("bpe=4096",), batch=8),
        lr=3e-3,
        steps=3500,
        eval_every=500,
    )


def _decoder(
    *, layers: int, width: int, hidden: int, heads: int, vocabulary: int, head_dim: int = 64, max_length: int = 1024
) -> LanguageModelConfig:
    """The architecture of Llama and Qwen3, with half the heads that softmax would have."""
    return LanguageModelConfig(
        layers=layers,
        width=width,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        qk_norm=True,
        activation="swiglu",
        mlp_bias=False,
        norm="pre",
        norm_type="rms",
        dropout=0.0,
        vocabulary=vocabulary,
        cutoffs=(),
        output_bias=False,
        max_length=max_length,
        positions="rotary",
    )


def _lm(
    name: str, model: LanguageModelConfig, data: DataConfig, *, lr: float, steps: int, eval_every: int = 500
) -> Config:
    optimiser = OptimiserConfig(
        lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decay="matrices", clip=1.0, schedule="cosine", warmup=200
    )
    return Config(name, model, data, optimiser, steps=steps, eval_every=eval_every, eval_batches=50)


_LRA = (lra_listops, lra_text, lra_retrieval, lra_image)
_OTHERS = (
    wikitext103,
    wikitext2,
    enwiki,
    enwik8,
    lm,
    lm_small,
    lm_medium,
    lm_nano_cpu,
    multi30k,
    fashion_mnist,
    cifar10,
)
RECIPES: dict[str, Callable[[], Config]] = {f.__name__.replace("_", "-"): f for f in (*_LRA, *_OTHERS)}


def recipe(name: str, *, paper: bool = False) -> Config:
    """Return the configuration of a recipe.

    `paper` follows the authors' code where it differs from sound practice: mean pooling divides by the padded length,
    batches are drawn regardless of length, and the checkpoint of the text task is selected on its test set.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {name!r}{hint}")
    config = RECIPES[name]()
    if not paper:
        return config
    if not name.startswith("lra-"):
        raise ValueError(f"paper: expected a recipe of the Long Range Arena, got {name}")
    config = replace(config, model__pooling="padded", data__bucket=False)
    return replace(config, data__train="train+dev", data__valid="test") if name == "lra-text" else config


def describe(name: str) -> str:
    """Return one line about a recipe."""
    return " ".join((RECIPES[name].__doc__ or "").split())
