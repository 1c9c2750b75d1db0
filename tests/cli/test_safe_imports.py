"""With ``--safe_imports`` no module is imported that is not of the packages given, wherever an option names it."""

import sys

import pytest

from tests.parts import quick_first

BASE = ("fit", "--model", "tests.cli.parts.Plain", "--data", "Digits", "--safe_imports", "torch,tests")
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
    (["--trainer.sampler", "untrusted.Thing"], "trainer.sampler"),
    (["--trainer", "{callbacks: untrusted.Thing}"], "trainer.callbacks"),
    (["--optimizer", "untrusted.Thing"], "optimizer"),
    (["--lr_scheduler", "untrusted.Thing"], "lr_scheduler"),
]


@pytest.mark.parametrize(("words", "option"), quick_first(3, WORDS))
def test_words(mistake, words, option):
    assert mistake(*BASE, *words) == (
        f"Expected `--{option}` to name a class of the packages that `--safe_imports` gives, got 'untrusted.Thing': "
        "add its package there, or the whole name of a function, if you trust it."
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


@pytest.mark.parametrize("path", quick_first(2, ["torch.hub.load", "torch.os.system", "lightning_fed.cli.main.main"]))
def test_what_an_allowed_package_holds_of_others_or_to_run_code(mistake, path):
    assert "that `--safe_imports` gives" in mistake(*BASE, "--model.optimizer", path)


CALLED = "[{class_path: LambdaCallback, init_args: {on_fit_start: {class_path: %s, init_args: {%s}}}}]"


@pytest.mark.parametrize(
    ("function", "given"),
    quick_first(
        1,
        [
            ("torch.utils.collect_env.run", "command: touch made"),
            ("torch.serialization.load", "f: made, weights_only: false"),
            ("lightning_fed.core.files.write_atomically", "path: made, content: aGVsbG8="),
        ],
    ),
)
def test_a_function_does_not_run_because_its_package_is_allowed(cli, mistake, function, given):
    words = (*BASE[:-1], "torch,tests,lightning", "--trainer.callbacks", CALLED % (function, given))
    assert f"got '{function}': add its package there, or the whole name of a function" in mistake(*words)
    assert not (cli.folder / "made").exists()


def test_a_function_that_is_named_is_allowed(cli):
    words = "--safe_imports=torch,tests,lightning,torch.utils.collect_env.run", "--print_config"
    with pytest.raises(SystemExit, match="0"):
        cli.run(*words, "--trainer.callbacks", CALLED % ("torch.utils.collect_env.run", "command: ls"))


def test_what_is_allowed(cli):
    assert cli.run("--safe_imports=torch,tests", "--model.optimizer", "torch.optim.Adam", "--aggregator", "FedAvgM")


def test_one_command_says_nothing_about_the_next(cli, mistake):
    mistake(*BASE, "--aggregator", "tests_of_others.Thing")
    assert "can be imported" in mistake(*BASE[:-2], "--aggregator", "tests_of_others.Thing")


@pytest.mark.parametrize("words", [["--safe_imports"], ["--safe_imports="], ["--safe_imports", "a-b,c"]])
def test_packages_that_are_none(mistake, words):
    assert mistake("fit", *words).startswith("Expected packages after `--safe_imports`, as in `torch,my_package`, got ")


def test_a_configuration_cannot_allow_itself(cli, mistake):
    text = "safe_imports: untrusted\n"
    assert mistake(*BASE, "--config", cli.file("one.yaml", text)).startswith("There is no option `--safe_imports`")
