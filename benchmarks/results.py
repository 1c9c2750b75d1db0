"""Figures of rows: medians of ratios, written as JSON."""

import json
import statistics
from pathlib import Path
from typing import Any

__all__ = ["median_figures", "milliseconds", "write_json"]


def median_figures(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Compares pairs of seconds.

    Args:
        pairs: Seconds of the side that is measured and of the one that it is measured against, for each repeat.

    Returns:
        Medians of both in seconds, the median of the ratios, and all ratios in order of the repeats.
    """
    ratios = [ours / theirs for ours, theirs in pairs]
    return {
        "seconds": statistics.median(ours for ours, _ in pairs),
        "against_seconds": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratios": ratios,
    }


def milliseconds(seconds: float) -> str:
    """Writes a time for a table."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:.{1 if seconds < 0.1 else 0}f} ms"


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Writes results, replacing those of a former run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
