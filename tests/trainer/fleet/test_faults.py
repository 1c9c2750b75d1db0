"""Nodes that are lost, late, back or new, a server that is resumed, and replies that nobody should believe."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import FederatedCheckpoint
from lightning_fed.client_algorithms import SCAFFOLD, ClientAlgorithm, FedGA, FedPer
from lightning_fed.engines.fleet.packets import pack, unpack
from lightning_fed.trainer.fleet import LocalFleet, Node
from tests.composition.composition_parts import start
from tests.parts import federated_trainer, quick_first
from tests.trainer.fleet.fleets import SHARES, data_of, fit, fleet_of

Trouble = Callable[[LocalFleet, int, dict[str, bytes]], None]


class Rows(Callback):
    """Notes how many clients were left out of each round."""

    def __init__(self) -> None:
        self.failed: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.failed.append(float(trainer.callback_metrics.get("clients/failed", -1)))


class Fails(ClientAlgorithm):
    """Clients that fail in a round, in one process."""

    def __init__(self, clients: list[int], *rounds: int) -> None:
        self.clients, self.rounds = clients, rounds

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        if client.id in self.clients and client.round in self.rounds:
            raise RuntimeError("lost")


class Troubled(LocalFleet):
    """Meets trouble after the nodes have trained in a round, which may change their replies."""

    trouble: Trouble = staticmethod(lambda fleet, round, replies: None)

    def ask(self, packets: Any) -> Any:
        facts = [unpack(packet)[0] for packet in packets.values()]
        replies = super().ask(packets)
        if facts[0]["kind"] == "train":
            self.trouble(self, facts[0]["round"], replies)
        return replies


def make(folder: Path, *more: Any, **options: Any) -> FederatedTrainer:
    given = {"max_rounds": 5, "precision": "64-true", "max_diverged": 0.5, **options}
    return federated_trainer(folder, SCAFFOLD(), FedPer(), *more, **given)


def disturbed(folder: Path, trouble: Trouble, *more: Any, keeps: bool = False) -> FederatedTrainer:
    fleet = fleet_of(lambda: make(folder), Troubled, folder=folder if keeps else None)
    fleet.trouble = trouble
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(make(folder, *more), fleet)


@contextmanager
def named(*said: str) -> Iterator[None]:
    """What is said of those left out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert all(any(words in str(one.message) for one in caught) for words in said), [str(one.message) for one in caught]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., torch.Tensor]:
    """The weights of a run in one process in which clients 4 and 5, those of node c, fail in some rounds."""
    found: dict[tuple[int, ...], torch.Tensor] = {}

    def run(*rounds: int) -> torch.Tensor:
        if rounds not in found:
            failing = [Fails(SHARES["c"], *rounds)] if rounds else []
            found[rounds] = fit(make(tmp_path_factory.mktemp("runs"), *failing, on_client_error="skip")).weights
        return found[rounds]

    return run


def lose(*rounds: int) -> Trouble:
    return lambda fleet, round, replies: replies.pop("c", None) if round in rounds else None


def test_a_reply_that_is_lost_leaves_out_its_clients_who_go_on_from_what_they_had(tmp_path: Path, without: Any) -> None:
    rows = Rows()
    fleet = fleet_of(lambda: make(tmp_path), Troubled)
    fleet.trouble = lose(2, 3)
    with named("Client 4 failed in round 2", "Client 5 failed in round 3", "node c: it has not replied in time"):
        trainer = fit(make(tmp_path, rows), fleet)
    assert torch.equal(trainer.weights, without(2, 3))
    assert rows.failed == [0, 2, 2, 0, 0]


def test_one_lost_client_too_many_ends_the_run_by_one_sentence(tmp_path: Path) -> None:
    fleet = fleet_of(lambda: make(tmp_path, max_diverged=0.0), Troubled)
    fleet.trouble = lose(2)
    with pytest.raises(ValueError, match="node c: it has not replied in time"):
        fit(make(tmp_path, max_diverged=0.0), fleet)


def test_a_late_reply_is_not_taken_for_that_of_another_round(tmp_path: Path, without: Any) -> None:
    late: list[bytes] = []

    def trouble(fleet: LocalFleet, round: int, replies: dict[str, bytes]) -> None:
        if round == 2:
            late.append(replies.pop("c"))
        elif round == 3:
            replies["c"] = late[0]

    assert torch.equal(disturbed(tmp_path, trouble).weights, without(2, 3))


@pytest.mark.parametrize("name", ["c", "elsewhere"])
def test_a_node_that_is_back_goes_on_with_what_its_clients_kept(name: str, tmp_path: Path, without: Any) -> None:
    def trouble(fleet: LocalFleet, round: int, replies: dict[str, bytes]) -> None:
        if round == 3:  # it dies with its round, of which a record is left
            replies.pop("c")
            fleet.nodes.pop("c").close()
            fleet.nodes[name] = Node(make(tmp_path), start(), data_of(SHARES["c"]), SHARES["c"], tmp_path / "c")

    assert torch.equal(disturbed(tmp_path, trouble, keeps=True).weights, without(3))


def test_a_node_that_has_lost_its_records_does_not_guess_them(tmp_path: Path, without: Any) -> None:
    def trouble(fleet: LocalFleet, round: int, replies: dict[str, bytes]) -> None:
        if round == 3:
            fleet.nodes.pop("c").close()
            fleet.nodes["c"] = Node(make(tmp_path), start(), data_of(SHARES["c"]), SHARES["c"])

    fleet = fleet_of(lambda: make(tmp_path), Troubled)
    fleet.trouble = trouble
    with named("it has started anew", "it has no record of round 3 of client 4"):
        trainer = fit(make(tmp_path), fleet)
    assert torch.equal(trainer.weights, without(4, 5))


def test_a_node_that_another_run_has_taken_answers_no_packet_of_the_first(tmp_path: Path, without: Any) -> None:
    class Shared(LocalFleet):
        def ask(self, packets: Any) -> Any:
            replies = super().ask(packets)
            facts, tensors = unpack(packets["c"])
            if facts["kind"] == "begin":
                self.begun = facts, tensors
            elif facts["round"] == 2:
                self.nodes["c"].answer(pack(self.begun[0] | {"run": "another"}, self.begun[1]))
            return replies

    with named("node c: it has started anew, or begun another run"):
        trainer = fit(make(tmp_path), fleet_of(lambda: make(tmp_path), Shared))
    assert torch.equal(trainer.weights, without(3))


def test_clients_that_a_run_does_not_know_wait_for_the_next(tmp_path: Path, without: Any) -> None:
    def trouble(fleet: LocalFleet, round: int, replies: dict[str, bytes]) -> None:
        if round == 2:
            replies.pop("c")  # the server looks again who is there
            fleet.nodes["new"] = Node(make(tmp_path), start(), data_of([0, 3]), [6, 3])

    assert torch.equal(disturbed(tmp_path, trouble).weights, without(2))


class Killed(Callback):
    """Ends the server in its round 4, once."""

    lives = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.round == 4 and self.lives:
            self.lives = False
            raise KeyError("power cut")


def test_a_resumed_server_has_the_numbers_of_an_undisturbed_one(tmp_path: Path, without: Any) -> None:
    fleet, killed = fleet_of(lambda: make(tmp_path)), Killed()
    saving = {"enable_checkpointing": True, "name": "run"}
    with pytest.raises(KeyError, match="power cut"):  # after round 4, which its checkpoint of round 2 does not know
        fit(make(tmp_path, FederatedCheckpoint(every_n_rounds=2), killed, **saving), fleet)
    trainer = fit(make(tmp_path, FederatedCheckpoint(every_n_rounds=2), killed, **saving), fleet, ckpt_path="last")
    assert trainer.resumed
    assert torch.equal(trainer.weights, without())


def changed(edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]) -> Callable[[bytes], bytes]:
    def change(reply: bytes) -> bytes:
        facts, tensors = unpack(reply)
        edit(facts, tensors)
        return pack(facts, tensors)

    return change


def put(name: str, value: Any) -> Callable[[bytes], bytes]:
    return changed(lambda facts, tensors: tensors.update({name: value}))


def tell(name: str, value: Any) -> Callable[[bytes], bytes]:
    return changed(lambda facts, tensors: facts["clients"][0].update({name: value}))


DEEP = b'{"__metadata__":' + b"[" * 100_000
HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another shape": (put("4.delta", torch.zeros(3).double()), "of the shape asked for"),
    "far too many bytes": (lambda reply: reply + bytes(1 << 21), "a reply of at most"),
    "cut off": (lambda reply: reply[:-8], "got none"),
    "no packet": (lambda reply: b"hello", "got none"),
    "another dtype": (put("4.delta", torch.zeros(54)), "of the shape asked for"),
    "NaN": (put("5.delta", torch.full((45,), torch.nan).double()), "to be finite"),
    "infinity in a sum": (put("4.sum.SCAFFOLD", torch.full((45,), torch.inf).double()), "to be finite"),
    "a sum of another shape": (put("4.sum.SCAFFOLD", torch.zeros(2).double()), "of another shape than most"),
    "a buffer of another shape": (put("4.buffer.center", torch.zeros(7).double()), "buffers that the server has"),
    "a buffer that is missing": (changed(lambda f, t: t.pop("4.buffer.center")), "buffers that the server has"),
    "an unknown buffer": (put("4.buffer.mine", torch.zeros(6)), "buffers that the server has"),
    "an unknown name": (put("4.surprise", torch.zeros(3)), "nothing else of client 4"),
    "a name of nobody": (put("surprise", torch.zeros(3)), "nothing else of a node"),
    "a foreign client": (tell("id", 0), "clients that were asked for"),
    "a client twice": (tell("id", 5), "clients that were asked for"),
    "no steps": (tell("num_steps", 0), "finite numbers and counts"),
    "steps without end": (tell("num_steps", 10**9), "finite numbers and counts"),
    "a distance of nothing": (tell("optimizer_distance", 0), "finite numbers and counts"),
    "a factor that is none": (tell("sums", {"SCAFFOLD": ["inf", False, None]}), "finite numbers and counts"),
    "an alias of nothing": (tell("sums", {"SCAFFOLD": [1.0, False, "gradient"]}), "to be sent"),
    "packed as nobody packs": (tell("packed", {"values": [8, [1], "U8"]}), "got one that was packed"),
    "a reserved column": (changed(lambda f, t: f["log"][0].__setitem__(0, "comm/bytes_up")), "comm/bytes_up"),
    "a mean over nothing": (put("4.log", torch.tensor([[0.0, 1.0, 0.0, 0.0]]).double()), "over nothing"),
    "a header without end": (lambda reply: len(DEEP).to_bytes(8, "little") + DEEP, "got none"),
    "other facts": (lambda reply: pack({"ticket": unpack(reply)[0]["ticket"]}, {}), "left_out"),
    "a pickle": (lambda reply: b"\x80\x04\x95" + bytes(64), "got none"),
}


@pytest.mark.parametrize("name", quick_first(12, HOSTILE))
def test_a_hostile_reply_is_refused_named_and_counted(name: str, tmp_path: Path, without: Any) -> None:
    edit, words = HOSTILE[name]
    rows = Rows()

    def trouble(fleet: LocalFleet, round: int, replies: dict[str, bytes]) -> None:
        if round == 2:
            replies["c"] = edit(replies["c"])

    fleet = fleet_of(lambda: make(tmp_path), Troubled)
    fleet.trouble = trouble
    with named("node c: ", words):
        trainer = fit(make(tmp_path, rows), fleet)
    alone = name == "a sum of another shape"  # of which client 4 alone is refused
    assert rows.failed[1:3] == [1 if alone else 2, 0]
    assert torch.equal(trainer.weights, without(2)) != alone


def test_an_exchange_goes_on_without_a_node_that_is_lost(tmp_path: Path) -> None:
    """FedGA's gradients: the mean is over those that came."""

    class Deaf(LocalFleet):
        def ask(self, packets: Any) -> Any:
            replies = super().ask(packets)
            kinds = {json.dumps(unpack(packet)[0]["kind"]) for packet in packets.values()}
            return {n: r for n, r in replies.items() if n != "c" or kinds != {'"gradients"'}}

    rows = Rows()
    parts = lambda: (FedGA(0.5),)  # noqa: E731
    fleet = fleet_of(lambda: federated_trainer(tmp_path, *parts(), precision="64-true", max_diverged=0.5), Deaf)
    with named("node c: it has not replied in time"):
        there = fit(federated_trainer(tmp_path, *parts(), rows, precision="64-true", max_diverged=0.5), fleet)
    here = federated_trainer(tmp_path, *parts(), precision="64-true")
    here.fit(start(), data_of([0, 1, 2, 3]))
    assert rows.failed == [2]
    assert torch.equal(here.weights, there.weights)


def test_a_resumed_server_takes_no_record_of_another_run_for_its_own(tmp_path: Path, without: Any) -> None:
    fleet, killed = fleet_of(lambda: make(tmp_path)), Killed()
    options = {"enable_checkpointing": True, "name": "run"}
    with pytest.raises(KeyError, match="power cut"):
        fit(make(tmp_path, FederatedCheckpoint(every_n_rounds=2), killed, **options), fleet)
    other, model = make(tmp_path, max_rounds=2), start()  # of equal terms: clients of c keep a record of round 2 too
    other.fleet = fleet_of(lambda: make(tmp_path))
    other.fleet.nodes["c"] = fleet.nodes["c"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    other.fit(model)
    other.fleet.close()
    with named("it has no record of round 2 of client 4"):
        trainer = fit(make(tmp_path, FederatedCheckpoint(every_n_rounds=2), killed, **options), fleet, ckpt_path="last")
    assert torch.equal(trainer.weights, without(3, 4, 5))
