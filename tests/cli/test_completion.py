"""What a shell is given to complete commands and their options."""

import subprocess
import sys

import pytest

from lightning_fed.cli.completion_command import main
from lightning_fed.errors import FederatedError

TYPED = {
    "lightning-fed stu": "study",
    "lightning-fed fit --trainer.max_r": "--trainer.max_rounds",
    "lightning-fed data --outp": "--output",
    "lightning-fed report --stu": "--study",
    "lightning-fed report --budg": "--budget",
    "lightning-fed study --sha": "--shard",
}


def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab writes the scripts")
    assert main(["bash"]) == 0
    script = capsys.readouterr().out
    for typed, completed in TYPED.items():
        words = typed.split(" ")
        asks = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_lightning_fed; echo ${{COMPREPLY[@]}}"
        ran = subprocess.run(["bash", "-c", f"{script}\n{asks}"], capture_output=True, text=True, check=True)
        assert completed in ran.stdout.split(), typed


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(FederatedError, match="Expected shtab, which is not installed: run `pip install shtab`"):
        main(["zsh"])
