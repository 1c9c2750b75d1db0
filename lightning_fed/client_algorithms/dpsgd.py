"""DP-SGD: local steps that hardly depend on any one sample of a client."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import LBFGS

from lightning_fed.callbacks.privacy import Accounted, system_normal
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.client_algorithms.losses import LossAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.seeding import Purpose, seed_for
from lightning_fed.core.updates import Client, Cohort, Need
from lightning_fed.core.user_code import accepts, overrides
from lightning_fed.data.batch_sources import BatchSource, WrappedSource
from lightning_fed.errors import expect, expect_count
from lightning_fed.functional.privacy import most_samples, samples_epsilon, samples_noise

__all__ = ["DPSGD"]


class PoissonBatches(WrappedSource):
    """Draws each sample into each batch by itself, at most M of them, and fills up with samples that do not count.

    Attributes:
        counts: How many of each batch count, its first ones, by client, in the epoch that it began last.
    """

    def __init__(self, source: BatchSource, most: int) -> None:
        super().__init__(source)
        expect(
            accepts(source.batches, "batch_size", 4),
            f"Expected `batches` of {type(source).__name__} to take `batch_size` for DPSGD, which fills them: add it.",
        )
        self.reads_are_seeded, self.plain, self._most = True, source, most
        self.unaugmented = getattr(source, "unaugmented", source)
        self.counts: dict[int, list[int]] = {}

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Yields as many batches as the order has, of min(M, n) samples; with a ``batch_size`` those of the order."""
        if batch_size is None:
            n, stream = int(self.sizes[client]), torch.Generator().manual_seed(seed_for(seed, Purpose.SAMPLE))
            batch_size, drawn = min(self._most, n), list[Tensor]()
            for _ in range(0, len(order), self.batch_size):
                rows = (torch.rand(n, generator=stream) < self.batch_size / n).nonzero()[:, 0]
                drawn.append(rows[torch.randperm(len(rows), generator=stream)[:batch_size]])
            self.counts[client] = [len(rows) for rows in drawn]
            order = torch.cat([pad(rows, (0, batch_size - len(rows))) for rows in drawn]).to(order.device)
        yield from self.read(client, order, seed, batch_size)


class DPSGD(Accounted, ClientAlgorithm):
    """Clips the gradient of each sample and adds noise to their sum, so that no step depends much on one of them.

    g = (Σ_j g_j min(1, C / ‖g_j‖) + N(0, (z C)² I)) / B (Abadi et al., "Deep Learning with Differential Privacy", CCS
    2016, Algorithm 1). Each of a client's n samples is in a batch with probability B / n, where B is that of the data;
    of more than M a random M are kept. If n ≤ B all are, and g is divided by n: with z → 0 and a large C that is plain
    training on all of its data. Logs ``privacy/sample_epsilon``, the largest ε of a client by its n and its steps.

    Args:
        clip: C, above 0.
        noise: z, above 0; or give ``epsilon``.
        epsilon: ε of a client that trains in all ``--trainer.max_rounds`` rounds, for which z is found.
        delta: δ of each client, below one over its samples.
        max_batch: M, at least B; None for B + 5 √B.
        secret: Whether noise comes from the operating system, so that no run is the same again; batches keep the seed.
    """

    stacks = replaces_gradient = takes_sample_gradients = True
    adds_to_gradient = at_nodes = False

    def __init__(
        self, clip: float, noise: float | None = None, epsilon: float | None = None, delta: float = 1e-5,
        max_batch: int | None = None, secret: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(clip, delta, noise, epsilon)
        self.secret = secret
        self.max_batch = expect_count("max_batch", max_batch, of="DPSGD", optional=True)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lets clients draw their batches, finds the noise, and says what all rounds will cost."""
        if stage != "fit":
            return
        options, sizes, batch = trainer.options, trainer.client_sizes.tolist(), trainer.batch_size
        most = self.max_batch or most_samples(batch)
        expect(most >= batch, f"Expected `max_batch` of DPSGD to be at least `--data.batch_size` {batch}, got {most}.")
        steps = {n: options.local_steps or (options.epochs or 0) * -(-n // batch) for n in sizes if n}
        plan = {(n, options.max_rounds * count) for n, count in steps.items()}
        self.bound, self.taken, self.share = self.clip, torch.zeros(len(sizes), dtype=torch.int64), [batch, most]
        self.source = trainer.train_state.source = PoissonBatches(trainer.source, most)
        self.z = self.noise or samples_noise(plan, self.epsilon or 1.0, batch, most, self.delta)
        spent = self._largest(plan)
        self.about = (
            f"{self._noise()}, {batch} samples in a batch on average, {most} at most; "
            f"epsilon up to {spent:.4g} after {options.max_rounds} rounds at delta {self.delta:g}, by the accountant "
            + ("rdp" if self.z < 0.3 else "pld")
        )
        rank_zero_info(f"DPSGD: {self.about}.")

    def check(self, trainer: Any) -> None:
        """Refuses what reads samples of clients beside the noise, and steps of other gradients."""
        super().check(trainer)
        parts, module, options = trainer.callbacks, trainer.lightning_module, trainer.options
        exact = [type(part).__name__ for part in parts if part is not self and _is_exact(part, options.max_rounds)]
        hooks = ("backward", "on_before_backward", "on_after_backward")
        hooked = [f"`{hook}`" for hook in hooks if overrides(module, hook) or trainer.hooks.methods(hook)]
        once = "noise is added once a step"
        for holds, wanted, why in (
            (not exact, f"no {' and no '.join(exact)}", "what it reads of a client's samples gets no noise"),
            (not hooked, f"no {' and no '.join(hooked)}", "each sample has a gradient of its own"),
            (module.automatic_optimization, "automatic optimization", "it makes the gradient of each step"),
            (not options.compile_mode, "`--trainer.compile false`", "steps go through torch.func.vmap"),
            (options.accumulate_grad_batches == 1, "`--trainer.accumulate_grad_batches 1`", once),
            (not isinstance(trainer.optimizers[0], LBFGS), "another `--model.optimizer` than LBFGS", once),
            (self.noise or not trainer.work, "no `--trainer.participation.work`", "`epsilon` has to know all steps"),
        ):
            expect(holds, f"Expected {wanted} with DPSGD, as {why}.")

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        self._steps = Counter[int]()

    def combine(self, trainer: TrainerLike, client: Client, batch_idx: int, gradients: Tensor, out: Tensor) -> None:
        rows, drawn = gradients[: self.source.counts[client.id][batch_idx]], self.scratch("noise", out)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
        torch.mv(rows.T, (self.clip / norms).clamp(max=1.0).to(rows.dtype), out=out)
        if self.secret:
            drawn.copy_(system_normal(drawn.numel()))
        else:
            seed = seed_for(trainer.seed, Purpose.NOISE, client.round, client.id, index=self._steps[client.id])
            drawn.normal_(generator=torch.Generator(out.device).manual_seed(seed))
        out.add_(drawn, alpha=self.z * self.clip).div_(min(trainer.batch_size, client.num_samples))
        self._steps[client.id] += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Counts the steps of the round on all processes."""
        taken = torch.tensor([self._steps[client] for client in range(len(self.taken))], device=trainer.weights.device)
        self.taken += trainer.reduce_sum(taken).to(self.taken)
        trained = set(zip(trainer.client_sizes.tolist(), self.taken.tolist(), strict=True))
        pl_module.log("privacy/sample_epsilon", self._largest(trained))

    def _largest(self, trained: set[tuple[int, int]]) -> float:
        return samples_epsilon(trained, self.z, self.share[0], self.share[1], self.delta)


def _is_exact(part: Any, rounds: int) -> bool:
    """Returns whether a part of the run reads gradients, losses or batches of clients as they are."""
    needs = getattr(part, "all_needs", Need.NOTHING) & (Need.ANY_GRADIENT | Need.ANY_LOSS)
    reads = isinstance(part, LossAlgorithm) or getattr(part, "takes_second_gradient", False)
    asks = getattr(part, "start_gradients", lambda round: "none")
    return bool(needs or reads) or any(asks(round) != "none" for round in range(1, rounds + 1))
