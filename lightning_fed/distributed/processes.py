"""The processes that share a run: what they tell each other, and how all of them end when one fails."""

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
# How often a process that waits for the others looks whether they live, and how long one that failed waits for them.
_POLL, _LAST_WORD_S = timedelta(seconds=1), 11.0
# Bytes of what a process says that are sent with their number: most fits in, such as what 100 clients have entered.
_SHORT = 8192


class PeerFailure(FederatedError):
    """Another process failed and has said why; the message is its own."""


class LostProcess(FederatedError):
    """Another process has ended without a word, or gives no sign of life."""


class Processes:
    """The processes of one run; alone, everything here returns what it is given and costs nothing.

    Every call but ``broadcast`` and ``working_alone`` is made by all processes, in the same order. Each begins with an
    exchange of a few bytes over sockets of the host, in which a process that has failed says so instead: all then raise
    its sentence, where a reduction would wait for it for ever. A process that died closes its sockets, which ends the
    others' exchange too; one that is stopped, or fails while others are at work, is noticed by their ``pulse``.

    Args:
        rank: Index of this process over all nodes.
        size: Number of processes.
        find_lost: Says which process has ended, empty if this one does not know.

    Attributes:
        pulse: Signs of life of the others; there from when all have joined.
    """

    pulse: Pulse

    def __init__(self, rank: int = 0, size: int = 1, find_lost: Callable[[], str] = str) -> None:
        self.rank, self.size = rank, size
        self._find_lost = find_lost
        self._is_alone = False
        self._deadline = float("inf")

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        """Returns itself: metric objects of a module refer to it, and modules are copied."""
        return self

    def are_together(self) -> bool:
        """Whether there are several, and all do the same now."""
        return self.size > 1 and not self._is_alone

    @contextmanager
    def at_work(self, position: Callable[[], tuple[str, str]]) -> Iterator[None]:
        """Ends this process within the block, soon, if another one fails; for ``position`` see ``Pulse``."""
        if self.size > 1:
            self.pulse.begin(position)
        try:
            yield
        finally:
            if self.size > 1:
                self.pulse.is_active = False

    @contextmanager
    def working_alone(self) -> Iterator[None]:
        """Lets each process do its own work within the block; nothing can be exchanged there."""
        self._is_alone = self.size > 1
        try:
            yield
        finally:
            self._is_alone = False

    def exchange(self, value: _T, what: str = "") -> list[_T]:
        """Gives every process what each one says, in the order of ranks.

        Args:
            value: What this one says; it is pickled, tensors should be on the CPU.
            what: What it is about; processes that say it of different things have lost step.

        Raises:
            FederatedError: If a process has failed or died, has lost step, or works for itself now.
        """
        if self.size == 1:
            return [value]
        if self._is_alone:
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

        It writes and reads files for all; what it raises ends all processes.
        """
        return self.exchange(function() if self.rank == 0 else None, what)[0]  # type: ignore[return-value]  # the first's

    def sum(self, *tensors: Tensor, what: str | None = "sum") -> None:
        """Adds tensors of one dtype and device over the processes, in place; all get the same bits.

        With None as ``what`` an exchange must have come just before; else one is made, see there.
        """
        self.reduce(tensors, dist.ReduceOp.SUM, what)

    def reduce(self, tensors: Sequence[Tensor], how: Any, what: str | None = None) -> None:
        """Reduces tensors as ``sum`` adds them, by another operation of torch's."""
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
        """Copies tensors of one process to the others, in place; it begins with no exchange of its own."""
        if self.size > 1:
            with self._noticing_loss():
                for tensor in tensors:
                    self._finish(dist.broadcast(tensor, source, async_op=True), tensor)

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
        self._is_alone = False
        self.pulse.is_active = False
        if not isinstance(error, Exception):  # a second Ctrl-C comes anywhere, perhaps amid a reduction
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
        """Gives every process what each one says: how long it is and, in one go, as much as most that is said."""
        pickled = pickle.dumps(said, protocol=5)  # what cannot be pickled fails before the others wait for it
        content = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        head = torch.cat([torch.tensor([len(content)]).view(torch.uint8), content[:_SHORT]])
        everyone = self._gather_bytes(head, 8 + _SHORT)
        lengths = [int(each[:8].view(torch.long)) for each in everyone]
        everyone = [each[8:] for each in everyone]
        if max(lengths) > _SHORT:
            everyone = self._gather_bytes(content, max(lengths))
        return [pickle.loads(each[:length].numpy().data) for each, length in zip(everyone, lengths, strict=True)]

    def _gather_bytes(self, content: Tensor, size: int) -> list[Tensor]:
        """Returns the bytes of each process, filled up to one size."""
        whole = torch.nn.functional.pad(content, (0, size - len(content)))
        everyone = [torch.empty_like(whole) for _ in range(self.size)]
        with self._noticing_loss():
            self._finish(dist.all_gather(everyone, whole, async_op=True), whole)
        return everyone

    def _finish(self, work: Any, like: Tensor) -> None:
        """Waits for an operation of all processes while they live.

        Raises:
            FederatedError: If one has failed, is gone or silent.
        """
        if like.device.type != "cpu":  # it is queued on the device; an exchange has come just before
            work.wait()
            return
        while True:
            try:
                work.wait(_POLL)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._expect_signs()

    def _expect_signs(self) -> None:
        """Gives up waiting where the others do not come any more."""
        failure = self.pulse.failure
        if failure is None and time.monotonic() > self._deadline:
            failure = Failure("", lost=True)
        if failure is not None:
            self.pulse.is_stuck, self.pulse.is_active = True, False
            error = LostProcess(failure.sentence) if failure.lost else PeerFailure(failure.sentence)
            error.is_told = not failure.lost and self.rank > 0
            raise error

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """Turns what torch says when another process is gone into one sentence."""
        try:
            yield
        except FederatedError:
            raise
        except (RuntimeError, ValueError) as error:
            self.pulse.is_active = False
            lost = self._find_lost() or ("process 0" if self.rank and self.size == 2 else "another one")
            raise LostProcess(self.pulse.lost(lost, ENDED)) from error
