"""Tests of every clustered baseline by its configuration: resumed runs and runs on two ranks."""

import pytest

from tests.helpers.fits import assert_same_run, fit, rows

# For each method: options that make something happen within eight rounds on the synthetic data, and the rounds after
# which a run is resumed.
CLUSTERING = "--method.clustering.init_args"
METHODS = {
    "ifca": ((f"{CLUSTERING}.max_redraws=1", f"{CLUSTERING}.min_share=1.0"), (1, 4)),
    "fesem": ((), (1, 4)),
    "fedgroup": (
        tuple(f"{CLUSTERING}.{word}" for word in ("num_clusters=3", "clients_per_group=2", "pretrain_steps=5")),
        (0, 4),  # 0 resumes after the warm-up round alone
    ),
    "pacfl": ((), (0, 4)),
    "cgpfl": ((), (4,)),
    "cgpfl_prox": ((), (4,)),
    "fl_hc": ((f"{CLUSTERING}.after=3",), (3, 4)),
    "cfl": (
        tuple(f"{CLUSTERING}.{word}" for word in ("eps1=9", "eps2=0", "min_round=1", "stale_max=20", "min_size=4")),
        (1, 4, 7),
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Provides a run of eight rounds by one process, made once per method."""
    made = {}

    def of(method):
        if method not in made:
            made[method] = fit(tmp_path_factory.mktemp(method), method, 1, 8, *METHODS[method][0]).path
        return made[method]

    return of


@pytest.mark.filterwarnings("ignore:ClientChoice. after 1 redraws")
@pytest.mark.parametrize(
    ("method", "first"),
    [
        pytest.param(name, first, marks=[] if first in (0, rounds[-1]) else [pytest.mark.slow])
        for name, (_, rounds) in METHODS.items()
        for first in rounds
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, whole, method, first):
    words = METHODS[method][0]
    fit(tmp_path, method, 1, first, *words)
    assert_same_run(whole(method), fit(tmp_path, method, 1, 8, *words, "--ckpt_path=last").path)


@pytest.mark.filterwarnings("ignore:ClientChoice. after 1 redraws")
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_give_the_same_bits(tmp_path, whole, method):
    assert_same_run(whole(method), fit(tmp_path, method, 2, 8, *METHODS[method][0]).path)


@pytest.mark.parametrize("method", METHODS)
def test_the_run_has_more_than_one_cluster(whole, method):
    counts = {float(row["cluster/count"]) for row in rows(whole(method)) if int(row["round"]) >= 0}
    assert max(counts) > 1
