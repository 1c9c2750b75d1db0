"""The command line: ``lightning-fed``, ``python -m lightning_fed`` and ``python cli.py`` are the same program.

Only what answers without Lightning is loaded here, as the root of the package registers commands at every import.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lightning_fed.cli.federated_cli import FederatedCLI

__all__ = ["COMMANDS", "OF_TRAINER", "Command", "FederatedCLI", "main", "version"]


class Command(NamedTuple):
    """A command beside those that are methods of the trainer.

    Attributes:
        load: Imports its module, which has ``main(words)`` and ``make_parser()``.
        needs_lightning: Whether its module imports Lightning, which reads the environment when it is imported.
    """

    load: Callable[[], Any]
    needs_lightning: bool


COMMANDS: dict[str, Command] = {}
"""The commands by name, in the order in which they are listed; the root of the package fills it."""

version = ""
"""What ``--version`` prints; the root of the package knows it too."""

OF_TRAINER = {
    "fit": "Trains the model over clients.",
    "validate": "Evaluates a model on the validation sets.",
    "test": "Evaluates a model on the test sets.",
    "predict": "Runs ``predict_step`` over the prediction set, or over the test sets of data without one.",
}
"""The commands that are methods of the trainer, with what ``--help`` says of each."""


def __getattr__(name: str) -> Any:
    """Loads ``FederatedCLI`` when it is asked for."""
    if name == "FederatedCLI":
        from lightning_fed.cli.federated_cli import FederatedCLI

        return FederatedCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


from lightning_fed.cli.main import main  # noqa: E402  # it reads what is above
