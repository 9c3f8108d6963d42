"""Networks of transformers are built from their configuration and give class scores."""

import pickle
import sys

import pytest
import torch

from lcfl.models import huggingface, lora
from lcfl.models.module import FederatedModule
from lcfl.models.pretrained import load_weights

BERT = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 12,
}
VIT = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert():
    return huggingface("BertForSequenceClassification", 3, BERT)


@pytest.fixture
def tokens():
    pytest.importorskip("transformers")
    return torch.randint(1, 30, (4, 9), generator=torch.Generator().manual_seed(0))


def test_scores_ignore_padding(tokens):
    network = bert().eval()
    scores = network(tokens)
    assert scores.shape == (4, 3)
    padded = torch.cat([tokens, torch.zeros(4, 3, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(network(padded), scores)
    assert network(torch.zeros(2, 9, dtype=torch.int64)).isfinite().all()
    other = torch.cat([tokens, tokens[:, :3]], dim=1)
    assert not torch.allclose(network(other), scores)


def test_a_configuration_without_padding_reads_all_tokens(tokens):
    network = huggingface("transformers.BertForSequenceClassification", 3, {**BERT, "pad_token_id": None}).eval()
    padded = torch.cat([tokens, torch.zeros(4, 3, dtype=torch.int64)], dim=1)
    assert not torch.allclose(network(padded), network(tokens))


def test_networks_for_images_get_images():
    pytest.importorskip("transformers")
    network = huggingface("ViTForImageClassification", 7, {**VIT, "intermediate_size": 8, "num_channels": 1})
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 7)


def test_weights_of_transformers_are_loaded_under_their_names(tokens, tmp_path):
    trained, plain, adapted = bert(), bert(), lora(bert, ["query"], also_train=["model.classifier"])
    torch.save(trained.model.state_dict(), tmp_path / "weights.pt")
    load_weights(plain, tmp_path / "weights.pt")
    load_weights(adapted, tmp_path / "weights.pt", ["*lora_*"])
    for network in (plain, adapted):
        assert torch.equal(network.eval()(tokens), trained.eval()(tokens))


def test_two_initial_models_differ_and_a_spawned_rank_can_read_the_network(tokens):
    module = FederatedModule(bert, cut="model.classifier")
    assert not torch.equal(module.initial_model(0), module.initial_model(0, 1))
    assert torch.equal(module.initial_model(0), module.initial_model(0))
    assert module.layout.num_parameters - module.layout.num_embedding == 3 * 16 + 3
    copied = pickle.loads(pickle.dumps(module.network))
    assert torch.equal(copied.eval()(tokens), module.network.eval()(tokens))


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        ("BertForEverything", {}, "got 'BertForEverything', which is no network of transformers"),
        ("torch.nn.Linear", {}, "got 'torch.nn.Linear', which is no network of transformers"),
        ("nowhere.Net", {}, r"nowhere.Net cannot be imported .*pip install 'lcfl\[transformers\]'"),
        ("BertForSequenceClassification", {"hidden": 4}, "BertConfig has no hidden; it has .*hidden_size"),
    ],
)
def test_what_transformers_does_not_have_is_refused(model, config, words):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=f"(?s)model.network: {words}"):
        huggingface(model, 3, config)


def test_without_transformers_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs the package transformers: pip install 'lcfl\[transformers\]'"):
        huggingface("BertForSequenceClassification", 3)
