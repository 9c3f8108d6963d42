"""The trials of a sweep: the points of its grids, and their options and names."""

import pytest

from lcfl.cli.trials import Grid, Trial, parse_grid, points_of


def test_a_grid_is_read_from_text():
    assert parse_grid("model.cluster_weight=0.1,1") == Grid("model.cluster_weight", ("0.1", "1"))
    assert parse_grid("lr=0.1,0.10,0.2") == Grid("lr", ("0.1", "0.2"))  # a trial would run twice at once
    assert parse_grid("a=2020-01-31") == Grid("a", ('"2020-01-31"',))  # which YAML reads as a date
    assert parse_grid("lcfed:a.b=x,[1,2],null") == Grid("a.b", ("x", "[1, 2]", "null"), "lcfed")


@pytest.mark.parametrize("text", ["", "a", "a=", "=1", "a=[1"])
def test_a_grid_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r"--grid .* allowed are option=value,value"):
        parse_grid(text)


def test_points_are_all_combinations_of_the_grids_of_a_method():
    grids = [Grid("a", ("1", "2")), Grid("b", ("x", "y"), "lcfed")]
    assert points_of("fedavg", grids) == [(("a", "1"),), (("a", "2"),)]
    assert points_of("lcfed", grids) == [(("a", a), ("b", b)) for a in "12" for b in "xy"]
    assert points_of("local", []) == [()]
    assert points_of("own/lcfed.yaml", grids) == points_of("lcfed", grids)  # by the name of the file alone


def test_a_mapping_is_a_point_of_several_options():
    grid = parse_grid("lcfed:model={cluster_weight: 0, loss: a/b},{cluster_weight: 1, deep: {rate: 0.5}}")
    points = points_of("lcfed", [grid])
    names = [Trial("lcfed", point, seed=0).name for point in points]
    assert names == ["lcfed-cluster_weight=0-loss=a_b-seed0", "lcfed-cluster_weight=1-rate=0.5-seed0"]
    rate, server = "model.optimizer.init_args.lr", "method.aggregation.init_args.optimizer.init_args.lr"
    both = Trial("fedadam", ((rate, "0.02"), (server, "0.3"), ("data.batch_size", "8")), seed=1)
    assert both.name == "fedadam-model.optimizer.lr=0.02-aggregation.optimizer.lr=0.3-batch_size=8-seed1"
    assert points[0] == (("model", '{"cluster_weight": 0, "loss": "a/b"}'),)  # in the form that fit reads


@pytest.mark.parametrize(
    "texts",
    [
        ("lr=1,2", "lcfed:lr=3"),
        ("model.optimizer={class_path: SGD, init_args: {lr: 1}},{class_path: Adam}", "model.optimizer.lr=5,6"),
        ("model.optimizer=SGD,Adam", "model.optimizer.init_args.lr=5,6"),
    ],
)
def test_two_grids_for_one_option_are_refused(texts):
    with pytest.raises(ValueError, match=r"both set .* of lcfed; give one of them"):
        points_of("lcfed", [parse_grid(text) for text in texts])
