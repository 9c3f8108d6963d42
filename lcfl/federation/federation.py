"""The federation as users see it: the code behind `lcfl fit`, `validate` and `test`."""

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal, cast

from lightning.fabric import Fabric

from lcfl.callbacks import Checkpoint, Progress
from lcfl.data.datamodule import FederatedDataModule
from lcfl.distributed.launch import LostRankError, gradients_on, launch, one_at_a_time, one_thread
from lcfl.distributed.meeting import check_meeting
from lcfl.distributed.placement import Placement, resolve_placement
from lcfl.distributed.transport import Transport
from lcfl.engines import ChosenEngine, choose_engine
from lcfl.federation.checks import check_method, check_parts, check_sendable, number_of_clients
from lcfl.federation.effects import (
    warn_of_idle_clusterings,
    warn_of_idle_faults,
    warn_of_late_leavers,
    warn_of_leavers,
)
from lcfl.federation.module_checks import check_optimizer
from lcfl.federation.session import Session
from lcfl.federation.settings import Precision, Settings
from lcfl.federation.trial import check_batches, check_network, check_targets
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.runs import checkpoint, checkpoint_lookup
from lcfl.runs.result import Run
from lcfl.runs.user_code import user_code
from lcfl.server.schedule import Schedule

__all__ = ["Federation"]


class Federation(Settings):
    """Trains a method on a federation of clients.

    Its arguments are those of `Settings`.
    """

    def fit(
        self,
        model: FederatedModule,
        datamodule: FederatedDataModule,
        method: Method,
        ckpt_path: str | Path | None = None,
        transport: Transport | None = None,
    ) -> Run:
        """Trains the federation.

        Afterwards, callbacks and clusterings hold what the run has put into their attributes, also if other processes
        trained. If a run in other processes ends with an exception, callbacks and clusterings stay as they were.

        Args:
            model: network, loss and optimizer.
            datamodule: the clients and their data.
            method: the method to train.
            ckpt_path: the checkpoint to resume from: a path, ``last`` (the newest of this name), ``best``, or ``auto``,
                which is ``last`` if there is a checkpoint and a new run otherwise.
            transport: the way to clients that are machines of their own; None plays all clients here.

        Returns:
            The run: its metrics, directory and models, as they are now: a later `fit` that continues the run returns
            another one. If SIGINT or SIGTERM stopped it, `Run.signal` holds that signal.

        Raises:
            TypeError: if the model, data module or method is an object of another class.
            ValueError: for settings that do not fit together, before any data are loaded; after the last round,
                if no update of the whole run could be used.
            CheckpointError: if `ckpt_path` is missing, damaged, or from another configuration.
            ClientError: if a client's local work raises an exception; names client and round.
        """
        if self.fast_dev_run:
            if ckpt_path is not None:
                warnings.warn("trainer.fast_dev_run starts from the beginning and ignores ckpt_path.", stacklevel=2)
            return self._fast_dev_run(model, datamodule, method)
        done = self._launch("fit", model, datamodule, method, ckpt_path, transport)
        run = Run(Path(done["run"]), model, method, done["signal"], self.client_store, done["checkpoint"])
        run.metrics = done["metrics"]
        return run

    def validate(
        self,
        model: FederatedModule,
        datamodule: FederatedDataModule,
        method: Method,
        ckpt_path: str | Path | None = "last",
    ) -> dict[str, float]:
        """Evaluates every kind of model of a checkpoint on the clients' validation data; writes nothing.

        Args:
            model: network and metrics.
            datamodule: the clients and their data.
            method: the method that was trained.
            ckpt_path: the checkpoint: a path, ``last`` (the newest of this name; None is the same) or ``best``.
        """
        return dict(self._launch("val", model, datamodule, method, ckpt_path)["metrics"])

    def test(
        self,
        model: FederatedModule,
        datamodule: FederatedDataModule,
        method: Method,
        ckpt_path: str | Path | None = "last",
    ) -> dict[str, float]:
        """Evaluates every kind of model of a checkpoint on all local test sets; writes nothing.

        Args:
            model: network and metrics.
            datamodule: the clients and their data.
            method: the method that was trained.
            ckpt_path: the checkpoint: a path, ``last`` (the newest of this name; None is the same) or ``best``.
        """
        return dict(self._launch("test", model, datamodule, method, ckpt_path)["metrics"])

    def _fast_dev_run(self, model: FederatedModule, datamodule: FederatedDataModule, method: Method) -> Run:
        """Runs one round of everything on random data, in a folder that is deleted afterwards."""
        check_parts(model, datamodule, method)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LowRankCosine: dimension")  # two models span only one component
            warnings.filterwarnings("ignore", message="ClientChoice: after")  # two clients choose at most two models
            warnings.filterwarnings("ignore", message="data.proxy: the")  # a few inputs may lack some labels
            warnings.filterwarnings("ignore", message=".*: no round had monitor=")  # a later round may have it
            trial = copy.copy(self)
            trial.rounds, trial.evaluate_every = 1, min(1, self.evaluate_every)
            trial.client_dropout, trial.logger = 0.0, False
            trial.clients_per_round, trial.evaluate_clients = min(2, datamodule.num_initial_clients), 1.0
            trial.callbacks = [callback for callback in self.all_callbacks if not isinstance(callback, Progress)]
            trial._add_default(Checkpoint, True)
            trial.default_root_dir = folder
            done = trial._launch("fit", model, datamodule.random_like(), method, None)
            run = Run(Path(done["run"]), model, method, done["signal"])
            run.state, run.metrics  # noqa: B018 - reads the checkpoint and the summary back while they exist
        return run

    def check(self, model: FederatedModule, datamodule: FederatedDataModule, method: Method) -> Schedule:
        """Refuses what does not fit together, before any data are loaded; returns the schedule of the run."""
        check_parts(model, datamodule, method)
        schedule = self._schedule(datamodule)
        check_method(method, model, datamodule.num_initial_clients)
        if self.device_type == "cpu":
            check_optimizer(model)
        check_network(model, datamodule)
        return schedule

    @one_at_a_time()
    @gradients_on()
    @one_thread()  # before the first tensor, because a forked process may hang with more threads
    def _launch(
        self,
        stage: Literal["fit", "val", "test"],
        model: FederatedModule,
        datamodule: FederatedDataModule,
        method: Method,
        ckpt_path: str | Path | None,
        transport: Transport | None = None,
    ) -> dict[str, Any]:
        """Checks what can be checked before launch, then starts the ranks; returns the result of rank 0."""
        schedule = self.check(model, datamodule, method)
        warn_of_idle_faults(datamodule.faults, self.rounds, method.exchange)
        if datamodule.leavers:
            warn_of_leavers(method)
        if stage == "fit" and schedule.most_clients is None:  # a dry run has only one round
            warn_of_late_leavers(datamodule.leavers, self.rounds)
            num_clients = datamodule.num_initial_clients
            warn_of_idle_clusterings(method.clustering, self.rounds, schedule.clients_per_round, num_clients)
        wanted, resumed = self._checkpoint(stage, ckpt_path, method)
        self._freeze(model, resumed)
        engine = self._engine(model, datamodule, resumed if stage == "fit" else None)
        if transport is None:
            placement = resolve_placement(
                self.device_type, self.devices, self.num_nodes, self.strategy, most=schedule.clients_per_round
            )
            check_meeting(placement)
            if placement.strategy == "ddp_fork":
                check_sendable(method, schedule.evaluated_kinds(method.exchange, is_final=True))
        else:
            placement = Placement(1, 1, "auto")
        fabric = Fabric(
            **placement.fabric_arguments(self.device_type),
            precision=cast(Precision, self.precision),
            callbacks=[*method.clustering, *self.all_callbacks],
        )
        code = None
        if transport is None and placement.strategy in ("auto", "ddp_fork"):  # forked ranks share what is loaded here
            datamodule.prepare_data()
            datamodule.setup(stage)
            check_batches(model, datamodule, method.local_update)  # ranks that are not forked check after their setup
            check_targets(model, datamodule)
            code = user_code()
        if method.exchange.transforms:
            full = method.exchange.full_participation
            num_uploads = schedule.most_uploads(self.seed, datamodule.remaining_clients, self.rounds, full)
            method = method.calibrated(num_uploads, datamodule.num_initial_clients)
        with tempfile.TemporaryDirectory(prefix="lcfl-") as folder:
            # A command ends with its run: nobody looks at its callbacks.
            held_file = Path(folder, "held") if stage == "fit" and not self.save_config else None
            session = Session(
                settings=self,
                schedule=schedule,
                engine=engine,
                stage=stage,
                module=model,
                data=datamodule,
                method=method,
                ckpt_path=wanted,
                resumed=resumed,
                code=code,
                transport=transport,
                held_file=held_file,
            )
            result: dict[str, Any] | None = launch(fabric, session)
            if result is None:  # happens only if every rank is a separate process, as under torchrun
                raise LostRankError("rank 0 ended with an error; see the message of rank 0.")
            if held_file is not None:
                session.held.restore(held_file)
        return result

    def _checkpoint(
        self, stage: Literal["fit", "val", "test"], ckpt_path: str | Path | None, method: Method
    ) -> tuple[str | None, Path | None]:
        """Returns what the ranks are asked to load, and the checkpoint that this is; None for a new run."""
        wanted = None if ckpt_path is None else str(ckpt_path)
        if stage != "fit":
            if wanted in (None, "auto"):  # a run's config.yaml says how it began
                wanted = "last"
            return wanted, checkpoint_lookup.find(str(wanted), self.root, self.name)
        resumed = checkpoint_lookup.find_if_any(wanted, self.root, self.name)
        if resumed is not None and any(noise.secure for noise in method.exchange.noises):
            raise ValueError(
                "method.exchange: a run whose GaussianNoise has secure: true cannot be resumed, because the rounds "
                "after the checkpoint would be uploaded twice with different noise. Start a new run."
            )
        return wanted, resumed

    def _freeze(self, model: FederatedModule, resumed: Path | None) -> None:
        """Sets what is frozen, before launch and so equally on every rank: as in the checkpoint, or as initially."""
        if model.frozen_layout is None:
            return
        saved = None if resumed is None else checkpoint.read_frozen(resumed)
        if saved is None or len(saved) != model.frozen_layout.size:  # the session refuses what does not fit
            saved = model.initial_frozen(self.seed)
        assert saved is not None, "the network has a frozen part"
        model.frozen_layout.unpack(saved, model.network)

    def _schedule(self, datamodule: FederatedDataModule) -> Schedule:
        """Returns the schedule, with counts of clients in place of fractions."""
        num_newcomers = len(datamodule.newcomer_clients)
        sampled, measured = (
            number_of_clients(option, getattr(self, option), datamodule.num_clients, num_newcomers)
            for option in ("clients_per_round", "evaluate_clients")
        )
        return Schedule(
            rounds=self.rounds,
            clients_per_round=sampled,
            evaluate_every=self.evaluate_every,
            most_clients=2 if self.fast_dev_run else None,
            client_dropout=self.client_dropout,
            final_models=self.final_models,
            num_evaluated=measured,
            evaluate_models=self.evaluate_models,
        )

    def _engine(self, model: FederatedModule, datamodule: FederatedDataModule, resumed: Path | None) -> ChosenEngine:
        """Returns the engine of the local runs. With ``auto`` a resumed run keeps the engine that it had."""
        engine, advice = self.engine, "use auto or sequential"
        if resumed is not None and engine == "auto":
            engine = checkpoint.read_manifest(resumed)["identity"].get("engine", "auto")
            advice = f"{resumed} was trained with this engine, so resume where it works, or start a new run"
        return choose_engine(engine, model, datamodule, self.device_type, self.precision, advice)
