"""A monitor of validation data is checked before training, against what the evaluations of the run will measure."""

from contextlib import nullcontext

import numpy as np
import pytest

from lcfl.callbacks import EarlyStopping
from lcfl.data.partition import ClientShares, Partition
from tests.helpers.builders import blobs, blobs_module, fedavg, fit


@pytest.mark.parametrize(
    ("val_fraction", "evaluate_every", "text"),
    [(0.05, 1, None), (0.05, 0, r"is never measured during this run\. Set trainer\.evaluate_every")],
)
def test_trial_run_takes_a_monitor_as_the_real_run_does(tmp_path, val_fraction, evaluate_every, text):
    options = {"callbacks": [EarlyStopping()], "evaluate_every": evaluate_every}
    for fast_dev_run in (False, True):
        with nullcontext() if text is None else pytest.raises(ValueError, match=text):
            data = blobs(4, val_fraction=val_fraction)
            fit(blobs_module(), data, fedavg(), tmp_path, fast_dev_run=fast_dev_run, **options)


def test_a_monitor_needs_validation_data_of_clients_that_are_evaluated(tmp_path):
    """Of two clients, one is evaluated and one has any."""

    class OneValidates(Partition):
        def __init__(self, client):
            self.client = client

        def split(self, pool, num_clients, generator):
            indices = [np.arange(0, 40), np.arange(40, 80)]
            val = [own[: 8 * (client == self.client)] for client, own in enumerate(indices)]
            return ClientShares(indices, val=val)

    refused = 0
    for client in (0, 1):
        data = blobs(2, partition=OneValidates(client), val_fraction=0.0)
        try:
            fit(
                blobs_module(),
                data,
                fedavg(),
                tmp_path,
                evaluate_clients=1,
                evaluate_every=1,
                callbacks=[EarlyStopping()],
            )
        except ValueError as error:
            assert "no client that is evaluated has any: set data.val_fraction" in str(error)
            refused += 1
    assert refused == 1
