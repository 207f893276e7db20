"""Train a language model whose heads and vocabulary are sharded, with FSDP2 along the other dimension of the mesh.

torchrun --nproc-per-node 4 examples/tensor_parallel.py

runs on the CPU. For GPUs write "cuda" instead of "cpu", and set the device of each process.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from mgk.models import LanguageModel, LanguageModelConfig, clip_grad_norm_, tensor_parallel

CONFIG = LanguageModelConfig(
    attention="smgk", heads=4, head_dim=16, layers=2, width=64, hidden=128, vocabulary=64, cutoffs=(), dropout=0.0
)


def main(steps: int = 30) -> float:
    world = dist.get_world_size()
    heads = 2 if world % 2 == 0 else 1  # processes that share a model
    mesh = init_device_mesh("cpu", (world // heads, heads), mesh_dim_names=("data", "tp"))
    model = tensor_parallel(LanguageModel(CONFIG), mesh["tp"])
    for layer in model.encoder.stack.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    register_fsdp_forward_method(model, "loss")  # FSDP gathers weights for `forward`, and for what is named here

    # Processes that share a model get the same samples.
    generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        start = torch.randint(64, (8, 1), generator=generator)
        tokens = (start + torch.arange(33)) % 64  # counting
        loss = model.loss({"tokens": tokens[:, :-1], "target": tokens[:, 1:]})["loss"]
        optimiser.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1:3}  loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*map(int, sys.argv[1:]))
    dist.destroy_process_group()
