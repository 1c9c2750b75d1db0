"""The command ``lightning-fed flower``: writes an app for `flwr run`, and is the worker beside a SuperNode."""

import os
import re
import sys
from contextlib import suppress
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fed.cli.federated_cli import FederatedCLI, parser_of
from lightning_fed.core.files import write_atomically
from lightning_fed.errors import FederatedError, expect
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.fleet import Node

__all__ = ["NodeCLI", "main", "make_parser"]

_DESCRIPTION = (
    "Trains over Flower. `flower new FOLDER` writes an app that `flwr run FOLDER` takes; `flower node FOLDER` trains "
    "the clients that are here, beside a SuperNode. Both take the options of fit."
)
_CLIENTS_HELP = "Of `flower node`: the numbers of its clients in the whole fleet, as 0:5,7."
_APP = '''"""What Flower starts; `lightning-fed flower new` wrote it."""

from pathlib import Path

from lightning_fed.cli.flower.apps import client_app, server_app

client = client_app()
server = server_app(Path(__file__).parent)
'''
_PROJECT = """[project]
name = "NAME"
version = "1.0.0"
description = "A federated run of lightning_fed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "lightning-fed"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
worker = "NAME"  # its name at every node
nodes = 2          # for which the run waits
deadline = 600.0   # seconds after which a node is left out of the round
evaluates = "server"  # where the model is evaluated: server, nodes or both
options = ""       # more options of fit, such as "--ckpt_path last"
"""
_ENVIRONMENT = """# Source this before you start SuperLink, SuperNode or flwr: no telemetry, no look for updates.
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.25
"""


class NodeCLI(FederatedCLI):
    """Parses the options of ``fit`` and those of this command, and builds a node's parts, or nothing."""

    def __init__(self, words: list[str], builds: bool = False) -> None:
        self.builds = builds
        parser = {"prog": "lightning-fed flower", "description": _DESCRIPTION, "env_prefix": "PL_FLOWER_"}
        super().__init__(words, run=False, parser_kwargs={**parser, "default_env": True})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_method_arguments(FederatedTrainer, "fit", skip=set(self.subcommands()["fit"]))
        parser.add_argument("--clients", type=str | None, default=None, help=_CLIENTS_HELP)

    def instantiate_classes(self) -> None:
        if self.builds:
            super().instantiate_classes()

    def after_instantiate_classes(self) -> None:
        """Does nothing, as a node has no run of its own."""


def make_parser() -> Any:
    """Makes the parser of this command."""
    return parser_of(NodeCLI)


def main(words: list[str]) -> int:
    """Writes an app, or is the worker of a node until it is ended; returns 0."""
    if set(words) & {"-h", "--help"}:
        NodeCLI(words)
    tasks = {"new": _new, "node": _node}
    expect(
        len(words) > 1 and words[0] in tasks and not words[1].startswith("-"),
        f"Expected `flower new FOLDER` or `flower node FOLDER`, then options of fit, got {' '.join(words)[:200]!r}.",
    )
    folder, expected = Path(words[1]).absolute(), "Expected a folder named by letters, digits, - and _"
    expect(re.fullmatch(r"[A-Za-z][\w-]*", folder.name), f"{expected}, got {folder.name!r}.")
    tasks[words[0]](folder, words[2:])
    return 0


def _new(folder: Path, words: list[str]) -> None:
    """Writes the app: what Flower starts, and the options in one file."""
    expect(not folder.exists(), f"Expected a new folder, but {folder} exists already: give another.")
    cli = NodeCLI(words)
    config = cli.config.clone()
    for key in ("config", "clients"):
        config.pop(key, None)
    files = {"app.py": _APP, "pyproject.toml": _PROJECT.replace("NAME", folder.name), "flower.env": _ENVIRONMENT}
    files["config.yaml"] = cli.parser.dump(config, skip_none=False, skip_validation=True)
    for file, text in files.items():
        write_atomically(folder / file, text.encode(), "FOLDER")
        print(folder / file)


def _node(folder: Path, words: list[str]) -> None:
    """Answers the packets that ClientApps bring, one after the other."""
    sys.path.append(str(folder))  # modules of your own beside the app, as on the server
    cli = NodeCLI(["--config", str(folder / "config.yaml"), *words], builds=True)
    node = Node(cli.trainer, cli.model, cli.datamodule, _numbers(cli.config["clients"]), folder / "records")
    try:
        with FileLock(folder / "worker.lock", timeout=0), _listening(folder / "worker.sock") as listener:
            said = node.hello()  # a mistake in the data is told here
            print(f"ready for {folder.name}, with clients {cli.config['clients']}", flush=True)
            while True:
                with suppress(EOFError, OSError), listener.accept() as line:  # an app may be ended at any time
                    packet = line.recv_bytes()
                    line.send_bytes(node.answer(packet) if packet else said)
    except Timeout:
        raise FederatedError(f"Expected one worker of {folder}, but another runs: end it first.") from None


def _numbers(text: str | None) -> list[int]:
    """Reads numbers and ranges, as ``0:5,7``; the end of a range is not in it."""
    found = list[int]()
    for part in (text or "").split(","):
        ends = re.fullmatch(r"\s*(\d+)(?::(\d+))?\s*", part)
        if ends is None:
            raise FederatedError(f"Expected `--clients` such as 0:5,7, numbers in the whole fleet, got {text!r}.")
        found += range(int(ends[1]), int(ends[2] or int(ends[1]) + 1))
    return found


def _listening(path: Path) -> Listener:
    """Opens the socket, which only your own processes can reach."""
    path.unlink(missing_ok=True)
    mask = os.umask(0o077)
    try:
        return Listener(str(path), "AF_UNIX")
    except OSError as error:
        raise FederatedError(f"Expected a folder in which a socket can be made, got {path.parent}: {error}.") from error
    finally:
        os.umask(mask)
