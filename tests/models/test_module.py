"""The regularised loss of LCFed Eq. 2, and a module that both a federation and lightning.Trainer can train."""

import pickle
import warnings
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchmetrics.classification import MulticlassAccuracy

from lcfl.core import rng
from lcfl.distributed.client_output import ClientOutputError
from lcfl.models import MLP
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import NO_PULLS, Pulls
from lcfl.models.step_loss import loss_of_step
from tests.helpers.builders import Normed, alone, blobs, blobs_module, fedavg, fit, linear, linear_module


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def pulled(mu=0.7, lam=0.3):
    """Returns a module in float64 that is pulled towards random Omega and Phi, these targets, and a batch."""
    with rng.seeded(0, "network"):
        module = FederatedModule(partial(MLP, 4, [5], 3), cluster_weight=mu, global_weight=lam).double()
    draw = torch.Generator().manual_seed(0)
    centre = torch.randn(module.layout.num_parameters, generator=draw, dtype=torch.float64)
    embedding = torch.randn(module.layout.num_embedding, generator=draw, dtype=torch.float64)
    module.pulls = Pulls(centre, embedding)
    inputs = torch.randn(6, 4, generator=draw, dtype=torch.float64)
    return module, centre, embedding, (inputs, torch.tensor([0, 1, 2, 0, 1, 2]))


def gradient(module, batch):
    module.zero_grad()
    module.training_step(batch).backward()
    return flat([parameter.grad for parameter in module.network.parameters()])


def test_the_gradient_matches_finite_differences_of_the_objective():
    module, _, _, batch = pulled()
    analytic = gradient(module, batch)
    parameters, step = list(module.network.parameters()), 1e-6
    vector = parameters_to_vector(parameters).detach()
    for position in range(len(vector)):
        sides = []
        for sign in (1, -1):
            moved = vector.clone()
            moved[position] += sign * step
            vector_to_parameters(moved, parameters)
            sides.append(module.training_step(batch).item())
        assert analytic[position].item() == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-8)


def test_the_objective_is_equation_2_of_lcfed():
    module, centre, embedding, batch = pulled(mu=0.7, lam=0.3)
    w = flat(module.network.parameters())
    phi = w[: module.layout.num_embedding]
    expected = nn.functional.cross_entropy(module(batch[0]), batch[1])
    expected = expected + 0.35 * (w - centre).square().sum() + 0.15 * (phi - embedding).square().sum()
    assert module.training_step(batch).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(("mu", "lam"), [(0.7, 0.3), (0.7, 0.0), (0.0, 0.3)])
def test_the_step_is_line_4_of_local_update(mu, lam):
    module, centre, embedding, batch = pulled(mu, lam)
    full = gradient(module, batch)
    w = flat(module.network.parameters())
    module.pulls = NO_PULLS
    expected = gradient(module, batch) + mu * (w - centre)
    expected[: len(embedding)] += lam * (w[: len(embedding)] - embedding)
    torch.testing.assert_close(full, expected, rtol=1e-12, atol=1e-14)


def test_pulls_with_zero_weight_change_nothing_and_cost_nothing(monkeypatch):
    module, _, _, batch = pulled(mu=0.0, lam=0.0)
    with_pulls = module.training_step(batch)
    monkeypatch.setattr(torch, "cat", lambda _: pytest.fail("parameters were gathered"))
    assert module.regularizer() == 0.0
    module.training_step(batch)
    module.pulls = NO_PULLS
    assert torch.equal(with_pulls, module.training_step(batch))


def test_the_weights_of_pulls_have_no_effect_without_targets(monkeypatch):
    module, _, _, batch = pulled()
    module.pulls = NO_PULLS
    monkeypatch.setattr(torch, "cat", lambda _: pytest.fail("parameters were gathered"))
    assert torch.equal(module.training_step(batch), nn.functional.cross_entropy(module(batch[0]), batch[1]))


def test_the_regulariser_is_float32_under_autocast():
    module = blobs_module(cluster_weight=0.7, global_weight=0.3)
    layout = module.layout
    w = layout.pack(module.network)
    module.pulls = Pulls(w + 1e-3, w[: layout.num_embedding] - 1e-3)  # differences that bfloat16 cannot represent
    outside = module.regularizer()
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.zeros(2, 16)).dtype == torch.bfloat16
        inside = module.regularizer()
        assert inside.dtype == torch.float32
        assert torch.equal(inside, outside)
        assert module.training_step((torch.zeros(2, 16), torch.tensor([0, 1]))).dtype == torch.float32
    assert outside.item() == pytest.approx(0.35 * 1e-6 * len(w) + 0.15 * 1e-6 * layout.num_embedding, rel=1e-3)


def test_an_overridden_training_step_takes_effect(tmp_path):
    class Doubled(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            return 2 * super().training_step(batch, batch_idx)

    make = partial(MLP, 16, [16], 8)
    states = [
        fit(kind(make, partial(torch.optim.SGD, lr=lr)), blobs(4), fedavg(), tmp_path, engine="sequential").state
        for kind, lr in ((Doubled, 0.05), (FederatedModule, 0.1), (FederatedModule, 0.05))
    ]
    assert torch.equal(states[0].global_model, states[1].global_model)  # doubling does not round
    assert not torch.equal(states[0].global_model, states[2].global_model)


def test_an_overridden_configure_optimizers_takes_effect(tmp_path):
    class Faster(FederatedModule):
        def configure_optimizers(self):
            return torch.optim.SGD(self.network.parameters(), lr=0.1)

    make = partial(MLP, 16, [16], 8)
    states = [
        fit(kind(make, partial(torch.optim.SGD, lr=lr)), blobs(4), alone(), tmp_path, engine="sequential").state
        for kind, lr in ((Faster, 0.05), (FederatedModule, 0.1), (FederatedModule, 0.05))
    ]
    assert torch.equal(states[0].clients[2].model, states[1].clients[2].model)
    assert not torch.equal(states[0].clients[2].model, states[2].clients[2].model)


def test_the_default_optimizer_is_sgd_with_rate_0_01():
    module = pickle.loads(pickle.dumps(FederatedModule(partial(MLP, 4, [5], 3))))  # as a spawned rank gets it
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.01, 0)


def test_lightnings_trainer_trains_the_module_with_the_same_data(tmp_path):
    module, data = blobs_module(cluster_weight=0.5), blobs()
    before = module.layout.pack(module.network)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
    trainer = pl.Trainer(max_epochs=1, limit_train_batches=10, num_sanity_val_steps=0, **options)
    trainer.fit(module, data)
    assert not torch.equal(module.layout.pack(module.network), before)
    assert (module.global_step, module.current_epoch) == (10, 1)

    def by_hand(sets):
        inputs, targets = data.samples.batch(torch.cat([torch.from_numpy(each) for each in sets]), torch.device("cpu"))
        with torch.no_grad():
            return (module.network(inputs).argmax(dim=1) == targets).float().mean().item()

    assert trainer.callback_metrics["val/acc"].item() == pytest.approx(by_hand(data.population.val), abs=1e-6)
    assert "val/loss" in trainer.callback_metrics
    tested = trainer.test(module, data, verbose=False)[0]
    assert tested["test/acc"] == pytest.approx(by_hand(data.population.test["own_split"]), abs=1e-6)
    labels = torch.cat(trainer.predict(module, data.val_dataloader()))
    inputs = torch.cat([batch[0] for batch in data.val_dataloader()])
    assert torch.equal(labels, module.network(inputs).argmax(dim=1))


def test_user_defined_metrics_are_logged_by_name(tmp_path):
    metrics = {"top2": MulticlassAccuracy(8, top_k=2, average="micro")}
    logged = fit(blobs_module(metrics=metrics), blobs(4), fedavg(), tmp_path).metrics
    plain = fit(blobs_module(), blobs(4), fedavg(), tmp_path).metrics
    assert logged["test/own_split/global/top2"] > logged["test/own_split/global/acc"]
    assert plain.items() <= logged.items()


def test_a_user_defined_accuracy_replaces_the_accuracy():
    ours = MulticlassAccuracy(8, top_k=2)
    assert blobs_module(metrics={"acc": ours}).metrics["acc"] is ours


@pytest.mark.parametrize("name", ["loss", "a/b", "f1_std", "acc_worst10", "half", "a.b", ""])
def test_names_of_metrics_that_are_taken_are_refused(name):
    with pytest.raises(ValueError, match=f"model.metrics: got the name '{name}'; .* Rename"):
        blobs_module(metrics={name: MulticlassAccuracy(8)})


def test_seed_and_number_determine_an_initial_model():
    module, other = blobs_module(), blobs_module()
    models = {(seed, number): module.initial_model(seed, number) for seed in (0, 1) for number in (0, 1)}
    for address, model in models.items():
        assert torch.equal(other.initial_model(*address), model)
        assert sum(torch.equal(model, each) for each in models.values()) == 1
    with rng.seeded(0, "init", 1):
        assert torch.equal(models[0, 1], module.layout.pack(module.make_network()))


def test_drawing_an_initial_model_does_not_change_generator_and_network():
    module = blobs_module()
    state, model = torch.get_rng_state(), module.layout.pack(module.network)
    module.initial_model(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(module.layout.pack(module.network), model)


def test_an_initial_model_includes_buffers():
    assert FederatedModule(Normed).initial_model(0)[23:].tolist() == [0, 0, 0, 1, 1, 1, 0]


def test_initial_models_can_come_from_a_file(tmp_path):
    trained = Normed()
    trained(torch.randn(8, 2))
    torch.save(trained.state_dict(), tmp_path / "start.pt")
    module = FederatedModule(Normed, init_from=tmp_path / "start.pt")
    weights = module.layout.pack(trained)
    for seed, number in ((0, 0), (0, 1), (1, 0)):
        assert torch.equal(module.initial_model(seed, number), weights)
    assert torch.equal(module.layout.pack(module.network), weights)  # lightning.Trainer begins with these weights
    module.initial_model(0).zero_()
    assert torch.equal(module.initial_model(0), weights)


def test_the_fingerprint_of_initial_weights_depends_on_their_values_only(tmp_path):
    state = linear_module().network.state_dict()
    prints = []
    for name, change in (("a.pt", 0.0), ("b.pt", 0.0), ("c.pt", 1e-3)):
        torch.save({key: value + change for key, value in state.items()}, tmp_path / name)
        prints.append(linear_module(init_from=str(tmp_path / name)).initial_fingerprint)
    assert prints[0] == prints[1] != prints[2]
    assert linear_module().initial_fingerprint is None


def test_a_finished_network_is_refused():
    with pytest.raises(ValueError, match=r"model.network: got a finished MLP; it must be a factory of .*lambda"):
        FederatedModule(MLP(4, [5], 3))


def test_a_finished_optimizer_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match=r"model.optimizer: got a finished SGD; it must be a factory .*functools.part"):
        FederatedModule(linear, optimizer)


@pytest.mark.parametrize("name", ["cluster_weight", "global_weight"])
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_a_negative_weight_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"model.{name}: got {value}.*>= 0"):
        linear_module(**{name: value})


def test_an_unknown_cut_is_refused():
    with pytest.raises(ValueError, match=r"model.cut: .*no layer 'fc'.* e.g. model.cut=decision, or to null"):
        linear_module(cut="fc")


def test_a_value_that_a_step_logs_becomes_a_metric_of_the_round(tmp_path):
    class Logs(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            self.log("train/step", batch_idx, prog_bar=True)
            self.log_dict({"train/labels": batch[1].float().mean(), "train/one": 1})
            return super().training_step(batch, batch_idx)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = fit(Logs(partial(MLP, 16, [4], 8)), blobs(), fedavg(steps=3), tmp_path, rounds=2, clients_per_round=4)
    for row in run.rows[-2:]:
        assert (row["train/step"], row["train/one"]) == (1.0, 1.0)
        assert 0 < row["train/labels"] < 7


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_step_may_return_its_loss_in_a_dict(tmp_path, engine):
    class Named(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            return {"loss": super().training_step(batch, batch_idx), "more": 1}

    class Plain(Named):
        def training_step(self, batch, batch_idx=0):
            return super().training_step(batch, batch_idx)["loss"]

    network = partial(MLP, 16, [4], 8)
    runs = [
        fit(kind(network), blobs(), fedavg(steps=3), tmp_path / kind.__name__, clients_per_round=4, engine=engine)
        for kind in (Named, Plain)
    ]
    assert torch.equal(runs[0].state.global_model, runs[1].state.global_model)
    assert runs[0].rows[0]["train/loss"] == runs[1].rows[0]["train/loss"] > 0


@pytest.mark.parametrize(
    ("returned", "got"),
    [(None, "NoneType"), ({"acc": torch.ones(())}, "dict"), (torch.ones(3), r"shape \[3\]"), (0.5, "float")],
)
def test_a_step_that_returns_no_loss_is_refused(returned, got):
    class Other(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            return returned

    with pytest.raises(ValueError, match=rf"^Other.training_step: got {got}; it must return the loss, .* one number"):
        loss_of_step(Other(partial(MLP, 16, [4], 8)), (torch.zeros(2, 16), torch.zeros(2)))


def test_a_loss_that_does_not_depend_on_the_parameters_is_refused(tmp_path):
    class Detached(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            return super().training_step(batch, batch_idx).detach()

    message = r"Detached.training_step: the loss has no gradient, because it does not depend on a trained parameter"
    with pytest.raises(ClientOutputError, match=message):
        fit(Detached(partial(MLP, 16, [4], 8)), blobs(4), fedavg(steps=1), tmp_path)


@pytest.mark.parametrize("name", ["current_epoch", "global_step"])
def test_what_only_a_trainer_counts_cannot_be_read_in_a_federation(tmp_path, name):
    class Counts(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            return super().training_step(batch, batch_idx) * (1 + getattr(self, name))

    message = rf"self.{name}: only lightning.Trainer counts it. In a federation, batch_idx .* lr_factor"
    with pytest.raises(ClientOutputError, match=message):
        fit(Counts(partial(MLP, 16, [4], 8)), blobs(4), fedavg(steps=1), tmp_path)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (MulticlassAccuracy(3), "MulticlassAccuracy"),
        (torch.ones(2), r"a tensor of shape \[2\]"),
        ([], r"a tensor of shape \[0\]"),
        ("much", "str"),
        (None, "NoneType"),
    ],
)
def test_a_metric_that_is_not_one_number_is_refused(value, got):
    module = linear_module()
    message = rf"^self.log\('train/acc'\): got {got}; a metric must be one number. .*torchmetrics object returns when"
    with module.collecting() as logged, pytest.raises(ValueError, match=message):
        module.log("train/acc", value)
    assert not logged


@pytest.mark.parametrize("name", ["round", "comm/down_bytes", "val/own_split/personal/acc", "train/failed_clients"])
def test_names_that_lcfl_logs_are_refused(name):
    module = linear_module()
    with (
        module.collecting() as logged,
        pytest.raises(ValueError, match=f"self.log.*{name}.*: lcfl logs this name itself"),
    ):
        module.log(name, 1.0)
    assert not logged


def test_nothing_is_collected_outside_of_a_local_update():
    module = linear_module()
    with module.collecting() as logged:
        module.log("a", 1)
        module.log("a", torch.tensor(3.0, requires_grad=True))
    assert {name: [value.item() for value in values] for name, values in logged.items()} == {"a": [1.0, 3.0]}
    assert not logged["a"][1].requires_grad
    with pytest.warns(UserWarning, match="self.log"):
        module.log("a", 2)


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.decision = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.decision(inputs)


class LitWithSteps(Lit):
    def training_step(self, batch, batch_idx):
        return self(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_lightning_module_with_steps_of_its_own_is_no_network():
    with pytest.raises(ValueError, match=r"LitWithSteps is a LightningModule, whose training_step and configure_opt"):
        FederatedModule(LitWithSteps)
    assert FederatedModule(Lit).layout.num_parameters == 6  # nothing of it is lost


def test_what_is_left_out_of_no_file_is_a_warning():
    with pytest.warns(UserWarning, match=r"model.init_except: \['fc'\] has no effect without model.init_from"):
        FederatedModule(partial(MLP, 4, [], 2), init_except=["fc"])


def test_a_network_without_parameters_is_refused():
    with pytest.raises(ValueError, match=r"model\.network: Identity has no parameters; name a network that has some"):
        FederatedModule(nn.Identity)
