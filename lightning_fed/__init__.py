"""Federated learning on PyTorch Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fed.core.hooks import FederatedCallback
    from lightning_fed.core.updates import Client, Cohort, Need, ReducedUpdate, Update
    from lightning_fed.errors import FederatedError
    from lightning_fed.lab.notebook import load_runs
    from lightning_fed.trainer import FederatedTrainer, FullGradients, Participation, Tolerance

__all__ = [
    "Client",
    "Cohort",
    "FederatedCallback",
    "FederatedError",
    "FederatedTrainer",
    "FullGradients",
    "Need",
    "Participation",
    "ReducedUpdate",
    "Tolerance",
    "Update",
    "load_runs",
]
__version__ = "0.2.0"

# Loaded on first use: commands that need no trainer, such as `lightning-fed report`, start without Lightning.
_HOME = {
    "Client": "core.updates",
    "Cohort": "core.updates",
    "FederatedCallback": "core.hooks",
    "FederatedError": "errors",
    "FederatedTrainer": "trainer",
    "FullGradients": "trainer",
    "Need": "core.updates",
    "Participation": "trainer",
    "ReducedUpdate": "core.updates",
    "Tolerance": "trainer",
    "Update": "core.updates",
    "load_runs": "lab.notebook",
}


def __getattr__(name: str) -> Any:
    """Loads a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
