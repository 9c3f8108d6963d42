"""What a local update or an exchange of the user's own returns is checked, and the client is named in one line."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lcfl.core.messages import Downlink
from lcfl.distributed.client_output import ClientOutputError, check_output, check_payload
from lcfl.methods.aggregation import GlobalMean
from lcfl.methods.exchange import FullModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.local.training import LocalOutput
from lcfl.methods.method import Method
from lcfl.models import MLP
from lcfl.models.module import FederatedModule
from tests.helpers.builders import blobs, blobs_module, fit

GOOD = LocalOutput(torch.zeros(5), 3, 0.5, {"train/extra": 1.0})
REFUSED = {
    "nothing": (None, r"Own returned None; it must return a LocalOutput\."),
    "a tensor": (torch.zeros(5), r"returned a tensor of torch.float32 and shape \[5\]; it must return a LocalOutput"),
    "a text": ("model", "returned an object of type str; it must return a LocalOutput"),
    "a look-alike": (SimpleNamespace(model=torch.zeros(5)), "of type SimpleNamespace; it must return a LocalOutput"),
    "no model": (replace(GOOD, model=None), r"returned None as model; it must be a tensor .* shape \[5\], one entry"),
    "a shorter model": (replace(GOOD, model=torch.zeros(4)), r"float32 and shape \[4\] as model; it must be .* \[5\]"),
    "an empty model": (replace(GOOD, model=torch.zeros(0)), r"shape \[0\] as model; it must be .* shape \[5\]"),
    "a matrix": (replace(GOOD, model=torch.zeros(5, 1)), r"shape \[5, 1\] as model; it must be .* shape \[5\]"),
    "another dtype": (replace(GOOD, model=torch.zeros(5).double()), r"torch.float64 .* it must be .*torch.float32"),
    "a sparse model": (replace(GOOD, model=torch.zeros(5).to_sparse()), "a sparse tensor .* as model"),
    "no count": (replace(GOOD, consumed=None), "returned None as consumed; it must be a number of samples >= 0"),
    "a negative count": (replace(GOOD, consumed=-1), "returned -1 as consumed; it must be a number of samples >= 0"),
    "a text as loss": (replace(GOOD, loss="low"), "of type str as loss; it must be a number"),
    "a vector as loss": (replace(GOOD, loss=torch.zeros(2)), r"shape \[2\] as loss; it must be a number"),
    "a memory of whole numbers": (
        replace(GOOD, memory=torch.zeros(3).long()),
        "torch.int64 .* as memory; it must",
    ),
    "a matrix to remember": (
        replace(GOOD, memory=torch.zeros(3, 1)),
        r"shape \[3, 1\] as memory; it must",
    ),
    "an empty memory": (replace(GOOD, memory=torch.zeros(0)), r"shape \[0\] as memory; it must be .* not empty"),
    "a list to remember": (replace(GOOD, memory=[1.0]), "of type list as memory; it must"),
    "nothing logged": (replace(GOOD, logged=None), "returned None as logged; it must be a mapping"),
    "a number as a name": (replace(GOOD, logged={3: 1.0}), "Own logs a value named 3; a name must be text"),
    "a column of the server": (replace(GOOD, logged={"comm/up_bytes": 1.0}), "logs 'comm/up_bytes', a name that lcfl"),
    "a text logged": (replace(GOOD, logged={"train/x": "y"}), "of type str as train/x; it must be a number"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_local_update_must_not_return(what):
    output, said = REFUSED[what]
    with pytest.raises(ClientOutputError, match=said):
        check_output("Own", output, 5)


def test_what_a_local_update_may_return():
    logging = replace(GOOD, loss=torch.tensor(0.5), logged={"a": torch.ones(1)})
    for output in (GOOD, replace(GOOD, memory=torch.zeros(3)), replace(GOOD, loss=None), logging):
        check_output("Own", output, 5)
    check_output("Own", replace(GOOD, model=torch.zeros(0)), 5, may_be_empty=True)


@pytest.mark.parametrize("payload", [None, torch.zeros(5), {"model": [0.0] * 5}, {"model": torch.zeros(5).to_sparse()}])
def test_what_an_exchange_must_not_upload(payload):
    check_payload("Own", {"model": torch.zeros(5)})
    with pytest.raises(ClientOutputError, match=r"Own uploads .* it must be a (mapping|dense tensor)"):
        check_payload("Own", payload)


class Renamed(FullModel):
    """Uploads the model by another name, which `at_server` translates unless it is misspelt."""

    def up(self, output, downlink, layout):
        return {self.called: output.model}

    def at_server(self, uplink, state, layout):
        return replace(uplink, payload={"model": uplink.payload["mine"]}) if "mine" in uplink.payload else uplink


@pytest.mark.parametrize(("called", "is_known"), [("mine", True), ("model", True), ("modle", False)])
def test_the_server_gets_the_names_that_an_exchange_promises(tmp_path, monkeypatch, called, is_known):
    monkeypatch.setattr(Renamed, "called", called, raising=False)
    method = Method(LocalTraining(steps=1), Renamed(), GlobalMean())
    said = r"client \d, round 0: Renamed uploads modle without 'model', which its returns names"
    with nullcontext() if is_known else pytest.raises(ClientOutputError, match=said):
        fit(blobs_module(), blobs(4), method, tmp_path)


class Logging(FederatedModule):
    """Logs another number by the name that Lightning users know for the loss."""

    def training_step(self, batch, batch_idx):
        self.log("train/loss", -1.0)
        return super().training_step(batch, batch_idx)


def test_the_loss_of_a_round_is_that_which_training_steps_return(tmp_path):
    network, method = partial(MLP, 16, [16], 8), Method(LocalTraining(steps=1), FullModel(), GlobalMean())
    losses = [
        fit(kind(network), blobs(4), method, tmp_path / kind.__name__, engine="sequential").rows[0]["train/loss"]
        for kind in (FederatedModule, Logging)
    ]
    assert losses[0] == losses[1] > 0


@dataclass(frozen=True)
class Shrinking(LocalTraining):
    """Shrinks the model that it was sent, which is that of all clients."""

    def __call__(self, state, downlink, data, engine):
        downlink.payload["model"].mul_(0.9)
        return super().__call__(state, downlink, data, engine)


@dataclass(frozen=True)
class Empty(LocalTraining):
    """Asks the engine for a run from a model of the wrong length."""

    def __call__(self, state, downlink, data, engine):
        return super().__call__(state, Downlink({"model": downlink.payload["model"][:-1]}), data, engine)


@pytest.mark.parametrize("engine", ["sequential", "compiled", "stacked"])
def test_a_downlink_that_is_changed_in_place_is_refused(tmp_path, engine):
    method = Method(Shrinking(steps=1), FullModel(), GlobalMean())
    with pytest.raises(ClientOutputError, match="Shrinking changed 'model' of the downlink in place, which other cl"):
        fit(blobs_module(), blobs(4), method, tmp_path, engine=engine)


def test_lcfls_own_checks_of_a_clients_work_need_no_traceback(tmp_path):
    method = Method(Empty(steps=1), FullModel(), GlobalMean())
    with pytest.raises(ClientOutputError, match=r"client \d, round 0, rank 0: ValueError: .* compiled") as caught:
        fit(blobs_module(), blobs(4), method, tmp_path, engine="compiled")
    assert not getattr(caught.value, "__notes__", [])


@dataclass(frozen=True)
class Short(LocalTraining):
    """Forgets the last entry of the model of one client."""

    def __call__(self, state, downlink, data, engine):
        output = super().__call__(state, downlink, data, engine)
        return replace(output, model=output.model[:-1]) if data.client == 2 else output


@pytest.mark.parametrize("devices", [1, 2])
def test_the_client_is_named_in_one_line(tmp_path, deadline, devices):
    method = Method(Short(steps=1), FullModel(), GlobalMean())
    with pytest.raises(ClientOutputError) as error:
        fit(blobs_module(), blobs(4), method, tmp_path, clients_per_round=4, devices=devices)
    message = str(error.value)
    assert message.startswith("client 2, round 0, rank ") and "Short returned a tensor" in message
    assert "\n" not in message and isinstance(error.value, ValueError)  # which the command prints without a traceback


class Silent(FullModel):
    """Forgets to return what it sends."""

    def down(self, state, client, layout):
        super().down(state, client, layout)


def test_an_exchange_that_sends_nothing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"Silent\.down: got NoneType; it must return a lcfl\.core\.messages\.D"):
        fit(blobs_module(), blobs(4), Method(LocalTraining(steps=1), Silent(), GlobalMean()), tmp_path)
