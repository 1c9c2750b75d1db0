"""What is measured in processes of their own: peak memory, the time to the first local step, the time of `--help`.

    python -m benchmarks.start_and_memory memory plain 10

is such a process, which prints one figure; they are started by `benchmarks.run`.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.environment import peak_memory
from benchmarks.race.turns import ContestantFailed
from benchmarks.workloads import WORKS, Work

__all__ = ["FIGURES", "run_figures"]

_AIM_VECTORS, _AIM_START, _AIM_HELP = 10.0, 1.5, 1.3


def memory_work(clients: int) -> Work:
    """Work C with its samples over another number of clients, all of which train in every round."""
    work = WORKS["C"]
    size = work.clients * work.size // clients
    return replace(work, clients=clients, per_round=clients, size=size, batch=min(work.batch, size))


def memory(side: str, clients: int) -> dict[str, float]:
    """Trains a round of work C; returns the peak in bytes.

    The yardstick has imported Lightning too. What importing the package adds to that, which the yardstick needs for the
    network alone, is taken off.
    """
    import lightning.pytorch  # noqa: F401  # for what loading it costs
    import torchvision.models  # noqa: F401  # for what loading it costs

    before, work = peak_memory(), memory_work(clients)
    if side == "plain":
        import lightning_fed.models  # noqa: F401  # for what loading it costs

        imported = peak_memory() - before
        from benchmarks.contestants.choice import plain_loop
        from benchmarks.contestants.contestant import PLAIN

        plain_loop(PLAIN, work, work.data()).round(0)
        return {"bytes": peak_memory() - imported}
    from benchmarks.contestants import framework
    from benchmarks.contestants.contestant import Contestant

    callbacks = framework.METHODS["fedavg"]()
    trainer = framework.make_trainer(Contestant(engine="sequential"), callbacks, max_rounds=1)
    trainer.fit(framework.make_model(work), framework.make_datamodule(work, work.data()))
    return {"bytes": peak_memory()}


class _FirstStepTaken(Exception):
    """Ends a training, and says after how many seconds."""


def start(writes: bool) -> dict[str, float]:
    """Returns the seconds from the end of `import lightning.pytorch` to the first local step of work A.

    Args:
        writes: Whether the run has a folder, with its pictures of the split, metrics.csv and checkpoints.
    """
    import lightning.pytorch  # noqa: F401  # for what loading it costs

    work = WORKS["A"]
    data = work.data()
    began = time.perf_counter()
    from benchmarks.contestants import framework
    from benchmarks.contestants.contestant import Contestant
    from lightning_fed import FederatedCallback

    class FirstStep(FederatedCallback):
        def on_local_step_start(self, *args: Any) -> None:
            raise _FirstStepTaken(time.perf_counter() - began)

    callbacks = [*framework.METHODS["fedavg"](), FirstStep()]
    with tempfile.TemporaryDirectory() as folder:
        writing: dict[str, Any] = {"logger": [], "enable_checkpointing": True, "default_root_dir": folder}
        options = {"max_rounds": 1, "clients_per_round": work.per_round, **(writing if writes else {})}
        trainer = framework.make_trainer(Contestant(engine="sequential"), callbacks, **options)
        try:
            trainer.fit(framework.make_model(work), framework.make_datamodule(work, data))
        except _FirstStepTaken as taken:
            return {"seconds": taken.args[0]}
    raise RuntimeError("No local step was taken.")


def _child(*words: str) -> dict[str, float]:
    """Runs one of the functions above in a process; returns what it prints."""
    command = [sys.executable, "-m", "benchmarks.start_and_memory", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ContestantFailed(f"{' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _wall(*words: str) -> float:
    """Seconds that this interpreter needs for a command."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], capture_output=True, check=True)
    return time.perf_counter() - began


def memory_figures(repeats: int, clients: int) -> dict[str, Any]:
    """Compares peaks, in vectors of the model's length in float32."""
    pairs = [(_child("memory", "framework", str(clients)), _child("memory", "plain", str(clients)))
             for _ in range(min(repeats, 3))]  # fmt: skip
    vector = 4 * sum(parameter.numel() for parameter in WORKS["C"].model().parameters())
    more = [(ours["bytes"] - theirs["bytes"]) / vector for ours, theirs in pairs]
    plain = statistics.median(theirs["bytes"] for _, theirs in pairs)
    return {"value": statistics.median(more), "unit": "vectors", "values": more, "aim": _AIM_VECTORS,
            "note": f"peak of the yardstick {plain / 2**20:.0f} MiB, a vector {vector / 2**20:.1f} MiB"}  # fmt: skip


def start_figures(repeats: int, what: str) -> dict[str, Any]:
    """Measures the time to the first local step."""
    values = [_child("start", what)["seconds"] for _ in range(repeats)]
    return {"value": statistics.median(values), "unit": "s", "values": values, "aim": _AIM_START, "note": ""}


def help_figures(repeats: int) -> dict[str, Any]:
    """Compares `lightning-fed --help` with importing Lightning, alternately."""
    pairs = [(_wall("-m", "lightning_fed", "--help"), _wall("-c", "import lightning.pytorch")) for _ in range(repeats)]
    values = [ours / theirs for ours, theirs in pairs]
    note = f"the import {statistics.median(theirs for _, theirs in pairs):.1f} s"
    return {"value": statistics.median(values), "unit": "x", "values": values, "aim": _AIM_HELP, "note": note}


# By key: what it is, and how it is measured in a number of repeats.
FIGURES: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "memory-10": ("peak memory beyond the yardstick with Lightning imported, work C, 10 clients",
                  lambda repeats: memory_figures(repeats, 10)),
    "memory-100": ("the same with 100 clients, all in the round", lambda repeats: memory_figures(repeats, 100)),
    "start": ("from `import lightning.pytorch` to the first local step, work A, nothing written",
              lambda repeats: start_figures(repeats, "nothing")),
    "start-run": ("the same with a run's folder, its pictures of the split, metrics.csv and checkpoints",
                  lambda repeats: start_figures(repeats, "run")),
    "help": ("`lightning-fed --help` against `import lightning.pytorch`", help_figures),
}  # fmt: skip


def run_figures(keys: list[str], repeats: int) -> dict[str, dict[str, Any]]:
    """Measures and prints figures."""
    results = {}
    for key in keys:
        text, measure = FIGURES[key]
        try:
            results[key] = {"text": text, **measure(repeats)}
            found = results[key]
            least, most = min(found["values"]), max(found["values"])
            said = f"{found['value']:.2f} {found['unit']} (from {least:.2f} to {most:.2f}, aim {found['aim']:.1f})"
        except (ContestantFailed, subprocess.CalledProcessError) as error:
            results[key] = {"text": text, "failed": str(error)}
            said = f"failed: {error}"
        print(f"{key}: {said}", flush=True)
    return results


if __name__ == "__main__":
    _, function, argument, *number = sys.argv
    measured = start(argument == "run") if function == "start" else memory(argument, int(number[0]))
    print(json.dumps(measured))
