"""Runs cases in two processes, which it starts itself: FOLDER gets what each process found, by the case's name."""

import os
import sys
import warnings
from pathlib import Path

import torch

from lightning_fed import FederatedTrainer
from lightning_fed.distributed.strategy import ClientsStrategy

# A script is started by its path, where the package of the tests is not found by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.distributed.process_cases import CASES, EVERYTHING, MISTAKES, grid  # noqa: E402  # the same
from tests.parts import cover  # noqa: E402  # the same


def listening(port: int) -> list[str]:
    """Returns the addresses, as Linux writes them, on which this machine listens at a port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    places = [line[1].split(":") for line in lines if line[3] == "0A"]
    return [address for address, at in places if int(at, 16) == port]


def main() -> None:
    warnings.simplefilter("ignore")
    folder, everything = Path(sys.argv[1]), sys.argv[2:] == ["everything"]
    found, rank = {}, 0
    for name, case in (grid(cover(EVERYTHING)) if everything else {**CASES, **MISTAKES}).items():
        try:
            found[name] = case(2, folder)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    trainer = FederatedTrainer(accelerator="cpu", devices=2, default_root_dir="not-written")
    assert isinstance(trainer.strategy, ClientsStrategy)
    rank = trainer.global_rank
    found["listens"] = listening(int(os.environ["MASTER_PORT"]))
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
