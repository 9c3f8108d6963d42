"""Settings of a federation: the options below ``trainer`` in a YAML file."""

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from lightning.fabric.loggers.logger import Logger
from lightning.pytorch import Trainer
from lightning.pytorch.cli import SaveConfigCallback

from lcfl.callbacks import Checkpoint, Monitor, Progress
from lcfl.core.callback import Callback
from lcfl.core.validation import CheckedFields, check_choice, check_instance
from lcfl.distributed.placement import STRATEGIES, device_type
from lcfl.federation.checks import check_callbacks
from lcfl.methods.exchange import ModelKind

__all__ = ["Precision", "Settings", "in_place_of"]

Accelerator = Literal["auto", "cpu", "cuda", "gpu"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
ClientStorage = Literal["memory", "mapped"]
NO_SPLITTING = (
    " Strategies that split one model over devices (fsdp, deepspeed) are not supported: a client's model fits on one "
    "device."
)
MOST_ROUNDS = 10**7  # with more, no run would end
LONGEST_TIMEOUT = 30 * 24 * 3600.0
CLIPPING = "an optimizer that clips gradients (docs/howto/network.md); trainer.max_update_norm limits uploads"
ROUNDS = "trainer.rounds; what a client does in a round is steps or epochs of method.local_update"
IN_PLACE = {  # option of lightning.Trainer: what to set in lcfl; nothing if it is always so
    "max_epochs": ROUNDS,
    "min_epochs": ROUNDS,
    "max_steps": ROUNDS,
    "min_steps": ROUNDS,
    "max_time": "a limit from outside, as in `timeout 1h lcfl fit ...`; the run then saves a checkpoint and ends",
    "limit_train_batches": "steps of method.local_update",
    "limit_val_batches": "trainer.evaluate_clients",
    "limit_test_batches": "trainer.evaluate_clients",
    "num_sanity_val_steps": "trainer.fast_dev_run",
    "check_val_every_n_epoch": "trainer.evaluate_every",
    "val_check_interval": "trainer.evaluate_every",
    "gradient_clip_val": CLIPPING,
    "gradient_clip_algorithm": CLIPPING,
    "accumulate_grad_batches": "data.batch_size",
    "sync_batchnorm": "model.buffer_policy",
    "log_every_n_steps": "",  # every round is logged
    "deterministic": "",  # equal commands give equal bits
}
NO_COUNTERPART = "This option of lightning.Trainer has no counterpart in lcfl; leave it out."
ONLY_STEPS = " Models are exchanged and aggregated in float32; only the arithmetic of a step may be narrower."


@dataclass(eq=False)
class Settings(CheckedFields):
    """How a federation runs: rounds, clients, evaluation, processes, files.

    Args:
        rounds: total number of training rounds; a resumed run continues up to this number.
        clients_per_round: how many clients take part in a round, as a count (10) or a fraction (0.25).
        evaluate_every: number of rounds between two evaluations; 0 evaluates only at the end. The final evaluation
            goes to ``summary.json`` and belongs to no round, so interrupted and uninterrupted runs have the same rows.
        evaluate_clients: how many clients an evaluation measures, as a count (1000) or a fraction (0.1); 1.0 measures
            all. The clients are drawn once at random and stay the same.
        evaluate_models: kinds of model that every evaluation measures in addition to those that the method's paper
            reports; None measures all that the method has.
        final_models: the same for the final evaluation, `validate` and `test`, which also measure `evaluate_models`.
        client_dropout: probability that a sampled client receives the server's message and never answers.
        max_update_norm: largest L2 norm of the change of the parameters that an upload brings. An upload with a larger
            norm is refused: it is left out of the round and counted. None refuses none but those with NaN or infinity.
        client_timeout: number of seconds after which a client's work counts as hung, which ends the run and names the
            client; None waits as long as it takes. The limit is for one client. Work for several clients at once, as
            in an evaluation, may take that many times as long.
        client_store: where the clients' models are kept: in ``memory``, or in memory-``mapped`` files next to the run
            directories, for populations that do not fit into memory. A client needs space only after it has taken
            part. The files have no names, end with the run and are never read by another run.
        accelerator: type of device: ``auto``, ``cpu`` or ``cuda``.
        devices: number of processes per machine, the GPU of each process, or ``auto``. On a CPU ``auto`` starts one
            process per core, but at most one per client of a round; otherwise it uses all GPUs; under torchrun or
            SLURM it uses the processes that these started.
        num_nodes: number of machines.
        strategy: how processes are started; ``auto`` forks them.
        engine: what computes local updates: ``compiled`` (common layers on a CPU), ``stacked`` (all clients
            of a rank at once on a GPU), ``sequential`` (everything), or ``auto``. A resumed run keeps its engine.
        precision: arithmetic of a training step: ``32-true``, ``bf16-mixed``, or ``16-mixed`` on GPUs.
        logger: True for TensorBoard, False or None for no logger, or Lightning loggers. ``metrics.csv`` is always
            written.
        callbacks: callbacks to add to the default ones.
        enable_checkpointing: whether to add a `Checkpoint` if `callbacks` has none.
        enable_progress_bar: whether to add a `Progress` if `callbacks` has none.
        default_root_dir: folder that contains the run directories.
        name: name of the run; its directory is ``<default_root_dir>/<name>/version_<n>``.
        seed: seed of everything random except the partition; on the command line it is ``seed_everything``.
        fast_dev_run: whether to try everything once and keep nothing: the real configuration on random data of the same
            shape, with 2 clients, 1 round, 1 step, one evaluation, and one checkpoint that is saved and read back.

    Attributes:
        save_config: callbacks of LightningCLI that write ``config.yaml``.

    Raises:
        TypeError: for a callback or logger of another class.
        ValueError: for a setting that is not allowed; names the allowed ones.
    """

    rounds: int = 100
    clients_per_round: int | float = 1.0
    evaluate_every: int = 10
    evaluate_clients: int | float = 1.0
    evaluate_models: list[ModelKind] | None = field(default_factory=list)
    final_models: list[ModelKind] | None = None
    client_dropout: float = 0.0
    max_update_norm: float | None = None
    client_timeout: float | None = None
    client_store: ClientStorage = "memory"
    accelerator: Accelerator = "auto"
    devices: int | list[int] | str = "auto"
    num_nodes: int = 1
    strategy: str = "auto"
    engine: str = "auto"
    precision: str = "32-true"
    logger: Logger | Iterable[Logger] | bool | None = True
    callbacks: list[Callback] | Callback | None = None
    enable_checkpointing: bool = True
    enable_progress_bar: bool = True
    default_root_dir: str | Path = "logs"
    name: str = "lcfl"
    seed: int = 0
    fast_dev_run: bool = False

    def __post_init__(self) -> None:
        self._check()
        if isinstance(self.devices, Integral):
            self.devices = int(self.devices)  # Fabric refuses numpy's integers
        self.logger = _as_loggers(self.logger)
        given = _as_list(self.callbacks)
        # LightningCLI's own callback has the hooks of a Trainer; only its `setup` is of use here.
        self.save_config = [each for each in given if isinstance(each, SaveConfigCallback)]
        self.callbacks = [each for each in given if not isinstance(each, SaveConfigCallback)]
        check_callbacks(self.all_callbacks)
        self._add_default(Checkpoint, self.enable_checkpointing)
        self._add_default(Monitor, bool(self.logger))
        self._add_default(Progress, self.enable_progress_bar)
        # Checkpoints come last: they save what the other callbacks remember.
        self.callbacks.sort(key=lambda callback: isinstance(callback, Checkpoint))

    def _add_default(self, kind: type[Callback], is_wanted: bool) -> None:
        if is_wanted and not any(isinstance(callback, kind) for callback in self.all_callbacks):
            self.all_callbacks.append(kind())

    @property
    def all_callbacks(self) -> list[Callback]:
        """The callbacks with the defaults, `Checkpoint` last."""
        return cast(list[Callback], self.callbacks)

    @property
    def loggers(self) -> list[Logger] | bool:
        """The loggers as a list; True for the run's own TensorBoard, False for none."""
        return cast(list[Logger] | bool, self.logger)

    @property
    def root(self) -> Path:
        """The folder of the run directories."""
        return Path(self.default_root_dir)

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """The type of the device that `accelerator` means."""
        return device_type(self.accelerator)

    def _check(self) -> None:
        """Refuses values that are not allowed."""
        if self.rounds < 0 or self.evaluate_every < 0:
            raise ValueError(
                f"trainer: got rounds={self.rounds}, evaluate_every={self.evaluate_every}; neither may be negative."
            )
        if self.rounds > MOST_ROUNDS:
            raise ValueError(f"trainer.rounds: got {self.rounds}; at most {MOST_ROUNDS} are allowed.")
        for option in ("evaluate_models", "final_models"):
            for kind in getattr(self, option) or ():
                check_choice(f"trainer.{option}: got ", kind, get_args(ModelKind))
        if not 0 <= self.client_dropout < 1:
            raise ValueError(f"trainer.client_dropout: got {self.client_dropout}; it must lie in [0, 1).")
        if self.max_update_norm is not None and not self.max_update_norm > 0:
            raise ValueError(
                f"trainer.max_update_norm: got {self.max_update_norm}; it must be above 0, or null for no limit."
            )
        if self.client_timeout is not None and not 0 < self.client_timeout < LONGEST_TIMEOUT:
            raise ValueError(
                f"trainer.client_timeout: got {self.client_timeout}; it must be a number of seconds above 0 and below "
                f"{LONGEST_TIMEOUT:.0f} (a month), or null for no limit."
            )
        check_choice("trainer.strategy: got ", self.strategy, STRATEGIES, NO_SPLITTING)
        check_choice("trainer.precision: got ", self.precision, get_args(Precision), ONLY_STEPS)
        if self.device_type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"trainer.accelerator: got {self.accelerator}, but torch finds no GPU; use auto or cpu.")
        if self.precision == "16-mixed" and self.device_type == "cpu":
            raise ValueError("trainer.precision: got 16-mixed on a CPU, which has no fast float16; use bf16-mixed.")
        if os.path.basename(self.name) != self.name or self.name in ("", ".", ".."):
            raise ValueError(f"trainer.name: got {self.name!r}; it must be the name of one folder.")


def in_place_of(name: str) -> str:
    """Returns a sentence about what to set in place of an option of lightning.Trainer; empty for any other name."""
    if name not in IN_PLACE:
        return f" {NO_COUNTERPART}" if name in signature(Trainer).parameters else ""
    if not IN_PLACE[name]:
        return " Leave this option of lightning.Trainer out: lcfl logs every round, and equal commands give equal bits."
    return f" In place of this option of lightning.Trainer, set {IN_PLACE[name]}."


def _with_known_names(init: Callable[..., None]) -> Callable[..., None]:
    """Returns an ``__init__`` whose error for an unknown argument names the one to use."""
    known = list(signature(init).parameters)

    @functools.wraps(init)
    def checked(self: Settings, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                close = [f" Did you mean {each}?" for each in get_close_matches(name, known, n=1)]
                raise TypeError(f"{type(self).__name__}: there is no {name}.{in_place_of(name) or ''.join(close)}")
        init(self, *args, **options)

    return checked


Settings.__init__ = _with_known_names(Settings.__init__)  # type: ignore[method-assign]


def _as_list(callbacks: Any) -> list[Any]:
    """Returns callbacks as a list; the command line may provide a single callback."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]


def _as_loggers(given: Logger | Iterable[Logger] | bool | None) -> list[Logger] | bool:
    """Returns loggers as a list; True for the run's own TensorBoard, False for none.

    Raises:
        TypeError: for an object that is not a logger.
    """
    if given is None or isinstance(given, bool):
        return bool(given)
    loggers = list(given) if isinstance(given, Iterable) and not isinstance(given, Logger) else [given]
    for logger in loggers:
        check_instance("trainer.logger", logger, Logger)
    return loggers or False
