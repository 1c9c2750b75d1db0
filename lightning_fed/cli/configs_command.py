"""The configurations that come with the package, by name: ``lightning-fed configs [NAMES...] [--copy FOLDER]``."""

import argparse
import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import shorten

from lightning_fed.core.files import write_atomically
from lightning_fed.errors import FederatedError, expect

__all__ = ["find_config", "main", "make_parser", "shipped_configs", "with_found_configs"]

_OPTIONS = ("--config", "-c")


def shipped_configs() -> dict[str, Path]:
    """Returns the files by name, such as ``aggregator/gma``."""
    package = Path(__file__).parents[1]
    # The folder is inside an installed package, and next to the package in a checkout.
    folder = next((place for place in (package / "configs", package.parent / "configs") if place.is_dir()), package)
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_config(name: str) -> str:
    """Returns the file for a name given as ``--config``: a file on disk if there is one, else a shipped one."""
    if os.path.exists(name):  # False, not an error, if no file can have this name
        return name
    found = shipped_configs().get(name.removeprefix("configs/").removesuffix(".yaml"))
    return name if found is None else str(found)


def with_found_configs(words: Sequence[str]) -> list[str]:
    """Replaces the names of shipped configurations on a command line by their files."""
    found: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        if equals and option in _OPTIONS:
            word = f"{option}={find_config(value)}"
        elif found and found[-1] in _OPTIONS:
            word = find_config(word)
        found.append(word)
    return found


def main(argv: list[str]) -> int:
    """Lists or copies the configurations; returns 0."""
    options = make_parser().parse_args(argv)
    chosen = _chosen(options.names)
    for name, path in chosen.items():
        if options.copy is None:
            print(f"{name:<45} {_first_sentence(path)}")
            continue
        target = options.copy / f"{name}.yaml"
        if target.exists():
            raise FederatedError(f"Expected a new file, but {target} exists already: give another `--copy` folder.")
        write_atomically(target, path.read_bytes(), "--copy")
        print(target)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of this command."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed configs",
        description="Lists the configurations that come with the package, by the names that `--config` takes.",
    )
    parser.add_argument("names", nargs="*", metavar="NAMES", help="names or groups (default: all)")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="copy them to this folder, where you can edit them")
    return parser


def _chosen(names: Sequence[str]) -> dict[str, Path]:
    known = shipped_configs()
    taken: set[str] = set() if names else set(known)
    for name in names:
        wanted = name.removeprefix("configs/").removesuffix(".yaml").rstrip("/")
        found = {path for path in known if f"{path}/".startswith(f"{wanted}/")}
        expect(found, f"Expected the name of a configuration, got {wanted!r}: `lightning-fed configs` lists all.")
        taken |= found
    return {name: path for name, path in known.items() if name in taken}


def _first_sentence(path: Path) -> str:
    """Returns the first sentence of the comment at the top of a file."""
    comment = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return shorten(" ".join(line.lstrip("# ") for line in comment), 75, placeholder="...")
