"""What clients remember: where it lives changes no number, and a kill at any moment costs no checkpoint its records."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import FederatedCheckpoint
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.client_states import ClientStates
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.updates import Client
from lightning_fed.distributed.sharing import Assignment
from lightning_fed.errors import FederatedError
from lightning_fed.trainer import checkpoint_contents
from tests.parts import Classifier, built, federated_data, federated_trainer

LOCATIONS = ("device", "host", "disk")
ROUNDS, CLIENTS = 6, 5
D = 18  # of the linear classifier


class Remembers(ClientAlgorithm):
    """Moves a client's start by what it remembers, and remembers a mix of that and of its update.

    Keeps a second memory in plain clones, so that the store is compared with something that cannot be wrong. Dies in
    the round that a test says, at its second client, when the first has stored its record.
    """

    dies_in: int | None = None

    def __init__(self) -> None:
        self.plain: dict[int, Tensor] = {}
        self.recalled = 0
        self.stored_in = 0

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        self.own = torch.full((2, D // 2), torch.nan)  # of another shape than the model's vector
        trainer.client_states.recall("Remembers", client.id, self.own)
        if not trainer.resumed:
            assert torch.equal(self.own, self.plain.get(client.id, torch.zeros_like(self.own)))
        self.recalled += bool(self.own.any())
        trainer.vector.data.add_(self.own.flatten())

    def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if self.stored_in == self.dies_in == update.client.round:
            raise Killed
        self.stored_in = update.client.round
        self.own.mul_(0.5).add_(update.delta.view_as(self.own), alpha=-0.3)
        self.plain[update.client.id] = self.own.clone()
        trainer.client_states.store("Remembers", update.client.id, self.own)
        self.own.fill_(torch.nan)  # the store keeps a copy


class Killed(BaseException):
    """Stands for the death of the process."""


class Scored(Classifier):
    """Logs a score that is best in the rounds that the test says."""

    peaks: tuple[int, ...] = (3,)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        at = self.trainer.round
        self.log("score", float(self.peaks.index(at) + 1 if at in self.peaks else -at - 1))


def fit(folder: Path, *callbacks: Any, ckpt_path: str | None = None, every: int = 1, **options: Any) -> Tensor:
    """Trains to the last round; returns the global weights."""
    options = {"client_states": "disk", "max_rounds": ROUNDS, "clients_per_round": 2, "name": "run", **options}
    saves = options.pop("saves", True)
    parts = [Remembers(), *callbacks]
    parts += [FederatedCheckpoint(monitor="score", mode="max", every_n_rounds=every)] if saves else []
    trainer = federated_trainer(folder, *parts, enable_checkpointing=saves, logger=[], **options)
    module = built(Scored)
    trainer.fit(module, federated_data(*[8] * CLIENTS), ckpt_path=ckpt_path)
    assert (trainer.round, trainer.resumed) == (options["max_rounds"], ckpt_path is not None)
    assert parts[0].recalled > 0
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """The weights of a run in one piece; every other run must come to the same."""
    return fit(tmp_path_factory.mktemp("whole"), client_states="device", saves=False)


def checkpoint_of(folder: Path, name: str, version: int = 0) -> Path:
    return folder / "run" / f"version_{version}" / "checkpoints" / f"{name}.ckpt"


def needed_by(path: Path) -> set[str]:
    return set(torch.load(path, weights_only=True)["federated"]["client_states"])


def files_in(run: Path) -> dict[str, tuple[int, bytes]]:
    """The files of client state in a run's folder, with the time of their last change and what they hold."""
    paths = [path for path in (run / "client_states").rglob("*") if path.is_file()]
    return {f"{p.parent.name}/{p.name}": (p.stat().st_mtime_ns, p.read_bytes()) for p in paths}


@pytest.mark.parametrize("location", LOCATIONS)
def test_the_location_changes_no_number_and_last_is_resumed(tmp_path, whole, location):
    assert torch.equal(fit(tmp_path / "whole", client_states=location, saves=location == "device"), whole)
    assert not torch.equal(fit(tmp_path, client_states=location, max_rounds=3), whole)
    assert torch.equal(fit(tmp_path, client_states=location, ckpt_path="last"), whole)
    assert not (tmp_path / "run" / "version_1").exists()


@pytest.mark.parametrize(("before", "after"), [("device", "disk"), ("disk", "host"), ("host", "device")])
def test_resumes_from_best_or_a_path_with_another_location(tmp_path, whole, before, after):
    fit(tmp_path, client_states=before)
    best, last = (checkpoint_of(tmp_path, name) for name in ("best", "last"))
    assert torch.load(best, weights_only=True)["epoch"] == 3
    kept = files_in(best.parents[1])
    assert torch.equal(fit(tmp_path, client_states=after, ckpt_path=str(best)), whole)
    assert files_in(best.parents[1]) == kept
    assert torch.equal(fit(tmp_path, client_states=before, ckpt_path="best"), whole)
    longer = fit(tmp_path, client_states=before, ckpt_path=str(last), max_rounds=ROUNDS + 2)
    assert torch.equal(longer, fit(tmp_path / "other", client_states=after, max_rounds=ROUNDS + 2))


def test_where_there_are_no_links_records_are_copied(tmp_path, whole, monkeypatch):
    def refuse(*args: Any) -> None:
        raise OSError("no links here")

    fit(tmp_path, max_rounds=3)
    monkeypatch.setattr(os, "link", refuse)
    assert torch.equal(fit(tmp_path, ckpt_path=str(checkpoint_of(tmp_path, "last"))), whole)
    moved = tmp_path / "run" / "version_1"
    moved.rename(tmp_path / "moved")  # it stands alone
    for path in (tmp_path / "run").rglob("*.npy"):
        path.unlink()
    assert torch.isfinite(fit(tmp_path, ckpt_path=str(tmp_path / "moved/checkpoints/last.ckpt"), max_rounds=8)).all()


class Watches(FederatedCheckpoint):
    """Notes the files before and after each save, and the clients that were stored since the last one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(monitor="score", mode="max", **options)
        self.cohorts: dict[int, set[int]] = {}
        self.before: dict[str, tuple[int, bytes]] = {}
        self.written: list[tuple[int, set[str]]] = []

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.cohorts[cohort.round] = {client.id for client in cohort.clients}

    def save(self, trainer: FederatedTrainer, final: bool) -> None:
        super().save(trainer, final)
        folder = trainer.run.checkpoints
        after = files_in(folder.parent)
        self.written.append((trainer.round, {file for file in after if after[file] != self.before.get(file)}))
        self.before = after
        referred = [needed_by(path) for path in folder.glob("*.ckpt")]
        # On disk, records of rounds that no checkpoint has seen may be there too; none of them is left at the end.
        assert set().union(*referred) <= set(after)
        if self.saved_round == trainer.round:
            assert set().union(*referred) == set(after)


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("every", [1, 2])
def test_a_checkpoint_writes_what_changed_and_removes_what_none_needs(tmp_path, location, every):
    watch = Watches(every_n_rounds=every)
    options = {"client_states": location, "name": "run", "max_rounds": ROUNDS, "clients_per_round": 2, "logger": []}
    trainer = federated_trainer(tmp_path, Remembers(), watch, enable_checkpointing=True, **options)
    trainer.fit(built(Scored), federated_data(*[8] * CLIENTS))
    written = {round: files for round, files in watch.written if files}
    expected: dict[int, set[str]] = {}
    waiting: set[int] = set()
    for round, cohort in watch.cohorts.items():
        waiting |= cohort
        if location == "disk" or round % every == 0 or round == 3:  # 3 is best
            expected[round] = {str(i) for i in (cohort if location == "disk" else waiting)}
            waiting = set()
    assert {r: {f.split("/")[1].split("-")[0] for f in files} for r, files in written.items()} == expected
    assert needed_by(checkpoint_of(tmp_path, "best")) != needed_by(checkpoint_of(tmp_path, "last"))


@pytest.fixture
def dies_while_training(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    return lambda round: monkeypatch.setattr(Remembers, "dies_in", round)


@pytest.fixture
def dies_while_saving(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """Lets the process die when records are written, and the checkpoint that names them is not."""

    def arrange(round: int, name: str) -> None:
        def save(content: Any, path: Path) -> None:
            if path.stem == "last_good":  # a process that is killed writes nothing more
                return
            if (content["epoch"], path.stem) == (round, name):
                raise Killed
            torch.save(content, path.parent.mkdir(parents=True, exist_ok=True) or path)

        monkeypatch.setattr(checkpoint_contents, "save_checkpoint", save)

    return arrange


@pytest.mark.parametrize(
    ("name", "location"), [("last", "disk"), ("last", "host"), ("best", "disk"), ("best", "device")]
)
def test_a_kill_between_records_and_checkpoint_costs_nothing(tmp_path, whole, location, name, dies_while_saving):
    last = checkpoint_of(tmp_path, "last")
    dies_while_saving(3, name)
    for attempt in range(2):
        with pytest.raises(Killed):
            fit(tmp_path, client_states=location, ckpt_path="last" if attempt else None)
        assert torch.load(last, weights_only=True)["epoch"] == 2
        assert set(files_in(last.parents[1])) > needed_by(last)
    dies_while_saving(-1, "")
    assert torch.equal(fit(tmp_path, client_states=location, ckpt_path="last"), whole)
    assert set(files_in(last.parents[1])) == needed_by(last) | needed_by(checkpoint_of(tmp_path, "best"))


@pytest.mark.parametrize("location", ["host", "disk"])
def test_a_kill_within_a_round_costs_nothing_and_best_stays(tmp_path, whole, location, dies_while_training):
    dies_while_training(4)
    with pytest.raises(Killed):
        fit(tmp_path, client_states=location, every=2)
    best, last = (checkpoint_of(tmp_path, name) for name in ("best", "last"))
    assert [torch.load(path, weights_only=True)["epoch"] for path in (best, last)] == [3, 2]
    before = files_in(best.parents[1])
    # From round 2 on again, into the round of ``best``, whose records are neither overwritten nor removed.
    dies_while_training(3)
    with pytest.raises(Killed):
        fit(tmp_path, client_states=location, every=2, ckpt_path="last")
    dies_while_training(None)
    after = files_in(best.parents[1])
    assert {file: after[file] for file in needed_by(best)} == {file: before[file] for file in needed_by(best)}
    assert torch.equal(fit(tmp_path / "other", client_states=location, ckpt_path=str(best)), whole)
    assert torch.equal(fit(tmp_path, client_states=location, every=2, ckpt_path="last"), whole)


@pytest.mark.parametrize("location", ["device", "disk"])
def test_a_resumption_from_best_leaves_last_as_it_was(tmp_path, whole, location, dies_while_training):
    fit(tmp_path, client_states=location, max_rounds=5)
    first, second = (checkpoint_of(tmp_path, "last", version) for version in (0, 1))
    dies_while_training(6)
    with pytest.raises(Killed):
        fit(tmp_path, client_states=location, ckpt_path="best")
    dies_while_training(4)
    with pytest.raises(Killed):  # before it has a checkpoint of its own
        fit(tmp_path, client_states=location, ckpt_path=str(checkpoint_of(tmp_path, "best")))
    dies_while_training(None)
    assert torch.load(second, weights_only=True)["epoch"] == 5
    assert not checkpoint_of(tmp_path, "last", 2).exists()
    assert torch.equal(fit(tmp_path, client_states=location, ckpt_path=str(first)), whole)
    later = second.stat().st_mtime + 60  # timestamps of files are coarse
    os.utime(second, (later, later))
    assert torch.equal(fit(tmp_path, client_states=location, ckpt_path="last"), whole)


def rows(*values: float) -> list[Tensor]:
    return [torch.full((D,), value) for value in values]


def recalled(states: ClientStates, *clients: int) -> list[float]:
    out = torch.full((D,), torch.nan)
    found = []
    for client in clients:
        states.recall("A", client, out)
        assert (out == out[0]).all()
        found.append(out[0].item())
    return found


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_file_that_a_checkpoint_names_is_never_written_again(tmp_path, location):
    """By hand, with other numbers on the abandoned branch, as on devices that repeat no sum exactly."""
    one, two, three, four = rows(1, 2, 3, 4)
    states = ClientStates(location, one, tmp_path, {})
    states.store("A", 0, one)
    last = states.dump()
    states.store("A", 2, three)  # before the checkpoint is whole: no part of it, but not to be lost
    states.saved("last", {"last", "best"})
    assert recalled(states, 0, 2) == [1, 3]
    states.store("A", 0, two)
    best = states.dump()
    states.saved("best", {"last", "best"})
    states.store("A", 0, three)
    states.dump()  # and the process dies before it writes a checkpoint
    for _ in range(2):
        states = ClientStates(location, one, tmp_path, {"last": last, "best": best})
        states.restore(last, tmp_path / "client_states")
        assert recalled(states, 0, 1) == [1, 0]
        states.store("A", 0, four)
        states.dump()  # dies again
    states.saved("last", {"last", "best"})
    assert set(files_in(tmp_path)) == {*best, *states.dump()}
    states = ClientStates("disk", one, tmp_path, {"best": best})
    states.restore(best, tmp_path / "client_states")
    assert recalled(states, 0) == [2]
    before = files_in(tmp_path)
    states = ClientStates(location, one, tmp_path / "other", {})  # links to the files of the first
    states.restore(best, tmp_path / "client_states")
    for _ in range(2):
        states.store("A", 0, four)
        assert len(states.dump()) == 2
    assert recalled(states, 0, 2) == [4, 3]
    assert files_in(tmp_path) == before


def test_a_checkpoint_that_cannot_be_read_keeps_its_records(tmp_path, whole):
    fit(tmp_path, max_rounds=4)
    best = checkpoint_of(tmp_path, "best")
    content, needed = best.read_bytes(), needed_by(best)
    best.write_bytes(content[:100])
    assert torch.equal(fit(tmp_path, ckpt_path="last"), whole)
    assert needed <= set(files_in(best.parents[1]))
    best.write_bytes(content)
    assert torch.equal(fit(tmp_path, ckpt_path="best"), whole)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "there is no such file"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read"),
    "cut": (cut, "cannot be read"),
    "foreign": (lambda path: path.write_text("abc"), "cannot be read"),
    "wider": (lambda path: np.save(path, np.zeros(D + 1, np.float32)), "does not match its checksum"),
}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two rounds of all clients."""
    folder = tmp_path_factory.mktemp("short")
    fit(folder, max_rounds=2, clients_per_round=CLIENTS)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_one_sentence(tmp_path, short, damage):
    shutil.copytree(short, tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "run" / "version_0" / "client_states" / "Remembers").glob("1-*.npy")
    harm, message = DAMAGES[damage]
    harm(path)
    for ckpt_path in ("last", str(checkpoint_of(tmp_path, "last"))):
        with pytest.raises(FederatedError, match=message) as caught:
            fit(tmp_path, clients_per_round=CLIENTS, ckpt_path=ckpt_path)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("Expected ")
        assert path.name in str(caught.value)
        assert "`--ckpt_path`" in str(caught.value)
    if damage == "missing":
        assert not (tmp_path / "run" / "version_1").exists()


def test_a_disk_that_refuses_is_one_sentence(tmp_path):
    states = ClientStates("disk", torch.zeros(D), tmp_path, {})
    (tmp_path / "client_states").write_text("in the way")
    with pytest.raises(FederatedError, match=r"client_states/A/0-1-[0-9a-f]{8}\.npy.*`--trainer\.default_root_dir`"):
        states.store("A", 0, torch.zeros(D))


def test_a_run_without_client_state_has_no_folder_for_it(tmp_path):
    options = {"enable_checkpointing": True, "logger": [], "name": "run", "client_states": "disk"}
    federated_trainer(tmp_path, max_rounds=2, **options).fit(Classifier(), federated_data())
    assert needed_by(checkpoint_of(tmp_path, "last")) == set()
    assert not (tmp_path / "run" / "version_0" / "client_states").exists()
    trainer = federated_trainer(tmp_path, max_rounds=3, **options)
    trainer.fit(Classifier(), federated_data(), ckpt_path="last")
    assert trainer.round == 3


class Looks(FederatedCallback):
    """Notes, after each round, what the store holds in memory and where its files are."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.files: list[list[Path]] = []

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.held.append(sum(t.numel() for v in vars(trainer.client_states).values() for t in tensors_in(v)))
        self.files.append([path for path in trainer.client_states._folder().rglob("*") if path.is_file()])


def tensors_in(value: Any) -> list[Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, set, tuple)) else [value]
    return [item for item in values if isinstance(item, (Tensor, np.ndarray))]


def test_on_disk_nothing_is_held_in_memory(tmp_path):
    looks = {location: Looks() for location in LOCATIONS}
    for location, look in looks.items():
        fit(tmp_path, look, client_states=location, clients_per_round=CLIENTS, max_rounds=2)
    assert looks["disk"].held == [0, 0]
    assert looks["device"].held == looks["host"].held == [CLIENTS * D, CLIENTS * D]
    resumed = Looks()
    fit(tmp_path, resumed, ckpt_path="last", clients_per_round=CLIENTS, max_rounds=3)
    assert resumed.held == [0]


@pytest.mark.parametrize("name", ["run", None])
def test_without_checkpoints_the_disk_is_left_as_it_was(tmp_path, whole, monkeypatch, name):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    look = Looks()
    options = {"logger": False} if name is None else {"logger": [], "name": name}
    options = {"client_states": "disk", "max_rounds": ROUNDS, "clients_per_round": 2, **options}
    trainer = federated_trainer(tmp_path, Remembers(), look, **options)
    trainer.fit(module := built(Scored), federated_data(*[8] * CLIENTS))
    assert torch.equal(torch.cat([p.detach().flatten() for p in module.parameters()]), whole)
    assert len(look.files[0]) == 2
    folder = tmp_path if name is None else tmp_path / "run" / "version_0"
    assert look.files[0][0].is_relative_to(folder)
    assert max(map(len, look.files)) <= CLIENTS  # one version of each
    assert not list(tmp_path.rglob("*.npy"))
    assert not list(tmp_path.rglob("client_states*"))


def test_a_fast_dev_run_resumes_and_leaves_the_run_as_it_was(tmp_path):
    fit(tmp_path, max_rounds=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    algorithm = Remembers()
    for location in LOCATIONS:
        options = {"client_states": location, "fast_dev_run": 6, "name": "run"}
        trainer = federated_trainer(tmp_path, algorithm, **options)
        path = str(checkpoint_of(tmp_path, "last"))
        trainer.fit(built(Scored), federated_data(*[8] * CLIENTS), ckpt_path=path)
        assert (trainer.run, trainer.round) == (None, 6)
    assert algorithm.recalled > 3
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_each_fit_starts_from_zero_and_lets_go(tmp_path):
    trainer = federated_trainer(tmp_path, first := Remembers(), max_rounds=3)
    for _ in range(2):
        trainer.fit(built(Scored), federated_data(*[8] * CLIENTS))
        assert not hasattr(trainer, "client_states")
        first.plain.clear()  # the second fit compares with it


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize(
    ("first", "kept"),
    [
        (torch.arange(D, dtype=torch.float64), np.float64),
        (torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3), np.float32),
        (torch.ones(2, 3, 4).mT, np.float32),
        (torch.tensor(True), np.bool_),
        (torch.zeros(0, 3, dtype=torch.complex64), np.complex64),
    ],
    ids=["wide", "narrow", "strided", "number", "empty"],
)
def test_the_first_record_of_a_key_fixes_shape_and_dtype(tmp_path, location, first, kept):
    states = ClientStates(location, torch.zeros(D), tmp_path, {})
    for value in (first.clone().requires_grad_(first.is_floating_point()), first.double() * 2):
        states.store("A", 7, value)
        assert states.recall("A", 7, out := torch.ones_like(first))
        assert torch.equal(out, value.detach().to(first.dtype))
    assert not states.recall("A", 8, out)
    assert not out.any()
    files = states.dump()
    assert [np.load(tmp_path / "client_states" / file).dtype for file in files] == [kept]
    (tmp_path / "other").mkdir()
    resumed, other = (ClientStates(location, torch.zeros(D), tmp_path / name, {}) for name in ("", "other"))
    resumed.restore(files, tmp_path / "client_states")
    shape, wrong = re.escape(str(tuple(first.shape))), re.escape(str((*first.shape, 2)))
    for call, client in product((states.store, states.recall, resumed.store, resumed.recall), (7, 8)):
        with pytest.raises(FederatedError, match=f"'A' of client {client} to have the shape {shape}, .*, got {wrong}:"):
            call("A", client, torch.zeros(*first.shape, 2))
    other.move_in(7, resumed.move_out(7))
    other.recall("A", 7, out)
    assert torch.equal(out, value.to(first.dtype))
    with pytest.raises(FederatedError, match="a key that is an identifier"):
        states.store("../A", 7, first)


class OnGPU(Tensor):
    """A tensor of the CPU that says it is a GPU's."""

    device = torch.device("cuda", 0)


class Queue(TorchFunctionMode):
    """Lets copies that nobody waits for happen as late as a GPU may do them: in their order, when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.pinned: list[Tensor] = []
        self.waits = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if function is torch.empty and options.pop("pin_memory", False):
            self.pinned.append(torch.empty(*args, **options))
            return self.pinned[-1]
        if function is Tensor.pin_memory:
            return args[0] if any(args[0] is known for known in self.pinned) else args[0].clone()
        if function is Tensor.copy_ and options.get("non_blocking") and any(isinstance(a, OnGPU) for a in args):
            self.waiting.append(args)
            return args[0]
        return function(*args, **options)

    def wait(self) -> None:
        self.waits += 1
        for out, value in self.waiting:
            out.copy_(value)
        self.waiting.clear()


def on_gpu(value: float) -> Tensor:
    return torch.full((3,), value).as_subclass(OnGPU)


@pytest.mark.parametrize("location", ["host", "disk"])
def test_the_host_waits_for_a_gpu_only_where_it_reads(tmp_path, monkeypatch, location):
    """A record that is replaced, moved or dropped while copies of it are under way is still what was recalled."""
    outs = [on_gpu(-1.0) for _ in range(5)]
    with Queue() as gpu:
        monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
        states = ClientStates(location, on_gpu(0.0), tmp_path, pinned={})
        states.recall("a", 0, outs[0])
        states.store("a", 0, on_gpu(1.0))
        states.recall("a", 0, outs[1])
        states.store("a", 0, on_gpu(2.0))
        states.recall("a", 0, outs[2])
        states.move_in(0, {"a": torch.full((3,), 3.0)})
        states.recall("a", 0, outs[3])
        states.drop(0)
        states.recall("a", 0, outs[4])
        assert gpu.waits == 0
        assert len(gpu.pinned) == (3 if location == "host" else 0)
        states.store("a", 1, on_gpu(4.0))
        assert states.move_out(1)["a"].tolist() == [4.0] * 3
        states.store("a", 2, on_gpu(5.0))
        [file] = states.dump()
        assert gpu.waits == (2 if location == "host" else 0)
        assert np.load(tmp_path / "client_states" / file).tolist() == [5.0] * 3
        gpu.wait()
    assert [out.tolist() for out in outs] == [[value] * 3 for value in (0.0, 1.0, 2.0, 3.0, 0.0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("location", LOCATIONS)
def test_records_come_back_to_cuda(tmp_path, location):
    value = torch.zeros(1 << 20, device="cuda")
    states, outs = ClientStates(location, value, tmp_path, pinned={}), []
    for number in range(12):  # no call waits for the one before
        states.store("a", number % 2, value.add_(1))
        states.recall("a", number % 2, out := torch.empty_like(value))
        outs.append(out)
    assert [out.unique().tolist() for out in outs] == [[number + 1.0] for number in range(12)]
    files = [np.load(tmp_path / "client_states" / file) for file in states.dump()]
    assert [np.unique(file).tolist() for file in files] == [[11.0], [12.0]]


def other_of(folder: Path) -> Path:
    """The file of another client in the folder of client 1."""
    return next(path for path in sorted(folder.iterdir()) if not path.name.startswith("1-"))


@pytest.mark.parametrize("kind", ["of another client", "of another round", "of another run"])
def test_a_record_that_is_not_the_checkpoints_own_is_refused(tmp_path, short, kind):
    """Whole files at the wrong place: each was read as what the client had kept."""
    shutil.copytree(short, tmp_path / "here", dirs_exist_ok=True)
    folder = tmp_path / "here" / "run" / "version_0" / "client_states" / "Remembers"
    (path,) = folder.glob("1-*.npy")
    if kind == "of another client":
        foreign = other_of(folder)
    else:
        other = {"max_rounds": 3} if kind == "of another round" else {"max_rounds": 2, "local_steps": 3}
        fit(tmp_path / "there", clients_per_round=CLIENTS, **other)
        foreign = max((tmp_path / "there").glob("run/version_0/client_states/Remembers/1-*.npy"))
    path.write_bytes(foreign.read_bytes())
    with pytest.raises(FederatedError, match="does not match its checksum.*`--ckpt_path`"):
        fit(tmp_path / "here", clients_per_round=CLIENTS, ckpt_path="last")


def test_a_record_that_two_processes_have_stored_is_refused(tmp_path):
    own = ClientStates("disk", torch.zeros(D), tmp_path, pinned={})
    own.store("A", 1, torch.ones(D))
    with pytest.raises(FederatedError, match="state 'A' of client 1 .* several have stored it"):
        own.dump(lambda files: [files, ["A/1-1-00000000.npy", "A/2-1-00000000.npy"]])
    assert own.dump(lambda files: [files, ["A/11-1-00000000.npy"]]) == [*own._current(), "A/11-1-00000000.npy"]


def test_what_another_process_holds_is_not_recalled_as_zeros():
    states = ClientStates("device", torch.zeros(D))
    assignment = Assignment(SimpleNamespace(size=2, rank=0), (states,))
    states.elsewhere = assignment.elsewhere
    cohort = SimpleNamespace(clients=(Client(0, 1, 8), Client(1, 1, 8)))
    (own,) = assignment.own(cohort)
    states.store("A", own.id, torch.ones(D))
    assignment.take_note([True, True])
    out = torch.zeros(D)
    states.recall("A", own.id, out)
    assert out.all()
    with pytest.raises(FederatedError, match="another process holds.*`--trainer.devices`"):
        states.recall("A", 1 - own.id, out)
    states.recall("A", 7, out)  # nobody has trained it yet
    assert not out.any()


@pytest.mark.parametrize("client", [-1, 5, True, 1.0, "1", None], ids=repr)
@pytest.mark.parametrize("call", ["store", "recall"])
def test_what_is_no_client_is_refused(client: Any, call: str) -> None:
    """A run could not go on from a checkpoint with such a record."""
    states = ClientStates("device", torch.zeros(3), num_clients=5)
    with pytest.raises(
        FederatedError, match=rf"`client_states\.{call}` of .* a client by its id.* 0 below 5, got 'own' and {client!r}"
    ):
        getattr(states, call)("own", client, torch.zeros(3))
    states.store("own", np.int64(4), torch.ones(3))
    assert states.recall("own", 4, torch.zeros(3))


@pytest.mark.parametrize("key", ["a/b", "", 3, None])
def test_what_is_no_key_is_refused(key: Any) -> None:
    with pytest.raises(FederatedError, match=f"of a key that is an identifier, .*, got {key!r} and 0"):
        ClientStates("device", torch.zeros(3)).store(key, 0, torch.zeros(3))


def test_a_hook_that_stores_for_no_client_ends_the_run_at_once(tmp_path: Path) -> None:
    class Stores(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            trainer.client_states.store("server", CLIENTS, torch.zeros(2))

    with pytest.raises(FederatedError, match=f"from 0 below {CLIENTS}, got 'server' and {CLIENTS}"):
        federated_trainer(tmp_path, Stores()).fit(Classifier(), federated_data(*[4] * CLIENTS))
