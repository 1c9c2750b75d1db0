"""What an offline W&B run holds: rounds, metrics, config and the picture of the split."""

from pathlib import Path

import pytest
import wandb

from lightning_fed.cli import main
from tests.end_to_end.command import QUICKSTART, rows, run_folders
from tests.end_to_end.wandb_file import config, history, metric_axes, start, summary


@pytest.fixture(autouse=True)
def _logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def _fit(root: Path, rounds: int, *more: str) -> None:
    words = [f"--trainer.default_root_dir={root}", f"--trainer.max_rounds={rounds}", "--trainer.name=run"]
    main(["fit", f"--config={QUICKSTART}", *words, "--aggregator.mask=SignAgreement", *more])


def _newest(folder: Path) -> Path:
    """The newest run file; the process that writes it has ended, as it goes on after a run is finished."""
    wandb.teardown()
    return max(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.usefixtures("pictures")
def test_offline_run_holds_rounds_config_and_picture_and_a_resumed_one_holds_each_round_once(tmp_path: Path) -> None:
    _fit(tmp_path, 2)
    (folder,) = run_folders(tmp_path)
    path = _newest(folder)
    logged = [row for row in history(path) if "round" in row]
    assert [row["round"] for row in logged] == [0, 1, 2]
    for row, of_csv in zip(logged, rows(folder), strict=True):
        for name, text in of_csv.items():
            assert (float(text) == row[name]) if text else (name not in row), name
    assert {"train/loss", "val/acc", "test/acc", "mask/mean", "comm/bytes_up"} <= logged[-1].keys()
    for picture in ("split", "sizes", "samples"):
        assert logged[0][f"{picture}/_type"] == "image-file"
        shown = (path.parent / "files" / logged[0][f"{picture}/path"]).read_bytes()
        assert shown == (folder / f"{picture}.png").read_bytes()
        assert len(shown) > 1000
    assert metric_axes(path)["*"] == "round"
    stored = config(path)
    assert stored["aggregator"]["init_args"]["mask"]["class_path"].endswith("SignAgreement")
    assert stored["trainer"]["max_rounds"] == 2
    assert stored["parameters"] == 64 * 64 + 64 + 64 * 10 + 10
    assert stored["split"]["clients"] == 20
    begun = start(path)
    assert begun["run_group"].startswith("FedAvg+SignAgreement ")
    assert (begun["job_type"], begun["tags"]) == ("fit", ["FedAvg", "SignAgreement"])
    assert summary(path)["val/acc.best"] == max(row["val/acc"] for row in logged)

    _fit(tmp_path, 4, "--ckpt_path=last")
    (folder,) = run_folders(tmp_path)
    resumed = _newest(folder)
    assert resumed != path
    assert resumed.name == path.name, "a resumed run keeps its id"
    assert [row["round"] for row in history(resumed) if "round" in row] == [0, 1, 2, 3, 4]


def test_says_once_that_the_run_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_fed.runs.loggers.rank_zero_info", said.append)
    for _ in range(2):
        _fit(tmp_path, 1)
    assert len(said) == 1
    assert "not logged in" in said[0]
