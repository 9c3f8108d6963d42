"""Runs with a frozen part: checkpoints hold it once, and resumed, opened and exported runs have it, on any rank."""

import json
import shutil

import pytest
import torch

import lcfl
from lcfl.cli.commands import export, onboard, predict
from lcfl.runs import checkpoint, checkpoint_lookup
from lcfl.runs.checkpoint import CheckpointError
from lcfl.runs.serialization import serialized
from tests.helpers import fits
from tests.helpers.bits import same
from tests.helpers.builders import Pretrained
from tests.helpers.checkpoints import replace_part, rewrite

BODY = ("body.0.weight", "body.1.weight", "body.1.running_mean", "middle.0.running_var", "middle.1.bias")
NETWORK = ["--model.network=tests.helpers.builders.Pretrained", "--trainer.engine=compiled"]
OPTIONS = [*NETWORK, "--model.trainable=[adapter, decision]"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Provides a file with weights whose running statistics are not those of a new network."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        network = Pretrained()
        for _ in range(5):
            network(3 * torch.randn(64, 16) + 1)
    path = tmp_path_factory.mktemp("weights") / "body.pt"
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def run(weights, tmp_path_factory):
    """Provides a run of LCFed of four rounds that starts from `weights`."""
    return fits.fit(tmp_path_factory.mktemp("run"), "lcfed", 1, 4, *OPTIONS, f"--model.init_from={weights}").path


def parts(path):
    return json.loads((path / "manifest.json").read_text())["sha256"]


def test_checkpoints_share_one_file_and_no_client_has_a_copy(run):
    paths = sorted((run / "checkpoints").glob("*.ckpt"))
    files = [next(path.glob("frozen-*.pt")) for path in paths]
    assert len(paths) > 1 and len({file.stat().st_ino for file in files}) == 1
    assert [list(parts(path))[1] for path in paths] == [files[0].name] * len(paths)
    state = checkpoint.read(paths[-1]).state
    assert all(len(state.clients[client].model) == 144 for client in state.clients)
    assert state.frozen.shape == (258,)


def test_models_and_frozen_values_are_those_of_the_file(run, weights):
    saved, opened = torch.load(weights, weights_only=True), lcfl.load(run)
    networks = [opened.model("personal", client=2), opened.model("cluster", cluster=0), opened.model("global")]
    for network in networks:
        state = network.state_dict()
        assert all(torch.equal(state[name], saved[name]) for name in BODY)
        assert not torch.equal(state["decision.weight"], saved["decision.weight"])


def test_an_exported_file_and_predictions_have_the_frozen_part(run, weights, tmp_path, capsys):
    export.main([str(run), "--model", "personal", "--client", "2", "--out", str(tmp_path / "exported.pt")])
    exported, saved = (torch.load(path, weights_only=True) for path in (tmp_path / "exported.pt", weights))
    assert all(torch.equal(exported[name], saved[name]) for name in BODY)
    predict.main([str(run), "--model", "personal", "--client", "2", "--out", str(tmp_path / "predicted.csv")])
    lines = (tmp_path / "predicted.csv").read_text().splitlines()[1:]
    data = lcfl.cli.federated_cli.instantiate_data(run / "config.yaml")
    data.prepare_data()
    data.setup()
    network = Pretrained().eval()
    network.load_state_dict(exported)
    indices = [int(line.split(",")[1]) for line in lines]
    inputs, _ = data.seen_by(2).batch(torch.tensor(indices).numpy(), torch.device("cpu"))
    assert network(inputs).argmax(1).tolist() == [int(line.split(",")[3]) for line in lines]


def test_resumed_run_has_the_same_bits_also_without_the_file(run, weights, tmp_path):
    gone = shutil.copy(weights, tmp_path / "gone.pt")
    begun = fits.fit(tmp_path, "lcfed", 1, 2, *OPTIONS, f"--model.init_from={gone}").path
    gone.unlink()
    words = fits.arguments(tmp_path, "lcfed", 1, 4, *OPTIONS, "--ckpt_path=last")
    assert fits.main([*words, "--model.init_from=null"]).path == begun
    fits.assert_same_run(begun, run)
    folders = [sorted((path / "checkpoints").glob("*.ckpt"))[-1] for path in (begun, run)]
    assert len({next(folder.glob("frozen-*.pt")).name for folder in folders}) == 1


def test_other_frozen_layers_are_refused_when_a_run_is_resumed(run, weights, tmp_path):
    shutil.copytree(run, tmp_path / "run" / run.name)
    words = fits.arguments(tmp_path, "lcfed", 1, 6, *NETWORK, f"--model.init_from={weights}", "--ckpt_path=last")
    with pytest.raises(CheckpointError, match=r"(?s)another configuration.*model.trained"):
        fits.main([*words, "--model.trainable=[decision]"])
    with pytest.raises(CheckpointError, match=r"(?s)another configuration.*init_from"):
        fits.main([*words, "--model.trainable=[adapter, decision]", "--model.init_except=[decision]"])


def test_several_ranks_train_the_same_bits(run, weights, tmp_path):
    two = fits.fit(tmp_path, "lcfed", 2, 4, *OPTIONS, f"--model.init_from={weights}")
    fits.assert_same_run(two.path, run)


def test_evaluation_uses_the_values_of_the_checkpoint(run, tmp_path):
    root = shutil.copytree(run, tmp_path / "run" / run.name).parent.parent
    words = fits.arguments(root, "lcfed", 1, 4, *OPTIONS, "--ckpt_path=last")[1:]
    metrics = fits.main(["test", *[word for word in words if "every_n_rounds" not in word]])
    final = json.loads((run / "summary.json").read_text())["metrics"]
    for name in ("test/own_split/personal/acc", "test/own_split/cluster/loss"):
        assert metrics[name] == final[name]


def test_models_of_ifca_differ_in_the_trained_part_alone(tmp_path):
    run = fits.fit(tmp_path, "ifca", 1, 1, *OPTIONS, "--method.clustering.num_clusters=3")
    networks = [run.model("cluster", cluster=number).state_dict() for number in range(3)]
    for name in networks[0]:
        shared = [torch.equal(network[name], networks[0][name]) for network in networks[1:]]
        assert shared == [not name.startswith(("adapter", "decision"))] * 2, name


def test_ifca_starts_from_weights_with_different_heads(weights, tmp_path):
    more = (f"--model.init_from={weights}", "--model.init_except=[decision]", "--model.trainable=[decision]")
    run = fits.fit(tmp_path, "ifca", 1, 0, *NETWORK, *more, "--method.clustering.num_clusters=2")
    networks = [run.model("cluster", cluster=number).state_dict() for number in range(2)]
    assert torch.equal(networks[0]["adapter.weight"], networks[1]["adapter.weight"])
    assert not torch.equal(networks[0]["decision.weight"], networks[1]["decision.weight"])


def test_newcomers_get_the_frozen_part(tmp_path):
    run = fits.fit(tmp_path, "fedavg", 1, 2, *OPTIONS, "--data.newcomers=4", "--trainer.clients_per_round=4")
    folder = run.path / "checkpoints"
    module, method = lcfl.cli.federated_cli.instantiate(run.path / "config.yaml")
    data = lcfl.cli.federated_cli.instantiate_data(run.path / "config.yaml")
    found = onboard.onboard(checkpoint_lookup.newest([run.path]), module, data, method, epochs=1)
    newcomer = found.joined[0].client
    network = run.model("global")
    indices = data.population.train[newcomer]
    test = data.population.test["own_split"][newcomer]
    inputs, labels = data.seen_by(newcomer).batch(test, torch.device("cpu"))
    expected = float((network(inputs).argmax(1) == labels).float().mean())
    assert len(indices) and folder.is_dir()
    assert found.rows()[0]["test/own_split/before/acc"] == pytest.approx(expected)


def resumed(root, *more):
    return fits.main(fits.arguments(root, "lcfed", 1, 6, *OPTIONS, "--model.init_from=null", "--ckpt_path=last", *more))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"frozen": torch.zeros(257)}, r"damaged: frozen-.*.pt: frozen: got .*257.*; it must be"),
        ({"frozen": torch.zeros(258, dtype=torch.float64)}, r"frozen: got .*float64.*; it must be"),
        ({"frozen": torch.zeros(258)[None]}, r"frozen: got .*; it must be"),
        ({"frozen": "x"}, r"frozen: got .*; it must be"),
        ({"frozen": torch.zeros(258), "more": 1}, r"more is missing or unknown"),
        (torch.zeros(258), r"the content: got .*; it must be"),
    ],
    ids=["short", "double", "deeper", "text", "more", "bare"],
)
def test_a_frozen_part_of_another_form_is_refused(run, tmp_path, content, words):
    root = shutil.copytree(run, tmp_path / "run" / run.name).parent.parent
    newest = checkpoint_lookup.newest([root / "run" / run.name])
    replace_part(newest, list(parts(newest))[1], serialized(content))
    with pytest.raises(CheckpointError, match=words):
        resumed(root)


def test_numbers_that_are_not_finite_are_the_users_affair(run, tmp_path):
    root = shutil.copytree(run, tmp_path / "run" / run.name).parent.parent
    newest = checkpoint_lookup.newest([root / "run" / run.name])
    replace_part(newest, list(parts(newest))[1], serialized({"frozen": torch.full((258,), float("inf"))}))
    assert checkpoint.read(newest).state.frozen.isinf().all()


def test_a_missing_part_and_parts_in_another_order_are_refused(run, tmp_path):
    root = shutil.copytree(run, tmp_path / "run" / run.name).parent.parent
    newest = checkpoint_lookup.newest([root / "run" / run.name])
    state, frozen, *others = parts(newest).items()
    for order, words in (
        ((state, *others), "it has no part frozen-<hash>.pt, but this network has a frozen part"),
        ((state, *others, frozen), "sha256: the parts must be state.pt, at most one frozen-<hash>.pt, "),
    ):
        rewrite(newest, sha256=dict(order))
        if words.startswith("sha256"):
            with pytest.raises(CheckpointError, match=words):
                checkpoint.read(newest)
        else:
            with pytest.raises(CheckpointError, match=words):
                resumed(root)


def test_a_changed_value_is_noticed(run, tmp_path):
    root = shutil.copytree(run, tmp_path / "run" / run.name).parent.parent
    newest = checkpoint_lookup.newest([root / "run" / run.name])
    file = next(newest.glob("frozen-*.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"frozen-.* does not match its SHA-256"):
        checkpoint.read_frozen(newest)
    assert same(checkpoint.read_frozen(run / "checkpoints" / newest.name), lcfl.load(run).state.frozen)
