"""No pointer reaches the kernels if its tensor is shorter than what they read, or of another type."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.methods.local import Pulls
from lcfl.models.module import FederatedModule
from tests.helpers.builders import Normed, blobs, loaded, named_engine

BATCH = np.arange(6)


def engine(buffer_policy="average"):
    module = FederatedModule(
        Normed, partial(torch.optim.SGD, lr=0.1), cluster_weight=0.5, global_weight=0.5, buffer_policy=buffer_policy
    )
    inputs = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    data = loaded(blobs(2, dataset=Tensors((inputs, torch.arange(16) % 2)), partition=IID(), protocols=["own_split"]))
    return named_engine("compiled", module, data)


@pytest.mark.parametrize(
    "spoil",
    [lambda model: model[:-1], lambda model: model.repeat(2), torch.Tensor.double, lambda model: model[None]],
    ids=["short", "long", "double", "matrix"],
)
def test_a_vector_of_another_length_or_type_is_refused(spoil):
    compiled = engine()
    model = compiled.module.initial_model(0)
    phi = model[: compiled.layout.num_embedding]
    with pytest.raises(ValueError, match=r"the model: got torch\.float.* needs torch.float32 of shape \[30\]"):
        compiled.run_optimizer(spoil(model), [BATCH])
    with pytest.raises(ValueError, match="the model: got"):
        compiled.gradient(spoil(model), BATCH)
    with pytest.raises(ValueError, match="the model: got"):
        compiled.scorer(spoil(model))
    if spoil(phi).dim() == 2 or len(spoil(phi)) < len(phi) or spoil(phi).dtype != phi.dtype:
        for run in (compiled.run_optimizer, lambda model, batches, pulls: compiled.gradient(model, BATCH, 0, pulls)):
            with pytest.raises(ValueError, match="the global embedding: got"):
                run(model, [BATCH], Pulls(embedding=spoil(phi)))
            with pytest.raises(ValueError, match="the cluster's centre: got"):
                run(model, [BATCH], Pulls(centre=spoil(model[:23])))
            with pytest.raises(ValueError, match="the correction: got"):
                run(model, [BATCH], Pulls(correction=spoil(model[:23])))


def test_buffers_of_another_length_are_refused():
    compiled = engine("local")
    model = compiled.module.initial_model(0)
    compiled.buffers = torch.zeros(6)
    with pytest.raises(ValueError, match=r"the client's buffers: got torch.float32 of shape \[6\].* shape \[7\]"):
        compiled.run_optimizer(model, [BATCH])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda labels: labels + 1,
            "labels: got 1 to 2; they must be from 0 to 1, as the network returns 2 scores",
        ),
        (lambda labels: labels - 100, "labels: got -100 to -99; they must be"),
        (lambda labels: labels * 2**40, "labels: got 0 to 1099511627776"),
        (lambda labels: labels[1:], r"labels: got shape \[5\] for 6 samples"),
        (torch.Tensor.int, "labels: got torch.int32"),
    ],
)
def test_labels_that_are_no_classes_are_refused(change, message):
    compiled = engine()
    inputs, labels = compiled.samples.training_batch(BATCH, compiled.device)
    compiled.samples = SimpleNamespace(training_batches=lambda batches, device: [(inputs, change(labels))])
    with pytest.raises(ValueError, match=message):
        compiled.run_optimizer(compiled.module.initial_model(0), [BATCH])
