"""Makes attributes of the trainer: read from one of its parts or an option, constant, or refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from lightning.pytorch.trainer.states import RunningStage

from lightning_fed.core.train_state import TrainState
from lightning_fed.errors import FederatedError
from lightning_fed.trainer.options import batch_limit, known_length

__all__ = [
    "AbsentNameError", "Refused", "RefusedBut", "batches_of", "derived", "first_of", "fixed", "forwarded", "given_as",
    "in_stage", "of_kind", "option",
]  # fmt: skip


class AbsentNameError(FederatedError, AttributeError):
    """Raised if an attribute of Lightning's trainer has no meaning here; ``hasattr`` returns False."""


def forwarded(path: str, doc: str, settable: bool = False, flag: str = "") -> Any:
    """Makes a property that reads an attribute of a part of the trainer by its path, and sets it if ``settable``.

    Reading it sets the trainer's ``flag``, if one is named.
    """
    part, _, name = path.rpartition(".")
    part_of = attrgetter(part)

    def change(trainer: Any, value: Any) -> None:
        setattr(part_of(trainer), name, value)

    return property(_reader(path, flag), change if settable else None, doc=doc)


def _reader(path: str, flag: str) -> Callable[[Any], Any]:
    read = attrgetter(path)

    def read_and_say(trainer: Any) -> Any:
        setattr(trainer, flag, True)
        return read(trainer)

    return read_and_say if flag else read


def option(name: str, at: str | None = None, flag: str = "", kind: Callable[[Any], Any] | None = None) -> Any:
    """Makes a property that reads an option (from ``at``, as a ``kind``), and sets it, with a check, between calls."""
    group, _, part = name.partition(".")
    read = _reader(at or f"options.{name}", flag)

    def change(trainer: Any, value: Any) -> None:
        new = replace(getattr(trainer.options, group), **{part: value}) if part else value
        trainer.options = replace(trainer.options, **{group: new})

    shown = read if kind is None else lambda trainer: None if (value := read(trainer)) is None else kind(value)
    return property(shown, change, doc=f"The option ``{name}``.")


def fixed(value: Any, doc: str) -> Any:
    """Makes a property with a constant value."""
    shown = f"Always ``{value}``. {doc}" if isinstance(value, (bool, int, float, type(None))) else doc
    return derived(lambda trainer: value, shown)


def derived(read: Callable[[Any], Any], doc: str) -> Any:
    """Makes a property that a function computes from the trainer."""
    return property(read, doc=doc)


def in_stage(stage: RunningStage, doc: str) -> Any:
    """Makes a property that says whether a stage of the trainer runs."""
    return derived(lambda trainer: bool(trainer.state.stage == stage), doc)


def of_kind(kind: type, doc: str) -> Any:
    """Makes a property that lists the callbacks of a class."""
    return derived(lambda trainer: [callback for callback in trainer.callbacks if isinstance(callback, kind)], doc)


def first_of(name: str, doc: str) -> Any:
    """Makes a property with the first item of a list of the trainer's, None if that is empty."""
    return derived(lambda trainer: next(iter(getattr(trainer, name)), None), doc)


def given_as(kind: str, doc: str) -> Any:
    """Makes a property with loaders in the form in which a ``*_dataloader`` method returned them."""

    def given(trainer: Any) -> Any:
        loaders = getattr(trainer, f"{kind}_loaders")
        if list(loaders) in ([], [""]):
            return loaders.get("")
        unnamed = all(name.startswith("dataloader_idx_") for name in loaders)
        return list(loaders.values()) if unnamed else dict(loaders)

    return derived(given, doc)


def batches_of(kind: str, doc: str) -> Any:
    """Makes a property that counts the batches evaluated of each loader."""

    def counted(trainer: Any) -> list[int | float]:
        limit, counts = getattr(trainer, f"limit_{kind}_batches"), []
        for loader in getattr(trainer, f"{kind}_loaders").values():
            most = (batch_limit(limit, length := known_length(loader)), length)
            counts.append(min(math.inf if count is None else count for count in most))
        return counts

    return derived(counted, doc)


class Refused:
    """An attribute that raises an error when read: why it does not exist, and what to read instead.

    As in Lightning, some are None until ``fit`` has set up training.
    """

    def __init__(self, why: str, none_before_training: bool = False) -> None:
        self.why, self.none_before_training = why, none_before_training

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, kind: Any = None) -> Any:
        if trainer is None:
            return self
        if self.none_before_training and not isinstance(trainer.train_state, TrainState):
            return None
        raise AbsentNameError(f"Expected `trainer.{self.name}` not to be read in a federated run, as {self.why}.")


class RefusedBut:
    """A part of Lightning's trainer that mostly does not exist here: reading or setting the rest raises an error.

    ``known`` are the attributes that exist; ``why`` is as for ``Refused``.
    """

    def __init__(self, path: str, why: str, **known: Any) -> None:
        vars(self).update(known, _path=path, _why=why)

    def __getattr__(self, name: str, *_: Any) -> Any:
        path, why = (vars(self).get(own) for own in ("_path", "_why"))  # ``copy`` reads attributes before they are set
        raise AbsentNameError(f"Expected `trainer.{path}.{name}` not to be used in a federated run, as {why}.")

    __setattr__ = __getattr__
