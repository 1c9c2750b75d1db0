"""The server's side of an evaluation at nodes: what these count over the samples that they hold out, added up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_fed.core.recorder import MetricRecorder
from lightning_fed.distributed.sharing import Logged, merge_logged
from lightning_fed.engines.fleet.logs import kinds_of, logged_of, options_of, unlike_most
from lightning_fed.engines.fleet.packets import Facts, Tensors
from lightning_fed.engines.fleet.replies import taken
from lightning_fed.errors import FederatedError, expect

__all__ = ["MOST_SAMPLES", "AtNodes", "SetAtNodes", "expect_adds_up", "metrics_of", "sets_of"]

# Bytes that a reply may have, and samples of a set that has no length.
_ROOM, MOST_SAMPLES = 1 << 26, 1 << 40

_States: TypeAlias = dict[tuple[str, str], Tensor]
_WAYS: dict[Any, Any] = {dim_zero_sum: torch.add, dim_zero_min: torch.minimum, dim_zero_max: torch.maximum}


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Returns the Metric objects of a module, by their places."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def expect_adds_up(place: str, metric: Metric) -> None:
    """Refuses a metric whose states are samples, or such that those of nodes do not make that of all samples."""
    for state, default in metric._defaults.items():
        expect(
            isinstance(default, Tensor) and metric._reductions[state] in _WAYS,
            f"Expected metrics whose states are sums, minima or maxima over samples, for an evaluation at nodes, got "
            f"{type(metric).__name__} ({place}), whose {state!r} is none of these, so that samples could leave the "
            "node: give it bins (`thresholds=100`) if it has them, use another, or evaluate on the server.",
        )


@dataclass
class Counted:
    """What a node has counted over one set: samples, what was logged, and the states of Metric objects."""

    samples: int
    logged: Logged
    states: _States

    @classmethod
    def of(cls, at: int, said: Facts, tensors: Tensors, module: nn.Module, most: int) -> "Counted":
        """Reads it, and takes its tensors out of ``tensors``; believes nothing of it."""
        samples, own, states = said["samples"], metrics_of(module), _States()
        expect(
            type(samples) is int and 0 <= samples <= most,
            f"Expected at most {most:,} samples, as the node had said, got {str(samples)[:20]}.",
        )
        series = logged_of(kinds_of(said), said["rest"])
        for key, each in series.items():
            sound = all(abs(cast(float, number)) < float("inf") for number in (each.total, each.weight, each.last))
            expect(sound, f"Expected finite numbers of {key[:100]!r}, got others.")
        shown = {key: (place, options_of(key, options), None) for key, (place, options) in said["metrics"].items()}
        others = {*said["updated"], *(place for place, _, _ in shown.values())} - own.keys()
        expect(not others, f"Expected Metric objects that the server's module has, got {str(others)[:100]}.")
        for place in said["updated"]:
            expect_adds_up(place, own[place])
            for state in own[place]._defaults:
                states[place, state] = _sound(own[place], state, tensors.pop(f"{at}.{place}.{state}"))
        return cls(samples, Logged(at, series, shown), states)

    def kinds(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yields of what kind each number is: the same at all nodes."""
        yield from (((key,), (each.options, each.reduction)) for key, each in self.logged.series.items())
        yield ("Metric objects",), frozenset(self.logged.metrics.items())
        yield from ((name, value.shape) for name, value in self.states.items())


def _sound(metric: Metric, state: str, value: Tensor) -> Tensor:
    """Refuses a state of another shape or kind than the server's, numbers that are not finite, and negative counts."""
    default: Any = metric._defaults[state]
    counts = not default.is_floating_point() and metric._reductions[state] is dim_zero_sum
    fits = value.shape == default.shape or not default.ndim
    fits &= value.is_floating_point() == default.is_floating_point()
    expect(
        fits and (value.isfinite() | (value == default.cpu())).all() and not (counts and (value < 0).any()),
        f"Expected finite numbers or counts as {type(metric).__name__} has them in {state!r}, got others.",
    )
    return value


class SetAtNodes(list[Counted]):
    """One set, of which each node has a part: what all nodes have counted."""

    def fill(self, recorder: MetricRecorder, module: LightningModule) -> None:
        """Gives a recorder, and the module's Metric objects, what they would have after all samples."""
        everyone = []
        for part in self:
            found = Logged(part.logged.position, {}, {})
            for value in part.logged.series.values():
                value.options = recorder.named(value.options)
                found.series[value.options.names()[0]] = value
            for place, options, _ in part.logged.metrics.values():
                found.metrics[recorder.named(options).names()[0]] = (place, recorder.named(options), None)
            everyone.append(found)
        merge_logged(everyone, recorder, module)
        held = metrics_of(module)
        for (place, state), sent in (each for part in self for each in part.states.items()):
            metric: Any = held[place]
            now, default, way = getattr(metric, state), metric._defaults[state], metric._reductions[state]
            more = sent.to(now.device)
            more = more - default.to(more) if way is dim_zero_sum else more
            setattr(metric, state, _WAYS[way](now, more))
            metric._update_count += 1


class AtNodes:
    """Stands among the sets of an evaluation for those of which nodes have parts.

    Args:
        kind: val or test.
        whose: What their metrics have in their names, if the server evaluates too.
    """

    remote: Any  # who asks nodes, from the first round on

    def __init__(self, kind: str, whose: str) -> None:
        self.kind, self.whose = kind, whose

    def begin(self, remote: Any) -> None:
        """Names the nodes that hold nothing out, and notes the sets of all; refuses a fleet in which nobody has any."""
        self.remote, held = remote, remote.sets
        without = [node for node in sorted(held) if not held[node].get(self.kind)]
        self.names = list(dict.fromkeys(name for node in self._nodes() for name in held[node][self.kind]))
        expect(
            any(any(own.values()) for own in held.values()),
            "Expected a node with samples to evaluate on, got none: hold some out, for example with "
            "`--data.val_fraction 0.2`, or evaluate on the server.",
        )
        if without:
            rank_zero_info(f"Without {self.kind} samples: {', '.join(without)}.")

    def _nodes(self) -> list[str]:
        """Returns the nodes that hold something out, in the order of their first clients."""
        homes, held = self.remote.census.homes, self.remote.sets
        order = dict.fromkeys(homes[client] for client in sorted(homes))
        return [node for node in order if held.get(node, {}).get(self.kind)]

    def sets(self) -> dict[str, SetAtNodes]:
        """Asks the nodes; returns what all with a sound reply have counted, and names and counts the others."""
        remote, kind, names = self.remote, self.kind, self.names
        away = remote.find([*remote.census.homes])
        nodes = self._nodes()
        orders = {node: {"stage": kind, "sets": names} for node in nodes if node not in away}
        replies = away | remote.ask("evaluate", orders, remote.model(), _ROOM)
        found, failed = dict[str, dict[str, Counted]](), dict[str, Any]()
        for node in nodes:
            try:
                found[node] = self._read(remote.sets[node][kind], *taken(replies[node]))
            except Exception as error:  # whatever is sent by a node that is broken, of another version or hostile
                if not remote.state.round:
                    raise FederatedError(f"Node {node} cannot evaluate the model: {error}") from error
                failed[node] = error if isinstance(error, FederatedError) else repr(error)
        kinds = {
            node: {(name, *kind): like for name, one in own.items() for kind, like in one.kinds()}
            for node, own in found.items()
        }
        for node, (_, *name) in unlike_most(kinds).items():
            del found[node]
            failed[node] = f"it sends {'.'.join(name)!r} of another kind than most"
        for node, why in failed.items():
            rank_zero_warn(f"Node {node} is left out of the {kind} metrics of round {remote.state.round}: {why}")
        sets = {name: SetAtNodes(own[name] for own in found.values() if name in own) for name in names}
        remote.facts[f"fleet/{kind}_failed"] = float(len(failed))
        for name, one in sets.items():
            remote.facts[f"fleet/{kind}_samples" + f"/{name}" * bool(name)] = float(sum(part.samples for part in one))
        return sets if found else {}

    def _read(self, held: dict[str, int], facts: Facts, tensors: Tensors) -> dict[str, Counted]:
        """Reads what a node has counted over the sets of which it has said that it holds them."""
        said = facts["sets"]
        expect(said.keys() == held.keys(), f"Expected the node's sets {[*held]}, got {str([*said])[:100]}.")
        found = {
            name: Counted.of(at, said[name], tensors, self.remote.module, held[name]) for at, name in enumerate(said)
        }
        expect(not tensors, f"Expected nothing else of a node, got {next(iter(tensors), '')[:100]!r}.")
        return found


def sets_of(facts: Facts) -> dict[str, dict[str, int]]:
    """Returns the samples that a node says it holds out, by val or test and the set's name."""
    held: dict[str, dict[str, int]] = facts["held_out"]
    counts = [count for own in held.values() for count in own.values()]
    expect(
        all(type(count) is int and 0 < count <= MOST_SAMPLES for count in counts) and len(counts) < 100,
        "Expected counts of what a node holds out, got others.",
    )
    return held
