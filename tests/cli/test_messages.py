"""Every mistake ends with one sentence that names the option and what to do."""

import pytest

from lightning_fed.cli import main
from tests.parts import quick_first

BASE = ("fit", "--model", "Plain", "--data", "Digits")


@pytest.mark.parametrize(
    ("words", "says"),
    quick_first(
        12,
        [
            (["--trainer.max_round", "3"], ["`--trainer.max_round`", "did you mean `--trainer.max_rounds`"]),
            (["--trainer.max_epoch", "3"], ["`--trainer.max_epoch`", "did you mean `--trainer.max_epochs`"]),
            (["--trainer.max_round=3"], ["`--trainer.max_round`", "did you mean `--trainer.max_rounds`"]),
            (["--nothing.like.it", "3"], ["`--nothing.like.it`", "`lightning-fed fit --help`"]),
            (["stray"], ["'stray'", "--name value"]),
            ([""], ["the word ''", "--name value"]),
            (
                ["--aggregator", "FedAvgg"],
                ["`--aggregator`", "'FedAvgg'", "did you mean FedAvg (known: ", "and others"],
            ),
            (["--aggregator", "fedavg"], ["did you mean FedAvg"]),
            (["--aggregator", "Zzz"], ["`--aggregator`", "'Zzz'", "known: ", "FedAvg"]),
            (["--aggregator", "Aggregator"], ["`--aggregator`", "can be built", "FedAvg"]),
            (["--aggregator", "torch.nn.Linear"], ["`--aggregator`", "subclass of Aggregator", "FedAvg"]),
            (["--aggregator", "no.such.Thing"], ["`--aggregator`", "'no.such.Thing'", "No module named 'no'"]),
            (["--aggregator", "tests.cli.parts.Nothing"], ["`--aggregator`", "has no attribute 'Nothing'"]),
            (["--aggregator.lrr", "3"], ["`--aggregator.lrr`", "did you mean `--aggregator.lr`", "weighting"]),
            (["--aggregator.lr", "abc"], ["`--aggregator.lr`", "float", "'abc'"]),
            (["--aggregator.weighting", "abc"], ["`--aggregator.weighting`", "'samples', 'uniform'", "'abc'"]),
            (["--aggregator.mask", "SignAgreemen"], ["`--aggregator.mask`", "did you mean SignAgreement", "OtherMask"]),
            (["--aggregator.mask.threshold", "1"], ["`--aggregator.mask`", "SignAgreement"]),
            (
                ["--aggregator.mask", "SignAgreement", "--aggregator.mask.threshold", "abc"],
                ["`--aggregator.mask.threshold`", "float", "'abc'"],
            ),
            (
                ["--aggregator.mask", "SignAgreement", "--aggregator.mask.tau", "1"],
                ["`--aggregator.mask.tau`", "SignAgreement has binary, comparison, threshold and votes"],
            ),
            (["--client", "Pul"], ["`--client`", "did you mean Pull"]),
            (["--client=[Pull, Pus]"], ["`--client`", "did you mean Push"]),
            (["--client+=Pull", "--client.mu", "x"], ["`--client.mu`", "float", "'x'"]),
            (["--client", "Pull", "--client.beta", "1"], ["`--client.beta`", "Pull has mu"]),
            (["--data.num_clients", "x"], ["`--data.num_clients`", "int", "'x'"]),
            (["--data.partitioner", "Shard"], ["`--data.partitioner`", "did you mean Shards"]),
            (["--model.optimizer", "SDG"], ["`--model.optimizer`", "did you mean SGD"]),
            (["--model.optimizer", "SGD", "--model.optimizer.lr", "x"], ["`--model.optimizer.lr`", "float", "'x'"]),
            (
                ["--model.optimizer", "SGD", "--model.optimizer.rl", "1"],
                ["`--model.optimizer.rl`", "SGD has", "momentum"],
            ),
            (["--trainer.max_rounds", "abc"], ["`--trainer.max_rounds`", "int", "'abc'"]),
            (["--trainer.max_rounds", "2.5"], ["`--trainer.max_rounds`", "int", "'2.5'"]),
            (["--trainer.max_rounds"], ["`--trainer.max_rounds`", "a value"]),
            (["--trainer.clients_per_round", "abc"], ["`--trainer.clients_per_round`", "int or float", "'abc'"]),
            (["--trainer.local_schedule", "stop"], ["`--trainer.local_schedule`", "'restart', 'continue'", "'stop'"]),
            (["--trainer.sampler", "Uniform"], ["`--trainer.participation.sampler`", "UniformSampler"]),
            (["--trainer.callbacks", "EarlyStoping"], ["`--trainer.callbacks`", "did you mean EarlyStopping"]),
            (["--trainer.logger", "WandbLoger"], ["`--trainer.logger`", "did you mean WandbLogger"]),
            (["--seed_everything", "x"], ["`--seed_everything`", "int", "'x'"]),
            (["--config", "missing.yaml"], ["`--config`", "missing.yaml'", "missing or"]),
            (["--config", "."], ["`--config`", "to name a file"]),
            (["--config"], ["`--config`", "a value"]),
            (["--trainer", "missing.yaml"], ["`--trainer`", "'missing.yaml'"]),
        ],
    ),
)
def test_words(mistake, words, says):
    sentence = mistake(*BASE, *words)
    for part in says:
        assert part in sentence
    assert sentence[-1] in ".?"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("aggregator:\n  class_path: FedAvg\n  init_args: {lrr: 4}\n", ["`--aggregator.lrr`", "`--aggregator.lr`"]),
        ("aggregator: FedAvgg\n", ["`--aggregator`", "'FedAvgg'", "did you mean FedAvg"]),
        ("client:\n- class_path: Pull\n  init_args: {muu: 1}\n", ["`--client.muu`", "`--client.mu`"]),
        ("trainer: {max_rounds: many}\n", ["`--trainer.max_rounds`", "int", "'many'"]),
        ("trainer:\n max_rounds: 3\n  name: x\n", ["YAML", "line 3, column 7"]),
        ("trainer: [1\n", ["YAML", "line "]),
        ("trainer: {max_time: 1}", ["`--trainer.max_time` to be of type str or timedelta or ", "'1'"]),
        (
            "data: {class_path: Digits, init_args: {partitioner: 3}}",
            ["`--data.partitioner`", "Partitioner, got '3'", "IID"],
        ),
        ("- a\n- b\n", ["`name: value`"]),
        ("", ["`name: value`"]),
    ],
)
def test_files(cli, mistake, text, says):
    good = cli.file("good.yaml", "trainer:\n  name: good\n")
    sentence = mistake(*BASE, "--config", good, "--config", cli.file("wrong.yaml", text))
    for part in [*says, "wrong.yaml"]:
        assert part in sentence


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("trainer:\n  max_rounds: 3\n  max_round: 4\n", "trainer.max_round"),
        ("trainr:\n  max_rounds: 3\n", "trainr.max_rounds"),
        ("fit:\n  trainer:\n    max_rounds: 3\n", "fit.trainer.max_rounds"),
    ],
)
def test_options_in_a_file_that_no_command_has(cli, mistake, text, name):
    assert mistake(*BASE, "--config", cli.file("wrong.yaml", text)) == (
        f"There is no option `--{name}`; did you mean `--trainer.max_rounds` (`lightning-fed fit --help` lists all)?"
    )


def test_a_file_that_is_no_text(cli, mistake, tmp_path):
    (tmp_path / "image.yaml").write_bytes(bytes(range(256)))
    assert "image.yaml to be YAML" in mistake(*BASE, "--config", "image.yaml")


def test_a_group_that_is_no_mapping(cli, mistake):
    assert "`--trainer` to be a mapping of options, got '3'" in mistake(*BASE, "--config", "trainer: 3")


def test_a_variable(mistake, monkeypatch):
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_ROUNDS", "abc")
    sentence = mistake(*BASE)
    assert "`--trainer.max_rounds`" in sentence
    assert "PL_FIT__TRAINER__MAX_ROUNDS" in sentence


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["fit, validate, test, predict, data, report, study, dashboard, attack, privacy, flower, configs and"]),
        (["fitt"], ["'fitt'", "did you mean `fit`"]),
        (["reprot"], ["did you mean `report`"]),
        (["--trainer.max_rounds", "3", "fit"], ["the command before its options"]),
        (["--foo"], ["`--foo`"]),
        (["fit"], ["`--data` and `--model`", "--config"]),
        (["fit", "--model", "Plain"], ["`--data`"]),
        (["test", "--data", "Digits"], ["`--model`"]),
        (["fit", "--model", "ImageClassifier", "--data", "Digits"], ["`--model.backbone`", "ImageClassifier needs"]),
        (
            ["fit", "--data", "Digits", "--model", "ImageClassifier", "--model.backbone", "LeNett"],
            ["`--model.backbone`", "did you mean LeNet", "MLP"],
        ),
        (["test", "--model", "Plain", "--data", "Digits", "--verbose", "q"], ["`--verbose`", "bool"]),
    ],
)
def test_commands_and_what_they_need(mistake, words, says):
    sentence = mistake(*words)
    for part in says:
        assert part in sentence


def test_a_seed_out_of_range(mistake):
    assert mistake(*BASE, "--seed_everything", "-1", code=1).startswith("Expected `--seed_everything` to be in [0, ")


@pytest.mark.slow
def test_mistakes_found_by_a_constructor(mistake):
    failing = [*BASE, "--client", "Failing", "--client.how"]
    assert mistake(*failing, "mistake", code=1) == "Expected `--client.how` to be kind, got mistake."
    assert mistake(*failing, "lightning", code=1) == "Lightning does not like it."
    assert mistake(*failing, "interrupt", code=130) == "Interrupted."
    inside = [*BASE, "--aggregator.mask", "SignAgreement", "--aggregator.mask.threshold", "7"]
    assert "threshold" in mistake(*inside, code=1)


def test_a_defect_in_the_users_code_keeps_its_type_and_traceback(cli):
    with pytest.raises(RuntimeError, match="a defect of the user's own") as error:
        cli.run("--client", "Failing")
    assert any(entry.path.name == "parts.py" for entry in error.traceback)


@pytest.mark.parametrize("how", ["word", "variable"])
def test_debug_shows_the_traceback_of_a_parse(cli, capsys, monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv("LIGHTNING_FED_DEBUG", "1")
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", *(["--debug"] if how == "word" else []), "--trainer.max_rounds", "x"])
    assert exit_info.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("Traceback") for line in lines)
    assert "`--trainer.max_rounds`" in lines[-1]


def test_debug_raises_what_is_found_later(cli):
    with pytest.raises(ValueError, match="to be kind"):
        cli.run("--client", "Failing", "--client.how", "mistake", "--debug")


def test_a_message_of_another_form_is_still_one_line(mistake):
    sentence = mistake(*BASE, "--print_config=upside_down")
    assert sentence.startswith('Expected options that fit, got: Invalid option "upside_down" for --print_config; see ')
