"""The package's client algorithms on the command line: one, a list, their arguments, and mistakes in them."""

import re

import pytest
import yaml

from lightning_fed.client_algorithms import FedGA, FedProx

pytestmark = pytest.mark.slow

LIST = """
client:
  - class_path: FedProx
    init_args: {mu: 0.3}
  - class_path: FedGA
    init_args: {beta: 0.1, form: step}
"""


def algorithms(trainer):
    """The trainer's client algorithms, as pairs of a short name and its arguments."""
    chosen = trainer.run_config["client"]
    entries = chosen if isinstance(chosen, list) else [chosen]
    return [(entry["class_path"].rpartition(".")[2], entry.get("init_args", {})) for entry in entries]


@pytest.mark.parametrize(
    "words",
    [
        ("--client", "FedProx", "--client.mu", "0.1"),
        ("--client=FedProx", "--client.mu=.1"),
        ("--client=lightning_fed.client_algorithms.FedProx", "--client.mu=1e-1"),
        ("--client={class_path: FedProx, init_args: {mu: 0.1}}",),
        ("--client=[{class_path: FedProx, init_args: {mu: 0.1}}]",),
    ],
)
def test_one_algorithm_and_its_argument(cli, words):
    trainer = cli.run(*words).trainer
    assert algorithms(trainer) == [("FedProx", {"mu": 0.1})]
    made = [callback for callback in trainer.callbacks if isinstance(callback, FedProx)]
    assert [callback.mu for callback in made] == [0.1]


@pytest.mark.parametrize(
    "words",
    [
        ("--client+=FedProx", "--client.mu", ".3", "--client+=FedGA", "--client.beta", ".1", "--client.form=step"),
        ("--config", LIST),
        ("--client=[{class_path: FedProx, init_args: {mu: 0.3}}]", "--client+=FedGA", "--client.beta=.1")
        + ("--client.form", "step"),
    ],
)
def test_a_list_in_order(cli, words):
    trainer = cli.run(*words).trainer
    prox, ga = trainer.callbacks[:2]
    assert isinstance(prox, FedProx)
    assert isinstance(ga, FedGA)
    assert (prox.mu, ga.beta, ga.form, ga.measure_from) == (0.3, 0.1, "step", "displaced")
    assert trainer.label == "FedAvg+FedProx+FedGA"


def test_a_list_of_a_file_is_added_to_and_replaced(cli):
    path = cli.file("list.yaml", LIST)
    added = cli.run("--config", path, "--client+=SCAFFOLD", "--client.option", "I").trainer
    assert [name for name, _ in algorithms(added)] == ["FedProx", "FedGA", "SCAFFOLD"]
    assert algorithms(added)[2][1] == {"option": "I"}
    last = cli.run("--config", path, "--client.beta=0.7").trainer
    assert [arguments.get("beta") for _, arguments in algorithms(last)] == [None, 0.7]
    replaced = cli.run("--config", path, "--client", "FedGA").trainer
    assert algorithms(replaced) == [("FedGA", {"beta": 0.05, "form": "start", "measure_from": "displaced"})]
    assert cli.config("--config", path, "--client=null")["client"] is None


@pytest.mark.parametrize(
    "words",
    [
        ("--client.beta={1: 0.1, 50: 0.01}",),
        ("--client.beta", "{1: 0.1, 50: 0.01}"),
        ('--client.beta={"1": 0.1, "50": 0.01}',),
        ("--client.beta=3", "--client.beta={1: 0.1, 50: 0.01}"),
    ],
)
def test_beta_by_round(cli, words):
    trainer = cli.run("--client=FedGA", *words).trainer
    (fedga,) = (callback for callback in trainer.callbacks if isinstance(callback, FedGA))
    assert fedga.beta == {1: 0.1, 50: 0.01}
    assert [fedga.beta_at(round) for round in (1, 49, 50, 200)] == [0.1, 0.1, 0.01, 0.01]


@pytest.mark.parametrize("beta", ["0.25", "{2: 0.5, 7: 0.0}"])
def test_a_resolved_config_gives_the_same_algorithms_again(cli, beta):
    first = cli.run("--client+=FedProx", "--client+=FedGA", f"--client.beta={beta}").trainer
    path = cli.file("again.yaml", yaml.safe_dump({"client": first.run_config["client"]}))
    second = cli.run("--config", path).trainer
    assert second.run_config == first.run_config
    assert [vars(callback) for callback in second.callbacks[:2]] == [vars(callback) for callback in first.callbacks[:2]]


@pytest.mark.parametrize(
    ("words", "label"),
    [
        (("--client=FedProx",), "FedAvg+FedProx"),
        (("--client+=SCAFFOLD", "--client+=FedGA"), "FedAvg+SCAFFOLD+FedGA"),
        (("--client=FedDyn", "--aggregator=FedDynServer"), "FedDynServer+FedDyn"),
        (("--client=StatelessSCAFFOLD", "--aggregator.mask=SignAgreement"), "FedAvg+SignAgreement+StatelessSCAFFOLD"),
    ],
)
def test_the_default_name_of_a_run_says_what_clients_do(cli, words, label):
    trainer = cli.run(*words).trainer
    assert (trainer.label, trainer.name) == (label, label.lower())
    named = cli.run(*words, "--trainer.name=mine").trainer
    assert (named.label, named.name) == (label, "mine")


def test_client_algorithms_come_first_whatever_they_are_named_with(cli):
    callbacks = "--trainer.callbacks={class_path: lightning.pytorch.callbacks.LambdaCallback}"
    order = cli.run("--aggregator=FedDynServer", callbacks, "--client=FedDyn").trainer.callbacks
    names = [type(callback).__name__ for callback in order]
    assert names[0] == "FedDyn"
    assert 0 < names.index("LambdaCallback") < names.index("FedDynServer")


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--client=FedGA", "--client.mu=0.1"], 2, "no option `--client.mu`; FedGA has beta, form and measure_from"),
        (["--client=FedProx", "--client.mu=-1"], 1, "`--client.mu` of FedProx to be at least 0 and finite, got -1"),
        (["--client=GradAlign", "--client.beta={0: 1.0}"], 1, "`--client.beta` of GradAlign .*by round from 1 on"),
        (["--client+=FedGA", "--client+=FedProx", "--client+=FedGA"], 1, "got FedGA twice: .*`--client`"),
        (["--client=[SCAFFOLD, SCAFFOLD]"], 1, "got SCAFFOLD twice: .*`--client`"),
        (["--client=[FedGA, GradAlign]"], 1, "got FedGA and GradAlign: .*`--client`"),
    ],
)
def test_mistakes_are_one_sentence(mistake, words, code, sentence):
    got = mistake("fit", "--model", "Plain", "--data", "Digits", "--trainer.logger=false", *words, code=code)
    assert re.search(sentence, got), got
