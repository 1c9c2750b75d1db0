"""Clients whose updates arrive late: FedBuff and FedAsync."""

from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.aggregators import Aggregator
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.client_algorithms.losses import LossAlgorithm
from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import Client, Cohort, Need, Update
from lightning_fed.errors import expect, expect_choice, expect_number
from lightning_fed.sampling import Arrivals

__all__ = ["Stale"]


class Stale(ClientAlgorithm):
    """Lets a client start from the model of τ steps of the server ago, and scales its update by (1 + τ)^(-a).

    FedBuff (Nguyen et al., AISTATS 2022): ``clients_per_round`` is the buffer. FedAsync (Xie, Koyejo, Gupta, 2019,
    arXiv:1903.03934): one client per round, ``measure_from`` ``global`` and ``aggregator.lr`` α, so that
    w <- (1 - α_τ) w + α_τ w_i, α_τ = α (1 + τ)^(-a). The sampler ``Arrivals`` says who is how late. The models from
    which clients still train are kept, at most max τ + 1 of them. Without staleness it is FedAvg, bit for bit.

    Args:
        exponent: a, at least 0; 0 does not scale.
        measure_from: Whether the update is measured from the client's ``start``, or from the ``global`` model.
    """

    stacks = True
    displaces = True
    adds_to_gradient = False

    def __init__(self, exponent: float = 0.5, measure_from: Literal["start", "global"] = "start") -> None:
        self.exponent = expect_number("--client.exponent", exponent, least=0, of="Stale")
        self.measure_from = expect_choice("--client.measure_from", measure_from, ("start", "global"), of="Stale")

    def check(self, trainer: Any) -> None:
        """Refuses what a client would get of the round's model, and not of the one that it starts from."""
        super().check(trainer)
        option, parts = "--trainer.participation", trainer.options.participation
        averages = trainer.buffers.policy == "average" and trainer.buffers.num_bytes
        fresh = [type(part).__name__ for part in trainer.callbacks if _gets_more(part)]
        for holds, wanted, why in (
            (isinstance(trainer.sampler, Arrivals), f"`{option}.sampler Arrivals`", "it says who is late"),
            (not parts.stragglers, f"no `{option}.stragglers`", "Arrivals has the clock"),
            (not averages, "`--aggregator.buffers local` or keep", "older buffers are not kept"),
            (not fresh, f"no {' and no '.join(fresh)}", "late clients have an older model and nothing else"),
        ):
            expect(holds, f"Expected {wanted} with Stale, as {why}.")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.versions, self._began, self._later = dict[int, Tensor](), dict[int, int](), set[int]()

    def on_round_start(self, trainer: Any, pl_module: LightningModule, cohort: Cohort) -> None:
        """Keeps w, forgets the models from which nobody trains any more, and logs ``stale/mean`` and ``stale/max``."""
        newest, live, count = cohort.round - 1, trainer.vector.data, len(cohort.clients) + len(cohort.skipped)
        given, rounds = (count, trainer.client_sizes, trainer.seed), [at for at in (newest, cohort.round) if at]
        plan = [trainer.sampler.arrived(at, *given) for at in rounds]
        expect(
            self._began == (plan[0][0] if newest else {}),
            "Expected the arrivals of the run that is resumed, got others: give the same "
            "`--trainer.participation.sampler`, `--trainer.clients_per_round` and seed.",
        )
        self._began, self._later, _ = plan[-1]
        needed = {*self._began.values(), *self._later} - {newest}
        self.versions = {version: self.versions[version].to(live) for version in sorted(needed)}
        self.versions[newest] = trainer.weights.to(live.dtype, copy=True)
        late = [newest - version for version in self._began.values()]
        pl_module.log_dict({"stale/mean": sum(late) / len(late), "stale/max": float(max(late))})

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        if self._began[client.id] < client.round - 1:
            trainer.origin = self.versions[self._began[client.id]]
            trainer.vector.data.copy_(trainer.origin)

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        newest, began = update.client.round - 1, self._began[update.client.id]
        if self.measure_from == "global" and began < newest:
            update.delta.add_(self.versions[began]).sub_(self.versions[newest])
        update.delta.mul_((1 + newest - began) ** -self.exponent)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self._began, "versions": {at: self.versions[at] for at in sorted(self._later)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._began, self.versions = state_dict["began"], dict(state_dict["versions"])
        self._later = set(self.versions)


def _gets_more(part: Any) -> bool:
    """Returns whether a rule or an algorithm has clients get, or use, more of the round's start than the model."""
    needs = getattr(part, "all_needs", Need.NOTHING) & (Need.ANY_GRADIENT | Need.ANY_LOSS)
    reads = getattr(type(part), "term", LossAlgorithm.term) is not LossAlgorithm.term  # they see the model of the round
    asks = isinstance(part, ClientAlgorithm) and part.start_gradients(1) != "none"
    moves = isinstance(part, Aggregator) and type(part).on_client_start is not FederatedCallback.on_client_start
    return bool(needs or reads or asks or moves or getattr(part, "vectors_down", 0))
