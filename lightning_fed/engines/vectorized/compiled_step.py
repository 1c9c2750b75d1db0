"""The gradients of many clients at once as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_fed.core.logged_values import LoggedValue
from lightning_fed.engines.attributes import Place
from lightning_fed.engines.trial import agree, without_trace
from lightning_fed.engines.vectorized.constants import Constants, Refusing
from lightning_fed.engines.vectorized.step import CannotStack, CannotTrace, StackedStep, first_sentence

__all__ = ["CompiledStep", "common_batch_sizes"]

# So often may the module change what a graph takes for constant; compiling takes seconds.
_MOST_TRACES = 8
# So many shapes may batches of one size have, whose other dimensions a hook may change.
_MOST_SHAPES = 8


@dataclass
class _Graph:
    """A step of a number of clients on batches of one shape.

    Attributes:
        run: Computes, of weights, where gradients go, buffers and batch, what was logged: tensors of shape (n,).
        series: How each logged name is shown and reduced.
        text: What it does, and logs.
        tensors: Those that it refers to.
        changed: Attributes of the module that have changed since it was traced, and may matter.
        unread: Attributes that were found not to matter.
        traces: Times that its step was another one.
    """

    run: Callable[..., list[Tensor]]
    series: dict[str, LoggedValue]
    text: str
    tensors: list[Tensor]
    changed: set[Place] = field(default_factory=set)
    unread: set[Place] = field(default_factory=set)
    traces: int = 0

    def does_as(self, other: _Graph, held: set[int]) -> bool:
        """Says whether it computes what another one does.

        Args:
            other: That one.
            held: Ids of tensors that may change in place, as attributes hold them.
        """
        if self.text != other.text or len(self.tensors) != len(other.tensors):
            return False
        return all(
            a is b or (id(a) not in held and a.shape == b.shape and torch.equal(a, b))
            for a, b in zip(self.tensors, other.tensors, strict=True)
        )


class CompiledStep:
    """Does what ``StackedStep`` does, by a graph that is traced once, compiled, and compared with it before use.

    A graph is for one number of clients and one size of batch. Clients go through it in blocks; a rest that does not
    fill a block of a quarter of that size is filled up with copies, of no account. Rare sizes of batches are not
    compiled: a client's last batch can have any size.

    Args:
        step: Computes the same uncompiled.
        block: Clients in a block.
        sizes: Sizes of batches to compile for.
        mode: One of ``torch.compile``.

    Attributes:
        reads_batch_idx: False: a graph cannot depend on it.
        blocks: Times that a graph was run.
    """

    def __init__(self, step: StackedStep, block: int, sizes: frozenset[int], mode: str = "default") -> None:
        self.step, self.sizes, self.mode = step, sizes, mode
        self._widths = sorted({block, -(-block // 4)}, reverse=True)
        self.reads_batch_idx = False
        self.blocks = 0
        self._graphs: dict[Any, _Graph] = {}
        # In half precision a graph rounds less often than its operations one by one.
        self._coarse = 0.1 if "16" in str(step.precision.precision) else 1e-3
        self._constants = Constants(step.module)

    def refresh(self) -> None:
        """Looks which attributes of the module, that graphs take for constant, have changed."""
        if changed := self._constants.changed():
            for graph in self._graphs.values():
                graph.changed |= changed - graph.unread

    def __call__(
        self, weights: Tensor, buffers: dict[str, Tensor], batch: Any, batch_idx: int, size: int, out: Tensor
    ) -> tuple[dict[str, LoggedValue], dict[str, Tensor]]:
        """Computes gradients; see ``StackedStep``."""
        if size not in self.sizes:
            return self.step(weights, buffers, batch, batch_idx, size, out)
        leaves, structure = tree_flatten(batch)
        tensors = [weights, out, *buffers.values(), *leaves]
        graph, totals = None, []
        for start, stop, width in self._blocks(len(weights)):
            rows = [tensor[start:stop] for tensor in tensors]
            inputs = rows if stop - start == width else [_filled(tensor, width) for tensor in rows]
            graph = self._graph(inputs, list(buffers), structure, size)
            with torch.no_grad():
                logged = graph.run(*inputs)
            if inputs is not rows:
                for row, filled in zip(rows[1 : 2 + len(buffers)], inputs[1:], strict=False):
                    row.copy_(filled[: stop - start])
            totals.append([total[: stop - start] for total in logged])
            self.blocks += 1
        assert graph is not None
        joined = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*totals, strict=True)]
        return graph.series, dict(zip(graph.series, joined, strict=True))

    def _blocks(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Divides clients into blocks: yields the first one, the one behind the last one, and the graph's number."""
        start = 0
        for width in self._widths:
            while count - start >= width or (start < count and width == self._widths[-1]):
                stop = min(start + width, count)
                yield start, stop, width
                start = stop

    def _graph(self, inputs: list[Tensor], names: list[str], structure: Any, size: int) -> _Graph:
        # By its text: older versions of torch give structures no hash.
        key = (size, repr(structure), tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs))
        graph, trace = self._graphs.get(key), partial(self.traced, inputs, names, structure, size)
        if graph is None:
            if sum(other[0] == size for other in self._graphs) >= _MOST_SHAPES * len(self._widths):
                raise CannotTrace(f"its batches of {size} samples have more than {_MOST_SHAPES} shapes")
            self._graphs[key] = self._compiled(trace(), inputs)
        elif graph.changed:
            self._graphs[key] = self._renewed(graph, trace, inputs)
        return self._graphs[key]

    def _renewed(self, graph: _Graph, trace: Callable[..., _Graph], inputs: list[Tensor]) -> _Graph:
        """Returns a graph for a step whose attributes have changed: the same one where they make no difference.

        Raises:
            CannotTrace: If they make one again and again.
        """
        if self._constants.can_be_shadowed(graph.changed):
            with suppress(CannotTrace):  # they are read
                if trace(graph.changed).does_as(graph, self._constants.tensors):
                    graph.unread |= graph.changed
                    graph.changed = set()
                    return graph
        new = trace()
        if new.does_as(graph, self._constants.tensors):
            graph.changed = set()
            return graph
        new.traces = graph.traces + 1
        if new.traces >= _MOST_TRACES:
            name = min(graph.changed)[1]
            raise CannotTrace(f"the module's attribute `{name}`, which it reads, has changed {new.traces} times")
        return self._compiled(new, inputs)

    def traced(
        self, inputs: list[Tensor], names: list[str], structure: Any, size: int, shadowed: set[Place] | None = None
    ) -> _Graph:
        """Traces the step of some clients; their tensors are left as they are.

        Args:
            inputs: Weights, where gradients go, buffers, the leaves of the batch.
            names: The buffers' names.
            structure: How the leaves make a batch.
            size: Samples in a batch.
            shadowed: Attributes of the module that it must not read.

        Raises:
            CannotTrace: If the step cannot be traced.
        """
        series: dict[str, LoggedValue] = {}
        batch_idx: Any = Refusing("its training reads `batch_idx`, and a graph is the same for all batches")

        def run(weights: Tensor, out: Tensor, *rest: Tensor) -> list[Tensor]:
            batch = tree_unflatten(list(rest[len(names) :]), structure)
            buffers = dict(zip(names, rest, strict=False))
            logged, totals = self.step(weights, buffers, batch, batch_idx, size, out)
            series.update(logged)
            return [totals[name] for name in logged]

        with without_trace(self.step.module), self._constants.tracing(shadowed or set()):
            try:
                graph = make_fx(run)(*(tensor.clone() for tensor in inputs))
            except CannotStack:
                raise
            except Exception as error:  # whatever tracing, or the module under it, raises
                raise CannotTrace(f"it cannot be traced ({first_sentence(error)})") from error
        logged = [(name, s.options, s.reduction, s.weight) for name, s in series.items()]
        tensors = [attrgetter(str(node.target))(graph) for node in graph.graph.nodes if node.op == "get_attr"]
        return _Graph(graph, series, f"{graph.code}{logged}", tensors)

    def _compiled(self, traced: _Graph, inputs: list[Tensor]) -> _Graph:
        """Compiles a traced step, and compares what both compute.

        Raises:
            CannotTrace: If torch cannot compile it, or it computes something else.
        """
        from torch._inductor import list_mode_options  # late, as it takes a while: torch takes no mode beside options

        # Random numbers from the same kernels as uncompiled ones, so that a seed gives the same.
        options = {**list_mode_options(self.mode), "fallback_random": True}
        compiled = torch.compile(traced.run, dynamic=False, options=options)
        expected = self._computed(traced.run, inputs)
        try:
            got = self._computed(compiled, inputs)
        except Exception as error:  # whatever the compiler raises
            raise CannotTrace(f"torch.compile does not work here ({first_sentence(error)})") from error
        if not all(agree(*pair, self._coarse) for pair in zip(got, expected, strict=True)):
            raise CannotTrace("torch.compile makes other gradients of it")
        return replace(traced, run=compiled)

    def _computed(self, run: Callable[..., list[Tensor]], inputs: list[Tensor]) -> list[Tensor]:
        """Computes on copies, from the same random numbers every time; returns what it gives and writes."""
        copies = [tensor.clone() for tensor in inputs]
        with without_trace(self.step.module), torch.no_grad():
            return [*run(*copies), *copies]


def common_batch_sizes(samples: Any, batch_size: int) -> frozenset[int]:
    """Returns the sizes that at least one batch in twenty has.

    Args:
        samples: Samples of each client, shape (n,), integer.
        batch_size: Samples in a full batch; a client's last one may be smaller.
    """
    samples = np.asarray(samples)
    samples = samples[samples > 0]
    full, last = samples // batch_size, samples % batch_size
    counts = np.bincount(last[last > 0], minlength=batch_size + 1)
    counts[batch_size] = full.sum()
    return frozenset(np.flatnonzero(counts * 20 >= max(counts.sum(), 1)).tolist())


def _filled(rows: Tensor, count: int) -> Tensor:
    """Appends copies of the first row until there are ``count``."""
    return torch.cat([rows, rows[:1].expand(count - len(rows), *rows.shape[1:])])
