"""docs/howto/: the files and commands of every page, as a reader would follow them."""

import re
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lcfl.__main__ import COMMANDS
from lcfl.cli import federated_cli
from tests.test_readme import lcfl_commands, marked

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs/howto").glob("*.md")}
BLOCKS = [(page, name) for page in PAGES for name in re.findall(r"<!-- block: (\w+) -->", PAGES[page])]

SHORT = ["--trainer.rounds=2", "--trainer.evaluate_every=2", "--trainer.devices=1"]
SHORT += ["--trainer.logger=false", "--trainer.enable_progress_bar=false"]


def write_files(page, folder):
    """The files that a page shows."""
    for name in re.findall(r"<!-- file: ([\w.]+) -->", PAGES[page]):
        (folder / name).write_text(marked(PAGES[page], f"file: {name}"))


@pytest.fixture
def followed(here):
    """``followed(page, block)``: writes the page's files and runs the commands of one block, in this process."""

    def follow(page, block):
        write_files(page, here)
        result = None
        text = marked(PAGES[page], f"block: {block}").replace("$LCFL", str(ROOT))
        for line in text.splitlines():
            if line.startswith("python make_"):
                runpy.run_path(line.removeprefix("python "), run_name="__main__")
                continue
            ((command, *words),) = lcfl_commands(f"```bash\n{line}\n```")
            if command in COMMANDS:
                import_module(COMMANDS[command]).main(words)
            else:
                result = federated_cli.main([command, *words, *SHORT])
        return result

    return follow


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=lambda each: each)
def test_block_as_written(followed, here, capsys, page, block):
    run = followed(page, block)
    if run is None:
        assert "clients, true groups" in capsys.readouterr().out
        return
    assert run.metrics and run.path.is_dir()
    if block == "spread":
        assert "train/spread" in (run.path / "metrics.csv").read_text().partition("\n")[0]
    if block == "split":
        assert run.state.initial.numel() == 650


def test_every_page_is_followed_but_one_of_links_and_one_for_other_machines():
    assert {page for page, _ in BLOCKS} == {"callback", "data", "network"} == PAGES.keys() - {"method", "machines"}


def test_own_partition_gives_pairs(here):
    import numpy as np

    write_files("data", here)
    sys.path.insert(0, str(here))
    pairs = import_module("pairs")
    shares = pairs.Pairs(per_class=3)(np.arange(60) % 6, 6, np.random.default_rng(0))
    assert shares.groups.tolist() == [0, 1, 2, 0, 1, 2]
    assert [sorted(set((share % 6).tolist())) for share in shares.indices] == [[0, 1], [2, 3], [4, 5]] * 2


@pytest.mark.parametrize(("script", "shown"), [("arrays", "10 clients"), ("own_step", "train/l1")])
def test_script_as_written(here, capsys, script, shown):
    page = "data" if script == "arrays" else "network"
    write_files(page, here)
    runpy.run_path(f"{script}.py", run_name="__main__")
    assert shown in capsys.readouterr().out
    if script == "own_step":
        assert "train/l1" in (here / "logs/own_step/version_0/metrics.csv").read_text().partition("\n")[0]
