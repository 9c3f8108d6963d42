"""The number of ranks and machines, and how ranks are started. `auto` depends on the machine or the job."""

import os

import pytest
import torch

from lcfl.distributed import placement as module
from lcfl.distributed.placement import Placement, resolve_placement

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}
SLURM = {"SLURM_NTASKS": "6", "SLURM_PROCID": "0", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}


@pytest.fixture
def started(monkeypatch):
    """``started(environment)`` sets the environment as if torchrun, SLURM or neither had started this process."""

    def call(environment):
        for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM", "LOCAL_", "GROUP_"))]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    call({})
    return call


@pytest.mark.parametrize(("cores", "most", "expected"), [(8, 100, 8), (8, 3, 3), (1, 100, 1), (8, 1, 1)])
def test_auto_is_one_rank_per_core_and_at_most_clients_per_round(started, monkeypatch, cores, most, expected):
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    strategy = "ddp_fork" if expected > 1 else "auto"
    assert resolve_placement("cpu", "auto", 1, "auto", most) == Placement(expected, 1, strategy)


@pytest.mark.parametrize(("gpus", "expected"), [(0, 1), (1, 1), (4, 4), (9, 5)])
def test_auto_on_cuda_is_one_rank_per_gpu(started, monkeypatch, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert resolve_placement("cuda", "auto", 1, "auto", 5).devices == expected


@pytest.mark.parametrize(("strategy", "expected"), [("auto", 1), ("ddp_fork", 1), ("ddp_spawn", 8), ("ddp", 8)])
def test_auto_is_one_rank_if_forking_is_not_safe(started, monkeypatch, strategy, expected):
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    monkeypatch.setattr(module.sys, "platform", "darwin")
    assert resolve_placement("cpu", "auto", 1, strategy, 100).devices == expected


@pytest.mark.parametrize(
    ("devices", "num_nodes", "strategy", "expected"),
    [
        (1, 1, "auto", Placement(1, 1, "auto")),
        (1, 1, "ddp_spawn", Placement(1, 1, "auto")),
        (3, 1, "auto", Placement(3, 1, "ddp_fork")),
        (3, 1, "ddp_spawn", Placement(3, 1, "ddp_spawn")),
        (2, 1, "ddp", Placement(2, 1, "ddp")),
        ([5], 1, "auto", Placement([5], 1, "auto")),
        ([5, 7], 1, "auto", Placement([5, 7], 1, "ddp_fork")),
        ([3, 3], 1, "auto", Placement([3, 3], 1, "ddp_fork")),
    ],
)
def test_numbers_and_lists_are_used_unchanged(started, devices, num_nodes, strategy, expected):
    assert resolve_placement("cuda", devices, num_nodes, strategy, most=2) == expected


@pytest.mark.parametrize(("strategy", "start"), [("ddp_fork", "fork"), ("ddp_spawn", "spawn"), ("ddp", "popen")])
@pytest.mark.parametrize(
    ("devices", "named", "gpus"), [(2, 2, None), ([7, 5], [5, 7], [7, 5]), ([3, 3, 1], [1, 3], [3, 3, 1])]
)
def test_ranks_on_gpus_talk_over_gloo_and_may_share_one(strategy, start, devices, named, gpus):
    arguments = Placement(devices, 1, strategy).fabric_arguments("cuda")
    made = arguments.pop("strategy")
    assert arguments == {"accelerator": "cuda", "devices": named, "num_nodes": 1}
    assert (made.process_group_backend, made._start_method) == ("gloo", start)
    assert made.parallel_devices == (gpus and [torch.device("cuda", number) for number in gpus])


@pytest.mark.parametrize(
    ("accelerator", "placement"), [("cpu", Placement(2, 1, "ddp_fork")), ("cuda", Placement([5], 1, "auto"))]
)
def test_fabric_makes_the_strategy_of_one_gpu_and_of_cpus(accelerator, placement):
    expected = {"accelerator": accelerator} | vars(placement)
    assert placement.fabric_arguments(accelerator) == expected


@pytest.mark.parametrize(("devices", "num_nodes"), [("two", 1), ("2", 1), (0, 1), (-1, 1), (2, 0)])
def test_an_invalid_number_of_ranks_is_an_error(started, devices, num_nodes):
    with pytest.raises(ValueError, match=f"got .*{devices!r}".replace("[", r"\[")):
        resolve_placement("cpu", devices, num_nodes, "auto", most=5)


def test_too_many_ranks_are_an_error(started):
    with pytest.raises(ValueError, match=r"trainer.devices: got 4611686018427387904; at most 1024 processes"):
        resolve_placement("cpu", 2**62, 1, "auto", most=5)


def test_an_empty_list_of_gpus_is_an_error(started):
    with pytest.raises(ValueError, match=r"got devices=\[\]"):
        resolve_placement("cuda", [], 1, "auto", most=5)


def test_a_list_of_gpus_is_an_error_on_a_cpu(started):
    with pytest.raises(ValueError, match=r"trainer.devices: got \[0, 1\] on a CPU; a list names GPUs"):
        resolve_placement("cpu", [0, 1], 1, "auto", most=5)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, Placement(4, 2, "ddp")),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}, Placement(1, 1, "auto")),
        (SLURM, Placement(3, 2, "ddp")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, Placement(1, 1, "auto")),
    ],
)
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_under_torchrun_and_slurm_auto_is_the_number_of_started_ranks(started, environment, expected, strategy):
    started(environment)
    assert resolve_placement("cpu", "auto", 1, strategy, most=1) == expected
    assert resolve_placement("cpu", expected.devices, expected.num_nodes, strategy, most=1) == expected


def test_several_machines_need_torchrun_or_slurm(started):
    with pytest.raises(ValueError, match=r"trainer.num_nodes: got 2, but nothing has started .* with torchrun"):
        resolve_placement("cpu", 1, 2, "auto", most=5)


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM])
@pytest.mark.parametrize(
    ("devices", "num_nodes", "strategy", "message"),
    [
        (7, 1, "auto", r"trainer\.devices: got 7, but this job was started with [34]: use auto"),
        ([0, 1], 1, "auto", r"trainer\.devices: got \[0, 1\]"),
        ("auto", 5, "auto", r"trainer\.num_nodes: got 5, but this job was started with 2"),
        ("auto", 1, "ddp_fork", r"trainer\.strategy: got ddp_fork, but the ranks are already started"),
        ("auto", 1, "ddp_spawn", r"trainer\.strategy: got ddp_spawn"),
    ],
)
def test_settings_that_disagree_with_the_started_job_are_an_error(
    started, environment, devices, num_nodes, strategy, message
):
    started(environment)
    with pytest.raises(ValueError, match=message):
        resolve_placement("cpu", devices, num_nodes, strategy, most=100)


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_shell_inside_slurm_starts_no_ranks(started, name):
    started(SLURM | {"SLURM_JOB_NAME": name})
    assert resolve_placement("cpu", 2, 1, "auto", most=100) == Placement(2, 1, "ddp_fork")


def test_more_processes_than_cores_give_a_warning(started, monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    with pytest.warns(UserWarning, match=r"trainer\.devices: got 64, but only 2 cores can be used"):
        assert resolve_placement("cpu", 64, 1, "auto", 100).devices == 64
