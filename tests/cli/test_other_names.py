"""Options that Lightning calls otherwise."""

from collections.abc import Callable

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
    expected = "Expected no `--trainer.max_steps` of Lightning's in a federated run, got 100: "
    assert mistake("fit", *WORDS, "--trainer.max_steps", "100").startswith(expected)
    file = cli.file("their.yaml", "trainer: {max_steps: 100}\n")
    assert mistake("fit", *WORDS, "--config", file).startswith(expected)
    assert "--trainer.max_rounds" in mistake("fit", *WORDS, "--trainer.max_epochs", "many")
