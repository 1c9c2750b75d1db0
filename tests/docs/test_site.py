"""What the site makes of the pages: equations are set, and methods stand under what they are."""

import importlib.util
import re
from typing import Any

import pytest
import yaml

import lightning_fed.aggregators
import lightning_fed.callbacks
import lightning_fed.client_algorithms
import lightning_fed.masks
from tests.docs.pages import REPOSITORY, blocks, pages

# The rooms of the package whose classes a heading of the navigation has.
HEADINGS = {
    "Server rules": r"aggregators\.",
    "Masks": r"masks$",
    "Clients": r"client_algorithms\.(?!losses|own_models|personal)",
    "Losses": r"client_algorithms\.losses",
    "Personal models": r"client_algorithms\.(own_models|personal)",
    "Payloads": r"callbacks\.",
}
ROOMS: list[Any] = [
    lightning_fed.aggregators,
    lightning_fed.masks,
    lightning_fed.client_algorithms,
    lightning_fed.callbacks,
]


def algorithms() -> dict[str, list[str]]:
    """The pages of methods by their heading, as the navigation has them."""
    text = (REPOSITORY / "mkdocs.yml").read_text()
    navigation = yaml.safe_load(text[text.index("nav:") : text.index("extra:")])["nav"]
    found = next(part["Algorithms"] for part in navigation if "Algorithms" in part)
    return {
        heading: [page for entry in entries for page in entry.values()]
        for part in found
        for heading, entries in part.items()
    }


def rooms_of(text: str) -> set[str]:
    """The modules of the classes that the commands of a page name."""
    names = re.findall(r"--(?:aggregator(?:\.mask)?|client|trainer\.callbacks)\+? (\w+)", text)
    classes = [getattr(room, name) for name in names for room in ROOMS if hasattr(room, name)]
    return {kind.__module__.removeprefix("lightning_fed.") for kind in classes}


@pytest.mark.parametrize("heading", HEADINGS)
def test_methods_stand_under_what_they_are(heading: str) -> None:
    assert list(algorithms()) == list(HEADINGS)
    for page in algorithms()[heading]:
        rooms = rooms_of((REPOSITORY / "docs" / page).read_text(encoding="utf-8"))
        assert any(re.match(HEADINGS[heading], room) for room in rooms), f"{page} is of {rooms}"


def test_equations_are_set() -> None:
    pytest.importorskip("math_core")
    spec = importlib.util.spec_from_file_location("equations", REPOSITORY / "docs" / "equations.py")
    assert spec is not None
    assert spec.loader is not None
    equations = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(equations)
    found = [block for page in pages() for block in blocks(page) if block.language == "math"]
    assert len(found) > 50
    for block in found:
        html = equations.set_equation(block.text)
        assert html.startswith('<div class="equation"><math'), block.place
        assert "<mtext>\\" not in html, block.place
    with pytest.raises(Exception, match="unknown"):
        equations.set_equation(r"\notlatex")
