"""Small federations, networks and states that many tests share."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn

from lcfl.core.callback import Callback
from lcfl.core.clients import ClientState, ClientStore
from lcfl.core.messages import Uplink
from lcfl.core.state import FederationState
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Synthetic, Tensors
from lcfl.data.partition import IID, Pathological
from lcfl.data.population import Population
from lcfl.engines import SequentialEngine, choose_engine, make_engine
from lcfl.federation.federation import Federation
from lcfl.methods.aggregation import ClusterMean, GlobalMean, NoAggregation, NormalisedMean, ServerDynamics
from lcfl.methods.clustering import LowRankCosine, RefreshedLowRankCosine
from lcfl.methods.exchange import (
    AdaptedEmbedding,
    AdaptedModel,
    AttentiveReference,
    CentreAndEmbedding,
    ClusterReference,
    ControlledModel,
    EnvelopeModel,
    FullModel,
    GlobalReference,
    NoExchange,
    NormalisedModel,
    OwnLayers,
    SharedEmbedding,
    SharedLayers,
)
from lcfl.methods.local import (
    AlternatingTraining,
    CalibratedTraining,
    ControlledTraining,
    DittoTraining,
    DynamicTraining,
    FineTunedTraining,
    InitialisedTraining,
    LocalTraining,
    MetaTraining,
    MixtureTraining,
    NormalisedTraining,
)
from lcfl.methods.method import Method
from lcfl.models import MLP, SplitNetwork
from lcfl.models.module import FederatedModule

WIDTHS = (2, 3, 2)  # widths of the linear network: inputs, embedding, classes


# networks and modules


def linear(widths=WIDTHS):
    """Returns the network x -> W2 (W1 x + b1) + b2, which is small enough for computations by hand."""
    return SplitNetwork(nn.Linear(widths[0], widths[1]), nn.Linear(widths[1], widths[2]))


def linear_module(lr=0.5, widths=WIDTHS, **options):
    return FederatedModule(partial(linear, widths), partial(torch.optim.SGD, lr=lr), **options)


class LogsNumber(FederatedModule):
    """Logs the number of a step in its run as ``number``."""

    def training_step(self, batch, batch_idx=0):
        self.log("number", batch_idx)
        return super().training_step(batch, batch_idx)


def without_gradients(parameters):
    """Returns SGD with a hook that sets all gradients to zero."""
    parameters = list(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: [each.grad.zero_() for each in parameters] and None)
    return optimizer


def linear_step(w, inputs, targets, widths=WIDTHS):
    """Returns mean cross-entropy and gradient of the linear network with flat parameters `w`, in float64 numpy."""
    n_in, n_mid, n_out = widths
    ends = np.cumsum([n_mid * n_in, n_mid, n_out * n_mid, n_out])
    w1, b1, w2, b2 = np.split(np.asarray(w, dtype=np.float64), ends[:-1])
    w1, w2 = w1.reshape(n_mid, n_in), w2.reshape(n_out, n_mid)
    x = np.asarray(inputs, dtype=np.float64)
    middle = x @ w1.T + b1
    scores = middle @ w2.T + b2
    exp = np.exp(scores - scores.max(axis=1, keepdims=True))
    chance = exp / exp.sum(axis=1, keepdims=True)
    rows = np.arange(len(x))
    loss = -np.log(chance[rows, targets]).mean()
    chance[rows, targets] -= 1
    d_scores = chance / len(x)
    d_middle = d_scores @ w2
    parts = [d_middle.T @ x, d_middle.sum(axis=0), d_scores.T @ middle, d_scores.sum(axis=0)]
    return loss, np.concatenate([part.ravel() for part in parts])


class Normed(SplitNetwork):
    """A network with batch normalisation and so with floating and integer buffers: P = 23, P_phi = 15, Q = 7."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Linear(3, 2))


class NormedMLP(SplitNetwork):
    """A network with batch normalisation for the blobs, which have 16 features and 8 classes."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 8))


class Pretrained(nn.Module):
    """A frozen body with batch normalisation and a frozen layer in the middle: P = 72 + 72, P_phi = 72, F = 258."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.adapter = nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8), nn.ReLU())
        self.decision = nn.Linear(8, 8)

    def forward(self, inputs):
        hidden = self.body(inputs)
        return self.decision(self.middle(hidden + self.adapter(hidden)))


# data


def blobs(num_clients=12, **options):
    """Returns data of four groups of clients, each with two of eight well separated classes; it is not set up yet."""
    options = {"dataset": Synthetic(samples_per_class=60), "partition": Pathological(2), **options}
    return FederatedDataModule(num_clients=num_clients, **options)


def loaded(data):
    """Sets a data module up and returns it."""
    data.prepare_data()
    data.setup()
    return data


def blobs_module(lr=0.05, **options):
    return FederatedModule(partial(MLP, 16, [16], 8), partial(torch.optim.SGD, lr=lr), **options)


def dealt(inputs, targets, train, val=None, test=None, label_view=None, groups=None, **options):
    """Deals exactly these samples to exactly these clients. One batch holds all samples unless `options` differ."""
    inputs, targets = torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(targets)
    num_clients, none = len(train), [np.empty(0, dtype=np.int64)] * len(train)
    arrays = [none if part is None else [np.asarray(each, dtype=np.int64) for each in part] for part in (val, test)]
    tests = {"own_split": arrays[1]}
    if label_view is not None:
        tests["label_view"] = [np.asarray(each, dtype=np.int64) for each in label_view]
    options = {"dataset": Tensors((inputs, targets)), "partition": IID(), "batch_size": 100, **options}
    data = blobs(num_clients, protocols=list(tests), **options)
    train = [np.asarray(each, dtype=np.int64) for each in train]
    classes = data.dataset.num_classes
    counts = np.stack([np.bincount(targets.numpy()[each], minlength=classes) for each in train]) if classes else None
    data._loaded = data.dataset.load(), Population(train, arrays[0], tests, groups, counts)
    return data


def two_sided(num_clients=2, size=6, seed=0):
    """Returns shifted points, with labels that depend on the client's parity. Each client also has two test points."""
    draw = np.random.default_rng(seed)
    owner = np.repeat(np.arange(num_clients), size + 2)
    side = 1 - 2 * (owner % 2)
    inputs = draw.normal(size=(len(owner), 2)) + side[:, None] * [1.0, -0.5]
    targets = (side * inputs[:, 0] + 0.3 * inputs[:, 1] > 0.4).astype(np.int64)
    shares = np.arange(len(owner)).reshape(num_clients, size + 2)
    return inputs, targets, list(shares[:, :size]), list(shares[:, size:])


# methods


def fedavg(**local):
    return Method(LocalTraining(**(local or {"steps": 3})), FullModel(), GlobalMean())


def alone(full_budget=False, **local):
    return Method(LocalTraining(**(local or {"steps": 3})), NoExchange(full_budget), NoAggregation())


def fedprox(**local):
    return Method(LocalTraining(start="centre", **(local or {"steps": 3})), GlobalReference(), GlobalMean())


def fedopt(optimizer, **local):
    return Method(LocalTraining(**(local or {"steps": 3})), FullModel(), GlobalMean(optimizer=optimizer))


def scaffold(aggregation=None, **local):
    local = ControlledTraining(**(local or {"steps": 3}))
    return Method(local, ControlledModel(), aggregation or GlobalMean("uniform"))


def feddyn(**local):
    local = DynamicTraining(start="centre", **(local or {"steps": 3}))
    return Method(local, GlobalReference(), GlobalMean("uniform", optimizer=ServerDynamics()))


def fedlc(tau=1.0, **local):
    return Method(CalibratedTraining(**(local or {"steps": 3}), tau=tau), FullModel(), GlobalMean())


def ditto(**local):
    return Method(DittoTraining(**(local or {"steps": 3})), EnvelopeModel(), GlobalMean())


def apfl(adapt="round", alpha=0.5, **local):
    local = MixtureTraining(adapt=adapt, alpha=alpha, **(local or {"steps": 3}))
    return Method(local, EnvelopeModel(), GlobalMean("uniform"))


def fedala(**local):
    local = InitialisedTraining(**{"steps": 3, **local})
    return Method(local, ClusterReference(), GlobalMean())


def fedamp(step=0.3, sigma=0.3, **local):
    return Method(LocalTraining(**(local or {"steps": 3})), AttentiveReference(step, sigma), GlobalMean("uniform"))


def fednova(momentum=0.0, **local):
    local = NormalisedTraining(start="centre", **(local or {"steps": 3}))
    return Method(local, NormalisedModel(), NormalisedMean(momentum))


def fedper(**local):
    return Method(LocalTraining(**(local or {"steps": 3})), SharedEmbedding(), GlobalMean())


def fedrep(**local):
    local = AlternatingTraining(**{"steps": 3, "head_steps": 3, **local})
    return Method(local, SharedEmbedding(), GlobalMean("uniform"))


def fedbabu(**local):
    options = {"steps": 3, "part": "embedding", **local}
    if "fine_tuning_steps" not in options:
        options["fine_tuning_epochs"] = 5
    return Method(FineTunedTraining(**options), AdaptedEmbedding(), GlobalMean())


def fedbn(own_layers=None, **local):
    return Method(LocalTraining(**(local or {"steps": 3})), OwnLayers(own_layers), GlobalMean("uniform"))


def lg_fedavg(global_layers=1, **local):
    return Method(LocalTraining(**(local or {"steps": 3})), SharedLayers(global_layers), GlobalMean())


def per_fedavg(**local):
    return Method(MetaTraining(**(local or {"steps": 3})), AdaptedModel(), GlobalMean())


def lcfed(num_clusters=4, local=None, mean=None, **options):
    options = {"dimension": 8, **options}
    clustering = LowRankCosine(num_clusters=num_clusters, **options)
    return Method(local or LocalTraining(steps=3), CentreAndEmbedding(), mean or ClusterMean(), [clustering])


def fedac(num_clusters=4, local=None, tuning=None, **options):
    clustering = [RefreshedLowRankCosine(num_clusters, **{"dimension": 4, **options}), *([tuning] if tuning else [])]
    mean = ClusterMean("stored", "participants")
    return Method(local or LocalTraining(steps=3), CentreAndEmbedding(), mean, clustering)


# runs


class Watch(Callback):
    """Keeps the server, and copies of the models and metrics after every round, including warm-up rounds."""

    def __init__(self):
        self.server, self.history, self.sampled = None, [], {}

    def on_fit_start(self, server):
        self.server = server

    def on_clients_sampled(self, state, sampled):
        self.sampled[state.round] = sampled

    def on_round_logged(self, state, row):
        self.history.append(
            SimpleNamespace(
                round=state.round - 1,
                assignment=state.assignment.clone(),
                centres=state.centres.clone(),
                global_model=state.global_model.clone(),
                participated=state.participated.clone(),
                row=dict(row),
            )
        )

    @property
    def state(self):
        return self.server.state

    @property
    def rows(self):
        """The rows of the training rounds."""
        return [each.row for each in self.history if each.round >= 0]


def fit(module, data, method, root, rounds=1, clients_per_round=1.0, callbacks=(), **options):
    """Runs a federation in this process that writes only the files of the run, and returns its `Watch`.

    It is evaluated at the end, with the paper's kinds of model only: ``final_models=None`` evaluates every kind.
    """
    watch = Watch()
    options = {"evaluate_every": 0, "final_models": [], "accelerator": "cpu", "devices": 1, **options}
    federation = Federation(
        rounds=rounds,
        clients_per_round=clients_per_round,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=root,
        name="run",
        callbacks=[watch, *callbacks],
        **options,
    )
    watch.metrics = federation.fit(module, data, method).metrics
    return watch


def engine(module, data, max_steps=None, precision="32-true"):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    return SequentialEngine(fabric, module, data.samples, max_steps)


def named_engine(name, module, data, precision="32-true"):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    return make_engine(choose_engine(name, module, data, "cpu", precision), fabric, module, data)


# states


def state_of(models, assignment, centres, participated=None, initial=None, **fields):
    """Returns a state after round 0 with these personal models (None: the client has none yet), R and Omega."""
    centres = torch.as_tensor(centres, dtype=torch.float32)
    initial = torch.zeros(centres.shape[1]) if initial is None else initial
    store = ClientStore(ClientState(initial))
    for client, model in enumerate(models):
        if model is not None:
            store[client] = ClientState(torch.as_tensor(model, dtype=torch.float32))
    if participated is None:
        participated = [model is not None for model in models]
    return FederationState(
        round=1,
        initial=initial,
        global_model=initial,
        centres=centres,
        assignment=torch.as_tensor(assignment),
        participated=torch.as_tensor(participated),
        clients=store,
        **fields,
    )


def upload(client, model, num_samples=1):
    return Uplink(client, {"model": torch.as_tensor(model, dtype=torch.float32)}, num_samples)


def server_of(layout, seed=0):
    """Returns a stand-in for a server with only what a clustering needs."""
    return SimpleNamespace(seed=seed, layout=layout, log=lambda name, value: None)
