"""What SLURM and several machines set in the environment; here every task is started on this one."""

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIT = [
    sys.executable, "-m", "lightning_fed", "fit", "--config", str(ROOT / "configs" / "quickstart.yaml"),
    "--trainer.max_rounds", "2", "--trainer.logger", "[]", "--trainer.enable_progress_bar", "false",
    "--trainer.accelerator", "cpu", "--trainer.name", "run",
]  # fmt: skip


def slurm(rank: int, port: int) -> tuple[dict[str, str], list[str]]:
    """One machine with two tasks."""
    tasks = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": str(rank), "LOCALID": str(rank), "NODEID": "0"}
    job = {"JOB_NAME": "train", "JOB_ID": "12345", "JOBID": "12345", "NODELIST": "127.0.0.1", "NNODES": "1"}
    named = {f"SLURM_{name}": value for name, value in {**tasks, **job}.items()}
    return {**named, "MASTER_PORT": str(port)}, ["--trainer.devices", "2"]


def machines(rank: int, port: int) -> tuple[dict[str, str], list[str]]:
    """Two machines with one process each."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank)}
    return place, ["--trainer.devices", "1", "--trainer.num_nodes", "2"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_row(folder: Path) -> dict[str, str]:
    (path,) = folder.rglob("metrics.csv")
    row = list(csv.DictReader(path.open()))[-1]
    return {name: value for name, value in row.items() if not name.startswith("time/")}


@pytest.mark.slow
@pytest.mark.parametrize("environment", [slurm, machines])
def test_two_started_by_others_train_like_one(tmp_path: Path, environment: object) -> None:
    folders = tmp_path / "two", tmp_path / "one"
    for folder in folders:
        folder.mkdir()
    port, started = free_port(), []
    for rank in range(2):
        variables, words = environment(rank, port)
        settings = {**os.environ, **variables, "WANDB_MODE": "offline"}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([*FIT, *words], env=settings, cwd=folders[0], stderr=pipe, text=True))
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    subprocess.run(FIT, cwd=folders[1], check=True, capture_output=True, timeout=300)
    two, one = (last_row(folder) for folder in folders)
    assert two.keys() == one.keys()
    assert {name: float(v) for name, v in two.items()} == pytest.approx({n: float(v) for n, v in one.items()}, rel=1e-5)
