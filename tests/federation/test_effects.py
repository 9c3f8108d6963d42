"""Warnings of settings that have no effect, or another one than expected."""

import warnings
from itertools import product

import pytest
import yaml

from lcfl.callbacks import Checkpoint
from lcfl.core.callback import Callback
from lcfl.federation.checks import check_callbacks, check_method
from lcfl.federation.effects import warn_of_idle_clusterings
from lcfl.federation.trial import check_network
from lcfl.methods.aggregation import (
    ClusterMean,
    CoordinateMedian,
    GlobalMean,
    NoAggregation,
    ServerAdam,
    ServerDynamics,
)
from lcfl.methods.clustering import (
    ClusterNumberTuning,
    GreedyIncentive,
    HierarchicalUpdates,
    LowRankCosine,
    RecursiveBipartition,
)
from lcfl.methods.exchange import (
    AdaptedModel,
    AttentiveReference,
    ClusterModel,
    ClusterReference,
    FullModel,
    GlobalReference,
    NoExchange,
)
from lcfl.methods.exchange.transforms import LowRankCompression
from lcfl.methods.local import (
    DynamicTraining,
    FineTunedTraining,
    LocalTraining,
    MetaTraining,
)
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from tests.helpers.builders import (
    alone,
    blobs,
    blobs_module,
    ditto,
    fedala,
    fedamp,
    fedavg,
    fedprox,
    lcfed,
    linear,
    linear_module,
    scaffold,
)
from tests.helpers.clustered import cgpfl_prox, ifca
from tests.helpers.commandline import CONFIGS

CENTRE, EMBEDDING = (LocalTraining(steps=1, start=start) for start in ("centre", "embedding"))


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (Method(CENTRE, FullModel(), GlobalMean()), {}, "start=centre has no effect: FullModel sends a model"),
        (Method(EMBEDDING, FullModel(), GlobalMean()), {}, "start=embedding has no effect: FullModel sends a model"),
        (scaffold(steps=1, start="centre"), {}, "start=centre has no effect: ControlledModel sends a model"),
        (ifca(steps=1, start="centre"), {}, "start=centre has no effect: LeastLossTraining chooses a model"),
        (fedavg(), {"cluster_weight": 9.0, "lr": 1.0}, r"cluster_weight \(mu\) = 9.0 .* FullModel sends no centre\.$"),
        (fedavg(), {"global_weight": 0.3}, r"model.global_weight \(lambda\) = 0.3 .* FullModel sends no embedding\.$"),
        (alone(), {"cluster_weight": 0.3}, r"model.cluster_weight \(mu\) = 0.3 .* NoExchange sends no centre\.$"),
        (alone(), {"global_weight": 0.3}, r"model.global_weight \(lambda\) = 0.3 .* NoExchange sends no embedding\.$"),
        (lcfed(), {"lr": 1.0, "cluster_weight": 1.5, "global_weight": 0.5}, "rate 1.0 times .* = 2.0 is >= 2.* Keep"),
    ],
)
def test_setting_without_an_effect_or_that_diverges_gives_one_warning(method, options, words):
    with pytest.warns(UserWarning, match=words) as caught:
        check_method(method, linear_module(**options), 5)
    assert len(caught) == 1


@pytest.mark.filterwarnings("error")
def test_valid_settings_give_no_warning():
    check_method(lcfed(), linear_module(lr=1.0, cluster_weight=1.4, global_weight=0.5), 20)
    check_method(fedavg(), linear_module(), 20)
    check_method(alone(), linear_module(), 20)
    check_network(blobs_module(), blobs())
    check_callbacks([Callback(), Checkpoint(), Callback()])


@pytest.mark.parametrize(
    ("local_update", "optimizer", "words"),
    [
        (DynamicTraining(1), None, "DynamicTraining is one half of FedDyn, and ServerDynamics is the other"),
        (
            LocalTraining(1, start="centre"),
            ServerDynamics(),
            "ServerDynamics is one half of FedDyn, and DynamicTraining",
        ),
        (DynamicTraining(1), ServerDynamics(), None),
    ],
)
def test_half_of_feddyn_is_warned_about(local_update, optimizer, words):
    method = Method(local_update, GlobalReference(), GlobalMean("uniform", optimizer=optimizer))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_method(method, linear_module(cluster_weight=0.1), 5)
    assert [bool(words) and words in str(each.message) for each in caught] == [True] * bool(words)


def test_feddyn_with_weights_by_samples_is_warned_about():
    method = Method(DynamicTraining(1), GlobalReference(), GlobalMean("samples", optimizer=ServerDynamics()))
    with pytest.warns(UserWarning, match="with weights=samples, FedDyn converges to a wrong model"):
        check_method(method, linear_module(cluster_weight=0.1), 5)


@pytest.mark.parametrize(
    ("transforms", "rule", "words"),
    [
        (
            [LowRankCompression(0.9)],
            None,
            "exchange: the transform LowRankCompression makes FedDyn converge to a wrong",
        ),
        ([], CoordinateMedian(), "method.aggregation: the rule CoordinateMedian makes FedDyn converge to a wrong"),
    ],
)
def test_feddyn_whose_server_sees_other_changes_is_warned_about(transforms, rule, words):
    mean = GlobalMean("uniform", optimizer=ServerDynamics(), rule=rule)
    method = Method(DynamicTraining(1), GlobalReference(transforms=transforms), mean)
    with pytest.warns(UserWarning, match=words):
        check_method(method, linear_module(cluster_weight=0.1), 5)


def test_pulls_that_a_local_update_does_not_have_are_warned_about():
    method = Method(MetaTraining(steps=1), ClusterReference(), ClusterMean("participants", "participants"))
    with pytest.warns(UserWarning, match=r"cluster_weight \(mu\) = 0.5 has no effect: MetaTraining has no pulls"):
        check_method(method, linear_module(cluster_weight=0.5), 5)


MISSING = r"model.cluster_weight \(mu\) and model.global_weight \(lambda\) are 0, so {} has no effect"


@pytest.mark.parametrize(
    ("method", "part", "file"),
    [
        (fedprox(), "GlobalReference", "fedprox"),
        (ditto(), "DittoTraining", "ditto"),
        (ditto(steps=1, start="centre"), "DittoTraining", "ditto"),
        (fedamp(), "AttentiveReference", "fedamp"),
        (cgpfl_prox(), "ClusterReference", "cgpfl_prox"),
        (lcfed(), "CentreAndEmbedding", "lcfed"),
    ],
)
def test_a_reference_that_nothing_is_pulled_to_gives_one_warning(method, part, file):
    weights = yaml.safe_load((CONFIGS / f"methods/{file}.yaml").read_text())["model"]
    advice = " and ".join(f"model.{weight}, e.g. to {value}" for weight, value in weights.items() if value)
    words = f"{MISSING.format(part)}.* Set {advice}, as configs/methods/{file}.yaml does"
    with pytest.warns(UserWarning, match=words) as caught:
        check_method(method, linear_module(), 20)
    assert len(caught) == 1


class OwnTerm(FederatedModule):
    def regularizer(self):
        return 0.0 if self.pulls.centre is None else self.pulls.centre.sum()


class OwnStep(FederatedModule):
    def training_step(self, batch, batch_idx=0):
        return super().training_step(batch, batch_idx) + self.pulls.centre.sum()


class OwnUpdate(LocalTraining):
    pass


@pytest.mark.filterwarnings("error")
def test_a_reference_with_another_use_than_pulls_gives_no_warning():
    for method in (fedala(), lcfed(local=CENTRE), lcfed(local=EMBEDDING), lcfed(local=OwnUpdate(1))):
        check_method(method, linear_module(), 20)
    for module in (OwnTerm, OwnStep):
        check_method(fedprox(), module(linear), 20)
    for weight in ("cluster_weight", "global_weight"):
        check_method(lcfed(), linear_module(**{weight: 0.1}), 20)


@pytest.mark.parametrize(
    ("exchange", "start", "warns"),
    [(ClusterReference(), "own", True), (ClusterReference(), "centre", False), (ClusterModel(), "own", False)],
)
def test_updates_from_different_models_are_warned_about(exchange, start, warns):
    mean, clustering = ClusterMean("participants", "participants"), HierarchicalUpdates(2, num_clusters=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_method(Method(LocalTraining(1, start=start), exchange, mean, [clustering]), linear_module(), 5)
    assert any("HierarchicalUpdates compares updates from the common" in str(each.message) for each in caught) == warns


LOCAL, BOTH = LocalTraining(1), ("participants", "participants")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Method(LOCAL, FullModel(), ClusterMean(*BOTH, optimizer=ServerAdam())), "Use GlobalMean instead"),
        (Method(LOCAL, FullModel(), GlobalMean(optimizer=ServerAdam())), None),
        (Method(LOCAL, FullModel(), ClusterMean(*BOTH, rule=CoordinateMedian())), None),
        (Method(CENTRE, AttentiveReference(), GlobalMean(optimizer=ServerAdam())), "AttentiveReference sends means of"),
        (Method(CENTRE, AttentiveReference(), GlobalMean(rule=CoordinateMedian())), "rule=CoordinateMedian has no"),
        (
            Method(CENTRE, AttentiveReference(), ClusterMean(*BOTH), [LowRankCosine(2)]),
            "no client trains the model of its cluster",
        ),
        (Method(LOCAL, NoExchange(), NoAggregation()), None),
        (
            Method(FineTunedTraining(1, fine_tuning_steps=1), FullModel(), GlobalMean()),
            "no client fine-tunes its model with FullModel",
        ),
        (Method(FineTunedTraining(1, fine_tuning_steps=1), AdaptedModel(), GlobalMean()), None),
    ],
)
def test_parts_that_no_client_notices_are_warned_about(method, words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_method(method, linear_module(), 5)
    assert [bool(words) and words in str(each.message) for each in caught] == [True] * bool(words)


@pytest.mark.parametrize(
    ("clustering", "words"),
    [
        (HierarchicalUpdates(after=10), "HierarchicalUpdates begins in round 10, but the run has 10 rounds"),
        (HierarchicalUpdates(after=9), None),
        (ClusterNumberTuning(start=30), "ClusterNumberTuning begins in round 30"),
        (RecursiveBipartition(min_round=20, stale_max=5), "RecursiveBipartition begins in round 20"),
        (
            RecursiveBipartition(min_round=2, stale_max=0),
            "only 3 of 5 clients take part in a round, but a",
        ),
        (RecursiveBipartition(min_round=2, stale_max=5), None),
        (GreedyIncentive(once=True), "only 3 of 5 clients take part in a round, but with once=true"),
        (GreedyIncentive(), None),
    ],
)
def test_clusterings_that_never_cluster_are_warned_about(clustering, words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_idle_clusterings([clustering], 10, 3, 5)
    assert [bool(words) and words in str(each.message) for each in caught] == [True] * bool(words)


@pytest.mark.parametrize(("taken", "tested"), list(product(("uniform", "samples"), repeat=2)))
def test_a_bipartition_that_tests_another_mean_is_warned_about(taken, tested):
    mean = ClusterMean("participants", "participants", weights=taken)
    method = Method(LocalTraining(1), ClusterModel(), mean, [RecursiveBipartition(weights=tested)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_method(method, linear_module(), 5)
    assert [f"tests a mean with weights={tested}" in str(each.message) for each in caught] == [True] * (taken != tested)


def test_a_clustering_that_needs_everyone_is_not_warned_about_if_everyone_takes_part():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_clusterings([RecursiveBipartition(min_round=2, stale_max=0)], 10, 5, 5)
        warn_of_idle_clusterings([LowRankCosine()], 0, 3, 5)  # its offline round takes place
