"""Several runs at a time: in processes, and on a cluster."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.runner import command, executors
from lightning_fed.lab.runner.executors import Task, make_executor, seconds_left
from lightning_fed.lab.runner.file import load_study
from lightning_fed.lab.runner.report import collect

submitit = pytest.importorskip("submitit")
ROOT = Path(__file__).parents[3]
TEXT = """
title: T
configs: [quickstart]
set: {trainer.max_rounds: 1, trainer.logger: [], data.num_clients: 4, trainer.clients_per_round: 2}
axes: {rule: {FedAvg: {}, GMA: {configs: [aggregator/gma]}}}
seeds: [0, 1]
"""
# What they stand for keeps the script; a task is in the queue once, then it has ended.
SLURM = {
    "sbatch": 'cat "$1" >> submitted; touch queue; echo "Submitted batch job 7"',
    "squeue": 'echo "$@" > asked; if [ -e queue ]; then echo PENDING; rm queue; fi',
    "srun": "exit 1",
}


@pytest.mark.parametrize(
    ("took", "running", "missing", "jobs", "left"),
    [
        ([10.0, 20.0], [], 4, 1, 60.0),
        ([10.0, 20.0], [5.0, 0.0], 4, 2, 27.5),
        ([10.0], [4.0, 99.0], 2, 2, 3.0),  # a slow one can end at any time
        ([10.0], [4.0], 1, 8, 6.0),  # more jobs than runs
        ([10.0], [], 0, 2, 0.0),
        ([], [5.0], 3, 2, 0.0),
    ],
)
def test_time_left_by_the_mean_run(took: list[float], running: list[float], missing: int, jobs: int, left: float):
    assert seconds_left(took, running, missing, jobs) == left


READS_FOR_LONG = """
import sys, time
from functools import partial
from pathlib import Path
from lightning_fed.lab.runner.executors import Pool
guard = partial(exec, "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(600)")
Pool(Path(), 1, guard).mistake([])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not list its processes")
def test_who_is_ended_while_options_are_checked_leaves_no_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", READS_FOR_LONG], cwd=tmp_path, start_new_session=True) as program:
        try:
            assert until(lambda: (tmp_path / "begun").exists() or program.poll() is not None)
            program.terminate()
            program.wait()
            assert until(lambda: not group_lives(program.pid))
        finally:
            if group_lives(program.pid):
                os.killpg(program.pid, signal.SIGKILL)


def until(holds: Callable[[], bool]) -> bool:
    """Waits up to 2 minutes."""
    end = time.monotonic() + 120
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def group_lives(group: int) -> bool:
    """Whether a process of a group runs; one that has ended, and that nobody has asked for, does not."""
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of = each.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                return True
    return False


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts programs into the way that answer as SLURM's do; returns what changes one."""

    def program(name: str, lines: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    for name, lines in SLURM.items():
        program(name, lines)
    (tmp_path / "t.yaml").write_text(TEXT)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(executors, "_ASK_S", 0.001)
    monkeypatch.setattr("lightning_fed.lab.runner.executors.Pool.mistake", lambda self, cells: "")
    monkeypatch.chdir(tmp_path)
    return program


def study(*words: str) -> int:
    return command.main(["t.yaml", "--output", "runs", "--launcher", "slurm", *words], pytest.fail)


def test_one_array_is_submitted_with_a_share_for_each_task(
    cluster: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "time=240,partition=gpu,gpus_per_node=1,setup=module load a; export B=1,2,exclude=n1,n2,exclusive=true"
    given += ",setup=last"
    assert study("--jobs", "3", "--slurm", given) == 1
    lines = (tmp_path / "submitted").read_text().splitlines()
    for option in ("array=0-2%3", "time=240", "partition=gpu", "gpus-per-node=1", "exclude=n1,n2", "exclusive"):
        assert any(line.removeprefix("#SBATCH --").replace("'", "") == option for line in lines), option
    assert {"module load a; export B=1,2", "last"} <= {*lines}
    (name,) = [line.partition("job-name=")[2] for line in lines if "job-name" in line]
    assert f"--name={name}" in (tmp_path / "asked").read_text()
    tasks = [submitit.SlurmJob(tmp_path / "runs/t/slurm", f"7_{at}").submission().function for at in range(3)]
    words = ["t.yaml", "--output", "runs", "--launcher", "slurm", "--jobs", "3", "--slurm", given]
    for at, task in enumerate(tasks):
        assert task.start.func is command.main
        assert task.start.args[0] == [*words, "--launcher=local", "--slurm=", "--jobs=1", f"--shard={at + 1}/3"]
    said = capsys.readouterr().out
    assert "Submitted 3 tasks" in said
    assert "4 runs are not done; start the command again to retry, or see\n  runs/t/slurm/*_log.out" in said


def test_shares_whose_runs_are_done_and_a_job_in_the_queue_are_not_submitted_again(
    cluster: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "done_run", lambda root, cell: None if cell.seed else root)
    study("--jobs", "2", "--slurm", "time=1")
    (tmp_path / "queue").touch()
    study("--jobs", "2", "--slurm", "time=1")
    script = (tmp_path / "submitted").read_text()
    assert script.count("#!/bin/bash") == 1
    assert "--array" not in script
    assert "No new tasks are submitted" in capsys.readouterr().out
    (task,) = [submitit.SlurmJob(tmp_path / "runs/t/slurm", "7").submission().function]
    assert task.start.args[0][-1] == "--shard=2/2"
    monkeypatch.setattr(command, "done_run", lambda root, cell: root)
    assert study("--slurm", "time=1") == 0


def test_ctrl_c_ends_the_waiting_alone(
    cluster: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(executors.time, "sleep", pressed)
    with pytest.raises(SystemExit) as ended:
        study("--slurm", "time=1")
    assert ended.value.code == 130
    assert "`scancel --name t-" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slurm", "partition=a"], "how many minutes a task may take, as in .*, got None"),
        (["--slurm", "time=4:00:00"], "how many minutes a task may take, as in .*, got '4:00:00'"),
        (["--slurm", "time=1,nodes=2"], r"Expected `--slurm` to name keys of submitit \(account, .*, got 'nodes'"),
        (["--slurm", "time"], "Expected `--slurm` as KEY=VALUE,..., as in .*, got 'time'"),
        (["--slurm", "time=1,partition=a\n#SBATCH --nodes=9"], "Expected `--slurm` on one line"),
        (["--slurm", "time=1", "--output", "a\nb"], "Expected `--output` on one line"),
        (["--slurm", "time=1,time=2"], "Expected `--slurm` to give each key once, got 'time' twice"),
        (["--slurm", "time=1", "--shard", "1/2"], "Expected no `--shard` with `--launcher slurm`"),
        (["--slurm", "time=1", "--launcher", "local"], "Expected `--launcher slurm` with `--slurm time=1`"),
    ],
)
def test_a_mistake(cluster: object, tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        study(*words)
    assert not (tmp_path / "submitted").exists()


def test_what_slurm_says_is_passed_on(cluster: Callable[[str, str], None], tmp_path: Path) -> None:
    cluster("sbatch", 'echo "sbatch: error: no such partition" >&2; exit 1')
    with pytest.raises(FederatedError, match="Expected SLURM to accept the job, but it says: sbatch: error: no such"):
        study("--slurm", "time=1")
    cluster("squeue", 'echo "squeue: error: no controller" >&2; exit 1')
    with pytest.raises(FederatedError, match="Expected SLURM to answer `squeue`, but it says: squeue: error: no"):
        study("--slurm", "time=1")


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FederatedError, match="that can submit jobs to SLURM, but it has no sbatch"):
        make_executor(tmp_path, "time=1")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(FederatedError, match="pip install 'lightning_fed.study.'"):
        make_executor(tmp_path, "time=1")


def test_dry_run_says_what_would_be_submitted(cluster: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert study("--jobs", "2", "--slurm", "time=1", "--dry_run") == 0
    assert "4 runs are missing: 2 tasks would be submitted for them with time=1." in capsys.readouterr().out
    assert study("--slurm", "time=1", "--dry_run", "--only", "rule=GMA,seed=0") == 0
    said = capsys.readouterr().out
    assert "T: 1 run in " in said
    assert "1 run is missing: 1 task would be submitted for them with time=1." in said


def environment(path: Path, code: int) -> int:
    path.write_text(" ".join(name for name in os.environ if name.startswith("SLURM_")))
    return code


def test_a_task_is_no_process_of_a_training_and_fails_as_its_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NTASKS", "PROCID", "LOCALID", "NODEID", "JOB_ID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0)
    executor = submitit.AutoExecutor(folder=tmp_path / "logs", cluster="local")
    tasks = [Task(partial(environment, tmp_path / str(code), code)) for code in (0, 1)]
    good, bad = executor.submit_array(tasks)
    assert good.result() == 0
    assert bad.exception() is not None
    assert [(tmp_path / str(code)).read_text() for code in (0, 1)] == ["SLURM_JOB_ID"] * 2
    assert tasks[0].checkpoint().function is tasks[0]


def slurm_answers() -> bool:
    return bool(shutil.which("sbatch") and shutil.which("sinfo") and not subprocess.run(["sinfo"]).returncode)


@pytest.mark.slow
def test_on_a_cluster(tmp_path: Path) -> None:
    if not slurm_answers():
        pytest.skip("there is no SLURM that `sinfo` tells of")
    two = "FedAvg: {set: {trainer.accelerator: cpu, trainer.devices: 2}}"
    (tmp_path / "t.yaml").write_text(TEXT.replace("FedAvg: {}", two))
    words = ["t.yaml", "--output", "runs", "--launcher", "slurm", "--jobs", "2", "--slurm", "time=10"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    subprocess.run([sys.executable, "-m", "lightning_fed", "study", *words], cwd=tmp_path, env=environment, check=True)
    results, missing = collect(load_study(str(tmp_path / "t.yaml")), "full", tmp_path / "runs/t")
    assert (len(results.runs), missing) == (4, [])
