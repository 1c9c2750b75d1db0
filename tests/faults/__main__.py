"""Runs all campaigns and writes their counts into docs/reliability.md.

python -m tests.faults [--only configs damage] [--trials 20] [--seed 0] [--write-docs]
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

from tests.faults.counts import Counts

# Campaigns, each a file here with `run(trials, seed) -> Counts` and `TRIALS`, the number that the whole run takes.
CAMPAIGNS = {
    "kills": "killed at file operations and at random moments, then resumed",
    "damage": "checkpoints, client states, tables and run.json damaged or missing",
    "disks": "writes that fail (no space, input/output error, read-only)",
    "configs": "mutated configs, arguments and environments",
    "ranks": "processes of a run killed, stopped or raising",
}
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def table(found: dict[str, Counts]) -> str:
    """Returns the counts as a table."""
    lines = [
        "| campaign | tried | lost | tracebacks | hangs | wrong successes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, counts in found.items():
        of = counts.of
        lines.append(
            f"| {name}: {CAMPAIGNS[name]} | {counts.tried:,} | {of['lost']} | {of['traceback']} | {of['hang']} | "
            f"{of['wrong success']} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Runs what was asked for; the exit status says whether anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CAMPAIGNS), default=list(CAMPAIGNS))
    parser.add_argument("--trials", type=int, help="trials of each campaign instead of its own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/reliability.md")
    given = parser.parse_args()
    found = {}
    for name in given.only:
        campaign = importlib.import_module(f"tests.faults.{name}")
        started = time.perf_counter()
        found[name] = campaign.run(given.trials or campaign.TRIALS, given.seed)
        print(f"{name}: {found[name].of} in {time.perf_counter() - started:.0f} s", flush=True)
        for line in found[name].wrong:
            print(f"  {line}", flush=True)
    print(table(found))
    if given.write_docs:
        page = Path(__file__).parents[2] / "docs" / "reliability.md"
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}")
    return int(any(counts.wrong for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
