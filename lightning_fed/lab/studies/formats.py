"""Tables of text as Markdown, LaTeX and comma-separated values."""

import re
from collections.abc import Sequence

from lightning_fed.lab.report.text import csv_text, no_formula, one_line
from lightning_fed.lab.studies.blocks import Block

__all__ = ["as_csv", "as_latex", "as_markdown"]

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$", ">": "$>$", "|": r"\textbar{}",
}  # fmt: skip


def as_markdown(text: Sequence[str], blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """Writes a title, sentences, tables and notes as Markdown."""
    parts = [f"# {_markdown(text[0])}", *map(_markdown, text[1:])]
    for block in blocks:
        rule = ["---"] * block.labels + ["---:"] * (len(block.lines[0]) - block.labels)
        head, *rows = ([_markdown(cell) for cell in line] for line in block.lines)
        table = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))
        parts += [f"## {_markdown(block.title)}", table, *([_markdown(block.note)] if block.note else [])]
    return "\n\n".join([*parts, *map(_markdown, notes)]) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*<])", r"\\\1", one_line(text))


def as_latex(text: Sequence[str], blocks: Sequence[Block], notes: Sequence[str]) -> str:
    r"""Writes each table as an environment ``table`` for a paper that loads ``booktabs``; the sentences as comments."""
    comments = "".join(f"% {one_line(part)}\n" for part in (*text, *notes))
    return comments + "% \\usepackage{booktabs}\n\n" + "\n".join(_latex_table(block) for block in blocks)


def _latex_table(block: Block) -> str:
    names = block.labels
    head = " & ".join(map(_latex_text, block.lines[0])) + r" \\"
    rows = [
        " & ".join([*map(_latex_text, line[:names]), *map(_latex, line[names:])]) + r" \\" for line in block.lines[1:]
    ]
    rows = [re.sub(r"^([\[*])", r"{\1}", row) for row in rows]  # which the break of the line before would take
    columns = "l" * block.labels + "r" * (len(block.lines[0]) - block.labels)
    caption = f"{block.title}. {block.note}".rstrip() if block.note else f"{block.title}."
    lines = [
        r"\begin{table}", r"\centering", rf"\caption{{{_latex_text(caption)}}}", rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in one_line(text))


def _latex(text: str) -> str:
    """Writes a number, whose stars are its significance."""
    escaped = re.sub(r"(?<=\d)(\*{1,3})", r"$^{\1}$", _latex_text(text))
    # A hyphen before a number is its sign.
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", escaped)


def as_csv(lines: Sequence[Sequence[str]]) -> str:
    """Writes lines of cells; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    return csv_text(([no_formula(cell) for cell in line] for line in lines), end="\n")
