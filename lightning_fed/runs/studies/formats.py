"""Tables of text as Markdown, LaTeX and comma-separated values."""

import csv
import io
import re
from collections.abc import Sequence

from lightning_fed.runs.studies.blocks import Block

__all__ = ["as_csv", "as_latex", "as_markdown"]

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$", ">": "$>$", "|": r"\textbar{}",
}  # fmt: skip


def as_markdown(text: Sequence[str], blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """Writes a title, sentences, tables and notes as Markdown."""
    parts = [f"# {text[0]}", *text[1:]]
    for block in blocks:
        parts += [
            f"## {_markdown(block.title)}",
            _markdown_table(block),
            *([_markdown(block.note)] if block.note else []),
        ]
    return "\n\n".join([*parts, *notes]) + "\n"


def _markdown_table(block: Block) -> str:
    rule = ["---"] * block.labels + ["---:"] * (len(block.lines[0]) - block.labels)
    head, *rows = ([_markdown(cell) for cell in line] for line in block.lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*<])", r"\\\1", text)


def as_latex(text: Sequence[str], blocks: Sequence[Block], notes: Sequence[str]) -> str:
    r"""Writes each table as an environment ``table`` for a paper that loads ``booktabs``; the sentences as comments."""
    comments = "".join(f"% {line}\n" for part in (*text, *notes) for line in part.splitlines())
    return comments + "% \\usepackage{booktabs}\n\n" + "\n".join(_latex_table(block) for block in blocks)


def _latex_table(block: Block) -> str:
    head, *rows = (" & ".join(_latex(cell) for cell in line) + r" \\" for line in block.lines)
    rows = [re.sub(r"^([\[*])", r"{\1}", row) for row in rows]  # which the break of the line before would take
    columns = "l" * block.labels + "r" * (len(block.lines[0]) - block.labels)
    caption = f"{block.title}. {block.note}".rstrip() if block.note else f"{block.title}."
    lines = [
        r"\begin{table}", r"\centering", rf"\caption{{{_latex(caption)}}}", rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    escaped = re.sub(r"(?<=\d)(\*{1,3})", r"$^{\1}$", escaped)
    # A hyphen before a number is its sign.
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", escaped)


def as_csv(lines: Sequence[Sequence[str]]) -> str:
    """Writes lines of cells."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
