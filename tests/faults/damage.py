"""Files of a run damaged in many ways: it then goes on right, or says in a sentence why it does not."""

import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_fed.errors import FederatedError
from lightning_fed.runs.checkpoint_files import seal_of
from tests.faults.counts import Counts, Outcome
from tests.faults.tiny import beside_a_whole_run, fit, is_sentence, same, versions

TRIALS = 300
TRAINED = 2

WRONG: tuple[Any, ...] = (None, "x", -3, 2.5, [], {}, ["../../../x"], {"a": None}, torch.zeros(3), True, [[1]])
NAMES = (
    "../../../secret.npy",
    "/etc/hostname",
    "SCAFFOLD/../../../0-1.npy",
    "SCAFFOLD/0-1.npy/..",
    "",
    "SCAFFOLD/0-x.npy",
)


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


def become_a_folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def become_noise(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.randrange(400)))


def lose_a_block(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content))
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    path.write_bytes(content)


def become_a_device(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def become_endless(path: Path, chance: random.Random) -> None:
    """A link to a file that has a terabyte and takes no space."""
    path.unlink()
    large = path.with_name(f"{path.name}.large")
    with open(large, "wb") as file:
        file.truncate(1 << 40)
    path.symlink_to(large.name)


def become_a_pipe(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def half_a_line(path: Path, chance: random.Random) -> None:
    """Leaves what a full disk leaves of a last line, of which nothing more is known."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + lines[-1][: chance.randrange(len(lines[-1]))])


def lose_a_line(path: Path, chance: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    path.write_bytes(b"".join(lines))


def exchange(path: Path, chance: random.Random) -> None:
    """Puts the whole file of another client or round at its place."""
    path.write_bytes(chance.choice(sorted(path.parent.iterdir())).read_bytes())


def places_in(value: Any, most: int = 4) -> list[list[Any]]:
    """The keys that lead to each part of a checkpoint."""
    if not isinstance(value, dict) or not most:
        return []
    return [[key, *rest] for key in value for rest in ([], *places_in(value[key], most - 1))]


def rewrite(path: Path, chance: random.Random) -> None:
    """Leaves a part of a checkpoint out, or replaces it by something of another type."""
    checkpoint = torch.load(path, weights_only=True)
    *parents, key = chance.choice(places_in(checkpoint))
    part = checkpoint
    for parent in parents:
        part = part[parent]
    if chance.random() < 0.4:
        del part[key]
    else:
        part[key] = chance.choice(WRONG)
    torch.save(checkpoint, path)


def rename_records(path: Path, chance: random.Random) -> None:
    """Lets a checkpoint name files that are none of its run's."""
    checkpoint = torch.load(path, weights_only=True)
    files = checkpoint["federated"]["client_states"]
    files[chance.randrange(len(files))] = chance.choice(NAMES)
    checkpoint["federated"]["seal"] = seal_of(checkpoint)  # as somebody would who forges it
    torch.save(checkpoint, path)


ANY = (
    flip, flip, cut, delete, become_a_folder, become_a_device, become_a_pipe, become_endless, become_noise,
    lose_a_block,
)  # fmt: skip
# What is harmed, and in which ways.
TARGETS: dict[str, tuple[Callable[[Path, random.Random], None], ...]] = {
    "checkpoints/last.ckpt": (*ANY, rewrite, rewrite, rewrite, rename_records),
    "checkpoints/best.ckpt": (*ANY, rewrite),
    "metrics.csv": (*ANY, lose_a_line, half_a_line),
    "run.json": (*ANY, lose_a_line),
    "client_states/SCAFFOLD/*.npy": (*ANY, exchange, exchange, exchange),
}


def trial(folder: Path, made: Path, whole: Path, chance: random.Random) -> tuple[Outcome, str]:
    """Damages one or two files of a copy of a run and goes on with it; returns the outcome and what was done."""
    shutil.copytree(made, folder)
    run, done = versions(folder)[0], []
    for target in chance.sample(list(TARGETS), chance.choice((1, 1, 1, 2))):  # what is damaged cannot be rewritten
        path = chance.choice(sorted(run.glob(target)) or [run / target])
        if path.is_file() and path.stat().st_size:
            harm = chance.choice(TARGETS[target])
            harm(path, chance)
            done.append(f"{harm.__name__} {path.relative_to(run)}")
    last = str(run / "checkpoints" / "last.ckpt")
    ckpt_path = chance.choice(("last", "last", "last", "best", last))
    said = f"{' and '.join(done)}, --ckpt_path {'PATH' if ckpt_path == last else ckpt_path}"
    outside = sorted(folder.parent.iterdir())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = fit(folder, ckpt_path=ckpt_path)
    except FederatedError as error:
        return ("right" if is_sentence(error) else "traceback"), f"{said}: {error}"
    except Exception as error:
        return "traceback", f"{said}: {type(error).__name__}: {error}"
    assert trainer.run is not None
    if sorted(folder.parent.iterdir()) != outside:
        return "wrong success", f"{said}: files outside of the run"
    if not trainer.resumed:
        return "lost", said
    if trainer.run.path != run and not same_weights(trainer.run.path, whole):
        return "wrong success", said
    return ("right" if trainer.run.path != run or same(trainer.run.path, whole) else "wrong success"), said


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs have come to the same weights: one in a new folder may have left damaged rows behind."""
    a, b = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (one, other))
    return all(torch.equal(a[name], b[name]) for name in b)


def run(trials: int, seed: int) -> Counts:
    """Runs the campaign."""
    counts = Counts()
    with beside_a_whole_run(TRAINED) as (root, whole):
        for number in range(trials):
            chance = random.Random(f"{seed} {number}")
            (root / f"{number}").mkdir()
            outcome, said = trial(root / f"{number}" / "runs", root / "made", whole, chance)
            counts.note(outcome, f"seed {seed}, trial {number}: {said}")
            shutil.rmtree(root / f"{number}")
    return counts
