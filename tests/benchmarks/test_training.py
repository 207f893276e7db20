"""The benchmark of whole training steps: its models train, and its ratios are to the baseline of the same group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import training
from benchmarks.training_models import SIZES, PlainTransformer
from benchmarks.training_worker import Measured, Row, kind_of


@pytest.mark.parametrize("method", ["plain", "softmax:2", "smgk:1", "mgk:1:hard"])
@pytest.mark.parametrize("size", ["smoke", "smoke-lra"])
def test_every_kind_of_model_is_built_checked_and_timed(size: str, method: str) -> None:
    measured = Measured(Row(size, method, 16, compiles=False), "cpu")
    found = measured.prepare()
    assert found["parameters"] > 0
    assert measured.time("steps")["milliseconds"] > 0


def test_a_wrong_loss_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PlainTransformer.forward
    monkeypatch.setattr(PlainTransformer, "forward", lambda *inputs: 2 * forward(*inputs))
    with pytest.raises(RuntimeError, match="a wrong result is not timed"):
        Measured(Row("smoke", "plain", 16, compiles=False), "cpu").prepare()


def test_flops_are_six_for_each_weight_and_those_of_the_pairs() -> None:
    size, length = SIZES["gpt2"], 1024
    with torch.device("meta"):
        model = PlainTransformer(size, length)
    weights = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear))
    pairs = 12 * size.layers * size.heads * size.head_dim * length / 2
    expected = 6 * (weights + size.vocabulary * size.width) + pairs
    assert size.flops("softmax", size.heads, length) == expected
    half = size.flops("smgk", size.heads // 2, length)
    assert half < size.flops("mgk", size.heads // 2, length) < expected


def test_ratios_are_to_the_baseline_of_the_group() -> None:
    rows: list[dict[str, Any]] = [
        {**vars(Row("gpt2", "plain", 1024)), "steps": {"milliseconds": 60.0}, "peak_gib": 10.0},
        {**vars(Row("gpt2", "smgk:6", 1024)), "steps": {"milliseconds": 50.0}, "peak_gib": 9.0},
        {**vars(Row("gpt2", "mgk:6", 1024)), "error": "out of time"},
    ]
    found = training.rated(rows)
    assert found[1]["steps"]["speed"] == 1.2
    assert found[1]["memory"] == 0.9
    assert found[0]["steps"]["tokens_per_second"] == 32_768 / 0.060
    assert "out of time" in training.table(found)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"), ("key_kernel", "attention"),
        ("triton_poi_fused_gelu_view_8", "fused by torch.compile"), ("gradient_kernel", "loss"),
        ("triton_red_fused__log_softmax_prepare_softmax_online_17", "loss"), ("Memset (Device)", "copies"),
    ],
)  # fmt: skip
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind
