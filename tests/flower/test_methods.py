"""Methods over SuperLink and two SuperNodes, in processes of their own, give what they give in one process."""

import csv
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from sklearn.datasets import load_digits
from torch import Tensor

from benchmarks.flower_net import Net
from lightning_fed.cli.federated_cli import FederatedCLI
from lightning_fed.engines.fleet.packets import unpack

CLIENTS = ("0:9", "9:20")
QUIET = "--trainer.enable_progress_bar false --trainer.enable_model_summary false"
BASE = f"--config quickstart --trainer.max_rounds 5 --trainer.precision 64-true --trainer.engine sequential {QUIET}"
# Several to a run, as packets are alike to Flower, whatever they are of.
RUNS = {
    "gma-ditto": "--config aggregator/gma --client Ditto",
    "fedyogi-fedper": "--config aggregator/fedyogi --client FedPer",
    "feddyn": "--config client/feddyn",
    "fedga-topk": "--config client/fedga --trainer.callbacks TopK --trainer.callbacks.share 0.1",
    "cgw-fedcm": (
        "--config aggregator/cgw --config client/fedcm --data.val_split per_client --data.val_fraction 0.2 "
        "--trainer.check_test_every_n_rounds null"
    ),
    "mimelite": "--config client/mimelite",
    "scaffold": "--config client/scaffold",
}
AT_NODES = "cgw-fedcm"  # is evaluated on what nodes hold out
OWN = (
    f"{BASE} --trainer.clients_per_round 3 --trainer.check_test_every_n_rounds null --model.num_classes 10 "
    "--model.backbone.in_features 64"
)


def write_files(folder: Path) -> None:
    """The digits of four clients at two sites, and an exam of others."""
    images, labels = load_digits(return_X_y=True)
    x, y, owner = (images / 16).astype(np.float64).reshape(-1, 1, 8, 8), labels, np.arange(len(labels)) % 5
    for name, whose in {"site0": [0, 1], "site1": [2, 3], "all": [0, 1, 2, 3], "exam": [4]}.items():
        own = np.isin(owner, whose)
        np.savez(folder / f"{name}.npz", x=x[own], y=y[own], owner=owner[own])
    shutil.copy(Path(__file__).parent / "site_data.py", folder)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Net]:
    """A net in which the apps of all chosen tests have been trained, three at a time, as Flower mostly waits."""
    chosen = {item.callspec.params["app"] for item in request.session.items if item.path == request.path}
    with Net(tmp_path_factory.mktemp("net")) as net:
        net.new("base", *BASE.split())
        write_files(net.folder)
        net.new("own", *f"{OWN} --data site_data.Exam --data.path exam.npz".split())
        for place in ("apps", "site0", "site1"):
            shutil.copy(net.folder / "site_data.py", net.folder / place / "own")
            for app in chosen - {"own"}:
                shutil.copytree(net.folder / place / "base", net.folder / place / app)
                project = net.folder / place / app / "pyproject.toml"
                project.write_text(project.read_text().replace('"base"', f'"{app}"'))
        with ThreadPoolExecutor(3) as several:
            list(several.map(lambda app: train(net, app, RUNS.get(app, "")), sorted(chosen)))
        yield net


def train(net: Net, app: str, options: str) -> None:
    """A run of an app with the words, which its nodes get too."""
    workers = []
    for node, clients in enumerate(("0:2", "2:4") if app == "own" else CLIENTS):
        data = f"--data site_data.Site --data.path site{node}.npz" if app == "own" else ""
        workers.append(net.start_worker(app, node, *f"{options} {data} --clients {clients}".split()))
    for worker in workers:
        net.await_worker(worker)
    where = {"evaluates": '"nodes"'} if app == AT_NODES else {}
    net.await_run(net.submit(app, f"{options} --trainer.name {app}", **where))
    for worker in workers:
        net.end(worker)


class Kept(Callback):
    """Takes what clients keep, once they have trained for the last time."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.states = {client: trainer.client_states.move_out(client) for client in range(len(trainer.client_sizes))}


def in_process(words: str, folder: Path) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """What `fit` with these words ends with: the model, and what each client keeps."""
    kept = Kept()

    class Watched(FederatedCLI):
        def before_fit(self) -> None:
            self.trainer.callbacks.append(kept)

    place = ["--trainer.name", "here", "--trainer.default_root_dir", str(folder)]
    return Watched(["fit", *words.split(), *place]).model.state_dict(), kept.states


def rows(run: Path, *names: str) -> list[dict[str, float]]:
    """The metrics of a run: some, or all but times and what only a fleet says."""
    beside = ("time", "fleet", "clients/failed")
    with (run / "metrics.csv").open() as file:
        return [
            {
                name: float(value)
                for name, value in row.items()
                if value and (name in names or not name.startswith(beside))
            }
            for row in csv.DictReader(file)
        ]


def weights(run: Path) -> dict[str, Tensor]:
    """The global model of a run's last checkpoint."""
    state: dict[str, Tensor] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return state


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any two numbers."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def expect_same(net: Net, app: str, words: str, folder: Path, most: float = 0.0) -> dict[int, dict[str, Tensor]]:
    there = net.folder / "runs" / app / "version_0"
    model, states = in_process(words, folder)
    assert gap(model, weights(there)) <= most
    pairs = zip(rows(folder / "here" / "version_0"), rows(there), strict=True)
    assert all(one == pytest.approx(other, rel=1e-12) for one, other in pairs)
    return states


# To Flower those that are slow are as SCAFFOLD and FedGA are: with records at nodes, and an exchange before training.
@pytest.mark.parametrize(
    "app", [pytest.param(app, marks=[pytest.mark.slow] * (app in ("feddyn", "mimelite"))) for app in RUNS]
)
def test_a_method_over_flower_is_that_in_one_process(net: Net, app: str, tmp_path: Path) -> None:
    most = 1e-15 if app == "scaffold" else 0.0
    states = expect_same(net, app, f"{BASE} {RUNS[app]}", tmp_path, most)
    newest = {}  # what a client keeps, which has never left its node
    for path in net.folder.glob(f"site*/{app}/records/client*.safetensors"):
        client, at = map(int, re.findall(r"\d+", path.stem))
        newest[client] = max(newest.get(client, (0, path)), (at, path))
    for client, (_, path) in newest.items():
        tensors = unpack(path.read_bytes())[1]
        del tensors["first_weights"]  # says which run it is of
        assert gap({name.removeprefix("0."): value for name, value in tensors.items()}, states[client]) <= most
    keeps = {"gma-ditto", "fedyogi-fedper", "feddyn", "fedga-topk", "scaffold"}
    assert bool(newest) == (app in keeps)


@pytest.mark.parametrize("app", ["own"])
def test_nodes_with_files_of_their_own(net: Net, app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(net.folder)
    monkeypatch.syspath_prepend(str(net.folder))
    expect_same(net, app, f"{OWN} --data site_data.Site --data.path all.npz --data.exam exam.npz", tmp_path)


@pytest.mark.parametrize("app", ["fedga-topk"])
def test_what_top_k_packs_is_what_goes_up(net: Net, app: str) -> None:
    last = rows(net.folder / "runs" / app / "version_0", "fleet/bytes_up")[-1]
    assert last["fleet/bytes_up"] == pytest.approx(last["comm/bytes_up"] / 5, rel=0.05)


@pytest.mark.parametrize("app", [AT_NODES])
def test_nodes_evaluate_on_what_they_hold_out(net: Net, app: str) -> None:
    """That these metrics are those of one process is compared with all others of the run."""
    counts = rows(net.folder / "runs" / app / "version_0", "fleet/val_samples", "fleet/val_failed", "val/acc")
    assert len(counts) == 6
    assert {(row["fleet/val_samples"], row["fleet/val_failed"]) for row in counts} == {(280.0, 0.0)}
    assert all("val/acc" in row for row in counts)
