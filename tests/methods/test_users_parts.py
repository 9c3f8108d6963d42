"""Tests what parts of the user's own may and may not do: draw, change what others hold, and leave something out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from lcfl import Clustering, Downlink, Exchange, ExtraRound, Federation, FullModel, GlobalMean, LocalTraining, Method
from lcfl.data.faults import ScaledUpdate, UpdateFault
from lcfl.methods import ClusterMean, ClusterModel
from tests.helpers.builders import blobs, blobs_module

OWN = {"over": "participants", "embedding_over": "participants"}


def trained(tmp_path, method, rounds=2, ckpt_path=None, data=None, **settings):
    settings = {"devices": 1, "accelerator": "cpu", "enable_progress_bar": False, "logger": False} | settings
    federation = Federation(rounds, default_root_dir=tmp_path, **settings)
    return federation.fit(blobs_module(), data or blobs(), method, ckpt_path=ckpt_path).state


def of(local_update=None, exchange=None, aggregation=None, clustering=()):
    return Method(
        local_update or LocalTraining(steps=1), exchange or FullModel(), aggregation or GlobalMean(), list(clustering)
    )


# random draws


def noisy(vector):
    return vector + 0.01 * torch.randn(len(vector))


@dataclass(frozen=True)
class DrawsUp(FullModel):
    def up(self, output, downlink, layout):
        return {"model": noisy(output.model)}


@dataclass(frozen=True)
class DrawsAtClient(FullModel):
    def at_client(self, downlink, state, layout):
        return Downlink({"model": noisy(downlink.payload["model"])})


@dataclass(frozen=True)
class DrawsAtServer(FullModel):
    def at_server(self, uplink, state, layout):
        return replace(uplink, payload={"model": noisy(uplink.payload["model"])})


@dataclass
class DrawsInHook(Clustering):
    hook: str = "on_round_start"

    def __post_init__(self):
        setattr(self, self.hook, self._draw)

    def _draw(self, server, state):
        state.assignment = torch.randint(0, 1, (state.num_clients,))
        state.centres = state.centres + 0.01 * torch.randn_like(state.centres)


@pytest.mark.parametrize(
    "method",
    [
        of(exchange=DrawsUp()),
        of(exchange=DrawsAtClient()),
        of(exchange=DrawsAtServer()),
        *(
            of(exchange=ClusterModel(), aggregation=ClusterMean(**OWN), clustering=[DrawsInHook(hook)])
            for hook in ("on_fit_start", "on_round_start", "on_uploads")
        ),
    ],
)
def test_what_a_part_draws_depends_on_the_seed_alone(tmp_path, method):
    models = []
    for number, devices in enumerate([1, 1, 2]):
        torch.manual_seed(number)  # what the program has drawn before has no effect
        models.append(trained(tmp_path, method, devices=devices).global_model)
    assert torch.equal(models[0], models[1]) and torch.equal(models[0], models[2])
    torch.manual_seed(0)
    assert not torch.equal(models[0], trained(tmp_path, method, seed=1).global_model)


def test_what_an_exchange_draws_is_the_same_with_every_engine(tmp_path):
    plain, drawn = (
        [
            trained(tmp_path, of(exchange=exchange), 1, engine=engine).global_model
            for engine in ("sequential", "compiled")
        ]
        for exchange in (FullModel(), DrawsUp())
    )
    added = [noisy - without for noisy, without in zip(drawn, plain, strict=True)]
    assert added[0].abs().max() > 1e-3
    assert torch.allclose(added[0], added[1], atol=1e-5)


def test_a_resumed_run_draws_in_on_fit_start_what_the_whole_run_drew(tmp_path):
    @dataclass
    class Draws(Clustering):
        def on_fit_start(self, server, state):
            self.vector = torch.randn(3).tolist()

    found = []
    for rounds, ckpt_path in ((1, None), (2, "last")):
        clustering = Draws()
        trained(tmp_path, of(None, ClusterModel(), ClusterMean(**OWN), [clustering]), rounds, ckpt_path)
        found.append(clustering.vector)
    assert found[0] == found[1]


@dataclass
class Misplaces(Clustering):
    def on_round_start(self, server, state):
        state.assignment = torch.full((state.num_clients,), 9)


def test_clusters_that_do_not_exist_are_blamed_on_the_clustering_that_set_them(tmp_path):
    with pytest.raises(ValueError, match=r"^Misplaces: state\.assignment has numbers from 9 to 9"):
        trained(tmp_path, of(None, ClusterModel(), ClusterMean(**OWN), [Misplaces()]))


# changes in place


@dataclass(frozen=True)
class ChangesMemory(LocalTraining):
    def __call__(self, state, downlink, data, engine):
        memory = torch.zeros(3) if state.memory is None else state.memory.add_(1)
        return replace(super().__call__(state, downlink, data, engine), memory=memory)


@dataclass(frozen=True)
class ChangesModel(LocalTraining):
    def __call__(self, state, downlink, data, engine):
        state.model.mul_(0.5)
        return super().__call__(state, downlink, data, engine)


@dataclass(frozen=True)
class ChangesDownlink(FullModel):
    def up(self, output, downlink, layout):
        downlink.payload["model"].zero_()
        return super().up(output, downlink, layout)


@dataclass(frozen=True)
class ChangesOutput(FullModel):
    def up(self, output, downlink, layout):
        return {"model": output.model.clamp_(-1, 1)}


@dataclass(frozen=True)
class ChangesReceived(UpdateFault):
    def sent(self, trained, received, before, draw):
        return received.neg_()


@dataclass(frozen=True)
class ChangesGlobalModel(GlobalMean):
    def __call__(self, state, uploads, layout):
        state.global_model.copy_(torch.stack([each.payload["model"] for each in uploads]).mean(dim=0))


@dataclass(frozen=True)
class RemembersInference(LocalTraining):
    def __call__(self, state, downlink, data, engine):
        with torch.inference_mode():
            memory = torch.ones(3)
        return replace(super().__call__(state, downlink, data, engine), memory=memory)


def test_tensors_of_inference_mode_may_be_kept(tmp_path):
    assert trained(tmp_path, of(RemembersInference(steps=1))).clients[0].memory.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("method", "faults", "words"),
    [
        (of(ChangesMemory(steps=1)), [], "ChangesMemory changed 'memory' of the client's state in place"),
        (
            of(ChangesModel(steps=1), ClusterModel(keeps_model=True), ClusterMean(**OWN)),
            [],
            "ChangesModel changed 'model' of the client's state in place",
        ),
        (of(exchange=ChangesDownlink()), [], "ChangesDownlink changed 'model' of the downlink in place"),
        (of(exchange=ChangesOutput()), [], "ChangesOutput changed 'model' of the local update's output in place"),
        (of(), [ChangesReceived(clients=[1])], r"ChangesReceived.sent changed 'received' of its arguments in place"),
        (
            of(aggregation=ChangesGlobalModel()),
            [],
            r"ChangesGlobalModel changed 'model' of a message to a client in place, which is a part of state\.global",
        ),
    ],
)
def test_changes_in_place_of_what_others_hold_are_refused(tmp_path, method, faults, words):
    with pytest.raises(ValueError, match=rf"{words}.*Change a clone of it\."):
        trained(tmp_path, method, data=blobs(faults=faults))


# what is left out


@dataclass(frozen=True)
class WithoutModels(Exchange):
    sends: ClassVar[tuple[str, ...]] = ()

    def down(self, state, client, layout):
        return Downlink({})


@dataclass(frozen=True)
class ReturnsNothing(FullModel):
    def at_server(self, uplink, state, layout):
        uplink.payload["model"].clone()


@dataclass(frozen=True)
class Misspelt(FullModel):
    def down(self, state, client, layout):
        return Downlink({"modle": state.global_model})


@dataclass(frozen=True)
class Short(FullModel):
    def up(self, output, downlink, layout):
        return {"model": output.model[:1]}


@dataclass(frozen=True)
class LossWithGradient(LocalTraining):
    def __call__(self, state, downlink, data, engine):
        output = super().__call__(state, downlink, data, engine)
        return replace(output, loss=output.model.clone().requires_grad_().sum())


@dataclass
class OddExtraRounds(Clustering):
    clients: Sequence[int] = ()
    exchange: Exchange | None = None

    def warmup_rounds(self, num_clients):
        return [ExtraRound(self.clients, exchange=self.exchange)]


@dataclass
class OddLaterRounds(Clustering):
    has_extra_rounds: ClassVar[bool] = True

    def extra_round(self, state, sampled):
        return ExtraRound([state.num_clients])


@dataclass(frozen=True)
class WithoutSends(Exchange):
    def down(self, state, client, layout):
        return Downlink({})


def test_an_exchange_that_does_not_say_what_it_is_is_refused():
    with pytest.raises(ValueError, match=r"WithoutModels does not .* attributes models, reported"):
        of(exchange=WithoutModels())


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            of(exchange=ReturnsNothing()),
            "ReturnsNothing.at_server returned None; its type must be Uplink",
        ),
        (of(exchange=Misspelt()), r"Misspelt.down: sends 'modle', which its sends does not name \(model\)"),
        (of(exchange=Short()), r"got a model of shape \[1\] in a mean of models of shape"),
        (of(LossWithGradient(steps=1)), r"LossWithGradient returned a loss that requires a gradient; .* loss\.detach"),
        *(
            (of(clustering=[OddExtraRounds(clients)], exchange=ClusterModel(), aggregation=ClusterMean(**OWN)), words)
            for clients, words in [
                ((99,), "OddExtraRounds.warmup_rounds: got an ExtraRound with clients 99; .* from 0 to"),
                ((-1,), "ExtraRound with clients -1"),
                ((1, 1), "ExtraRound with clients 1, 1; they must be different"),
            ]
        ),
        *(
            (of(clustering=[clustering], exchange=ClusterModel(), aggregation=ClusterMean(**OWN)), words)
            for clustering, words in [
                (OddLaterRounds(), "OddLaterRounds.extra_round: got an ExtraRound with clients 12"),
                (OddExtraRounds((1,), WithoutSends()), "WithoutSends does not say what it is: .* attributes sends"),
            ]
        ),
    ],
)
def test_what_a_part_gets_wrong_is_said_in_words(tmp_path, method, words):
    with pytest.raises(ValueError, match=words):
        trained(tmp_path, method)


def test_a_local_update_that_cannot_go_from_process_to_process_is_refused_before_training(tmp_path):
    @dataclass(frozen=True)
    class Hidden(LocalTraining):
        pass

    assert trained(tmp_path, of(Hidden(steps=1))).round == 2
    assert trained(tmp_path, of(Hidden(steps=1)), devices=2, evaluate_models=[], final_models=[]).round == 2
    with pytest.raises(ValueError, match=r"^method\.local_update: Hidden cannot be sent to another process"):
        trained(tmp_path, of(Hidden(steps=1)), devices=2)


# limits, and what a resumed run compares


@dataclass(frozen=True)
class Halves(FullModel):
    """Uploads a model of which only the server can make a model."""

    def up(self, output, downlink, layout):
        middle = len(output.model) // 2
        return {"first": output.for_server[:middle], "second": output.for_server[middle:]}

    def at_server(self, uplink, state, layout):
        return replace(uplink, payload={"model": torch.cat([uplink.payload["first"], uplink.payload["second"]])})


def test_the_limit_on_updates_holds_for_an_upload_of_which_the_server_makes_a_model(tmp_path):
    scaled = blobs(faults=[ScaledUpdate(clients=[1], factor=1e6)])
    with pytest.warns(UserWarning, match=r"1 updates have norms up to .*beyond trainer\.max_update_norm=100"):
        trained(tmp_path, of(exchange=Halves()), max_update_norm=100.0, data=scaled)


class Weighted(GlobalMean):
    """A plain subclass, and no dataclass."""

    def __init__(self, share):
        super().__init__()
        self.share = share


class Level(UpdateFault):
    def __init__(self, level, **options):
        super().__init__(**options)
        self.level = level

    def sent(self, trained, received, before, draw):
        return torch.full_like(trained, self.level)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda value: (of(aggregation=Weighted(value)), []), r"method\.aggregation\.share: .* 0\.5, this run 5\.0"),
        (lambda value: (of(), [Level(value, clients=[1])]), "partition: "),
    ],
)
def test_a_setting_of_a_plain_subclass_may_not_change_when_a_run_is_resumed(tmp_path, made, words):
    def fit(value, rounds, ckpt_path=None):
        method, faults = made(value)
        return trained(tmp_path, method, rounds, ckpt_path, blobs(faults=faults))

    fit(0.5, 1)
    assert fit(0.5, 2, "last").round == 2
    with pytest.raises(ValueError, match=words):
        fit(5.0, 3, "last")


class Counting(GlobalMean):
    """Counts its calls, and has a logger."""

    def __init__(self, log):
        super().__init__()
        self.log, self.calls = log, 0

    def __call__(self, state, uploads, layout):
        object.__setattr__(self, "calls", self.calls + 1)
        super().__call__(state, uploads, layout)


def test_what_a_plain_subclass_counts_and_logs_is_no_setting(tmp_path):
    method = of(aggregation=Counting(logging.getLogger("mine")))
    trained(tmp_path, method, 1)
    assert trained(tmp_path, method, 2, "last").round == 2
    federation = Federation(2, default_root_dir=tmp_path, accelerator="cpu", devices=1, enable_progress_bar=False)
    assert federation.test(blobs_module(), blobs(), method)
