"""Tests the scripts of ``lcfl completion``. They need shtab."""

import shutil
import subprocess
import sys

import pytest

from lcfl.cli.commands import completion


@pytest.fixture(scope="module")
def mirror():
    pytest.importorskip("shtab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lcfl"])
        return completion.mirror()


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_has_commands_options_and_classes_and_the_shell_accepts_it(shell, mirror, capsys, monkeypatch):
    monkeypatch.setattr(completion, "mirror", lambda: mirror)
    completion.main([shell])
    script = capsys.readouterr().out
    for word in ("fit", "sweep", "onboard", "trainer.rounds", "num_clusters", "LowRankCosine", "tuning_rounds", "copy"):
        assert word in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).stderr == ""


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("fi", "fit"),
        ("fit --trainer.ro", "--trainer.rounds"),
        ("fit --data.partition Sha", "Shards"),
        ("fit --data.partition.sha", "--data.partition.shards_per_client"),
        ("fit --help model.net", "model.network"),
        ("sweep --tun", "--tuning_rounds"),
        ("completion zs", "zsh"),
    ],
)
def test_bash_completes(words, found, mirror):
    import shtab

    call = (
        f"COMP_WORDS=(lcfl {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        "$(complete -p lcfl | sed 's/.*-F \\([^ ]*\\).*/\\1/') lcfl \"${COMP_WORDS[-1]}\"; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash"], input=f"{shtab.complete(mirror, 'bash')}\n{call}", text=True, capture_output=True)
    assert done.stdout.split() == [found], done.stderr


def test_without_shtab_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lcfl\[completion\]'"):
        completion.main(["bash"])
