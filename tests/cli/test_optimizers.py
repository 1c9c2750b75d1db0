"""``--optimizer`` and ``--lr_scheduler`` stand for the model's own, made for each client as those are."""

from collections.abc import Callable

import pytest
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from lightning_fed.core.optimizer.fresh import parse_configured
from lightning_fed.runs.folder import fingerprint
from tests.cli.conftest import BASE, CommandLine

CHOSEN = ["--optimizer", "Adam", "--optimizer.lr", "0.05"]
SCHEDULED = [*CHOSEN, "--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "2"]


def made(module: LightningModule) -> tuple:
    (optimizer,), schedules = parse_configured(module, module.configure_optimizers())
    return optimizer, schedules


def test_they_take_the_place_of_the_models_own(cli: CommandLine) -> None:
    module = cli.run(*SCHEDULED).arguments["model"]
    module.layer = nn.Linear(2, 1)  # as `configure_model` may
    optimizer, (schedule,) = made(module)
    assert type(optimizer) is Adam
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [p.shape for p in module.parameters()]
    assert type(schedule.scheduler) is StepLR
    assert made(module)[0] is not optimizer


def test_a_run_is_the_same_one_where_they_are_not_given(cli: CommandLine) -> None:
    config = cli.config()
    assert not {"optimizer", "lr_scheduler"} & set(config)
    assert fingerprint(cli.config(*CHOSEN)) != fingerprint(config)


def test_a_file_and_a_schedule_alone(cli: CommandLine, mistake: Callable[..., str]) -> None:
    file = cli.file("adam.yaml", "optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.25}}\n")
    optimizer, _ = made(cli.run("--config", file).arguments["model"])
    assert optimizer.param_groups[0]["lr"] == 0.25
    cli.calls.clear()
    assert "Expected `--optimizer` with `--lr_scheduler`" in mistake("fit", *BASE, *SCHEDULED[4:], code=1)


@pytest.mark.parametrize(("word", "expected"), [("Adm", "did you mean Adam"), ("StepLR", "known: ")])
def test_no_optimizer(mistake: Callable[..., str], word: str, expected: str) -> None:
    assert expected in mistake("fit", *BASE, "--optimizer", word)
