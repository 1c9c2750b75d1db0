"""Makes attributes of the trainer: read from one of its parts or an option, constant, or refused."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from lightning_fed.core.train_state import TrainState
from lightning_fed.errors import FederatedError

__all__ = ["AbsentNameError", "Refused", "RefusedBut", "derived", "fixed", "forwarded", "option"]


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
