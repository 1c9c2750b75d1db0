"""How the models appear on the command line, through LightningCLI's own machinery."""

from pathlib import Path

import pytest
import torch
import torchvision.ops  # noqa: F401  (its MLP must not make the short name ambiguous)
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.optim import SGD

from lightning_fed.models import CNN, MLP, ImageClassifier, LeNet, LogisticRegression, ResNet18

pytestmark = pytest.mark.slow

LENET = ["--model", "ImageClassifier", "--model.backbone", "LeNet"]


def parse(args: list[str]) -> LightningCLI:
    return LightningCLI(
        LightningModule,
        subclass_mode_model=True,
        auto_configure_optimizers=False,
        save_config_callback=None,
        run=False,
        # A seed would stay in the environment for the tests that follow.
        seed_everything_default=False,
        trainer_defaults={"logger": False, "accelerator": "cpu"},
        args=args,
    )


def dump(cli: LightningCLI) -> dict:
    return yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))


@pytest.mark.parametrize(
    ("args", "backbone"),
    [
        (["LeNet", "--model.backbone.in_channels", "3"], LeNet),
        (["CNN", "--model.backbone.channels", "[8, 4]", "--model.backbone.hidden", "[16]"], CNN),
        (["MLP", "--model.backbone.in_features", "64", "--model.backbone.hidden", "[32, 16]"], MLP),
        (["LogisticRegression", "--model.backbone.in_features", "64"], LogisticRegression),
        (["ResNet18", "--model.backbone.norm", "batch"], ResNet18),
        (["torchvision.ops.MLP", "--model.backbone.in_channels=64", "--model.backbone.hidden_channels=[10]"], None),
        (["torchvision.models.resnet18", "--model.backbone.num_classes=10"], None),
    ],
    ids=["lenet", "cnn", "mlp", "logistic", "resnet", "class-of-another-package", "function-of-another-package"],
)
def test_backbones_resolve_and_the_saved_config_parses_to_the_same(
    tmp_path: Path, args: list[str], backbone: type | None
) -> None:
    cli = parse(["--model", "ImageClassifier", "--model.backbone", *args])
    assert isinstance(cli.model, ImageClassifier)
    assert type(cli.model.backbone) is backbone or backbone is None
    config = dump(cli)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert dump(parse(["--config", str(tmp_path / "config.yaml")])) == config


def test_optimizer_and_scheduler_options_arrive() -> None:
    optimizer = ["--model.optimizer", "SGD", "--model.optimizer.lr", "0.05", "--model.optimizer.momentum", "0.9"]
    scheduler = ["--model.lr_scheduler", "StepLR", "--model.lr_scheduler.step_size", "3"]
    configured = parse(LENET + optimizer + scheduler).model.configure_optimizers()
    assert isinstance(configured["optimizer"], SGD)
    assert configured["optimizer"].defaults["lr"] == 0.05
    assert configured["optimizer"].defaults["momentum"] == 0.9
    assert configured["lr_scheduler"]["scheduler"].step_size == 3


def test_default_optimizer_is_written_out_and_can_be_refined() -> None:
    cli = parse([*LENET, "--model.optimizer.momentum", "0.9"])
    written = dump(cli)["model"]["init_args"]["optimizer"]
    assert written["class_path"] == "torch.optim.SGD"
    assert (written["init_args"]["lr"], written["init_args"]["momentum"]) == (0.01, 0.9)
    assert cli.model.configure_optimizers().defaults["momentum"] == 0.9


def test_checkpoint_of_a_command_line_model_is_primitive_and_loads_alone(tmp_path: Path) -> None:
    cli, path = parse([*LENET, "--model.optimizer.momentum", "0.9"]), tmp_path / "model.ckpt"
    cli.trainer.strategy.connect(cli.model)
    cli.trainer.save_checkpoint(path, weights_only=True)
    saved = torch.load(path, weights_only=True)["hyper_parameters"]
    assert saved["backbone"]["init_args"] == {"num_classes": 10, "in_channels": 1, "image_size": 28}
    loaded = ImageClassifier.load_from_checkpoint(path)
    assert isinstance(loaded.backbone, LeNet)
    assert loaded.configure_optimizers().defaults["momentum"] == 0.9
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), cli.model.parameters(), strict=True))
