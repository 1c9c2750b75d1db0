"""Flower's simulation as a side of a row: one Ray actor for each process (https://github.com/flwrlabs/flower)."""

import os
from functools import cache
from typing import Any

# Before it is imported: it reports to its makers otherwise, as does Ray.
os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from benchmarks.contestants.contestant import Contestant
from benchmarks.race.turns import Turns
from benchmarks.workloads import WORKS, Data, Work

__all__ = ["take_part", "train"]


class Rounds(FedAvg):
    """Flower's FedAvg, which waits between two rounds."""

    def __init__(self, turns: Turns, **options: Any) -> None:
        super().__init__(**options)
        self.turns = turns

    def configure_train(self, server_round: int, *args: Any, **kwargs: Any) -> Any:
        """Ends a round and begins the next one."""
        if server_round > 1:
            self.turns.end()
        self.turns.begin()
        return super().configure_train(server_round, *args, **kwargs)


@cache
def _resident(key: str) -> tuple[nn.Module, Data]:
    """Makes model and data once in each actor, which is faster than once for each client."""
    torch.set_num_threads(1)
    return WORKS[key].model(), WORKS[key].data()


def train(message: Message, context: Context) -> Message:
    """Trains one client for one epoch from the model in the message."""
    work = WORKS[str(message.content["config"]["work"])]
    model, data = _resident(work.key)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=work.momentum)
    rows = data.clients[int(context.node_config["partition-id"])]
    for index in rows[torch.randperm(len(rows))].split(work.batch):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(data.images[index]), data.labels[index]).backward()
        optimizer.step()
    trained = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(rows)}),
    }
    return Message(content=RecordDict(trained), reply_to=message)


def take_part(turns: Turns, work: Work, side: Contestant, rounds: int) -> None:
    """Trains by turns."""
    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(train)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            strategy = Rounds(turns, fraction_train=work.per_round / work.clients, fraction_evaluate=0.0)
            arrays, config = ArrayRecord(work.model().state_dict()), ConfigRecord({"work": work.key})
            strategy.start(grid, arrays, num_rounds=rounds, train_config=config)
            turns.end()
        except Exception as error:  # Flower only logs it
            turns.fail(error)
            raise

    backend = {"init_args": {"num_cpus": side.devices}, "client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config=backend)
