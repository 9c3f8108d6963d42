"""Tests of the data module: the contract on test data for every partition, protocol and pool, and Lightning."""

import json
from itertools import combinations, pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lcfl.data.datamodule import Protocol
from lcfl.data.datasets import Synthetic, Tensors
from lcfl.data.partition import IID, ClientShares, CopyPerGroup, FromFile, Pathological, write_partition
from lcfl.data.protocols import PROTOCOLS
from tests.data.partitions import BLOBS, DISJOINT_PARTITIONS, OVERLAPPING_PARTITIONS, module
from tests.helpers.builders import blobs, loaded

PARTITIONS = st.one_of(DISJOINT_PARTITIONS, OVERLAPPING_PARTITIONS)
SUBSETS = [list(each) for size in range(1, len(PROTOCOLS) + 1) for each in combinations(PROTOCOLS, size)]


def ready(*args, **options):
    return loaded(module(*args, **options))


def as_set(lists):
    return set(np.concatenate(lists).tolist())


@settings(max_examples=100, deadline=None)
@given(
    PARTITIONS,
    st.sampled_from(SUBSETS),
    st.sampled_from(["train", "all"]),
    st.integers(1, 8),
    st.floats(0.05, 0.6),
    st.floats(0, 0.5),
    st.integers(0, 10**6),
)
def test_no_client_learns_test_samples(partition, protocols, pool, num_clients, test_fraction, val_fraction, seed):
    data = module(
        partition,
        protocols=protocols,
        pool=pool,
        num_clients=num_clients,
        test_fraction=test_fraction,
        val_fraction=val_fraction,
        seed=seed,
    )
    try:
        data.setup()
    except ValueError as error:
        # With these arguments, only the partition may refuse, or a pool that leaves no samples to train or test on.
        untested = "leaves every client without test samples" in str(error)
        assert untested or "without training samples" in str(error) or str(error).startswith("data.partition: ")
        return
    people, examples = data.population, data.samples
    learnt = as_set(people.train) | as_set(people.val)
    own = as_set(people.test["own_split"]) if "own_split" in protocols else set()
    official = set(range(examples.num_train, len(examples)))
    assert list(people.test) == protocols
    for lists in people.test.values():
        assert not as_set(lists) & learnt
        assert len(lists) == num_clients
    # No sample has two roles, or two holders unless the name of the partition says so.
    assert not as_set(people.train) & as_set(people.val)
    held = [index for part in (people.train, people.val, people.test.get("own_split", [])) for index in part]
    assert people.overlapping or len(np.concatenate(held)) == len(learnt | own)
    if pool == "train":
        assert not (learnt | own) & official
    assert min(map(len, people.train)) > 0
    if "label_view" in protocols:
        for client, tested in enumerate(people.test["label_view"]):
            labels = set(examples.labels[np.concatenate([people.train[client], people.val[client]])].tolist())
            expected = {each for each in official - learnt - own if examples.labels[each] in labels}
            assert set(tested.tolist()) == expected and len(tested) == len(expected)
    for tested in people.test.get("label_proportional", []):
        assert set(tested.tolist()) <= official and len(set(tested.tolist())) == len(tested)
    for tested in people.test.get("global", []) + people.test.get("global_plain", []):
        assert tested.tolist() == sorted(official - learnt - own)


@settings(max_examples=30, deadline=None)
@given(PARTITIONS, st.sampled_from(SUBSETS), st.sampled_from(["train", "all"]), st.integers(1, 8), st.integers(0, 99))
def test_from_file_restores_a_written_population(tmp_path_factory, partition, protocols, pool, num_clients, seed):
    options = {"protocols": protocols, "pool": pool, "num_clients": num_clients, "seed": seed}
    try:
        data = ready(partition, **options)
    except ValueError:
        return
    path = tmp_path_factory.mktemp("run") / "partition.json"
    data.write(path)
    again = ready(FromFile(str(path)), **options)
    assert again.population.fingerprint == data.population.fingerprint
    assert again.population.to_dict() == data.population.to_dict()


def test_split_has_the_requested_fractions():
    data = ready(IID(100), num_clients=2, test_fraction=0.25, val_fraction=0.2)
    sizes = [(len(t), len(v), len(o)) for t, v, o in zip(*_roles(data.population), strict=True)]
    # Of 100 samples, 25 are for testing, and 15 of the remaining 75 for validation.
    assert sizes == [(60, 15, 25)] * 2
    counts = data.population.label_counts
    assert counts.shape == (2, 6) and counts.sum(axis=1).tolist() == [60, 60]
    assert counts[0].tolist() == [int((data.samples.labels[data.population.train[0]] == k).sum()) for k in range(6)]


def _roles(people):
    return people.train, people.val, people.test["own_split"]


def test_without_own_split_nothing_is_held_out():
    data = ready(IID(10), protocols=["label_view"], val_fraction=0.0)
    assert data.population.sizes.tolist() == [10] * 8
    assert all(len(each) == 0 for each in data.population.val)


def test_tiny_clients_have_test_but_no_validation_samples(tmp_path):
    people = ready(IID(2)).population
    assert [len(each) for part in _roles(people) for each in part] == [1] * 8 + [0] * 8 + [1] * 8
    # A single sample is for training, although the client then has no test samples.
    mixed = FromFile(str(tmp_path / "p.json"))
    write_partition(mixed.path, ClientShares([np.array([0]), np.array([1, 2])]))
    people = ready(mixed, num_clients=2).population
    assert [len(each) for part in _roles(people) for each in part] == [1, 1, 0, 0, 0, 1]
    needs = r"at least two samples.* With official test samples, data\.protocols: \[global\] needs neither"
    with pytest.raises(ValueError, match=rf"own_split leaves every client without test samples .* {needs}"):
        ready(IID(1))
    assert len(ready(IID(1), protocols=["global"]).population.test["global"][0])


def test_copies_of_a_sample_have_one_role():
    data = ready(CopyPerGroup(4), num_clients=8, val_fraction=0.2)
    people = data.population
    sets = [as_set(part) for part in _roles(people)]
    # Every group holds the whole pool of 240 samples: 60 are for testing, and 36 of the others for validation.
    assert [len(each) for each in sets] == [144, 36, 60] and len(set.union(*sets)) == 240
    for role, part in enumerate(_roles(people)):
        for group in range(4):
            assert as_set([part[client] for client in np.flatnonzero(people.groups == group)]) == sets[role]


def test_a_client_without_training_samples_is_named():
    with pytest.raises(
        ValueError,
        match=r"client 0 is left without training samples: its share has 1, .* 0 are for testing and 1 for validation",
    ):
        ready(IID(1), val_fraction=0.9, protocols=["label_view"])


def test_groups_come_from_the_partition():
    assert ready(Pathological(3)).population.groups.tolist() == [0] * 4 + [1] * 4
    assert ready(IID()).population.groups is None


def test_samples_that_no_client_uses_are_freed():
    made = ready(Pathological(2, sizes=(5, 5)))
    assert len(made.samples.inputs) == len(made.population.samples_in_use) < len(made.samples)
    whole = BLOBS.load()
    for indices in (*made.population.train, *made.population.test["own_split"]):
        for found, expected in zip(
            *(each.batch(indices, torch.device("cpu")) for each in (made.samples, whole)), strict=True
        ):
            assert torch.equal(found, expected)
    assert made.samples.fingerprint() == whole.fingerprint()


def test_several_modules_can_share_the_samples_of_a_data_set(monkeypatch):
    whole = BLOBS.load()
    monkeypatch.setattr(type(BLOBS), "load", lambda self: whole)
    for seed in (0, 1):
        made = ready(Pathological(2, sizes=(5, 5)), seed=seed)
        (indices,) = made.population.train[:1]
        expected = whole.batch(indices, torch.device("cpu"))
        assert torch.equal(made.samples.batch(indices, torch.device("cpu"))[0], expected[0])
    assert len(whole.inputs) == len(whole)


def test_protocol_type_lists_every_protocol():
    assert set(get_args(Protocol)) == set(PROTOCOLS)


def test_population_depends_only_on_the_data_seed():
    torch.manual_seed(1)
    first = ready().population.fingerprint
    torch.manual_seed(2)
    np.random.seed(3)
    assert ready(batch_size=3).population.fingerprint == first
    assert ready(seed=1).population.fingerprint != first
    # Additional protocols do not change the split of any client.
    more = ready(protocols=list(PROTOCOLS)).population
    assert all(map(np.array_equal, more.train, ready().population.train))


def test_a_clients_split_does_not_depend_on_others(tmp_path):
    for name, other in {"a": [20, 21, 22, 23], "b": [50, 51]}.items():
        (tmp_path / name).write_text(json.dumps({"indices": [list(range(10)), other]}))
    first, second = (ready(FromFile(str(tmp_path / name)), num_clients=2).population for name in "ab")
    for mine, same in zip(_roles(first), _roles(second), strict=True):
        assert np.array_equal(mine[0], same[0])


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"own_test": [[10**6], []]}, "the test sample 1000000 of client 0 does not exist"),
        ({"own_val": [[0, 1], []]}, "client 0 is left without training samples"),
    ],
)
def test_parts_of_a_file_that_cannot_be_are_refused(tmp_path, own, words):
    (tmp_path / "p.json").write_text(json.dumps({"indices": [[0, 1], [2, 3]], **own}))
    with pytest.raises(ValueError, match=words):
        ready(FromFile(str(tmp_path / "p.json")), num_clients=2)


def test_a_text_instead_of_a_list_of_protocols_is_refused():
    with pytest.raises(ValueError, match=r"data\.protocols: got the text 'global'; it must be a list, .*\['global'\]"):
        ready(protocols="global")


def test_every_client_has_a_separate_stream(tmp_path):
    # The two shares are alike in size and labels, so a common stream would split them alike.
    write_partition(tmp_path / "p.json", ClientShares([np.arange(20), np.arange(20, 40)]))
    first, second = ready(FromFile(str(tmp_path / "p.json")), num_clients=2).population.test["own_split"]
    assert not np.array_equal(first, second - 20)


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "own_split"])
def test_all_but_own_split_need_official_test_images(protocol):
    with pytest.raises(
        ValueError, match=rf"{protocol} tests on .* Synthetic has none; use data.protocols: \[own_split"
    ):
        ready(dataset=Synthetic(test_per_class=0), protocols=["own_split", protocol])
    with pytest.raises(ValueError, match=rf"{protocol} leaves every client without test samples with data.pool all"):
        ready(IID(), protocols=[protocol], pool="all")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_clients": 0}, "data.num_clients must be at least 1, got 0"),
        ({"num_clients": 2**62}, r"data.num_clients: got 4611686018427387904; at most 10000000"),
        ({"batch_size": 0}, "data.batch_size"),
        ({"test_fraction": 1.0}, r"data.test_fraction must lie in \[0, 1\), got 1.0"),
        ({"val_fraction": -0.1}, "data.val_fraction"),
        ({"val_fraction": float("nan")}, "data.val_fraction"),
        ({"test_fraction": 0.0}, "data.test_fraction must be > 0"),
        ({"pool": "test"}, "data.pool: got pool='test'"),
        ({"protocols": []}, "at least one of"),
        ({"protocols": ["own"]}, r"got \['own'\]"),
        ({"protocols": ["own_split", "own_split"]}, "once"),
    ],
)
def test_invalid_arguments_are_refused_before_data_is_read(options, words):
    with pytest.raises(ValueError, match=words):
        module(**options)


def test_setup_is_done_once():
    data = module()
    with pytest.raises(RuntimeError, match="setup"):
        _ = data.population
    data.setup("fit")
    examples, people = data.samples, data.population
    data.setup("test")
    assert data.samples is examples and data.population is people


def test_written_population_is_a_partition_file(tmp_path):
    data = ready(protocols=["own_split", "label_view"], pool="all", partition=Pathological(2, (6, 9)))
    data.write(tmp_path / "partition.json")
    content = json.loads((tmp_path / "partition.json").read_text())
    assert content["fingerprint"] == data.population.fingerprint
    assert content["data_fingerprint"] == data.samples.fingerprint()
    assert content["test"]["label_view"] == [each.tolist() for each in data.population.test["label_view"]]
    again = ready(
        FromFile(str(tmp_path / "partition.json")), protocols=["own_split", "label_view"], pool="all"
    ).population
    assert again.fingerprint == data.population.fingerprint
    assert again.groups.tolist() == data.population.groups.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["partition.json"]


def test_loaders_pool_the_clients():
    data = ready(protocols=["label_view", "own_split"], batch_size=16)
    for loader, lists in (
        (data.train_dataloader(), data.population.train),
        (data.val_dataloader(), data.population.val),
        (data.test_dataloader(), data.population.test["label_view"]),
    ):
        batches = list(loader)
        assert [len(inputs) for inputs, _ in batches[:-1]] == [16] * (len(batches) - 1)
        expected = data.samples.batch(np.array(sorted(as_set(lists))), torch.device("cpu"))
        got = [torch.cat(parts) for parts in zip(*batches, strict=True)]
        assert sorted(map(tuple, got[0].tolist())) == sorted(map(tuple, expected[0].tolist()))
        assert torch.equal(got[1].bincount(), expected[1].bincount())
    orders = [torch.cat([inputs for inputs, _ in data.train_dataloader()]) for _ in range(2)]
    assert not torch.equal(*orders)
    single = data.test_dataloader().dataset
    assert torch.equal(single[3][0], data.samples.batch(single.indices[3:4], torch.device("cpu"))[0][0])


def test_training_loader_drops_a_short_last_batch():
    number = len(np.concatenate(ready().population.train))
    assert number % 32
    data = ready(drop_last=True)
    assert [len(targets) for _, targets in data.train_dataloader()] == [32] * (number // 32)
    assert sum(len(targets) for _, targets in data.test_dataloader()) == len(as_set(data.population.test["own_split"]))
    few = ready(drop_last=True, batch_size=number + 1)
    assert [len(targets) for _, targets in few.train_dataloader()] == [number]


class Linear(LightningModule):
    """Softmax regression, which converges in a few epochs on separable blobs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 6)

    def training_step(self, batch, batch_index):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_index):
        self.log("seen", float(len(batch[0])), reduce_fx="sum")

    def test_step(self, batch, batch_index):
        self.log("seen", float(len(batch[0])), reduce_fx="sum")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer_accepts_the_module(tmp_path):
    data = module(val_fraction=0.2)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Linear(), data)
    assert trainer.global_step == -(-int(data.population.sizes.sum()) // 32)
    assert trainer.callback_metrics["seen"] == len(as_set(data.population.val))
    trainer.test(Linear(), data, verbose=False)
    assert trainer.callback_metrics["seen"] == len(as_set(data.population.test["own_split"]))


def test_user_defined_data_need_no_official_test_samples():
    train = (torch.randn(40, 3), torch.arange(40) % 2)
    people = ready(IID(), dataset=Tensors(train), num_clients=4, pool="all").population
    assert as_set([*people.train, *people.val, *people.test["own_split"]]) == set(range(40))
    assert all((np.diff(each) > 0).all() for each in people.train)
    assert all(not np.intersect1d(*pair).size for pair in pairwise(people.train))


@pytest.mark.parametrize("num_clients", [2, 9])
def test_random_like_keeps_clients_and_fractions_with_more_classes_than_samples(num_clients):
    dataset = Synthetic(num_classes=30, num_features=3, samples_per_class=4, test_per_class=1)
    trial = loaded(blobs(num_clients, dataset=dataset, test_fraction=0.5, val_fraction=0).random_like())
    assert trial.population.num_clients == num_clients
    assert [len(each) for each in trial.population.val] == [1] * num_clients, "a partition may bring such samples"
    assert trial.samples.num_classes == 30
    sizes = zip(trial.population.train, trial.population.test["own_split"], strict=True)
    assert all(abs(len(train) + 1 - len(test)) <= 1 for train, test in sizes)


def test_files_are_verified_only_until_they_are_loaded(monkeypatch):
    calls = []
    monkeypatch.setattr(Synthetic, "prepare", lambda self: calls.append(self))
    data = module()
    data.prepare_data()
    data.setup()
    data.prepare_data()  # as a rank does whose parent has loaded them
    assert calls == [data.dataset]
