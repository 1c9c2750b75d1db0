"""What options mean, where they may come from, and what the trainer gets."""

import pytest
import torch
import yaml
from lightning.pytorch.cli import SaveConfigCallback

from lightning_fed.aggregators import FedAvg
from lightning_fed.cli import FederatedCLI, main


def test_by_default_the_aggregator_is_fedavg_and_there_is_no_client_algorithm(cli):
    call = cli.run()
    config = call.trainer.run_config
    assert config["aggregator"]["class_path"] == "lightning_fed.aggregators.FedAvg"
    assert config["client"] is None
    assert [type(callback) for callback in call.trainer.callbacks].count(FedAvg) == 1


def test_a_mask_alone_stays_with_the_default_aggregator(cli):
    trainer = cli.run("--aggregator.mask", "SignAgreement", "--aggregator.mask.threshold", "0.3").trainer
    aggregator = next(callback for callback in trainer.callbacks if isinstance(callback, FedAvg))
    assert aggregator.mask.threshold == 0.3
    assert aggregator.lr == 1.0


@pytest.mark.slow
def test_both_groups_reach_the_callbacks_of_the_trainer(cli):
    words = ["--trainer.callbacks", "tests.cli.parts.Push", "--client+=Pull", "--client.mu", ".3", "--client+=FedProx"]
    trainer = cli.run(*words, "--aggregator", "OtherAggregator").trainer
    names = [type(callback).__name__ for callback in trainer.callbacks]
    wanted = ["FedProx", "OtherAggregator", "Pull", "Push"]
    assert sorted(name for name in names if name in wanted) == wanted
    assert None not in trainer.callbacks
    single = cli.run("--client", "Pull").trainer
    assert "Pull" in [type(callback).__name__ for callback in single.callbacks]


@pytest.mark.slow
def test_a_method_gets_the_objects_and_its_own_options(cli):
    call = cli.run("--ckpt_path", "last", "--weights", "some.ckpt")
    assert call.command == "fit"
    assert type(call.arguments["model"]).__name__ == "Plain"
    assert type(call.arguments["datamodule"]).__name__ == "Digits"
    assert call.arguments["ckpt_path"] == "last"
    assert call.arguments["weights"] == "some.ckpt"
    call = cli.run("--verbose", "false", command="test")
    assert call.command == "test"
    assert call.arguments["verbose"] is False


def test_a_method_that_weighs_otherwise_keeps_the_options_of_all(cli):
    trainer = cli.run("--aggregator", "FedGMA", "--aggregator.lr", "0.5", "--aggregator.weighting", "inverse").trainer
    assert (trainer.aggregator.lr, trainer.aggregator.weighting) == (0.5, "inverse")


def test_the_trainer_knows_the_config_of_the_experiment(cli):
    config = cli.run("--ckpt_path", "best", "--verbose", "false", command="validate").trainer.run_config
    assert set(config) == {"seed_everything", "trainer", "model", "data", "aggregator", "client", "weights"}
    assert config == yaml.safe_load(yaml.safe_dump(config))
    assert config["seed_everything"] == 0


def test_a_file_may_give_one_option_of_the_trainer(cli):
    file = cli.file("sampler.yaml", "class_path: PoissonSampler\n")
    sampler = cli.config("--trainer.participation.sampler", file)["trainer"]["participation"]["sampler"]
    assert sampler["class_path"] == "lightning_fed.sampling.PoissonSampler"


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("1.0", 1.0), ("0.5", 0.5), ("10", 10)])
def test_counts_and_fractions_stay_apart(cli, text, value):
    stored = cli.config("--trainer.clients_per_round", text)["trainer"]["clients_per_round"]
    assert stored == value
    assert type(stored) is type(value)


@pytest.mark.slow
def test_variables_are_read_and_words_win(cli, monkeypatch):
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_ROUNDS", "3")
    assert cli.config()["trainer"]["max_rounds"] == 3
    assert cli.config("--config", "trainer: {max_rounds: 4}")["trainer"]["max_rounds"] == 4
    assert cli.config("--trainer.max_rounds", "5")["trainer"]["max_rounds"] == 5


def test_a_class_may_come_from_a_variable(cli, monkeypatch):
    monkeypatch.setenv("PL_FIT__AGGREGATOR", "OtherAggregator")
    monkeypatch.setenv("PL_FIT__MODEL", "OtherPlain")
    config = cli.config("--data", "Digits", "--trainer.logger", "false", base=False)
    assert config["aggregator"]["class_path"] == "tests.cli.parts.OtherAggregator"
    assert config["model"]["class_path"] == "tests.cli.parts.OtherPlain"


@pytest.mark.slow
def test_later_files_and_words_win(cli):
    first = cli.file("first.yaml", "trainer: {max_rounds: 7, name: first}\n")
    second = cli.file("second.yaml", "trainer: {max_rounds: 8}\nseed_everything: 5\n")
    config = cli.config("--config", first, "--config", second)
    assert (config["trainer"]["max_rounds"], config["trainer"]["name"], config["seed_everything"]) == (8, "first", 5)
    assert cli.config("--config", first, "--trainer.max_rounds", "9")["trainer"]["max_rounds"] == 9
    assert cli.config("--trainer.max_rounds", "9", "--config", first)["trainer"]["max_rounds"] == 7


@pytest.mark.slow
def test_the_printed_config_parses_to_itself(cli, capsys):
    words = ["--aggregator.mask", "SignAgreement", "--client+=Push", "--client.mu", "3", "--trainer.max_rounds", "2"]
    config = cli.config(*words)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        cli.run(*words, "--print_config")
    assert exit_info.value.code == 0
    printed = cli.file("printed.yaml", capsys.readouterr().out)
    assert cli.config("--config", printed, base=False) == config


@pytest.mark.slow
def test_only_training_saves_its_config(cli):
    def saves(command):
        return [one for one in cli.run(command=command).trainer.callbacks if isinstance(one, SaveConfigCallback)]

    assert len(saves("fit")) == 1
    for command in ("validate", "test", "predict"):
        assert saves(command) == []


def test_nothing_of_a_checkpoint_enters_the_config(cli, tmp_path):
    path = tmp_path / "some.ckpt"
    torch.save({"hyper_parameters": {"_class_path": "tests.cli.parts.Plain", "width": 99}}, path)
    call = cli.run("--ckpt_path", str(path))
    assert call.arguments["ckpt_path"] == str(path)
    assert call.trainer.run_config["model"]["init_args"]["width"] == 3
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes(b"no checkpoint")
    assert cli.run("--ckpt_path", str(damaged)).arguments["ckpt_path"] == str(damaged)


def test_the_package_wins_a_name_that_torchvision_has_too(cli):
    import torchvision.ops  # noqa: F401  # a class that is loaded could be meant by a short name

    words = ["--model", "ImageClassifier", "--model.backbone", "MLP", "--model.backbone.in_features", "64"]
    config = cli.config(*words, "--data", "Digits", "--trainer.logger", "false", base=False)
    assert config["model"]["init_args"]["backbone"]["class_path"] == "lightning_fed.models.MLP"


def test_a_signal_ends_the_program_as_a_signal_does(cli, capsys):
    cli.interrupted = 15
    with pytest.raises(SystemExit) as exit_info:
        cli.run()
    assert exit_info.value.code == 128 + 15
    assert capsys.readouterr().err.splitlines()[-1] == "Saved; resume with `--ckpt_path last`."


def test_report_is_dispatched_with_its_words_and_code(monkeypatch):
    import lightning_fed.lab.report_command as command

    seen = []
    monkeypatch.setenv("LIGHTNING_FED_DEBUG", "0")
    monkeypatch.setattr(command, "main", lambda words: seen.append(words) or 3)
    with pytest.raises(SystemExit) as exit_info:
        main(["report", "runs", "--debug"])
    assert exit_info.value.code == 3
    assert seen == [["runs"]]


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    for word in ("lightning-fed", "fit", "validate", "test", "predict", "report", "--debug"):
        assert word in out


def test_help_of_a_command_explains_options_from_docstrings(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "--trainer.max_rounds" in out
    assert "Rounds to train;" in out
    assert "ImageClassifier" in out
    assert "What clients change in local training" in out
    with pytest.raises(SystemExit):
        main(["fit", "--model.help", "Plain"])
    assert "How wide it is." in capsys.readouterr().out


def test_the_class_runs_from_a_dict(cli):
    FederatedCLI({"subcommand": "fit", "fit": {"model": "Plain", "data": "Digits", "trainer": {"max_rounds": 6}}})
    assert cli.calls[-1].trainer.max_rounds == 6
