"""Everything that README and documentation show is run, and every link leads somewhere."""

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from pydoc import locate

import pytest
import torch
import yaml
from torch import nn

from benchmarks.tables import ROWS
from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import Aggregator
from lightning_fed.callbacks import Payload
from lightning_fed.client_algorithms import ClientAlgorithm, LossAlgorithm
from lightning_fed.core.devices import why_not_mixed
from lightning_fed.data import FeatureSkew, Partitioner
from lightning_fed.engines import SequentialTrainer, VectorizedTrainer
from lightning_fed.masks import Mask
from lightning_fed.sampling import ClientSampler
from lightning_fed.trainer.options import ALIASES
from tests.docs.pages import REPOSITORY, Block, anchors, blocks, links, name, pages, prose, references
from tests.docs.shell import Shell, command_lines
from tests.parts import leaves

# Blocks that a test cannot run: they need an account, a network or a browser. A new one must be added here on purpose.
# Those of docs/results take hours, and have a test of their own.
NOT_RUN = {
    "docs/algorithms/compression.md": 1,
    "docs/algorithms/dp-sgd.md": 1,
    "docs/command-line.md": 2,
    "docs/engines.md": 2,
    "docs/foundation-models.md": 1,
    "docs/data.md": 3,
    "docs/gpu.md": 8,
    "docs/logging.md": 4,
    "docs/network.md": 7,
    "docs/quickstart.md": 1,
    "docs/scaling.md": 2,
    "docs/share-a-method.md": 1,
    "docs/simulated-faults.md": 1,
    "docs/studies.md": 5,
    "docs/tutorials/index.md": 1,
}

PAGES = pages()

# Pages whose snippets need more than the package does; `make install-dev` or `make test-ecosystem` has it.
NEEDED = {"docs/foundation-models.md": ("transformers", "peft"), "docs/privacy.md": ("dp_accounting",)}


def _is_slow(page: Path) -> bool:
    """A page with commands, but for what a newcomer reads first and one of the algorithms' pages."""
    quick = ("README.md", "docs/algorithms/fedavg.md")
    shown = any(block.language in ("bash", "python") for block in blocks(page))
    return shown and name(page) not in quick


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emnist_folder: Path | None) -> Iterator[Shell]:
    """A folder with the files of a checkout; modules and variables made in it are gone afterwards."""
    for entry in ("configs", "cli.py"):
        (tmp_path / entry).symlink_to(REPOSITORY / entry)
    default = REPOSITORY.parent / "shared" / "data"
    root = Path(os.environ.get("LIGHTNING_FED_DATA") or default)
    monkeypatch.setenv("LIGHTNING_FED_DATA", str(root))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what `seed_everything` leaves behind is taken back
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    has_data = (root / "FashionMNIST" / "raw").is_dir() and (root / "MNIST" / "raw").is_dir()
    yield Shell(monkeypatch, has_data, emnist_folder)
    for module in set(sys.modules) - before:
        file = getattr(sys.modules[module], "__file__", None) or ""
        if Path(file).parent == tmp_path:
            del sys.modules[module]
    gc.collect()


def _expect_mistake(shell: Shell, block: Block, said: Block, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    with pytest.raises(AssertionError, match="ended with [12]$"):
        shell.run(block)
    assert said.language == "text", f"{said.place}: expected the sentence that {block.place} ends with"
    assert capsys.readouterr().err.splitlines()[-1] == said.text, said.place


def _run(shell: Shell, block: Block) -> None:
    if block.title:
        Path(block.title).write_text(block.text + "\n")
    if block.language == "yaml":
        assert isinstance(yaml.safe_load(block.text), dict), block.place
    elif block.language == "python":
        exec(compile(block.text, block.place, "exec"), {"__name__": Path(block.title or "example").stem})
    elif block.language == "bash":
        shell.run(block)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if _is_slow(page) else (), id=name(page))
        for page in PAGES
        if blocks(page)
    ],
)
def test_every_block_runs(page: Path, shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    for package in NEEDED.get(name(page), ()):
        pytest.importorskip(package)
    found = blocks(page)
    for index, block in enumerate(found):
        if block.mark == "fails":
            _expect_mistake(shell, block, found[index + 1], capsys)
        elif block.mark != "no-run":
            _run(shell, block)
    if name(page) == "docs/logging.md":
        _expect_columns(page)


def _expect_columns(page: Path) -> None:
    """What the commands of the page wrote has no column that the page does not explain."""
    tables = list(Path("runs").rglob("metrics.csv"))
    assert tables
    columns = {column for table in tables for column in table.read_text().splitlines()[0].split(",")}
    explained = set(re.findall(r"`([\w/]+)`", prose(page)))
    assert columns - explained == set()


@pytest.mark.slow
def test_commands_for_a_gpu_run_on_a_cpu(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_mixed = why_not_mixed(nn.LSTM(1, 1), torch.device("cpu"))  # on some CPUs
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    for trainer in (SequentialTrainer, VectorizedTrainer):
        monkeypatch.setattr(trainer, "train", trainer.train)  # so that what a script does to it is taken back
    for block in blocks(REPOSITORY / "docs" / "gpu.md"):
        text = block.text.replace("gpu", "cpu")
        if block.title:
            Path(block.title).write_text(f"{text}\n")
        for words in command_lines(text) if block.language == "bash" else ():
            if words[:3] == ["python", "-m", "benchmarks.profile"]:  # takes minutes
                assert words[3] in {row.key for row in ROWS}
            elif no_mixed and "bf16-mixed" in words:
                with pytest.raises(AssertionError, match="ended with"):
                    shell.run_line(words, block.place)
                assert no_mixed in capsys.readouterr().err
            else:
                shell.run_line(words, block.place)


def test_what_is_not_run_is_counted() -> None:
    not_run = Counter(block.page for page in PAGES for block in blocks(page) if block.mark == "no-run")
    assert {page: count for page, count in not_run.items() if not page.startswith("docs/results/")} == NOT_RUN


def test_commands_of_results_name_studies_and_tables_that_are_there() -> None:
    texts = [block.text for page in PAGES for block in blocks(page) if block.page.startswith("docs/results/")]
    studies = {study for text in texts for study in re.findall(r"lightning-fed study ([\w/]+)", text)}
    assert studies
    assert [study for study in studies if not (REPOSITORY / f"configs/studies/{study}.yaml").is_file()] == []
    # `report --study NAME ... --output FOLDER` made the table of the folder, which stands under the name of the study.
    command = re.compile(r"report --study ([\w/]+) .*--output docs/results/(\S+)")
    written = {pair for text in texts for pair in command.findall(text)}
    assert {study for study, folder in written if not folder.startswith(study)} == set()
    assert [folder for _, folder in written if not (REPOSITORY / f"docs/results/{folder}/table.csv").is_file()] == []
    assert studies == {study for study, _ in written}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_options_and_references_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{name(page)}: {link}"
        assert not anchor or anchor in anchors(target), f"{name(page)}: {link}"
    known = {*signature(FederatedTrainer).parameters, *ALIASES}
    text = page.read_text(encoding="utf-8")
    correct = re.sub(r"^```\{\.bash \.fails\}.*?^```$\n+^```text$.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    options = set(re.findall(r"--trainer\.(\w+)", correct))
    assert options - known == set()
    # In prose `trainer.NAME` is an option, a property, an attribute of the live trainer, or the file.
    named = set(re.findall(r"(?<![\w.-])trainer\.(\w+)", prose(page)))
    live = {"aggregator", "should_stop", "vector", "weights", "origin", "displacement", "start_gradients", "py"}
    live |= {"datamodule", "lightning_module"}
    assert {each for each in named - known - live if not hasattr(FederatedTrainer, each)} == set()
    assert [reference for reference in references(page) if locate(reference) is None] == []


def test_signatures_of_extending_are_those_of_the_classes() -> None:
    text = (REPOSITORY / "docs" / "extending.md").read_text()
    tables = re.findall(r"^\| method of `(\w+)` .*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    bases = (Aggregator, Mask, ClientAlgorithm, LossAlgorithm, FeatureSkew, Payload)
    assert [name for name, _ in tables] == [kind.__name__ for kind in bases]
    said = [(kind, row) for kind, (_, rows) in zip(bases, tables, strict=True) for row in rows.splitlines()]
    shown = [(kind, *re.match(r"\| `(\w+)\((.*?)\)`", row).groups()) for kind, row in said]
    shown += [(Partitioner, "assign", text.split("`assign(")[1].split(")`")[0])]
    shown += [(ClientSampler, "sample", text.split("`sample(")[1].split(")`")[0])]
    for kind, method, arguments in shown:
        assert [*signature(getattr(kind, method)).parameters] == arguments.split(", "), (kind, method)


def test_every_page_is_in_the_navigation() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text()
    navigation = set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))
    assert navigation == {
        page.relative_to(REPOSITORY / "docs").as_posix()
        for page in PAGES
        # Tables of studies are drawn from the CSV files beside them, and linked from pages.
        if page.parent != REPOSITORY and page.name != "table.md"
    }


# No paper has them, or they are many methods in one.
WITHOUT_SOURCE = {"Attack", "LocalOnly", "PersonalParameters", "LossAlgorithm"}
METHODS = [
    (option, kind.__name__)
    for option, base in (("aggregator", Aggregator), ("client", ClientAlgorithm))
    for kind in leaves(base)
    if kind.__name__ not in WITHOUT_SOURCE and kind.__name__[0] != "_"
]


@pytest.mark.parametrize(("option", "method"), sorted(METHODS))
def test_every_method_has_a_page_with_equation_source_cost_and_command_and_a_file(option: str, method: str) -> None:
    parts = ("```(?:text|math)\n", r"\*\*Source\.\*\*", "Cost", "lightning-fed fit", rf"--{option} {method}\b")
    texts = [page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs" / "algorithms").glob("*.md")]
    assert any(all(re.search(part, text) for part in parts) for text in texts)
    files = [*(REPOSITORY / "configs" / option).glob("*.yaml"), *(REPOSITORY / "configs/privacy").glob("*.yaml")]
    assert any(re.search(rf": {method}$", file.read_text(encoding="utf-8"), re.MULTILINE) for file in files)


def test_every_room_of_the_package_is_in_the_architecture() -> None:
    package = REPOSITORY / "lightning_fed"
    rooms = {path.name for path in package.glob("[a-z]*.py")} | {
        f"{path.parent.name}/" for path in package.glob("*/__init__.py")
    }
    named = set(re.findall(r"`([\w.]+/?)`", prose(REPOSITORY / "docs" / "architecture.md")))
    assert rooms - named == set()
