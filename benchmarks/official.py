"""Compares a round of lcfl with the code of the methods' authors, from the same weights and on the same batches.

    python benchmarks/official.py CLONES --csv docs/results/official.csv

CLONES is a folder with clones of the repositories in `COMPARISONS`, each under the repository's own name. Their code
is imported from there and called; none of it is part of lcfl. A repository that is not there is skipped. A folder
that is not a git clone may hold a file ``COMMIT`` with the commit.

Each comparison prints the largest absolute difference of what both have made, and the same divided by the largest
change that the authors' code has made. In float32, sums of the same numbers in another order differ by 1e-7 to 1e-5.
Where the codes do different things, the row says what.
"""

import argparse
import csv
import importlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lcfl import methods as parts
from lcfl.core.clients import ClientState
from lcfl.core.messages import Uplink
from lcfl.core.state import FederationState
from lcfl.data.samples import TensorSamples
from lcfl.engines import SequentialEngine
from lcfl.methods.clustering.agglomerative import cut_tree
from lcfl.methods.clustering.bipartition import bipartition_of
from lcfl.methods.clustering.loss_vectors import match_to_models
from lcfl.methods.clustering.principal_angles import angles
from lcfl.methods.local.signature import left_singular_vectors
from lcfl.methods.local.training import LocalData, LocalOutput, draw_batches
from lcfl.models.module import FederatedModule

FEATURES, CLASSES, BATCH, LR = 8, 4, 5, 0.1
UNEQUAL, EQUAL = (20, 15, 12), (12, 12, 12)  # numbers of samples; a pass of 12 ends with a batch of 2

# What the authors' code imports for work that is not done here.
VISION = [f"torchvision{name}" for name in ("", ".transforms", ".datasets", ".models")]
PLOTS = [*VISION, "matplotlib", "matplotlib.pyplot"]

SGD = partial(torch.optim.SGD, lr=LR)

Batch = tuple[Tensor, Tensor]


class Network(nn.Module):
    """The network that both train. The authors' code looks for ``linear`` and ``bn`` in the names."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.features = nn.Linear(FEATURES, 6)
        self.bn = nn.BatchNorm1d(6) if normed else nn.Identity()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the class scores of a batch."""
        return self.linear(torch.relu(self.bn(self.features(inputs))))


@dataclass(frozen=True)
class Row:
    """What both have made of the same. `start` is what it was before; None if it is a count of disagreements."""

    compared: str
    ours: Tensor
    theirs: Tensor
    start: Tensor | None = None
    reason: str = ""

    @property
    def difference(self) -> float:
        """The largest absolute difference."""
        return float((self.ours.double() - self.theirs.double()).abs().max())

    @property
    def relative(self) -> float | None:
        """The difference, divided by the largest change."""
        if self.start is None:
            return None
        return self.difference / float((self.theirs.double() - self.start.double()).abs().max())


class Passes:
    """Gives a list of batches in each pass, in place of a loader."""

    def __init__(self, *passes: Sequence[Batch]) -> None:
        self._passes = iter(passes)

    def __iter__(self) -> Iterator[Batch]:
        return iter(next(self._passes))


class Rounds:
    """Rounds of a method of lcfl in which all clients take part, from random models.

    Args:
        method: its parts.
        sizes: the number of samples of each client.
        network: makes the network.
        optimizer: makes the optimizer; plain SGD if not given.
        drop_last: see `LocalData`.
        batch_size: B.
        module: further options of the module.
    """

    def __init__(
        self,
        method: parts.Method,
        sizes: Sequence[int] = UNEQUAL,
        network: Callable[[], nn.Module] = Network,
        optimizer: Callable[..., Any] = SGD,
        drop_last: bool = False,
        batch_size: int = BATCH,
        **module: Any,
    ) -> None:
        draw, ends = torch.Generator().manual_seed(0), np.cumsum(sizes)
        self.inputs = torch.randn(ends[-1], FEATURES, generator=draw)
        self.targets = torch.randint(CLASSES, (int(ends[-1]),), generator=draw)
        self.shares = np.split(np.arange(ends[-1]), ends[:-1])
        self.method, self.clients, self.number = method, range(len(sizes)), 0
        self.drop_last, self.batch_size, self.network = drop_last, batch_size, network
        self.module = FederatedModule(network, optimizer, cut="linear", **module)
        self.layout = self.module.layout
        samples = TensorSamples(self.inputs, self.targets, int(ends[-1]), CLASSES)
        self.engine = SequentialEngine(Fabric(accelerator="cpu", devices=1), self.module, samples)
        initial = self.random_model(1)
        self.state = FederationState.create(initial, len(sizes), method.exchange.keeps_model)

    def random_model(self, seed: int) -> Tensor:
        """Returns a model with random parameters and the buffers of a new one."""
        model, end = self.module.initial_model(0).clone(), self.layout.num_parameters
        model[:end] = 0.5 * torch.randn(end, generator=torch.Generator().manual_seed(seed))
        return model

    def keep_random_models(self) -> None:
        """Gives every client that keeps a model a random one."""
        for client in self.clients:
            self.state.clients[client] = ClientState(self.random_model(10 + client))

    def data(self, client: int) -> LocalData:
        """Returns the client's samples in this round."""
        return LocalData(self.shares[client], self.batch_size, 0, client, self.drop_last, self.number)

    def rows(self, client: int) -> Batch:
        """Returns all samples of a client."""
        return self.inputs[self.shares[client]], self.targets[self.shares[client]]

    def pairs(self, client: int) -> list[Batch]:
        """Returns the same, sample by sample."""
        return list(zip(*self.rows(client), strict=True))

    def start_of(self, client: int) -> Tensor:
        """Returns the model that a client makes of what it is sent and what it keeps."""
        exchange, own = self.method.exchange, self.state.clients[client]
        sent = exchange.down(self.state, client, self.layout)
        return exchange.at_client(sent, own, self.layout).payload["model"]

    def batches(self, client: int, steps: int | None = None, epochs: int | None = None) -> list[Batch]:
        """Returns the batches that the client draws next."""
        _, drawn = draw_batches(self.state.clients[client].consumed, self.data(client), steps, epochs)
        return [(self.inputs[batch], self.targets[batch]) for batch in drawn]

    def passes(self, client: int, steps: int | None = None, epochs: int | None = None) -> Passes:
        """Returns the same batches, pass by pass."""
        batches, each = self.batches(client, steps, epochs), -(-len(self.shares[client]) // self.batch_size)
        return Passes(*(batches[begin : begin + each] for begin in range(0, len(batches), each)))

    def load(self, model: Tensor, network: nn.Module | None = None) -> nn.Module:
        """Returns a network with this model, for the authors' code."""
        return self.layout.unpack(model, network or self.network())

    def vector(self, network: nn.Module | dict[str, Tensor] | Sequence[Tensor]) -> Tensor:
        """Returns the parameters and buffers of a network, of a dict of them, or of a list of parameters."""
        if isinstance(network, nn.Module):
            return self.layout.pack(network).clone()
        values = network.values() if isinstance(network, dict) else network
        return torch.cat([value.detach().float().flatten() for value in values])

    def round(self) -> list[LocalOutput]:
        """Carries out a round as a server and its ranks do, and returns what the clients have made."""
        exchange, outputs, uploads = self.method.exchange, [], []
        for client in self.clients:
            own, sent = self.state.clients[client], exchange.down(self.state, client, self.layout)
            downlink = exchange.at_client(sent, own, self.layout)
            output = self.method.local_update(own, downlink, self.data(client), self.engine)
            uploads.append(Uplink(client, exchange.up(output, sent, self.layout), len(self.shares[client]), sent))
            outputs.append(output)
        for client, output in zip(self.clients, outputs, strict=True):
            model = output.model if exchange.keeps_model else None
            memory = self.state.clients[client].memory if output.memory is None else output.memory
            self.state.clients[client] = ClientState(model, output.consumed, memory=memory)
        received = [exchange.at_server(upload, self.state, self.layout) for upload in uploads]
        self.method.aggregation(self.state, received, self.layout)
        self.number += 1
        return outputs


@contextmanager
def code_in(folder: Path, *names: str, unused: Sequence[str] = ()) -> Iterator[list[Any]]:
    """Gives modules of the authors' code, quietly and on the CPU, and forgets them at the end.

    Args:
        folder: the folder that must be on the path.
        names: the modules.
        unused: modules that they import and do not need here, in place of which there are stand-ins.
    """
    before = dict(sys.modules)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(patch.dict("os.environ"))
        stack.enter_context(patch.object(torch.cuda, "is_available", return_value=False))
        stack.enter_context(patch.object(np, "NINF", -np.inf, create=True))  # was in old versions of numpy
        stack.enter_context(patch.object(sys, "path", [str(folder), *sys.path]))
        stack.enter_context(patch.object(sys, "dont_write_bytecode", True))
        sys.modules.update({name: MagicMock() for name in unused})
        try:
            yield [importlib.import_module(name) for name in names]
        finally:
            new = [name for name in sys.modules if name not in before]
            for name in sorted(new, reverse=True):  # what is inside a package first
                module = sys.modules[name]
                places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
                if name in unused or any(str(place).startswith(str(folder)) for place in places):
                    del sys.modules[name]
            sys.modules.update({name: before[name] for name in unused if name in before})


# personal models


def fedala(folder: Path) -> Iterator[Row]:
    local = parts.InitialisedTraining(epochs=1, layers=1, share=1.0, threshold=1e-12, most_passes=11)
    rounds = Rounds(parts.Method(local, parts.ClusterReference(), parts.GlobalMean()), (20, 15), drop_last=True)
    rounds.keep_random_models()
    sent = rounds.state.global_model
    server_name = "flcore.servers.serverALA"
    with code_in(folder / "system", server_name, "flcore.clients.clientALA") as (servers, clients):
        read: list[Any] = [None, None]
        clients.read_client_data = lambda dataset, client, is_train: read[client]
        server = object.__new__(servers.FedALA)
        server.global_model, server.clients = rounds.load(sent), []
        for client in rounds.clients:
            read[client] = [0]
            args = SimpleNamespace(
                model=rounds.load(rounds.state.clients[client].model), dataset="", device="cpu", num_classes=CLASSES,
                batch_size=BATCH, local_learning_rate=LR, local_steps=1, eta=1.0, rand_percent=100, layer_idx=2,
            )  # fmt: skip
            server.clients.append(clients.clientALA(args, client, len(rounds.shares[client]), 0))
            server.clients[-1].ALA.threshold = np.inf  # 11 passes, the fewest
        server.selected_clients = server.clients
        for name in ("first round", "second round"):
            start = [rounds.state.clients[client].model for client in rounds.clients]
            before = rounds.state.global_model
            for client, theirs in enumerate(server.clients):
                drawn = np.concatenate(local._batches(rounds.data(client)))
                theirs.ALA.train_data = list(zip(rounds.inputs[drawn], rounds.targets[drawn], strict=True))
                batches = rounds.batches(client, epochs=1)
                read[client] = [pair for inputs, targets in batches for pair in zip(inputs, targets, strict=True)]
            server.send_models()
            for theirs in server.clients:
                theirs.train()
            server.receive_models()
            server.aggregate_parameters()
            outputs = rounds.round()
            ours = torch.cat([output.memory for output in outputs])
            weights = torch.cat([rounds.vector(theirs.ALA.weights) for theirs in server.clients])
            yield Row(f"weights W, {name}", ours, weights, torch.ones_like(weights))
            trained = torch.cat([rounds.vector(theirs.model) for theirs in server.clients])
            yield Row(f"clients' models, {name}", torch.cat([o.model for o in outputs]), trained, torch.cat(start))
            yield Row(f"mean, {name}", rounds.state.global_model, rounds.vector(server.global_model), before)


def pfedme(folder: Path) -> Iterator[Row]:
    for decay in (0.0, 0.001):
        yield from _pfedme(folder, decay)


def _pfedme(folder: Path, decay: float) -> Iterator[Row]:
    a, eta, penalty, beta, steps = 0.05, 0.04, 2.0, 0.7, 3
    local = parts.EnvelopeTraining(steps=steps, inner_steps=4, inner_lr=a, outer_lr=eta, penalty=penalty)
    mean = parts.GlobalMean("samples", optimizer=parts.ServerMomentum(lr=beta, momentum=0.0))
    rounds = Rounds(parts.Method(local, parts.EnvelopeModel(), mean))
    sent = rounds.state.global_model
    names = "FLAlgorithms.servers.serverpFedMe", "FLAlgorithms.users.userpFedMe"
    with code_in(folder, *names, unused=["h5py", "tqdm", *VISION]) as (server, user):
        theirs = object.__new__(server.pFedMe)
        theirs.model, theirs.beta, theirs.users, thetas = rounds.load(sent), beta, [], []
        for client in rounds.clients:
            data, network = rounds.pairs(client), (rounds.load(sent), "Mclr_CrossEntropy")
            one = user.UserpFedMe("cpu", client, data, data, network, BATCH, eta, beta, penalty, steps, "", 4, a)
            one.iter_trainloader = iter(rounds.batches(client, steps=steps))
            one.optimizer.param_groups[0]["mu"] = decay
            one.set_parameters(rounds.load(sent))

            def after(new: Any, one: Any = one) -> None:  # is called before the model is overwritten by w
                thetas.append(rounds.vector(one.model))
                type(one).update_parameters(one, new)

            one.update_parameters = after
            one.train(steps)
            theirs.users.append(one)
        theirs.selected_users = theirs.users
        theirs.persionalized_aggregate_parameters()
        w = torch.cat([rounds.vector(one.local_model) for one in theirs.users])
    outputs, starts = rounds.round(), torch.cat([sent] * len(rounds.clients))
    reason = "their optimizer adds 0.001 theta to the gradient, which the paper does not have" if decay else ""
    words = ", their default weight decay" if decay else ", without their weight decay"
    yield Row("theta" + words, torch.cat([o.model for o in outputs]), torch.cat(thetas), starts, reason)
    yield Row("w_i" + words, torch.cat([o.extras["model"] for o in outputs]), w, starts, reason)
    yield Row("mean" + words, rounds.state.global_model, rounds.vector(theirs.model), sent, reason)


def fedrep(folder: Path) -> Iterator[Row]:
    def optimizer(parameters: Any) -> torch.optim.SGD:  # decays weights and not biases, as theirs
        own = list(parameters)
        weights, biases = ([p for p in own if (p.ndim > 1) == is_weight] for is_weight in (True, False))
        groups = [{"params": weights, "weight_decay": 1e-4}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=LR, momentum=0.5)

    local = parts.AlternatingTraining(head_epochs=2, epochs=1)
    rounds = Rounds(parts.Method(local, parts.SharedEmbedding(), parts.GlobalMean("uniform")), optimizer=optimizer)
    rounds.keep_random_models()
    with code_in(folder, "models.Update", unused=["models.test"]) as (update,):
        args = SimpleNamespace(
            dataset="cifar10", local_bs=BATCH, alg="fedrep", local_ep=3, local_rep_ep=1, local_updates=10**6,
            device="cpu",
        )  # fmt: skip
        theirs, starts = [], []
        for client in rounds.clients:
            starts.append(rounds.start_of(client))
            one = update.LocalUpdate(args, rounds.pairs(client), range(len(rounds.shares[client])))
            one.ldr_train = rounds.passes(client, epochs=3)
            network = rounds.load(starts[-1])
            shared = [name for name, _ in network.named_parameters() if name.startswith("features")]
            theirs.append(rounds.vector(one.train(network, shared, lr=LR)[0]))
    ours = torch.cat([output.model for output in rounds.round()])
    yield Row("clients' models, 2 passes of the head and 1 of the rest", ours, torch.cat(theirs), torch.cat(starts))


def fedbabu(folder: Path) -> Iterator[Row]:
    local = parts.FineTunedTraining(epochs=2, part="embedding", fine_tuned="all", fine_tuning_epochs=1)
    sgd = partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=1e-3)
    rounds = Rounds(parts.Method(local, parts.AdaptedEmbedding(), parts.GlobalMean("uniform")), optimizer=sgd)
    start = rounds.state.global_model
    with code_in(folder, "models.Update", "models.Fed", unused=["tqdm"]) as (update, fed):
        args = SimpleNamespace(local_bs=BATCH, local_ep=2, momentum=0.9, wd=1e-3, device="cpu")

        def trained(client: int, model: Tensor, epochs: int, head_lr: float) -> dict[str, Tensor]:
            one = update.LocalUpdate(args, rounds.pairs(client), range(len(rounds.shares[client])))
            one.ldr_train = rounds.passes(client, epochs=epochs)
            return one.train(rounds.load(model), LR, head_lr, local_eps=epochs)[0]

        theirs = [trained(client, start, 2, 0.0) for client in rounds.clients]
        mean = rounds.vector(fed.FedAvg(theirs))
        ours = torch.cat([output.model for output in rounds.round()])
        starts = torch.cat([start] * len(rounds.clients))
        yield Row("clients' models, head frozen", ours, torch.cat([rounds.vector(each) for each in theirs]), starts)
        yield Row("mean", rounds.state.global_model, mean, start)
        tuned = rounds.vector(trained(0, rounds.state.global_model, 1, LR))
    downlink = rounds.method.exchange.evaluation_down(rounds.state, 0, "global", rounds.layout)
    assert local.adaptation is not None
    output = local.adaptation(rounds.state.clients[0], downlink, rounds.data(0), rounds.engine)
    yield Row("a client's model after fine-tuning", output.model, tuned, rounds.state.global_model)


def fedbn(folder: Path) -> Iterator[Row]:
    method = parts.Method(parts.LocalTraining(epochs=1), parts.OwnLayers(), parts.GlobalMean("uniform"))
    rounds = Rounds(method, (20, 15, 10), network=partial(Network, normed=True))
    start = rounds.state.global_model
    with code_in(folder, "federated.fed_digits", unused=["PIL", *VISION]) as (digits,):
        digits.client_num = len(rounds.clients)
        models = [rounds.load(start) for _ in rounds.clients]
        server, shares = rounds.load(start), [1 / len(models)] * len(models)
        for _ in range(2):
            for client, network in enumerate(models):
                loader = DataLoader(rounds.batches(client, epochs=1), batch_size=None)
                sgd = torch.optim.SGD(network.parameters(), lr=LR)
                digits.train(network, loader, sgd, nn.CrossEntropyLoss(), len(models), "cpu")
            digits.communication(SimpleNamespace(mode="fedbn"), server, models, shares)
            rounds.round()
        # Their clients hold the new mean already; ours get it at the beginning of the next round.
        next_start = [rounds.start_of(client) for client in rounds.clients]
        theirs = [rounds.vector(network) for network in models]
    ours, both, starts = (torch.cat([each[:-1] for each in own]) for own in (next_start, theirs, [start] * len(models)))
    yield Row("clients' models with batch normalisation, two rounds", ours, both, starts)  # without the counter


def ditto(folder: Path) -> Iterator[Row]:
    penalty = 0.6
    rounds = Rounds(
        parts.Method(parts.DittoTraining(epochs=2), parts.EnvelopeModel(), parts.GlobalMean()), cluster_weight=penalty
    )
    rounds.keep_random_models()
    sent = rounds.state.global_model
    with code_in(folder, "models.Update", unused=["tqdm"]) as (update,):
        args = SimpleNamespace(local_bs=BATCH, local_ep=2, lr=LR, device="cpu")
        theirs, starts = [], []
        for client in rounds.clients:
            one = update.LocalUpdateDitto(args, rounds.pairs(client), range(len(rounds.shares[client])))
            one.ldr_train = rounds.passes(client, epochs=2)
            starts.append(rounds.state.clients[client].model)
            network, centre = rounds.load(starts[-1]), rounds.load(sent).state_dict()
            theirs.append(rounds.vector(one.train(network, centre, penalty, lr=LR, momentum=0.0)[0]))
    ours = torch.cat([output.model for output in rounds.round()])
    yield Row("personal models, plain SGD", ours, torch.cat(theirs), torch.cat(starts))


def apfl(folder: Path) -> Iterator[Row]:
    for adapt in ("never", "round"):
        yield from _apfl(folder, adapt)


def _apfl(folder: Path, adapt: Any) -> Iterator[Row]:
    class Linear(nn.Module):  # for which a mixture of outputs is the output of the mixture
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.linear(inputs)

    steps, alpha = 3, 0.3
    name = "fedtorch.comms.trainings.federated.centered.apfl"
    local = parts.MixtureTraining(steps=steps, alpha=alpha, adapt=adapt)
    rounds = Rounds(parts.Method(local, parts.EnvelopeModel(), parts.GlobalMean("uniform")), network=Linear)
    rounds.keep_random_models()
    sent, end = rounds.state.global_model, rounds.layout.num_parameters
    starts = [rounds.state.clients[client].model for client in rounds.clients]
    unused = ["six", "six.moves", "fedtorch.components.dataset"]
    with code_in(folder, name, "fedtorch.components.optimizers.sgd", unused=unused) as (code, optimizers):
        clients = []
        for client in rounds.clients:
            args = SimpleNamespace(
                rounds_comm=0, local_index=0, local_data_seen=0, growing_batch_size=False, epoch_=0,
                num_batches_train_per_device_per_epoch=100, local_steps=[steps], federated_sync_type="local_step",
                in_momentum=False, fed_personal_alpha=alpha, fed_adaptive_alpha=adapt == "round", debug=False,
            )  # fmt: skip
            model, personal = rounds.load(sent), rounds.load(starts[client])
            clients.append(SimpleNamespace(
                args=args, model=model, model_personal=personal, criterion=nn.CrossEntropyLoss(), metrics=(1,),
                optimizer=optimizers.SGD(model.parameters(), lr=LR), scheduler=None,
                optimizer_personal=optimizers.SGD(personal.parameters(), lr=LR),
                train_loader=rounds.batches(client, steps=steps), val_loader=None,
            ))  # fmt: skip
        server = MagicMock()
        server.model = rounds.load(sent)
        server.optimizer = optimizers.SGD(server.model.parameters(), lr=LR)
        zeros = partial(server.optimizer.zero_grad, set_to_none=False)  # as in old versions of PyTorch
        server.optimizer.zero_grad = zeros
        for parameter in server.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        server.args = SimpleNamespace(
            num_comms=1, rounds_comm=0, local_index=0, global_index=0, fed_personal=False, federated_type="apfl",
            quantized=False, lr_scale_at_sync=1.0, out_momentum=False, online_client_rate=1.0,
            graph=SimpleNamespace(ranks=list(rounds.clients), n_nodes=len(clients)),
        )  # fmt: skip
        code.adjust_learning_rate = lambda *given: LR
        code.load_data_batch = lambda args, inputs, targets, tracker: (inputs, targets)
        code.define_local_training_tracker = dict
        for idle in ("do_validate_centered", "log_validation_centered", "log", "logging_sync_time"):
            setattr(code, idle, MagicMock())
        code.logging_load_time = code.logging_globally = MagicMock()
        code.train_and_validate_apfl_centered(clients, server)
        v = torch.cat([rounds.vector(one.model_personal) for one in clients])
        alphas = torch.tensor([one.args.fed_personal_alpha for one in clients])

    def in_their_order(client: int) -> tuple[Tensor, float]:
        w, v, share, slope_of = sent, starts[client], alpha, rounds.engine.gradient
        _, drawn = draw_batches(0, rounds.data(client), steps=steps)
        for number, batch in enumerate(drawn):
            w = w - LR * slope_of(w, batch).vector
            slope = slope_of(share * v + (1 - share) * w, batch).vector
            v = v - LR * share * slope
            if adapt == "round" and number == 0:
                change = (share**2 + (1 - share) ** 2) * float((v - w) @ slope) + 0.02 * share
                share = min(max(share - LR * change, 0.0), 1.0)
        return v, share

    ordered = [in_their_order(client) for client in rounds.clients]
    outputs = rounds.round()
    if adapt == "never":
        yield Row("mean", rounds.state.global_model, rounds.vector(server.model), sent)
        ours = torch.cat([output.memory[:end] for output in outputs])
        yield Row("v_i, fixed alpha", ours, v, torch.cat(starts), "they mix v_i with w_i after its step")
        yield Row("v_i by lcfl's gradients in their order", torch.cat([o[0] for o in ordered]), v, torch.cat(starts))
    else:
        ours, reason = torch.tensor([float(output.memory[-1]) for output in outputs]), "another gradient of alpha"
        yield Row("alpha_i", ours, alphas, torch.full_like(alphas, alpha), reason)
        ours = torch.tensor([share for _, share in ordered])
        yield Row("alpha_i by lcfl's gradients with their formula", ours, alphas, torch.full_like(alphas, alpha))


# global models


class TwoRounds:
    """Two rounds of FedDyn's code, which is also used for SCAFFOLD and FedProx."""

    def __init__(self, folder: Path, rounds: Rounds, steps: int | None = None, epochs: int | None = None) -> None:
        self.folder, self.rounds, self.amount = folder, rounds, {"steps": steps, "epochs": epochs}
        self.start = rounds.state.global_model
        data = [rounds.rows(client) for client in rounds.clients]
        self.inputs, self.targets = ([each[part].numpy() for each in data] for part in (0, 1))

    def run(self, call: Callable[[Any, Any, nn.Module], Any]) -> tuple[Any, Tensor]:
        """Carries out two rounds of both, and returns what the authors' code returns and the clients' models."""
        rounds, loaders, outputs = self.rounds, [], []
        start = rounds.load(self.start)
        for _ in range(2):
            loaders += [rounds.passes(client, **self.amount) for client in rounds.clients]
            outputs = rounds.round()
        with (
            code_in(self.folder, "utils_methods", "utils_general", unused=PLOTS) as (code, general),
            tempfile.TemporaryDirectory() as root,
            chdir(root),
        ):
            for method in ("FedDyn", "Scaffold"):
                Path("Output/clients", method).mkdir(parents=True)

            def loader(dataset: Any, batch_size: int, shuffle: bool) -> Any:
                return loaders.pop(0) if shuffle else DataLoader(dataset, batch_size)

            general.data = SimpleNamespace(DataLoader=loader)
            data = SimpleNamespace(
                n_client=len(rounds.clients), clnt_x=self.inputs, clnt_y=self.targets, tst_x=self.inputs[0],
                tst_y=self.targets[0], name="clients", dataset="synt",
            )  # fmt: skip
            result = call(code, data, start)
        assert not loaders, "the authors' code has drawn all batches"
        return result, torch.cat([output.model for output in outputs])


def feddyn(folder: Path) -> Iterator[Row]:
    for sizes in (EQUAL, UNEQUAL):
        yield from _feddyn(folder, sizes)


def _feddyn(folder: Path, sizes: tuple[int, ...]) -> Iterator[Row]:
    alpha = 0.3
    mean = parts.GlobalMean("uniform", optimizer=parts.ServerDynamics())
    rounds = Rounds(
        parts.Method(parts.DynamicTraining(epochs=2), parts.GlobalReference(), mean), sizes, cluster_weight=alpha
    )
    both = TwoRounds(folder, rounds, epochs=2)

    def call(code: Any, data: Any, start: nn.Module) -> Any:
        found = code.train_FedDyn(data, 1.0, LR, BATCH, 2, 2, 9, 0.0, Network, start, alpha, 2, 1.0)
        return rounds.vector(found[-1][0]), torch.from_numpy(np.load("Output/clients/FedDyn/2_clnt_params_list.npy"))

    (server, clients), ours = both.run(call)
    words = "equal n_i" if sizes == EQUAL else "unequal n_i"
    reason = "" if sizes == EQUAL else "they train client i with alpha / (N n_i / sum n_j), the paper with alpha"
    starts = torch.cat([both.start] * len(sizes))
    yield Row(f"clients' models of the second round, {words}", ours, clients.flatten(), starts, reason)
    yield Row(f"server's model after two rounds, {words}", rounds.state.global_model, server, both.start, reason)


def scaffold(folder: Path) -> Iterator[Row]:
    for sizes in (EQUAL, UNEQUAL):
        yield from _scaffold(folder, sizes)


def _scaffold(folder: Path, sizes: tuple[int, ...]) -> Iterator[Row]:
    steps = 4
    method = parts.Method(parts.ControlledTraining(steps=steps), parts.ControlledModel(), parts.GlobalMean("uniform"))
    rounds = Rounds(method, sizes)
    both = TwoRounds(folder, rounds, steps=steps)

    def call(code: Any, data: Any, start: nn.Module) -> Any:
        found = code.train_SCAFFOLD(data, 1.0, LR, BATCH, steps, 2, 9, 0.0, Network, start, 2, 1.0)
        stored = torch.from_numpy(np.load("Output/clients/Scaffold/2_state_param_list.npy"))
        return rounds.vector(found[0][0]), stored[-1]

    (server, control), _ = both.run(call)
    words = "equal n_i" if sizes == EQUAL else "unequal n_i"
    reason = "" if sizes == EQUAL else "they weight the changes of c_i by N n_i / sum n_j, and divide c by it"
    yield Row(f"server's model after two rounds, {words}", rounds.state.global_model, server, both.start, reason)
    ours = rounds.state.aggregation["control"][0]
    yield Row(f"control variate c after two rounds, {words}", ours, control, torch.zeros_like(ours), reason)


def fedprox(folder: Path) -> Iterator[Row]:
    mu = 0.5
    rounds = Rounds(
        parts.Method(parts.LocalTraining(epochs=2, start="centre"), parts.GlobalReference(), parts.GlobalMean()),
        cluster_weight=mu,
    )
    start = rounds.state.global_model
    loaders = [rounds.passes(client, epochs=2) for client in rounds.clients]
    with code_in(folder, "utils_general", unused=PLOTS) as (general,):
        general.data = SimpleNamespace(DataLoader=lambda dataset, batch_size, shuffle: loaders.pop(0))
        theirs = []
        for client in rounds.clients:
            inputs, targets = (part.numpy() for part in rounds.rows(client))
            given = rounds.load(start), start, mu, inputs, targets, LR, BATCH, 2, 9, 0.0, "synt"
            theirs.append(rounds.vector(general.train_fedprox_mdl(*given)))
    ours = torch.cat([output.model for output in rounds.round()])
    yield Row("clients' models", ours, torch.cat(theirs), torch.cat([start] * len(theirs)))


def fednova(folder: Path) -> Iterator[Row]:
    for momentum, mu in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.4)):
        yield from _fednova(folder, momentum, mu)


def _fednova(folder: Path, momentum: float, mu: float) -> Iterator[Row]:
    local = parts.NormalisedTraining(epochs=1, start="centre", effective_steps="steps" if mu else "normaliser")
    sgd = partial(torch.optim.SGD, lr=LR, momentum=momentum)
    rounds = Rounds(
        parts.Method(local, parts.NormalisedModel(), parts.NormalisedMean()), optimizer=sgd, cluster_weight=mu
    )
    start, sizes = rounds.state.global_model, np.array([len(share) for share in rounds.shares])
    totals: list[Tensor] = []

    def communicate(tensors: list[Tensor], reduce: Any) -> None:  # the last client gets the sum over all
        for number, tensor in enumerate(tensors):
            if number == len(totals):
                totals.append(torch.zeros_like(tensor))
            totals[number] += tensor
            tensor.copy_(totals[number])

    with code_in(folder, "distoptim.FedNova") as (code,):
        code.communicate = communicate
        networks, optimizers = [], []
        for client, share in enumerate(sizes / sizes.sum()):
            networks.append(rounds.load(start))
            own = code.FedNova(networks[-1].parameters(), share, 0, mu=mu, lr=LR, momentum=momentum)
            for inputs, targets in rounds.batches(client, epochs=1):
                own.zero_grad()
                nn.functional.cross_entropy(networks[-1](inputs), targets).backward()
                own.step()
            optimizers.append(own)
        # The sum that their `average` makes of a GPU's tensors.
        effective = sum((own.local_steps if mu else own.local_normalizing_vec) * own.ratio for own in optimizers)
        for own in optimizers:
            own.average(tau_eff=effective)
    rounds.round()
    words = f"server's model, momentum {momentum}, mu {mu}"
    yield Row(words, rounds.state.global_model, rounds.vector(networks[-1]), start)


# clusters


def ifca(folder: Path) -> Iterator[Row]:
    local = parts.LeastLossTraining(steps=3)
    mean = parts.ClusterMean("participants", "participants", "uniform")
    rounds = Rounds(parts.Method(local, parts.AllCentres(), mean), (12,) * 6, batch_size=12)
    rounds.state.centres = torch.stack([rounds.random_model(seed) for seed in (1, 2)])
    start = rounds.state.centres
    with code_in(folder / "mnist", "train_cluster_mnist", unused=VISION) as (code,):
        theirs = object.__new__(code.TrainMNISTCluster)
        theirs.config = {"m": 6, "m_test": 6, "p": 2, "tau": 3}
        theirs.dataset = {"train": {"cluster_assign": [0] * 6}}
        theirs.criterion, theirs.models = nn.CrossEntropyLoss(), [rounds.load(model) for model in start]
        theirs.load_data = lambda client, train=True: rounds.rows(client)
        chosen = theirs.get_inference_stats(train=True)["cluster_assign"]
        theirs.train(chosen, LR)
        models = torch.stack([rounds.vector(model) for model in theirs.models])
    downlink = rounds.method.exchange.down(rounds.state, 0, rounds.layout)
    choices = [int(local(ClientState(), downlink, rounds.data(i), rounds.engine).extras["cluster"]) for i in range(6)]
    rounds.state.assignment = torch.tensor(choices)
    rounds.round()
    yield Row("clusters that clients choose", torch.tensor(choices), torch.tensor(np.array(chosen)))
    yield Row("cluster models", rounds.state.centres, models, start)


def cfl(folder: Path) -> Iterator[Row]:
    from sklearn.cluster import AgglomerativeClustering

    sgd = partial(torch.optim.SGD, lr=0.99 * LR)  # their clients lower the rate before they train
    method = parts.Method(parts.LocalTraining(epochs=2), parts.FullModel(), parts.GlobalMean("uniform"))
    rounds = Rounds(method, (12,) * 6, optimizer=sgd)
    start = rounds.state.global_model
    with code_in(folder, "fl_devices") as (code,):
        code.AgglomerativeClustering = lambda affinity, linkage: AgglomerativeClustering(
            metric=affinity, linkage=linkage
        )
        data = torch.utils.data.TensorDataset(*rounds.rows(0))
        server = code.Server(Network, data)
        code.copy(dict(server.W), dict(rounds.load(start).named_parameters()))
        clients = [code.Client(Network, partial(torch.optim.SGD, lr=LR), data, number) for number in rounds.clients]
        for number, client in enumerate(clients):
            client.synchronize_with_server(server)
            client.compute_weight_update(2, rounds.passes(number, epochs=2))
            client.reset()
        similarities = server.compute_pairwise_similarities(clients)
        halves = server.cluster_clients(similarities)
        server.aggregate_clusterwise([[clients[i] for i in half] for half in halves])
        updates = torch.stack([rounds.vector(client.dW) for client in clients])
        theirs = torch.stack([rounds.vector(client.W) for client in clients])
        norms = torch.tensor([server.compute_max_update_norm(clients), server.compute_mean_update_norm(clients)])
    layout, ends = rounds.layout, torch.stack([output.model for output in rounds.round()])
    own = ends - start
    labels, _ = bipartition_of(own, "complete")
    mean = parts.ClusterMean("participants", "participants", "uniform")
    state = replace(rounds.state, assignment=torch.from_numpy(labels), centres=torch.stack([start, start]))
    mean(state, [Uplink(i, {"model": model}, 12) for i, model in enumerate(ends)], layout)
    yield Row("clients' updates", own, updates, torch.zeros_like(updates))
    lengths = torch.tensor([float(own.norm(dim=1).max()), float(own.mean(dim=0).norm())])
    yield Row("largest update and length of the mean", lengths, norms, torch.zeros(2))
    other = torch.zeros(6, dtype=torch.int64)
    other[halves[1] if 0 in halves[0] else halves[0]] = 1
    yield Row("halves by complete linkage", torch.from_numpy(labels), other)
    yield Row("cluster models", state.centres[state.assignment], theirs, start.expand_as(theirs))


def pacfl(folder: Path) -> Iterator[Row]:
    draw = np.random.default_rng(0)
    bases = draw.normal(size=(3, 12, 3))
    data = [bases[i % 3] @ draw.normal(size=(3, 20)) + 0.3 * draw.normal(size=(12, 20)) for i in range(9)]
    signatures = [left_singular_vectors(torch.from_numpy(each), 3) for each in data]
    theirs = [np.linalg.svd(each, full_matrices=False)[0][:, :3] for each in data]
    with code_in(folder / "src" / "clustering", "hierarchical_clustering") as (code,):
        clients = list(range(len(data)))
        plain = code.calculating_adjacency(clients, theirs)
        both = code.calculating_adjacency(clients, [np.concatenate([each, -each], axis=1) for each in theirs])
        ours = angles(signatures, "vector_min")
        cuts = []
        for threshold in np.linspace(1, 89, 45):
            for linkage, name in (("weighted", "average"), ("complete", "maximum"), ("single", "minimum")):
                found = code.hierarchical_clustering(ours.copy(), threshold, name)
                cuts.append((cut_tree(ours, linkage, float(threshold)).labels, found))
    np.fill_diagonal(both, 0.0)
    np.fill_diagonal(plain, 0.0)
    zeros = torch.zeros(len(data), len(data))
    reason = "they take no absolute value of a product, whose sign is arbitrary (reading A23)"
    yield Row("angles between the clients' data", torch.from_numpy(ours), torch.from_numpy(plain), zeros, reason)
    yield Row("angles, with every vector and its negative", torch.from_numpy(ours), torch.from_numpy(both), zeros)
    apart = [_groups(labels) != {frozenset(group) for group in found} for labels, found in cuts]
    yield Row(f"{len(cuts)} clusterings of our angles, that differ", torch.tensor([sum(apart)]), torch.zeros(1))


def _groups(labels: Any) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in np.unique(labels)}


def clove(folder: Path) -> Iterator[Row]:
    draw, num_models, num_clients = np.random.default_rng(0), 4, 10
    unused = ["finch", "model", "utils.learning_utils", "utils.logging_utils"]
    apart = 0
    with code_in(folder, "utils.algorithm_utils", unused=unused) as (code,):
        for _ in range(500):
            losses = draw.exponential(size=(num_clients, num_models)).astype(np.float32)
            labels = draw.integers(num_models, size=num_clients)
            labels = np.unique(labels, return_inverse=True)[1]
            config = {
                "cluster_to_model_matching_method": "min_cost_matching_wrt_total_cluster_loss",
                "number_of_models": int(labels.max()) + 1,
                "total_number_of_models": num_models,
            }
            rows = dict(enumerate(losses.astype(np.float64)))
            _, found = code.match_clusters_to_models(config, labels, rows, list(range(num_clients)))
            ours = match_to_models(torch.from_numpy(losses), torch.from_numpy(labels))
            apart += int(any(int(ours[client]) != found[client] for client in range(num_clients)))
    yield Row("500 matchings of groups with models, that differ", torch.tensor([apart]), torch.zeros(1))


# robust rules


def robust(folder: Path) -> Iterator[Row]:
    layout = FederatedModule(Network, cut="linear").layout
    draw = torch.Generator().manual_seed(0)
    names = ["coordinatewise_median", "trimmed_mean", "krum", "rfa", "clipping"]
    with code_in(folder, *(f"codes.aggregator.{name}" for name in names)) as (median, trimmed, krum, rfa, clipping):
        for number in (10, 11):
            start = torch.randn(layout.size, generator=draw)
            updates = 0.3 * torch.randn(number, layout.size, generator=draw)
            updates[:2] += 3.0  # two attackers
            models, weights = list(start + updates), [1.0] * number
            pairs = [
                ("median", parts.CoordinateMedian(), median.CM(), ""),
                ("trimmed mean, two at either end", parts.TrimmedMean(2 / number), trimmed.TM(2), ""),
                ("Krum", parts.Krum(2 / number), krum.Krum(number, 2, 1), ""),
                ("geometric median, 100 steps", parts.GeometricMedian(100), rfa.RFA(100, 1e-6), ""),
                (
                    "geometric median, 2 steps", parts.GeometricMedian(2), rfa.RFA(2, 1e-6),
                    "they begin at w, lcfl at the median, and the algorithm has not converged",
                ),
                ("clipping, 1 step", parts.ClippedMean(2.0), clipping.Clipping(2.0), ""),
                ("clipping, 3 steps", parts.ClippedMean(2.0, 3), clipping.Clipping(2.0, 3), ""),
            ]  # fmt: skip
            for name, ours, theirs, reason in pairs:
                merged = ours(models, weights, start, layout)
                yield Row(f"{name}, n = {number}", merged, start + theirs(list(updates)), start, reason)
        apart = 0
        for _ in range(200):
            models = list(torch.randn(10, layout.size, generator=draw))
            ours = parts.Krum(0.2)(models, [1.0] * 10, torch.zeros(layout.size), layout)
            apart += int(not torch.equal(ours, krum.Krum(10, 2, 1)(models)))
    reason = "they square the squared distances once more"
    yield Row("200 choices of Krum among equals, that differ", torch.tensor([apart]), torch.zeros(1), reason=reason)


# Method: function, repository, and whose code it is.
COMPARISONS: dict[str, tuple[Callable[[Path], Iterator[Row]], str, str]] = {
    "FedALA": (fedala, "TsingZ0/FedALA", "the authors'"),
    "pFedMe": (pfedme, "CharlieDinh/pFedMe", "the authors'"),
    "FedRep": (fedrep, "lgcollins/FedRep", "the authors'"),
    "FedBABU": (fedbabu, "jhoon-oh/FedBABU", "the authors'"),
    "FedBN": (fedbn, "med-air/FedBN", "the authors'"),
    "APFL": (apfl, "MLOPTPSU/FedTorch", "the authors'"),
    "Ditto": (ditto, "jhoon-oh/FedBABU", "FedBABU's authors'"),
    "FedDyn": (feddyn, "alpemreacar/FedDyn", "the authors'"),
    "SCAFFOLD": (scaffold, "alpemreacar/FedDyn", "FedDyn's authors'"),
    "FedProx": (fedprox, "alpemreacar/FedDyn", "FedDyn's authors'"),
    "FedNova": (fednova, "JYWa/FedNova", "the authors'"),
    "IFCA": (ifca, "jichan3751/ifca", "the authors'"),
    "CFL": (cfl, "felisat/clustered-federated-learning", "the authors'"),
    "PACFL": (pacfl, "MMorafah/PACFL", "the authors'"),
    "CLoVE": (clove, "Nokia-Bell-Labs/Loss-Vector-based-Clustered-Federated-Learning", "the authors'"),
    "robust rules": (robust, "epfml/byzantine-robust-noniid-optimizer", "centred clipping's authors'"),
}
TABLE = Path(__file__).parents[1] / "docs" / "results" / "official.csv"
FIELDS = ("method", "repository", "commit", "code", "compared", "difference", "relative", "reason")


def commit_of(folder: Path) -> str:
    """Returns the commit of a clone."""
    if (folder / "COMMIT").exists():
        return (folder / "COMMIT").read_text().strip()
    words = ["git", "--git-dir", str(folder / ".git"), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"


def main(words: Sequence[str] | None = None) -> list[dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, help="the folder of the clones")
    parser.add_argument("--methods", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--csv", type=Path, help="writes the table to this file")
    args = parser.parse_args(words)
    table: list[dict[str, str]] = []
    torch.set_num_threads(1)
    for method in args.methods:
        compare, repository, code = COMPARISONS[method]
        folder = (args.clones / repository.split("/")[1]).resolve()
        if not folder.is_dir():
            print(f"{method}: skipped, there is no clone of {repository} at {folder}")
            continue
        commit = commit_of(folder)
        rows = list(compare(folder))  # what the authors' code prints is not shown
        print(f"{method}: {repository} at {commit[:10]}, {code} code")
        for row in rows:
            relative = "" if row.relative is None else f"{row.relative:.1e}"
            print(f"  {row.compared}: {row.difference:.1e}", relative and f"({relative} of the change)", row.reason)
            values = (method, repository, commit, code, row.compared, f"{row.difference:.1e}", relative, row.reason)
            table.append(dict(zip(FIELDS, values, strict=True)))
    if args.csv is not None:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
    return table


if __name__ == "__main__":
    main()
