"""The calls of torch that make a graph, as far as they can be seen without a GPU: which, in which order, where."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_fed.engines import graphs


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has been called of torch.cuda, each with its arguments."""
    seen: list[Any] = []
    mode = [0]

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.name = "main" if device is None else "side"

        def wait_stream(self, other: Any) -> None:
            seen.append(f"{self.name} waits for {other.name}")

    main = Stream()

    @contextmanager
    def stream(of: Any) -> Any:
        seen.append(f"on {of.name}")
        yield
        seen.append(f"off {of.name}")

    @contextmanager
    def graph(made: Any, **options: Any) -> Any:
        seen.append(("capture", made, {**options, "stream": options["stream"].name}))
        yield
        seen.append("captured")

    class CUDAGraph:
        def replay(self) -> None:
            seen.append(("replay", self))

    def set_mode(to: Any) -> None:
        mode[0] = to
        seen.append(f"mode {to}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(graphs, "CUDAGraph", CUDAGraph)
    return seen


def test_warm_up_is_on_the_side_stream_and_may_not_wait_at_last(seen):
    made = graphs.graphs_for(torch.device("cuda"))
    made.warm_up(lambda: seen.append("work"))
    assert seen == [
        "side waits for main", "on side", "work", "work", "mode error", "work", "mode 0", "off side",
        "main waits for side",
    ]  # fmt: skip


def test_a_warm_up_that_fails_is_waited_for_too(seen):
    def work() -> None:
        if "mode error" in seen:
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        graphs.graphs_for(torch.device("cuda")).warm_up(work)
    assert seen[-1] == "main waits for side"
    assert "mode 0" in seen


def test_graphs_share_their_memory_and_stream_and_leave_other_threads_alone(seen):
    made = graphs.graphs_for(torch.device("cuda"))
    first, result = made.capture(lambda: seen.append("work") or 5)
    second, _ = made.capture(lambda: None)
    assert result == 5
    first()
    one, other = (call for call in seen if call[0] == "capture")
    assert one[1] is not other[1]
    assert one[2] == other[2] == {"pool": "pool", "stream": "side", "capture_error_mode": "thread_local"}
    assert seen[:3] == [one, "work", "captured"]
    assert seen[-1] == ("replay", one[1])
