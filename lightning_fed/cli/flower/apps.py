"""The two apps that Flower starts. A ClientApp is a process for each message, so nothing heavy is loaded for it."""

import os
import shlex
from multiprocessing.connection import Client
from pathlib import Path
from re import fullmatch
from typing import Any

from lightning_fed.errors import expect

__all__ = ["client_app", "server_app"]


def client_app() -> Any:
    """Makes the ClientApp: it hands packets to the worker beside the SuperNode, which holds data and model."""
    from flwr.app import Array, ArrayRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def relay(message: Message, context: Any) -> Message:
        name = str(context.run_config["worker"])
        expect(fullmatch(r"[\w-]+", name), f"Expected the name of a worker, got {name!r}.")
        folder = context.node_config.get("folder")
        expect(folder, "Expected `--node-config` with `folder`, in which the folder of the app is, got none.")
        try:
            line = Client(str(Path(str(folder)) / name / "worker.sock"), "AF_UNIX")
        except OSError as error:
            raise RuntimeError(f"no worker: start `lightning-fed flower node {Path(str(folder)) / name}`") from error
        with line:
            line.send_bytes(message.content["packet"][""].data)
            data = line.recv_bytes()
        record = ArrayRecord({"": Array("uint8", (len(data),), "bytes", data)})
        return Message(RecordDict({"packet": record}), reply_to=message)

    return app


def server_app(folder: Path) -> Any:
    """Makes the ServerApp: ``fit`` with the ``config.yaml`` of a folder, over the nodes that Flower knows."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def train(grid: Any, context: Any) -> None:
        from lightning_fed.cli.federated_cli import FederatedCLI
        from lightning_fed.distributed.pulse import when_orphaned
        from lightning_fed.trainer.fleet.flower import FlowerFleet

        config = context.run_config
        where = str(config.get("evaluates", "server"))
        fleet = FlowerFleet(grid, int(config["nodes"]), float(config["deadline"]), where)

        class OverFlower(FederatedCLI):
            def before_fit(self) -> None:
                self.trainer.fleet = fleet

        # Without the SuperLink no round could end, and Flower would try for ever. The last checkpoint is whole.
        when_orphaned(lambda: os._exit(1))
        try:
            OverFlower(["fit", "--config", str(folder / "config.yaml"), *shlex.split(str(config["options"]))])
        except SystemExit as error:  # which Flower would take for a run that goes on
            raise RuntimeError(f"the run ended with code {error.code}; what it said last says why") from error

    return app
