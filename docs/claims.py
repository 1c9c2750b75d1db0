"""Judges the papers' claims by the protocol, and writes their tables and the words of the pages.

docs/results/claims.csv names for each claim the cell of a study and the one it is compared with; the tables and curves
are there too. ``python docs/forest_figure.py`` writes docs/results/claims.md, the table of index.md, and what the line
"Verdict" of a page counts.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from lightning_fed.lab.runner.file import load_study
from lightning_fed.lab.studies.comparison import PairedDifference, chance, is_level, paired_difference, verdict_on
from lightning_fed.lab.studies.results import StudyRun, read_results, value_of_run
from lightning_fed.lab.studies.table import seeds_of_rates
from lightning_fed.runs.statistics import known_goal

__all__ = ["Claim", "RESULTS", "every_claim", "of_page", "signed", "summary", "table", "write_tables"]

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
HEADER = [
    "| claim | ours, 95 % CI | here | paper | power | verdict | page |",
    "| --- | ---: | --- | ---: | ---: | --- | --- |",
]
OF_PAGES = ["| claim | in our runs | about the paper | page |", "| --- | --- | --- | --- |"]
OTHER = "of other data"  # its gain is printed, its level says nothing of ours
OURS = "(our question)"  # how a claim begins that no paper makes
CLAIMS = {
    "[rules](gma/rules.md)": "GMA, Table 2: the mask gains on the clients' own distribution",
    "[server methods](server-methods-fashionmnist.md)": "the same in older runs; FedAdam and CGW there",
    "[new schemes](gma/new-schemes.md)": "GMA, Table 3: it gains on colours and angles of no client",
    "[participation](gma/participation.md)": "GMA, Tables 4 and 5: it gains on clients outside a single round",
    "[momentum](gma/momentum.md)": "GMA, Table 6: it gains under client momentum",
    "[clients](gma/clients-and-epochs.md)": "GMA, Table 8: it gains most with many clients",
    "[epochs](gma/clients-and-epochs.md)": "GMA, Table 9: it gains most with many local epochs",
    "[learning rates](gma/learning-rates.md)": "GMA, Table 10: it gains at the paper's rates",
    "[convex](gma/convex.md)": "GMA, appendix E: it gains on a convex objective",
    "[train and test](gma/train-test.md)": "GMA, Figure 3a: it gains on new colours, not in training",
    "[threshold](gma/threshold.md)": "GMA, Figure 3d: a threshold of 0.4 is better than none",
    "[agreement](gma/agreement.md)": "GMA, Figure 4: unlike clients agree less",
    "[binary mask](gma/binary-mask.md)": "GMA, Figure 5: the binary mask ends above FedAvg",
    "[membership](gma/membership.md)": "GMA, appendix F: fewer members are told under the mask",
    "[why](gma/why.md)": "GMA, section 1: its direction gains under label skew",
    "[when](mask/when.md)": "it gains on data made for it: features of few clients, noise, flips",
    "[colours](fedgma/colours.md)": "FedGMA, Figure 2: it gains on new colours",
    "[CGW](cgw/alpha.md)": "CGW, Tables 1 and 2: the correction gains",
    "[gradients](fedga/gradients.md)": "FedGA, Table 1, Figures 8 to 10: accuracy, loss, gradients",
    "[client algorithms](client-algorithms-emnist.md)": "the same in older runs",
    "[β](fedga/beta-and-steps.md)": "FedGA, Figure 3: accuracy rises with β",
    "[steps](fedga/beta-and-steps.md)": "FedGA, Figure 4: 40 local steps are worse than 10",
}


@dataclass(frozen=True)
class Claim:
    """A row of claims.csv, and what the runs say of it."""

    row: dict[str, str]
    difference: PairedDifference | None = None  # in the unit of the metric
    gain: float | None = None  # that the paper has
    here: str = ""  # the word on our runs
    verdict: str = ""  # that on the paper's claim; of a question of ours it is the same

    @property
    def scale(self) -> int:
        """100 of a share, which is printed in points."""
        return 100 if any(word in self.row["metric"] for word in ("acc", "agreement")) else 1


def axes_of(text: str) -> dict[str, str]:
    """Reads ``data=MNIST;split=IID``."""
    return dict(part.split("=", 1) for part in text.split(";"))


@cache
def runs_of(folder: str) -> tuple[StudyRun, ...]:
    """Reads the runs of a folder, or the attacks on them."""
    attacks = RESULTS / folder / "attack.csv"
    if not attacks.is_file():
        return read_results(RESULTS / folder).runs
    found = []
    for row in csv.DictReader(attacks.open()):
        axes = {name: row[name] for name in ("rule", "attack")}
        found.append(StudyRun(axes, int(row["seed"]), "", 0, {}, {"accuracy": {0: float(row["accuracy"])}}))
    return tuple(found)


def value(run: StudyRun, metric: str, statistic: str) -> float:
    """Returns a statistic of a run: as reports have it, a difference of two, or the value after some communication."""
    curve = run.curves[metric]
    if statistic.startswith("communication "):
        sent = run.curves["comm/rounds"]
        return next(curve[at] for at in curve if sent.get(at) == float(statistic.split()[1]))
    first, _, second = statistic.partition(" less ")
    return value_of_run(curve, first, metric) - (value_of_run(curve, second, metric) if second else 0.0)


def cell(folder: str, axes: Mapping[str, str]) -> list[StudyRun]:
    """Returns the runs of a cell in the order of their seeds."""
    found = [run for run in runs_of(folder) if axes.items() <= run.axes.items()]
    assert found, (folder, axes)
    return sorted(found, key=lambda run: run.seed)


def published(folder: str, axes: Mapping[str, str], metric: str, statistic: str) -> float | None:
    """Returns the paper's figure of a cell, the mean of its rows; None where there is none."""
    path = RESULTS / folder / "table.csv"
    if not path.is_file():
        return None
    first, _, second = statistic.partition(" less ")
    means = [
        [float(row["published"]) for row in csv.DictReader(path.open())
         if row["published"] and {**axes, "metric": metric, "statistic": name}.items() <= row.items()]
        for name in (first, second)
    ]  # fmt: skip
    return fmean(means[0]) - (fmean(means[1]) if second else 0.0) if means[0] else None


def pooled(row: dict[str, str], axes: Mapping[str, str]) -> Claim:
    """Reads a pooled row of a study's table."""
    wanted = {**axes, "metric": row["metric"], "statistic": row["statistic"]}
    rows = csv.DictReader((RESULTS / row["folder"] / "table.csv").open())
    found = next(one for one in rows if wanted.items() <= one.items())
    numbers = [float(found[name]) for name in ("difference", "t_low", "t_high", "p", "std_difference", "claimed")]
    difference = PairedDifference(int(found["seeds"]), numbers[0], (numbers[1], numbers[2]), (0, 0), *numbers[3:5])
    return Claim(row, difference, None if row["published"] else numbers[5], found["here"], found["verdict"])


def judged(row: dict[str, str]) -> Claim:
    """Compares the two cells of a claim by the protocol."""
    folder, metric, statistic = row["folder"], row["metric"], row["statistic"]
    ours = axes_of(row["ours"])
    if any(name.endswith(" pooled") for name in ours.values()):
        return pooled(row, ours)
    sides = [cell(folder, axes) for axes in (ours, ours | axes_of(row["baseline"]))]
    values = [[value(run, metric, statistic) for run in runs] for runs in sides]
    difference = paired_difference(values[0], values[1])
    if row["published"][:1].isdecimal():
        papers: list[float | None] = [float(one) / 100 for one in row["published"].split("-")]
    else:
        papers = [published(folder, axes, metric, statistic) for axes in (ours, ours | axes_of(row["baseline"]))]
    gain = None if papers[0] is None or papers[1] is None else papers[0] - papers[1]
    # Where neither paper nor study states a gain, any counts.
    least = 1e-12 if row["sign"] in "+-" else float(row["sign"])
    claimed = gain if gain is not None else math.copysign(least, -1 if row["sign"] == "-" else 1)
    failed, goal = None, None
    if not row["claim"].startswith(OURS):
        goal = known_goal(metric if runs_of(folder)[0].rounds else f"attack/{metric}")
        scale = 1.0 if "acc" in metric or "agreement" in metric else abs(fmean(values[1]))
        curves = [[run.curves[metric] for run in runs] for runs in sides]
        known = papers[1] is not None and row["published"] != OTHER
        apart = fmean(values[1]) - (papers[1] or 0.0) if known else None
        stated = abs(claimed) if abs(claimed) > least or row["sign"] not in "+-" else 0.01 * scale
        failed = [] if " less " not in statistic and is_level(apart, stated, scale, curves) else ["baseline"]
        failed += ["rates"] if has_chosen(folder, [run for runs in sides for run in runs]) else []
    learned = not row["gate"] or fmean(values[1]) >= float(row["gate"])
    better = -1 if (goal or ("min" if row["sign"].startswith("-") else "max")) == "min" else 1
    verdict = verdict_on(difference, claimed, better, learned, failed)
    assert verdict, row["claim"]
    return Claim(row, difference, gain, verdict.here, verdict.word)


def has_chosen(folder: str, runs: Iterable[StudyRun]) -> bool:
    """Says whether a seed of these runs has chosen their rates."""
    attacks = (RESULTS / folder / "attack.csv").is_file()
    return not attacks and bool(seeds_of_rates(load_study(read_results(RESULTS / folder).name), runs))


def claims() -> Iterator[Claim]:
    """Yields all rows of claims.csv."""
    for row in csv.DictReader((RESULTS / "claims.csv").open()):
        yield judged(row) if row["folder"] else Claim(row, verdict="undecided (older)" if row["ours"] else "not run")


def signed(number: float, digits: int) -> str:
    """Prints a number with its sign, a true minus."""
    return f"{number:+.{digits}f}".replace("-", "−")


def interval(claim: Claim) -> str:
    """Prints a difference and its interval, in points of a share."""
    if claim.difference is None:
        return claim.row["ours"]
    numbers = [claim.scale * number for number in (claim.difference.mean, *claim.difference.t_interval)]
    wide = numbers[2] - numbers[1]
    digits = (1 if wide > 1.5 else 2) if claim.scale == 100 else (1 if wide > 5 else 2 if wide > 0.2 else 3)
    mean, low, high = (signed(number, digits) for number in numbers)
    return f"{mean} ({low} to {high})"


def table() -> str:
    """Returns the table of all claims."""
    lines = list(HEADER)
    for claim in every_claim():
        row = claim.row
        if row["paper"]:
            lines.append(f"| {row['paper']} | | | | | | |")
        paper = row["published"] if claim.gain is None else signed(100 * claim.gain, 2)
        power = "" if claim.gain is None or not claim.difference else f"{chance(claim.gain, claim.difference):.2f}"
        word = claim.verdict if claim.verdict != claim.here else ""
        cells = (row["claim"], interval(claim), claim.here, paper, power, word, row["page"])
        lines.append(f"| {' | '.join(cells)} |")
    return re.sub(r"\|  (?=\|)", "| ", "\n".join(lines)) + "\n"


@cache
def every_claim() -> tuple[Claim, ...]:
    """Returns all rows, judged."""
    return tuple(claims())


def counted(words: Iterable[str]) -> str:
    """Counts words: ``2 contradicted, 1 undecided (baseline)``."""
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())


def of_page(link: str) -> tuple[str, str]:
    """Counts the words of the claims of a page, which its link or its address below docs/results names.

    First those on our runs, then those on the paper's claim.
    """
    ours = [claim for claim in every_claim() if claim.row["page"].endswith(link)]
    papers = (claim.verdict for claim in ours if claim.verdict != claim.here)
    return counted(claim.here for claim in ours if claim.here), counted(papers)


def summary() -> str:
    """Returns the table of the index: a row for each page, with the words of its claims."""
    links = dict.fromkeys(claim.row["page"] for claim in every_claim() if claim.row["page"])
    lines = [f"| {CLAIMS[link]} | {' | '.join(of_page(link))} | {link} |" for link in links]
    return "\n".join([*OF_PAGES, *lines]).replace("|  |", "| |") + "\n"


def written(page: str, header: str) -> tuple[str, str, str]:
    """Returns a page before a table, the table, and what follows."""
    before, rest = (RESULTS / page).read_text().split(header, 1)
    body, _, after = rest.partition("\n\n")
    return before, header + body + "\n", after


def write_words() -> None:
    """Writes into the line of its verdict what the claims of a page say; a sentence after it stays."""
    for address in {claim.row["page"].partition("(")[2].strip(")") for claim in every_claim()} - {""}:
        path = RESULTS / address
        here, papers = of_page(f"({address})")
        words = "; ".join([f"in our runs {here}"] * bool(here) + [f"about the paper {papers}"] * bool(papers))
        cell = re.compile(r"^(\| \*\*Verdict\*\* \| )[^:|]*(:?)", re.MULTILINE)
        path.write_text(cell.sub(lambda match, words=words: f"{match[1]}{words}{match[2] or ' '}", path.read_text()))


def write_tables() -> None:
    """Writes the tables of claims, and the words of the pages."""
    for page, header, text in (("claims.md", HEADER[0], table()), ("index.md", OF_PAGES[0], summary())):
        before, _, after = written(page, header)
        (RESULTS / page).write_text(before + text + "\n" + after)
    write_words()
