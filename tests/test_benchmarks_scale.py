"""Tests that the benchmarks of populations and of clustering run at small scale and report what they document."""

import contextlib
import importlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.hosts import why_not

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
DIMENSION = 50  # of LCFed's projection


def test_scale_measures_every_method_and_population(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    scale = importlib.import_module("scale")

    def here(words, **options):
        """Does in this process what the script does in a process for every entry, which takes seconds to start."""
        assert words[:2] == [sys.executable, scale.__file__]
        with contextlib.redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words[1:])
            scale.main()
        return SimpleNamespace(stdout=said.getvalue())

    words = ["--populations", "60", "120", "--clients", "10", "--rounds", "3", "--images", "3000"]
    words += ["--folder", str(tmp_path), "--json", str(tmp_path / "scale.json")]
    monkeypatch.setattr(scale, "subprocess", SimpleNamespace(run=here, PIPE=None))
    monkeypatch.setattr(sys, "argv", ["scale.py", *words])
    scale.main()
    entries = json.loads((tmp_path / "scale.json").read_text())
    assert [(each["method"], each["num_clients"]) for each in entries] == [
        (method, number) for method in ("fedavg", "lcfed") for number in (60, 120)
    ]
    model_mb = 4 * 44_426 / 1e6
    for each in entries:
        once = (each["num_clients"] + DIMENSION) * model_mb if each["method"] == "lcfed" else 0  # with the projection
        assert each["full_checkpoint_mb"] == pytest.approx(once + each["next_checkpoint_mb"], abs=12 * model_mb)
        assert all(value >= 0 for value in each.values() if isinstance(value, float))
    lcfed = [each for each in entries if each["method"] == "lcfed"]
    changed = [each["next_checkpoint_mb"] for each in lcfed]
    assert changed[0] == pytest.approx(changed[1], abs=12 * model_mb), "a checkpoint depends on the population"
    assert [path.name for path in tmp_path.iterdir()] == ["scale.json"], "temporary files remain"


@pytest.mark.slow
def test_scale_on_two_hosts_shows_the_memory_of_each(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    words = [sys.executable, str(BENCHMARKS / "scale.py"), "--methods", "lcfed", "--populations", "60", "--hosts", "2"]
    words += ["--clients", "10", "--rounds", "3", "--images", "3000", "--folder", str(tmp_path)]
    words += ["--json", str(tmp_path / "scale.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads((tmp_path / "scale.json").read_text())
    assert len(entry["own_mb"]) == len(entry["mapped_mb"]) == 2
    assert min(entry["crossed_mb"]) > 0


def test_clustering_cost_compares_whole_and_low_rank_models(tmp_path, monkeypatch, capsys):
    words = ["--parameters", "3000", "--populations", "20", "40", "--models", "30", "--turns", "1", "--clients", "7"]
    words += ["--json", str(tmp_path / "cost.json"), "--figure", str(tmp_path / "cost.png")]
    monkeypatch.setattr(sys, "argv", ["clustering_cost.py", *words])
    runpy.run_path(str(BENCHMARKS / "clustering_cost.py"), run_name="__main__")
    entries = json.loads((tmp_path / "cost.json").read_text())
    assert [each["num_clients"] for each in entries] == [20, 40]
    assert [each["compared"] for each in entries] == [20, 30]
    for each in entries:
        parts = each["project_uploads_s"] + each["project_centres_s"] + each["assign_s"]
        assert each["low_rank_s"] == pytest.approx(parts) and each["l2_s"] > 0 and each["cosine_s"] > 0
        assert each["ifca_extra_megabytes"] == 9 * 3000 * 4 * 7 / 1e6 and each["model_megabytes"] == 3000 * 4 * 7 / 1e6
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert "3,000 parameters, K = 10, D = 50, 7 clients a round" in capsys.readouterr().out
