"""Weights from a file are loaded completely, or not at all and with a reason."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from lcfl.models import MLP, Layout
from lcfl.models.pretrained import load_weights
from tests.helpers.builders import Normed


def saved(tmp_path, content):
    path = tmp_path / "weights.pt"
    torch.save(content, path)
    return path


def test_parameters_and_buffers_are_loaded(tmp_path):
    trained, other = Normed(), Normed()
    trained(torch.randn(8, 2))
    load_weights(other, saved(tmp_path, trained.state_dict()))
    layout = Layout.from_network(trained)
    assert torch.equal(layout.pack(other), layout.pack(trained))
    assert int(other.embedding[1].num_batches_tracked) == 1


def state(**changes):
    """Returns the state dict of MLP(4, [3], 2) with some entries replaced; None leaves an entry out."""
    content = OrderedDict(MLP(4, [3], 2).state_dict()) | {name.replace("__", "."): v for name, v in changes.items()}
    return {name: value for name, value in content.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            state(decision__weight=None, decision__bias=None),
            r"the network MLP: it lacks decision.weight, decision.bias\.",
        ),
        (state(head__weight=torch.zeros(1)), r"the network has no head.weight\."),
        (
            state(decision__weight=torch.zeros(5, 3), decision__bias=torch.zeros(5)),
            r"decision.weight has shape \(5, 3\) instead of \(2, 3\); decision.bias has shape \(5,\) instead of \(2,\)",
        ),
        (
            nn.Linear(4, 2).state_dict(),
            "it lacks embedding.fc1.weight, embedding.fc1.bias, decision.weight and 1 more; the network has no weight,",
        ),
        ({"state_dict": state(), "epoch": 3}, "holds entries state_dict, epoch, not a state dict of tensors"),
        ([torch.zeros(3)], "holds a list, not a state dict of tensors"),
        (MLP(4, [3], 2), r"cannot be read as weights .*torch.save\(network.state_dict\(\), path\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_loaded(tmp_path, content, words):
    network = MLP(4, [3], 2)
    before = Layout.from_network(network).pack(network)
    with pytest.raises(ValueError, match=rf"(?s)model.init_from: .*weights.pt .*{words}"):
        load_weights(network, saved(tmp_path, content))
    assert torch.equal(Layout.from_network(network).pack(network), before)


def test_missing_files_and_files_of_another_format_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file '.*nowhere.pt'"):
        load_weights(MLP(4), tmp_path / "nowhere.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_weights(MLP(4), tmp_path / "text.pt")
