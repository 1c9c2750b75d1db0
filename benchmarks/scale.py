"""Time and memory of rounds with very many clients: both must stay flat, and depend on the cohort alone.

    python -m benchmarks.scale

or `make bench-scale`. Logistic regression on random 8x8 images of 10 classes; metrics.csv and checkpoints are written
as usual. Each scenario has a process of its own. Memory is what the process holds in RAM after each round, with data.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks.environment import machine, peak_memory, resident_memory, start_with_settings
from benchmarks.figures import DOCS, IMAGES, write_block
from benchmarks.results import milliseconds, write_json

__all__ = ["SCENARIOS", "Scenario", "main", "measure", "summary"]

_MIB = 2**20


@dataclass(frozen=True)
class Scenario:
    """Clients, drawn and registered.

    Attributes:
        clients: Registered clients.
        per_round: Clients drawn each round.
        rounds: Rounds.
        samples: Samples of each client, one batch.
    """

    clients: int
    per_round: int
    rounds: int
    samples: int

    @property
    def text(self) -> str:
        """Says it in words."""
        return f"{self.clients:,} clients of {self.samples} samples, {self.per_round:,} per round"


SCENARIOS = {
    "10k": Scenario(10_000, 1_000, 20, 10),
    "100k": Scenario(100_000, 1_000, 20, 10),
    "1M": Scenario(1_000_000, 10_000, 6, 4),
}


def _mebibytes(count: float) -> str:
    return f"{count / _MIB:,.0f} MiB"


def measure(scenario: Scenario, engine: str | None, folder: str) -> dict[str, Any]:
    """Trains a scenario in this process.

    Args:
        scenario: The scenario.
        engine: The trainer's engine, None for its default.
        folder: Where the run is written.

    Returns:
        Seconds of each round and bytes in RAM after it; the seconds before the first, the bytes before the trainer saw
        the data, and the most bytes at any time.
    """
    from benchmarks.contestants.contestant import Contestant
    from benchmarks.contestants.framework import refusal
    from lightning_fed import FederatedCallback, FederatedTrainer
    from lightning_fed.data import IID, FederatedDataModule
    from lightning_fed.models import ImageClassifier, LogisticRegression

    class Watch(FederatedCallback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.bytes: list[int] = []

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.times.append(time.perf_counter())
            self.bytes.append(resident_memory())

        on_train_end = on_train_epoch_start

    if (reason := refusal(Contestant(engine=engine))) is not None:
        return {"skipped": reason}
    count, generator = scenario.clients * scenario.samples, torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(count, 1, 8, 8, generator=generator), torch.randint(10, (count,), generator=generator)
    )
    watch, began = Watch(), time.perf_counter()
    options = {} if engine is None else {"engine": engine}
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=scenario.rounds, clients_per_round=scenario.per_round, callbacks=[watch],
        logger=[], enable_progress_bar=False, default_root_dir=folder, **options,
    )  # fmt: skip
    data_bytes = resident_memory()
    sgd = ImageClassifier(LogisticRegression(64), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    trainer.fit(sgd, FederatedDataModule(data, IID(), scenario.clients, batch_size=scenario.samples))
    seconds = [after - before for before, after in zip(watch.times, watch.times[1:], strict=False)]
    return {
        "start": watch.times[0] - began,
        "data_bytes": data_bytes,
        "peak_bytes": peak_memory(),
        "seconds": seconds,
        "bytes": watch.bytes[1:],
    }


def summary(found: dict[str, Any]) -> dict[str, float]:
    """Says how flat a scenario is: its second half against its first, the first round left out.

    Args:
        found: What ``measure`` has returned.

    Returns:
        The median seconds of a round, the ratio of the halves' medians, the bytes that the second half's end holds
        beyond the first round's, and those of the end beyond what was there before the trainer had seen the data.
    """
    seconds, held = found["seconds"][1:], found["bytes"]
    half = len(seconds) // 2
    return {
        "seconds": statistics.median(seconds),
        "drift": statistics.median(seconds[half:]) / statistics.median(seconds[:half]),
        "growth_bytes": held[-1] - held[0],
        "beyond_data_bytes": held[-1] - found["data_bytes"],
    }


def run(name: str, engine: str | None) -> dict[str, Any]:
    """Runs one scenario in a process of its own and says what came out."""
    command = [sys.executable, "-m", "benchmarks.scale", "--child", name, *(["--engine", engine] if engine else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = {"text": SCENARIOS[name].text, **json.loads(done.stdout.strip().splitlines()[-1])}
    if "skipped" in found:
        print(f"{name}: skipped: {found['skipped']}", flush=True)
        return found
    found["summary"] = figures = summary(found)
    growth = f"{figures['growth_bytes'] / _MIB:+.1f} MiB since round 1"
    print(
        f"{name}: {found['text']}: {milliseconds(figures['seconds'])} a round, second half {figures['drift']:.2f} x "
        f"the first; {_mebibytes(found['bytes'][-1])} at the end, {growth}, {_mebibytes(found['peak_bytes'])} at most; "
        f"{found['start']:.1f} s to the first round",
        flush=True,
    )
    return found


def plot(scenarios: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws time and memory of each round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from docs.pictures import save

    figure, (times, memory) = plt.subplots(1, 2, figsize=(10, 3.6))
    for found in scenarios.values():
        rounds = range(1, len(found["seconds"]) + 1)
        times.plot(rounds, found["seconds"], marker=".", label=found["text"])
        memory.plot(rounds, [held / 2**30 for held in found["bytes"]], marker=".")
    times.set(xlabel="round", ylabel="seconds", yscale="log")
    memory.set(xlabel="round", ylabel="GiB in RAM", ylim=(0, None))
    for axes in (times, memory):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="upper center", fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.84))
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path, dpi=120)
    plt.close(figure)


def docs_text(results: dict[str, Any]) -> str:
    """Writes the table of all scenarios."""
    from benchmarks.figures import settings_line

    head = "clients | a round | second half / first | RAM at the end | since round 1 | at most | to the first round"
    lines = [f"| {head} |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for found in results["scenarios"].values():
        figures = found["summary"]
        lines.append(
            f"| {found['text']} | {milliseconds(figures['seconds'])} | {figures['drift']:.2f} × | "
            f"{_mebibytes(found['bytes'][-1])}, {_mebibytes(found['data_bytes'])} of it before the trainer | "
            f"{figures['growth_bytes'] / _MIB:+.1f} MiB | {_mebibytes(found['peak_bytes'])} | {found['start']:.1f} s |"
        )
    picture = "![Time and memory of rounds with very many clients](images/scale.png)"
    return "\n".join([*lines, "", picture, "", settings_line(results), ""])


def main() -> None:
    """Runs the scenarios, writes JSON and a plot, and into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--engine", help="the trainer's engine; its default if not given")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/scale.json"))
    parser.add_argument("--write-docs", action="store_true", help="write into docs/performance.md and docs/images")
    parser.add_argument("--child", choices=list(SCENARIOS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(SCENARIOS[arguments.child], arguments.engine, folder)))
        return
    results: dict[str, Any] = {"machine": machine("lightning", "lightning_fed")}
    found = {name: run(name, arguments.engine) for name in arguments.scenarios}
    results["scenarios"] = {name: scenario for name, scenario in found.items() if "summary" in scenario}
    write_json(arguments.output, results)
    plot(results["scenarios"], arguments.output.with_suffix(".png"))
    if arguments.write_docs:
        plot(results["scenarios"], IMAGES / "scale.png")
        write_block(DOCS, "scale", docs_text(results))


if __name__ == "__main__":
    start_with_settings("benchmarks.scale")
    main()
