"""Settings and objects that a federation refuses, and its messages."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from lightning.fabric.loggers import CSVLogger
from torch.utils.data import TensorDataset

from lcfl import Callback, FederatedModule, Federation, Method
from lcfl.callbacks import Checkpoint, EarlyStopping, LabelSimilarity
from lcfl.methods.aggregation import GlobalMean
from lcfl.methods.clustering import LowRankCosine
from lcfl.models import MLP
from lcfl.runs.checkpoint import CheckpointError
from tests.helpers.builders import blobs, blobs_module, fedavg, fit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": -1}, "trainer: got rounds=-1, evaluate_every=10; neither may be negative"),
        ({"rounds": 2**62}, "trainer.rounds: got 4611686018427387904; at most 10000000 are allowed"),
        ({"evaluate_every": -1}, "trainer: got rounds=100, evaluate_every=-1; neither"),
        ({"strategy": "fsdp"}, "trainer.strategy: got 'fsdp'; .* a client's model fits on one device"),
        ({"precision": "64-true"}, "trainer.precision: got '64-true'; allowed are 32-true, .* aggregated in float32"),
        ({"precision": "16-mixed", "accelerator": "cpu"}, "trainer.precision: got 16-mixed on a CPU, .*bf16-mixed"),
        ({"accelerator": "tpu"}, "Federation: got accelerator='tpu'; allowed are auto, cpu, cuda and gpu"),
        ({"name": "a/b"}, "trainer.name: got 'a/b'; it must be the name of one folder"),
        ({"name": ".."}, "trainer.name: got '..'"),
    ],
)
def test_refused_setting_is_named_with_the_allowed_values(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Federation(**settings)


def test_numpy_numbers_are_accepted(tmp_path):
    def state_of(number, fraction, part, truth, root):
        federation = Federation(
            rounds=number(2),
            clients_per_round=part(0.5),
            evaluate_clients=number(3),
            evaluate_every=number(1),
            client_dropout=fraction(0.25),
            seed=number(1),
            devices=number(1),
            accelerator="cpu",
            logger=None,
            enable_progress_bar=False,
            default_root_dir=tmp_path / root,
        )
        options = {"seed": number(3), "newcomers": part(0.25), "drop_last": truth(True), "val_fraction": fraction(0.2)}
        data = blobs(number(12), batch_size=number(10), **options)
        run = federation.fit(blobs_module(), data, fedavg(steps=number(3)))
        return run.state.global_model, run.summary()["identity"]

    model, identity = state_of(int, float, float, bool, "plain")
    of_numpy, same = state_of(np.int64, np.float64, np.float32, np.bool_, "numpy")
    assert torch.equal(model, of_numpy) and identity == same


def test_logger_none_means_no_logger(tmp_path):
    assert Federation(logger=None).loggers is False and Federation(logger=False).loggers is False
    logger = CSVLogger(tmp_path)
    assert Federation(logger=logger).loggers == Federation(logger=iter([logger])).loggers == [logger]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"callbacks": [EarlyStopping]},
            "trainer.callbacks: got the class EarlyStopping, not an instance of it; .* Callb",
        ),
        ({"callbacks": EarlyStopping}, "trainer.callbacks: got the class EarlyStopping, not an instance of it"),
        ({"callbacks": ["Monitor"]}, r"trainer.callbacks: got str; it must be an instance of Callback\."),
        ({"logger": CSVLogger}, "trainer.logger: got the class CSVLogger, not an instance of it; .* of Logger"),
        ({"logger": "csv"}, r"trainer.logger: got str; it must be an instance of Logger\."),
        ({"logger": 3}, r"trainer.logger: got int; it must be an instance of Logger\."),
    ],
)
def test_objects_that_are_not_callbacks_or_loggers_are_named(settings, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        Federation(**settings)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        (
            "max_epochs",
            r"In place of this option of lightning.Trainer, set trainer\.rounds; .* epochs of method\.local_up",
        ),
        ("gradient_clip_val", r"In place of this option of lightning.Trainer, set an optimizer that clips gradients"),
        ("plugins", r"This option of lightning.Trainer has no counterpart in lcfl; leave it out\.$"),
        ("round", r"Did you mean rounds\?$"),
        ("nothing", "$"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_one_to_use(name, instead):
    with pytest.raises(TypeError, match=rf"^Federation: there is no {name}\. ?{instead}"):
        Federation(**{name: 3})


def test_objects_of_another_class_are_named(tmp_path):
    data, module, method = blobs(), blobs_module(), fedavg()
    federation = Federation(default_root_dir=tmp_path)
    with pytest.raises(TypeError, match=r"^model: got FederatedDataModule; .* an instance of FederatedModule\.$"):
        federation.fit(data, module, method)
    with pytest.raises(TypeError, match=r"^model: got FederatedDataModule; it must"):
        Federation(fast_dev_run=True).fit(data, module, method)
    with pytest.raises(TypeError, match=r"^method: got LocalTraining; it must be an instance of Method\.$"):
        federation.fit(module, data, method.local_update)
    with pytest.raises(TypeError, match=r"^method.aggregation: got the class GlobalMean, not an instance of it; it"):
        Method(method.local_update, method.exchange, GlobalMean)
    with pytest.raises(TypeError, match=r"^method.clustering: got LowRankCosine; it must be an instance of list\.$"):
        Method(method.local_update, method.exchange, method.aggregation, LowRankCosine(2))
    with pytest.raises(TypeError, match=r"^method.clustering.0: got GlobalMean; .* an instance of Clustering\.$"):
        Method(method.local_update, method.exchange, method.aggregation, [GlobalMean()])
    with pytest.raises(
        TypeError, match=r"^data.dataset: got TensorDataset; .* Datasets makes one of your own data sets"
    ):
        blobs(dataset=TensorDataset(torch.zeros(4, 2), torch.zeros(4)))
    with pytest.raises(
        TypeError, match=r"^data.newcomers: got dict; .* Real. That many clients are drawn at random\.$"
    ):
        blobs(newcomers={"alice": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("accelerator", ["cuda", "gpu"])
def test_missing_gpu_is_refused(accelerator):
    with pytest.raises(ValueError, match=rf"trainer.accelerator: got {accelerator}, but torch finds no GPU"):
        Federation(accelerator=accelerator)


def test_settings_can_be_changed_before_a_run(tmp_path):
    federation = Federation(callbacks=iter([EarlyStopping("val/own_split/personal/acc")]), logger=False)
    assert pickle.loads(pickle.dumps(federation)).rounds == 100, "a spawned rank gets it pickled"
    federation.default_root_dir, federation.logger = tmp_path, None
    assert federation.root == tmp_path and not federation.loggers
    federation.callbacks.append(LabelSimilarity())
    names = [type(callback).__name__ for callback in federation.all_callbacks]
    assert names == ["EarlyStopping", "Progress", "Checkpoint", "LabelSimilarity"]
    assert federation != Federation() and hash(federation)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_run_trains_where_gradients_are_switched_off(tmp_path, context):
    module, data = blobs_module(), blobs()
    expected = fit(module, data, fedavg(), tmp_path / "on").state.global_model
    with context():
        found = fit(module, data, fedavg(), tmp_path / "off").state.global_model
    assert torch.equal(found, expected)


@pytest.mark.parametrize("ckpt_path", [None, "auto"])
def test_an_evaluation_without_a_checkpoint_takes_the_last(tmp_path, ckpt_path):
    """A run's config.yaml says how the run began, and may be given to ``lcfl test`` as it is."""
    federation = Federation(1, accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    federation.fit(blobs_module(), blobs(4), fedavg())
    last = federation.test(blobs_module(), blobs(4), fedavg())
    assert federation.test(blobs_module(), blobs(4), fedavg(), ckpt_path) == last


def test_threads_of_a_process_wait_for_one_another(tmp_path):
    begun, ends = [], []

    class Slow(Callback):
        def on_fit_start(self):
            begun.append(len(ends))
            time.sleep(0.2)

        def on_fit_end(self):
            ends.append(0)

    def train(number):
        return fit(blobs_module(), blobs(), fedavg(), tmp_path / str(number), callbacks=[Slow()]).state.global_model

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, range(2))
    assert begun == [0, 1] and torch.equal(first, second)


def small(rounds, root, ckpt_path=None, **options):
    options = {"logger": False, "enable_progress_bar": False, "devices": 1, **options}
    federation = Federation(rounds, accelerator="cpu", evaluate_every=0, default_root_dir=root, **options)
    return federation.fit(blobs_module(), blobs(4), fedavg(), ckpt_path)


def test_a_run_that_is_continued_stays_what_it_was(tmp_path):
    first = small(2, tmp_path)
    second = small(3, tmp_path, "last")  # which keeps the checkpoint of the first
    assert (first.state.round, second.state.round) == (2, 3)
    assert first.metrics["test/own_split/global/loss"] != second.metrics["test/own_split/global/loss"]


def test_a_model_of_a_run_does_not_change_the_users_random_numbers(tmp_path):
    run, state = small(1, tmp_path), torch.get_rng_state()
    assert not run.model("global").training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_damaged_summary_is_named(tmp_path):
    run = small(1, tmp_path)
    (run.path / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json: damaged \("):
        run.summary()


def test_a_run_whose_checkpoint_was_removed_says_so(tmp_path):
    run = small(1, tmp_path)
    small(2, tmp_path, "last", callbacks=[Checkpoint(keep_last=1)])
    with pytest.raises(CheckpointError, match=r"round-000001\.ckpt: there is no checkpoint, or no longer: .*keep_last"):
        run.model("global")


def test_a_run_without_checkpoints_says_why_it_has_no_models(tmp_path):
    options = {"enable_checkpointing": False}
    for ckpt_path in (None, small(1, tmp_path / "saved").path):  # whose checkpoint is of an earlier round
        run = small(2, tmp_path / "saved" if ckpt_path else tmp_path, ckpt_path, **options)
        with pytest.raises(CheckpointError, match=r"^trainer\.enable_checkpointing: got False, so .* fit it again"):
            run.model("global")
    with pytest.raises(CheckpointError, match=r"writes none if trainer\.enable_checkpointing is false\.$"):
        small(2, tmp_path, "last")


def test_spawned_ranks_refuse_what_they_cannot_import(tmp_path):
    module = FederatedModule(lambda: MLP(16))
    federation = Federation(1, accelerator="cpu", devices=2, strategy="ddp_spawn", default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^trainer\.strategy: got ddp_spawn, .*lambda.* give a class or a functools"):
        federation.fit(module, blobs(4), fedavg())
    assert not list(tmp_path.iterdir())
