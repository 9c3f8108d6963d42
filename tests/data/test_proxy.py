"""Tests of the server's proxy set: official test samples that no client trains on, validates on or is tested on."""

import json
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.data.protocols import PROTOCOLS
from tests.data.partitions import DISJOINT_PARTITIONS, OVERLAPPING_PARTITIONS, module
from tests.helpers.builders import blobs, loaded


@pytest.mark.filterwarnings("ignore:data.proxy")
@settings(max_examples=40, deadline=None)
@given(
    st.one_of(DISJOINT_PARTITIONS, OVERLAPPING_PARTITIONS),
    st.sampled_from(["train", "all"]),
    st.integers(1, 119),
    st.integers(0, 10**6),
)
def test_no_client_holds_a_proxy_sample(partition, pool, proxy, seed):
    data = module(partition, protocols=list(PROTOCOLS), proxy=proxy, pool=pool, seed=seed)
    try:
        loaded(data)
    except ValueError:  # too few free test samples, or a partition that cannot be drawn
        return
    population, official = data.population, set(range(data.samples.num_train, len(data.samples)))
    held = set(population.proxy.tolist())
    assert len(held) == proxy and held <= official
    for lists in (population.train, population.val, *population.test.values()):
        assert not held & set(np.concatenate(lists).tolist())
    if pool == "train":
        assert held | set(population.test["global"][0].tolist()) == official


def test_proxy_samples_are_removed_only_from_official_test_sets():
    protocols = ["own_split", "global"]
    plain, with_proxy = (loaded(module(protocols=protocols, proxy=proxy)).population for proxy in (0, 30))
    for one, other in ((plain.train, with_proxy.train), (plain.test["own_split"], with_proxy.test["own_split"])):
        assert all(map(np.array_equal, one, other))
    left = np.setdiff1d(plain.test["global"][0], with_proxy.proxy)
    assert np.array_equal(with_proxy.test["global"][0], left) and len(left) == 90
    assert plain.fingerprint != with_proxy.fingerprint
    other = loaded(module(protocols=protocols, proxy=30, seed=1)).population.proxy
    assert not np.array_equal(other, with_proxy.proxy)  # the proxy set is drawn, so it is not always the first samples


def test_partition_file_lists_the_proxy_set(tmp_path):
    data = loaded(module(proxy=30))
    data.write(tmp_path / "partition.json")
    content = json.loads((tmp_path / "partition.json").read_text())
    assert content["proxy"] == data.population.proxy.tolist() and len(content["proxy"]) == 30


def test_warning_names_labels_missing_from_the_proxy_set():
    with pytest.warns(UserWarning, match=r"data.proxy: the 2 samples .* none of the [45] labels .*Raise data.proxy"):
        data = loaded(module(proxy=2))
    assert len(data.population.proxy) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded(module(proxy=100))


@pytest.mark.parametrize("proxy", [120, 1000])
def test_proxy_set_must_leave_some_test_samples(proxy):
    with pytest.raises(ValueError, match=rf"data.proxy takes {proxy} official test samples .* but 120 are free"):
        loaded(module(proxy=proxy))


def test_proxy_set_needs_official_test_samples():
    data = blobs(2, dataset=Tensors((np.zeros((20, 2), dtype=np.float32), np.arange(20) % 2)), partition=IID(), proxy=5)
    with pytest.raises(ValueError, match=r"data.proxy takes 5 official test samples .* but 0 are free"):
        loaded(data)


def test_negative_proxy_size_is_refused():
    with pytest.raises(ValueError, match=r"data.proxy must be 0 or a number of samples, got -1"):
        module(proxy=-1)
