"""The initial state, and the simple queries that it answers."""

import pytest
import torch

from lcfl.core.state import FederationState
from tests.helpers.builders import state_of


def begin(num_clients=5, keeps_model=True, num_warmup_rounds=0):
    return FederationState.create(torch.arange(3.0), num_clients, keeps_model, num_warmup_rounds)


def test_everything_begins_at_the_initial_model_in_one_cluster():
    state = begin()
    assert state.round == 0 and state.total_bytes == 0 and not state.should_stop
    assert torch.equal(state.global_model, torch.arange(3.0))
    assert torch.equal(state.centres, torch.arange(3.0)[None])
    assert state.assignment.tolist() == [0] * 5 and state.assignment.dtype == torch.int64
    assert state.participated.tolist() == [False] * 5
    assert state.num_clients == 5 and state.num_clusters == 1
    assert state.codes is None and state.projection is None and state.callbacks == {}


@pytest.mark.parametrize("keeps_model", [True, False])
def test_clients_begin_with_the_initial_model_if_the_method_keeps_any(keeps_model):
    model = begin(keeps_model=keeps_model).clients[2].model
    assert torch.equal(model, torch.arange(3.0)) if keeps_model else model is None


def test_warm_up_rounds_have_negative_numbers():
    assert begin(num_warmup_rounds=2).round == -2


def test_two_states_do_not_share_the_states_of_callbacks():
    one, two = begin(), begin()
    one.callbacks["a"] = {"x": 1}
    assert two.callbacks == {}


def test_members_are_the_clients_of_a_cluster_that_took_part():
    state = begin(6)
    state.centres = torch.tensor([[0.0, 0, 0], [1, 1, 1]])
    state.assignment = torch.tensor([1, 0, 1, 1, 0, 1])
    state.participated = torch.tensor([False, True, True, False, False, True])
    assert state.members(1) == [2, 5]
    assert state.members(0) == [1]
    assert state.members(2) == []
    assert state.num_clusters == 2
    assert torch.equal(state.centre_of(0), torch.ones(3))
    assert torch.equal(state.centre_of(1), torch.zeros(3))


def test_a_client_without_a_cluster_is_sent_the_global_model():
    state = state_of([], [1, -1, 0], [[1.0, 2.0], [3.0, 4.0]])
    state.global_model = torch.tensor([9.0, 9.0])
    assert [state.centre_of(client).tolist() for client in range(3)] == [[3.0, 4.0], [9.0, 9.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        (torch.tensor([0, 2, 1]), "numbers from 0 to 2"),
        (torch.tensor([0, -2, 1]), "numbers from -2 to 1"),
        (torch.tensor([0, 1]), r"torch.int64 of shape \[2\]"),
        (torch.zeros(3), r"torch.float32 of shape \[3\]"),
        (torch.zeros(3, dtype=torch.int32), r"torch.int32 of shape \[3\]"),
        ([0, 1, 1], "a list"),
    ],
)
def test_an_assignment_that_is_none_is_refused(assignment, words):
    state = state_of([None] * 3, [0, 1, -1], [[0.0], [1.0]])
    state.check_assignment("Mine")
    state.assignment = assignment
    with pytest.raises(ValueError, match=rf"^Mine: state.assignment has {words}; .* each of the 3 clients, .* to 1, "):
        state.check_assignment("Mine")


def test_what_is_remembered_of_a_cluster_goes_where_it_goes():
    """Cluster 2 comes first, cluster 0 is split, and cluster 1 is gone."""
    state = state_of([None] * 3, [0, 1, 2], [[0.0, 5.0], [1.0, 5.0], [2.0, 5.0]], [True] * 3)
    rows, other = torch.arange(6.0).reshape(3, 2), torch.arange(10.0).reshape(5, 2)
    state.aggregation = {"rows": rows, "other": other, "vector": torch.arange(3.0), "number": 3}
    state.take_clusters([2, 0, 0])
    assert state.centres.tolist() == [[2.0, 5.0], [0.0, 5.0], [0.0, 5.0]]
    assert state.aggregation["rows"].tolist() == [[4.0, 5.0], [0.0, 1.0], [0.0, 1.0]]
    assert state.aggregation["other"] is other and state.aggregation["vector"].tolist() == [0.0, 1.0, 2.0]
    state.centres[1] = 9.0
    assert state.centres[2].tolist() == [0.0, 5.0]  # the halves are not the same memory


def test_models_that_are_changed_in_place_leave_the_initial_one_as_it_is():
    state = FederationState.create(torch.arange(3.0), 2, True)
    state.global_model.zero_()
    state.centres[0] += 1
    assert state.initial.tolist() == state.clients[0].model.tolist() == [0.0, 1.0, 2.0]
    assert state.global_model.tolist() == [0.0] * 3 and state.centres.tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("global_model", None, r"state.global_model has a NoneType; it must be .* shape \[2\]"),
        ("global_model", torch.zeros(2).double(), r"global_model has torch.float64 of shape \[2\]"),
        ("global_model", torch.zeros(1), r"global_model has torch.float32 of shape \[1\]"),
        ("centres", [torch.zeros(2)], r"state.centres has a list; it must be .* shape \[K, 2\] with K of at least 1"),
        ("centres", torch.zeros(2), r"centres has torch.float32 of shape \[2\]"),
        ("centres", torch.zeros(0, 2), r"centres has torch.float32 of shape \[0, 2\]"),
    ],
)
def test_models_that_are_none_are_refused(name, value, words):
    state = state_of([None] * 3, [0, 1, -1], [[0.0, 5.0], [1.0, 5.0]])
    state.check_models("Mine")
    setattr(state, name, value)
    with pytest.raises(ValueError, match=f"^Mine: .*{words}"):
        state.check_models("Mine")
