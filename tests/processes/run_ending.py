"""Two processes of which something ends one: HOW says what, FOLDER gets the run."""

import os
import signal
import sys
import time
from typing import Any

from process_cases import FederatedCallback, FederatedError, fit

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


def run(name: str, *callbacks: Any, devices: Any = 2) -> None:
    options = {"logger": [], "enable_checkpointing": True, "default_root_dir": FOLDER, "name": name}
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
    else:
        run("run", devices="auto" if act == "torchrun" else 2)


if __name__ == "__main__":
    main()
