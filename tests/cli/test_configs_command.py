"""The configurations that come with the package are found by name; a file on disk goes first."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fed.cli import main
from lightning_fed.cli.configs_command import find_config, shipped_configs
from tests.cli.conftest import CommandLine

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_every_file_has_a_name() -> None:
    files = {path.relative_to(CONFIGS).with_suffix("").as_posix(): path for path in CONFIGS.rglob("*.yaml")}
    assert shipped_configs() == files
    assert {"quickstart", "aggregator/gma"} <= set(files)


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
def test_a_run_by_name(cli: CommandLine, name: str) -> None:
    trainer = cli.run("--config", name, "--config=aggregator/gma").trainer
    assert trainer.max_rounds != 100
    assert trainer.label == "FedAvg+SignAgreement"


def test_a_file_on_disk_goes_first(cli: CommandLine) -> None:
    cli.file("quickstart", "trainer: {max_rounds: 7}\n")
    assert cli.run("--config", "quickstart").trainer.max_rounds == 7
    assert find_config("nothing") == "nothing"


def test_a_misspelt_name(cli: CommandLine, mistake: Callable[..., str]) -> None:
    said = mistake("fit", "--config", "quikstart")
    assert said.endswith("quikstart', which is missing or cannot be read; did you mean `quickstart`?")


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["configs", *words])
    assert end.value.code == 0


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_configs())
    assert all(len(line.split()) > 1 for line in lines)
    run("aggregator", "quickstart")
    assert all(line.startswith(("aggregator/", "quickstart")) for line in capsys.readouterr().out.splitlines())


def test_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: Callable[..., str]) -> None:
    run("aggregator/gma", "quickstart", "--copy", str(tmp_path / "mine"))
    assert (tmp_path / "mine/aggregator/gma.yaml").read_text() == (CONFIGS / "aggregator/gma.yaml").read_text()
    assert len(list((tmp_path / "mine").rglob("*.yaml"))) == len(capsys.readouterr().out.splitlines()) == 2
    assert "exists already" in mistake("configs", "quickstart", "--copy", str(tmp_path / "mine"), code=1)
    assert "got 'nothing'" in mistake("configs", "nothing", code=1)
