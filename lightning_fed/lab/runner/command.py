"""The command ``lightning-fed study FILE [--jobs N] [--profile NAME] [--only AXIS=PATTERN,...] [--dry_run]``."""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import yaml

from lightning_fed.cli.configs_command import find_config
from lightning_fed.cli.yaml_loader import PlainLoader, read_yaml
from lightning_fed.core import one_line
from lightning_fed.core.files import writing
from lightning_fed.errors import FederatedError, expect, expect_count
from lightning_fed.lab.common import CommandParser, are
from lightning_fed.lab.report.runs import counted, read_metrics
from lightning_fed.lab.runner.executors import TASK_LOGS, Outcome, Pool, Task, make_executor, train_in_tasks
from lightning_fed.lab.runner.file import help_on_keys, load_study
from lightning_fed.lab.runner.record import LOG, Guard, done_run, rounds_trained
from lightning_fed.lab.runner.tuning import Group, groups_of, key_of, tune, tuned_together, with_choices
from lightning_fed.lab.studies.cells import Cell, at_edge, cells_of, chosen_by
from lightning_fed.lab.studies.study import Study
from lightning_fed.runs.statistics import mean_of

if TYPE_CHECKING:
    import submitit

__all__ = ["main", "make_parser", "rounds_of", "study_folder", "telling_runs"]

_RUNS = Path("runs/studies")
_TRIED, _BY_DEFAULT, _LONGEST = 3, 100, 1e6  # rounds, rounds, seconds of a round
_NAMES = ("max_rounds", "max_epochs")

_Key = tuple[str, ...]


def main(argv: list[str], guard: Guard) -> int:
    """Trains the runs of a study that are not done yet; ``guard`` restricts the imports of their processes.

    Returns:
        0 if all runs are done, 1 if a run failed, 128 + the signal's number if a signal stopped the program.
    """
    options = make_parser().parse_args(argv)
    expect_count("--jobs", options.jobs)
    study = load_study(options.file, options.profile)
    root = study_folder(options.output, study.name, options.profile)
    cells = chosen_by(cells_of(study), options.only)
    executor = _executor(root, options)
    per = tuned_together(study) if groups_of(study, cells, root) else [*study.axes, "seed"]
    cells = _share(cells, options.shard, per)
    groups, pool = groups_of(study, cells, root, writes=False), Pool(root, options.jobs, guard)
    planned, missing = _plan(study, cells, groups, root, options.jobs)
    trials = sum(len(attempt.cells) for group in groups for attempt in group.asked())
    tuning = f", {trials} of them to tune" if trials else ""
    there, done = counted(len(planned), "run"), len(planned) - len(missing)
    print(f"{one_line(study.title)}: {there} in {root}{tuning}; {done} {are(done)} done.")
    if missing and (mistake := pool.mistake(list(telling_runs(missing)))):
        raise FederatedError(f"In {options.file}: {mistake}")
    tasks = _tasks(argv, guard, _keys(cells, per), _keys(missing, per), options.jobs)
    if options.dry_run:
        for cell in missing:
            print(f"  {cell.label}")
        print(
            f"{_runs_are(missing)} missing: {counted(len(tasks), 'task')} would be submitted for them with "
            f"{options.slurm}."
            if executor
            else _time_needed(root, planned, missing, options.jobs, guard)
        )
        return 0
    with writing(root, "--output", "the folder "):
        root.mkdir(parents=True, exist_ok=True)
    groups = groups_of(study, cells, root)  # only now, as they write their trials
    if executor is not None:
        plan = partial(_plan, study, cells, groups, root, options.jobs)
        outcome = train_in_tasks(executor, tasks, plan)
        _tell_edges(study, with_choices(study, cells, groups)[0])
        return _tell(outcome, root, options)
    return _tell(_train(study, cells, groups, pool, options.jobs), root, options)


def _plan(
    study: Study, cells: Sequence[Cell], groups: Sequence[Group], root: Path, jobs: int
) -> tuple[list[Cell], list[Cell]]:
    """Returns all runs that are known so far, as tuning may add some, and those of them that are not done."""
    trials = [cell for group in groups for attempt in group.planned(jobs) for cell in attempt.cells]
    tuned, undecided = with_choices(study, cells, groups)
    planned = list({cell.folder: cell for cell in (*trials, *tuned, *undecided)}.values())
    return planned, [cell for cell in planned if done_run(root, cell) is None]


def _executor(root: Path, options: argparse.Namespace) -> "submitit.SlurmExecutor | None":
    """Returns the executor for SLURM, None if runs are trained on this machine."""
    if options.launcher == "local":
        expect(
            not options.slurm, f"Expected `--launcher slurm` with `--slurm {options.slurm}`, got `--launcher local`."
        )
        return None
    expect(options.shard is None, "Expected no `--shard` with `--launcher slurm`, which makes shares itself, got both.")
    return make_executor(root, options.slurm)


def _tasks(argv: list[str], guard: Guard, keys: Sequence[_Key], missing: Sequence[_Key], jobs: int) -> list[Task]:
    """Returns the tasks of a job: each runs this command on a share of the runs in which some are missing."""
    order = {key: at for at, key in enumerate(dict.fromkeys(keys))}
    shares = sorted({order[key] % jobs + 1 for key in missing})
    here = ("--launcher=local", "--slurm=", "--jobs=1")
    return [Task(partial(main, [*argv, *here, f"--shard={share}/{jobs}"], guard)) for share in shares]


def _train(study: Study, cells: Sequence[Cell], groups: Sequence[Group], pool: Pool, jobs: int) -> Outcome:
    """Tunes, then trains the runs with the chosen options."""
    tuning = tune(groups, pool.train, jobs) if groups else Outcome()
    if tuning.signum is not None:
        return tuning
    tuned, undecided = with_choices(study, cells, groups)
    if undecided:
        print(f"{_runs_are(undecided)} left out, as every trial of their options has failed or diverged.")
    _tell_edges(study, tuned)
    outcome = pool.train(tuned)
    return Outcome([*tuning.failed, *undecided, *outcome.failed], outcome.signum)


def _tell_edges(study: Study, tuned: Sequence[Cell]) -> None:
    """Says which choices are at an edge of their grid: before the runs, so that one can stop and widen it."""
    if edge := at_edge(study, [(cell.axes, cell.options) for cell in tuned]):
        print(f"Tuned to an edge of its grid: {edge}. Values beyond it in `tune` may be better.", flush=True)


def study_folder(output: Path, name: str, profile: str) -> Path:
    """Returns the folder for the runs of a study in a profile."""
    return output / (name if profile == "full" else f"{name}-{profile}")


def make_parser() -> CommandParser:
    """Makes the parser of this command."""
    parser = CommandParser(
        prog="lightning-fed study",
        description="Trains the missing runs of a study (all combinations of its axes, with each seed) in parallel.",
        epilog=help_on_keys(), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", help="YAML file of the study, or the name of a shipped study")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, each with one thread")
    parser.add_argument("--profile", default="full", metavar="NAME", help="profile of the study (default: %(default)s)")
    parser.add_argument("--only", metavar="AXIS=PATTERN,...", help="only these runs, as in `rule=Fed*,seed=0`")
    parser.add_argument("--shard", metavar="K/N", help="only the K-th of N shares of the runs, one for each machine")
    parser.add_argument(
        "--launcher", choices=("local", "slurm"), default="local",
        help="train in processes here, or in N tasks of a job on a SLURM cluster (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--slurm", default="", metavar="KEY=VALUE,...", help="options of a SLURM task, as in `time=240,partition=gpu`"
    )
    parser.add_argument("--dry_run", action="store_true", help="list the missing runs, but train nothing")
    parser.add_argument(
        "--output", type=Path, default=_RUNS, metavar="DIR",
        help="folder for the runs, in which the folder NAME-PROFILE is made (default: %(default)s)",
    )  # fmt: skip
    return parser


def _share(cells: list[Cell], shard: str | None, per: Sequence[str]) -> list[Cell]:
    """Returns a share of the runs; runs with equal values of the axes ``per`` are in the same share."""
    if shard is None:
        return cells
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    if match is None or int(match[1]) > int(match[2]):
        raise FederatedError(f"Expected `--shard` as `3/8`, the third of eight shares, got {shard!r}.")
    keys = _keys(cells, per)
    chosen = set(list(dict.fromkeys(keys))[int(match[1]) - 1 :: int(match[2])])
    return [cell for cell, key in zip(cells, keys, strict=True) if key in chosen]


def _keys(cells: Sequence[Cell], per: Sequence[str]) -> list[_Key]:
    """Returns for each run its values of the axes ``per``."""
    return [key_of({**cell.axes, "seed": cell.seed}, per) for cell in cells]


def telling_runs(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Yields a few runs that are enough to find the mistakes in the options of all.

    Every value of an axis and of a tuned option occurs in at least one of them. Runs that differ from the first run in
    only one value come first.
    """
    near = [cell for cell in cells if sum(value != cells[0].axes[axis] for axis, value in cell.axes.items()) < 2]
    seen: set[tuple[str, str]] = set()
    for cell in (*near, *cells):
        values = {(name, str(value)) for name, value in {**cell.axes, **cell.options}.items()}
        if not seen.issuperset(values) or cell is cells[0]:
            seen |= values
            yield cell


def _tell(outcome: Outcome, root: Path, options: argparse.Namespace) -> int:
    """Prints how the runs ended, and returns the exit code."""
    if outcome.failed:
        logs = [path for cell in outcome.failed if (path := root / cell.folder / LOG).exists()]
        count = counted(len(outcome.failed), "run")
        ended = f"{count} failed" if options.launcher == "local" else f"{_runs_are(outcome.failed)} not done"
        logs += [] if options.launcher == "local" else [root / TASK_LOGS]
        print(f"\n{ended}; start the command again to retry" + (", or see" if logs else "."))
        print(*(f"  {path}\n" for path in logs), sep="", end="")
    if outcome.signum is not None:
        print("\nStopped: the same command goes on from the last checkpoints.")
        return 128 + outcome.signum
    profile = "" if options.profile == "full" else f" --profile {options.profile}"
    runs = "" if options.output == _RUNS else f" {options.output}"
    print(f"\nto see the results:\n  lightning-fed report --study {options.file}{runs}{profile}")
    return 1 if outcome.failed else 0


def _time_needed(root: Path, cells: Sequence[Cell], missing: Sequence[Cell], jobs: int, guard: Guard) -> str:
    """Returns a sentence on how many rounds are missing, and about how long they take.

    If no run is done, it times a few rounds of the first run in a temporary folder.
    """
    if not missing:
        return "Nothing is missing."
    pairs = [(rounds_of(cell), rounds_trained(root / cell.folder)) for cell in missing]
    # A newest run with all rounds that is not done belongs to other options, so all rounds are still needed.
    rounds = sum(most - trained if trained < most else most for most, trained in pairs)
    each = _seconds(root, cells)
    if not each:
        print(f"Timing {_TRIED} rounds of {missing[0].label}.")
        with TemporaryDirectory() as folder:
            words = (*missing[0].words, f"--trainer.max_rounds={_TRIED}")
            short = replace(missing[0], words=words, watch=None, attack=None)  # only timed, not part of a trial
            Pool(Path(folder), 1, guard, say=lambda words: None).train([short])
            each = _seconds(Path(folder), [short])
            log = Path(folder) / short.folder / LOG
            said = (log.read_text() if log.exists() else "").strip().splitlines() or ["it printed nothing"]
    needed = f"{_runs_are(missing)} missing, {counted(rounds, 'round')}"
    if not each:
        return f"{needed}; the time they take is unknown, as the first run failed: {one_line(said[-1])}"
    left = timedelta(seconds=round(rounds * fmean(each) / min(jobs, len(missing))))
    return (
        f"{needed}: about {left} (h:mm:ss) with {counted(jobs, 'run')} at a time and {fmean(each):.3g} s a round, "
        "plus some seconds to start each run."
    )


def _runs_are(cells: Sequence[Cell]) -> str:
    return f"{counted(len(cells), 'run')} {are(len(cells))}"


def _seconds(root: Path, cells: Sequence[Cell]) -> list[float]:
    """Returns the mean seconds per round of each run that is done."""
    found = (done_run(root, cell) for cell in cells)
    columns = (read_metrics(run.metrics).get("time/round", {}) for run in found if run is not None)
    means = (mean_of([*column.values()]) for column in columns if column)
    return [each for each in means if 0 <= each < _LONGEST]


def rounds_of(cell: Cell) -> int:
    """Returns how many rounds a run should have by its arguments."""
    rounds, words = _BY_DEFAULT, iter(cell.words)
    for word in words:
        option, _, value = word.partition("=")
        given: dict[str, object] = {}
        if word == "--config":
            given = _trainer_of(next(words))
        elif option == "--trainer":
            given = yaml.load(value, Loader=PlainLoader) or {}
        elif (name := option.removeprefix("--trainer.")) in _NAMES:
            given = {name: yaml.load(value, Loader=PlainLoader)}
        rounds = next((int(str(given[name])) for name in _NAMES if name in given), rounds)
    return rounds


@cache
def _trainer_of(name: str) -> dict[str, object]:
    """Returns the trainer options in a configuration; read only once, as a study may have 100,000 runs of it."""
    config = read_yaml(find_config(name)) or {}
    return config.get("trainer") or {}
