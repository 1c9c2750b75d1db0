"""The command as a process of its own: what it trains, what stops it, and what is lost by that, which is nothing."""

import csv
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_fed.lab.runner.file import load_study
from lightning_fed.lab.runner.report import collect
from lightning_fed.lab.studies.results import write_results

ROOT = Path(__file__).parents[3]
TEXT = """
title: T
configs: [quickstart]
set: {trainer.max_rounds: ROUNDS, trainer.logger: [], data.num_clients: 4, trainer.clients_per_round: 2}
axes: {rule: {FedAvg: {}, GMA: {configs: [aggregator/gma]}}}
seeds: [0, 1]
"""


def start(folder: Path, *words: str, output: str = "runs", stderr: int = subprocess.STDOUT) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    command = [sys.executable, "-m", "lightning_fed", "study", "t.yaml", "--output", output, "--jobs", "2", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def run(folder: Path, *words: str, code: int = 0, output: str = "runs") -> str:
    process = start(folder, *words, output=output)
    said, _ = process.communicate()
    assert process.returncode == code, said
    return said


def tables(folder: Path, output: str) -> dict[str, bytes]:
    """The tables of a study whose runs are all done."""
    results, missing = collect(load_study(str(folder / "t.yaml")), "full", folder / output / "t")
    assert missing == []
    write_results(results, folder / f"{output}-tables")
    return {path.name: path.read_bytes() for path in (folder / f"{output}-tables").iterdir()}


def until(said: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    while not said():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def trained(folder: Path) -> list[Path]:
    """Tables of metrics of runs that have trained some rounds."""
    return [path for path in folder.glob("t/*/seed*/version_*/metrics.csv") if path.read_bytes().count(b"\n") > 4]


def trainers(folder: Path) -> list[int]:
    """The processes that hold a run."""
    held = [path.read_text() for path in folder.glob("t/*/seed*/.lock")]
    return [int(found[1]) for text in held if (found := re.match(r"process (\d+) ", text))]


@pytest.mark.slow
def test_all_rules_start_from_the_model_of_their_seed(tmp_path: Path) -> None:
    def curve(output: str, rule: str, seed: int) -> list[str]:
        with (tmp_path / output / "t" / f"rule={rule}" / f"seed{seed}" / "version_0" / "metrics.csv").open() as file:
            return [row["test/acc"] for row in csv.DictReader(file) if row["test/acc"]]

    text = TEXT.replace("ROUNDS", "3")
    (tmp_path / "t.yaml").write_text(text)
    run(tmp_path, output="models")
    model = "models/t/rule=FedAvg/seed{seed}/version_0/checkpoints/last.ckpt"
    (tmp_path / "t.yaml").write_text(text.replace("set: {", f"set: {{weights: '{model}', "))
    run(tmp_path, output="runs")
    ends = [curve("models", "FedAvg", seed)[-1] for seed in (0, 1)]
    assert ends[0] != ends[1]
    assert [curve("runs", rule, seed)[0] for rule in ("FedAvg", "GMA") for seed in (0, 1)] == [*ends, *ends]


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_to_the_same_table(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TEXT.replace("ROUNDS", "25"))
    run(tmp_path, output="whole")
    process = start(tmp_path, output="killed")
    until(lambda: trained(tmp_path / "killed"), process)
    os.kill(trainers(tmp_path / "killed")[0], signal.SIGKILL)
    process.kill()
    process.wait()
    assert len(list((tmp_path / "killed").glob("t/*/*/done.json"))) < 4
    run(tmp_path, output="killed")
    assert tables(tmp_path, "killed") == tables(tmp_path, "whole")
    assert len(list((tmp_path / "killed").glob("t/*/*/version_*"))) == 4
    assert "4 are done" in run(tmp_path, output="killed")


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_a_signal_it_goes_on_and_two_share_the_work(tmp_path: Path, signum: signal.Signals) -> None:
    (tmp_path / "t.yaml").write_text(TEXT.replace("ROUNDS", "25"))
    process = start(tmp_path)
    until(lambda: trained(tmp_path / "runs"), process)
    process.send_signal(signum)
    stopped, _ = process.communicate()
    assert process.returncode == 128 + signum, stopped
    assert "the same command goes on" in stopped
    assert trainers(tmp_path / "runs") == []
    one, other = start(tmp_path), start(tmp_path)
    said = [process.communicate()[0] for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0), said
    assert len(re.findall(r"seed \d: done in", "".join([stopped, *said]))) >= 4  # a fast one was done before the signal
    assert len(list((tmp_path / "runs").glob("t/*/*/version_*"))) == 4
    assert len(tables(tmp_path, "runs")) == 2


@pytest.mark.slow
def test_a_run_that_fails_loses_nothing_else(tmp_path: Path) -> None:
    text = TEXT.replace("ROUNDS", "1").replace("FedAvg: {}", "FedAvg: {set: {trainer.clients_per_round: 9}}")
    (tmp_path / "t.yaml").write_text(text)
    said = run(tmp_path, code=1)
    assert "2 runs failed" in said
    assert len(re.findall("rule GMA, seed .: done", said)) == 2
    (log, _) = sorted((tmp_path / "runs").glob("t/rule=FedAvg/*/log.txt"))
    assert str(log.relative_to(tmp_path)) in said
    assert "Expected `--trainer.clients_per_round`" in log.read_text()
    (log, _) = sorted((tmp_path / "runs").glob("t/rule=GMA/*/log.txt"))
    assert "\nRound 1 of 1, " in log.read_text()
    assert "2 runs are missing, 2 rounds: about 0:00:0" in run(tmp_path, "--dry_run")
    said = run(tmp_path, "--dry_run", output="none")
    assert re.search("unknown, as the first run failed: .*Expected `--trainer.clients_per_round`", said), said
    assert "log.txt" not in said  # it is removed


@pytest.mark.slow
def test_one_bar_in_a_terminal_counts_the_runs_of_all_processes(tmp_path: Path) -> None:
    text = TEXT.replace("ROUNDS", "1").replace("FedAvg: {}", "FedAvg: {set: {trainer.clients_per_round: 9}}")
    (tmp_path / "t.yaml").write_text(text)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))  # rows and columns
    process = start(tmp_path, stderr=theirs)
    os.close(theirs)
    with ThreadPoolExecutor(1) as reader:  # while it runs, as a terminal holds little
        shown = reader.submit(read_all, ours)
        said, _ = process.communicate()
    assert process.returncode == 1, said
    bars = [(int(n), int(failed)) for n, failed in re.findall(r"(\d)/4 \[[^]]*failed=(\d)", shown.result())]
    assert bars[-1] == (2, 2)
    assert bars == sorted(bars)
    assert re.search(r"at round \d+ \d+, ", shown.result())
    assert [int(n) for n in re.findall(r"\((\d) of 4", said)] == [1, 2, 3, 4]
    assert len(re.findall(r"\d of 4, about \d\d:\d\d left\)", said)) in (1, 2, 3)  # none before a run is done
    assert "%" not in said


def read_all(terminal: int) -> str:
    """What is written to a terminal until all have closed it."""
    found = b""
    with os.fdopen(terminal, "rb", buffering=0) as file, suppress(OSError):
        while part := file.read(4096):
            found += part
    return found.decode()


@pytest.mark.slow
def test_a_run_of_several_processes_starts_the_run_in_them_and_not_the_study(tmp_path: Path) -> None:
    two = "FedAvg: {set: {trainer.accelerator: cpu, trainer.devices: 2}}"
    (tmp_path / "t.yaml").write_text(TEXT.replace("ROUNDS", "1").replace("FedAvg: {}", two))
    assert len(re.findall("done in", run(tmp_path))) == 4
    assert {log.read_text().count("study") for log in (tmp_path / "runs").glob("t/rule=FedAvg/*/log.txt")} == {0}


@pytest.mark.slow
def test_a_run_that_diverges_is_done_and_counts_as_lost(tmp_path: Path) -> None:
    rate = "rate: {option: model.optimizer.lr, values: [0.1, 1.0e+30]}"
    tuned = "tune: {parameters: {model.optimizer.lr: [0.1, 1.0e+30]}, metric: val/acc, per: [], at: {rule: FedAvg}}"
    text = TEXT.replace("ROUNDS", "2").replace("[aggregator/gma]}}}", f"[aggregator/gma]}}}}, {rate}}}")
    (tmp_path / "t.yaml").write_text(text)
    said = run(tmp_path)
    assert (said.count("done in"), said.count("diverged after")) == (4, 4)
    assert "8 are done" in run(tmp_path)
    page = report(tmp_path)
    assert "4 of 8 runs diverged" in page
    assert page.count("| diverged") == 2
    (tmp_path / "t.yaml").write_text(TEXT.replace("ROUNDS", "2") + tuned)
    assert "diverged after" in run(tmp_path, output="tuned")
    results, missing = collect(load_study(str(tmp_path / "t.yaml")), "full", tmp_path / "tuned" / "t")
    assert (len(results.runs), missing) == (4, [])
    assert {done.chosen["model.optimizer.lr"] for done in results.runs} == {"0.1"}


@pytest.mark.slow
def test_each_model_is_attacked_and_its_figures_are_those_of_the_run(tmp_path: Path) -> None:
    """Other options of the attack attack again and train nothing; a model of more rounds is none of the study's."""
    text = TEXT.replace("ROUNDS", "2").replace("seeds: [0, 1]", "seeds: [0]") + "attack: {samples: 40, bootstrap: 5}\n"
    metrics = "[attack/logistic_regression/accuracy, attack/loss/auc, test/acc]"
    published = "{file: gma_appendix_f, axes: {rule: {FedAvg: {aggregation: avg}, GMA: {aggregation: gma}}}}"
    text += f"report: {{metric: {metrics}, statistic: final, baseline: {{rule: FedAvg}}, published: {published}}}\n"
    (tmp_path / "t.yaml").write_text(text)
    run(tmp_path)
    folders = sorted((tmp_path / "runs").glob("t/*/seed0/version_*"))
    rows = [list(csv.DictReader((folder / "attack.csv").open())) for folder in folders]
    assert [(row["attack"], row["members"]) for row in rows[0]] == [("logistic regression", "20"), ("loss", "20")]
    results, _ = collect(load_study(str(tmp_path / "t.yaml")), "full", tmp_path / "runs" / "t")
    for done, found in zip(results.runs, rows, strict=True):
        assert done.curves["attack/logistic_regression/accuracy"] == {2: float(found[0]["accuracy"])}
        assert done.curves["attack/loss/auc"] == {2: float(found[1]["auc"])}
    beside_the_paper = r"\| GMA \| 55\.00 \[[+-]\d+\.\d\d\] \|"
    assert re.search(beside_the_paper, page := report(tmp_path)), page
    before = [(folder / "metrics.csv").read_bytes() for folder in folders]
    (tmp_path / "t.yaml").write_text(text.replace("samples: 40", "samples: 60"))
    assert "0 are done" in run(tmp_path)
    assert sorted((tmp_path / "runs").glob("t/*/seed0/version_*")) == folders
    assert [(folder / "metrics.csv").read_bytes() for folder in folders] == before
    assert ",30,30," in (folders[0] / "attack.csv").read_text()
    assert "2 are done" in run(tmp_path)
    (tmp_path / "t.yaml").write_text(text.replace("max_rounds: 2", "max_rounds: 1"))
    assert "2 runs failed" in run(tmp_path, code=1)
    log = (folders[0].parent / "log.txt").read_text()
    assert "Expected a model of 1 rounds to attack, but " in log


def report(folder: Path) -> str:
    """What the report of the study prints."""
    command = [sys.executable, "-m", "lightning_fed", "report", "--study", "t.yaml", "runs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return ended.stdout


@pytest.mark.slow
def test_fewer_rounds_and_other_options_are_other_runs(tmp_path: Path) -> None:
    """A study that had more rounds has the table of one that never had; of a new run all rounds are estimated."""
    file, written = tmp_path / "t.yaml", {}
    for output, lengths in (("fewer", [3, 2]), ("runs", [2])):
        for rounds in lengths:
            file.write_text(TEXT.replace("ROUNDS", str(rounds)))
            run(tmp_path, output=output)
        written[output] = {name: text for name, text in tables(tmp_path, output).items() if name != "results.csv"}
    assert written["fewer"] == written["runs"]
    file.write_text(TEXT.replace("ROUNDS", "2").replace("logger: []", "logger: [], model.optimizer.lr: 0.07"))
    assert "4 runs are missing, 8 rounds" in run(tmp_path, "--dry_run")


@pytest.mark.slow
def test_what_keeps_no_result_or_finds_no_choice_is_a_failure(tmp_path: Path) -> None:
    text = TEXT.replace("ROUNDS", "1").replace("seeds: [0, 1]", "seeds: [0]")
    (tmp_path / "t.yaml").write_text(text.replace("logger: []", "logger: false"))
    assert run(tmp_path, code=1).count("failed, see") == 2
    log = next((tmp_path / "runs").glob("t/*/seed0/log.txt")).read_text()
    assert "Expected runs of a study to write metrics.csv" in log
    tuned = "tune: {parameters: {model.optimizer.lr: [1.0e+30]}, metric: val/acc, per: []}"
    (tmp_path / "t.yaml").write_text(text.replace("set: {", "set: {data.val_fraction: 0.2, ") + tuned)
    said = run(tmp_path, code=1, output="lost")
    assert "2 runs are left out, as every trial of their options has failed or diverged." in said
    assert "2 runs failed; start the command again to retry.\n" in said


@pytest.mark.slow
def test_an_axis_that_is_set_back_ends_before_any_run(tmp_path: Path) -> None:
    rate = "rate: {option: aggregator.lr, values: [0.1, 0.5]}"
    aside = TEXT.replace("FedAvg: {}", "FedAvg: {configs: [aggregator/fedavg]}").replace("ROUNDS", "1")
    (tmp_path / "t.yaml").write_text(aside.replace("axes: {rule:", f"axes: {{{rate}, rule:"))
    (said,) = run(tmp_path, code=1).splitlines()[-1:]
    assert "Expected different values of `rate` to give different runs" in said
    assert "but rate 0.1, rule FedAvg, seed 0 has the same configuration" in said
    assert "as rate 0.5, rule FedAvg, seed 0: move" in said
    assert not (tmp_path / "runs").exists()
    behind = aside.replace("[aggregator/gma]}}}", f"[aggregator/gma]}}}}, {rate}}}")
    (tmp_path / "t.yaml").write_text(behind)
    assert "8 runs are missing" in run(tmp_path, "--dry_run")


@pytest.mark.slow
def test_an_option_that_is_none_ends_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TEXT.replace("max_rounds: ROUNDS", "max_round: 1"))
    said = run(tmp_path, code=1).splitlines()
    assert said[-1].startswith("In t.yaml: There is no option `--trainer.max_round`; did you mean")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_trial_that_is_worse_than_the_median_ends_early(tmp_path: Path) -> None:
    """Optuna compares from the sixth trial on, and the pruner after a fifth of the rounds."""
    rates = "[0.1, 0.2, 0.05, 0.3, 0.02, 1.0e-9]"
    tuned = f"tune: {{parameters: {{model.optimizer.lr: {rates}}}, per: [], at: {{rule: FedAvg}}, "
    text = TEXT.replace("ROUNDS", "20").replace("seeds: [0, 1]", "seeds: [0]")
    text = text.replace("set: {", "set: {data.val_fraction: 0.2, ")
    (tmp_path / "t.yaml").write_text(text + tuned + "metric: val/acc, statistic: final, pruner: median}")
    assert "8 runs are missing, 160 rounds: about 0:0" in run(tmp_path, "--dry_run")
    assert not (tmp_path / "runs").exists()
    said = run(tmp_path, "--jobs", "1")
    assert (said.count("done in"), said.count("ended early")) == (6, 1), said  # five trials of six, and a run
    (early,) = [folder for folder in (tmp_path / "runs/t").glob("*/*/seed0") if not (folder / "done.json").exists()]
    assert "1e-09" in str(early)
    assert len(list(early.glob("version_*/metrics.csv"))[0].read_text().splitlines()) == 1 + 1 + 20 / 5
    assert "6 are done" in run(tmp_path)
