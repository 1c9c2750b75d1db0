"""What SLURM, torchrun and several machines set in the environment; here every task is started on this one."""

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FIT = [
    sys.executable, "-m", "lightning_fed", "fit", "--config", str(ROOT / "configs" / "quickstart.yaml"),
    "--trainer.max_rounds", "4", "--trainer.logger", "[]", "--trainer.engine", "sequential",
    "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu", "--trainer.name", "run",
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


LOSES = '''
import os
import signal
import time

from lightning_fed import FederatedCallback


class Loses(FederatedCallback):
    """Lets the second process kill itself in round 3 or, once resumed, in round 4 the torchrun that has started it."""

    done = False

    def on_client_start(self, trainer, pl_module, client):
        if trainer.global_rank == 1 and client.round == (4 if trainer.resumed else 3) and not self.done:
            self.done, stop = True, signal.getsignal(signal.SIGTERM)
            os.kill(os.getppid() if trainer.resumed else os.getpid(), signal.SIGKILL)
            for _ in range(2400):
                time.sleep(0.05 if stop.signum is None else 0)
'''


def agents(folder: Path, *words: str) -> list[tuple[int, str]]:
    """Starts torchrun twice, as on two machines, by the words of docs/scaling.md; how each ends, and what is said.

    That is read until no process holds the pipe any more, one that a killed torchrun leaves behind among them.
    """
    tools, port, pipe, started = Path(sys.executable).parent, free_port(), subprocess.PIPE, []
    for rank in range(2):
        place = f"--nnodes 2 --node_rank {rank} --nproc_per_node 1 --master_addr 127.0.0.1 --master_port {port}".split()
        program = [str(tools / "torchrun"), *place, "--no-python", str(tools / "lightning-fed")]
        settings = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen([*program, *FIT[3:], *words], env=settings, cwd=folder, stderr=pipe, text=True))
    said = [process.communicate(timeout=1200)[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def rows(folder: Path) -> list[dict[str, float]]:
    (path,) = folder.rglob("metrics.csv")
    return [
        {name: float(value) for name, value in row.items() if value and not name.startswith("time/")}
        for row in csv.DictReader(path.open())
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The rows of one process."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run(FIT, cwd=folder, check=True, capture_output=True, timeout=300)
    return rows(folder)


def expect_like(alone: list[dict[str, float]], others: list[dict[str, float]]) -> None:
    assert len(others) == len(alone) == 5
    assert all(two == pytest.approx(one, rel=1e-5) for one, two in zip(alone, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("environment", [slurm, machines])
def test_two_started_by_others_train_like_one(tmp_path: Path, alone: Any, environment: Any) -> None:
    port, started = free_port(), []
    for rank in range(2):
        variables, words = environment(rank, port)
        settings = {**os.environ, **variables, "WANDB_MODE": "offline"}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([*FIT, *words], env=settings, cwd=tmp_path, stderr=pipe, text=True))
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    expect_like(alone, rows(tmp_path))


@pytest.mark.slow
def test_two_torchruns_lose_a_process_then_one_of_themselves(tmp_path: Path, alone: Any) -> None:
    lost, undisturbed = tmp_path / "lost", tmp_path / "undisturbed"
    for folder in (lost, undisturbed):
        folder.mkdir()
    (lost / "loses.py").write_text(LOSES)
    more = ["--trainer.max_rounds", "40", "--trainer.callbacks", "loses.Loses"]
    (first, said), second = agents(lost, *more)
    assert (first, second[0]) == (1, 1)
    assert "Expected every process of the run to go on" in said
    (first, said), (second, told) = agents(lost, *more, "--ckpt_path", "last")
    assert (first, second) == (1, -9)
    assert "Stopped by SIGTERM after round 4; resume with" in said
    assert "torchrun has ended without its processes" in told
    subprocess.run([*FIT, "--trainer.devices", "2"], cwd=undisturbed, check=True, capture_output=True, timeout=300)
    expect_like(alone, rows(lost))
    assert rows(lost) == rows(undisturbed)
    weights = [
        torch.load(next(folder.rglob("last.ckpt")), weights_only=True)["state_dict"] for folder in (lost, undisturbed)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
