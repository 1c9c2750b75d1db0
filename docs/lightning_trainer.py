"""Writes the table of what Lightning's Trainer has, and what it means here, into docs/lightning-trainer.md.

python docs/lightning_trainer.py
"""

import ast
import inspect
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch
from lightning.pytorch import Trainer

from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.forwarding import Refused

__all__ = ["main", "public_names", "reads_of_lightning", "table", "written"]

PAGE = Path(__file__).resolve().parent / "lightning-trainer.md"
HEAD = "| name | here |\n| --- | --- |\n"

# Attributes that the constructor sets, which have no docstring.
SET = {
    "callbacks": "All callbacks, in the order in which they are called.",
    "datamodule": "The data module of the current call.",
    "lightning_module": "The module of the current call.",
    "loggers": "The run's loggers; the last one writes metrics.csv.",
    "should_stop": "Set to end the run after the round.",
    "state": "Status, call and stage, as Lightning has them.",
}


def public_names() -> list[str]:
    """Returns the public attributes of the installed Lightning's Trainer."""
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    return sorted(name for name in dir(trainer) if not name.startswith("_"))


def reads_of_lightning() -> dict[str, set[str]]:
    """Returns what the installed Lightning's own code reads of a trainer, as dotted paths, and the files that do so.

    Its trainer, loops and tuner are left out: they belong to Lightning's Trainer, and nothing here runs them.
    """
    package, found = Path(lightning.pytorch.__file__).parent, defaultdict[str, set[str]](set)
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package)
        if place.parts[0] in ("trainer", "loops", "tuner"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            path = _path(node) if isinstance(node, ast.Attribute) else []
            for at, name in enumerate(path[:-1]):
                if name in ("trainer", "_trainer"):
                    found[".".join(path[at + 1 :])].add(place.as_posix())
    return dict(found)


def _path(node: ast.expr) -> list[str]:
    """Returns the names of `a.b.c`, in this order; what is no name is empty."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(names)]


def meaning(name: str) -> str:
    """Says what a name means here, or why it is refused; nothing for one that nobody has thought of."""
    own: Any = inspect.getattr_static(FederatedTrainer, name, None)
    if isinstance(own, Refused):
        before = "`None` before training. " if own.none_before_training else ""
        return f"{before}Refused, as {own.why}."
    if name in SET:
        return SET[name]
    text = (inspect.getdoc(own) or "") if isinstance(own, property) or inspect.isfunction(own) else ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


def table() -> str:
    """Makes the table: a row for each public attribute of Lightning's Trainer."""
    return HEAD + "".join(f"| `{name}` | {meaning(name)} |\n" for name in public_names())


def written() -> str:
    """Returns the table as it stands on the page."""
    found = re.search(re.escape(HEAD) + r"(?:\| `.*\n)+", PAGE.read_text(encoding="utf-8"))
    return found.group() if found else ""


def main() -> None:
    """Writes the table anew."""
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(written() or HEAD, table()), encoding="utf-8")


if __name__ == "__main__":
    main()
