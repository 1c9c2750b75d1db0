"""A side of a row in a process of its own.

    python -m benchmarks.race.worker WORK SIDE ROUNDS ADDRESS

with the side's options as JSON. Started by a race, not by hand.
"""

import json
import sys

import torch

from benchmarks.contestants.choice import take_part
from benchmarks.contestants.contestant import Contestant
from benchmarks.race.turns import Turns

__all__ = ["child_command", "main"]


def child_command(key: str, side: Contestant, rounds: int, address: str) -> list[str]:
    """Returns the words that start a side with this interpreter; pfl-research has its processes started by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={side.devices}"]
    launcher = torchrun if side.loop == "pfl" and side.devices > 1 else []
    options = json.dumps(side.as_dict())
    return [sys.executable, *launcher, "-m", "benchmarks.race.worker", key, options, str(rounds), address]


def main() -> None:
    """Trains until the last turn; a mistake goes to the other end as well as to the log."""
    key, options, rounds, address = sys.argv[1:]
    side = Contestant(**json.loads(options))
    turns = Turns(address, side.device)
    torch.set_num_threads(1)
    try:
        take_part(turns, key, side, int(rounds))
    except Exception as error:
        turns.fail(error)
        raise


if __name__ == "__main__":
    main()
