"""The books of a round take over what clients hand over, wherever they have trained."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.logged_values import LoggedValue, LogOptions
from lightning_fed.core.train_state import Tolerance
from lightning_fed.core.updates import Client, Update
from lightning_fed.engines import ClientTrainer, FinishedClient, choice
from tests.engines.parts import Model, agree, data, train


class Nodes(ClientTrainer):
    """Gets from nodes, which have a model of their own, where one step on all of a client's samples ends."""

    broken: int | None = None

    def train(self, clients: tuple[Client, ...]) -> Iterator[FinishedClient]:
        for client in clients:
            end, loss = self.node(client)
            logged = LoggedValue(LogOptions("train/loss", "", True, True, False), is_default=True)
            logged.add(loss, client.num_samples)
            self.parts.counts.samples += client.num_samples
            start = self.parts.start
            update = Update(client, end - start, 1)
            yield FinishedClient(update, start, weights=end, logged=[{"train/loss": logged}])

    def node(self, client: Client) -> tuple[Tensor, Tensor]:
        net, start = deepcopy(self.module.net), self.parts.start.clone()
        torch.nn.utils.vector_to_parameters(start, net.parameters())
        (batch,) = self.state.source.batches(client.id, torch.arange(client.num_samples), 0)
        loss = F.cross_entropy(net(batch[0].double()), batch[1])
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(net.parameters()))])
        end = start - 0.1 * gradient
        return (end * torch.nan if client.id == self.broken else end), loss.detach()


class Sees(FederatedCallback):
    """Notes whether the resident module is the client's where hooks look at it."""

    stacks = True

    def __init__(self) -> None:
        self.away: list[float] = []

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.away.append(float((trainer.vector.data - trainer.origin - update.delta).abs().max()))


def ask_nodes(monkeypatch: pytest.MonkeyPatch, broken: int | None = None) -> None:
    """Lets every run ask nodes."""
    monkeypatch.setattr(Nodes, "broken", broken)
    monkeypatch.setattr(choice, "_trainer_for", lambda parts, chosen: Nodes(parts))


def test_one_method_is_all_that_an_engine_of_its_own_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"local_steps": 1, "max_rounds": 3}
    here = train(tmp_path, Model, "sequential", datamodule=data(batch_size=32), **options)
    ask_nodes(monkeypatch)
    sees = Sees()
    agree(here, train(tmp_path, Model, "sequential", sees, datamodule=data(batch_size=32), **options))
    assert len(sees.away) == 15
    assert max(sees.away) < 1e-15


def test_the_books_find_out_who_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_nodes(monkeypatch, broken=3)
    options: dict[str, Any] = {"local_steps": 1, "max_rounds": 2, "tolerance": Tolerance(0.5)}
    with pytest.warns(UserWarning, match="Client 3 diverged"):
        run = train(tmp_path, Model, "sequential", datamodule=data(batch_size=32), **options)
    assert [client for _, client, _ in run.entered] == [0, 1, 4, 5] * 2
    assert run.logged["clients/diverged"] == 1
    assert torch.cat(run.deltas).isfinite().all()
