"""The report draws runs of several methods against what they cost."""

from pathlib import Path

import pytest

from lightning_fed.cli import main
from lightning_fed.runs.report.load import group_runs, load_runs
from lightning_fed.runs.report.plots import curve
from tests.end_to_end.command import fit_words

COSTS = ("samples", "gradients", "comm/rounds", "comm/bytes", "comm/bytes_up", "comm/bytes_down")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of plain training, and of FedGA, which exchanges gradients first."""
    root = tmp_path_factory.mktemp("runs")
    main(fit_words(root, 2))
    main(fit_words(root, 2, "--client=FedGA"))
    return root


def test_costs_of_methods_are_in_proportion(runs: Path) -> None:
    methods, _ = group_runs(load_runs([runs])[0], "test/acc")
    plain, fedga = sorted(methods, key=lambda method: len(method.label))
    assert (plain.label, fedga.label) == ("FedAvg", "FedAvg+FedGA")
    for x, factor in zip(COSTS, (1, 2, 2, 2, 2, 2), strict=True):
        base = curve(plain, "test/acc", x)[0]
        assert base[0] == 0
        assert base[2] > base[1] > 0
        assert curve(fedga, "test/acc", x)[0].tolist() == (factor * base).tolist(), x


@pytest.mark.parametrize("x", COSTS)
def test_the_command_draws_each(x: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(runs), "--x", x, "--output", str(tmp_path)])
    assert ended.value.code == 0
    assert "FedAvg+FedGA" in capsys.readouterr().out
    (picture,) = tmp_path.glob("*.png")
    assert picture.name == f"report-{x.replace('/', '_')}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
