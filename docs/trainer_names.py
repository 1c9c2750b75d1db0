"""Writes the table of what a hook may read and set of the trainer into docs/extending.md, from the protocol itself.

python docs/trainer_names.py
"""

import ast
import inspect
import re
from pathlib import Path

from lightning_fed.core.hooks import TrainerLike

__all__ = ["main", "table", "written"]

PAGE = Path(__file__).resolve().parent / "extending.md"
HEAD = "| name | is |\n| --- | --- |\n"


def table() -> str:
    """Makes the table: a row for each name of the protocol, in its order."""
    body = ast.parse(inspect.getsource(TrainerLike)).body[0].body[1:]
    rows = []
    for place, part in enumerate(body):
        if isinstance(part, ast.AnnAssign):
            rows.append((part.target.id, body[place + 1].value.value))
        elif isinstance(part, ast.FunctionDef):
            is_property = bool(part.decorator_list)
            arguments = ", ".join(argument.arg for argument in part.args.args[1:])
            rows.append((part.name if is_property else f"{part.name}({arguments})", ast.get_docstring(part)))
    return HEAD + "".join(f"| `trainer.{name}` | {text.replace('``', '`')} |\n" for name, text in rows)


def written() -> str:
    """Returns the table as it stands on the page."""
    found = re.search(re.escape(HEAD) + r"(?:\| `trainer\..*\n)+", PAGE.read_text(encoding="utf-8"))
    return found.group() if found else ""


def main() -> None:
    """Writes the table anew."""
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(written(), table()), encoding="utf-8")


if __name__ == "__main__":
    main()
