"""Tests of client transforms on the command line. Their runs on two ranks are in test_clustered_fits.py."""

import json

import pytest

import lcfl as package
from lcfl.runs.checkpoint import CheckpointError
from tests.helpers.commandline import CONFIGS, LCFED, SMALL, here, lcfl, printed  # noqa: F401

DIGITS = ("-c", CONFIGS / "data" / "digits.yaml")
ROTATED = (
    "--data.partition=CopyPerGroup",
    "--data.partition.num_groups=2",
    "--data.num_clients=12",
    "--data.client_transforms+=Rotation",
    "--data.client_transforms.by=group",
)
NOISE = ("--data.client_transforms+=GaussianNoise", "--data.client_transforms.sigma=0.1")


def test_transforms_can_be_given_by_their_short_names(here, capsys):  # noqa: F811
    found = printed(capsys, *DIGITS, *LCFED, *ROTATED, *NOISE)["data"]["client_transforms"]
    assert found == [
        {"class_path": "lcfl.data.transforms.Rotation", "init_args": {"angles": [0, 90, 180, 270], "by": "group"}},
        {"class_path": "lcfl.data.transforms.GaussianNoise", "init_args": {"sigma": 0.1}},
    ]


def test_another_transform_is_another_run(here):  # noqa: F811
    words = ("fit", *DIGITS, *LCFED, *SMALL, *ROTATED, *NOISE)
    run = lcfl(*words)
    content = json.loads((run.path / "partition.json").read_text())
    assert content["groups"] == [0] * 6 + [1] * 6
    assert [views[0] for views in content["views"]] == ["QuarterTurns(number=0)"] * 6 + ["QuarterTurns(number=1)"] * 6
    assert "cluster/ari" in (run.path / "metrics.csv").read_text().splitlines()[0]
    assert package.load(run.path).model("personal", client=7) is not None
    assert lcfl(*words, "--trainer.rounds=3", "--ckpt_path=last").state.round == 3
    with pytest.raises(CheckpointError, match="partition: the checkpoint has"):
        lcfl(*words, "--data.client_transforms.sigma=0.2", "--trainer.rounds=4", "--ckpt_path=last")
