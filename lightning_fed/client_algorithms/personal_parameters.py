"""Parameters that stay with their client: which they are, and the methods that say so."""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import LBFGS

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.errors import FederatedError, expect_count

__all__ = ["FedBN", "FedPer", "FedRep", "LGFedAvg", "PersonalParameters", "personal_parameters"]


class PersonalParameters(ClientAlgorithm):
    """Leaves parameters with their client: w_i = (u_i, v_i), of which the server knows and averages u alone.

    A client trains both parts together, from (u, v_i), and keeps its v_i, shape (p,), until its next round. It begins
    with the initial v, which the global model keeps: nothing of v_i is sent, averaged, voted on or counted as bytes.
    The options below add up. A parameter that several layers share is personal if one of them names it.

    Args:
        names: Patterns of parameter names, such as ``head.*``; ``head`` means all below it.
        modules: Patterns of class names, such as ``BatchNorm*``: all parameters of modules of such a class or of one
            derived from it.
        first: The first so many layers that hold trainable parameters themselves, in the order in which the module
            registers them.
        last: The last so many. 0 leaves nothing with clients, which is FedAvg, bit for bit.

    Attributes:
        head: Local epochs or steps that train v_i alone before the others train u_i alone, and the unit that they are
            counted in; None where both are trained together.
    """

    stacks = True
    adds_to_gradient = False
    has_own_model = True

    def __init__(
        self,
        names: list[str] | None = None,
        modules: list[str] | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> None:
        name = type(self).__name__
        for option, patterns in {"names": names, "modules": modules}.items():
            if patterns is not None and (isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns)):
                raise FederatedError(f"Expected `--client.{option}` of {name} to be a list of names, got {patterns!r}.")
        for option, count in {"first": first, "last": last}.items():
            if count is not None:
                expect_count(f"--client.{option}", count, least=0, of=name)
        if all(given is None for given in (names, modules, first, last)) and type(self) is PersonalParameters:
            raise FederatedError(
                "Expected `--client.names`, `--client.modules`, `--client.first` or `--client.last` of "
                "PersonalParameters, which say what stays with a client, got none of them."
            )
        self.names, self.modules, self.first, self.last = names or [], modules or [], first or 0, last or 0
        self.head: tuple[Literal["epochs", "steps"], int] | None = None

    def choose(self, module: nn.Module) -> frozenset[str]:
        """Returns the names of the trainable parameters that stay with their client, as ``named_parameters`` has them.

        Raises:
            FederatedError: If an option finds no trainable parameter, or all together find every one.
        """
        known = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        found: set[int] = set()
        for what, held in self._find(module, frozenset(known)):
            if not held:
                raise FederatedError(
                    f"Expected trainable parameters {what} of {type(self).__name__}, but the trained layers of "
                    f"{type(module).__name__} are {_in_words(module, frozenset(known))}: change `--client` or "
                    "`--model`."
                )
            found |= held
        if known and len(found) == len(known):
            raise FederatedError(
                f"Expected {type(self).__name__} to leave parameters of {type(module).__name__} to the server, but all "
                f"{len(known)} would stay with their clients: choose fewer, or take LocalOnly, which trains without a "
                "server."
            )
        return frozenset(known[key] for key in found)

    def _find(self, module: nn.Module, known: frozenset[int]) -> Iterator[tuple[str, set[int]]]:
        """Yields what an option is, in words, and which of the ``known`` parameters it finds, by their ``id``."""
        places = [(name, id(p)) for name, p in module.named_parameters(remove_duplicate=False) if id(p) in known]
        for pattern in self.names:
            held = {key for name, key in places if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
            yield f"for the pattern `{pattern}` in `--client.names`", held
        for pattern in self.modules:
            parts = [part for part in module.modules() if _is_kind(part, pattern)]
            yield f"for the pattern `{pattern}` in `--client.modules`", _held_by(parts, known)
        layers = _layers(module, known)
        for option, some in {"first": layers[: self.first], "last": layers[max(0, len(layers) - self.last) :]}.items():
            if some:
                yield f"for `--client.{option}`", set().union(*some)

    def load_own(self, trainer: TrainerLike, client: int) -> None:
        """Writes a client's personal parameters to the live weights; one that has none yet has the initial ones."""
        state: Any = trainer
        state.train_state.load_own(client)


class FedBN(PersonalParameters):
    """Leaves all parameters of normalisation layers with their client: batch, group, layer, instance and RMS norm.

    Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR
    2021, algorithm 1. Layers are found by their class, whatever their names. The statistics of batch normalisation
    stay with the client too: ``aggregator.buffers`` is set to ``local``. With averaged parameters and local buffers it
    would be SiloBN (Andreux et al., 2020).
    """

    def __init__(self) -> None:
        super().__init__()
        self.needs_local_buffers = False

    def _find(self, module: nn.Module, known: frozenset[int]) -> Iterator[tuple[str, set[int]]]:
        parts = [part for part in module.modules() if isinstance(part, _NORMS)]
        self.needs_local_buffers = any(getattr(part, "running_mean", None) is not None for part in parts)
        yield "in the normalisation layers", _held_by(parts, known)


class FedPer(PersonalParameters):
    """Leaves the last layers, the personalisation layers, with their client.

    Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019, arXiv:1912.00818,
    algorithms 1 and 2. ``last = 0`` is FedAvg, bit for bit.

    Args:
        last: How many layers, K_P; see ``PersonalParameters``.
    """

    def __init__(self, last: int = 1) -> None:
        super().__init__(last=last)


class LGFedAvg(PersonalParameters):
    """Leaves the representation with its client and averages the last layers: FedPer the other way around.

    Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning
    with Local and Global Representations", 2020, arXiv:2001.01523, algorithm 1, without its adversarial term.

    Args:
        last: How many layers the server averages.
    """

    def __init__(self, last: int = 1) -> None:
        super().__init__()
        self.last = expect_count("--client.last", last, of="LGFedAvg")

    def _find(self, module: nn.Module, known: frozenset[int]) -> Iterator[tuple[str, set[int]]]:
        layers = _layers(module, known)
        yield "for `--client.last`", set().union(*layers[: max(0, len(layers) - self.last)])


class FedRep(PersonalParameters):
    """Leaves the last layers, the head, with their client, which trains it first and then the body alone.

    Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
    ICML 2021, algorithm 1. The part that is held has no gradient: the optimizer skips it as it does frozen parameters,
    so that neither momentum nor weight decay moves it, and each part's optimizer state begins with its own first step.
    Clipping sees the part that is trained.

    Args:
        last: How many layers are the head; see ``PersonalParameters``.
        head_epochs: Of the trainer's local epochs, 2 by default, those that train the head, τ: all but the last.
        head_steps: The same where the trainer counts local steps. In a ``fast_dev_run`` of one step it trains both.
    """

    def __init__(self, last: int = 1, head_epochs: int | None = None, head_steps: int | None = None) -> None:
        for option, count in {"last": last, "head_epochs": head_epochs, "head_steps": head_steps}.items():
            if count is not None:
                expect_count(f"--client.{option}", count, of="FedRep")
        super().__init__(last=last)
        self.head_epochs, self.head_steps = head_epochs, head_steps

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Sets the local epochs if nobody has: those of the head, and one for the body."""
        if stage == "fit" and not (trainer.options.local_epochs or trainer.local_steps or self.head_steps):
            trainer.local_epochs = (self.head_epochs or 1) + 1
            rank_zero_info(f"FedRep sets `--trainer.local_epochs {trainer.local_epochs}`: the last trains the body.")

    def check(self, trainer: TrainerLike) -> None:
        """Refuses what leaves no step to one of the parts, or cannot hold one of them still."""
        super().check(trainer)
        by_steps = trainer.local_steps is not None
        asked = (trainer.local_steps if by_steps else trainer.local_epochs) or 1
        total = int(asked)
        unit: Literal["steps", "epochs"] = "steps" if by_steps else "epochs"
        given, other = (self.head_steps, self.head_epochs) if by_steps else (self.head_epochs, self.head_steps)
        if trial := bool(getattr(trainer, "fast_dev_run", False)):  # of few steps, whatever the options ask for
            given = other = None
        count = total - 1 if given is None else given
        if other is not None:
            raise FederatedError(
                f"Expected `--client.head_{unit}` of FedRep beside `--trainer.local_{unit}`, got "
                f"`--client.head_{'epochs' if by_steps else 'steps'}`: both are counted in {unit}."
            )
        if not trial and (asked != total or not 1 <= count < total):
            raise FederatedError(
                f"Expected `--trainer.local_{unit}` to leave FedRep whole ones for the head and for the body, got "
                f"{asked}, of which {count} for the head: raise it, or change `--client.head_{unit}`."
            )
        stragglers: Any = getattr(trainer, "stragglers", None)
        if trainer.work is not None or (stragglers is not None and stragglers.late == "partial"):
            got, option = (
                ("Stragglers", "stragglers.late") if trainer.work is None else (type(trainer.work).__name__, "work")
            )
            raise FederatedError(
                f"Expected FedRep with the same work for all clients, as one that ends early would not train the body, "
                f"got {got}: leave out `--trainer.participation.{option}`."
            )
        optimizer, module = trainer.optimizers[0], getattr(trainer, "lightning_module", None)
        if isinstance(optimizer, LBFGS) or not getattr(module, "automatic_optimization", True):
            got = "LBFGS" if isinstance(optimizer, LBFGS) else "a module that steps by itself"
            raise FederatedError(
                f"Expected an optimizer for FedRep that skips parameters without a gradient, got {got}: change "
                "`--model.optimizer`, or use FedPer."
            )
        self.head = (unit, count) if count else None


_NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    *([nn.RMSNorm] if hasattr(nn, "RMSNorm") else []),
)


def personal_parameters(callbacks: Sequence[Callback], module: nn.Module) -> frozenset[str]:
    """Returns the names of a module's parameters that stay with their client; one method at most says which."""
    methods = [callback for callback in callbacks if isinstance(callback, PersonalParameters)]
    return methods[0].choose(module) if methods else frozenset()


def _layers(module: nn.Module, known: frozenset[int]) -> list[set[int]]:
    """Returns the parameters of each module that holds some of its own, in order; tied ones belong to each."""
    held = ({id(p) for p in part.parameters(recurse=False)} & known for part in module.modules())
    return [some for some in held if some]


def _in_words(module: nn.Module, known: frozenset[int]) -> str:
    """Names the layers and their classes, for messages; of many the first three and the last three."""
    words = [
        f"`{name or 'self'}` ({type(part).__name__})"
        for name, part in module.named_modules()
        if any(id(p) in known for p in part.parameters(recurse=False))
    ]
    return ", ".join(words if len(words) < 8 else [*words[:3], "...", *words[-3:]])


def _held_by(parts: Iterable[nn.Module], known: frozenset[int]) -> set[int]:
    return {id(p) for part in parts for p in part.parameters() if id(p) in known}


def _is_kind(part: nn.Module, pattern: str) -> bool:
    """Says whether a module's class, or one that it is derived from, has such a name; torch's bases begin with _."""
    return any(fnmatchcase(kind.__name__.lstrip("_"), pattern) for kind in type(part).__mro__)
