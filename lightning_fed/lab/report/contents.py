"""What the folders of runs hold besides their curves: how configs differ, clients one by one, pictures of the split."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lightning_fed.lab.report.load import Method
from lightning_fed.runs.folder import read_rows

__all__ = ["client_table", "config_differences", "split_pictures"]

# What tells runs of one method apart, or where they lie.
_NO_DIFFERENCE = ("seed_everything", "trainer.seed", "trainer.name", "trainer.default_root_dir", "ckpt_path")


def config_differences(methods: Sequence[Method]) -> list[list[str]]:
    """Compares saved configs: a header with the methods that have one, and a line for each option that differs.

    Options have their names of the command line. Without differences there are no lines.
    """
    configs = {m.label: _flatten(config) for m in methods if (config := _config(m.runs[0].path / "config.yaml"))}
    lines = []
    for option in dict.fromkeys(option for config in configs.values() for option in config):
        values = [config.get(option, "") for config in configs.values()]
        if len(set(values)) > 1 and option not in _NO_DIFFERENCE:
            lines.append([option, *values])
    return [["option", *configs], *lines] if lines else []


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():  # a run from Python has none, and a device or a pipe may never end
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # what is damaged says nothing
        return {}
    return config if isinstance(config, dict) else {}


def _flatten(value: Any, option: str = "") -> dict[str, str]:
    inner: Mapping[Any, Any] | None = value if isinstance(value, dict) and value else None
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        inner = dict(enumerate(value))
    if inner is None:
        return {option: value if isinstance(value, str) else json.dumps(value, default=str)}
    flat: dict[str, str] = {}
    for key, item in inner.items():
        below = option if key in ("class_path", "init_args") else f"{option}.{key}".lstrip(".")
        flat |= _flatten(item, below)
    return flat


def client_table(path: Path) -> list[list[str]]:
    """Reads the header and the lines of a run's ``clients.csv``; empty without one."""
    rows = list(read_rows(path))
    return [list(rows[0]), *([_shortened(cell) for cell in row.values()] for row in rows)] if rows else []


def _shortened(cell: str) -> str:
    with suppress(ValueError):
        return f"{float(cell):.4g}" if "." in cell else cell
    return cell


def split_pictures(methods: Sequence[Method]) -> dict[bytes, list[str]]:
    """Finds the picture of each split, by classes where there are any, with the methods whose first run has it."""
    pictures: dict[bytes, list[str]] = {}
    for method in methods:
        folder = method.runs[0].path
        path = next((path for name in ("split", "sizes") if (path := folder / f"{name}.png").is_file()), None)
        if path is not None:
            pictures.setdefault(path.read_bytes(), []).append(f"{method.label}, seed {method.runs[0].seed}")
    return pictures
