"""Runs rows: starts both sides of each, lets them train by turns, and says what came out."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contestants.choice import missing, take_part
from benchmarks.contestants.contestant import Contestant
from benchmarks.race.referee import Handle, ProcessHandle, ThreadHandle, race
from benchmarks.race.turns import ContestantFailed
from benchmarks.race.worker import child_command
from benchmarks.results import median_figures, milliseconds
from benchmarks.tables import Row
from benchmarks.workloads import WORKS

__all__ = ["run_row", "run_rows", "sentence"]

_IN_THIS_PROCESS = ("plain", "plain_fast", "plain_tight", "framework")


def start(row: Row, side: Contestant, rounds: int, logs: Path) -> Handle:
    """Starts a side: in this process, unless it needs several or a peer's own."""
    name = f"{row.key}, {side.text}"
    if side.loop in _IN_THIS_PROCESS and side.devices == 1:
        return ThreadHandle(name, partial(take_part, key=row.work, side=side, rounds=rounds), side.device)
    return ProcessHandle(name, partial(child_command, row.work, side, rounds), logs / f"{row.key}.log")


def run_row(row: Row, repeats: int | None, logs: Path) -> dict[str, Any]:
    """Runs one row.

    Args:
        row: The row.
        repeats: Repeats of both sides; as many as the work says if None.
        logs: Folder for what processes write.

    Returns:
        Its figures; or why there are none, as ``skipped`` or ``failed``.
    """
    reason = missing(row.side) or missing(row.against)
    if reason is not None:
        return {"skipped": reason}
    work, handles = WORKS[row.work], list[Handle]()
    repeats = repeats or work.repeats
    rounds = (repeats + 1) * work.rounds
    try:
        for side in (row.side, row.against):
            handles.append(start(row, side, rounds, logs))
            handles[-1].wait_until_ready()
        return median_figures(race(handles[0], handles[1], repeats, work.rounds))
    except ContestantFailed as error:
        return {"failed": str(error)}
    finally:
        for handle in handles:
            handle.close()


def run_rows(rows: Sequence[Row], repeats: int | None, logs: Path) -> dict[str, dict[str, Any]]:
    """Runs rows one after another and prints each."""
    results = {}
    for row in rows:
        figures = run_row(row, repeats, logs)
        texts = {"work": WORKS[row.work].text, "side": row.side.text, "against": row.against.text, "note": row.note}
        results[row.key] = {**texts, "aim": row.aim, **figures}
        print(sentence(row.key, results[row.key]), flush=True)
    return results


def sentence(key: str, result: dict[str, Any]) -> str:
    """Says in one line what came out."""
    for word in ("skipped", "failed"):
        if word in result:
            return f"{key}: {word}: {result[word]}"
    aim = "" if result["aim"] is None else f", aim {result['aim']:.2f}"
    return (
        f"{key}: {result['side']} {milliseconds(result['seconds'])}, {result['against']} "
        f"{milliseconds(result['against_seconds'])} a round: {result['ratio']:.3f} x (from "
        f"{result['ratio_min']:.3f} to {result['ratio_max']:.3f} over {len(result['ratios'])} repeats{aim})"
    )
