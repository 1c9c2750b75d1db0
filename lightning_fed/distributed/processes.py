"""The processes that share a run: how they exchange data, and how all of them end when one fails."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_fed.distributed.pulse import ENDED, Failure, Pulse
from lightning_fed.errors import FederatedError, add_note

__all__ = ["LostProcess", "PeerFailure", "Processes"]

_T = TypeVar("_T")
# How often a waiting process checks that the others live, and how long a failed process waits for the others.
_POLL, _LAST_WORD_S = timedelta(seconds=1), 11.0
# Bytes that are sent together with the length. Most messages fit, such as those on 100 clients of a round.
_SHORT = 8192


class PeerFailure(FederatedError):
    """Another process failed; this is its message."""


class LostProcess(FederatedError):
    """Another process has ended without a message, or shows no sign of life."""


class Processes:
    """The processes of one run. With a single process every call returns its argument and costs nothing.

    All processes make every call, except ``broadcast`` and ``working_alone``, in the same order. Each call begins with
    an exchange of a few bytes over the host's sockets. A failed process sends its error there, and all raise it; a
    reduction would wait for ever. If a process dies, its sockets close, which ends the exchange of the others too. The
    ``pulse`` notices a process that is stopped, or that fails while others work.

    Args:
        rank: Index of this process over all nodes.
        size: Number of processes.
        find_lost: Returns which process has ended, empty if unknown.

    Attributes:
        pulse: Signs of life of the other processes; set when all have joined.
    """

    pulse: Pulse

    def __init__(self, rank: int = 0, size: int = 1, find_lost: Callable[[], str] = str) -> None:
        self.rank, self.size = rank, size
        self._find_lost = find_lost
        self._is_alone = False
        self._deadline = float("inf")

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        """Returns itself: a module's Metric objects refer to it, and modules are copied."""
        return self

    def are_together(self) -> bool:
        """Whether there are several processes, and all do the same now."""
        return self.size > 1 and not self._is_alone

    @contextmanager
    def at_work(self, position: Callable[[], tuple[str, str]]) -> Iterator[None]:
        """Within the block, ends this process soon after another one fails; for ``position`` see ``Pulse``."""
        if self.size > 1:
            self.pulse.begin(position)
        try:
            yield
        finally:
            if self.size > 1:
                self.pulse.is_active = False

    @contextmanager
    def working_alone(self) -> Iterator[None]:
        """Lets each process do its own work within the block, where nothing can be exchanged."""
        self._is_alone = self.size > 1
        try:
            yield
        finally:
            self._is_alone = False

    def exchange(self, value: _T, what: str = "") -> list[_T]:
        """Returns the values of all processes, in the order of ranks, on every process.

        Args:
            value: The value of this process; it is pickled, so tensors should be on the CPU.
            what: The purpose of the exchange. If it differs between processes, they are out of step.

        Raises:
            FederatedError: If a process has failed or died, is out of step, or works alone now.
        """
        if self.size == 1:
            return [value]
        if self._is_alone:
            raise FederatedError(
                "Expected processes to exchange values only in hooks that are called once in a round, got a call "
                "while each process works alone: move it out of the hooks of clients, steps and batches, or set "
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
        """Calls a function only on the first process, and returns its result on all processes.

        It is for reading and writing files. An exception of the function ends all processes.
        """
        return self.exchange(function() if self.rank == 0 else None, what)[0]  # type: ignore[return-value]  # the first's

    def sum(self, *tensors: Tensor, what: str | None = "sum") -> None:
        """Adds tensors of one dtype and device over the processes, in place; all get the same bits.

        ``what`` is the purpose, see ``exchange``. With None an exchange must have come directly before.
        """
        self.reduce(tensors, dist.ReduceOp.SUM, what)

    def reduce(self, tensors: Sequence[Tensor], how: Any, what: str | None = None) -> None:
        """Does the same as ``sum`` with another operation of torch."""
        if self.size == 1 or not tensors:
            return
        if what is not None:
            self.exchange(None, what)
        parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
        whole = parts[0] if len(parts) == 1 and parts[0].is_contiguous() else torch.cat([p.flatten() for p in parts])
        with self._noticing_loss():
            self._finish(dist.all_reduce(whole, how, async_op=True), whole)
        if whole is not parts[0]:
            for part, reduced in zip(parts, torch.split(whole, [p.numel() for p in parts]), strict=True):
                part.copy_(reduced.view_as(part))

    def broadcast(self, *tensors: Tensor, source: int = 0) -> None:
        """Copies tensors of one process to the others, in place, without an exchange before."""
        if self.size > 1:
            with self._noticing_loss():
                for tensor in tensors:
                    self._finish(dist.broadcast(tensor, source, async_op=True), tensor)

    def gather_tensor(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Returns the tensors of all processes, of any shapes; torchmetrics calls it.

        The tensor of a metric without updates is empty, and may have another dtype.
        """
        everyone = self.exchange(tensor.detach().cpu(), "metric")
        like = next((other for other in everyone if other.numel()), tensor)
        return [(other if other.numel() else like[:0]).to(tensor.device) for other in everyone]

    def tell(self, error: BaseException) -> None:
        """Tells the others that this process cannot go on, so that all end with one sentence."""
        if self.size == 1 or isinstance(error, (PeerFailure, LostProcess)) or not dist.is_initialized():
            return
        self._is_alone = False
        self.pulse.is_active = False
        if not isinstance(error, Exception):  # a second Ctrl-C may come in the middle of a reduction
            dist.destroy_process_group()
            return
        sentence, (place, resume) = str(error), self.pulse.position()
        if not isinstance(error, FederatedError):
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            sentence = f"Process {self.rank} ended with {type(error).__name__}: {sentence}{place}{notes}; {resume}"
            add_note(error, f"Process {self.rank} ended{place}; {resume}")
        self.pulse.fail(Failure(sentence, lost=False))
        self._deadline = time.monotonic() + _LAST_WORD_S
        with suppress(LostProcess, PeerFailure):
            self._gather(("", sentence, None))
            if isinstance(error, FederatedError):
                error.is_told = self.rank > 0
        self._deadline = float("inf")

    def _gather(self, said: Any) -> list[Any]:
        """Returns the values of all processes: the length and the first bytes go together, a longer rest follows."""
        pickled = pickle.dumps(said, protocol=5)  # fails here, before the others wait, if it cannot be pickled
        content = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        head = torch.cat([torch.tensor([len(content)]).view(torch.uint8), content[:_SHORT]])
        everyone = self._gather_bytes(head, 8 + _SHORT)
        lengths = [int(each[:8].view(torch.long)) for each in everyone]
        everyone = [each[8:] for each in everyone]
        if max(lengths) > _SHORT:
            everyone = self._gather_bytes(content, max(lengths))
        return [pickle.loads(each[:length].numpy().data) for each, length in zip(everyone, lengths, strict=True)]

    def _gather_bytes(self, content: Tensor, size: int) -> list[Tensor]:
        """Returns the bytes of each process, padded to one size."""
        whole = torch.nn.functional.pad(content, (0, size - len(content)))
        everyone = [torch.empty_like(whole) for _ in range(self.size)]
        with self._noticing_loss():
            self._finish(dist.all_gather(everyone, whole, async_op=True), whole)
        return everyone

    def _finish(self, work: Any, like: Tensor) -> None:
        """Waits for an operation of all processes as long as none has failed, has ended or is silent."""
        if like.device.type != "cpu":  # it is queued on the device, directly after an exchange
            work.wait()
            return
        while True:
            try:
                work.wait(_POLL)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._expect_signs(work)

    def _expect_signs(self, work: Any) -> None:
        """Stops waiting if the others will not come any more."""
        failure = self.pulse.failure or (Failure("", lost=True) if time.monotonic() > self._deadline else None)
        if failure is not None:
            self.pulse.is_active = False
            self.pulse.given_up.append(work)
            error = LostProcess(failure.sentence) if failure.lost else PeerFailure(failure.sentence)
            error.is_told = not failure.lost and self.rank > 0
            raise error

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """Turns torch's error after the end of another process into one sentence."""
        try:
            yield
        except FederatedError:
            raise
        except (RuntimeError, ValueError) as error:
            self.pulse.is_active = False
            lost = self._find_lost() or ("process 0" if self.rank and self.size == 2 else "another one")
            raise LostProcess(self.pulse.lost(lost, ENDED)) from error
