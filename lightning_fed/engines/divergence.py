"""Which clients of a round ended with NaN, infinity or an exception, and when that ends the run."""

import math
from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client
from lightning_fed.distributed.processes import Processes
from lightning_fed.errors import Diverged, FederatedError

__all__ = ["DivergenceWatch"]


class DivergenceWatch:
    """Finds clients that diverged, and ends the run if more of a cohort have than ``max_diverged`` allows.

    On the CPU each client is checked as it ends. On a device a check waits for all work queued there. So if no client
    may be left out, all are checked together at the end of the round, before anything uses the round's sums.

    Args:
        state: What ``fit`` works on; its recorder holds the client's loss and what it logged.
        options: ``max_diverged`` says how many may be left out.
        processes: Those that share the run.

    Attributes:
        clients: Ids of those left out in this round.
        failed: The exceptions raised in the training of some of them, by id.
        buffers: Names of the buffers that are checked: the floating-point ones.
        reports: Whether another process, the server of a fleet, judges how many are too many.
    """

    def __init__(self, state: TrainState, options: LocalOptions, processes: Processes) -> None:
        self.state, self.options, self.processes, self.recorder = state, options, processes, state.recorder
        self.clients: list[int] = []
        self.failed: dict[int, str] = {}
        self._cohort_size = 0
        self.reports = False
        self._reads_at_once = state.weights.device.type == "cpu" or bool(options.tolerance.max_diverged)
        self._unread: list[tuple[tuple[Client, ...], Tensor]] = []
        self.buffers: list[str] = []
        self._finite_buffers = state.weights.new_empty(0)

    def start_round(self, cohort_size: int) -> None:
        """Begins a round with this many clients."""
        self.clients, self.failed, self._cohort_size, self._unread = [], {}, cohort_size, []
        values = self.state.buffers.values
        self.buffers = [name for name, value in values.items() if value.is_floating_point()]
        if self.buffers:
            self._finite_buffers = torch.stack(torch._foreach_norm([values[name] for name in self.buffers])).isfinite()

    def found(self, client: Client, *vectors: Tensor) -> bool:
        """Returns whether a client's vectors, mean loss or live buffers hold NaN or infinity; if so, leaves it out."""
        size: Tensor = torch.linalg.vector_norm(vectors[0])
        for other in vectors[1:]:
            size = size + torch.linalg.vector_norm(other)
        loss = self.recorder.peek("train/loss")
        if loss is not None:  # a Python float may be too large for the tensors' dtype
            size = size + (loss if isinstance(loss, Tensor) else loss - loss)
        if self.buffers:
            live = self.state.buffers.live.tensors()
            size = size + self.buffer_sizes(torch._foreach_norm([live[name] for name in self.buffers]))
        if all(self.finite((client,), size.reshape(1))):
            return False
        self.leave_out(client)
        self.recorder.roll_back()
        return True

    def buffer_sizes(self, norms: Sequence[Tensor]) -> Tensor:
        """Adds up the norms of ``buffers``, but for those whose norm was not finite before the round.

        A buffer that holds infinity by design, such as an attention mask, says nothing about divergence.

        Args:
            norms: One tensor for each, all of one shape.
        """
        return torch.where(self._finite_buffers, torch.stack(list(norms), dim=-1), 0.0).sum(-1)

    def finite(self, clients: tuple[Client, ...], sizes: Tensor) -> list[bool]:
        """Returns for each client whether its size, shape (n,), is finite; all True if the check waits for ``read``."""
        if self._reads_at_once or self.reports:
            return [math.isfinite(size) for size in sizes.tolist()]
        self._unread.append((clients, sizes))
        return [True] * len(clients)

    def read(self) -> None:
        """Checks the sizes that were not checked yet, and leaves out clients whose size is not finite."""
        unread, self._unread = self._unread, []
        sizes = iter(torch.cat([sizes for _, sizes in unread]).tolist() if unread else ())
        for clients, _ in unread:
            diverged = [client for client, size in zip(clients, sizes, strict=False) if not math.isfinite(size)]
            for client in sorted(diverged, key=lambda client: client.id):
                if client.id not in self.clients:
                    self.leave_out(client)

    def leave_out(self, client: Client, error: Exception | None = None) -> None:
        """Counts a client that diverged, or whose training raised an exception, which ends the run if one too many."""
        self.clients.append(client.id)
        if error is not None:
            self.failed[client.id] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if self.processes.size == 1 and len(self.clients) > self._allowed:
                raise error
        if self.processes.size == 1:  # several count together, at the round's end
            self._judge(client.id)

    def settle(self, clients: list[int], failed: dict[int, str]) -> None:
        """Sets the clients that all processes together left out, in ascending order of id."""
        self.clients, self.failed = clients, failed
        self._judge(*clients)

    @property
    def _allowed(self) -> int:
        return self._cohort_size if self.reports else int(self.options.tolerance.max_diverged * self._cohort_size)

    def _judge(self, *new: int) -> None:
        if len(self.clients) > self._allowed:
            one = self.clients[self._allowed]
            name = self.state.called(one)
            if one in self.failed:
                raise FederatedError(
                    f"Expected at most {self._allowed} clients of a round to fail, but client {name} failed too in "
                    f"round {self.state.round} ({self.failed[one]}): correct the module or the client's data, or raise "
                    "`--trainer.tolerance.max_diverged`."
                )
            raise Diverged(
                f"Expected finite losses and updates, but client {name} diverged in round {self.state.round}: lower "
                "the learning rate in the model's optimizer, set `--trainer.gradient_clip_val`, check its data, or let "
                "`--trainer.tolerance.max_diverged` leave out such clients."
            )
        for client in new:
            failed = f" ({self.failed[client]})" if client in self.failed else ""
            what = "failed" if failed else "diverged"
            rank_zero_warn(
                f"Client {self.state.called(client)} {what} in round {self.state.round} and is left out of it{failed}."
            )
