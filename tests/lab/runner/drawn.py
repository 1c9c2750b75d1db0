"""What `report --study --from` draws of the committed studies but git does not hold, told by digests.

    python -m tests.lab.runner.drawn

writes them anew into drawn.csv, after a change of LaTeX tables or pictures that is meant.
"""

import csv
import io
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from lightning_fed.core.files import csv_text
from lightning_fed.lab.report_command import main
from lightning_fed.lab.studies.results import read_results

RESULTS = Path(__file__).parents[3] / "docs" / "results"
DIGESTS = Path(__file__).with_suffix(".csv")


def draw(folder: Path, name: str) -> bytes:
    """A table or the picture of a folder with results."""
    with TemporaryDirectory() as output:
        words = ["--study", read_results(folder).name, "--from", str(folder), "--format", Path(name).suffix[1:]]
        assert main([*words, "--output", output]) == 0
        return (Path(output) / name).read_bytes()


def digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def picture_digests(content: bytes) -> dict[str, str]:
    """Size, colours, and what drew them: another matplotlib may set a letter elsewhere."""
    picture = Image.open(io.BytesIO(content))
    return {
        "size": "x".join(map(str, picture.size)),
        "colours": digest(picture.convert("RGB").tobytes()),
        "drawn by": picture.text["Software"].partition(",")[0],
    }


def kept() -> dict[str, dict[str, str]]:
    """Digests by folder of results."""
    with DIGESTS.open(newline="") as file:
        return {row.pop("folder"): row for row in csv.DictReader(file)}


def write() -> None:
    rows = [
        {
            "folder": path.parent.relative_to(RESULTS).as_posix(),
            "table.tex": digest(draw(path.parent, "table.tex")),
            **picture_digests(draw(path.parent, "curves.png")),
        }
        for path in sorted(RESULTS.rglob("results.csv"))
    ]
    DIGESTS.write_text(csv_text([list(rows[0]), *(list(row.values()) for row in rows)]))


if __name__ == "__main__":
    sys.exit(write())
