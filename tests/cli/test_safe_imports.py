"""With ``--safe_imports`` options name our classes and those given alone; nothing else is imported."""

import os
import sys

import pytest
from jsonargparse import _common

from tests.parts import quick_first

NAMES = "tests.cli.parts.Plain,lightning.pytorch.callbacks.LambdaCallback"
BASE = ("fit", "--model", "tests.cli.parts.Plain", "--data", "Digits", "--safe_imports", NAMES)
FEDERATED = ("--data", "lightning_fed.data.FederatedDataModule")


@pytest.fixture(autouse=True)
def untrusted(cli):
    """A module ``untrusted``, which would notice that it is imported."""
    cli.file("untrusted.py", "from lightning_fed.aggregators import FedAvg\nclass Thing(FedAvg): pass\n")
    yield
    assert sys.modules.pop("untrusted", None) is None


WORDS = [
    (["--aggregator", "untrusted.Thing", "--print_config"], "aggregator"),
    ([*FEDERATED, "--data.source", "untrusted.Thing"], "data.source"),
    (["--trainer.callbacks", "[{class_path: untrusted.Thing}]"], "trainer.callbacks"),
    (["--aggregator", "untrusted.Thing", "--aggregator.lr", "1"], "aggregator"),
    (["--aggregator.mask", "untrusted.Thing"], "aggregator.mask"),
    (["--aggregator.help", "untrusted.Thing"], "aggregator"),
    (["--model", "untrusted.Thing"], "model"),
    (["--model.optimizer", "untrusted.Thing"], "model.optimizer"),
    (["--data", "untrusted.Thing"], "data"),
    (["--client=[untrusted.Thing]"], "client"),
    (["--client+=untrusted.Thing"], "client"),
    (["--trainer.callbacks+=untrusted.Thing"], "trainer.callbacks"),
    (["--trainer.logger", "untrusted.Thing"], "trainer.logger"),
    (["--trainer.sampler", "untrusted.Thing"], "trainer.participation.sampler"),
    (["--trainer", "{callbacks: untrusted.Thing}"], "trainer.callbacks"),
    (["--optimizer", "untrusted.Thing"], "optimizer"),
    (["--lr_scheduler", "untrusted.Thing"], "lr_scheduler"),
]


@pytest.mark.parametrize(("words", "option"), quick_first(3, WORDS))
def test_words(mistake, words, option):
    assert mistake(*BASE, *words) == (
        f"Expected `--{option}` to name a class of lightning_fed or one that `--safe_imports` names, got "
        "'untrusted.Thing'; add it there if you trust it."
    )


@pytest.mark.parametrize(
    "text",
    quick_first(
        1,
        [
            "aggregator: {class_path: untrusted.Thing, init_args: {lr: 1}}",
            "aggregator: untrusted.Thing",
            "model: {class_path: tests.cli.parts.Plain, init_args: {optimizer: {class_path: untrusted.Thing}}}",
            "trainer: {callbacks: [{class_path: untrusted.Thing, init_args: {}}]}",
            "data: {class_path: FederatedDataModule, init_args: {source: {class_path: untrusted.Thing}}}",
        ],
    ),
)
def test_files(cli, mistake, text):
    files = ["--config", cli.file("one.yaml", text), "--config", cli.file("two.yaml", "aggregator: FedAvg")]
    assert f"got 'untrusted.Thing' in {cli.folder}/one.yaml" in mistake(*BASE, *files, "--print_config")


def test_variables(mistake, monkeypatch):
    monkeypatch.setenv("PL_FIT__AGGREGATOR", "untrusted.Thing")
    assert "got 'untrusted.Thing' in the variable PL_FIT__AGGREGATOR" in mistake(*BASE)


@pytest.mark.parametrize(
    "path",
    quick_first(
        3,
        [
            "torch.optim.lr_scheduler.StepLR",
            "torch.optim.Adam.load_state_dict",
            "torch.optim.Adam.mro",
            "lightning_fed.cli.main.main",
            "torch.hub.load",
            "lightning_fed.models.ImageClassifier.load_from_checkpoint",
            "tests.cli.parts.Plain.load_from_checkpoint",
            "lightning_fed.aggregators.fedavg.torch.load",
            "lightning_fed.core.files.write_atomically",
        ],
    ),
)
def test_what_is_not_named_as_a_whole(mistake, path):
    assert "that `--safe_imports` names" in mistake(*BASE, "--model.optimizer", path)


CALLED = "[{class_path: LambdaCallback, init_args: {on_fit_start: %s}}]"


@pytest.mark.parametrize("given", ["{class_path: %s, init_args: {command: touch made}}", "%s"])
def test_a_function_is_refused_unless_it_is_named(cli, mistake, given):
    callback = CALLED % (given % "torch.utils.collect_env.run")
    said = mistake(*BASE, "--trainer.callbacks", callback)
    assert "got 'torch.utils.collect_env.run'; add it there" in said
    assert not (cli.folder / "made").exists()
    with pytest.raises(SystemExit, match="0"):
        cli.run(
            f"--safe_imports={NAMES},torch.utils.collect_env.run", "--print_config", "--trainer.callbacks", callback
        )


@pytest.mark.parametrize("option", ["targets", "users"])
def test_nothing_is_built_where_any_value_may_stand(cli, option):
    """An option without a type took any class that was allowed, with any arguments."""
    cli.file("made.py", "class Made:\n    def __init__(self):\n        open('made', 'w').close()\n")
    words = ("--model", "tests.cli.parts.Plain", *FEDERATED, f"--safe_imports={NAMES},made.Made")
    with pytest.raises(SystemExit):
        cli.run(*words, f"--data.{option}", "{class_path: made.Made}", "--data.source", "nothing")
    cli.run(*words, f"--data.{option}", "{class_path: made.Made}")
    assert not (cli.folder / "made").exists()
    sys.modules.pop("made", None)


def test_what_is_allowed(cli):
    assert cli.run(f"--safe_imports={NAMES}", "--model.optimizer", "torch.optim.Adam", "--aggregator", "FedAvgM")
    assert cli.run(f"--safe_imports={NAMES}", "--model.optimizer", "Adam", "--trainer.callbacks", "UpdateAgreement")


def test_the_option_holds_for_all_commands_of_a_process(cli, mistake):
    mistake(*BASE, "--aggregator", "untrusted.Thing")
    assert "that `--safe_imports` names" in mistake(*BASE[:-2], "--aggregator", "untrusted.Thing")


OPEN = ("fit", "--model", "tests.cli.parts.Plain", "--data", "Digits", "--aggregator", "untrusted.Thing")


@pytest.mark.parametrize(
    "words",
    [
        (*OPEN, "--", "--safe_imports", NAMES),
        ("--", *OPEN, f"--safe_imports={NAMES}"),
        (*OPEN, "--safe_import", NAMES),
        (*OPEN, "--safe-imports", NAMES),
        (*OPEN, f"--Safe_Imports={NAMES}"),
        ("-safe_imports", NAMES, *OPEN),
        (*OPEN, "--save_imports", NAMES),
        ("data", *OPEN[1:], "--", "--safe_imports", NAMES),
    ],
)
def test_where_it_would_be_no_guard_nothing_is_imported(mistake, words):
    said = mistake(*words)
    assert said.startswith("Expected `--safe_imports NAMES`, written so and before any `--`, got '-")


@pytest.mark.parametrize("words", [BASE[-2:], (f"--safe_imports={NAMES}",)])
def test_it_holds_wherever_it_stands_and_for_the_processes_of_a_run(cli, mistake, monkeypatch, words):
    text = cli.file("one.yaml", "aggregator: {class_path: untrusted.Thing}")
    files = ("--config", text)
    for order in ((*words, *BASE[:-2], *files), (*BASE[:-2], *words, *files), (*BASE[:-2], *files, *words)):
        assert "that `--safe_imports` names" in mistake(*order)
    assert os.environ["LIGHTNING_FED_SAFE_IMPORTS"] == NAMES
    _common.parsing_settings.update(import_path_denylist=[], import_path_allowlist=[])  # as in a new process
    assert "that `--safe_imports` names" in mistake(*BASE[:-2], *files)


@pytest.mark.parametrize("name", ["untrusted", "package", "package.untrusted"])
def test_a_module_is_refused_and_not_imported(cli, mistake, name):
    (cli.folder / "package").mkdir()
    for path in ("package/__init__.py", "package/untrusted.py"):
        cli.file(path, "open('made', 'w').close()\n")
    assert f"got '{name}', which is none" in mistake("fit", "--safe_imports", name)
    assert not (cli.folder / "made").exists()


@pytest.mark.parametrize("name", ["jsonargparse.set_parsing_settings", "jsonargparse.ArgumentParser"])
def test_what_could_take_the_guard_back_is_refused(mistake, name):
    said = mistake("fit", "--safe_imports", name)
    assert said.startswith("Expected after `--safe_imports` names that can be allowed, but: ")


@pytest.mark.parametrize("words", [["--safe_imports"], ["--safe_imports="], ["--safe_imports", "a-b,c"]])
def test_names_that_are_none(mistake, words):
    assert mistake("fit", *words).startswith("Expected after `--safe_imports` full names of classes and functions, ")


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        "torch.optim",
        "torch.no_such",
        "no_such.Thing",
        "torch.float32",
        "tests.cli.parts.Plain.load_from_checkpoint",
    ],
)
def test_packages_and_what_is_not_there_are_refused(mistake, name):
    assert f"got '{name}', which is" in mistake("fit", "--safe_imports", f"tests.cli.parts.Plain,{name}")


def test_a_configuration_cannot_allow_itself(cli, mistake):
    text = "safe_imports: untrusted\n"
    assert mistake(*BASE, "--config", cli.file("one.yaml", text)).startswith("There is no option `--safe_imports`")
