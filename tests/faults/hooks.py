"""Code of a user's in some hook that writes, logs, adds, raises or draws: it counts or is refused, never dropped."""

import contextlib
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from tests.faults.counts import Counts, Outcome
from tests.faults.tiny import differences, fit, is_sentence, same, versions

TRIALS = 300
HOOKS = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_round_start", "on_client_start",
    "on_local_step_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_client_end", "on_client_entered", "on_before_server_step",
    "on_round_end", "on_after_server_step", "on_validation_epoch_end", "on_train_epoch_end",
)  # fmt: skip
COLUMNS = (
    "round", "samples", "gradients", "comm/rounds", "comm/bytes_up", "clients/trained", "clients/skipped", "time/round",
    "simulated/time",
)  # fmt: skip
Act = Callable[[Any, Any], object]


def _fill(trainer: Any, module: Any) -> None:
    with torch.no_grad():
        module.net.weight.add_(0.5)


def _fill_data(trainer: Any, module: Any) -> None:
    module.net.weight.data.add_(0.5)


def _point_elsewhere(trainer: Any, module: Any) -> None:
    module.net.weight.data = module.net.weight.data + 0.5


def _replace(trainer: Any, module: Any) -> None:
    module.net.weight = nn.Parameter(module.net.weight.detach() + 0.5)


def _load(trainer: Any, module: Any) -> None:
    module.load_state_dict({name: value + 0.5 for name, value in module.state_dict().items()})


def _write_global(trainer: Any, module: Any) -> None:
    trainer.weights.add_(0.5)


def _add_layer(trainer: Any, module: Any) -> None:
    module.more = nn.Linear(2, 2)


def _add_buffers(trainer: Any, module: Any) -> None:
    module.more = nn.BatchNorm1d(2, affine=False)


def _raise(trainer: Any, module: Any) -> None:
    raise RuntimeError("on purpose")


def _draw(trainer: Any, module: Any) -> None:
    torch.rand(3)
    random.random()


def _stop_training_mode(trainer: Any, module: Any) -> None:
    module.eval()


def _log(name: str) -> Act:
    def act(trainer: Any, module: Any) -> None:
        module.log(name, 1e9)

    act.__name__ = f"log {name}"
    return act


WRITES = (_fill, _fill_data, _point_elsewhere, _replace, _load, _write_global)
ACTS = {
    "write": WRITES, "add": (_add_layer, _add_buffers), "raise": (_raise,), "nothing": (_draw, _stop_training_mode),
    "log": tuple(map(_log, COLUMNS)),
}  # fmt: skip


class Once(FederatedCallback):
    """Acts in one hook, the first time that it comes by in a round."""

    def __init__(self, hook: str, act: Act, round: int) -> None:
        self.acted = False

        def call(trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            if not self.acted and trainer.round == round:
                self.acted = True
                act(trainer, module)

        setattr(self, hook, call)


def judge(folder: Path, whole: Path, hook: str, kind: str, act: Act, round: int) -> tuple[Outcome, str]:
    """Trains with it and says what became of it."""
    callback = Once(hook, act, round)
    try:
        fit(folder, own=[callback])
    except FederatedError as error:
        if not is_sentence(error):
            return "traceback", str(error)
        return ("right" if kind not in ("nothing", "raise") else "wrong success"), f"refused: {error}"
    except RuntimeError as error:
        if str(error) != "on purpose":
            return "traceback", f"{type(error).__name__}: {error}"
        with contextlib.suppress(FederatedError):
            fit(folder, ckpt_path="last")
        return ("right" if same(versions(folder)[-1], whole) else "lost"), "raised and resumed"
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    if not callback.acted:
        return "right", "never came by"
    if kind in ("raise", "log", "add"):
        return "wrong success", "taken"
    found = differences(versions(folder)[-1], whole)
    said = "; ".join(found[:3]) or "nothing differs"
    return ("right" if (not found) == (kind == "nothing") else "wrong success"), said


def run(trials: int, seed: int) -> Counts:
    """Runs the campaign."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = Path(name)
        fit(root / "whole")
        (whole,) = versions(root / "whole")
        for number in range(trials):
            chance = random.Random(f"{seed} {number}")
            hook, kind, round = chance.choice(HOOKS), chance.choice(list(ACTS)), chance.randrange(4)
            act = chance.choice(ACTS[kind])
            outcome, said = judge(root / f"{number}", whole, hook, kind, act, round)
            counts.note(outcome, f"seed {seed}, trial {number}: {act.__name__} in {hook}, round {round}: {said}")
            shutil.rmtree(root / f"{number}", ignore_errors=True)
    return counts
