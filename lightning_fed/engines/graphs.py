"""Work on a GPU that is recorded once as a CUDA graph and then done again by one launch, at the same addresses."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.cuda import CUDAGraph

__all__ = ["CannotCapture", "CudaGraphs", "graphs_for"]

T = TypeVar("T")
_WARM_UPS = 3


class CannotCapture(Exception):
    """Says, in a part of a sentence, why the step of a model or a run cannot be captured."""


class CudaGraphs:
    """Makes the graphs of one run, which share their memory.

    They must be replayed one at a time, and what a graph has computed be read before another one is replayed.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for warm-up and capture: autograd adds a gradient up on the stream that its node was made on.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Any]) -> None:
        """Does the work a few times on the side stream, as torch asks before a capture.

        Raises:
            RuntimeError: If it waits for the GPU, as ``.item()`` does. A capture that fails for it would leave the
                random streams of the GPU unusable.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS - 1):
                    work()
                with _no_waiting():
                    work()
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Records work without doing it.

        Args:
            work: Does the same at the same addresses whenever it is called.

        Returns:
            What does the work again, and what ``work`` returned: tensors whose values each replay replaces.
        """
        gc.collect()  # a graph that is destroyed while another one is captured would spoil it
        graph = CUDAGraph()
        # Other threads may go on meanwhile: those that pin memory for data loaders, or watch collectives.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


def graphs_for(device: torch.device) -> CudaGraphs | None:
    """Returns what makes graphs on a device, None where there are none."""
    return CudaGraphs(device) if device.type == "cuda" else None


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Lets torch raise where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
