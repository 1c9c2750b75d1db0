"""Two processes of which one is hurt at a chosen moment, or runs that go on after that: what JSON says in argv[1]."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A script is started by its path, where the package of the tests is not found by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lightning_fed.distributed import ClientsStrategy  # noqa: E402  # the same
from lightning_fed.distributed.processes import Processes  # noqa: E402  # the same
from tests.distributed.process_cases import (  # noqa: E402  # the same
    SCAFFOLD,
    FederatedCallback,
    FederatedError,
    Logging,
    evaluated,
    fit,
    start,
)

ASKED = {"moment": "", "rank": -1, "at": 0, **json.loads(sys.argv[1])}
RANK = int(os.environ.get("LOCAL_RANK", "0"))
ROUND = 2


class Hurt:
    """Hurts this process at the n-th of some moments."""

    def __init__(self) -> None:
        self.left = int(ASKED["at"])

    def __call__(self) -> None:
        self.left -= 1
        if ASKED["rank"] != RANK or self.left >= 0:
            return
        self.left = sys.maxsize
        Path(ASKED["folder"], "hurt").write_text(str(time.time()))
        if ASKED["how"] == "raises":
            raise ArithmeticError("raised on purpose")
        os.kill(os.getpid(), signal.SIGKILL if ASKED["how"] == "killed" else signal.SIGSTOP)


class AtHooks(FederatedCallback):
    """Hurts in hooks of the second round, and lets the other process train for long meanwhile, where that is asked."""

    def __init__(self, hurt: Hurt) -> None:
        self.hurt = hurt

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        ClientsStrategy.pulse.limit_s = 4.0  # that of joining is longer: a busy machine imports for long

    def at(self, trainer: Any, moment: str) -> None:
        if ASKED["moment"] == moment and trainer.round == ROUND:
            self.hurt()

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        self.at(trainer, "training")
        self.at(trainer, "training alone")
        if ASKED["moment"] == "training alone" and trainer.round == ROUND and ASKED["rank"] != RANK:
            time.sleep(60)

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.at(trainer, "training")

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        self.at(trainer, "evaluating")

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self.at(trainer, "saving")


def before(owner: type, name: str, act: Callable[[], None]) -> None:
    """Lets a method act first."""
    method = getattr(owner, name)

    def acting(*args: Any, **kwargs: Any) -> Any:
        act()
        return method(*args, **kwargs)

    setattr(owner, name, acting)


def run(folder: str, *callbacks: Any) -> None:
    fit(
        2, SCAFFOLD(), *callbacks, net=start(Logging), data=evaluated(), logger=[], enable_checkpointing=True,
        default_root_dir=folder, name="run", max_rounds=4, client_states="host", clients_per_round=4, ckpt_path="last",
        process_timeout=30 / 60,
    )  # fmt: skip


def main() -> None:
    if "resume" in ASKED:
        for folder in ASKED["resume"]:
            run(folder, AtHooks(Hurt()))  # a run is known by its callbacks too
        return
    Path(ASKED["folder"], f"pid{RANK}").write_text(str(os.getpid()))
    hurt = Hurt()
    places = {
        "joining": (ClientsStrategy, "_setup_distributed"),
        "exchanging": (Processes, "exchange"),
        "within an exchange": (Processes, "_finish"),
    }
    if ASKED["moment"] in places:
        before(*places[ASKED["moment"]], hurt)
    try:
        run(ASKED["folder"], AtHooks(hurt))
    except FederatedError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
