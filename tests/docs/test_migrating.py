"""The script of docs/migrating.md runs under Lightning and, after the page's diff is applied, federated."""

from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY, blocks

PAGE = REPOSITORY / "docs" / "migrating.md"


def patched(script: str, diff: str) -> str:
    """Applies a diff of one piece, whose lines begin with a blank, a plus or a minus."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if line[:1] != "+")
    after = "\n".join(line[1:] for line in lines if line[:1] != "-")
    assert script.count(before) == 1, "the diff is not of this script"
    return script.replace(before, after)


@pytest.mark.parametrize("federated", [False, True])
def test_the_script_runs(
    federated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script, diff, imports = (block.text for block in blocks(PAGE) if block.title or block.language == "diff")
    if federated:
        script = f"{imports}\n{patched(script, diff)}"
    names = {"__name__": "__main__"}
    exec(compile(script, "train.py", "exec"), names)
    assert type(names["trainer"]).__name__ == ("FederatedTrainer" if federated else "Trainer")
    assert names["trainer"].callback_metrics["test/acc"] > (0.2 if federated else 0.8)
    assert "test/acc" in capsys.readouterr().out


def test_only_a_few_lines_differ() -> None:
    (diff,) = (block.text for block in blocks(PAGE) if block.language == "diff")
    assert sum(line[:1] in "+-" for line in diff.splitlines()) <= 6
