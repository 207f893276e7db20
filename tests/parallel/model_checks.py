"""Training and inference of models on several processes are those of one."""

from __future__ import annotations

import copy
import math
import re
import runpy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from mgk.models import (
    ClassifierConfig,
    build,
    context_parallel,
    shard_sequence,
    tensor_parallel,
)
from tests.parallel.common import ROOT, ROUNDED, VOCABULARY, batches, close, language_model, mesh_of, same_training
from tests.parallel.group import on

MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax", "attention_bias": True},
    "smgk": {"attention": "smgk", "learn_variance": True, "norm": "pre"},
    "mgk": {"attention": "mgk", "positions": "learned", "attention_bias": True},
    "hard": {"attention": "smgk", "e_step": "hard"},
    "rotary": {"attention": "smgk", "positions": "rotary", "recompute": True},
    "mlk": {"attention": "mlk"},
    "smlk mixing keys": {"attention": "smlk", "mixing": "keys", "prior": "uniform"},
    "em": {"attention": "smgk", "prior": "em", "means": "em", "recompute": True},
    "em by position": {"attention": "mgk", "prior": "em", "prior_positions": 16},
    "adaptive": {"attention": "smgk", "cutoffs": (10, 20)},
    "grouped": {"attention": "smgk", "num_kv_heads": 2},
    "window": {"attention": "smgk", "window": 5, "global_every": 2},
    "modern": {
        "attention": "smgk",
        "positions": "rotary",
        "norm": "pre",
        "norm_type": "rms",
        "activation": "swiglu",
        "qk_norm": True,
        "mlp_bias": False,
        "vocabulary_multiple": 8,
        "output_bias": False,
        "tie_word_embeddings": False,
    },
}


@on(2)
def check_tensor_parallel_training() -> None:
    for name, options in MODELS.items():
        torch.manual_seed(0)
        one = language_model(**options)
        many = tensor_parallel(copy.deepcopy(one), mesh_of(2))
        try:
            same_training(one, many, batches(3))
        except Exception as error:
            raise AssertionError(name) from error


@on(2, 4)
def check_context_parallel_training() -> None:
    world = dist.get_world_size()
    names = ("softmax", "smgk", "mgk", "hard", "rotary", "mlk", "smlk mixing keys", "window")
    for name in names if world == 2 else names[1::2]:
        torch.manual_seed(0)
        one = language_model(**MODELS[name])
        many, mesh = copy.deepcopy(one), mesh_of(world, names=("cp",))
        for layer in many.encoder.stack.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(many, mesh=mesh)
        register_fsdp_forward_method(many, "loss")
        context_parallel(many, mesh)
        data = batches(3, length=16)
        parts = [{name: shard_sequence(tensor, mesh) for name, tensor in batch.items()} for batch in data]
        try:
            same_training(one, many, data, parts)
        except Exception as error:
            raise AssertionError(name) from error


@on(4)
def check_tensor_parallel_with_fsdp() -> None:
    """On a mesh of two dimensions: heads along one, samples and weights along the other. M-steps too."""
    mesh = mesh_of(2, 2, names=("data", "tp"))
    for name in ("smgk", "mgk", "mlk", "em"):
        torch.manual_seed(0)
        one = language_model(**MODELS[name])
        many = tensor_parallel(copy.deepcopy(one), mesh["tp"], data_mesh=mesh["data"])
        for layer in many.encoder.stack.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(many, mesh=mesh["data"])
        register_fsdp_forward_method(many, "loss")
        data, row = batches(3), mesh["data"].get_local_rank()
        try:
            same_training(
                one, many, data, [{name: each[row : row + 1] for name, each in batch.items()} for batch in data]
            )
        except Exception as error:
            raise AssertionError(name) from error


@on(4)
def check_the_example_learns() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "tensor_parallel.py"))
    assert example["main"](steps=12) < 3.0 < math.log(64)  # what guessing costs


@on(4)
def check_tensor_parallel_with_context_parallel() -> None:
    mesh = mesh_of(2, 2, names=("cp", "tp"))
    one = language_model(**MODELS["smgk"])
    many = context_parallel(tensor_parallel(copy.deepcopy(one), mesh["tp"]), mesh["cp"])
    fully_shard(many, mesh=mesh["cp"])
    register_fsdp_forward_method(many, "loss")
    data = batches(2, length=8)
    same_training(
        one, many, data, [{name: shard_sequence(each, mesh["cp"]) for name, each in batch.items()} for batch in data]
    )


@on(2)
def check_the_snippets_of_the_page_run() -> None:
    page = (ROOT / "docs" / "parallel.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 4
    namespace: dict[str, Any] = {}
    for snippet in snippets:
        exec(re.sub(r"dist.init_process_group.*", "", snippet), namespace)


@on(2)
def check_tensor_parallel_inference() -> None:
    """Logits on every process, step by step with a cache, of padded batches; and a classifier of packed ones."""
    mesh = mesh_of(2)
    tokens, mask = torch.randint(VOCABULARY, (2, 6)), torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    for name in ("smgk", "mlk", "rotary", "adaptive"):
        one = language_model(**MODELS[name]).eval()
        many = tensor_parallel(copy.deepcopy(one), mesh)
        expected = one(tokens, mask)
        close(name, many(tokens, mask), expected, ROUNDED)
        cache = many.new_cache(2)
        for end in (4, 5, 6):
            start = cache.length
            step = many(
                tokens[:, start:end],
                mask[:, :end],
                positions=(mask.cumsum(1) - 1).clamp(min=0)[:, start:end],
                cache=cache,
            )
            close(f"{name} with a cache", step, expected[:, start:end].detach(), ROUNDED)
    one = build(ClassifierConfig(vocabulary=VOCABULARY, max_length=6, attention_dropout=0.0, dropout=0.0)).double()
    many = tensor_parallel(copy.deepcopy(one), mesh)
    packed = torch.cat((tokens[mask], torch.zeros(2, dtype=torch.long)))
    close("classifier", many(packed, mask), one(packed, mask), ROUNDED)
    close("classifier", many(tokens, mask), one(tokens, mask), ROUNDED)


@on(2)
def check_tensor_parallel_begins_as_the_first_process() -> None:
    torch.manual_seed(dist.get_rank())
    model = tensor_parallel(language_model(positions="learned", feature_map="favor", attention="mlk"), mesh_of(2))
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, DTensor):
            both = tensor.clone()
            dist.all_reduce(both)
            close(name, both / 2, tensor)
    torch.manual_seed(0)
    first = language_model(positions="learned", feature_map="favor", attention="mlk").state_dict()
    for name, tensor in model.state_dict().items():
        close(name, tensor, first[name])
