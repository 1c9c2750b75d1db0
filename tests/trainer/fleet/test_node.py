"""What a node and a server tell each other before and in a round, and what they refuse."""

import json
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.callbacks import ClientEvaluation, ClipUpdates, TopK
from lightning_fed.client_algorithms import ALIE, DPSGD, SCAFFOLD, FedCM, FedGA, LocalOnly, MimeLite
from lightning_fed.engines.fleet.packets import pack, unpack
from lightning_fed.trainer.fleet import LocalFleet, Node
from tests.composition.composition_parts import Net, make_data, make_trainer, start
from tests.parts import Classifier, federated_trainer, points
from tests.trainer.fleet.fleets import SHARES, data_of, fit, fleet_of, rows_of

ALONE = {str(client): [client] for client in (0, 1, 3, 4, 5)}


def plain(*more: Any, **options: Any) -> FederatedTrainer:
    return make_trainer("FedAvg", "none", "none", *more, **options)


class Wide(Classifier):
    """Some 36,000 weights, so that what packets say besides is small."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(5, 4000), nn.ReLU(), nn.Linear(4000, 3)))


@pytest.mark.parametrize(
    ("make", "down"),
    [
        (list, True), (lambda: [SCAFFOLD()], True), (lambda: [FedCM(0.3)], True), (lambda: [MimeLite(0.5)], True),
        (lambda: [FedGA(0.5)], False), (lambda: [TopK(0.1)], True), (lambda: [TopK(0.1), SCAFFOLD()], True),
    ],
    ids=["FedAvg", "SCAFFOLD", "FedCM", "MimeLite", "FedGA", "top-k", "top-k of SCAFFOLD"],
)  # fmt: skip
def test_the_bytes_that_are_counted_are_those_sent(make: Any, down: bool, tmp_path: Any) -> None:
    def trainer() -> FederatedTrainer:
        return federated_trainer(tmp_path, *make(), max_rounds=2)

    server, fleet = trainer(), fleet_of(trainer, net=Wide, shares=ALONE)
    server.fleet = fleet
    server.fit(Wide())
    fleet.close()
    logged = {name: float(value) for name, value in server.logged_metrics.items()}
    assert logged["fleet/bytes_up"] == pytest.approx(logged["comm/bytes_up"] / 2, rel=0.05)
    if down:  # else a node is sent w twice, before the exchange and after it
        assert logged["fleet/bytes_down"] == pytest.approx(logged["comm/bytes_down"] / 2, rel=0.05)


def test_a_client_that_sends_nothing_sends_no_zeros(tmp_path: Any) -> None:
    trainer = lambda: federated_trainer(tmp_path, LocalOnly())  # noqa: E731
    server, fleet = trainer(), fleet_of(trainer, net=Wide)
    server.fleet = fleet
    server.fit(Wide())
    fleet.close()
    assert server.logged_metrics["fleet/bytes_up"] < 10_000


def test_a_node_may_train_many_clients_at_once() -> None:
    here = fit(plain(precision="64-true", engine="sequential"))
    there = fit(
        plain(precision="64-true"), fleet_of(lambda: plain(precision="64-true", engine="vectorized"), shares=SHARES)
    )
    torch.testing.assert_close(here.weights, there.weights, rtol=0, atol=1e-12)


class Evaluation(LightningDataModule):
    """The data of a server: no client's."""

    def val_dataloader(self) -> Any:
        return DataLoader(points(12, seed=1), batch_size=8)

    test_dataloader = val_dataloader


class Graded(Classifier):
    """Logs a loss of the test set too."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))


def test_a_server_validates_on_data_of_its_own(tmp_path: Any) -> None:
    options: Any = {"max_rounds": 2, "precision": "64-true", "check_test_every_n_rounds": 1}
    trainer = lambda: federated_trainer(tmp_path, **options)  # noqa: E731
    model = lambda: (torch.manual_seed(0), Graded())[1]  # noqa: E731
    data = make_data("unequal")
    data.val_dataloader = data.test_dataloader = Evaluation().val_dataloader  # type: ignore[method-assign]
    here, there, fleet = trainer(), trainer(), fleet_of(trainer, net=model)
    here.fit(model(), data)
    there.fleet = fleet
    there.fit(model(), Evaluation())
    fleet.close()
    assert {"val/loss", "test/loss"} <= rows_of(there).keys()
    assert rows_of(here) == pytest.approx(rows_of(there), rel=1e-12)
    assert there.validate(verbose=False)[0]["val/loss"] == pytest.approx(rows_of(here)["val/loss"])


def test_a_server_knows_of_clients_what_nodes_say() -> None:
    server, data = plain(max_rounds=1), make_data("unequal")
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            known = trainer.datamodule
            seen.update(sizes=trainer.client_sizes, counts=known.split.class_counts(known.labels, known.num_classes))

    server.callbacks.insert(0, Look())
    fit(server, fleet_of(plain))
    data.setup("fit")
    assert seen["sizes"].tolist() == data.train_source().sizes.tolist()
    assert seen["counts"].tolist() == data.class_counts().tolist()


class OtherLayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.requires_grad_(False)  # as it was drawn here


@pytest.mark.parametrize(
    ("make", "net", "named"),
    [
        (lambda: make_trainer("FedAvgM"), start, "the server's method"),
        (lambda: plain(local_epochs=2), start, "--trainer.local_epochs"),
        (lambda: plain(precision="64-true"), start, "--trainer.precision"),
        (plain, OtherLayer, "the server's parameters of"),
        (plain, lambda: (torch.manual_seed(1), Frozen())[1], "values of what is frozen"),
    ],
)
def test_a_node_of_another_run_is_refused_before_the_first_round(make: Any, net: Any, named: str) -> None:
    server = plain()
    server.fleet = fleet_of(make, net=net)
    module = Frozen() if "frozen" in named else start()
    with pytest.raises(FederatedError, match=f"Node a cannot take part in the run: .*{named}"):
        server.fit(module)
    server.fleet.close()


class Looks(Callback):
    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        update.delta.mul_(2)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ([Looks()], "got Looks, which reads or changes clients while they train"),
        ([ClientEvaluation()], "got ClientEvaluation, which reads or changes clients"),
        ([TopK(0.1), ClipUpdates(1.0)], "got ClipUpdates after it: put TopK last"),
        ([DPSGD(clip=1.0, delta=1e-3, noise=1.0)], "does not look on while clients train, over a fleet, got DPSGD"),
        ([ALIE(0.5)], "does not look on while clients train, over a fleet, got ALIE"),
    ],
)
def test_what_a_fleet_does_not_carry_is_refused(more: Any, named: str) -> None:
    with pytest.raises(FederatedError, match=named):
        fit(plain(*more), fleet_of(plain))


class LogsMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss)
        self.log("train/mean", self.metric)
        return loss


def test_a_metric_object_of_training_is_refused() -> None:
    server = plain()
    server.fleet = fleet_of(plain, net=LogsMetric)
    with pytest.raises(FederatedError, match="Expected `training_step` to log numbers over a fleet, got Metric"):
        server.fit(LogsMetric())
    server.fleet.close()


def test_nodes_must_agree_on_who_is_where() -> None:
    for shares, batch_sizes, named in (
        ({"a": [0, 1], "b": [1, 3]}, (8, 8), "each client at one node, got client 1 at a and b"),
        (
            {"a": [0, 1], "b": [3]},
            (8, 4),
            "Node b cannot take part in the run: Expected the server's `--data.batch_size`, 8, got 4",
        ),
        ({}, (), "a fleet with nodes when the run begins"),
    ):
        nodes = {
            name: Node(plain(), start(), data_of(clients, size), clients)
            for (name, clients), size in zip(shares.items(), batch_sizes, strict=True)
        }
        with pytest.raises(FederatedError, match=named):
            fit(plain(), LocalFleet(nodes))


def test_numbers_of_clients_that_no_node_has_are_named() -> None:
    nodes = {"a": Node(plain(), start(), data_of([0, 1]), [2, 4])}
    with pytest.warns(UserWarning, match="No node has 3 of the 5 clients, such as client 0, so rounds"):
        fit(plain(max_rounds=1), LocalFleet(nodes))


def test_a_node_needs_the_data_of_its_clients() -> None:
    with pytest.raises(FederatedError, match="Expected data of the 3 clients"):
        fit(plain(), LocalFleet({"a": Node(plain(), start(), data_of([0, 1]), [0, 1, 7])}))


@pytest.mark.parametrize(
    "packet",
    [b"", b"hello", pack({"kind": "run"}, {}), pack({"kind": "__class__", "ticket": "t"}, {}),
     pack({"kind": "train", "ticket": "t", "clients": [5]}, {})],
)  # fmt: skip
def test_a_node_lives_on_whatever_it_is_asked(packet: bytes) -> None:
    fleet = fleet_of(plain)
    fleet.hello()
    facts, tensors = unpack(fleet.nodes["a"].answer(packet))
    assert set(facts) == {"error", "ticket"}
    assert not tensors
    assert fit(plain(max_rounds=1), fleet).weights.isfinite().all()


def test_a_node_keeps_records_of_rounds_that_a_server_may_go_back_to(tmp_path: Any) -> None:
    make = lambda: make_trainer("FedAvg", "none", "SCAFFOLD", max_rounds=4)  # noqa: E731
    fit(make(), fleet_of(make, folder=tmp_path))
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == [f"client{client}-round{at}.safetensors" for client in (0, 3) for at in (3, 4)]
    facts, tensors = unpack((tmp_path / "a" / names[0]).read_bytes())
    assert (facts, list(tensors)) == ({}, ["0.SCAFFOLD", "first_weights"])


def test_packets_hold_json_and_tensors_alone() -> None:
    sent: list[bytes] = []

    class Listening(LocalFleet):
        def ask(self, packets: Any) -> Any:
            replies = super().ask(packets)
            sent.extend([*packets.values(), *replies.values()])
            return replies

    make = lambda: make_trainer("FedACG", "none", "FedPer")  # noqa: E731
    fit(make(), fleet_of(make, Listening))
    for data in sent:
        length = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + length])
        ends = [entry["data_offsets"][1] for name, entry in head.items() if name != "__metadata__"]
        assert len(data) == 8 + length + max(ends, default=0)
