"""Joins the results of one study from several folders, machines or times, by the fingerprints of its runs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_fed.lab.common import are
from lightning_fed.lab.report.tables import counted
from lightning_fed.lab.runner.record import RECORD
from lightning_fed.lab.studies.cells import combinations
from lightning_fed.lab.studies.results import StudyResults, StudyRun, Trial, as_text
from lightning_fed.lab.studies.study import Study, tuned_per

__all__ = ["in_order", "joined", "unknown_runs"]

_Key = tuple[str, ...]


def joined(study: Study, parts: Mapping[Path, StudyResults]) -> tuple[StudyResults, list[str]]:
    """Joins results of one study and profile, in the order of a single folder with all runs.

    If a combination and seed has several runs, the newest run folder counts, else the table of the first folder.

    Returns:
        The results, and sentences on runs that are in several folders or from another version of the study.
    """
    found: dict[_Key, list[tuple[Path, StudyRun]]] = {}
    for folder, part in parts.items():
        for run in part.runs:
            found.setdefault(_key(run), []).append((folder, run))
    order = [(*axes.values(), str(seed)) for axes in combinations(study) for seed in study.seeds]
    runs, taken, others, differing = [], Counter[str](), Counter[str](), list[str]()
    for key in (key for key in order if key in found):
        folder, run = max(found[key], key=lambda one: one[1].created)
        runs.append(run)
        same = [(place, one) for place, one in found[key] if one.fingerprint == run.fingerprint]
        taken[str(folder)] += len(same) > 1
        others.update(str(place) for place, one in found[key] if one.fingerprint != run.fingerprint)
        if wrong := [str(place) for place, one in same if _numbers(one, study) != _numbers(run, study)]:
            differing.append(f"{', '.join(key[:-1])}, seed {run.seed} ({', '.join([str(folder), *wrong])})")
    others.update(str(place) for key, several in found.items() if key not in order for place, _ in several)
    notes = [f"{place} holds {_of_another_version(count)}" for place, count in others.items()]
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


def unknown_runs(root: Path, results: StudyResults) -> str:
    """Says how many finished runs below a folder are from another version of the study; empty if there are none."""
    known = {(*_key(run), *run.chosen.items()) for run in results.runs}
    known |= {(*_key(trial), *trial.options.items()) for trial in results.trials}
    unknown = sum(1 for _ in root.rglob(RECORD)) - len(known)
    return f"{root} holds {_of_another_version(unknown)}" if unknown > 0 else ""


def _of_another_version(count: int) -> str:
    verb = are(count)
    return f"{counted(count, 'run')} of another version of the study, with unknown fingerprints, which {verb} left out."


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


def _numbers(run: StudyRun, study: Study) -> dict[str, dict[int, str]]:
    """Returns the reported values of a run as text, as tables have them."""
    reported = {name: run.curves.get(name, {}) for name in study.report.metric}
    return {name: {at: as_text(value) for at, value in curve.items()} for name, curve in reported.items()}
