"""Options that are no more, as saved configurations have them, and those that Lightning calls otherwise."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from lightning_fed.cli.other_names import REMOVED
from lightning_fed.runs.folder import fingerprint, fingerprints
from tests.cli.conftest import CommandLine

OLD = """
trainer:
  balance: measured
  cuda_graphs: false
  max_rounds: 3
"""


def test_a_saved_config_is_read_without_what_is_no_more(cli: CommandLine, caplog: pytest.LogCaptureFixture) -> None:
    file = cli.file("old.yaml", OLD)
    with caplog.at_level("INFO"):
        call = cli.run("--config", file)
    assert call.trainer.max_rounds == 3
    (said,) = [record.getMessage() for record in caplog.records if "Left out" in record.getMessage()]
    assert said.startswith(f"Left out of {file}: trainer.balance, trainer.cuda_graphs, ")


def test_so_is_a_part_of_a_config(cli: CommandLine) -> None:
    file = cli.file("trainer.yaml", "balance: samples\nmax_rounds: 4\n")
    assert cli.run("--trainer", file).trainer.max_rounds == 4


@pytest.mark.parametrize("option", REMOVED)
def test_words_that_name_it_are_refused(mistake: object, option: str) -> None:
    sentence = mistake("fit", "--model", "Plain", "--data", "Digits", f"--{option}=true")
    assert sentence.startswith(f"There is no option `--{option}`")


def test_the_run_is_the_same_one() -> None:
    """By the hash that the release before would have made of it."""
    options = {"max_rounds": 3, "local_steps": 2}
    before = fingerprint({"trainer": {**options, "cuda_graphs": False}})
    assert fingerprint({"trainer": options}) == before
    assert fingerprint({"trainer": {**options, "cuda_graphs": True}}) != before


def before(**options: Any) -> str:
    """The hash that the release before has made of a config, by hand."""
    kept = {"trainer": {"cuda_graphs": False, "local_steps": 2, **options}}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def test_runs_are_found_whose_defaults_were_others():
    options = {"max_rounds": 3, "local_steps": 2}
    now = fingerprints({"trainer": {**options, "engine": "auto", "memory_format": "auto"}})
    # What nobody asked for, and what was asked for and is the default by now.
    assert set(now) == {before(engine=name, memory_format="preserve") for name in ("sequential", "auto")}
    saved = {"engine": "sequential", "memory_format": "preserve"}  # in a config.yaml of then
    assert fingerprints({"trainer": {**options, **saved}}) == [before(**saved)] * 2
    one = fingerprints({"trainer": {**options, "engine": "vectorized", "memory_format": "auto"}})
    assert before(engine="vectorized", memory_format="preserve") in one
    assert not set(one) & set(now)


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
    expected = "Expected no `--trainer.max_steps` of Lightning's in a federated run, got 100: "
    assert mistake("fit", *WORDS, "--trainer.max_steps", "100").startswith(expected)
    file = cli.file("their.yaml", "trainer: {max_steps: 100}\n")
    assert mistake("fit", *WORDS, "--config", file).startswith(expected)
    assert "--trainer.max_rounds" in mistake("fit", *WORDS, "--trainer.max_epochs", "many")


def test_runs_of_data_without_the_newer_options_are_found():
    before = {"num_clients": 5, "batch_size": 32, "num_workers": 0}
    given = {**before, "num_workers": None, "collate_fn": None, "drop_last": None, "source": None}
    assert fingerprint({"data": {"init_args": given}}) == fingerprint({"data": {"init_args": before}})
    for change in ({"drop_last": True}, {"num_workers": 1}, {"source": {"class_path": "Theirs"}}):
        assert fingerprint({"data": {"init_args": {**given, **change}}}) != fingerprint({"data": {"init_args": before}})


def test_runs_of_classes_without_their_newer_options_are_found():
    def named(options: Any) -> str:
        part = {"class_path": "lightning_fed.data.FEMNIST", "init_args": {"std": 0.5, **options}}
        assert fingerprint({"inside": [{"of": part}]}) != fingerprint({"inside": []})
        return fingerprint({"data": part})

    assert named({"digits_only": False}) == named({}) != named({"digits_only": True})
