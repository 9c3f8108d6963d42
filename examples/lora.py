"""A small pretrained transformer is fine-tuned by two kinds of clients, once as a whole and once with LoRA.

All clients have sentences about four topics. Half of the clients number the topics in another order than the rest.
"""

import csv
import functools
from pathlib import Path

import torch
from torch import Tensor

import lcfl
from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.data.transforms import LabelPermutation
from lcfl.models import huggingface, lora

TOPICS, WORDS, LENGTH = 4, 10, 12  # 10 words for each topic, and 10 that stand in all sentences; 0 is no word
BERT = {
    "vocab_size": 1 + (TOPICS + 1) * WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": LENGTH,
}
HEAD = "model.classifier"


def sentences(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns token numbers [S, LENGTH], int64 and padded with 0, and topics [S]; two words belong to the topic."""
    draw = torch.Generator().manual_seed(seed)
    topics = torch.arange(number) % TOPICS
    tokens = 1 + torch.randint(WORDS, (number, LENGTH), generator=draw)
    tokens[:, :2] += WORDS * (1 + topics[:, None])
    lengths = torch.randint(4, LENGTH + 1, (number, 1), generator=draw)
    return tokens.where(torch.arange(LENGTH) < lengths, 0), topics


def pretrain(path: Path) -> None:
    """Trains the transformer on the server's own sentences, and saves its weights as transformers would."""
    torch.manual_seed(0)
    network = huggingface("BertForSequenceClassification", TOPICS, BERT)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    for step in range(80):
        tokens, topics = sentences(64, seed=step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(tokens), topics).backward()
        optimizer.step()
    torch.save(network.model.state_dict(), path)


def main(rounds: int = 5) -> None:
    """Fine-tunes with LCFed. The weights of the file get a new head."""
    weights = Path("bert.pt")
    pretrain(weights)
    data = lcfl.FederatedDataModule(
        Tensors(sentences(1000, seed=1000)),
        IID(),
        num_clients=10,
        batch_size=16,
        client_transforms=[LabelPermutation(num_groups=2, by="client")],
    )
    whole = functools.partial(huggingface, "BertForSequenceClassification", TOPICS, BERT)
    adapted = functools.partial(lora, whole, ["query", "value"], rank=4, also_train=[HEAD])
    for name, network, but in (("whole", whole, [HEAD]), ("lora", adapted, [HEAD, "*lora_*"])):
        model = lcfl.FederatedModule(
            network,
            optimizer=functools.partial(torch.optim.AdamW, lr=5e-3 if name == "lora" else 1e-3),
            cut=HEAD,
            cluster_weight=0.1,
            global_weight=0.1,
            init_from=weights,
            init_except=but,
        )
        clustering = lcfl.LowRankCosine(num_clusters=2, dimension=5)
        method = lcfl.Method(lcfl.LocalTraining(steps=10), lcfl.CentreAndEmbedding(), lcfl.ClusterMean(), [clustering])
        run = lcfl.Federation(rounds=rounds, evaluate_every=0, name=name).fit(model, data, method)
        with (run.path / "metrics.csv").open() as file:
            last = list(csv.DictReader(file))[-1]
        kilobytes = (float(last["comm/down_bytes"]) + float(last["comm/up_bytes"])) / 1e3
        accuracy = run.metrics["test/own_split/personal/acc"]
        print(f"{name}: personal accuracy: {accuracy:.3f} with {kilobytes:.0f} kB per round")


if __name__ == "__main__":
    main()
