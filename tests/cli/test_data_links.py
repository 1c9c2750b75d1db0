"""What a model must know of its data comes from the data, and an option that contradicts them is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from lightning_fed.cli import main
from lightning_fed.models import ImageClassifier, LeNet, LogisticRegression
from tests.cli.conftest import Call, CommandLine
from tests.cli.linked_parts import Facts

pytestmark = pytest.mark.slow

CLASSIFIER = ("--model", "ImageClassifier")
LENET = (*CLASSIFIER, "--model.backbone=LeNet")
PARTS = "tests.cli.linked_parts"
FACTS = ("--data", f"{PARTS}.Facts")
SILENT = ("--data", f"{PARTS}.Silent")
EVERYTHING = f"--model={PARTS}.Everything"


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    Facts.read = 0


def run(cli: CommandLine, *words: str) -> Call:
    """Runs words without those that every other test has."""
    main(["fit", "--trainer.logger", "false", *words])
    return cli.calls[-1]


def arguments(call: Call, *path: str) -> dict:
    """The resolved arguments of the model, or of a class in them."""
    spec = call.trainer.run_config["model"]
    for name in path:
        spec = spec["init_args"][name]
    return spec["init_args"]


def test_classes_and_features_come_from_the_data(cli: CommandLine) -> None:
    call = run(cli, *CLASSIFIER, "--model.backbone", "LogisticRegression", "--data", "Digits")
    backbone = call.arguments["model"].backbone
    assert isinstance(backbone, LogisticRegression)
    assert (backbone.linear.in_features, backbone.linear.out_features) == (64, 10)
    assert arguments(call)["num_classes"] == 10
    assert arguments(call, "backbone") == {"in_features": 64, "num_classes": 10}


def test_switching_data_needs_no_second_edit(cli: CommandLine) -> None:
    words = (*CLASSIFIER, "--model.backbone", "LeNet", *FACTS)
    model = run(cli, *words, "--data.names", "6").arguments["model"]
    assert isinstance(model.backbone, LeNet)
    assert model.num_classes == 6
    assert model(torch.rand(2, 1, 12, 12)).shape == (2, 6)


def test_data_are_built_and_read_once(cli: CommandLine) -> None:
    call = run(cli, *CLASSIFIER, "--model.backbone", "LeNet", *FACTS)
    call.arguments["datamodule"].setup("fit")
    assert Facts.read == 1


def test_a_model_that_takes_nothing_from_the_data_does_not_read_them(cli: CommandLine) -> None:
    run(cli, "--model", "Plain", *FACTS)
    assert Facts.read == 0


def test_every_fact_in_the_form_that_the_class_takes(cli: CommandLine) -> None:
    call = run(cli, EVERYTHING, *FACTS, "--data.width", "16")
    names = ["class0", "class1", "class2", "class3"]
    assert call.arguments["model"].told == {
        "names": names, "shape": (1, 12, 16), "size": (12, 16), "mean": 0.5, "std": [0.25],
    }  # fmt: skip


def test_other_parts_of_the_model_are_no_backbone(cli: CommandLine) -> None:
    head = ("--model.head", "torch.nn.Linear", "--model.head.in_features", "9", "--model.head.out_features", "2")
    call = run(cli, EVERYTHING, *head, *FACTS)
    assert isinstance(call.arguments["model"].head, nn.Linear)
    assert call.arguments["model"].head.in_features == 9


def test_mean_and_std_with_values_of_their_own_are_left_alone(cli: CommandLine) -> None:
    model = run(cli, "--model", "tests.cli.linked_parts.Drawn", "--model.std", "0.1", *FACTS).arguments["model"]
    assert (model.mean, model.std, model.num_classes) == (0.0, 0.1, 4)


def test_a_model_without_annotations(cli: CommandLine) -> None:
    assert run(cli, "--model", "tests.cli.linked_parts.Untyped", *FACTS).arguments["model"].sizes == (4, 144)


def test_a_function_that_makes_the_backbone(cli: CommandLine) -> None:
    words = (
        "--model",
        "tests.cli.linked_parts.Wrapper",
        "--model.backbone",
        "tests.cli.linked_parts.make_net",
        "--model.backbone.width=4",
    )
    net = run(cli, *words, *FACTS).arguments["model"].backbone
    assert [(layer.in_features, layer.out_features) for layer in net] == [(144, 4), (4, 4)]


def test_an_equal_option_is_accepted(cli: CommandLine) -> None:
    file = cli.file("model.yaml", "model: {class_path: tests.cli.linked_parts.Drawn, init_args: {num_classes: 4}}")
    assert run(cli, f"--config={file}", *FACTS).arguments["model"].num_classes == 4
    words = ("--model.mean=0.5", "--model.std=[0.25]", "--model.image_size=[12,12]")
    assert run(cli, EVERYTHING, *words, *FACTS).arguments["model"].told["size"] == (
        12,
        12,
    )


@pytest.mark.parametrize(
    ("model", "option", "data", "given"),
    [
        (LENET, "--model.num_classes", "4", "10"),
        (LENET, "--model.backbone.num_classes", "4", "5"),
        (LENET, "--model.backbone.in_channels", "1", "3"),
        (LENET, "--model.backbone.image_size", "12", "28"),
        ((*CLASSIFIER, "--model.backbone=MLP"), "--model.backbone.in_features", "144", "64"),
        ((EVERYTHING,), "--model.image_size", "[12, 12]", "[12, 13]"),
        ((EVERYTHING,), "--model.mean", "0.5", "0.4"),
    ],
)
def test_a_contradiction_is_refused(
    mistake: Callable[..., str], model: tuple[str, ...], option: str, data: str, given: str
) -> None:
    assert mistake("fit", *model, f"{option}={given}", *FACTS, code=1) == (
        f"Expected `{option}` to be {data}, as the data say (Facts), got {given}: leave it out, change `--data`, or "
        "set `--link_data false` to take nothing from the data."
    )


def test_nothing_is_linked_on_request(cli: CommandLine) -> None:
    words = (*CLASSIFIER, "--model.backbone=MLP", "--model.backbone.in_features=64", "--link_data=false")
    call = run(cli, *words, *FACTS)
    assert arguments(call) | {"backbone": None, "optimizer": None} == {
        "backbone": None, "num_classes": 10, "optimizer": None, "lr_scheduler": None,
    }  # fmt: skip
    assert arguments(call, "backbone") == {"in_features": 64, "hidden": [200], "num_classes": 10, "norm": "none"}
    assert Facts.read == 0


@pytest.mark.parametrize("unlinked", [SILENT, (*FACTS, "--link_data=false")], ids=["data-tell-nothing", "not-linked"])
def test_what_comes_from_nowhere_is_asked_for(mistake: Callable[..., str], unlinked: tuple[str, ...]) -> None:
    assert mistake("fit", *CLASSIFIER, "--model.backbone=MLP", *unlinked, code=1) == (
        "Expected a value for `--model.backbone.in_features`, which MLP needs and the data do not provide, got none."
    )


def test_data_that_tell_nothing_leave_the_defaults(cli: CommandLine) -> None:
    call = run(cli, *CLASSIFIER, "--model.backbone", "LeNet", *SILENT)
    assert arguments(call, "backbone") == {"num_classes": 10, "in_channels": 1, "image_size": 28}
    assert run(cli, "--model", "tests.cli.linked_parts.Model", "--model.num_classes", "5", *SILENT).arguments["model"]


def test_images_that_are_not_square_have_no_size_in_one_number(cli: CommandLine) -> None:
    words = ("--data.width", "16", "--model.backbone.image_size", "20")
    call = run(cli, *CLASSIFIER, "--model.backbone", "LeNet", *FACTS, *words)
    assert arguments(call, "backbone") == {"num_classes": 4, "in_channels": 1, "image_size": 20}


@pytest.mark.parametrize("given", [(), ("--model.num_classes=10", "--model.backbone.in_features=64")])
def test_the_same_experiment_whether_told_or_taken(cli: CommandLine, given: tuple[str, ...]) -> None:
    words = (*CLASSIFIER, "--model.backbone", "MLP", "--data", "Digits")
    assert run(cli, *words, *given).trainer.run_config == run(cli, *words).trainer.run_config


def test_printed_config_leaves_room_for_other_data(cli: CommandLine, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(cli, *CLASSIFIER, "--model.backbone", "MLP", *FACTS, "--print_config")
    text = capsys.readouterr().out
    assert set(yaml.safe_load(text)["model"]["init_args"]["backbone"]["init_args"]) == {"hidden", "norm"}
    assert Facts.read == 0
    call = run(cli, "--config", cli.file("printed.yaml", text), "--data", "Digits")
    assert arguments(call, "backbone")["in_features"] == 64


def test_help_of_a_class_with_linked_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fit", "--model.help", "ImageClassifier"])
    assert end.value.code == 0
    assert "--model.num_classes" in capsys.readouterr().out


def fit(root: Path, *words: str) -> None:
    """Trains in a folder, without W&B."""
    trainer = (f"--trainer.default_root_dir={root}", "--trainer.name=run", "--trainer.logger=[]")
    main(["fit", *trainer, "--trainer.clients_per_round=2", *words])


def test_a_run_goes_on_is_done_again_and_done_on_other_data(tmp_path: Path) -> None:
    words = (*CLASSIFIER, "--model.backbone=MLP", "--model.backbone.hidden=[4]")
    fit(tmp_path, *words, *FACTS, "--trainer.max_rounds=1")
    folder = tmp_path / "run" / "version_0"
    fit(tmp_path, *words, *FACTS, "--model.num_classes=4", "--trainer.max_rounds=2", "--ckpt_path=last")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]
    assert len((folder / "metrics.csv").read_text().splitlines()) == 1 + 3
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["model"]["init_args"]["num_classes"] == 4, "what is given is kept"
    assert saved["model"]["init_args"]["backbone"]["init_args"] == {"hidden": [4], "norm": "none"}
    fit(tmp_path, f"--config={folder / 'config.yaml'}", "--trainer.max_rounds=3", "--ckpt_path=last")
    assert len((folder / "metrics.csv").read_text().splitlines()) == 1 + 4
    model = ImageClassifier.load_from_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert model(torch.rand(2, 1, 12, 12)).shape == (2, 4)


def test_a_saved_config_takes_other_data(tmp_path: Path) -> None:
    fit(tmp_path, *CLASSIFIER, "--model.backbone=MLP", *FACTS, "--trainer.max_rounds=1")
    fit(tmp_path, f"--config={tmp_path / 'run' / 'version_0' / 'config.yaml'}", "--data.names=5", "--data.width=9")
    checkpoint = torch.load(tmp_path / "run" / "version_1" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["num_classes"] == 5
    assert checkpoint["hyper_parameters"]["backbone"]["init_args"]["in_features"] == 12 * 9
