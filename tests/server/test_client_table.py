"""Tests of the table of the clients at the end of a run."""

import csv

import pytest
import torch

from lcfl.data.datasets import Tensors
from lcfl.data.partition import ByOwner
from lcfl.federation.federation import Federation
from tests.helpers.builders import blobs, fedavg, lcfed, linear_module


def table(path):
    with (path / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_client_has_a_row_with_its_name_and_its_own_metrics(tmp_path):
    owners = [*"a" * 12, *"b" * 8, *"c" * 1]
    inputs = torch.randn(21, 2, generator=torch.Generator().manual_seed(0))
    data = blobs(None, dataset=Tensors((inputs, torch.arange(21) % 2), owners=owners), partition=ByOwner())
    run = Federation(rounds=1, default_root_dir=tmp_path, devices=1, logger=False).fit(linear_module(), data, fedavg())
    rows = table(run.path)
    assert [row["name"] for row in rows] == ["a", "b", "c"] and "cluster" not in rows[0]
    assert [int(row["train_samples"]) for row in rows] == data.population.sizes.tolist()
    assert rows[2]["test/own_split/global/acc"] == "", "a client with one sample has none to be tested on"
    values = [float(row["test/own_split/global/acc"]) for row in rows[:2]]
    assert sum(values) / 2 == pytest.approx(run.metrics["test/own_split/global/acc"])


def test_clients_that_left_and_newcomers_have_no_row(tmp_path):
    data = blobs(12, newcomers=2, leavers={0: 1} if 0 not in blobs(12, newcomers=2).newcomer_clients else {1: 1})
    run = Federation(rounds=2, default_root_dir=tmp_path, devices=1, logger=False).fit(
        linear_module(widths=(16, 3, 8)), data, lcfed(2)
    )
    rows = table(run.path)
    outside = {*data.newcomer_clients, *data.leavers}
    assert {int(row["client"]) for row in rows} == set(range(12)) - outside
    assert {int(row["cluster"]) for row in rows} <= {0, 1, 2, 3} and "name" not in rows[0]
