"""The Dockerfile and the development container name what exists, and what they run without root or a network runs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.end_to_end.command import REPOSITORY, environment
from tests.end_to_end.test_wheel import SOURCES

PROJECT = (REPOSITORY / "pyproject.toml").read_text()
DEVELOPMENT = json.loads((REPOSITORY / ".devcontainer" / "devcontainer.json").read_text())


class Stage(NamedTuple):
    base: str
    name: str
    lines: list[tuple[str, str]]  # instruction and the rest


def stages() -> list[Stage]:
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [(word, rest) for word, _, rest in (line.strip().partition(" ") for line in text.splitlines()) if word]
    assert lines.pop(0) == ("ARG", "PYTHON=3.12"), "of the first FROM"
    found: list[Stage] = []
    for word, rest in lines:
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name, []))
        else:
            found[-1].lines.append((word, rest))
    return found


def is_ignored(path: str) -> bool:
    """Whether a path stays out of the image: patterns are of the checkout's root, unless they begin with ``**/``."""
    patterns = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    parents = [path, *(parent.as_posix() for parent in Path(path).parents)]
    return any(
        any(fnmatch(part, pattern[3:]) for part in Path(path).parts)
        if pattern.startswith("**/")
        else any("/" not in parent and fnmatch(parent, pattern) for parent in parents)
        for pattern in patterns
    )


def test_every_source_of_the_wheel_is_copied_and_nothing_else_that_is_large() -> None:
    assert ("COPY", ". .") in stages()[2].lines
    files = [path for name in SOURCES for path in [REPOSITORY / name, *(REPOSITORY / name).rglob("*")]]
    names = [path.relative_to(REPOSITORY).as_posix() for path in files if path.is_file() and path.suffix != ".pyc"]
    assert len(names) > 300
    assert [name for name in names if is_ignored(name)] == []
    ignored = re.findall(r"^/?([\w.-]+)/$", (REPOSITORY / ".gitignore").read_text(), re.MULTILINE)
    assert [name for name in ignored if name not in ("__pycache__",) and not is_ignored(f"{name}/file")] == []
    assert is_ignored(".git/config")
    assert is_ignored("lightning_fed/core/__pycache__/files.pyc")


def test_it_builds_for_an_ordinary_user() -> None:
    torch, development, wheel, last = stages()
    assert (torch.base, [each.base for each in (development, wheel, last)]) == ("python:${PYTHON}-slim", ["torch"] * 3)
    assert torch.lines[0] == ("RUN", "pip install --no-cache-dir torch torchvision"), "from where pip is set up to look"
    assert ("RUN", "useradd --create-home fed") in torch.lines
    for stage in (development, last):
        assert [rest for word, rest in stage.lines if word == "USER"] == ["fed"]
        after = stage.lines[stage.lines.index(("USER", "fed")) :]
        assert [word for word, _ in after if word not in ("USER", "CMD")] == [], "what needs root comes before"
    extras = re.search(r'\.whl\)\[([\w,]+)\]"', last.lines[1][1])
    assert extras is not None
    assert [extra for extra in extras[1].split(",") if not re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE)] == []


def test_the_development_container_is_a_stage_and_makes_what_make_knows() -> None:
    build = DEVELOPMENT["build"]
    assert (REPOSITORY / ".devcontainer" / build["dockerfile"]).resolve() == REPOSITORY / "Dockerfile"
    assert (REPOSITORY / ".devcontainer" / build["context"]).resolve() == REPOSITORY
    assert [build["target"], DEVELOPMENT["remoteUser"]] == [stages()[1].name, "fed"]
    # It makes the environment first, so that `make` does not install another torch beside that of the image; outside
    # the checkout, whose own `.venv` is of the Python of the machine that it is mounted from.
    made, target = DEVELOPMENT["postCreateCommand"].split(" && make ")
    assert made == "python -m venv --system-site-packages $VENV"
    place = DEVELOPMENT["containerEnv"]["VENV"]
    assert place == f"/home/{DEVELOPMENT['remoteUser']}/.venv"
    shown = DEVELOPMENT["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert shown == f"{place}/bin/python"
    makefile = (REPOSITORY / "Makefile").read_text()
    assert re.search(rf"^{target}: ", makefile, re.MULTILINE)
    assert "VENV ?= .venv\n" in makefile


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what an image has at its root: sources, and an environment that sees the packages of this one."""
    root = tmp_path_factory.mktemp("image")
    venv.create(root / "python", with_pip=False)
    pip = root / "python" / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    pip.chmod(0o755)
    (site,) = (root / "python").glob("lib/python*/site-packages")
    layers = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    (site / "layer.pth").write_text("\n".join(layers))
    for name in ("source", "work"):
        (root / name).mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, root / "source" / name)
    return root


def run(image: Path, words: list[str], folder: str) -> str:
    """Runs words with the folders of the image in place of those of the root, and pip without a network."""
    words = [re.sub(r"/(?=wheels|source|work)", f"{image}/", word) for word in words]
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_FORCE_REINSTALL": "1"}
    path = f"{image}/python/bin{os.pathsep}{os.environ['PATH']}"
    env = environment(**pip, PATH=path, HOME=str(image), USER="fed", OMP_NUM_THREADS="1")
    env.pop("PYTHONPATH", None)
    done = subprocess.run(words, cwd=image / folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_what_it_runs_makes_the_tables_of_the_quickstart(image: Path) -> None:
    *_, wheel, last = stages()
    for stage in (wheel, last):
        for line in [rest for word, rest in stage.lines if word == "RUN" and rest.startswith("pip")]:
            run(image, ["sh", "-c", line], "source")
    place = ["python", "-c", "import lightning_fed; print(lightning_fed.__file__)"]
    assert run(image, place, "work").startswith(f"{image}/python/")
    command = json.loads(next(rest for word, rest in last.lines if word == "CMD"))
    said = run(image, command, "work")
    assert "| FedAvg+GMA | 91.92 ± 0.74 |" in said
    assert (image / "work/runs/studies/quickstart/table.md").is_file()
    header = (REPOSITORY / "Dockerfile").read_text().split("\nARG ")[0]
    shown = [shlex.split(line[1:]) for line in header.splitlines() if line.startswith("#   docker run")]
    words = shown[-1][shown[-1].index("lightning-fed") :]
    run(image, [*words, "--trainer.max_rounds=1"], "work")
