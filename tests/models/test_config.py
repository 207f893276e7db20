"""Configurations: wrong ones say what is wrong, the paper's have the paper's number of parameters."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

import pytest
from torch import nn

from mgk.models import ClassifierConfig, LanguageModelConfig, MatcherConfig, TransformerConfig, VisionConfig, build
from mgk.models import config as module
from tests.models.common import make
from tests.nn.test_parameters import AUTHORS


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_wikitext_model_has_the_papers_parameters() -> None:
    model: Any = build(LanguageModelConfig(attention="softmax"))
    assert count(model) == 44_018_394
    assert count(model.encoder.stack) == 9_480_192


@pytest.mark.parametrize("variant", AUTHORS)
@pytest.mark.parametrize(("place", "heads"), list(enumerate((1, 2, 4, 8))))
def test_retrieval_models_have_the_authors_parameters(variant: Any, place: int, heads: int) -> None:
    """But for the priors: one per component and layer there, per head too in the paper and here."""
    more = 0 if variant == "softmax" else 2 * 2 * (heads - 1)
    assert count(build(MatcherConfig(attention=variant, heads=heads))) == AUTHORS[variant][place] + more


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (ClassifierConfig, {"attention": "flash"}, ValueError, "attention: expected one of softmax, linear, mgk"),
    (ClassifierConfig, {"heads": 0}, ValueError, "heads: expected at least 1, got 0"),
    (ClassifierConfig, {"head_dim": 0}, ValueError, "head_dim: expected at least 1"),
    (ClassifierConfig, {"layers": 2.0}, TypeError, "layers: expected an integer, got float 2.0"),
    (ClassifierConfig, {"pooling": "class"}, ValueError, "pooling: expected one of mean, padded, got 'class'"),
    (ClassifierConfig, {"recompute": 1}, TypeError, "recompute: expected True or False"),
    (MatcherConfig, {"dropout": 1.0}, ValueError, "dropout: expected 0 <= dropout < 1, got 1.0"),
    (LanguageModelConfig, {"cutoffs": (5, 5)}, ValueError, r"cutoffs: expected increasing integers above 0"),
    (LanguageModelConfig, {"cutoffs": (0, 5)}, ValueError, r"cutoffs: expected increasing integers above 0"),
    (LanguageModelConfig, {"norm": None}, TypeError, "norm: expected one of pre, post"),
    (VisionConfig, {"patch_size": 5}, ValueError, "patch_size: expected a divisor of image_size = 32, got 5"),
]


@pytest.mark.parametrize(("config", "options", "error", "message"), WRONG)
def test_wrong_fields(config: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        config(**options)


def test_wrong_combinations() -> None:
    with pytest.raises(ValueError, match="prior: expected 'sgd' or 'uniform'"):
        build(ClassifierConfig(attention="softmax", prior="em"))
    with pytest.raises(ValueError, match="rotary_share: expected above 0 and at most 1, got 0"):
        make("classifier", positions="rotary", rotary_share=0)
    with pytest.raises(ValueError, match="rotary_dim: expected less than head_dim = 4 for variant 'smgk'"):
        make("classifier", positions="rotary", rotary_share=1)
    with pytest.raises(TypeError, match=r"config: expected one of ClassifierConfig, .*, got TransformerConfig"):
        build(TransformerConfig())  # type: ignore[arg-type]


def test_every_field_has_its_help() -> None:
    """The line under a field is what the command line shows."""
    classes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    assert len(classes) == 7
    for body in (node.body for node in classes):
        for field, after in pairwise(body):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(after, ast.Expr), ast.unparse(field)
                assert isinstance(after.value, ast.Constant), ast.unparse(field)
