"""What a tuning offers, and which of its choices are at an edge of that, where a better value may lie beyond."""

from collections.abc import Iterable, Mapping

from lightning_fed.lab.common import column_head
from lightning_fed.lab.studies.study import Parameters, Space, Study, name_of, tuned_per

__all__ = ["at_edge", "edges_of", "parameters_of"]

_MOST_NAMES, _MOST_CLAUSES = 3, 4  # what more there is of choices and values is counted
_NEAR = 0.05  # the part of a range that counts as its end


def parameters_of(study: Study, values: Mapping[str, str]) -> Parameters:
    """Returns the parameters to tune for some values of axes."""
    parameters = dict(study.tune.parameters)
    for axis, by in study.tune.by.items():
        parameters |= by.get(values.get(axis, ""), {})
    return parameters


def edges_of(study: Study, axes: Mapping[str, str], options: Mapping[str, object]) -> dict[str, str]:
    """Returns the options whose chosen value is ``smallest`` or ``largest`` of the values that tuning offers.

    Other values than numbers have no order, and one value alone no edge. Of a range the outermost twentieth counts, on
    its own scale.
    """
    sides = {}
    for option, offered in parameters_of(study, axes).items():
        try:
            low, high = _ends(offered)
            chosen = float(name_of(options[option]))
        except (KeyError, ValueError):
            continue
        if low < high and not low < chosen < high:
            sides[option] = "smallest" if chosen <= low else "largest"
    return sides


def _ends(offered: list[object] | Space) -> tuple[float, float]:
    if not isinstance(offered, Space):
        numbers = [float(name_of(value)) for value in offered]
        return min(numbers), max(numbers)
    low, high, room = offered.low, offered.high, _NEAR * (offered.high - offered.low)
    ratio = (high / low) ** _NEAR if offered.log else 1.0
    return (low * ratio, high / ratio) if offered.log else (low + room, high - room)


def at_edge(study: Study, chosen: Iterable[tuple[Mapping[str, str], Mapping[str, object]]]) -> str:
    """Says which choices are at an edge, from the axes and the tuned options of runs; "" if none is.

    A choice is named by its values of the axes in `tune.per`; of many the values with the most choices are said.
    """
    axes, places, names = tuned_per(study), dict[str, list[str]](), set[str]()
    for values, options in chosen:
        name = column_head(axes, [values[axis] for axis in axes])
        if name not in names:
            names.add(name)
            for option, side in edges_of(study, values, options).items():
                places.setdefault(f"{option} {name_of(options[option])}, the {side}", []).append(name)
    clauses = []
    for place, where in sorted(places.items(), key=lambda one: -len(one[1])):
        several = f"{len(where)} of {len(names)} choices" if len(where) > _MOST_NAMES else "; ".join(where)
        clauses.append(f"{place} ({several})" if len(names) > 1 else place)
    more = [f"{len(clauses) - _MOST_CLAUSES} more"] if len(clauses) > _MOST_CLAUSES else []
    return "; ".join([*clauses[:_MOST_CLAUSES], *more])
