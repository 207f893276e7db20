"""Devices and processes, through Lightning Fabric: one process, or those started by torchrun or SLURM."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from mgk.train.config import Config

if TYPE_CHECKING:
    from lightning_fabric import Fabric


_attempts = itertools.count()
_connected = False  # whether `connect` created the process group


def launch(config: Config) -> Fabric:
    """Create and launch the Fabric of a run."""
    fabric_class, strategies = library()
    processes, nodes = topology()
    world = processes * nodes
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ValueError("device: expected a machine with a CUDA GPU for cuda, found none")
    if config.strategy != "auto" and world == 1:
        raise ValueError(f"strategy: {config.strategy} needs several processes; start with torchrun (docs/training.md)")
    if config.data.batch % (world * config.accumulate):
        raise ValueError(
            f"data.batch: expected a multiple of processes x accumulate = {world} x {config.accumulate}, "
            f"got {config.data.batch}"
        )
    strategy: Any = "auto"
    if config.strategy == "fsdp":
        strategy = strategies.ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1)
    elif world > 1:
        strategy = strategies.DDPStrategy(gradient_as_bucket_view=True)
    if "TORCHELASTIC_RUN_ID" in os.environ and world > 1:
        connect("nccl" if cuda else "gloo")
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    fabric: Fabric = fabric_class(
        accelerator="cuda" if cuda else "cpu",
        devices=processes,
        num_nodes=nodes,
        strategy=strategy,
        precision=config.precision if cuda else "32-true",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about ports and devices, which torchrun or SLURM has set
        fabric.launch()
    return fabric


def connect(backend: str) -> None:
    """Create the process group of torchrun's processes, which Fabric then uses.

    torchrun keeps one store over restarts, with the addresses of processes that have died. So each process group gets a
    prefix of its own in the store.
    """
    global _connected
    if dist.is_initialized():
        return
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(rendezvous("env://", timeout=default_pg_timeout))
    name = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(_attempts)}"
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=world)
    _connected = True


def leave() -> None:
    """Destroy the process group: at process exit its threads might outlive others that they need."""
    global _connected
    if _connected:
        dist.barrier()
        gc.collect()
        dist.destroy_process_group()
        _connected = False


def library() -> tuple[Any, Any]:
    """Import Fabric, which comes alone or as a part of `lightning`."""
    name = "lightning_fabric" if importlib.util.find_spec("lightning_fabric") else "lightning.fabric"
    return importlib.import_module(name).Fabric, importlib.import_module(f"{name}.strategies")


def topology() -> tuple[int, int]:
    """Number of processes on this node, and of nodes."""
    environment = os.environ
    if "LOCAL_WORLD_SIZE" in environment:  # torchrun
        local = int(environment["LOCAL_WORLD_SIZE"])
        return local, int(environment["WORLD_SIZE"]) // local
    if "SLURM_PROCID" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        tasks, nodes = int(environment["SLURM_NTASKS"]), int(environment.get("SLURM_NNODES", 1))
        return tasks // nodes, nodes
    return 1, 1


def shard(module: nn.Module, mesh: Any) -> nn.Module:
    """Shard every layer of a stack separately, so that a device gathers one layer at a time, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(module, mesh=mesh["data_parallel"])
    return module
