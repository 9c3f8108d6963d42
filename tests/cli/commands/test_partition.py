"""Tests the printed numbers of ``lcfl partition`` against hand calculations, and the files that it writes."""

import json

import numpy as np
import pytest
from PIL import Image

from lcfl.cli.commands import partition
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Digits
from lcfl.data.partition import FromFile
from tests.helpers.commandline import QUICKSTART

BLOCKS = "data: {dataset: {class_path: Synthetic, init_args: {samples_per_class: 100}}, num_clients: 4}"


def test_the_printed_numbers(capsys):
    words = ["-c", BLOCKS, "--data.partition=Pathological", "--data.partition.classes_per_client=2"]
    partition.main([*words, "--data.test_fraction=0.5", "--data.val_fraction=0.2"])
    rows = {line[:22].strip(): line[22:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["train samples"] == ["80"] * 3 and rows["test/own_split samples"] == ["100"] * 3
    assert rows["labels"] == ["2"] * 3 and rows["label entropy"] == ["1"] * 3 and rows["majority share"] == ["0.5"] * 3
    assert rows["majority baseline, tes"] == ["t/own_split:", "50.00", "%"]


def test_other_groups_are_ignored_and_the_written_partition_can_be_read(capsys, tmp_path):
    partition.main(["-c", str(QUICKSTART), f"--out={tmp_path}"])
    assert "20 clients, true groups: 3" in capsys.readouterr().out
    assert Image.open(tmp_path / "partition.png").size[0] == 800
    written = json.loads((tmp_path / "partition.json").read_text())
    again = FederatedDataModule(Digits(), FromFile(str(tmp_path / "partition.json")), 20)
    again.setup()
    for client in range(20):
        own = [again.population.train, again.population.val, again.population.test["own_split"]]
        assert sorted(np.concatenate([lists[client] for lists in own]).tolist()) == written["indices"][client]


def test_later_layers_override_earlier_ones(capsys):
    partition.main(["-c", str(QUICKSTART), "-c", BLOCKS])
    assert "4 clients, true groups" in capsys.readouterr().out


def test_an_impossible_partition_is_refused():
    with pytest.raises(ValueError, match=r"data\.partition: .*classes_per_client is 9, but the pool has 8 classes"):
        partition.main(["-c", BLOCKS, "--data.partition=Pathological", "--data.partition.classes_per_client=9"])
