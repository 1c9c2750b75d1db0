"""A node of a fleet: it trains its own clients when it is asked to, and keeps what they keep."""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fed.core.buffers import GlobalBuffers
from lightning_fed.core.client_states import ClientStates
from lightning_fed.core.files import write_atomically
from lightning_fed.core.recorder import recording
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.updates import Client, Cohort, Need
from lightning_fed.engines import make_engine
from lightning_fed.engines.fleet.packets import Facts, Tensors, pack, restored, unpack
from lightning_fed.engines.fleet.terms import expect_same_terms, methods_sent, runs_at_nodes, terms_of
from lightning_fed.errors import FederatedError, expect
from lightning_fed.trainer.fleet.data import NodeData
from lightning_fed.trainer.fleet.held_out import count, samples_of
from lightning_fed.trainer.fleet.outbox import Outbox, SumsBox
from lightning_fed.trainer.options import expect_datamodule, expect_module
from lightning_fed.trainer.setup import attached, prepare
from lightning_fed.trainer.trainer import FederatedTrainer

__all__ = ["Node"]

_RUN = "first_weights"  # by which runs of equal terms are told apart
_FILE = re.compile(r"client(\d+)-round(\d+)\.safetensors")


class Node:
    """The clients that are here: module, data, and what they keep; ``answer`` does what a server asks, and no more.

    What a client keeps has the round after which it kept it, and a checksum of the run's first weights. The server says
    from which round it goes on, so that a reply that was lost or late, or a server that was resumed, never meets a
    record of another model.

    Args:
        trainer: With the same method, options and seed as the server's; its callbacks that clients do not need are left
            out.
        model: The same module as the server's, with its own frozen parameters.
        datamodule: The data of these clients alone, or of more.
        clients: Their numbers in the fleet: of the data's client 0, 1 and so on, or those to take if there are more.
        folder: Where records are kept for a node that is started again; None for memory alone.
    """

    def __init__(
        self, trainer: FederatedTrainer, model: LightningModule, datamodule: LightningDataModule,
        clients: Sequence[int], folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.trainer, self.module = trainer, expect_module(model, "training_step")
        self.data = NodeData(expect_datamodule(model, datamodule, train=None), clients)
        trainer.callbacks = [callback for callback in trainer.callbacks if runs_at_nodes(callback)]
        self._folder = None if folder is None else Path(folder)
        self._records: dict[int, dict[int, Tensors]] = {}  # by client and round
        self._stack = ExitStack()
        self._said: bytes | None = None
        self._run = ""  # which has begun here, as the server names it
        self._read_records()

    def hello(self) -> bytes:
        """Returns the clients that are here, with their samples and how many of each class they have."""
        if self._said is None:
            self._attach()
            self._said = self._count()
        return self._said

    def _count(self) -> bytes:
        data = self.data
        data.prepare_data()
        data.setup("fit")
        source, rule, classes = data.train_source(), self.trainer.aggregator, data.class_counts()
        reads = rule.all_needs & Need.ANY_LOSS and rule.losses_over == "held_out"
        held_out = data.held_out_source("val").sizes if reads else source.sizes * 0
        facts = {
            "clients": data.clients,
            "sizes": [int(source.sizes[client]) for client in data.clients],
            "held_out": [int(held_out[client]) for client in data.clients],
            "batch_size": source.batch_size,
            "drop_last": bool(getattr(source, "drop_last", False)),
        }
        return pack(facts, {} if classes is None else {"classes": classes})

    def answer(self, packet: bytes) -> bytes:
        """Returns the reply to a packet of the server; a mistake, or anything else that goes wrong, is one too."""
        ticket = ""
        try:
            facts, tensors = unpack(packet)
            ticket = str(facts["ticket"])
            kinds = {"begin": self._begin, "train": self._train, "gradients": self._gradients}
            kinds["evaluate"] = self._evaluate
            begun = facts["kind"] == "begin" or (self._run and facts.get("run") == self._run)
            expect(begun, "it has started anew, or begun another run, and takes part again from the next round on")
            said, sent = kinds[facts["kind"]](facts, tensors)
        except Exception as error:  # the node lives on, whatever it was asked
            known = isinstance(error, FederatedError)
            said, sent = {"error": str(error) if known else f"{type(error).__name__}: {error}"}, {}
            if not known:
                rank_zero_warn(f"This node could not do what it was asked: {said['error']}")
        return pack({**said, "ticket": ticket}, sent)

    def close(self) -> None:
        """Ends the run here; records stay."""
        self._run = ""
        self._stack.close()

    # A run

    def _attach(self) -> None:
        self.close()
        self.data.trainer = self.trainer  # type: ignore[assignment]  # named as in Lightning
        self._stack.enter_context(attached(self.trainer, self.module, self.data, TrainerFn.FITTING))

    def _begin(self, facts: Facts, tensors: Tensors) -> tuple[Facts, Tensors]:
        """Gets ready for a run, if the server's is that of this node."""
        self._attach()
        trainer = self.trainer
        self.data.take_in(facts["sizes"], facts["held_out"], facts["num_classes"])
        prepare(trainer)
        state = self.state = trainer.train_state
        expect_same_terms(terms_of(trainer), facts["terms"])
        state.initial.copy_(tensors["initial"])
        trainer.hooks("on_fit_start")
        with recording(self.module, state.recorder):
            trainer.hooks("on_train_start")
        self.outbox = Outbox(state) if facts["needs"] is None else SumsBox(state, Need(facts["needs"]))
        self.engine = make_engine(state, trainer.options, trainer.hooks, self.outbox)
        self.engine.divergence.reports = True
        self.start, self.methods = self.engine.start_gradients, methods_sent(trainer.callbacks)
        self._keepers: tuple[ClientStates | GlobalBuffers, ...] = state.client_states, state.buffers
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}  # g_i and f_i of the round, by client
        self._run, self._mark = facts["run"], torch.tensor(facts["first_weights"])
        for kind in facts["evaluated"]:
            vars(trainer)[f"{kind}_loaders"] = self.data.held_out(kind)
        sets = {kind: getattr(trainer, f"{kind}_loaders") for kind in facts["evaluated"]}
        held = {kind: {name: samples_of(loader) for name, loader in own.items()} for kind, own in sets.items()}
        return {"held_out": held}, {}

    def _load(self, facts: Facts, tensors: Tensors) -> None:
        """Takes over what the server's methods know, and the global model."""
        state = self.state
        state.epochs, state.finished_round, state.steps_before_round = facts["epochs"], facts["epochs"], facts["steps"]
        self.trainer.state.stage = RunningStage.TRAINING
        state.optimizer.load_state_dict(restored(facts["optimizer"], tensors))
        states = restored(facts["states"], tensors)
        for method in self.methods:
            if known := states.get(method.state_key):
                method.load_state_dict(known)
        self._load_model(facts, tensors)

    def _load_model(self, facts: Facts, tensors: Tensors) -> None:
        state = self.state
        state.leave_client()
        state.round = facts["round"]
        state.weights.copy_(tensors["weights"])
        for name, value in state.buffers.values.items():
            value.copy_(tensors[f"buffer.{name}"])
        state.load_global_model()

    def _evaluate(self, facts: Facts, tensors: Tensors) -> tuple[Facts, Tensors]:
        self._load_model(facts, tensors)
        return count(self.trainer, facts["stage"], facts["sets"])

    def _train(self, facts: Facts, tensors: Tensors) -> tuple[Facts, Tensors]:
        self._load(facts, tensors)
        state, trainer, counts = self.state, self.trainer, self.engine.counts
        everyone = {row[0]: Client(row[0], row[1], state.round, row[2], row[3]) for row in facts["cohort"]}
        cohort = Cohort(state.round, tuple(everyone.values()), tuple(facts["skipped"]))
        with self._recalled(facts) as (here, lost), recording(self.module, state.recorder):
            own = tuple(everyone[client] for client in here)
            self._hand_in([everyone[client] for client in facts["exchange"] or ()], own, tensors.get("mean"))
            seed_everywhere(seed_for(trainer.seed, Purpose.ROUND, state.round, 1))
            trainer.hooks("on_train_epoch_start")
            trainer.hooks("on_round_start", cohort, module=False)
            state.recorder.series = {}  # the server has logged it too
            self.engine.train(Cohort(state.round, own, cohort.skipped))
            said, sent = self.outbox.close(lost, self.engine.divergence)
            kept = self._keep([row["id"] for row in said["clients"]], facts)
        for row in said["clients"]:
            row["keeps"] = row["id"] in kept
        return {**said, "samples": counts.samples, "gradients": counts.gradients}, sent

    def _hand_in(self, clients: list[Client], own: tuple[Client, ...], mean: Tensor | None) -> None:
        """Gives the exchange before training, as the server has made it, to the engine."""
        none = self.state.weights.new_empty(0)
        rows = [self._taken[client.id] for client in own] if clients else []
        self.start.given = (
            tuple(clients),
            torch.stack([row for row, _ in rows]) if rows else none.view(0, 0),
            torch.stack([loss for _, loss in rows]) if rows else none,
            none if mean is None else mean.to(none.device),
        )

    def _gradients(self, facts: Facts, tensors: Tensors) -> tuple[Facts, Tensors]:
        """Takes gradients, or losses alone, at the global model over clients' data."""
        self._load(facts, tensors)
        state, start = self.state, self.start
        with self._recalled(facts) as (here, lost):
            clients = tuple(Client(each, int(state.source.sizes[each]), state.round) for each in here)
            rows = state.weights.new_empty(len(clients), state.weights.numel()) if facts["rows"] else None
            computes = start.own_losses if facts["held_out"] and start.own_losses is not None else start.full_gradient
            losses = computes.compute_at_start(clients, rows)
            state.load_global_model()
        said: Facts = {"clients": here, "left_out": [*lost.items()]}
        if rows is None:
            return said, {"losses": losses}
        self._taken = {client.id: (rows[at], losses[at]) for at, client in enumerate(clients)}
        return said, {"losses": losses, "rows": rows}

    # What clients keep

    @contextmanager
    def _recalled(self, facts: Facts) -> Iterator[tuple[list[int], dict[int, str]]]:
        """Puts in what clients had after the rounds that the server names; yields them, and those without, with why."""
        here, lost = list[int](), dict[int, str]()
        for client, since in zip(facts["clients"], facts["since"], strict=True):
            expect(client in self.data.clients, f"Expected clients of this node, got client {client}.")
            self._forget(client, since + 1, 1 << 62)  # they were lost on their way, or of a server that has gone back
            record = self._records.get(client, {}).get(since) if since else {}
            if record is None or not torch.equal(record.get(_RUN, self._mark), self._mark):
                lost[client] = f"it has no record of round {since} of client {client}, from which the server goes on"
                continue
            here.append(client)
            for number, keeper in enumerate(self._keepers):
                keeper.drop(client)
                part = {name[2:]: value for name, value in record.items() if name.startswith(f"{number}.")}
                keeper.move_in(client, part)
        try:
            yield here, lost
        finally:
            for client in here:
                for keeper in self._keepers:
                    keeper.drop(client)

    def _keep(self, clients: list[int], facts: Facts) -> set[int]:
        """Takes out what clients keep after the round, and drops what no server can go on from; returns who keeps."""
        keeping = set()
        for client in clients:
            parts = [keeper.move_out(client) for keeper in self._keepers]
            record = {f"{number}.{name}": value for number, part in enumerate(parts) for name, value in part.items()}
            if not record:
                continue
            record[_RUN] = self._mark
            keeping.add(client)
            own = self._records.setdefault(client, {})
            self._forget(client, 0, max((at for at in own if at <= facts["saved"]), default=0))
            own[facts["round"]] = record
            if self._folder is not None:
                write_atomically(self._path(client, facts["round"]), pack({}, record), "folder")
        return keeping

    def _path(self, client: int, round: int) -> Path:
        assert self._folder is not None
        return self._folder / f"client{client}-round{round}.safetensors"

    def _forget(self, client: int, first: int, end: int) -> None:
        """Drops the records of a client of some rounds."""
        own = self._records.get(client, {})
        for at in [at for at in own if first <= at < end]:
            del own[at]
            if self._folder is not None:
                self._path(client, at).unlink(missing_ok=True)

    def _read_records(self) -> None:
        for path in [] if self._folder is None else sorted(self._folder.glob("*.safetensors")):
            if found := _FILE.fullmatch(path.name):
                client, at = map(int, found.groups())
                self._records.setdefault(client, {})[at] = unpack(path.read_bytes())[1]
