"""Draws images/notebook.png: two cells of the first tutorial as a browser shows them.

python docs/notebook_picture.py [BROWSER] (default: chromium) reads the outputs that are stored in the notebook.
"""

import json
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from pictures import shrink

DOCS = Path(__file__).resolve().parent
SHOWN = ("data.setup()\ndata", "trainer")
SIZE = "760,920"
STYLE = """
body { font: 13px/1.4 sans-serif; margin: 12px; background: white; }
.in { background: #f5f5f5; border: 1px solid #ddd; padding: 6px 10px; font: 13px/1.4 monospace; white-space: pre; }
.out { padding: 8px 10px 18px; } table { border-collapse: collapse; font-size: 12px; }
th, td { text-align: left; padding: 3px 12px 3px 0; } tr:nth-child(even) { background: #f5f5f5; }
"""


def drawn(cell: dict) -> str:
    """Returns a cell with the form that it shows."""
    source, form = "".join(cell["source"]), "".join(cell["outputs"][0]["data"]["text/html"])
    return f'<div class="in">{escape(source)}</div><div class="out">{form}</div>'


def main(browser: str = "chromium") -> None:
    """Writes a page of the cells, and lets the browser draw it."""
    cells = json.loads((DOCS / "tutorials" / "first-run.ipynb").read_text(encoding="utf-8"))["cells"]
    body = "".join(drawn(cell) for cell in cells if "".join(cell["source"]) in SHOWN)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f'<!DOCTYPE html><meta charset="utf-8"><style>{STYLE}</style>{body}', encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE}"]
        picture = DOCS / "images" / "notebook.png"
        options += [f"--user-data-dir={folder}/profile", f"--screenshot={picture}"]
        subprocess.run([browser, *options, page.as_uri()], check=True)
        shrink(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
