"""Two processes of which something ends one: HOW says what, FOLDER gets the run."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lightning_fed.core.client_states import ClientStates
from lightning_fed.distributed.pulse import Failure, Pulse
from lightning_fed.distributed.strategy import ClientsStrategy

# A script is started by its path, where the package of the tests is not found by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.distributed.process_cases import SCAFFOLD, Acts, FederatedCallback, FederatedError, fail, fit  # noqa: E402

HOW, FOLDER = sys.argv[1:]


class Ends(FederatedCallback):
    """Sends a signal to one process, while it trains its first client of the second round."""

    def __init__(self, number: int, rank: int) -> None:
        self.number, self.rank, self.done = number, rank, False

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        time.sleep(0.01)
        if client.round == 2 and trainer.global_rank == self.rank and not self.done:
            self.done = True
            os.kill(os.getpid(), self.number)


class Works(FederatedCallback):
    """Lets one process work for seconds on its first client of the second round, or wait for what never comes."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank, self.left_s = how, rank, 9.0

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        ClientsStrategy.pulse.limit_s = 3.0  # that of joining is longer: a busy machine imports for long
        if client.round == 2 and trainer.global_rank == self.rank:
            end, self.left_s = time.thread_time() + self.left_s, 0.0
            while time.thread_time() < end:
                time.sleep(3600.0 if self.how == "waits" else 0.0)


def refuse(name: str, rank: int) -> None:
    """Lets a process fail as a client's state leaves it or comes to it, or give what cannot be told to the others."""
    method = getattr(ClientStates, name)

    def refusing(states: ClientStates, client: int, *records: Any) -> Any:
        if torch.distributed.get_rank() == rank:
            if HOW.startswith("foreign"):
                return {"foreign": lambda: None}
            raise FederatedError(f"Expected a record that can be moved, but {name} fails.")
        return method(states, client, *records)

    setattr(ClientStates, name, refusing)


def fail_late() -> None:
    """Lets the second process fail, and come to the exchange only when the first has heard so and waits no longer."""
    tell = Pulse.fail

    def telling(pulse: Pulse, failure: Failure) -> None:
        tell(pulse, failure)
        time.sleep(4.0)

    Pulse.fail = telling  # type: ignore[method-assign]
    with contextlib.suppress(FederatedError):
        fit(2, Acts("on_client_start", fail, ranks=(1,)))


def run(name: str, *callbacks: Any, devices: Any = 2, **others: Any) -> None:
    options = {"logger": [], "enable_checkpointing": True, "default_root_dir": FOLDER, "name": name, **others}
    try:
        result = fit(devices, *callbacks, **options)
    except FederatedError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(4) from None
    sys.stderr.write(f"rounds of {name}: {result['rounds']}\n")


def main() -> None:
    act, _, rank = HOW.partition(" ")
    if act == "absent" and os.environ.get("LOCAL_RANK") == rank:
        raise SystemExit(3)
    if act == "stop":
        run("first", Ends(signal.SIGTERM, 0))
        run("second", Ends(signal.SIGTERM, 1))
    elif act == "kill":
        run("run", Ends(signal.SIGKILL, int(rank)))
    elif act in ("works", "waits"):
        run("run", Works(act, int(rank)))
    elif act in ("move_out", "move_in", "foreign"):
        refuse("move_out" if act == "foreign" else act, int(rank))
        run("run", SCAFFOLD(), clients_per_round=4, client_states="host", max_rounds=12)
    else:
        if act == "late":
            fail_late()
        run("run", devices="auto" if act == "torchrun" else 2)


if __name__ == "__main__":
    main()
