"""The processes that share a run: what they tell each other, and how all of them end when one fails."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_fed.distributed.connections import Pipes, open_pipes
from lightning_fed.errors import FederatedError

if TYPE_CHECKING:
    from lightning_fed.distributed.strategy import ClientsStrategy

__all__ = ["LostProcess", "PeerFailure", "Processes"]

_T = TypeVar("_T")
_PACKET = 1 << 14
# Up to so many bytes are added by one process for all; beyond, gloo lets each add a part.
_SMALL = 1 << 22


class PeerFailure(FederatedError):
    """Another process failed and has said why; the message is its own."""


class LostProcess(FederatedError):
    """Another process has ended without a word."""


class Processes:
    """The processes of one run; alone, everything here returns what it is given and costs nothing.

    Every call but ``broadcast`` and ``apart`` is made by all processes, in the same order. Each begins with an exchange
    of a few bytes over sockets of the host, in which a process that has failed says so instead: all then raise its
    sentence, where a reduction would wait for it for ever. A process that died closes its sockets, which ends the
    others' exchange too.

    Args:
        strategy: The strategy that holds the processes together, None for one process.
    """

    def __init__(self, strategy: ClientsStrategy | None = None) -> None:
        self._strategy = strategy
        self._are_apart = False
        self._pipes: Pipes | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        """Returns itself: metric objects of a module refer to it, and modules are copied."""
        return self

    @property
    def rank(self) -> int:
        """Index of this process over all nodes."""
        return 0 if self._strategy is None else self._strategy.global_rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self._strategy is None else self._strategy.world_size

    def connect(self, timeout_s: float) -> None:
        """Opens direct connections if all processes are of one machine; elsewhere gloo carries everything.

        Args:
            timeout_s: How long a process waits for another one that lives.
        """
        if self.size > 1:
            self._pipes = open_pipes(self.rank, self.size, timeout_s, self._gather)

    def are_together(self) -> bool:
        """Whether there are several, and all do the same now."""
        return self.size > 1 and not self._are_apart

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Lets each process do its own work within the block; nothing can be exchanged there."""
        self._are_apart = self.size > 1
        try:
            yield
        finally:
            self._are_apart = False

    def exchange(self, value: _T, what: str = "") -> list[_T]:
        """Gives every process what each one says.

        Args:
            value: What this one says; it is pickled, tensors should be on the CPU.
            what: What it is about; processes that say it of different things have lost step.

        Returns:
            What each process says, in the order of ranks.

        Raises:
            FederatedError: If a process has failed or died, has lost step, or works for itself now.
        """
        if self.size == 1:
            return [value]
        if self._are_apart:
            raise FederatedError(
                "Expected processes to exchange something only in hooks that are called once in a round, got a call "
                "while each process works for itself: move it out of the hooks of clients, steps and batches, or set "
                "`--trainer.devices 1`."
            )
        everyone = self._gather((what, None, value))
        for _, failure, _ in everyone:
            if failure is not None:
                error = PeerFailure(failure)
                error.is_told = self.rank > 0
                raise error
        if len({about for about, _, _ in everyone}) > 1:
            raise FederatedError(
                f"Expected all processes to do the same between training clients, but they differ: "
                f"{', '.join(about or 'something else' for about, _, _ in everyone)}: a hook must not depend on the "
                "rank; or set `--trainer.devices 1`."
            )
        return [said for _, _, said in everyone]

    def from_first(self, function: Callable[[], _T], what: str = "") -> _T:
        """Calls a function on the first process alone, and returns on all what it returned there.

        Args:
            function: Called where files are written and read for all; what it raises ends all processes.
            what: See ``exchange``.
        """
        return self.exchange(function() if self.rank == 0 else None, what)[0]  # type: ignore[return-value]  # the first's

    def sum(self, *tensors: Tensor, what: str | None = "sum") -> None:
        """Adds tensors over the processes, in place, in one reduction; all get the same bits.

        Args:
            *tensors: Tensors of one dtype and device, alike on all processes.
            what: See ``exchange``; None where an exchange has come just before, and none is needed.
        """
        self._reduce(tensors, dist.ReduceOp.SUM, what)

    def max(self, *tensors: Tensor, what: str | None = "max") -> None:
        """Takes the maximum of each element over the processes, as ``sum`` adds them."""
        self._reduce(tensors, dist.ReduceOp.MAX, what)

    def broadcast(self, *tensors: Tensor, source: int = 0) -> None:
        """Copies tensors of one process to the others, in place; it begins with no exchange of its own."""
        if self.size > 1:
            with _noticing(self._strategy):
                for tensor in tensors:
                    dist.broadcast(tensor, source)

    def gather_tensor(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Returns a tensor of each process, of any shape, as torchmetrics asks for it.

        Of a metric that has seen nothing it gives an empty one, which may be of another dtype.
        """
        everyone = self.exchange(tensor.detach().cpu(), "metric")
        like = next((other for other in everyone if other.numel()), tensor)
        return [(other if other.numel() else like[:0]).to(tensor.device) for other in everyone]

    def tell(self, error: BaseException) -> None:
        """Lets the others know that this process cannot go on, so that all end with one sentence."""
        if self.size == 1 or isinstance(error, (PeerFailure, LostProcess)) or not dist.is_initialized():
            return
        self._are_apart = False
        if not isinstance(error, Exception):  # a second Ctrl-C comes anywhere, perhaps amid a reduction
            self._leave()
            return
        sentence = str(error)
        if not isinstance(error, FederatedError):
            sentence = f"Process {self.rank} ended with {type(error).__name__}: {sentence}"
        with suppress(LostProcess):
            self._gather(("", sentence, None))
            if isinstance(error, FederatedError):
                error.is_told = self.rank > 0

    def _leave(self) -> None:
        """Closes all that the others could wait at."""
        if self._pipes is not None:
            self._pipes.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gather(self, said: Any) -> list[Any]:
        content = pickle.dumps(said, protocol=5)
        with _noticing(self._strategy):
            everyone = self._gather_packets(content) if self._pipes is None else self._pipes.gather(content)
        return [pickle.loads(each) for each in everyone]

    def _gather_packets(self, content: bytes) -> list[bytes]:
        """Gathers by gloo: in one round trip what fits into a first packet, as nearly everything does."""
        packet = torch.zeros(_PACKET, dtype=torch.uint8)
        packet[:8] = torch.tensor([len(content)]).view(torch.uint8)
        packet[8 : 8 + len(content)] = _bytes(content[: _PACKET - 8])
        packets = self._gather_alike(packet)
        lengths = [int(each[:8].view(torch.int64)) for each in packets]
        rests = [each[:0] for each in packets]
        if longest := max(max(lengths) - (_PACKET - 8), 0):
            rest = torch.zeros(longest, dtype=torch.uint8)
            rest[: max(len(content) - (_PACKET - 8), 0)] = _bytes(content[_PACKET - 8 :])
            rests = self._gather_alike(rest)
        whole = (torch.cat([first[8:], rest])[:n] for first, rest, n in zip(packets, rests, lengths, strict=True))
        return [each.numpy().tobytes() for each in whole]

    def _gather_alike(self, tensor: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(everyone, tensor)
        return everyone

    def _reduce(self, tensors: tuple[Tensor, ...], how: Any, what: str | None) -> None:
        if self.size == 1 or not tensors:
            return
        if what is not None:
            self.exchange(None, what)
        parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
        whole = parts[0] if len(parts) == 1 and parts[0].is_contiguous() else torch.cat([p.flatten() for p in parts])
        with _noticing(self._strategy):
            if self._pipes is not None and whole.device.type == "cpu" and whole.nbytes <= _SMALL:
                self._pipes.reduce(whole, maximum=how is dist.ReduceOp.MAX)
            else:
                dist.all_reduce(whole, how)
        if whole is not parts[0]:
            for part, reduced in zip(parts, torch.split(whole, [p.numel() for p in parts]), strict=True):
                part.copy_(reduced.view_as(part))


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


@contextmanager
def _noticing(strategy: ClientsStrategy | None) -> Iterator[None]:
    """Turns what torch says when another process is gone into one sentence."""
    try:
        yield
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        who = "another one" if strategy is None else strategy.find_lost()
        raise LostProcess(
            f"Expected every process of the run to go on, but {who} has ended without a word (killed, or out of "
            "memory?): look at its output, and resume with `--ckpt_path last`."
        ) from error
