"""Mutated files of studies: each ends in one sentence, or plans runs that share no folder and stay below `--output`."""

import contextlib
import io
import os
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import yaml

from tests.faults.config_trials import VALUES, bomb, places
from tests.faults.counts import Counts, Outcome

TRIALS = 2000
_BASE = """
title: Rates
name: rates
configs: [quickstart]
set: {trainer.max_rounds: 4}
axes:
  rule: {FedAvg: {}, GMA: {configs: [aggregator/gma], set: {aggregator.lr: 2}}}
  rate: {option: model.optimizer.lr, values: [0.001, 0.01, 1e-4]}
without: [{rule: FedAvg, rate: [0.001]}]
seeds: [0, 1]
tune: {parameters: {aggregator.lr: [0.1, 1.0]}, per: [rule], at: {rate: 0.01}}
report: {rows: [rule], columns: [rate], baseline: {rule: FedAvg}}
profiles: {cpu: {set: {trainer.max_rounds: 2}, seeds: [0], axes: {rate: [0.01]}}}
"""
_NAMES: tuple[Any, ...] = (
    "../x", "../../x", "/tmp/x", "a/../../x", "a\nb", "a\n#SBATCH --wrap", "a\rb", "a\x1b[2Jb", "a,b=c", "a=b",
    "$x$ $y$", "a|b", "5**", "a" * 300, "ü" * 200, "\u202e", "\x85", ".", "..", "", " ", "-", "con", "a\0b", "A", "a",
    "~", "$(x)", "`x`", "=1+1", 1, 1.0, True, None, 1e400, "NaN",
)  # fmt: skip
_RANGES: tuple[Any, ...] = (
    float("inf"), float("-inf"), float("nan"), 1e308, -1e308, 10**400, -1, 0, 1e-320, "x", None, True, 1, 2.5,
)  # fmt: skip
_STORAGES = (
    "../.bash_profile", ".bash_profile", "/tmp/lightning-fed.log", "runs/studies/rates/../x", "~/x", "file:x", "a/b",
    "sqlite:///x.db", "sqlite:///../x.db", "sqlite:////tmp/lightning-fed.db", "sqlite://", "sqlite:///file:x?uri=true",
    "sqlite:///%2e%2e/x", "SQLITE:///x", "x://../y", "://", "../://x",
)  # fmt: skip
_REFUSED = {"name": ("../x", "/tmp/x", "a/../../x", "a\nb", "a\n#SBATCH --wrap", "a\0b"), "axis": ("a\nb", "a\0b")}
_OPTIONS = (
    "--only", "--jobs", "--profile", "--output", "--shard", "--slurm", "--launcher=slurm", "--launcher", "--on_error",
)  # fmt: skip


def make_trial(seed: int, number: int) -> tuple[bytes, list[str], bool, str]:
    """Returns the file, further words, whether it must be refused, and what was done."""
    rng = random.Random(f"{seed} {number}")
    tree = yaml.safe_load(_BASE)
    kind = rng.choice(("name", "axis", "value", "range", "set", "set", "word", "cut", "storage", "aliases"))
    said, words, refused = kind, [], False
    if kind == "name":
        tree["name"] = rng.choice(_NAMES)
        said, refused = f"name {tree['name']!r}", tree["name"] in _REFUSED["name"]
    elif kind == "axis":
        name = rng.choice(_NAMES)
        tree["axes"][name] = {"a": {"set": {"aggregator.lr": 3}}, "b": {"set": {"aggregator.lr": 4}}}
        said, refused = f"axis {name!r}", name in _REFUSED["axis"]
    elif kind == "value":
        names = rng.sample(_NAMES, 4)
        tree["axes"]["rule"] |= {name: {"set": {"aggregator.lr": at + 3}} for at, name in enumerate(names)}
        said, refused = f"values {names!r}", any(name in _REFUSED["axis"] for name in names)
    elif kind == "range":
        low, high = rng.choice(_RANGES), rng.choice(_RANGES)
        space = {"low": low, "high": high, "log": rng.random() < 0.5}
        tree["tune"] |= {"parameters": {"aggregator.lr": space}, "sampler": rng.choice(("tpe", "grid")), "trials": 3}
        said = f"range {space}"
    elif kind == "set":
        container, key = rng.choice(places(tree))
        container[key] = rng.choice((*VALUES, *_NAMES, *_RANGES))
        said = f"set {key!r} to {container[key]!r}"
    elif kind == "storage":
        tree["tune"]["storage"] = rng.choice(_STORAGES)
        said, refused = f"storage {tree['tune']['storage']!r}", True
    elif kind == "word":
        option, value = rng.choice(_OPTIONS), str(rng.choice((*_NAMES, "1/0", "1/2", "rule=GMA", "setup=a,setup=b")))
        words = [option, value.replace("\0", "")] if rng.random() < 0.8 else [option]
        said = f"words {words}"
    text = yaml.safe_dump(tree, allow_unicode=rng.random() < 0.5).encode(errors="replace")
    if kind == "aliases":
        return (mutated := bomb(rng, text)), words, mutated != text, kind
    return (text[: rng.randrange(len(text))] if kind == "cut" else text), words, refused, said


def judge(folder: Path, seed: int, number: int) -> tuple[Outcome, str]:
    """Plans a study in the working folder, which is `folder/here`, and looks at what it would train, and where."""
    from lightning_fed.cli import main
    from lightning_fed.errors import FederatedError
    from lightning_fed.lab.runner.command import study_folder
    from lightning_fed.lab.runner.file import load_study
    from lightning_fed.lab.studies.cells import cells_of

    text, words, refused, done = make_trial(seed, number)
    Path("t.yaml").write_bytes(text)
    out, err, status = io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(["study", "t.yaml", "--dry_run", *words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException as error:
        return "traceback", f"{done}: {type(error).__name__}: {str(error)[:200]}"
    lines = [line for line in err.getvalue().splitlines() if line.strip()]
    if "Traceback" in err.getvalue() or (status and len(lines) != 1):
        return "traceback", f"{done}: status {status}, {lines[-2:]}"
    if sorted(os.listdir(folder)) != ["here"] or set(os.listdir(".")) - {"t.yaml", "runs"}:
        return "wrong success", f"{done}: files elsewhere"
    if status:
        return "right", f"{done}: {lines[-1]}"
    if refused:
        return "wrong success", f"{done}: taken"
    try:
        study = load_study("t.yaml")
        root = study_folder(Path("runs/studies"), study.name, "full")
        places_of = [os.path.realpath(root / cell.folder) for cell in cells_of(study)]
    except FederatedError as error:
        return "right", f"{done}: {error}"
    if len({place.casefold() for place in places_of}) < len(places_of):
        return "wrong success", f"{done}: two runs share a folder"
    inside = os.path.realpath("runs/studies") + os.sep
    return ("right" if all(place.startswith(inside) for place in places_of) else "wrong success"), done


@contextlib.contextmanager
def _without_processes() -> Any:
    """Leaves out what other processes do: the look at each run's words, which is another campaign's, and the times."""
    from lightning_fed.lab.runner import command

    former = command.Pool.mistake, command._time_needed
    command.Pool.mistake, command._time_needed = lambda *args: "", lambda *args: ""
    try:
        yield
    finally:
        command.Pool.mistake, command._time_needed = former


def run(trials: int, seed: int) -> Counts:
    """Runs the campaign."""
    counts, before = Counts(), Path.cwd()
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(), _without_processes():
        warnings.simplefilter("ignore")
        (folder := Path(name) / "all" / "here").mkdir(parents=True)
        os.chdir(folder)
        try:
            for number in range(trials):
                outcome, said = judge(folder.parent, seed, number)
                counts.note(outcome, f"seed {seed}, trial {number}: {said}")
        finally:
            os.chdir(before)
    return counts
