"""Options that Lightning calls otherwise."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from lightning_fed.callbacks import diagnostics
from lightning_fed.cli.federated_cli import FederatedCLI
from lightning_fed.runs.folder import FLAT_NAMES, fingerprint
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.options import GROUPS
from tests.cli.conftest import CommandLine

WORDS = ["--model", "Plain", "--data", "Digits"]


def test_names_of_lightnings_trainer(cli: CommandLine) -> None:
    call = cli.run("--trainer.max_epochs", "4", "--trainer.log_every_n_steps=5", "--trainer.val_check_interval", "1.0")
    assert call.trainer.max_rounds == 4
    assert "max_epochs" not in call.trainer.run_config["trainer"]
    file = cli.file("their.yaml", "trainer: {max_epochs: 6, check_val_every_n_epoch: 3, num_sanity_val_steps: 0}\n")
    trainer = cli.run("--config", file).trainer
    assert (trainer.max_rounds, trainer.check_val_every_n_rounds) == (6, 3)
    assert cli.run("--config", file, "--trainer.max_epochs=9").trainer.max_rounds == 9


def test_names_without_a_meaning(cli: CommandLine, mistake: Callable[..., str]) -> None:
    expected = "Expected `--trainer.max_steps` not to be set in a federated run, got 100: "
    assert mistake("fit", *WORDS, "--trainer.max_steps", "100").startswith(expected)
    file = cli.file("their.yaml", "trainer: {max_steps: 100}\n")
    assert mistake("fit", *WORDS, "--config", file).startswith(expected)
    assert "--trainer.max_rounds" in mistake("fit", *WORDS, "--trainer.max_epochs", "many")


GROUPED = [
    "--trainer.participation.sampler", "WeightedSampler", "--trainer.participation.sampler.weights=[1, 2, 3, 4]",
    "--trainer.tolerance.max_diverged=0.2", "--trainer.full_gradients.batch_size", "7",
]  # fmt: skip
FLAT = [re.sub(r"participation\.|tolerance\.", "", word).replace("gradients.", "gradient_") for word in GROUPED]
IN_FILE = (
    "trainer: {sampler: {class_path: WeightedSampler, init_args: {weights: [1, 2, 3, 4]}}, max_diverged: 0.2, "
    "full_gradients: {batch_size: 7}}"
)


def test_options_of_groups_have_flat_names(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    config = cli.config(*GROUPED)
    assert config["trainer"]["participation"]["sampler"]["init_args"] == {"weights": [1.0, 2.0, 3.0, 4.0]}
    assert cli.config(*FLAT) == config
    assert cli.config("--config", cli.file("flat.yaml", IN_FILE)) == config
    assert cli.config("--trainer", IN_FILE.removeprefix("trainer: ")) == config
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_DIVERGED", "0.2")
    monkeypatch.setenv("PL_FIT__TRAINER__FULL_GRADIENT_BATCH_SIZE", "7")
    assert cli.config(*FLAT[:3]) == config


DOTTED = "trainer.max_diverged: 0.2\ntrainer.full_gradient_batch_size: 7\ntrainer.sampler.class_path: WeightedSampler\n"
WITHIN = "trainer: {max_diverged: 0.2, full_gradient_batch_size: 7, sampler.class_path: WeightedSampler}\n"


@pytest.mark.parametrize("text", [DOTTED, WITHIN, f"fit:\n  {WITHIN}"])
def test_flat_names_work_in_every_form_of_a_file(cli: CommandLine, text: str) -> None:
    file = cli.file("form.yaml", text)
    before = ["--config", file] if text.startswith("fit") else []
    trainer = cli.config(*([] if before else ["--config", file]), before=before)["trainer"]
    assert trainer["participation"]["sampler"]["class_path"].endswith("WeightedSampler")
    assert (trainer["tolerance"]["max_diverged"], trainer["full_gradients"]["batch_size"]) == (0.2, 7)


def test_lightnings_names_work_below_a_command(cli: CommandLine) -> None:
    file = cli.file("form.yaml", "fit: {trainer: {max_epochs: 6}}\n")
    assert cli.config(before=["--config", file])["trainer"]["max_rounds"] == 6


def test_a_group_in_a_file_of_its_own(cli: CommandLine, mistake: Callable[..., str]) -> None:
    good, bad = cli.file("good.yaml", "{max_diverged: 0.3}"), cli.file("bad.yaml", "{max_diverged: abc}")
    said = mistake("fit", *WORDS, "--trainer.tolerance", bad)
    assert said == f"Expected `--trainer.tolerance.max_diverged` to be of type float, got 'abc' in {bad}."
    beside = f"trainer: {{tolerance: {good}, on_write_error: continue}}"
    said = mistake("fit", *WORDS, "--config", cli.file("beside.yaml", beside))
    assert f"Expected `--trainer.on_write_error` in {good}, as `--trainer.tolerance`" in said
    assert cli.config("--trainer.tolerance", good)["trainer"]["tolerance"]["max_diverged"] == 0.3


class Own(FederatedTrainer):
    """Names some of the flat options itself."""

    def __init__(self, max_diverged: float = 0.25, max_epochs: int = 3, **rest: Any) -> None:
        super().__init__(max_diverged=max_diverged, max_rounds=max_epochs, **rest)


def test_a_trainer_of_ones_own_may_have_them_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "tests.cli.parts.Plain", "--data", "Digits", "--trainer.logger", "false"]
    options = {"run": False, "trainer_class": Own, "save_config_callback": None}
    trainer = FederatedCLI(words, **options).trainer
    assert (trainer.max_diverged, trainer.max_rounds) == (0.25, 3)
    more = ["--trainer.max_diverged=0.5", "--trainer.max_epochs=7", "--trainer.tolerance.process_timeout=2"]
    trainer = FederatedCLI([*words, *more], **options).trainer
    assert (trainer.max_diverged, trainer.max_rounds) == (0.5, 7)
    assert trainer.options.tolerance.process_timeout == 2


def test_a_run_made_before_there_were_groups_is_found(cli: CommandLine) -> None:
    config = cli.config(*GROUPED)
    flat = {name: value for name, value in config["trainer"].items() if name not in GROUPS}
    flat |= {name: config["trainer"][path.split(".")[0]][path.split(".")[1]] for name, path in FLAT_NAMES.items()}
    assert fingerprint({**config, "trainer": flat}) == fingerprint(config) != fingerprint(cli.config())
    longer = [*GROUPED, "--trainer.process_timeout=2", "--trainer.on_write_error=continue"]
    assert fingerprint(cli.config(*longer)) == fingerprint(config)


def test_a_run_made_when_diagnostics_had_longer_names_is_found(cli: CommandLine) -> None:
    """They are in ``lightning_fed.callbacks`` too, as every other class of the package is below its room."""
    config = cli.config(*(f"--trainer.callbacks+={name}" for name in diagnostics.__all__))
    paths = [one["class_path"] for one in config["trainer"]["callbacks"]]
    assert paths == [f"lightning_fed.callbacks.{name}" for name in diagnostics.__all__]
    before = copy.deepcopy(config)
    for one in before["trainer"]["callbacks"]:
        one["class_path"] = one["class_path"].replace("callbacks.", "callbacks.diagnostics.")
    assert fingerprint(before) == fingerprint(config) != fingerprint(cli.config())


def test_the_later_name_wins_over_files_and_words(cli: CommandLine) -> None:
    flat = cli.file("flat.yaml", IN_FILE)
    grouped = cli.file(
        "grouped.yaml", "trainer: {participation: {sampler: UniformSampler}, tolerance: {max_diverged: 0.1}}"
    )
    later = cli.config("--config", flat, "--config", grouped)["trainer"]
    assert later["participation"]["sampler"]["class_path"].endswith("UniformSampler")
    assert (later["tolerance"]["max_diverged"], later["full_gradients"]["batch_size"]) == (0.1, 7)
    back = cli.config("--config", grouped, "--config", flat, "--trainer.sampler.weights", "[2, 1]")["trainer"]
    assert back["participation"]["sampler"]["init_args"] == {"weights": [2.0, 1.0]}
    assert cli.config(*FLAT, "--trainer.sampler=null")["trainer"]["participation"]["sampler"] is None
    assert cli.config(*GROUPED, "--config", "trainer: {sampler: null}")["trainer"]["participation"]["sampler"] is None


@pytest.mark.parametrize("group", ["{sampler: UniformSampler}", "group.yaml", "null"])
def test_both_names_in_one_file_are_refused(mistake: Callable[..., str], group: str) -> None:
    text = f"trainer: {{sampler: WeightedSampler, participation: {group}}}"
    assert "`--trainer.participation" in mistake("fit", *WORDS, "--config", text)


def test_both_names_of_a_variable_are_refused(mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_DIVERGED", "0.2")
    monkeypatch.setenv("PL_FIT__TRAINER__TOLERANCE__MAX_DIVERGED", "0.2")
    assert "`--trainer.tolerance.max_diverged` under one name" in mistake("fit", *WORDS)


def test_a_wrong_value_under_a_flat_name_is_told_by_the_group(mistake: Callable[..., str]) -> None:
    assert mistake("fit", *WORDS, "--trainer.max_diverged", "2", code=1) == (
        "Expected `--trainer.tolerance.max_diverged` to be a share in [0, 1), got 2.0."
    )
