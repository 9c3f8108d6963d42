"""Whether similar models belong to clients with similar data: the comparison of FedAC's Fig. 2.

Legend: N clients, n shown clients, C classes, P parameters, D components.
"""

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lcfl import figures
from lcfl.core.callback import Callback
from lcfl.core.files import write_json
from lcfl.core.messages import Downlink
from lcfl.core.state import FederationState
from lcfl.distributed.tasks import TrainingResult, TrainingTask
from lcfl.methods.clustering.similarity import cosine, kl_divergence, principal_components, project
from lcfl.methods.exchange import FullModel
from lcfl.methods.local import LocalTraining
from lcfl.server.loggers import log_figure
from lcfl.server.server import Server

__all__ = ["LabelSimilarity", "correlations"]


class LabelSimilarity(Callback):
    """Compares distances between models with the divergence of the clients' labels, once, at the end of a run.

    This is FedAC Fig. 2. Clients that have been trained together (FedAvg in the paper) fine-tune the model that the
    server would send them. Then three measures of every two models are compared with the Kullback-Leibler divergence
    of the two clients' label distributions: the L2 distance, the cosine, and the cosine of the low-rank projections.
    A similarity that is good for clustering follows the divergence.

    The callback writes ``label_similarity.json``, with the correlations of each measure with the symmetric divergence
    over all pairs, and the figure ``figures/label_similarity.png``. It discards the fine-tuned models. It compares the
    clients of the federation, without newcomers and clients that have left, and at most 256 of these, spread evenly.
    Models that are not finite are left out with a warning. With fewer than two clients nothing is written.

    Args:
        fine_tuning: the local work before the comparison; None for the method's own. The paper does not state how long
            it was.
        dimension: D of the low-rank models; fewer if the models span less.
        center: whether to subtract the mean model before projecting (reading A4).
        smoothing: samples added to every class of a client, so that a class without samples has a finite divergence.

    Raises:
        ValueError: for a dimension below 1 or a smoothing that is not positive.
    """

    def __init__(
        self,
        fine_tuning: LocalTraining | None = None,
        dimension: int = 50,
        center: bool = False,
        smoothing: float = 1.0,
    ) -> None:
        if dimension < 1:
            raise ValueError(f"LabelSimilarity: got dimension={dimension}; it must be at least 1.")
        if not smoothing > 0:
            raise ValueError(f"LabelSimilarity: got smoothing={smoothing}; it must be a number > 0.")
        self.fine_tuning = fine_tuning
        self.dimension = dimension
        self.center = center
        self.smoothing = smoothing

    def on_fit_start(self, server: Server) -> None:
        """Refuses data without labels, or whose labels the server does not know."""
        if server.data.population.label_counts is None:
            raise ValueError(
                "trainer.callbacks: LabelSimilarity compares how often clients have each label. Here the targets are "
                "not classes, or the clients are nodes of a fleet, which do not tell their labels; leave it out."
            )

    def on_fit_end(self, server: Server, state: FederationState, metrics: dict[str, float]) -> None:
        """Fine-tunes, compares and writes; does nothing if a signal ended the run."""
        label_counts = server.data.population.label_counts
        if server.is_interrupted or label_counts is None:
            return
        active = torch.nonzero(state.active).flatten().numpy()
        clients = active[figures.shown(len(active))]
        model_nP = self._fine_tuned(server, state, clients.tolist())
        is_finite_n = model_nP.isfinite().all(dim=1)
        if not bool(is_finite_n.all()):
            diverged = clients[~is_finite_n.numpy()].tolist()
            who = server.data.population.listed(diverged)
            warnings.warn(
                f"LabelSimilarity: {len(diverged)} of {len(clients)} fine-tuned models are not finite ({who}); they "
                "are not compared. A smaller learning rate may help.",
                stacklevel=2,
            )
            clients, model_nP = clients[is_finite_n.numpy()], model_nP[is_finite_n]
        if len(clients) < 2:
            warnings.warn(f"LabelSimilarity: got {len(clients)} clients; it compares at least two.", stacklevel=2)
            return
        count_nC = label_counts[clients]
        divergence_nn = kl_divergence(torch.as_tensor(count_nC) + self.smoothing)
        measures = self.measures(model_nP)
        correlation = correlations(divergence_nn, measures)
        write_json(server.run_dir / "label_similarity.json", correlation, indent=2)
        picture = figures.label_similarity(count_nC, divergence_nn, measures["l2"], measures["low_rank_cosine"])
        path = server.run_dir / "figures" / "label_similarity.png"
        figures.save(picture, path)
        name, step = "figures/label_similarity", state.round - 1
        server.run_log.tell_loggers("log_image", lambda each: log_figure(each, name, picture, path, step))

    def measures(self, model_nP: Tensor) -> dict[str, Tensor]:
        """Returns ``l2``, ``cosine`` and ``low_rank_cosine`` of every two models ``[n, n]``.

        The first is a distance, the others are similarities.
        """
        basis_PD = principal_components(model_nP, self.dimension)
        code_nD = project(model_nP, basis_PD, model_nP.mean(dim=0) if self.center else None)
        return {
            "l2": torch.cdist(model_nP.double(), model_nP.double()),
            "cosine": cosine(model_nP, model_nP),
            "low_rank_cosine": cosine(code_nD, code_nD),
        }

    def _fine_tuned(self, server: Server, state: FederationState, clients: list[int]) -> Tensor:
        """Returns the models ``[n, P]`` after a local run of every client from what the server would send it."""
        tasks = [self._task(server, state, client) for client in clients]
        models = []
        for result in server.transport.train(tasks):
            assert isinstance(result, TrainingResult), "only a fleet, which is refused, loses clients"
            models.append(result.output.model[: server.layout.num_parameters])
        return torch.stack(models)

    def _task(self, server: Server, state: FederationState, client: int) -> TrainingTask:
        """Returns the local run of a client. `fine_tuning` has no pulls, and starts from the model that is sent.

        If none or several are sent, it starts from the client's personal model.
        """
        method, layout, own = server.method, server.layout, state.clients.for_task(client)
        sent = method.exchange.down(state, client, layout)
        if self.fine_tuning is None:
            return TrainingTask(client, state.round, own, sent, method.local_update)
        payload = method.exchange.at_client(sent, state.clients[client], layout).payload
        model = payload.get("model", payload.get("centre"))
        if model is None:
            model = method.exchange.personal(state, client, layout)
        return TrainingTask(client, state.round, own, Downlink({"model": model}), self.fine_tuning, FullModel())


def correlations(divergence_nn: Tensor, measures: Mapping[str, Tensor]) -> dict[str, dict[str, float | None]]:
    """Returns the correlations of each measure with (KL(i, j) + KL(j, i)) / 2 over all pairs i < j.

    These are Pearson's and Spearman's correlation. They are high for a good distance and near -1 for a good similarity.
    They are None if the measure or the divergence is the same for all pairs.
    """
    from scipy.stats import pearsonr, spearmanr  # imported here because only this callback needs it

    above = np.triu_indices(len(divergence_nn), k=1)
    symmetric = ((divergence_nn + divergence_nn.T) / 2).numpy()[above]
    by_measure: dict[str, dict[str, float | None]] = {}
    for name, measure_nn in measures.items():
        pairs = measure_nn.double().numpy()[above]
        varied = np.ptp(symmetric) > 0 and np.ptp(pairs) > 0
        by_measure[name] = {
            "pearson": float(pearsonr(symmetric, pairs).statistic) if varied else None,
            "spearman": float(spearmanr(symmetric, pairs).statistic) if varied else None,
        }
    return by_measure
