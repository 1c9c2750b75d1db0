"""What a release says of itself is said once: one version everywhere, and workflows that call what exists."""

import re
from pathlib import Path

import pytest
import yaml

import lightning_fed

REPOSITORY = Path(__file__).parent.parent
WORKFLOWS = sorted(REPOSITORY.glob(".github/workflows/*.yml"))


def test_all_files_have_one_version() -> None:
    project = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.M)
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"]
    changelog = re.findall(r"^## \[(\d.+?)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)[0]
    entry = re.search(r"version = \{(.+?)\}", (REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert project is not None
    assert entry is not None
    assert project[1] == citation == changelog == entry[1] == lightning_fed.__version__


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = {target for command in commands for target in re.findall(r"\bmake ([a-z-]+)", command)}
    assert called <= set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M))


def test_nothing_is_published_without_a_person() -> None:
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/publish.yml").read_text())["jobs"]
    publish = jobs["publish"]
    assert publish["environment"] == "pypi"
    assert publish["needs"] == "wheel"
    assert jobs["wheel"]["needs"] == "build"
    assert jobs["wheel"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
