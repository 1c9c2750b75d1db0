"""The command line with ``--trainer.devices 2``: the same figures, written and said once."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
OPTIONS = [f"--config={QUICKSTART}", "--trainer.max_rounds=3", "--trainer.logger=[]", "--client=SCAFFOLD"]


def command(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lightning_fed", *words], capture_output=True, text=True, cwd=folder, timeout=300
    )


def rows(run: Path) -> list[dict[str, float]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [
            {k: float(v) for k, v in row.items() if v and not k.startswith("time/")} for row in csv.DictReader(file)
        ]


def files(run: Path) -> set[str]:
    """Names what a run holds; a client's file without the checksum of its numbers, whose last bits may differ."""
    paths = [path.relative_to(run).as_posix() for path in run.rglob("*")]
    return {re.sub(r"(/\d+-\d+)-[0-9a-f]{8}\.npy$", r"\1.npy", path) for path in paths}


def client_states(run: Path) -> dict[str, torch.Tensor]:
    """Returns what each client keeps, by the client's number and the version."""
    return {path.name.rsplit("-", 1)[0]: torch.from_numpy(np.load(path)) for path in run.rglob("*.npy")}


@pytest.mark.slow
def test_fit_and_test(tmp_path: Path) -> None:
    """A run of two processes is found by one, as it is the same experiment."""
    for devices in ("1", "2"):
        done = command(tmp_path, "fit", *OPTIONS, "--trainer.devices", devices, "--trainer.name", f"on-{devices}")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"3 rounds in runs/on-{devices}/version_0") == 1
    one, two = (tmp_path / "runs" / name / "version_0" for name in ("on-1", "on-2"))
    assert files(two) == files(one)
    assert client_states(one)
    torch.testing.assert_close(client_states(two), client_states(one), rtol=1e-4, atol=1e-6)
    assert [path.name for path in (tmp_path / "runs").glob("*/*")] == ["version_0"] * 2
    assert len(rows(two)) == 4
    for ours, theirs in zip(rows(one), rows(two), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5)
    states = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (one, two)]
    assert all(torch.allclose(states[0][name], states[1][name], rtol=1e-5) for name in states[0])
    last = [*OPTIONS, "--trainer.name=on-2", "--ckpt_path=last"]
    told = [command(tmp_path, "test", *last, "--trainer.devices", devices).stdout for devices in ("1", "2")]
    assert told[0] == told[1]
    assert "test/acc" in told[0]


@pytest.mark.slow
def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    """Found by the processes together, while they train."""
    ended = command(tmp_path, "fit", *OPTIONS, "--trainer.devices=2", "--model.optimizer.lr=1e12")
    assert ended.returncode == 1
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("Expected")]
    assert len(sentences) == 1
    assert "diverged in round 1" in sentences[0]
    assert "Traceback" not in ended.stderr
