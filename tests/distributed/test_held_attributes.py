"""What callbacks and clusterings collect on rank 0 is there after `fit`, whichever process was rank 0."""

import os
import signal
import tempfile
import threading

import pytest
import torch

from lcfl import Callback, Federation
from lcfl.callbacks import Checkpoint
from lcfl.distributed.held_attributes import HeldAttributes
from lcfl.methods.clustering import LowRankCosine
from tests.helpers import fits
from tests.helpers.builders import blobs, blobs_module, fedavg, lcfed


class Collect(Callback):
    """Collects the losses, and more than a pipe holds. Can be stopped by a signal, or end with an exception."""

    def __init__(self, end="complete"):
        self.end, self.losses, self.large, self.temporary = end, [], None, 1

    def on_fit_start(self):
        self.large = torch.arange(50_000)
        del self.temporary

    def on_round_logged(self, state, row):
        self.losses.append(row["train/loss"])
        if state.round == 2 and self.end == "stopped":
            os.kill(os.getpid(), signal.SIGTERM)
        assert state.round < 2 or self.end != "failed", "on purpose"


def fit(tmp_path, callbacks, devices, method=None, data=None):
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    federation = Federation(rounds=3, evaluate_every=1, devices=devices, callbacks=callbacks, **options)
    return federation.fit(blobs_module(), data or blobs(4, val_fraction=0.2), method or fedavg())


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Provides the folder of temporary files, which must be empty afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("end", ["complete", "stopped"])
def test_callbacks_hold_the_same_with_one_device_and_with_two(tmp_path, temporary, end):
    def held(devices):
        collect, best = Collect(end), Checkpoint(monitor="val/own_split/global/acc")
        run = fit(tmp_path / str(devices), [collect, best], devices)
        assert run.signal == (signal.SIGTERM if end == "stopped" else 0)
        assert collect.large.tolist() == list(range(50_000)) and not hasattr(collect, "temporary")
        return collect.losses, best.best

    losses, best = held(1)
    assert (losses, best) == held(2)
    assert len(losses) == (2 if end == "stopped" else 3) and best is not None


@pytest.mark.filterwarnings("ignore:Counting has changed its attribute _seen")
def test_clusterings_hold_the_same_with_one_device_and_with_two(tmp_path):
    class Counting(LowRankCosine):
        def on_round_end(self, server, state, uploads):
            super().on_round_end(server, state, uploads)
            self._seen = [*getattr(self, "_seen", ()), len(uploads)]

    def seen(devices):
        method = lcfed()
        method.clustering[0] = Counting(num_clusters=2, dimension=2)
        fit(tmp_path / str(devices), [], devices, method)
        return method.clustering[0]._seen

    assert seen(1) == seen(2) == [4, 4, 4]


def test_an_exception_leaves_callbacks_as_they_were(tmp_path, temporary):
    collect = Collect("failed")
    with pytest.raises(AssertionError, match="on purpose"):
        fit(tmp_path, [collect], 2)
    assert collect.losses == [] and collect.temporary == 1


def test_objects_of_the_script_stay_the_same_objects(tmp_path):
    class Knowing(Callback):
        def __init__(self, data):
            self.data, self.own, self.seen = data, self, None

        def on_fit_end(self, server):
            self.seen = [server.data, server.callbacks[0].own_list]

    class Other(Callback):
        def on_fit_start(self):
            self.own_list = [1]

    data = blobs(4)
    knowing, other = Knowing(data), Other()
    fit(tmp_path, [other, knowing], 2, data=data)
    assert knowing.data is data and knowing.own is knowing
    assert knowing.seen[0] is data and knowing.seen[1] is other.own_list


def test_one_warning_names_what_cannot_be_pickled_and_only_what_the_run_has_put_there(tmp_path):
    class Mixed(Collect):
        def __init__(self):
            super().__init__()
            self.lock, self.rule, self.functions = threading.Lock(), lambda: 1, []

        def on_fit_end(self, server):
            self.server = server
            self.functions.append(lambda: 2)

    mixed = Mixed()
    with pytest.warns(UserWarning, match="cannot be pickled") as caught:
        fit(tmp_path, [mixed], 2)
    (text,) = [str(each.message) for each in caught if "pickled" in str(each.message)]
    assert "Mixed.functions (" in text and "Mixed.server (" in text
    assert "Mixed.lock" not in text and "Mixed.rule" not in text
    assert len(mixed.losses) == 3 and mixed.functions == [] and mixed.rule() == 1


class Unreadable:
    def __reduce__(self):
        return int, ("not a number",)


def carry(there, here, path):
    HeldAttributes([there]).write(path)
    HeldAttributes([here]).restore(path)


def test_a_view_does_not_take_along_what_it_is_a_view_of(tmp_path):
    there, here = Collect(), Collect()
    there.losses = list(torch.zeros(100, 1000))
    carry(there, here, tmp_path / "held")
    assert torch.stack(here.losses).equal(torch.zeros(100, 1000))
    assert (tmp_path / "held").stat().st_size < 2 * 400_000


def test_the_state_of_the_federation_does_not_travel(tmp_path):
    class Keeps(Collect):
        def on_fit_end(self, state):
            self.state = state

    keeps = Keeps()
    with pytest.warns(UserWarning, match=r"Keeps\.state \(the state after the run is in what fit returns\)"):
        fit(tmp_path, [keeps], 2)
    assert len(keeps.losses) == 3


def test_what_cannot_be_written_or_read_back_is_a_warning(tmp_path):
    there, here = Collect(), Collect()
    there.losses = [Unreadable()]
    with pytest.warns(UserWarning, match="callbacks are as before the run, .* could not be read: invalid literal"):
        carry(there, here, tmp_path / "held")
    assert here.losses == []
    with pytest.warns(UserWarning, match="callbacks are as before the run, .* could not be written: .*No such file"):
        carry(there, here, tmp_path / "missing" / "held")


def test_a_tensor_of_another_device_is_brought_into_memory(tmp_path, monkeypatch):
    there, here = Collect(), Collect()
    there.large = torch.zeros(2, device="meta")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: torch.ones(2))  # a tensor of meta has no values
    carry(there, here, tmp_path / "held")
    assert here.large.tolist() == [1, 1]


def test_a_command_brings_nothing_back(tmp_path, monkeypatch):
    monkeypatch.setattr(HeldAttributes, "write", lambda self, path: pytest.fail("nobody looks at it"))
    fits.fit(tmp_path, "fedavg", 2, 1)
