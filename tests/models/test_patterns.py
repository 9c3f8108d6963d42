"""Patterns cover parameters by their name, by the layers that hold them, and by wildcards."""

import pytest

from lcfl.models.patterns import covers, layers_of, matching

NAMES = ["layer4.0.bn1.weight", "layer4.0.conv1.weight", "layer41.weight", "scale"]


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("layer4.0.bn1.weight", [0]),
        ("layer4", [0, 1]),
        ("layer4.0", [0, 1]),
        ("layer", []),
        ("bn1", []),
        ("scale", [3]),
        ("layer4.*.bn*", [0]),
        ("*bn*", [0]),
        ("*", [0, 1, 2, 3]),
        ("layer?", [0, 1]),
        ("layer4[1]", [2]),
        ("*.weight", [0, 1, 2]),
        ("LAYER4", []),
    ],
)
def test_what_a_pattern_covers(pattern, numbers):
    assert [number for number, name in enumerate(NAMES) if covers(pattern, name)] == numbers


def test_patterns_that_cover_nothing_are_refused_with_the_names_of_the_layers():
    assert matching(["scale", "*bn*"], NAMES, "model.cut", "the network Net") == {NAMES[0], NAMES[3]}
    with pytest.raises(ValueError, match=r"model.cut: the network Net has no layer or parameter 'fc', '\*norm\*'; its"):
        matching(["scale", "fc", "*norm*"], NAMES, "model.cut", "the network Net")
    with pytest.raises(ValueError, match=r"its layers are layer4.0.bn1, layer4.0.conv1, layer41, scale\."):
        matching(["fc"], NAMES, "model.cut", "the network Net")
    with pytest.raises(ValueError, match=r"got the text 'scale'; it must be a list of patterns, e.g. \['scale'\]"):
        matching("scale", NAMES, "model.cut", "the network Net")


def test_layers_in_the_order_of_their_first_parameter():
    assert layers_of(["b.weight", "a.weight", "b.bias", "own"]) == ["b", "a", "own"]
