"""Tests that ``lcfl configs`` lists or copies every configuration that comes with lcfl."""

import pytest

from lcfl.cli.commands import configs
from lcfl.cli.shipped_configs import configurations, find


def test_the_list_has_every_file_with_its_comment(capsys):
    configs.main([])
    said = capsys.readouterr().out
    for path in configurations().rglob("*.yaml"):
        assert any(
            str(path.relative_to(configurations())) in line and path.read_text().splitlines()[0].strip("# ") in line
            for line in said.splitlines()
        ), path


def test_a_copy_is_complete_and_overwrites_nothing(tmp_path, capsys):
    configs.main([f"--copy={tmp_path / 'mine'}"])
    assert "copied to" in capsys.readouterr().out
    for path in configurations().rglob("*.yaml"):
        assert (tmp_path / "mine" / path.relative_to(configurations())).read_text() == path.read_text()
    with pytest.raises(FileExistsError, match="mine exists already; name a new one"):
        configs.main([f"--copy={tmp_path / 'mine'}"])


def test_a_configuration_is_found_by_path_or_name(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("method: {}")
    assert find("methods", str(own)) == own
    assert find("methods", "lcfed") == configurations() / "methods" / "lcfed.yaml"
    with pytest.raises(
        FileNotFoundError, match=r"there is no file lcfedd, and lcfl has no .* lcfed, lcfed_plus, lg_fedavg"
    ):
        find("methods", "lcfedd")
