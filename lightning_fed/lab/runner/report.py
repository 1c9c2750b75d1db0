"""The report on a study, from its runs or from tables of theirs: ``lightning-fed report --study FILE``."""

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_fed.core import one_line
from lightning_fed.core.files import write_atomically
from lightning_fed.errors import expect
from lightning_fed.lab.common import are, expect_known
from lightning_fed.lab.report.plots import KINDS
from lightning_fed.lab.report.runs import COSTS, MeasuredRun, columns_of, counted
from lightning_fed.lab.runner.command import study_folder
from lightning_fed.lab.runner.file import load_study
from lightning_fed.lab.runner.record import RECORD, measured_run
from lightning_fed.lab.runner.tuning import groups_of, with_choices
from lightning_fed.lab.studies import blocks
from lightning_fed.lab.studies.cells import Cell, cells_of, combinations
from lightning_fed.lab.studies.comparison import equal_losses
from lightning_fed.lab.studies.published import read_published
from lightning_fed.lab.studies.results import (
    BESIDE,
    StudyResults,
    StudyRun,
    Trial,
    read_results,
    table_file,
    write_results,
)
from lightning_fed.lab.studies.study import Report, Study, name_of, reported_axes, tuned_per
from lightning_fed.lab.studies.table import study_table
from lightning_fed.runs.statistics import known_goal, run_statistic

__all__ = ["collect", "in_order", "joined", "report_study"]

_Key = tuple[str, ...]
_FILES = {"md": "table.md", "csv": "table.csv", "tex": "table.tex", "html": "report.html"}
_FILES |= {kind: f"curves.{kind}" for kind in KINDS}
_BY_DEFAULT = ("md", "csv", "tex", "png")


def report_study(options: argparse.Namespace) -> None:
    """Writes the tables and pictures of a study, and prints the first table."""
    # Published figures may name values of axes that the profile leaves out, so they need the whole file.
    whole = load_study(options.study)
    expect(len(options.runs) < 2, f"Expected one folder of runs with `--study`, got {len(options.runs)}.")
    options.runs = options.runs[0] if options.runs else Path("runs/studies")
    study, results, folder = _from_tables(options) if options.source else _from_runs(options)
    if options.format == "html" and not options.source:
        folders = _run_folders(study, options)
        runs = (replace(run, folder=folders.get(run.fingerprint)) for run in results.runs)
        results = replace(results, runs=tuple(runs))
    recorded = {name: goal for run in results.runs for name, goal in run.goals.items()}
    study = replace(study, report=study.report.with_goals(recorded))
    published = read_published(study.report.published, reported_axes(whole)) if study.report.published else None
    table = study_table(study, results, published)
    tables = blocks.study_blocks(study, results, table, published.table if published else "", options.best)
    kinds = [options.format] if options.format else _BY_DEFAULT
    files = {_FILES[kind]: blocks.drawn(kind, study, results, table, tables, options.width) for kind in kinds}
    for name, content in files.items():
        write_atomically(folder / name, content, "--output")
    if "table.md" in files:
        print(files["table.md"].decode())
    print(one_line("written: " + ", ".join(str(folder / name) for name in files)))


def _from_runs(options: argparse.Namespace) -> tuple[Study, StudyResults, Path]:
    profile = options.profile or "full"
    study = load_study(options.study, profile)
    root = study_folder(options.runs, study.name, profile)
    folder = options.output or root
    write_results(collect(study, profile, root)[0], folder)
    # Drawn from the written files, so that who has only these files gets the same picture.
    return study, read_results(folder), folder


def _from_tables(options: argparse.Namespace) -> tuple[Study, StudyResults, Path]:
    folders = list(dict.fromkeys(options.source))
    if len(folders) > 1 or (not _has_tables(folders[0]) and _has_runs(folders[0])):
        return _from_folders(options, folders)
    results = read_results(folders[0])
    study = load_study(options.study, results.profile)
    given = {"--profile": (options.profile or results.profile, results.profile), "--study": (study.name, results.name)}
    for option, (name, held) in given.items():
        expect(name == held, f"Expected `{option}` to be {held}, as in {folders[0]}, got {name!r}.")
    return study, results, options.output or folders[0]


def _from_folders(options: argparse.Namespace, folders: Sequence[Path]) -> tuple[Study, StudyResults, Path]:
    """Joins the results of the study in several folders, and prints what is left out."""
    held = (read_results(folder).profile for folder in folders if _has_tables(folder))
    profile = options.profile or next(held, "full")
    study = load_study(options.study, profile)
    parts, notes = dict[Path, StudyResults](), list[str]()
    for folder in folders:
        results, note = _part(study, profile, folder)
        notes += [note] if note else []
        if results is not None and results.runs:
            parts[folder] = results
        elif not note:
            notes.append(f"{folder} has no results of the study {study.name} (profile {profile}).")
    results, more = joined(study, parts) if parts else (StudyResults(study.name, profile, ()), [])
    print(*(f"{one_line(note)}\n" for note in (*notes, *more)), sep="", end="")
    output = options.output or study_folder(options.runs, study.name, profile)
    write_results(results, output)
    return study, read_results(output), output


def _has_tables(folder: Path) -> bool:
    return table_file(folder, "results").is_file()


def _has_runs(folder: Path) -> bool:
    return next(folder.rglob(RECORD), None) is not None


def _part(study: Study, profile: str, folder: Path) -> tuple[StudyResults | None, str]:
    """Returns the results of a study in a folder, from runs or else from tables, and a sentence on left-out runs."""
    root = study_folder(folder, study.name, profile)
    root = root if root.is_dir() else folder
    if _has_runs(root):
        results = collect(study, profile, root)[0]
        known = {(*_key(run), *run.chosen.items()) for run in results.runs}
        known |= {(*_key(trial), *trial.options.items()) for trial in results.trials}
        unknown = sum(1 for _ in root.rglob(RECORD)) - len(known)
        return results, _of_another_version(root, unknown) if unknown > 0 else ""
    if not _has_tables(root):
        return None, ""
    results = read_results(root)
    return (results if (results.name, results.profile) == (study.name, profile) else None), ""


def _run_folders(study: Study, options: argparse.Namespace) -> dict[str, MeasuredRun]:
    """Returns the finished runs of a study by fingerprint, with all their measurements."""
    root, cells = study_folder(options.runs, study.name, options.profile or "full"), cells_of(study)
    tuned, _ = with_choices(study, cells, groups_of(study, cells, root, writes=False))
    return {run.fingerprint: run for cell in tuned if (run := measured_run(root, cell)) and run.columns}


def collect(study: Study, profile: str, root: Path) -> tuple[StudyResults, list[Cell]]:
    """Reads the finished runs of a study in a profile, with the reported columns, and returns the missing runs too."""
    cells = cells_of(study)
    groups = groups_of(study, cells, root, writes=False)
    tuned, undecided = with_choices(study, cells, groups)
    runs = {cell.folder: run for cell in tuned if (run := _read(root, cell, study.report)) is not None}
    missing = [cell for cell in tuned if cell.folder not in runs]
    # A sampler, or two stages, may propose the same options twice. This is one run, listed under the later stage.
    tried: dict[str, tuple[Cell, int]] = {}
    for group in groups:
        for cell in (cell for attempt in group.asked() for cell in attempt.cells):
            tried[cell.folder] = cell, group.stage
    trials = [trial for cell, at in tried.values() if (trial := _trial(root, cell, study, at)) is not None]
    kept, report = {name for run in runs.values() for name in run.curves}, study.report
    for key, wanted, there in (
        ("metric", ", ".join(report.metric), kept & {*report.metric}),
        ("x", report.x, kept.issuperset(columns_of(report.x))),
        ("statistic", ", ".join(equal_losses(report)), kept.issuperset(equal_losses(report))),
    ):
        if runs and not there:
            found = (one for cell in tuned if (one := measured_run(root, cell)))
            columns = {
                "round",
                *(name for name in COSTS if COSTS[name].columns),
                *(name for one in found for name in one.columns),
            }
            expect_known(f"report.{key}", [wanted], sorted(columns - {wanted}), "a column that was measured")
    return StudyResults(study.name, profile, tuple(runs.values()), in_order(study, trials)), [*missing, *undecided]


def _read(root: Path, cell: Cell, report: Report) -> StudyRun | None:
    if (run := measured_run(root, cell)) is None:
        return None
    last = max((at for column in run.columns.values() for at in column), default=0)
    kept = [name for name in (*report.metric, *columns_of(report.x), *equal_losses(report)) if name in run.columns]
    curves, report = {name: run.columns[name] for name in kept}, report.with_goals(run.goals)
    goals = {name: goal for name in kept if (goal := report.goal_in(name)) and goal != known_goal(name)}
    return StudyRun(dict(cell.axes), cell.seed, run.fingerprint, last, _as_words(cell), curves, goals, run.created)


def _trial(root: Path, cell: Cell, study: Study, stage: int) -> Trial | None:
    """Reads a tuning run: the value that decides and, for information only, the best value on the test set."""
    if (run := measured_run(root, cell)) is None:
        return None
    tune = study.tune
    wanted, report = {f"{tune.metric} {tune.statistic}": (tune.metric, tune.statistic, tune.goal)}, study.report
    shown = ((name, report.with_goals(run.goals).goal_in(name)) for name in report.metric)
    wanted |= {name + BESIDE: (name, "best", goal) for name, goal in shown if goal}
    values = {
        title: run_statistic(run.columns[name], statistic, name, goal)
        for title, (name, statistic, goal) in wanted.items()
        if name in run.columns
    }
    return Trial(dict(cell.axes), cell.seed, _as_words(cell), values, stage)


def _as_words(cell: Cell) -> dict[str, str]:
    return {option: name_of(value) for option, value in cell.options.items()}


def joined(study: Study, parts: Mapping[Path, StudyResults]) -> tuple[StudyResults, list[str]]:
    """Joins results of one study and profile, in the order of a single folder with all runs.

    If a combination and seed has several runs, the newest run folder counts, else the table of the first folder. Also
    returns sentences on runs that are in several folders or from another version of the study.
    """
    found: dict[_Key, list[tuple[Path, StudyRun]]] = {}
    for folder, part in parts.items():
        for run in part.runs:
            found.setdefault(_key(run), []).append((folder, run))
    order = [(*axes.values(), str(seed)) for axes in combinations(study) for seed in study.seeds]
    metrics, runs, taken, others, differing = study.report.metric, [], Counter[str](), Counter[str](), list[str]()
    for key in (key for key in order if key in found):
        folder, run = max(found[key], key=lambda one: one[1].created)
        runs.append(run)
        same = [(place, one) for place, one in found[key] if one.fingerprint == run.fingerprint]
        taken[str(folder)] += len(same) > 1
        others.update(str(place) for place, one in found[key] if one.fingerprint != run.fingerprint)
        if wrong := [str(place) for place, one in same if one.shown(metrics) != run.shown(metrics)]:
            differing.append(f"{', '.join(key[:-1])}, seed {run.seed} ({', '.join([str(folder), *wrong])})")
    others.update(str(place) for key, several in found.items() if key not in order for place, _ in several)
    notes = [_of_another_version(place, count) for place, count in others.items()]
    notes += _on_several(taken, differing)
    first = next(iter(parts.values()))
    trials = dict[tuple[object, ...], Trial]()
    for part in parts.values():
        for trial in part.trials:
            alike = (*_key(trial), *trial.options.items())
            trials[alike] = max(trials.get(alike, trial), trial, key=lambda one: one.stage)
    return replace(first, runs=tuple(runs), trials=in_order(study, trials.values())), notes


def _on_several(taken: Counter[str], differing: Sequence[str]) -> list[str]:
    """Says how many runs are in several folders, which folder counts, and which runs differ between folders."""
    notes = []
    if twice := taken.total():
        from_where = ", ".join(f"{count} of {place}" for place, count in taken.items() if count)
        notes.append(
            f"{counted(twice, 'run')} {are(twice)} in several folders with the same fingerprint: "
            f"the newest finished one counts, {from_where}."
        )
    if differing:
        notes.append(
            f"For {counted(len(differing), 'run')} the results differ between folders, although the fingerprint is "
            f"the same: {'; '.join(differing)}."
        )
    return notes


def _of_another_version(place: object, count: int) -> str:
    runs = f"{counted(count, 'run')} of another version of the study, with unknown fingerprints"
    return f"{place} holds {runs}, which {are(count)} left out."


def in_order(study: Study, trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Sorts trials by choice, then by stage; trials of combinations that the study does not have are left out."""
    per = tuned_per(study)
    order = list(dict.fromkeys(tuple(str(axes[axis]) for axis in per) for axes in combinations(study)))
    known = [trial for trial in trials if _choice(trial, per) in order]
    return tuple(sorted(known, key=lambda trial: (order.index(_choice(trial, per)), trial.stage)))


def _choice(trial: Trial, per: list[str]) -> _Key:
    return tuple(trial.axes.get(axis, "") for axis in per)


def _key(run: StudyRun | Trial) -> _Key:
    return (*run.axes.values(), str(run.seed))
