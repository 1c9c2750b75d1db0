"""Federated learning on PyTorch Lightning."""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_fed import cli, core

if TYPE_CHECKING:
    from lightning_fed.core.hooks import FederatedCallback
    from lightning_fed.core.updates import Client, Cohort, Need, ReducedUpdate, Update
    from lightning_fed.errors import FederatedError
    from lightning_fed.lab import testing
    from lightning_fed.lab.notebook import load_client_model, load_runs
    from lightning_fed.trainer import FederatedTrainer, FullGradients, Participation, Tolerance

__all__ = [
    "Client", "Cohort", "FederatedCallback", "FederatedError", "FederatedTrainer", "FullGradients", "Need",
    "Participation", "ReducedUpdate", "Tolerance", "Update", "load_client_model", "load_runs", "testing",
]  # fmt: skip
__version__ = "0.3.0"

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
    "load_client_model": "lab.notebook",
    "load_runs": "lab.notebook",
    "testing": "lab.testing",
}

# The module of each command that is no method of the trainer, and whether it loads Lightning.
_COMMANDS = {
    "data": ("cli.data_command", True),
    "report": ("lab.report_command", False),
    "study": ("lab.runner.command", True),
    "dashboard": ("lab.dashboard_command", False),
    "attack": ("lab.attack.command", True),
    "privacy": ("lab.privacy_command", False),
    "flower": ("cli.flower.command", True),
    "configs": ("cli.configs_command", False),
    "completion": ("cli.completion_command", True),
}


# What rooms need of those above them is registered here, and loaded when it is used.
core.html_of = lambda thing: str(import_module(f"{__name__}.lab.notebook").html(thing))
cli.version = __version__
cli.COMMANDS.update(
    (name, cli.Command(partial(import_module, f"{__name__}.{module}"), needs_lightning))
    for name, (module, needs_lightning) in _COMMANDS.items()
)


def __getattr__(name: str) -> Any:
    """Loads a public name from its module, or a module that is public by itself."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOME[name]}")
    return home if home.__name__.endswith(f".{name}") else getattr(home, name)


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
