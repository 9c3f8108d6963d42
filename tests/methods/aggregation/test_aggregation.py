"""Tests of means of models: worked numbers, buffers, empty clusters and the order of clients."""

import numpy as np
import pytest
import torch

from lcfl.core.messages import Uplink
from lcfl.methods.aggregation import ClusterMean, GlobalMean, NoAggregation, NormalisedMean, mean_model
from lcfl.methods.aggregation.global_mean import normalised_step
from lcfl.models import Layout
from tests.helpers.builders import Normed, linear, state_of, upload

LAYOUT = Layout.from_network(Normed())  # P = 23, P_phi = 15, the last of 30 entries is an integer
ONES = torch.ones(LAYOUT.size)


def flat(value):
    return value * ONES


def test_weights_are_normalised_first():
    mean = mean_model([flat(1), flat(4)], [1, 2], LAYOUT)
    assert mean[:29].tolist() == [3.0] * 29
    assert mean.dtype == torch.float32
    assert torch.equal(mean, mean_model([flat(1), flat(4)], [10, 20], LAYOUT))


def test_integer_buffers_take_their_maximum():
    mean = mean_model([flat(8), flat(2), flat(5)], [1, 1, 1], LAYOUT)
    assert (mean[28], mean[29]) == (5.0, 8.0)


def test_the_mean_of_equal_models_is_that_model():
    model = torch.randn(LAYOUT.size)
    assert torch.equal(mean_model([model] * 7, [3, 1, 4, 1, 5, 9, 2], LAYOUT), model)


def test_sums_are_taken_in_float64():
    large = [flat(2.0**24), flat(1), flat(-(2.0**24)), flat(1)]
    assert mean_model(large, [1] * 4, LAYOUT)[0] == 0.5


def test_the_order_of_clients_does_not_matter():
    draw = np.random.default_rng(0)
    models = [torch.tensor(draw.normal(size=LAYOUT.size), dtype=torch.float32) for _ in range(20)]
    weights = draw.integers(1, 100, size=20)
    order = draw.permutation(20)
    mean = mean_model(models, weights.tolist(), LAYOUT)
    again = mean_model([models[i] for i in order], weights[order].tolist(), LAYOUT)
    torch.testing.assert_close(mean, again, rtol=1e-6, atol=1e-7)
    expected = np.average([model.double().numpy() for model in models], axis=0, weights=weights)
    np.testing.assert_allclose(mean[:29], expected[:29], atol=1e-6)


@pytest.mark.parametrize(("weights", "expected"), [("samples", 3.5), ("uniform", 3.0)])
def test_fedavg_weighs_by_samples(weights, expected):
    state = state_of([], [0, 0, 0], [ONES.tolist()], participated=[True, False, True])
    GlobalMean(weights)(state, [upload(0, flat(2), 1), upload(2, flat(4), 3)], LAYOUT)
    assert state.global_model[:29].tolist() == [expected] * 29
    assert torch.equal(state.centres, state.global_model.unsqueeze(0))


def test_local_leaves_the_server_as_it_is():
    state = state_of([flat(1)], [0], [flat(3).tolist()])
    before = state.global_model, state.centres
    NoAggregation()(state, [upload(0, flat(2))], LAYOUT)
    assert (state.global_model, state.centres) == before


def clusters():
    """Returns a state with clusters {0, 1, 4}, {2, 3} and {}, and the uploads of clients 0 and 2.

    Clients 3 and 4 never took part. The store already holds what clients 0 and 2 have just sent, as in a round.
    """
    models = [flat(2), flat(6), flat(10), flat(1000), None]
    state = state_of(
        models,
        [0, 0, 1, 1, 0],
        [flat(70).tolist(), flat(80).tolist(), flat(90).tolist()],
        [True, True, True, False, False],
    )
    return state, [upload(0, models[0], 50), upload(2, models[2], 1)]


def test_stored_means_count_all_clients_that_ever_took_part():
    state, uploads = clusters()
    ClusterMean()(state, uploads, LAYOUT)
    assert state.centres[:, 0].tolist() == [4.0, 10.0, 90.0]
    assert state.global_model[:29].tolist() == [6.0] * 29


def test_participants_means_count_this_rounds_clients():
    state, uploads = clusters()
    ClusterMean(over="participants", embedding_over="participants")(state, uploads, LAYOUT)
    assert state.centres[:, 0].tolist() == [2.0, 10.0, 90.0]
    assert state.global_model[0] == 6.0
    state, uploads = clusters()
    ClusterMean(over="participants", embedding_over="participants")(state, uploads[:1], LAYOUT)
    assert state.centres[:, 0].tolist() == [2.0, 80.0, 90.0]
    assert state.global_model[0] == 2.0


def test_the_two_means_are_chosen_independently():
    state, uploads = clusters()
    ClusterMean(over="participants")(state, uploads[:1], LAYOUT)
    assert (state.centres[1, 0], state.global_model[0]) == (80.0, 6.0)
    state, uploads = clusters()
    ClusterMean(embedding_over="participants")(state, uploads[:1], LAYOUT)
    assert (state.centres[1, 0], state.global_model[0]) == (10.0, 2.0)


def test_a_cluster_of_clients_never_sampled_keeps_its_centre():
    models = [flat(2), flat(6)]
    state = state_of(models, [0, 1], [flat(70).tolist(), flat(80).tolist()], participated=[True, False])
    ClusterMean()(state, [upload(0, models[0])], LAYOUT)
    assert state.centres[:, 0].tolist() == [2.0, 80.0]
    assert state.global_model[0] == 2.0


def test_sample_sizes_do_not_weigh_in_a_cluster():
    models = [flat(2), flat(6)]
    state = state_of(models, [0, 0], [flat(70).tolist()])
    ClusterMean(over="participants")(state, [upload(0, models[0], 1), upload(1, models[1], 99)], LAYOUT)
    assert state.centres[0, 0] == 4.0


def test_fedavg_inside_every_cluster_weighs_by_samples():
    models = [flat(2), flat(6), flat(10)]
    state = state_of(models, [0, 0, 1], [flat(70).tolist(), flat(80).tolist()])
    uploads = [upload(0, models[0], 1), upload(1, models[1], 3), upload(2, models[2], 4)]
    ClusterMean("participants", "participants", "samples")(state, uploads, LAYOUT)
    # All float entries are weighed, also the statistics of batch normalisation (23 to 28).
    assert state.centres[:, :29].unique(dim=1).flatten().tolist() == [5.0, 10.0]  # (2 + 3 * 6) / 4
    assert state.global_model[:29].unique().tolist() == [7.5]  # (2 + 3 * 6 + 4 * 10) / 8


def test_counters_of_a_cluster_take_their_maximum():
    state, uploads = clusters()
    ClusterMean()(state, uploads, LAYOUT)
    assert state.centres[:, 29].tolist() == [6.0, 10.0, 90.0]
    assert state.global_model[29] == 10.0


def test_models_of_the_last_round_are_not_overwritten():
    state, uploads = clusters()
    before = state.centres, state.global_model
    copies = [each.clone() for each in before]
    ClusterMean()(state, uploads, LAYOUT)
    for old, copy in zip(before, copies, strict=True):
        assert torch.equal(old, copy)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: GlobalMean("sample"), "weights"),
        (lambda: ClusterMean(over="all"), "over"),
        (lambda: ClusterMean(embedding_over="all"), "embedding_over"),
        (lambda: ClusterMean(weights="all"), "weights"),
    ],
)
def test_a_misspelt_option_is_refused(make, option):
    with pytest.raises(ValueError, match=rf"Mean: got {option}='(sample|all)'; allowed are"):
        make()


def test_layouts_without_buffers():
    layout = Layout.from_network(linear())
    assert mean_model([torch.ones(17), 3 * torch.ones(17)], [1, 1], layout).tolist() == [2.0] * 17


def test_stored_models_cannot_be_weighed_by_samples():
    with pytest.raises(ValueError, match=r"weights='samples' with over='stored' and .*Set both to participants"):
        ClusterMean(embedding_over="participants", weights="samples")


# FedNova


def normalised(client, model, num_samples, *normaliser):
    return Uplink(client, {"model": model, "normaliser": torch.tensor(normaliser)}, num_samples)


def test_a_normalised_step_by_hand():
    models = [torch.tensor([6.0]), torch.tensor([2.0])]
    numbers = [torch.tensor([4.0]), torch.tensor([2.0])]
    # p = (1/4, 3/4), a = (4, 2), d = ((10 - 6) / 4, (10 - 2) / 2) = (1, 4), tau_eff = 1 + 1.5
    step = normalised_step(torch.tensor([10.0]), models, [1, 3], numbers)
    assert step.tolist() == [2.5 * (0.25 * 1 + 0.75 * 4)]
    numbers = [torch.tensor([4.0, 3.0]), torch.tensor([2.0, 1.0])]
    assert normalised_step(torch.tensor([10.0]), models, [1, 3], numbers).tolist() == [1.5 * 3.25]


def test_fednova_with_server_momentum_by_hand():
    state = state_of([], [0, 0], [flat(10).tolist()], initial=flat(10))
    for expected in (6.0, 0.0):  # a step of 4, then a step of 4 plus half of the last step
        before = state.global_model[0]
        uploads = [normalised(0, before - 4 * ONES, 1, 2.0), normalised(1, before - 4 * ONES, 3, 2.0)]
        NormalisedMean(0.5)(state, uploads, LAYOUT)
        assert state.global_model[:23].tolist() == [expected] * 23
        assert torch.equal(state.centres, state.global_model.unsqueeze(0))
    assert state.aggregation["velocity"].tolist() == [6.0] * 23


def test_fednova_takes_fedavgs_mean_of_buffers_and_the_largest_counter():
    state = state_of([], [0, 0], [flat(10).tolist()], initial=flat(10))
    NormalisedMean()(state, [normalised(0, flat(2), 1, 1.0), normalised(1, flat(6), 3, 3.0)], LAYOUT)
    assert state.global_model[23:].tolist() == [5.0] * 6 + [6.0]
    assert state.global_model[0] == 10 - 2.5 * (0.25 * 8 + 0.75 * 4 / 3)
    assert state.aggregation == {}


def test_a_client_that_took_no_step_is_left_out():
    state = state_of([], [0, 0], [flat(10).tolist()], initial=flat(10))
    NormalisedMean()(state, [normalised(0, flat(10), 9, 0.0)], LAYOUT)
    assert torch.equal(state.global_model, flat(10))
    NormalisedMean()(state, [normalised(0, flat(10), 9, 0.0), normalised(1, flat(4), 1, 2.0)], LAYOUT)
    assert torch.equal(state.global_model, flat(4))


def test_a_server_momentum_of_one_is_refused():
    with pytest.raises(ValueError, match=r"got momentum=1.0; allowed are numbers from 0 to below 1"):
        NormalisedMean(1.0)
