"""Session of a `fit`, `validate` or `test`: every rank sets up, then leads (rank 0) or serves."""

import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning.fabric import Fabric
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger

from lcfl.core.callback import Callback
from lcfl.core.clients import ClientState, ClientStore
from lcfl.core.files import remove_leftovers
from lcfl.core.metric_names import definitions_of
from lcfl.core.state import FederationState
from lcfl.data.datamodule import FederatedDataModule
from lcfl.distributed.client_deadline import ClientDeadline
from lcfl.distributed.held_attributes import HeldAttributes
from lcfl.distributed.hosts import Host, Hosts, HostTransport
from lcfl.distributed.rank_transport import RankTransport
from lcfl.distributed.ranks import Ranks
from lcfl.distributed.spread_client_store import SpreadClientStore
from lcfl.distributed.stop_flag import StopFlag
from lcfl.distributed.transport import Transport
from lcfl.distributed.worker import Worker
from lcfl.engines import ChosenEngine
from lcfl.federation.run_files import write_description, write_summary
from lcfl.federation.settings import Settings
from lcfl.federation.trial import check_batches, check_targets
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.runs import checkpoint, checkpoint_lookup
from lcfl.runs.checkpoint_schema import Expected
from lcfl.runs.directory import RunDirectory, run_versions
from lcfl.runs.identity import describe, describe_metrics, describe_module, differences, needed_for
from lcfl.runs.user_code import Code, changed_modules, user_code
from lcfl.server.evaluation import evaluated_clients, evaluated_metrics
from lcfl.server.loggers import fit_logged, forget_from
from lcfl.server.schedule import Schedule
from lcfl.server.server import Server

__all__ = ["Session", "expected", "run_of"]

NewStore = Callable[[ClientState], ClientStore]


@dataclass(frozen=True)
class Session:
    """The work of every rank after launch; picklable, for spawned ranks.

    Args:
        settings: the settings of the federation.
        schedule: the schedule, with counts of clients in place of the fractions in the settings.
        engine: what computes local updates.
        stage: what the session does.
        module: network, loss, optimizer.
        data: the data module, which each rank sets up.
        method: the four parts.
        ckpt_path: the option of that name.
        resumed: the checkpoint that it stood for before launch; None for a new run.
        code: the user's code, if ranks are forked: a rank that searched all modules for it would copy shared memory.
        transport: the way to clients that are machines of their own; None plays all clients on the ranks.
        held_file: where a rank 0 that is another process writes what callbacks hold after `fit`; None for nowhere.
        caller: the process that made the session.
    """

    settings: Settings
    schedule: Schedule
    engine: ChosenEngine
    stage: Literal["fit", "val", "test"]
    module: FederatedModule
    data: FederatedDataModule
    method: Method
    ckpt_path: str | None
    resumed: Path | None
    code: Code | None = None
    transport: Transport | None = None
    held_file: Path | None = None
    caller: int = field(default_factory=os.getpid)

    def __call__(self, fabric: Fabric, flag: StopFlag) -> dict[str, Any] | None:
        """Runs the session; every rank returns the result of rank 0, or None if rank 0 failed.

        The other ranks carry out the tasks of rank 0 until it has a result.
        """
        new_store = functools.partial(ClientStore, folder=self._store_folder())
        if self.transport is not None:
            return self._lead(fabric, self.transport, new_store)
        if fabric.local_rank == 0:
            self.data.prepare_data()
        fabric.barrier()
        self.data.setup(self.stage)
        check_batches(self.module, self.data, self.method.local_update)
        check_targets(self.module, self.data)
        settings = self.settings
        engine = fabric.broadcast(self.engine)  # under torchrun each rank chooses, perhaps without a compiler
        max_steps = 1 if settings.fast_dev_run else None
        deadline = ClientDeadline(
            settings.client_timeout, fabric.global_rank, functools.partial(flag.note, fabric.global_rank)
        )
        worker = Worker(fabric, self.module, self.data, self.method, settings.seed, engine, max_steps, deadline)
        ranks = Ranks(fabric, worker.run_all, flag)
        flag.install()  # all ranks have met, so from now on a signal means a stop after the round
        if not ranks.is_first:
            result: dict[str, Any] | None = ranks.serve()
            return result
        with ranks:
            ranks.result = done = self._first(fabric, ranks, worker, new_store)
        if self.held_file is not None and fabric.is_global_zero and os.getpid() != self.caller:
            self.held.write(self.held_file)
        return done

    @property
    def held(self) -> HeldAttributes:
        """What callbacks and clusterings collect, which the process that made the session gets after `fit`."""
        loggers = [] if isinstance(self.settings.loggers, bool) else self.settings.loggers
        return HeldAttributes(self._callbacks, [self.settings, self.module, self.data, self.method, *loggers])

    def _first(self, fabric: Fabric, ranks: Ranks, worker: Worker, new_store: NewStore) -> dict[str, Any] | None:
        """Runs the session on the first rank of a host."""
        if len(ranks.hosts) == 1:
            return self._lead(fabric, RankTransport(ranks, worker), new_store)
        host = Host(ranks, worker)
        if not fabric.is_global_zero:
            result: dict[str, Any] | None = host.serve()
            return result
        with Hosts(host) as hosts:
            hosts.result = done = self._lead(fabric, HostTransport(hosts, worker), self._spread_over(hosts))
        return done

    def _spread_over(self, hosts: Hosts) -> NewStore:
        return functools.partial(
            SpreadClientStore, hosts=hosts, num_clients=self.data.num_clients, folder=self._store_folder()
        )

    @property
    def _callbacks(self) -> list[Callback]:
        """The clusterings, which come first, and the callbacks."""
        return [*self.method.clustering, *self.settings.all_callbacks]

    def _store_folder(self) -> Path | None:
        """Returns the folder of the clients' models on each host; None keeps them in memory."""
        # On the server's host, the checkpoints must fit into this file system anyway.
        return self.settings.root if self.settings.client_store == "mapped" else None

    def _lead(self, fabric: Fabric, transport: Transport, new_store: NewStore) -> dict[str, Any]:
        lead = self._fit if self.stage == "fit" else self._evaluate
        return lead(fabric, transport, new_store)

    def _fit(self, fabric: Fabric, transport: Transport, new_store: NewStore) -> dict[str, Any]:
        run = self._locked()
        try:
            for callback in self._callbacks:  # also before a resume, whose identity describes them as new
                callback.forget()
            self._check_monitors()  # also before it, because a callback remembers only what its own monitor gave
            state = self._initial_state(new_store) if run is None else self._resumed_state(new_store)
            run = run or RunDirectory.claim(self.settings.root, self.settings.name)
            loggers = self._loggers(run.path, state.round)
            server = self._server(fabric, transport, state, run.path, loggers)
            server.table.cut(state.round)
            if missing := max(state.round, 0) - sum(number >= 0 for number in server.table.numbers):
                warnings.warn(
                    f"{server.table.path} lacks {missing} of the {state.round} rounds before the checkpoint. What is "
                    "summed over rounds, such as the bytes of the projection, leaves them out.",
                    stacklevel=2,
                )
            remove_leftovers(run.path)
            checkpoint_lookup.drop_after(run.checkpoints, state.round)
            for name in ("summary.json", "clients.csv"):  # left by an earlier, shorter run
                (run.path / name).unlink(missing_ok=True)
            write_description(server, self.settings.save_config)
            metrics = fit_logged(server, is_new=self.resumed is None)
            if not server.is_interrupted:
                write_summary(server, metrics)
            last = checkpoint.path_of(run.checkpoints, server.state.round)
            return {
                "run": str(run.path),
                "metrics": metrics,
                "signal": server.stop_signal,
                "checkpoint": last.name if last.is_dir() else None,
            }
        finally:
            if run is not None:
                run.close()

    def _locked(self) -> RunDirectory | None:
        """Locks the directory of the run to resume; None for a new run.

        Raises:
            ValueError: if another process writes it; with ``auto`` also if that process has not saved anything yet.
        """
        versions = run_versions(self.settings.root, self.settings.name)
        if self.resumed is not None:
            run = run_of(self.resumed)
            # A run of this name has the path that it had as a new one, which is relative if the root is.
            return RunDirectory(next((path for path in versions if path.resolve() == run), run))
        if self.ckpt_path == "auto" and versions:
            RunDirectory(versions[0]).close()
        return None

    def _check_monitors(self) -> None:
        """Refuses a callback that waits for a metric which no evaluation of the run will have."""
        kinds = self.schedule.evaluated_kinds(self.method.exchange)
        metrics = {}
        if self.schedule.evaluate_every:
            first_N = self.data.remaining_clients(0)
            clients = evaluated_clients(self.schedule, self.data, self.settings.seed, first_N)
            metrics = evaluated_metrics(self.module, self.data, kinds, clients)
        for callback in self.settings.all_callbacks:
            callback.check_monitor(metrics, f"val/own_split/{kinds[0]}/{self.module.reported.name}")

    def _evaluate(self, fabric: Fabric, transport: Transport, new_store: NewStore) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            state = self._resumed_state(new_store)
            server = self._server(fabric, transport, state, Path(folder), [])
            kinds = self.schedule.evaluated_kinds(self.method.exchange, is_final=True)
            evaluation = server.evaluator(state, kinds, stages=[self.stage])
        if self.stage == "val" and not evaluation.by_name:
            raise ValueError("validate: no client has validation data; set data.val_fraction, or use test instead.")
        metrics = evaluation.summary() | (server.evaluator.trivial_baseline(state) if self.stage == "test" else {})
        return {"metrics": metrics, "signal": 0}

    def _initial_state(self, new_store: NewStore) -> FederationState:
        return FederationState.create(
            self.module.initial_model(self.settings.seed),
            self.data.num_clients,
            self.method.exchange.keeps_model,
            len(self.method.warmup_rounds(self.data.num_initial_clients)),
            self.data.population.newcomers,
            self.module.initial_buffers(self.settings.seed),
            new_store,
            self.module.frozen_part(),
        )

    def _resumed_state(self, new_store: NewStore) -> FederationState:
        """Reads the checkpoint, unless its name stands for another one by now: `fit` has locked the run only since."""
        assert self.resumed is not None and self.ckpt_path is not None
        read = functools.partial(self._read, new_store=new_store)
        if Path(self.ckpt_path) == self.resumed:
            return read(self.resumed)
        if self.ckpt_path == "best":
            return read(checkpoint_lookup.of_run(run_of(self.resumed), "best"))
        return checkpoint_lookup.read_newest([run_of(self.resumed)], read)

    def _read(self, resumed: Path, new_store: NewStore) -> FederationState:
        """Returns the state of a checkpoint if its configuration is the same."""
        now = self._identity
        apart = {"frozen", "code"}  # the values of the checkpoint are used; changed code gives a warning
        if now["init_from"] is None and checkpoint.read_manifest(resumed)["round"] > 0:
            apart.add("init_from")  # all models are in the checkpoint, and the file may be gone
        # The limit on updates is only in the identity of a run that has one.
        names = sorted({*now, "max_update_norm"} - apart)

        def compared(identity: Mapping[str, Any]) -> dict[str, Any]:
            if self.stage != "fit":
                return needed_for("evaluation", identity)
            metrics = {name: each for name, each in definitions_of(identity).items() if name in measured}
            return {name: identity.get(name) for name in names} | {"metrics": metrics}

        saved = checkpoint.identity_of(resumed)
        measured = definitions_of(saved).keys() & definitions_of(now).keys()  # others begin, or end
        if changed := differences(compared(saved), compared(now)):
            instead = ", or start a new run" if self.stage == "fit" else ""
            is_of_data = all(line.startswith(("data:", "partition:")) for line in changed)
            files = " If you did, the files of the data have changed since: restore them." if is_of_data else ""
            raise checkpoint.CheckpointError(
                f"{resumed} was made with another configuration:\n  " + "\n  ".join(changed) + "\n"
                f"Take the configuration in its run directory (config.yaml){instead}.{files}"
            )
        if (modules := changed_modules(saved.get("code", {}), now["code"])) and self.stage == "fit":
            warnings.warn(
                f"{', '.join(modules)}: the code has changed since {resumed} was written, and the rounds from here on "
                "are those of the new code. To have one code in all rounds, start a new run.",
                stacklevel=2,
            )
        done = checkpoint.read_manifest(resumed)["round"]
        if self.stage == "fit" and done > self.schedule.rounds:
            raise checkpoint.CheckpointError(
                f"{resumed} has {done} rounds, but trainer.rounds, which counts them, too, is {self.schedule.rounds}. "
                f"Set it to {done} or more, or resume an earlier checkpoint."
            )
        sizes = self.data.num_clients, self.data.num_initial_clients
        loaded = checkpoint.read(resumed, new_store, expected(self.module, self.method, *sizes))
        if self.stage == "fit":
            loaded.restore(self._callbacks, self.method.aggregation.remembers)
        return loaded.state

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """Everything that decides the bits of a run, and not rounds, ranks, loggers, watching callbacks or paths."""
        identity = {
            "seed": self.settings.seed,
            "data": self.data.samples.fingerprint(),
            "augmentation": self.data.samples.augmentation,
            "partition": self.data.population.fingerprint,
            "batch_size": self.data.batch_size,
            "drop_last": self.data.drop_last,
            "newcomers": self.data.population.newcomers or None,
            "leavers": self.data.leavers or None,
            "clients_per_round": self.schedule.clients_per_round,
            "client_dropout": self.schedule.client_dropout,
            **({} if self.settings.max_update_norm is None else {"max_update_norm": self.settings.max_update_norm}),
            "engine": self.engine.name,
            "precision": self.settings.precision,
            "model": describe_module(self.module),
            **({"metrics": metrics} if (metrics := describe_metrics(self.module)) else {}),
            "init_from": self.module.initial_fingerprint,
            **({} if (frozen := self.module.frozen_fingerprint) is None else {"frozen": frozen}),
            "method": self.method,
            "callbacks": [each for each in self.settings.all_callbacks if each.shapes_result],
            "code": user_code() if self.code is None else self.code,
        }
        description: dict[str, Any] = describe(identity)
        return description

    def _server(
        self, fabric: Fabric, transport: Transport, state: FederationState, path: Path, loggers: list[Logger]
    ) -> Server:
        return Server(
            fabric=fabric,
            transport=transport,
            module=self.module,
            data=self.data,
            method=self.method,
            schedule=self.schedule,
            state=state,
            seed=self.settings.seed,
            identity=self._identity,
            run_dir=path,
            callbacks=self._callbacks,
            loggers=loggers,
            max_update_norm=self.settings.max_update_norm,
        )

    def _loggers(self, path: Path, next_round: int) -> list[Logger]:
        """Returns the user's loggers, or TensorBoard in the run directory.

        In a resumed run, TensorBoard drops what it has from the next round on.
        """
        chosen = self.settings.loggers
        if chosen is False:
            return []
        if chosen is True:
            # Its curves show only metrics, because the configuration is in the run directory already.
            tensorboard = TensorBoardLogger(path.parent.parent, path.parent.name, path.name, default_hp_metric=False)
            loggers: list[Logger] = [tensorboard]
        else:
            loggers = chosen
        for logger in loggers:
            if isinstance(logger, TensorBoardLogger) and self.resumed is not None:
                forget_from(logger, max(next_round, 0))
        return loggers


def expected(module: FederatedModule, method: Method, num_clients: int, num_initial_clients: int) -> Expected:
    """Returns what a checkpoint of a run with these parts and numbers of clients must hold."""
    sizes = {"N": num_clients, "S": module.layout.size, "P": module.layout.num_parameters}
    if module.buffer_layout is not None:
        sizes["B"] = module.buffer_layout.size
    if module.frozen_layout is not None:
        sizes["F"] = module.frozen_layout.size
    return Expected(sizes, method.exchange.keeps_model, len(method.warmup_rounds(num_initial_clients)))


def run_of(path: Path) -> Path:
    """Returns the run directory that contains a checkpoint.

    Raises:
        CheckpointError: if the checkpoint lies elsewhere, without its configuration and history.
    """
    run = path.resolve().parent.parent
    if path.resolve().parent.name != "checkpoints":
        raise checkpoint.CheckpointError(
            f"{path} lies outside a run directory, so there is no metrics.csv to continue: copy it back into the "
            "folder checkpoints of its run."
        )
    if not (run / "config.yaml").is_file():
        raise checkpoint.CheckpointError(f"{run} has no config.yaml, which every run directory holds.")
    return run
