"""The number of ranks, and how they are started."""

import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.fabric.strategies.ddp import DDPStrategy

from lcfl.core.cores import usable_cores

__all__ = ["STRATEGIES", "Placement", "device_type", "resolve_placement"]

STRATEGIES = ("auto", "ddp", "ddp_fork", "ddp_spawn")
START_METHODS: dict[str, Literal["popen", "fork", "spawn"]] = {"ddp": "popen", "ddp_fork": "fork", "ddp_spawn": "spawn"}
MOST_RANKS = 1024


@dataclass(frozen=True)
class Placement:
    """Ranks per machine, or the GPU of each rank, the number of machines, and how the ranks are started."""

    devices: int | list[int]
    num_nodes: int
    strategy: str

    def fabric_arguments(self, accelerator: str) -> dict[str, Any]:
        """Returns what Fabric is configured with.

        Ranks exchange messages over gloo, also on GPUs: models cross between ranks on the CPU, and NCCL refuses ranks
        that share a GPU.
        """
        arguments = {"accelerator": accelerator, "devices": self.devices, "num_nodes": self.num_nodes}
        if accelerator == "cpu" or self.strategy == "auto":
            return arguments | {"strategy": self.strategy}
        gpus = None
        if isinstance(self.devices, list):
            gpus = [torch.device("cuda", number) for number in self.devices]
            arguments["devices"] = sorted(set(self.devices))  # Fabric refuses a GPU that is named twice
        start = START_METHODS[self.strategy]
        strategy = DDPStrategy(parallel_devices=gpus, process_group_backend="gloo", start_method=start)
        return arguments | {"strategy": strategy}


def device_type(accelerator: str) -> Literal["cpu", "cuda"]:
    """Returns the type of the device: for ``auto``, CUDA if there is a GPU. Fabric may choose another type."""
    is_cuda = torch.cuda.is_available() if accelerator == "auto" else accelerator in ("cuda", "gpu")
    return "cuda" if is_cuda else "cpu"


def resolve_placement(
    accelerator: str, devices: int | list[int] | str, num_nodes: int, strategy: str, most: int
) -> Placement:
    """Resolves ``auto``: to the ranks in the environment under torchrun or SLURM, else to one rank per core or GPU.

    Args:
        accelerator: ``cpu`` or ``cuda``, already resolved.
        devices: a number, the GPU of each rank, or ``auto``.
        num_nodes: number of machines.
        strategy: one of `STRATEGIES`.
        most: the largest number of ranks that ``auto`` starts: clients per round.

    Raises:
        ValueError: if the settings and the environment disagree.
    """
    started = _started_ranks()
    if started is not None:
        local, nodes = started
        # num_nodes has no "auto", so its default of 1 stands for it.
        for name, got, actual, free in (("devices", devices, local, "auto"), ("num_nodes", num_nodes, nodes, 1)):
            if got not in (free, actual):
                raise ValueError(f"trainer.{name}: got {got}, but this job was started with {actual}: use auto.")
        if strategy not in ("auto", "ddp"):
            raise ValueError(f"trainer.strategy: got {strategy}, but the ranks are already started: use auto or ddp.")
        return Placement(local, nodes, "ddp" if local * nodes > 1 else "auto")
    if num_nodes > 1:
        raise ValueError(
            f"trainer.num_nodes: got {num_nodes}, but nothing has started the ranks of other machines: start the same "
            "command on every machine with torchrun, or let SLURM do it, and leave num_nodes as it is."
        )
    if devices == "auto":
        can_fork = sys.platform == "linux" or strategy in ("ddp", "ddp_spawn")
        available = usable_cores() if accelerator == "cpu" else torch.cuda.device_count()
        devices = max(1, min(available, most)) if can_fork else 1
    if accelerator == "cpu" and isinstance(devices, list):
        raise ValueError(
            f"trainer.devices: got {devices} on a CPU; a list names GPUs. Give the number of processes, or auto."
        )
    if isinstance(devices, str):
        raise ValueError(f"trainer.devices: got {devices!r}; allowed are a number, a list of GPUs or auto.")
    num_ranks = (devices if isinstance(devices, int) else len(devices)) * num_nodes
    if num_ranks < 1:
        raise ValueError(f"trainer: got devices={devices}, num_nodes={num_nodes}; at least one of each is needed.")
    if num_ranks > MOST_RANKS:
        raise ValueError(f"trainer.devices: got {devices}; at most {MOST_RANKS} processes can be started on a machine.")
    if accelerator == "cpu" and num_ranks > usable_cores():
        warnings.warn(
            f"trainer.devices: got {devices}, but only {usable_cores()} cores can be used; more processes than cores "
            "are slower. Leave devices at auto.",
            stacklevel=2,
        )
    if num_ranks == 1:
        return Placement(devices, 1, "auto")
    return Placement(devices, 1, "ddp_fork" if strategy == "auto" else strategy)


def _started_ranks() -> tuple[int, int] | None:
    """Returns ranks per machine and machines if torchrun or SLURM has started this process, else None."""
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" in environ:
        return int(environ["LOCAL_WORLD_SIZE"]), int(environ["GROUP_WORLD_SIZE"])
    if (
        "SLURM_NTASKS" in environ
        and "SLURM_PROCID" in environ
        and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    ):
        nodes = int(environ.get("SLURM_NNODES", "1"))
        return int(environ["SLURM_NTASKS"]) // nodes, nodes
    return None
