"""Text: sentences as token numbers. Each client writes about two of four topics, so there are two groups of clients."""

import functools

import torch
from torch import Tensor, nn

import lcfl
from lcfl.data.datasets import Tensors
from lcfl.data.partition import Pathological
from lcfl.models import split

TOPICS = [
    "sun rain wind cloud storm snow frost fog heat thunder",
    "goal match team ball coach league score referee stadium penalty",
    "flour butter oven sugar dough salt yeast recipe kitchen bake",
    "violin choir tempo melody concert drum piano opera chord stage",
]
FILLERS = "the a and with of on this was near after"
WORDS = ["<pad>", *" ".join([FILLERS, *TOPICS]).split()]
LENGTH = 12


def sentences(per_topic: int = 150) -> tuple[Tensor, Tensor]:
    """Returns token numbers [S, LENGTH], int64 and padded with 0, and topics [S].

    Two words of each sentence belong to its topic. The others are fillers.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.zeros(len(TOPICS) * per_topic, LENGTH, dtype=torch.int64)
    topics = torch.arange(len(TOPICS)).repeat_interleave(per_topic)
    for row, topic in zip(tokens, topics.tolist(), strict=True):
        own, others = (torch.tensor([WORDS.index(word) for word in text.split()]) for text in (TOPICS[topic], FILLERS))
        length = int(torch.randint(4, LENGTH + 1, (1,), generator=generator))
        row[:2] = own[torch.randint(len(own), (2,), generator=generator)]
        row[2:length] = others[torch.randint(len(others), (length - 2,), generator=generator)]
    return tokens, topics


def main() -> None:
    """Trains LCFed with a bag of word vectors as the embedding and one linear layer as the decision head."""
    data = lcfl.FederatedDataModule(
        Tensors(sentences()), Pathological(classes_per_client=2), num_clients=10, batch_size=8
    )
    bag = functools.partial(nn.EmbeddingBag, len(WORDS), 16, mode="sum", padding_idx=0)
    model = lcfl.FederatedModule(
        functools.partial(split, bag, functools.partial(nn.Linear, 16, len(TOPICS))),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        cluster_weight=0.1,
    )
    clustering = lcfl.LowRankCosine(num_clusters=2, dimension=5)
    method = lcfl.Method(lcfl.LocalTraining(steps=5), lcfl.CentreAndEmbedding(), lcfl.ClusterMean(), [clustering])
    run = lcfl.Federation(rounds=20, name="text").fit(model, data, method)
    print("personal accuracy:", run.metrics["test/own_split/personal/acc"])


if __name__ == "__main__":
    main()
