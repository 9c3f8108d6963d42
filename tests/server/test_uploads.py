"""No part of a method may change an upload in place: it may be the model that the client keeps."""

from dataclasses import dataclass

import pytest
import torch

from lcfl import Callback, Federation, Method
from lcfl.methods import FullModel, GlobalMean, LocalTraining
from tests.helpers.builders import blobs, blobs_module


@dataclass(frozen=True)
class Halving(GlobalMean):
    def __call__(self, state, uploads, layout):
        for each in uploads:
            each.payload["model"].mul_(0.5)
        super().__call__(state, uploads, layout)


@dataclass(frozen=True)
class Returning(GlobalMean):
    def __call__(self, state, uploads, layout):
        return torch.stack([each.payload["model"] for each in uploads]).mean(dim=0)


def test_an_aggregation_that_returns_the_model_is_refused(tmp_path):
    federation = Federation(1, default_root_dir=tmp_path, accelerator="cpu", devices=1)
    with pytest.raises(ValueError, match=r"Returning: got a Tensor back; an aggregation returns nothing"):
        federation.fit(blobs_module(), blobs(), Method(LocalTraining(steps=1), FullModel(), Returning()))


class Clearing(Callback):
    shapes_result = False

    def on_uploads(self, uploads):
        uploads[0].payload["model"].zero_()


@pytest.mark.parametrize(
    ("aggregation", "callbacks", "by"),
    [(Halving(), [], "Halving"), (GlobalMean(), [Clearing()], "a callback in on_uploads")],
)
def test_a_change_of_an_upload_in_place_is_refused(tmp_path, aggregation, callbacks, by):
    federation = Federation(1, callbacks=callbacks, default_root_dir=tmp_path, accelerator="cpu", devices=1)
    with pytest.raises(ValueError, match=rf"{by} changed 'model' of an upload in place, .* Change a clone of it\."):
        federation.fit(blobs_module(), blobs(), Method(LocalTraining(steps=1), FullModel(), aggregation))
