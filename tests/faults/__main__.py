"""Runs all campaigns and writes their counts into docs/reliability.md.

python -m tests.faults [--only configs damage] [--trials 20] [--seed 0] [--write-docs]
"""

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path

from tests.faults.counts import Counts

# Campaigns, each a file here with `run(trials, seed) -> Counts` and `TRIALS`, the number that the whole run takes.
CAMPAIGNS = {
    "kills": "killed at file operations and at random moments, then resumed",
    "damage": "checkpoints, client states, tables and run.json damaged or missing",
    "disks": "writes that fail (no space, input/output error, read-only)",
    "hooks": "hooks of a user that write, log our columns, add layers, raise or draw",
    "configs": "mutated configs, arguments and environments",
    "studies": "mutated files of studies and words of the command",
    "folders": "files of a sent study, of its runs and of data damaged: journals, aliases, pipes, half lines, records",
    "ranks": "processes of a run killed, stopped or raising",
}
HEAD = (
    "| campaign | tried | lost | tracebacks | hangs | wrong successes | seconds |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def row(name: str, counts: Counts, seconds: float) -> str:
    """Returns a campaign's line of the table."""
    figures = (counts.of[outcome] for outcome in ("lost", "traceback", "hang", "wrong success"))
    return f"| {name}: {CAMPAIGNS[name]} | {counts.tried:,} | {' | '.join(map(str, figures))} | {seconds:,.0f} |"


def write(found: dict[str, str]) -> None:
    """Writes lines into the documentation's table, which keeps those of campaigns that have not run now."""
    page = Path(__file__).parents[2] / "docs" / "reliability.md"
    before, _, rest = page.read_text().partition(BEGIN)
    former, _, after = rest.partition(END)
    kept = {line[2:].partition(":")[0]: line for line in former.splitlines() if line.startswith("| ")}
    lines = [line for name in CAMPAIGNS if (line := found.get(name) or kept.get(name)) is not None]
    page.write_text("\n".join([before + BEGIN, "", *HEAD, *lines, "", END]) + after)


def main() -> int:
    """Runs what was asked for; the exit status says whether anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CAMPAIGNS), default=list(CAMPAIGNS))
    parser.add_argument("--trials", type=int, help="trials of each campaign instead of its own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/reliability.md")
    given = parser.parse_args()
    wrong, began = 0, time.perf_counter()
    for name in given.only:
        campaign = importlib.import_module(f"tests.faults.{name}")
        started = time.perf_counter()
        try:
            counts = campaign.run(given.trials or campaign.TRIALS, given.seed)
        except Exception:  # the others are to be counted all the same
            traceback.print_exc()
            wrong += 1
            continue
        for trial in counts.wrong:
            print(f"  {trial}", flush=True)
        line = row(name, counts, time.perf_counter() - started)
        print(line, flush=True)
        wrong += len(counts.wrong)
        if given.write_docs:
            write({name: line})
    print(f"{(time.perf_counter() - began) / 60:.0f} minutes in all, seed {given.seed}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
