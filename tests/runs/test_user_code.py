"""A change of the user's code is noticed when a run is resumed or compared."""

import importlib
import sys

import pytest

from lcfl.federation.federation import Federation
from lcfl.runs.finished import find_runs
from lcfl.runs.user_code import changed_modules, user_code
from tests.helpers.builders import blobs, blobs_module, fedavg
from tests.helpers.runs import made


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user that is imported."""
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "own_method_of_the_user.py"
    path.write_text("rate = 1\n")
    monkeypatch.syspath_prepend(path.parent)
    importlib.import_module(path.stem)
    yield path
    del sys.modules[path.stem]


def test_only_the_users_modules_count(own):
    code = user_code()
    assert code[own.stem]["file"] == str(own.resolve())
    assert not {"__main__", "json", "torch", "pytest", "lcfl", "lcfl.runs.user_code"} & set(code)
    own.write_text("rate = 2\n")
    assert changed_modules(code, user_code()) == changed_modules(user_code(), code) == [own.stem]
    assert changed_modules(code, {}) == []
    own.unlink()
    assert own.stem not in user_code()


def test_a_run_that_resumes_with_other_code_warns(own, tmp_path):
    def run(rounds, **options):
        federation = Federation(
            rounds, accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path, name="run"
        )
        federation.fit(blobs_module(), blobs(4), fedavg(), **options)

    run(1)
    run(2, ckpt_path="last")
    own.write_text("rate = 2\n")
    with pytest.warns(UserWarning, match=r"^own_method_of_the_user: the code has changed since .*round-000002"):
        run(3, ckpt_path="last")
    run(4, ckpt_path="last")  # the checkpoint of round 3 has the new code


def test_runs_with_different_code_are_named(tmp_path):
    for name, digest in (("a", "1"), ("b", "2"), ("c", "2")):
        made(tmp_path, name, 0, code={"own": {"file": "own.py", "sha256": digest}}, method={"class": name})
    with pytest.warns(UserWarning, match=r"^own: the code .* \S*a/version_0 used another version than \S*c/version_0"):
        runs = find_runs([tmp_path])
    assert len({str(run.settings) for run in runs}) == 3 and "code" not in runs[0].settings
