"""How the tables of a study read: as text, Markdown and LaTeX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from lightning_fed.core import one_line
from lightning_fed.lab.common import aligned

__all__ = ["Block", "as_latex", "as_markdown", "as_text", "paragraphs", "without_constants"]

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$", ">": "$>$", "|": r"\textbar{}",
    "–": "--",
}  # fmt: skip
# Formats for an ordinary cell, the best and the second. Markdown sites underline only with the tag <ins>.
_MARKS = {"md": ("{}", "**{}**", "<ins>{}</ins>"), "tex": ("{}", r"\textbf{{{}}}", r"\underline{{{}}}")}


@dataclass(frozen=True)
class Block:
    """One table of text, with a title, values that all cells share, and a note on how to read it."""

    title: str
    lines: list[list[str]]  # header and rows
    labels: int  # number of columns at the left with names, not numbers
    note: str = ""
    above: str = ""
    name: str = ""  # what stands after the study's in its label
    heads: tuple[tuple[str, ...], ...] = ()  # heads of number columns, if they have several levels
    marks: Mapping[tuple[int, int], int] = field(default_factory=dict)  # 1 best, 2 second, by line and column


def without_constants(block: Block) -> Block:
    """Removes columns that are constant or empty and writes them above the table; the first number column stays."""
    head, *rows = block.lines
    same = [at for at, (first, *others) in enumerate(zip(*rows, strict=True)) if {*others} <= {first}]
    same = [at for at in same if at != block.labels and (len(rows) > 1 or not rows[0][at])]
    said = "; ".join(f"{head[at]} = {rows[0][at]}" for at in same if rows[0][at]).replace("= <", "<")
    lines = [[cell for at, cell in enumerate(line) if at not in same] for line in block.lines]
    labels = block.labels - sum(at < block.labels for at in same)
    return replace(block, lines=lines, labels=labels, above=f"The same in all rows: {said}." if said else "")


def as_text(blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """Writes tables and notes for a terminal, with columns of equal width."""
    parts = list[str]()
    for block in blocks:
        head, *rows = block.lines
        rule = ["-" * max(map(len, column)) for column in zip(head, *rows, strict=True)]
        parts += [block.title, block.above, aligned([head, rule, *rows]), block.note]
    return "\n\n".join(one for one in (*parts, *map(one_line, notes)) if one)


def paragraphs(parts: Iterable[str]) -> str:
    """Joins paragraphs of Markdown by empty lines, but items of a list without one."""
    return re.sub(r"^(- .+)\n\n(?=- )", r"\1\n", "\n\n".join(parts), flags=re.MULTILINE)


def as_markdown(text: Sequence[str], blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """Writes a title, sentences, tables and notes as Markdown."""
    parts = [f"# {_markdown(text[0])}", *map(_markdown, text[1:])]
    for block in blocks:
        head, *rows = [
            [_marked(block, "md", at, place, _markdown(cell)) for place, cell in enumerate(line)]
            for at, line in enumerate(block.lines)
        ]
        rule = ["---" + ":" * right for right in _numbers(block)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))
        above, note = ([_markdown(one)] if one else [] for one in (block.above, block.note))
        parts += [f"## {_markdown(block.title)}", *above, table, *note]
    return paragraphs([*parts, *map(_markdown, notes)]) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*<])", r"\\\1", one_line(text))


def _numbers(block: Block) -> list[bool]:
    """Tells which columns have numbers, for the right side: of names all must be one, of others one may begin so."""
    number, begin = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?"), re.compile(r"\W*\d")
    columns = [*zip(*block.lines[1:], strict=True)]
    names, others = columns[: block.labels], columns[block.labels :]
    return [all(map(number.fullmatch, one)) for one in names] + [any(map(begin.match, one)) for one in others]


def _marked(block: Block, kind: str, at: int, place: int, cell: str) -> str:
    return _MARKS[kind][block.marks.get((at, place), 0)].format(cell)


def as_latex(text: Sequence[str], blocks: Sequence[Block], notes: Sequence[str], name: str = "runs") -> str:
    r"""Writes each table as an environment ``table``, which needs ``booktabs`` and ``graphicx``, sentences as comments.

    One wider than a line is set smaller. Its label is ``tab:``, the ``name`` of the study and that of the block.
    """
    comments = "".join(f"% {one_line(part)}\n" for part in (*text, *notes))
    return comments + "% \\usepackage{booktabs,graphicx}\n\n" + "\n".join(_latex_table(block, name) for block in blocks)


def _latex_table(block: Block, name: str) -> str:
    body = block.lines[1:]
    rows = []
    for at, line in enumerate(body, 1):
        # Names are not repeated from the line above, except the last one, in which the lines differ.
        said = [at > 1 and line[: i + 1] == body[at - 2][: i + 1] for i in range(block.labels - 1)] + [False]
        rows += [r"\addlinespace"] * (at > 1 and block.labels > 1 and not said[0])
        labels = ["" if again else _latex_text(name) for again, name in zip(said, line[: block.labels], strict=False)]
        cells = (_marked(block, "tex", at, i, _latex(line[i])) for i in range(block.labels, len(line)))
        row = " & ".join([*labels, *cells]) + r" \\"
        rows.append(re.sub(r"^([\[*])", r"{\1}", row))  # else it would be an argument of the line break before
    columns = "".join("lr"[right] for right in _numbers(block))
    label = re.sub(r"[^A-Za-z0-9.:]+", "-", "-".join(filter(None, (name, block.name))))
    caption = " ".join([f"{block.title}.", *filter(None, (block.above, block.note))])
    lines = [
        r"\begin{table}", r"\centering", rf"\caption{{{_latex_text(caption)}}}", rf"\label{{tab:{label}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%", rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule", *_latex_head(block), r"\midrule", *rows, r"\bottomrule", r"\end{tabular}}", r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _latex_head(block: Block) -> list[str]:
    """Writes heads of several levels in lines, with a rule below a head that several columns share."""
    levels, lines = max(map(len, block.heads), default=1), []
    for level in range(levels - 1):
        cells, rules, first = [""] * block.labels, [], block.labels + 1
        for parts, group in groupby(block.heads, key=lambda head: head[: level + 1]):
            last = first + len([*group]) - 1
            cells.append(rf"\multicolumn{{{last - first + 1}}}{{c}}{{{_latex_text(parts[-1])}}}")
            rules += [rf"\cmidrule(lr){{{first}-{last}}}"] * bool(parts[-1])
            first = last + 1
        lines += [" & ".join(cells) + r" \\", "".join(rules)]
    last_level = [head[-1] for head in block.heads] if levels > 1 else block.lines[0][block.labels :]
    return [*lines, " & ".join(map(_latex_text, [*block.lines[0][: block.labels], *last_level])) + r" \\"]


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in one_line(text))


def _latex(text: str) -> str:
    """Escapes a cell for LaTeX; stars after a number mean significance."""
    escaped = re.sub(r"(?<=\d)(\*{1,3})", r"$^{\1}$", _latex_text(text))
    # A hyphen before a number is a minus sign.
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", escaped)
