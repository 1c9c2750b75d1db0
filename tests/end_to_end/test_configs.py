"""Every file under configs/ parses, builds and trains; a saved config does its run again."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lightning_fed.callbacks.diagnostics import ClientEvaluation
from lightning_fed.cli import FederatedCLI, main
from lightning_fed.cli.configs_command import with_found_configs
from lightning_fed.sampling import cohort_size
from tests.docs.pages import blocks
from tests.end_to_end.command import REPOSITORY, fit_words, rows, run_folders
from tests.official_files import pixels, write_cifar, write_emnist, write_tiny_imagenet
from tests.user_files import write_femnist, write_leaf

CONFIGS = REPOSITORY / "configs"
SWEEPS = sorted((CONFIGS / "sweeps").glob("*.yaml"))
STUDIES = sorted((CONFIGS / "studies").rglob("*.yaml"))
FILES = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml") if path not in SWEEPS + STUDIES)

# What a fragment is laid over or beside; a file in another folder stands on its own.
COMPANIONS = {
    "data": "model/lenet.yaml",
    "model": "data/mnist_iid_100.yaml",
    "aggregator": "quickstart.yaml",
    "client": "quickstart.yaml",
    "faults": "quickstart.yaml",
    "payload": "quickstart.yaml",
    "baseline": "quickstart.yaml",
    "privacy": "quickstart.yaml",
}
COMPLETE = ("",)
# Data with other classes than the model of their folder's companion.
OTHER_COMPANIONS = {
    "data/emnist47": "model/cnn.yaml",
    "data/shakespeare": "model/char_lstm.yaml",
    "data/signatures": "model/mlp.yaml",
    "model/char_lstm": "data/shakespeare_134.yaml",
}
# What a file needs of the model under it.
FURTHER_WORDS = {"client/fedbn.yaml": ("--model.backbone.norm=batch", "--data.drop_last=true")}


def _write_cifar_npz(root: Path) -> None:
    labels = np.arange(1000) % 10
    arrays = {"x_train": pixels((1000, 32, 32, 3)), "y_train": labels, "x_test": pixels((10, 32, 32, 3))}
    np.savez(root / "cifar10.npz", **arrays, y_test=labels[:10])


def _write_femnist_of_many(root: Path) -> None:
    """As many writers as LEAF has, with a blank image each."""
    entries = {f"f{user:04d}": {"x": [[user % 2] * 784], "y": [user % 10]} for user in range(3550)}
    write_leaf(root / "femnist" / "train" / "all_data_0.json", entries)
    write_leaf(root / "femnist" / "test" / "all_data_0.json", {"other": entries["f0000"]})


# What a file asks for by these words; the first that fits counts. A fixture gives the folder of real data; what is not
# on the disk of whoever tests is written in its official format, of a size for a test.
DATA: dict[str, str | Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "path: emnist47.npz": "emnist_root",
    "path: cifar10.npz": lambda root, _: _write_cifar_npz(root),
    "class_path: CIFAR100": lambda root, patch: write_cifar(root, "CIFAR100", (10, 1), patch),
    "class_path: CIFAR10": lambda root, patch: write_cifar(root, "CIFAR10", (100, 1), patch),
    "class_path: TinyImageNet": lambda root, _: write_tiny_imagenet(root, (10, 1)),
    "class_path: EMNIST": lambda root, patch: write_emnist(root, "balanced", 47, (4, 1), patch),
    "num_clients: 3550": lambda root, _: _write_femnist_of_many(root),
    "num_clients: 3000": lambda root, _: _write_femnist_of_many(root),
    "class_path: FEMNIST": lambda root, _: write_femnist(root),
    "class_path: Shakespeare": "shakespeare_root",
    "MNIST": "data_root",
}

# Files whose model is shown on a page, and what that needs; `make test-ecosystem` has it.
SHOWN = {"lora_vit.yaml": ("docs/foundation-models.md", "lora_model.py", ("transformers", "peft"))}


def write_shown_model(name: str, folder: Path) -> None:
    """Writes the file of a page that a configuration names, or skips where that cannot run."""
    page, file, packages = SHOWN[name]
    for package in packages:
        pytest.importorskip(package, reason=f"configs/{name} needs {package}: pip install 'lightning_fed[ecosystem]'")
    (text,) = [block.text for block in blocks(REPOSITORY / page) if block.title == file]
    (folder / file).write_text(text + "\n")


@pytest.fixture(autouse=True)
def _nothing_stays_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def config_words(name: str) -> list[str]:
    """Words that name a file, after what it needs."""
    folder = name.rpartition("/")[0]
    assert folder in COMPANIONS or folder in COMPLETE, f"say in COMPANIONS or COMPLETE what configs/{folder} needs"
    other = next((file for start, file in OTHER_COMPANIONS.items() if name.startswith(start)), None)
    files = [other or COMPANIONS[folder], name] if folder in COMPANIONS else [name]
    return [*(f"--config={CONFIGS / file}" for file in files), *FURTHER_WORDS.get(name, ())]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i % 16 else ()) for i, name in enumerate(FILES)]
)
@pytest.mark.quick(4)
def test_config_trains_a_round(
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files = [word.partition("=")[2] for word in config_words(name) if word.startswith("--config=")]
    texts = [Path(file).read_text() for file in files]
    if name in SHOWN:
        folder = tmp_path_factory.mktemp("model")
        write_shown_model(name, folder)
        monkeypatch.syspath_prepend(folder)
    find_data(texts, request, monkeypatch, tmp_path_factory)
    if name.startswith("privacy/"):
        pytest.importorskip("dp_accounting", reason="pip install 'lightning_fed[privacy]'")
    cli = FederatedCLI(["fit", *config_words(name), "--trainer.fast_dev_run=true"])
    assert cli.trainer.round == 1
    if name.startswith("privacy/"):  # what clients log is left out, and how many of them come is drawn
        assert 0 < max(value for key, value in cli.trainer.callback_metrics.items() if key.endswith("epsilon")) < 50
        return
    assert cli.trainer.callback_metrics["train/loss"] > 0
    sizes = cli.datamodule.split.sizes
    drawn = cohort_size(cli.trainer.options.clients_per_round, len(sizes))
    clients = min(max(2, cli.trainer.aggregator.min_clients), drawn)
    batches = [min(int(size), cli.datamodule.batch_size) for size in (sizes.min(), sizes.max())]
    assert clients * batches[0] <= cli.trainer.totals["samples"] <= clients * batches[1]
    assert list(tmp_path.iterdir()) == []


def find_data(
    texts: list[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Says in the environment where the data that a config asks for are."""
    data = next((data for words, data in DATA.items() if any(words in text for text in texts)), None)
    if data is not None:
        root = request.getfixturevalue(data) if isinstance(data, str) else tmp_path_factory.mktemp("data")
        monkeypatch.setenv("LIGHTNING_FED_DATA", str(root))
        if not isinstance(data, str):
            monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
            data(root, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda path: path.stem)
def test_what_an_agent_of_a_sweep_calls_trains_a_round(
    sweep: Path,
    at: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """As W&B itself composes the command, at the first and the last value of each parameter."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    stated = yaml.safe_load(sweep.read_text())
    assert stated["metric"]["name"].split(".")[0] in ("val/acc", "test/acc")
    chosen = {name: {"value": each["values"][at] if "values" in each else each["value"]}
              for name, each in stated["parameters"].items()}  # fmt: skip
    arguments = create_sweep_command_args({"args": chosen})["args"]
    program, *words = create_sweep_command(stated["command"])
    assert program == "lightning-fed"
    composed = [part for word in words for part in (arguments if word == "${args}" else [word])]
    find_data([(CONFIGS / f"{words[2]}.yaml").read_text()], request, monkeypatch, tmp_path_factory)
    cli = FederatedCLI([*with_found_configs(composed), "--trainer.fast_dev_run=true"])
    assert cli.trainer.round == 1
    for name, each in chosen.items():
        assert _at(cli.trainer.run_config, name) == each["value"], name


def _at(config: Any, name: str) -> Any:
    """Looks an option up by the short name that the command line takes."""
    for key in name.split("."):
        config = config[key] if key in config else config["init_args"][key]
    return config


def test_every_value_of_a_fragment_reaches_the_run() -> None:
    words = ["fit", *config_words("quickstart.yaml"), *config_words("aggregator/gma.yaml")[1:]]
    config = FederatedCLI([*words, "--trainer.fast_dev_run=true"]).trainer.run_config
    given = yaml.safe_load((CONFIGS / "aggregator" / "gma.yaml").read_text())["aggregator"]["init_args"]
    built = config["aggregator"]["init_args"]
    assert built["lr"] == given["lr"]
    assert built["mask"]["class_path"].endswith(given["mask"]["class_path"])
    assert built["mask"]["init_args"] == {
        **given["mask"]["init_args"], "binary": False, "comparison": ">=", "votes": "equal",
    }  # fmt: skip


def test_the_baseline_fragment_takes_the_mask_away() -> None:
    over = f"--config={CONFIGS / 'aggregator' / 'fedavg.yaml'}"
    config = FederatedCLI(["fit", *config_words("aggregator/gma.yaml"), over, "--trainer.fast_dev_run=true"])
    assert config.trainer.run_config["aggregator"]["init_args"]["mask"] is None


def test_the_centralised_baseline_takes_the_federation_away() -> None:
    """Whatever the experiment has: its rule and mask, its client algorithm, its split, and how much a client does."""
    over = [f"--config={CONFIGS / name}.yaml" for name in ("aggregator/gma", "client/scaffold", "baseline/centralised")]
    words = ["fit", *config_words("quickstart.yaml"), "--trainer.local_epochs=null", "--trainer.local_steps=3", *over]
    config = FederatedCLI([*words, "--trainer.fast_dev_run=true"]).trainer.run_config
    data, trainer = config["data"]["init_args"], config["trainer"]
    assert (data["num_clients"], data["partitioner"]["class_path"].rpartition(".")[2]) == (1, "IID")
    assert config["aggregator"]["class_path"].endswith("FedAvg")
    assert (config["aggregator"]["init_args"]["lr"], config["aggregator"]["init_args"]["mask"]) == (1.0, None)
    assert (config["client"], trainer["local_epochs"], trainer["local_steps"]) == (None, None, None)
    assert trainer["clients_per_round"] == 1


def test_the_baseline_of_fine_tuning_takes_the_method_away() -> None:
    over = [f"--config={CONFIGS / name}.yaml" for name in ("aggregator/gma", "client/scaffold", "baseline/fine_tuning")]
    config = FederatedCLI(["fit", *config_words("quickstart.yaml"), *over, "--trainer.fast_dev_run=true"]).trainer
    given, (evaluation,) = config.run_config, [cb for cb in config.callbacks if isinstance(cb, ClientEvaluation)]
    assert (given["aggregator"]["class_path"].rpartition(".")[2], given["client"]) == ("FedAvg", None)
    assert (given["aggregator"]["init_args"]["lr"], given["aggregator"]["init_args"]["mask"]) == (1.0, None)
    assert (evaluation.models, evaluation.tune_epochs, evaluation.data) == (("global", "tuned"), 1, "test")
    assert given["data"]["init_args"]["client_test_fraction"] == 0.2


def test_the_local_baseline_takes_the_server_away() -> None:
    over = [f"--config={CONFIGS / name}.yaml" for name in ("aggregator/gma", "client/scaffold", "baseline/local_only")]
    config = FederatedCLI(["fit", *config_words("quickstart.yaml"), *over, "--trainer.fast_dev_run=true"]).trainer
    given, (evaluation,) = config.run_config, [cb for cb in config.callbacks if isinstance(cb, ClientEvaluation)]
    assert [given[part]["class_path"].rpartition(".")[2] for part in ("aggregator", "client")] == [
        "FedAvg",
        "LocalOnly",
    ]
    assert (given["aggregator"]["init_args"]["buffers"], given["aggregator"]["init_args"]["mask"]) == ("local", None)
    assert (evaluation.models, evaluation.data) == (("own",), "test")


@pytest.mark.slow
def test_saved_config_does_the_run_again(tmp_path: Path) -> None:
    mask = f"--config={CONFIGS / 'aggregator' / 'gma.yaml'}"
    main(fit_words(tmp_path, 3, mask, "--seed_everything=5", "--aggregator.mask.threshold=0.2"))
    (first,) = run_folders(tmp_path)
    main(["fit", f"--config={first / 'config.yaml'}"])
    _, second = run_folders(tmp_path)
    assert (second / "config.yaml").read_text() == (first / "config.yaml").read_text()
    assert rows(second) == rows(first)
    assert [row["round"] for row in rows(first)] == ["0", "1", "2", "3"]
    assert {"mask/mean", "val/acc", "test/acc", "train/loss"} <= rows(first)[0].keys()


@pytest.mark.slow
def test_another_seed_gives_other_numbers(tmp_path: Path) -> None:
    for seed in (0, 1):
        main(fit_words(tmp_path, 1, f"--seed_everything={seed}"))
    one, other = (rows(folder)[-1] for folder in run_folders(tmp_path))
    assert one["train/loss"] != other["train/loss"]
