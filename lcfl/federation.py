"""The federation as users see it: settings, and what `lcfl fit`, `validate` and `test` do."""

import copy
import os
import tempfile
import warnings
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.logger import Logger
from lightning.pytorch.cli import SaveConfigCallback

from lcfl import checkpoint
from lcfl.callbacks import Checkpoint, Monitor, Progress
from lcfl.checks import (
    check_batches,
    check_callbacks,
    check_method,
    check_network,
    check_parts,
    number_of_clients,
)
from lcfl.data.datamodule import FederatedDataModule
from lcfl.engines import EngineName, choose
from lcfl.exchange import ModelKind
from lcfl.hooks import Callback
from lcfl.launch import STRATEGIES, launch, one_thread, place
from lcfl.method import Method
from lcfl.module import FederatedModule
from lcfl.result import Run
from lcfl.schedule import Schedule
from lcfl.session import Session, Settings
from lcfl.wording import check_choice, check_instance

__all__ = ["Federation"]

Accelerator = Literal["auto", "cpu", "cuda", "gpu"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
ClientStorage = Literal["memory", "mapped"]
NO_SPLITTING = (
    " Strategies that split a model over devices (fsdp, deepspeed) have no place here: a client's model fits on one "
    "device."
)
ONLY_STEPS = " Models are exchanged and merged in float32; only a step's arithmetic may be narrower."


class Federation:
    """Trains a method on a federation of clients: rounds, ranks, precision, files.

    Args:
        rounds: training rounds in all; a resumed run goes on to this number.
        clients_per_round: how many clients take part in a round, as a count (10) or a fraction (0.25).
        evaluate_every: rounds between two evaluations; 0 evaluates at the end only. The one at the end is in
            ``summary.json`` and no round's, so that a run that goes on has the rows of one in one go.
        evaluate_clients: how many clients an evaluation measures, as a count (1000) or a fraction (0.1): drawn once at
            random, the same in every evaluation; 1.0 for all.
        final_models: kinds of model that are evaluated at the end, and by `validate` and `test`, beside those that the
            method's paper reports; None for all that the method has.
        client_dropout: the chance that a sampled client gets the server's message and never answers.
        client_store: where clients' models live: in ``memory``, or in memory-``mapped`` files beside the run
            directories, for populations that do not fit. Either way a client has its own only once it has taken part.
            The files have no names, end with the run and are never read by another one.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        devices: processes per machine, GPUs by number, or ``auto``: on a CPU one process per core and
            never more than clients per round, else all GPUs; under torchrun or SLURM what was started.
        num_nodes: machines.
        strategy: how the processes are started; ``auto`` forks them.
        engine: what carries out local runs: ``compiled`` for the usual layers, SGD and a CPU, ``stacked`` for all
            clients of a rank at once on a GPU, ``fused`` for the same with a step that torch.compile has compiled,
            ``sequential`` for everything, or ``auto``, which is never ``fused``; a resumed run keeps its own.
        precision: ``32-true``, ``bf16-mixed``, or ``16-mixed`` on GPUs.
        logger: True for TensorBoard, False or None for none, or loggers of Lightning. ``metrics.csv`` is there always.
        callbacks: what else is called during a run.
        enable_checkpointing: add a `Checkpoint` where `callbacks` has none.
        enable_progress_bar: add a `Progress` where `callbacks` has none.
        default_root_dir: where run directories go.
        name: of the run; its directory is ``<default_root_dir>/<name>/version_<n>``.
        seed: of everything random but the partition; on the command line ``seed_everything``.
        fast_dev_run: try everything once and keep nothing: the real configuration on random data of the
            same shape, 2 clients, 1 round, 1 step, one evaluation, one checkpoint saved and read back.

    Raises:
        TypeError: for a callback or logger that is none.
        ValueError: for a setting that is not allowed; says what is.
    """

    def __init__(
        self,
        rounds: int = 100,
        clients_per_round: int | float = 1.0,
        evaluate_every: int = 10,
        evaluate_clients: int | float = 1.0,
        final_models: list[ModelKind] | None = None,
        client_dropout: float = 0.0,
        client_store: ClientStorage = "memory",
        accelerator: Accelerator = "auto",
        devices: int | list[int] | str = "auto",
        num_nodes: int = 1,
        strategy: str = "auto",
        engine: str = "auto",
        precision: str = "32-true",
        logger: Logger | Iterable[Logger] | bool | None = True,
        callbacks: list[Callback] | Callback | None = None,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        default_root_dir: str | Path = "logs",
        name: str = "lcfl",
        seed: int = 0,
        fast_dev_run: bool = False,
    ) -> None:
        if rounds < 0 or evaluate_every < 0:
            raise ValueError(f"trainer: got rounds={rounds}, evaluate_every={evaluate_every}; neither may be negative.")
        for kind in final_models or ():
            check_choice("trainer.final_models: got ", kind, get_args(ModelKind))
        if not 0 <= client_dropout < 1:
            raise ValueError(f"trainer.client_dropout: got {client_dropout}; it must lie in [0, 1).")
        check_choice("trainer.client_store: got ", client_store, get_args(ClientStorage))
        check_choice("trainer.strategy: got ", strategy, STRATEGIES, NO_SPLITTING)
        check_choice("trainer.precision: got ", precision, get_args(Precision), ONLY_STEPS)
        check_choice("trainer.accelerator: got ", accelerator, get_args(Accelerator))
        cuda = torch.cuda.is_available() if accelerator == "auto" else accelerator in ("cuda", "gpu")
        if cuda and not torch.cuda.is_available():
            raise ValueError(f"trainer.accelerator: got {accelerator}, but torch finds no GPU here; use auto or cpu.")
        if precision == "16-mixed" and not cuda:
            raise ValueError("trainer.precision: got 16-mixed on a CPU, which has no fast float16; use bf16-mixed.")
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"trainer.name: got {name!r}; it must be the name of one folder.")
        self.rounds, self.clients_per_round, self.evaluate_every = rounds, clients_per_round, evaluate_every
        self.client_dropout, self.final_models = client_dropout, final_models
        self.evaluate_clients, self.client_store = evaluate_clients, client_store
        self.accelerator, self.num_nodes = "cuda" if cuda else "cpu", num_nodes
        self.devices = int(devices) if isinstance(devices, Integral) else devices  # Fabric knows no numbers of numpy
        self.strategy, self.engine, self.precision = strategy, engine, precision
        self.logger = _as_loggers(logger)
        self.default_root_dir, self.name, self.seed = Path(default_root_dir), name, seed
        self.fast_dev_run = fast_dev_run
        given: list[Any] = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks] * (callbacks is not None)
        # LightningCLI's own callback has the hooks of a Trainer's: only its `setup` is meant for us.
        self._save_config = [callback for callback in given if isinstance(callback, SaveConfigCallback)]
        self.callbacks: list[Callback] = [
            callback for callback in given if not isinstance(callback, SaveConfigCallback)
        ]
        check_callbacks(self.callbacks)
        self._add_default(Checkpoint, enable_checkpointing)
        self._add_default(Monitor, bool(self.logger))
        self._add_default(Progress, enable_progress_bar)
        self.callbacks.sort(key=lambda callback: isinstance(callback, Checkpoint))  # saves what the others remember

    def fit(
        self,
        model: FederatedModule,
        datamodule: FederatedDataModule,
        method: Method,
        ckpt_path: str | Path | None = None,
    ) -> Run:
        """Trains the federation.

        Args:
            model: network, loss and optimizer.
            datamodule: the clients and their data.
            method: what is trained.
            ckpt_path: resume: a checkpoint, ``last`` (the newest of this name) or ``best``.

        Returns:
            The run: its metrics, directory and models. If SIGINT or SIGTERM stopped it, `Run.signal` says so.

        Raises:
            TypeError: for another object in the place of module, data or method.
            ValueError: for settings that do not fit together, before any data is loaded.
            CheckpointError: if `ckpt_path` is missing, damaged, or of another configuration.
            ClientError: if a client's local work raises; names client and round.
        """
        if self.fast_dev_run:
            if ckpt_path is not None:
                warnings.warn("trainer.fast_dev_run starts from the beginning: ckpt_path is not used.", stacklevel=2)
            return self._fast_dev_run(model, datamodule, method)
        done = self._launch("fit", model, datamodule, method, ckpt_path)
        return Run(Path(done["run"]), model, method, done["signal"], self.client_store)

    def validate(
        self, model: FederatedModule, datamodule: FederatedDataModule, method: Method, ckpt_path: str | Path = "last"
    ) -> dict[str, float]:
        """Evaluates every kind of model of a checkpoint on the clients' validation data; writes nothing."""
        return dict(self._launch("val", model, datamodule, method, ckpt_path)["metrics"])

    def test(
        self, model: FederatedModule, datamodule: FederatedDataModule, method: Method, ckpt_path: str | Path = "last"
    ) -> dict[str, float]:
        """Evaluates every kind of model of a checkpoint on all local test sets; writes nothing."""
        return dict(self._launch("test", model, datamodule, method, ckpt_path)["metrics"])

    def _add_default(self, kind: type[Callback], wanted: bool) -> None:
        if wanted and not any(isinstance(callback, kind) for callback in self.callbacks):
            self.callbacks.append(kind())

    def _fast_dev_run(self, model: FederatedModule, datamodule: FederatedDataModule, method: Method) -> Run:
        """One round of everything on random data in a folder that is gone afterwards."""
        check_parts(model, datamodule, method)
        trial = copy.copy(self)
        trial.rounds, trial.evaluate_every, trial.client_dropout, trial.logger = 1, 1, 0.0, False
        trial.callbacks = [callback for callback in self.callbacks if not isinstance(callback, Progress)]
        trial.clients_per_round, trial.evaluate_clients = min(2, datamodule.num_participants), 1.0
        trial._add_default(Checkpoint, True)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LowRankCosine: dimension")  # two models span one component
            warnings.filterwarnings("ignore", message="ClientChoice: after")  # two clients choose two models at most
            warnings.filterwarnings("ignore", message="data.proxy: the")  # so few inputs have not every label
            warnings.filterwarnings("ignore", message=".*: no round had monitor=")  # it may be there from the second on
            trial.default_root_dir = Path(folder)
            done = trial._launch("fit", model, datamodule.random_like(), method, None)
            run = Run(Path(done["run"]), model, method, done["signal"])
            run.state, run.metrics  # noqa: B018 - reads the checkpoint and the summary back while they exist
        return run

    @one_thread()  # from the first tensor on: a process that was forked may hang with more
    def _launch(
        self,
        stage: Literal["fit", "val", "test"],
        model: FederatedModule,
        datamodule: FederatedDataModule,
        method: Method,
        ckpt_path: str | Path | None,
    ) -> dict[str, Any]:
        """Checks what can be checked here, then starts the ranks; what rank 0 returns."""
        check_parts(model, datamodule, method)
        schedule = self._schedule(datamodule)
        check_method(method, model, datamodule.num_participants)
        check_network(model, datamodule)
        resumed = None if ckpt_path is None else checkpoint.find(str(ckpt_path), self.default_root_dir, self.name)
        engine = self._engine(model, datamodule, resumed if stage == "fit" else None)
        placement = place(
            self.accelerator, self.devices, self.num_nodes, self.strategy, most=schedule.clients_per_round
        )
        fabric = Fabric(
            accelerator=self.accelerator,
            devices=placement.devices,
            num_nodes=placement.num_nodes,
            strategy=placement.strategy,
            precision=cast(Precision, self.precision),
            callbacks=[*method.clustering, *self.callbacks],
        )
        if placement.strategy in ("auto", "ddp_fork"):  # forked ranks share what is loaded here
            datamodule.prepare_data()
            datamodule.setup(stage)
            check_batches(model, datamodule)  # other ranks do it when they have set up
        settings = Settings(
            schedule,
            self.seed,
            engine,
            self.precision,
            self.default_root_dir,
            self.name,
            self.logger,
            1 if self.fast_dev_run else None,
            self._save_config,
            self.callbacks,
            self.client_store,
        )
        method = method.calibrated(schedule.releases(datamodule.num_staying(self.rounds)))
        result: dict[str, Any] | None = launch(fabric, Session(settings, stage, model, datamodule, method, resumed))
        if result is None:  # only where every rank is a process of its own, as under torchrun
            raise RuntimeError("rank 0 ended with an error; its message says which.")
        return result

    def _schedule(self, datamodule: FederatedDataModule) -> Schedule:
        """How long and how often, with the counts of clients that fractions stand for."""
        num_newcomers = len(datamodule.newcomer_clients)
        sampled, measured = (
            number_of_clients(option, getattr(self, option), datamodule.num_clients, num_newcomers)
            for option in ("clients_per_round", "evaluate_clients")
        )
        trial = 2 if self.fast_dev_run else None
        return Schedule(
            self.rounds, sampled, self.evaluate_every, trial, self.client_dropout, self.final_models, measured
        )

    def _engine(self, model: FederatedModule, datamodule: FederatedDataModule, resumed: Path | None) -> EngineName:
        """What carries out local runs; of a run that is resumed, and given none by name, what it had."""
        engine, advice = self.engine, "use auto or sequential"
        if resumed is not None and engine == "auto":
            engine = checkpoint.read_manifest(resumed)["identity"].get("engine", "auto")
            advice = f"with it {resumed} was trained, so go on where it can, or start anew without --ckpt_path"
        return choose(engine, model, datamodule, self.accelerator, self.precision, advice)


def _as_loggers(given: Logger | Iterable[Logger] | bool | None) -> list[Logger] | bool:
    """Loggers as a list, True for the run's own, False for none.

    Raises:
        TypeError: for what is no logger.
    """
    if given is None or isinstance(given, bool):
        return bool(given)
    loggers = list(given) if isinstance(given, Iterable) and not isinstance(given, Logger) else [given]
    for logger in loggers:
        check_instance("trainer.logger", logger, Logger)
    return loggers or False
