"""The command line: ``lightning-fed``, ``python -m lightning_fed`` and ``python cli.py`` are the same program.

``FederatedCLI`` is loaded on first use, so that commands without a trainer do not wait for every part of the package.
"""

from typing import TYPE_CHECKING, Any

from lightning_fed.cli.main import main

if TYPE_CHECKING:
    from lightning_fed.cli.federated_cli import FederatedCLI

__all__ = ["FederatedCLI", "main"]


def __getattr__(name: str) -> Any:
    """Loads ``FederatedCLI`` when it is asked for."""
    if name == "FederatedCLI":
        from lightning_fed.cli.federated_cli import FederatedCLI

        return FederatedCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
