"""Every recipe learns on small data, along a known curve; settings that the paper gives are those of the paper."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from mgk.models import LanguageModelConfig, build
from mgk.recipes import RECIPES, describe, recipe
from mgk.train import data as source
from mgk.train import evaluate, replace, train
from mgk.train.fabric import launch
from mgk.train.learner import Learner
from mgk.variants import MIXTURES, PROJECTED, SHIFTED, VARIANTS
from tests.recipes.common import CASES, small
from tests.train.common import losses

GOLDEN = Path(__file__).parent / "golden.json"
# Between two machines the first steps differ by rounding, which training makes grow.
TOLERANCE = (1e-4, 1e-3, 1e-2)


@pytest.mark.parametrize("name", RECIPES)
def test_it_learns_and_along_the_known_curve(name: str, tmp_path: Path) -> None:
    config = small(name, tmp_path)
    run = tmp_path / "run"
    result = train(config, run, data_root=tmp_path)
    curve = losses(run)
    assert curve[-1] < curve[0]
    if "accuracy" in result.test:
        classes = config.model.classes  # type: ignore[union-attr]
        # Four standard deviations of guessing on 50 examples above guessing.
        assert result.test["accuracy"] > 1 / classes + 4 * math.sqrt((1 / classes) * (1 - 1 / classes) / 50)
    else:
        words = source.load(config, tmp_path).manifest["facts"]["vocabulary"]
        assert result.test["perplexity"] < words / 2
    if config.kind == "language":
        measured = evaluate(run, data_root=tmp_path, device="cpu")
        assert measured["non-overlapping"]["perplexity"] == pytest.approx(result.test["perplexity"], rel=1e-5)
    golden = json.loads(GOLDEN.read_text())[name]
    for found, wanted, tolerance in zip(curve, golden, TOLERANCE, strict=False):
        assert found == pytest.approx(wanted, rel=tolerance, abs=1e-3)


def test_golden_curves_are_of_all_recipes() -> None:
    assert set(json.loads(GOLDEN.read_text())) == set(RECIPES) == set(CASES)


@pytest.mark.parametrize(
    ("name", "steps", "batch", "warmup", "every", "length", "classes"),
    [
        ("lra-listops", 5_000, 32, 1_000, 50, 2_000, 10),
        ("lra-text", 20_000, 32, 8_000, 500, 4_000, 2),
        ("lra-retrieval", 30_000, 32, 800, 300, 4_000, 2),
    ],
)
def test_long_range_arena_is_the_protocols(
    name: str, steps: int, batch: int, warmup: int, every: int, length: int, classes: int
) -> None:
    c = recipe(name)
    assert (c.steps, c.data.batch, c.optimiser.warmup, c.eval_every) == (steps, batch, warmup, every)
    assert (c.optimiser.kind, c.optimiser.lr, c.optimiser.eps, c.optimiser.weight_decay) == ("adamw", 1e-4, 1e-6, 0)
    assert (c.optimiser.clip, c.optimiser.schedule, c.precision) == (0, "onecycle", "bf16-mixed")
    m = c.model
    assert (m.layers, m.width, m.hidden, m.head_dim, m.dropout, m.attention_dropout) == (2, 64, 128, 32, 0.1, 0.1)
    assert (m.max_length, m.classes, m.pooling) == (length, classes, "mean")  # type: ignore[union-attr]


def test_the_papers_evaluation_is_an_option() -> None:
    for name in ("lra-listops", "lra-text", "lra-retrieval"):
        c = recipe(name, paper=True)
        assert c.model.pooling == "padded"  # type: ignore[union-attr]
        assert not c.data.bucket
    text = recipe("lra-text", paper=True).data
    assert (text.train, text.valid, text.test) == ("train+dev", "test", "test")
    sound = recipe("lra-text").data
    assert (sound.train, sound.valid, sound.test) == ("train", "dev", "test")
    with pytest.raises(ValueError, match="paper: expected a recipe of the Long Range Arena, got cifar10"):
        recipe("cifar10", paper=True)


def test_the_papers_evaluation_runs(tmp_path: Path) -> None:
    config = small("lra-text", tmp_path)
    paper = recipe("lra-text", paper=True)
    config = replace(
        config,
        model__pooling=paper.model.pooling,  # type: ignore[union-attr]
        data__train=paper.data.train,
        data__valid=paper.data.valid,
        data__bucket=paper.data.bucket,
        steps=12,
        eval_every=6,
    )
    result = train(config, tmp_path / "run", data_root=tmp_path)
    assert result.valid["accuracy"] == result.test["accuracy"]  # chosen on what it is measured on


def test_wikitext_103_is_the_papers() -> None:
    c = recipe("wikitext103")
    assert (c.steps, c.data.batch, c.optimiser.warmup, c.optimiser.clip) == (500_000, 96, 2_000, 0.25)
    assert (c.optimiser.kind, c.optimiser.lr, c.optimiser.schedule) == ("adam", 2.5e-4, "cosine")
    model = build(replace(c, model__attention="softmax", model__heads=8).model)
    assert sum(parameter.numel() for parameter in model.parameters()) == 44_018_394


SIZES = {"lm": (8, 6, 19.4), "lm-small": (12, 12, 124.3), "lm-medium": (8, 24, 351.3), "lm-nano-cpu": (4, 4, 1.4)}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("attention", VARIANTS)
def test_language_models_have_their_size(name: str, attention: str) -> None:
    """The weights of softmax at all heads are the size in the name; a mixture has half of them."""
    heads, layers, millions = SIZES[name]
    config = replace(recipe(name), model__attention=attention)
    halved = config.model.heads
    assert halved == heads // 2
    if attention in ("softmax", "linear"):
        config = replace(config, model__heads=heads)
    c = config.model
    assert isinstance(c, LanguageModelConfig)
    with torch.device("meta"):
        model = build(c)
    found = sum(parameter.numel() for parameter in model.parameters())
    inner, width = c.heads * c.width_of_head, c.width
    mixture = attention in MIXTURES
    attended = (4 + (attention in PROJECTED)) * width * inner + 2 * c.width_of_head  # projections and norms of heads
    free = c.width_of_head // 2 if attention in SHIFTED else 0  # entries that are not rotated
    attended += mixture * 2 * c.heads * (1 + free)  # a prior and a shift for each of the two components
    assert found == c.vocabulary * width + layers * (attended + 3 * width * c.hidden + 2 * width) + width
    if attention == "softmax":
        assert found / 1e6 == pytest.approx(millions, abs=0.1)


def test_what_decays() -> None:
    """Matrices alone: no norm, bias, shift, prior or variance; each weight is in one group."""
    fabric = launch(config := replace(recipe("lm-nano-cpu"), device="cpu", model__learn_variance=True))
    learner = Learner(fabric, replace(config, model__attention_bias=True, model__prior="sgd"))
    decaying, others = learner.optimiser.optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0)
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in (decaying, others)]
    assert sorted(groups[0] + groups[1]) == sorted(names.values())
    kinds = {name.removeprefix("encoder.").removeprefix("stack.layers.0.") for name in groups[0]}
    assert {name for name in kinds if "layers" not in name} == {
        "tokens.weight", "up.weight", "gate.weight", "down.weight", "attention.query_proj.weight",
        "attention.key_proj.weight", "attention.value_proj.weight", "attention.out_proj.weight",
    }  # fmt: skip
    learner.update(0, {name: torch.zeros(2, 8, dtype=torch.long) for name in ("tokens", "target")})
    assert decaying["lr"] == others["lr"] == learner.rate == config.optimiser.learning_rate(0, config.steps)


def test_an_unknown_recipe_is_named_with_a_guess() -> None:
    with pytest.raises(ValueError, match=r"expected one of lra-listops, .*, got 'lra-txt'; did you mean lra-text\?"):
        recipe("lra-txt")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_description(name: str) -> None:
    assert recipe(name).recipe == name
    assert len(describe(name)) > 20
