"""A new class takes none of the former one's arguments, wherever and however it is named."""

import jsonargparse._typehints as typehints
import pytest

from lightning_fed.cli.parser import FederatedArgumentParser

pytestmark = pytest.mark.slow

TUNED = """
aggregator:
  class_path: FedAvg
  init_args:
    lr: 0.05
    weighting: uniform
    mask:
      class_path: SignAgreement
      init_args:
        threshold: 0.7
        binary: true
"""
TUNED_DATA = """
data:
  class_path: Digits
  init_args:
    num_clients: 5
    partitioner:
      class_path: Shards
      init_args: {classes_per_client: 3}
"""


@pytest.fixture
def tuned(cli):
    return cli.file("tuned.yaml", TUNED)


@pytest.mark.parametrize(
    "change",
    [
        ["--aggregator", "OtherAggregator"],
        ["--aggregator=tests.cli.parts.OtherAggregator"],
        ["--aggregator.class_path", "OtherAggregator"],
        ["--aggregator={class_path: OtherAggregator}"],
        ["--config", "aggregator: OtherAggregator"],
        ["--config", "aggregator: {class_path: tests.cli.parts.OtherAggregator}"],
        ["--aggregator", "null", "--aggregator", "OtherAggregator"],
    ],
)
def test_a_new_class_carries_nothing_over(cli, tuned, change):
    expected = cli.config("--aggregator", "OtherAggregator")["aggregator"]
    assert expected["init_args"]["lr"] == 1.0
    assert expected["init_args"]["mask"] is None
    assert cli.config("--config", tuned, *change)["aggregator"] == expected


def test_a_new_class_from_a_second_file_carries_nothing_over(cli, tuned):
    second = cli.file("second.yaml", "aggregator:\n  class_path: OtherAggregator\n  init_args: {lr: 0.5}\n")
    arguments = cli.config("--config", tuned, "--config", second)["aggregator"]["init_args"]
    assert arguments["lr"] == 0.5
    assert arguments["mask"] is None
    assert arguments["weighting"] == "samples"


def test_there_and_back_again_is_fresh(cli, tuned):
    assert (
        cli.config("--config", tuned, "--aggregator", "OtherAggregator", "--aggregator", "FedAvg")["aggregator"]
        == cli.config()["aggregator"]
    )


def test_leaving_the_default_class_drops_what_was_set_on_it(cli):
    arguments = cli.config("--aggregator.lr", "0.5", "--aggregator", "OtherAggregator")["aggregator"]["init_args"]
    assert arguments["lr"] == 1.0


def test_options_after_the_change_are_kept(cli, tuned):
    arguments = cli.config("--config", tuned, "--aggregator", "OtherAggregator", "--aggregator.lr", ".3")["aggregator"]
    assert arguments["init_args"]["lr"] == 0.3


@pytest.mark.parametrize(
    "again",
    [
        ["--aggregator", "FedAvg"],
        ["--aggregator", "lightning_fed.aggregators.FedAvg"],
        ["--aggregator", "lightning_fed.aggregators.fedavg.FedAvg"],
        ["--config", "aggregator: FedAvg"],
        ["--config", "aggregator: {class_path: lightning_fed.aggregators.fedavg.FedAvg}"],
    ],
)
def test_the_same_class_named_again_keeps_its_arguments(cli, tuned, again):
    before = cli.config("--config", tuned)["aggregator"]["init_args"]
    assert before["lr"] == 0.05
    assert cli.config("--config", tuned, *again)["aggregator"]["init_args"] == before
    after = cli.config("--config", tuned, *again, "--aggregator.lr", "0.5")["aggregator"]["init_args"]
    assert after == {**before, "lr": 0.5}


@pytest.mark.parametrize("change", [["--aggregator.mask", "OtherMask"], ["--config", "aggregator: {mask: OtherMask}"]])
def test_a_mask_inside_an_aggregator(cli, tuned, change):
    change = [word.replace("{mask: OtherMask}", "{init_args: {mask: {class_path: OtherMask}}}") for word in change]
    arguments = cli.config("--config", tuned, *change)["aggregator"]["init_args"]
    assert arguments["lr"] == 0.05
    assert arguments["mask"] == {"class_path": "tests.cli.parts.OtherMask", "init_args": {"threshold": 0.9}}
    kept = cli.config("--config", tuned, "--aggregator.mask", "SignAgreement")["aggregator"]["init_args"]["mask"]
    assert kept["init_args"] == {"threshold": 0.7, "binary": True, "comparison": ">=", "votes": "equal"}


def test_a_partitioner_inside_data(cli):
    tuned = cli.file("data.yaml", TUNED_DATA)
    data = cli.config("--model", "Plain", "--config", tuned, "--data.partitioner", "OtherPartitioner", base=False)[
        "data"
    ]
    assert data["init_args"]["num_clients"] == 5
    assert data["init_args"]["partitioner"]["init_args"] == {"classes_per_client": 7}
    data = cli.config("--model", "Plain", "--config", tuned, "--data", "Digits", base=False)["data"]
    kept = data["init_args"]["partitioner"]["init_args"]
    assert kept == {"classes_per_client": 3, "min_samples": 0, "too_small": "redraw"}


def test_a_default_partitioner(cli):
    partitioner = cli.config("--data.partitioner", "OtherPartitioner")["data"]["init_args"]["partitioner"]
    assert partitioner["init_args"] == {"classes_per_client": 7}


def test_data_and_model(cli):
    tuned = cli.file("data.yaml", TUNED_DATA + "model: {class_path: Plain, init_args: {width: 9}}\n")
    config = cli.config("--config", tuned, "--data", "MNIST", "--model", "OtherPlain", base=False)
    fresh = cli.config("--data", "MNIST", "--model", "OtherPlain", base=False)
    assert config["model"]["init_args"] == {"width": 4}
    assert config["data"] == fresh["data"]


def test_an_optimizer_inside_a_model(cli):
    tuned = ["--model.optimizer", "SGD", "--model.optimizer.lr", "0.5", "--model.optimizer.weight_decay", "0.1"]
    optimizer = cli.config(*tuned, "--model.optimizer", "Adam")["model"]["init_args"]["optimizer"]
    assert optimizer["init_args"]["lr"] == 0.001
    assert optimizer["init_args"]["weight_decay"] == 0
    assert cli.config("--model.optimizer", "Adam")["model"]["init_args"]["optimizer"] == optimizer
    momentum = cli.config(*tuned, "--model.optimizer.momentum", "0.9")["model"]["init_args"]["optimizer"]["init_args"]
    assert (momentum["lr"], momentum["weight_decay"], momentum["momentum"]) == (0.5, 0.1, 0.9)


def test_the_default_optimizer_keeps_its_own_arguments(cli):
    optimizer = cli.config("--model.optimizer.momentum", "0.9")["model"]["init_args"]["optimizer"]["init_args"]
    assert (optimizer["lr"], optimizer["momentum"]) == (0.05, 0.9)


@pytest.mark.parametrize(
    "first", ["client: {class_path: Pull, init_args: {mu: 9.0}}", "client: [{class_path: Pull, init_args: {mu: 9.0}}]"]
)
def test_client_algorithms_alone_and_in_lists(cli, first):
    assert cli.config("--config", first, "--client", "Push")["client"]["init_args"] == {"mu": 0.2, "beta": 0.5}
    pushed = cli.config("--config", first, "--client=[Push]")["client"]
    assert [element["init_args"] for element in pushed] == [{"mu": 0.2, "beta": 0.5}]
    both = cli.config("--config", first, "--client+=Push", "--client.beta", "0.7")["client"]
    assert [element["init_args"] for element in both] == [{"mu": 9.0}, {"mu": 0.2, "beta": 0.7}]


def test_the_rule_ends_with_the_parse(cli):
    discard = typehints.discard_init_args_on_class_path_change
    cli.config("--aggregator", "OtherAggregator")
    assert typehints.discard_init_args_on_class_path_change is discard


def test_a_jsonargparse_without_the_function_is_refused(monkeypatch):
    monkeypatch.delattr(typehints, "discard_init_args_on_class_path_change")
    with pytest.raises(AttributeError, match="discard_init_args_on_class_path_change"):
        FederatedArgumentParser().parse_args([])
