"""Settings and objects that a federation refuses, and what it says."""

import pytest
import torch
from torch.utils.data import TensorDataset

from lcfl import Federation, Method
from lcfl.aggregation import GlobalMean
from lcfl.clustering import LowRankCosine
from tests.builders import blobs, blobs_module, fedavg


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": -1}, "trainer: got rounds=-1, evaluate_every=10; neither may be negative"),
        ({"evaluate_every": -1}, "trainer: got rounds=100, evaluate_every=-1; neither"),
        ({"strategy": "fsdp"}, "trainer.strategy: got 'fsdp'; .* a client's model fits on one device"),
        ({"precision": "64-true"}, "trainer.precision: got '64-true'; allowed are 32-true, .* merged in float32"),
        ({"precision": "16-mixed", "accelerator": "cpu"}, "trainer.precision: got 16-mixed on a CPU, .*bf16-mixed"),
        ({"accelerator": "tpu"}, "trainer.accelerator: got 'tpu'; allowed are auto, cpu, cuda and gpu"),
        ({"name": "a/b"}, "trainer.name: got 'a/b'; it must be the name of one folder"),
        ({"name": ".."}, "trainer.name: got '..'"),
    ],
)
def test_a_setting_that_is_not_allowed_is_named_with_what_is(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Federation(**settings)


def test_other_objects_than_those_needed_are_named(tmp_path):
    data, module, method = blobs(), blobs_module(), fedavg()
    federation = Federation(default_root_dir=tmp_path)
    with pytest.raises(TypeError, match=r"^model: got FederatedDataModule; it must be of the class FederatedModule\.$"):
        federation.fit(data, module, method)
    with pytest.raises(TypeError, match=r"^model: got FederatedDataModule; it must"):
        Federation(fast_dev_run=True).fit(data, module, method)
    with pytest.raises(TypeError, match=r"^method: got LocalTraining; it must be of the class Method\.$"):
        federation.fit(module, data, method.local_update)
    with pytest.raises(TypeError, match=r"^method.aggregation: got the class GlobalMean, not one made of it; it must"):
        Method(method.local_update, method.exchange, GlobalMean)
    with pytest.raises(TypeError, match=r"^method.clustering: got LowRankCosine; it must be of the class list\.$"):
        Method(method.local_update, method.exchange, method.aggregation, LowRankCosine(2))
    with pytest.raises(TypeError, match=r"^method.clustering.0: got GlobalMean; it must be of the class Clustering\.$"):
        Method(method.local_update, method.exchange, method.aggregation, [GlobalMean()])
    with pytest.raises(
        TypeError, match=r"^data.dataset: got TensorDataset; .* Datasets makes one of your own data sets"
    ):
        blobs(dataset=TensorDataset(torch.zeros(4, 2), torch.zeros(4)))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("accelerator", ["cuda", "gpu"])
def test_a_gpu_that_is_not_there(accelerator):
    with pytest.raises(ValueError, match=rf"trainer.accelerator: got {accelerator}, but torch finds no GPU here"):
        Federation(accelerator=accelerator)
