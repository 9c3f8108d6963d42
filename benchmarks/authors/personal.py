"""Methods that give every client a model of its own. docs/results.md explains the differences."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from authors.common import BATCH, CLASSES, FEATURES, LR, VISION, Network, Rounds, Row, code_in, with_each
from lcfl import methods as parts


def fedala(folder: Path) -> Iterator[Row]:
    """Compares two rounds in which two clients learn the weights W of the last layer."""
    local = parts.InitialisedTraining(epochs=1, layers=1, share=1.0, threshold=1e-12, most_passes=11)
    rounds = Rounds(local, parts.ClusterReference(), parts.GlobalMean(), sizes=(20, 15), drop_last=True)
    rounds.keep_random_models()
    names = "flcore.servers.serverALA", "flcore.clients.clientALA"
    with code_in(folder / "system", *names) as (servers, clients):
        read: dict[int, Any] = {}  # the samples that they train with, in this order
        clients.read_client_data = lambda dataset, client, is_train: read.get(client)
        server = object.__new__(servers.FedALA)
        server.global_model = rounds.load(rounds.global_model)
        server.clients = [_ala_client(clients, rounds, client) for client in rounds.clients]
        server.selected_clients = server.clients
        for name in ("first round", "second round"):
            starts, before = rounds.kept_models, rounds.global_model
            for client, theirs in enumerate(server.clients):
                theirs.ALA.train_data = rounds.pairs(*local._batches(rounds.data(client)))
                read[client] = rounds.pairs(*rounds.drawn(client, epochs=1))
            server.send_models()
            for theirs in server.clients:
                theirs.train()
            server.receive_models()
            server.aggregate_parameters()
            ours, learned = rounds.round(), torch.stack([output.memory for output in rounds.outputs])
            weights = rounds.vectors(theirs.ALA.weights for theirs in server.clients)
            yield Row(f"weights W, {name}", learned, weights, torch.ones(1))
            trained = rounds.vectors(theirs.model for theirs in server.clients)
            yield Row(f"clients' models, {name}", ours, trained, starts)
            yield Row(f"mean, {name}", rounds.global_model, rounds.vector(server.global_model), before)


def _ala_client(clients: Any, rounds: Rounds, client: int) -> Any:
    args = SimpleNamespace(
        model=rounds.load(rounds.kept_models[client]), dataset="", device="cpu", num_classes=CLASSES,
        batch_size=BATCH, local_learning_rate=LR, local_steps=1, eta=1.0, rand_percent=100, layer_idx=2,
    )  # fmt: skip
    theirs = clients.clientALA(args, client, len(rounds.shares[client]), 0)
    theirs.ALA.threshold = torch.inf  # 11 passes, the fewest
    return theirs


DECAY = "their optimizer adds 0.001 theta to the gradient, which the paper does not have"


@with_each(("without their weight decay", 0.0, ""), ("their default weight decay", 0.001, DECAY))
def pfedme(folder: Path, words: str, decay: float, reason: str) -> Iterator[Row]:
    """Compares a round: the personal models theta, the w_i of the clients, and their mean."""
    a, eta, penalty, beta, steps = 0.05, 0.04, 2.0, 0.7, 3
    local = parts.EnvelopeTraining(steps=steps, inner_steps=4, inner_lr=a, outer_lr=eta, penalty=penalty)
    mean = parts.GlobalMean("samples", optimizer=parts.ServerMomentum(lr=beta, momentum=0.0))
    rounds = Rounds(local, parts.EnvelopeModel(), mean)
    sent, thetas = rounds.global_model, []
    names = "FLAlgorithms.servers.serverpFedMe", "FLAlgorithms.users.userpFedMe"
    with code_in(folder, *names, unused=["h5py", "tqdm", *VISION]) as (servers, users):

        class User(users.UserpFedMe):
            def update_parameters(self, new: Any) -> None:  # is called before the model is overwritten by w
                thetas.append(rounds.vector(self.model))
                super().update_parameters(new)

        server = object.__new__(servers.pFedMe)
        server.model, server.beta, server.users = rounds.load(sent), beta, []
        for client, share in enumerate(rounds.shares):
            data, network = rounds.pairs(share), (rounds.load(sent), "Mclr_CrossEntropy")
            user = User("cpu", client, data, data, network, BATCH, eta, beta, penalty, steps, "", 4, a)
            user.iter_trainloader = iter(rounds.batches(client, steps=steps))
            user.optimizer.param_groups[0]["mu"] = decay
            user.train(steps)
            server.users.append(user)
        server.selected_users = server.users
        server.persionalized_aggregate_parameters()
        w = rounds.vectors(user.local_model for user in server.users)
    yield Row(f"theta, {words}", rounds.round(), torch.stack(thetas), sent, reason)
    ours = torch.stack([output.extras["model"] for output in rounds.outputs])
    yield Row(f"w_i, {words}", ours, w, sent, reason)
    yield Row(f"mean, {words}", rounds.global_model, rounds.vector(server.model), sent, reason)


def _trainer(kind: Any, rounds: Rounds, client: int, epochs: int, **given: Any) -> Any:
    """Returns a client of FedRep's or FedBABU's code, which gets the batches that lcfl's client draws next."""
    args, share = SimpleNamespace(local_bs=BATCH, local_ep=epochs, device="cpu", **given), rounds.shares[client]
    theirs = kind(args, rounds.pairs(share), range(len(share)))
    theirs.ldr_train = rounds.passes(client, epochs=epochs)
    return theirs


def fedrep(folder: Path) -> Iterator[Row]:
    """Compares the clients' models after a round."""

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:  # decays weights and not biases, as theirs
        own = list(parameters)
        biases, weights = ([p for p in own if p.ndim == number] for number in (1, 2))
        return torch.optim.SGD([{"params": weights, "weight_decay": 1e-4}, {"params": biases}], lr=LR, momentum=0.5)

    local = parts.AlternatingTraining(head_epochs=2, epochs=1)
    rounds = Rounds(local, parts.SharedEmbedding(), parts.GlobalMean("uniform"), optimizer=optimizer)
    rounds.keep_random_models()
    starts, theirs = rounds.starts, []
    with code_in(folder, "models.Update", unused=["models.test"]) as (update,):
        args = {"dataset": "cifar10", "alg": "fedrep", "local_rep_ep": 1, "local_updates": 10**6}
        for client, start in enumerate(starts):
            one = _trainer(update.LocalUpdate, rounds, client, 3, **args)
            theirs.append(one.train(rounds.load(start), ["features.weight", "features.bias"], lr=LR)[0])
    words = "clients' models, 2 passes of the head and 1 of the rest"
    yield Row(words, rounds.round(), rounds.vectors(theirs), starts)


def lg_fedavg(folder: Path) -> Iterator[Row]:
    """Compares the clients' models after each of two rounds. The mean between them is lcfl's; theirs is in a script."""
    sgd = partial(torch.optim.SGD, lr=LR, momentum=0.5)
    rounds = Rounds(parts.LocalTraining(epochs=2), parts.SharedLayers(1), parts.GlobalMean("uniform"), optimizer=sgd)
    rounds.keep_random_models()
    with code_in(folder, "models.Update", unused=["tqdm"]) as (update,):
        for number in ("first", "second"):
            starts = rounds.starts
            theirs = [
                _trainer(update.LocalUpdate, rounds, client, 2).train(rounds.load(start), lr=LR)[0]
                for client, start in enumerate(starts)
            ]
            yield Row(f"clients' models, {number} round", rounds.round(), rounds.vectors(theirs), starts)


def fedbabu(folder: Path) -> Iterator[Row]:
    """Compares a round in which the head stays as it is, and the fine-tuning of the whole mean after it."""
    local = parts.FineTunedTraining(epochs=2, part="embedding", fine_tuned="all", fine_tuning_epochs=1)
    sgd = partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=1e-3)
    rounds = Rounds(local, parts.AdaptedEmbedding(), parts.GlobalMean("uniform"), optimizer=sgd)
    start = rounds.global_model
    with code_in(folder, "models.Update", "models.Fed", unused=["tqdm"]) as (update, fed):

        def trained(client: int, epochs: int, head_lr: float) -> dict[str, Tensor]:
            one = _trainer(update.LocalUpdate, rounds, client, epochs, momentum=0.9, wd=1e-3)
            return one.train(rounds.load(rounds.global_model), LR, head_lr)[0]

        theirs = [trained(client, 2, 0.0) for client in rounds.clients]
        yield Row("clients' models, head frozen", rounds.round(), rounds.vectors(theirs), start)
        mean = rounds.global_model
        yield Row("mean", mean, rounds.vector(fed.FedAvg(theirs)), start)
        tuned = rounds.vector(trained(0, 1, LR))
    downlink = rounds.method.exchange.evaluation_down(rounds.state, 0, "global", rounds.layout)
    assert local.adaptation is not None
    output = local.adaptation(rounds.state.clients[0], downlink, rounds.data(0), rounds.engine)
    yield Row("a client's model after fine-tuning", output.model, tuned, mean)


def fedbn(folder: Path) -> Iterator[Row]:
    """Compares the models with which the clients begin the third round."""
    network = partial(Network, normed=True)
    local, mean = parts.LocalTraining(epochs=1), parts.GlobalMean("uniform")
    rounds = Rounds(local, parts.OwnLayers(), mean, sizes=(20, 15, 10), network=network)
    start = rounds.global_model
    with code_in(folder, "federated.fed_digits", unused=["PIL", *VISION]) as (digits,):
        digits.client_num = len(rounds.clients)
        models = [rounds.load(start) for _ in rounds.clients]
        server, shares = rounds.load(start), [1 / len(models)] * len(models)
        for _ in range(2):
            for client, model in enumerate(models):
                loader = DataLoader(rounds.batches(client, epochs=1), batch_size=None)
                sgd = torch.optim.SGD(model.parameters(), lr=LR)
                digits.train(model, loader, sgd, nn.CrossEntropyLoss(), len(models), "cpu")
            digits.communication(SimpleNamespace(mode="fedbn"), server, models, shares)
            rounds.round()
    # Their clients hold the new mean already; ours get it at the beginning of the next round. The last number of a
    # model counts the batches.
    ours, theirs = rounds.starts[:, :-1], rounds.vectors(models)[:, :-1]
    yield Row("clients' models with batch normalisation, two rounds", ours, theirs, start[:-1])


def ditto(folder: Path) -> Iterator[Row]:
    """Compares the personal models after a round."""
    penalty = 0.6
    local = parts.DittoTraining(epochs=2)
    rounds = Rounds(local, parts.EnvelopeModel(), parts.GlobalMean(), cluster_weight=penalty)
    rounds.keep_random_models()
    starts, theirs = rounds.kept_models, []
    with code_in(folder, "models.Update", unused=["tqdm"]) as (update,):
        centre = rounds.load(rounds.global_model).state_dict()
        for client, start in enumerate(starts):
            one = _trainer(update.LocalUpdateDitto, rounds, client, 2, lr=LR)
            theirs.append(one.train(rounds.load(start), centre, penalty, lr=LR, momentum=0.0)[0])
    yield Row("personal models, plain SGD", rounds.round(), rounds.vectors(theirs), starts)


STEPS, ALPHA = 3, 0.3  # of APFL


def _linear() -> nn.Module:  # for which a mixture of outputs is the output of the mixture
    return nn.Sequential(OrderedDict(linear=nn.Linear(FEATURES, CLASSES)))


@with_each(("never",), ("round",))
def apfl(folder: Path, adapt: Any) -> Iterator[Row]:
    """Compares a round: the mean and the personal models v_i if alpha is fixed, else alpha."""
    local = parts.MixtureTraining(steps=STEPS, alpha=ALPHA, adapt=adapt)
    rounds = Rounds(local, parts.EnvelopeModel(), parts.GlobalMean("uniform"), network=_linear)
    rounds.keep_random_models()
    sent, starts = rounds.global_model, rounds.kept_models
    names = "fedtorch.comms.trainings.federated.centered.apfl", "fedtorch.components.optimizers.sgd"
    unused = ["six", "six.moves", "fedtorch.components.dataset"]
    with code_in(folder, *names, unused=unused) as (code, optimizers):
        clients = [_apfl_client(rounds, client, adapt, optimizers.SGD) for client in rounds.clients]
        server = _apfl_server(rounds, optimizers.SGD)
        code.adjust_learning_rate = lambda *given: LR
        code.load_data_batch = lambda args, inputs, targets, tracker: (inputs, targets)
        code.define_local_training_tracker = dict
        for name in [name for name in vars(code) if name.startswith(("log", "do_validate"))]:
            setattr(code, name, MagicMock())
        code.train_and_validate_apfl_centered(clients, server)
        v = rounds.vectors(client.model_personal for client in clients)
        alphas = torch.tensor([client.args.fed_personal_alpha for client in clients])
    ordered = [_in_their_order(rounds, client, adapt) for client in rounds.clients]
    rounds.round()
    memory = torch.stack([output.memory for output in rounds.outputs])  # v_i and alpha
    before = torch.full_like(alphas, ALPHA)
    if adapt == "never":
        yield Row("mean", rounds.global_model, rounds.vector(server.model), sent)
        yield Row("v_i, fixed alpha", memory[:, :-1], v, starts, "they mix v_i with w_i after its step")
        ours = torch.stack([own for own, _ in ordered])
        yield Row("v_i by lcfl's gradients in their order", ours, v, starts)
    else:
        yield Row("alpha_i", memory[:, -1], alphas, before, "another gradient of alpha")
        ours = torch.tensor([alpha for _, alpha in ordered])
        yield Row("alpha_i by lcfl's gradients with their formula", ours, alphas, before)


def _apfl_client(rounds: Rounds, client: int, adapt: Any, sgd: Any) -> SimpleNamespace:
    """Returns what their training reads and changes of a client."""
    args = SimpleNamespace(
        rounds_comm=0, local_index=0, local_data_seen=0, growing_batch_size=False, epoch_=0,
        num_batches_train_per_device_per_epoch=100, local_steps=[STEPS], federated_sync_type="local_step",
        in_momentum=False, fed_personal_alpha=ALPHA, fed_adaptive_alpha=adapt == "round", debug=False,
    )  # fmt: skip
    model, personal = rounds.load(rounds.global_model), rounds.load(rounds.kept_models[client])
    return SimpleNamespace(
        args=args, model=model, model_personal=personal, criterion=nn.CrossEntropyLoss(), metrics=(1,),
        optimizer=sgd(model.parameters(), lr=LR), optimizer_personal=sgd(personal.parameters(), lr=LR),
        scheduler=None, train_loader=rounds.batches(client, steps=STEPS), val_loader=None,
    )  # fmt: skip


def _apfl_server(rounds: Rounds, sgd: Any) -> MagicMock:
    """Returns what their training reads and changes of the server."""
    server, model = MagicMock(), rounds.load(rounds.global_model)
    server.model, server.optimizer = model, sgd(model.parameters(), lr=LR)
    zeros = partial(server.optimizer.zero_grad, set_to_none=False)  # as in old versions of PyTorch
    server.optimizer.zero_grad = zeros
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    server.args = SimpleNamespace(
        num_comms=1, rounds_comm=0, local_index=0, global_index=0, fed_personal=False, federated_type="apfl",
        quantized=False, lr_scale_at_sync=1.0, out_momentum=False, online_client_rate=1.0,
        graph=SimpleNamespace(ranks=list(rounds.clients), n_nodes=len(rounds.clients)),
    )  # fmt: skip
    return server


def _in_their_order(rounds: Rounds, client: int, adapt: Any) -> tuple[Tensor, float]:
    """Returns v_i ``[P]`` and alpha by lcfl's gradients, in the order of their steps and with their formula."""
    w, v, alpha, gradient = rounds.global_model, rounds.kept_models[client], ALPHA, rounds.engine.gradient
    for number, batch in enumerate(rounds.drawn(client, steps=STEPS)):
        w = w - LR * gradient(w, batch).vector
        slope = gradient(alpha * v + (1 - alpha) * w, batch).vector
        v = v - LR * alpha * slope
        if adapt == "round" and number == 0:
            change = (alpha**2 + (1 - alpha) ** 2) * float((v - w) @ slope) + 0.02 * alpha
            alpha = min(max(alpha - LR * change, 0.0), 1.0)
    return v, alpha
