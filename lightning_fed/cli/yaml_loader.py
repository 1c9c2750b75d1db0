"""Reads YAML safely: no duplicate keys, no numbers in base 60, no content that grows when it is read."""

import os
from typing import Any, NoReturn

from jsonargparse._loaders_dumpers import get_yaml_default_loader
from yaml import CollectionEndEvent, CollectionStartEvent, MappingNode, Node, ScalarNode, SequenceNode, parse
from yaml.error import MarkedYAMLError

__all__ = ["ConfigLoader", "is_endless"]

_LEVELS, _ALIASED = 100, 100_000
_TEXT, _IN_BASE_60 = "tag:yaml.org,2002:str", ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


_Loader: Any = get_yaml_default_loader()  # type: ignore[no-untyped-call]  # jsonargparse's has no annotations


class ConfigLoader(_Loader):  # type: ignore[misc]  # jsonargparse makes the class at runtime
    """jsonargparse's loader, but it refuses what is surely a mistake.

    Of a duplicate key YAML silently keeps the last value. An alias inside its own value, aliases of aliases and
    thousands of nested brackets would take endless time and memory.
    """

    def __init__(self, stream: Any) -> None:
        """Reads a text; refuses one that is nested so deeply that it would overflow the stack."""
        level = 0
        for event in parse(stream, Loader=_Loader) if len(stream) > _LEVELS else ():
            level += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if level > _LEVELS:
                _refuse(f"values nested more than {_LEVELS} deep", event)
        super().__init__(stream)

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> str:
        """Returns a value's type; ``1:30`` is text, not the number 90 as in YAML 1.1."""
        tag: str = super().resolve(kind, value, implicit)
        return _TEXT if kind is ScalarNode and ":" in value and tag in _IN_BASE_60 else tag

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """Makes an object of a node; refuses a value that does not fit its tag, as in ``!!int x``."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, KeyError, AttributeError, TypeError):
            _refuse(f"a value that is no {node.tag.rpartition(':')[2]}", node)

    def construct_document(self, node: Node) -> Any:
        """Checks a document and makes its objects."""
        sizes: dict[int, int] = {}
        if _measure(node, sizes) > len(sizes) + _ALIASED:
            _refuse(f"aliases that come to more than {_ALIASED:,} values", node)
        return super().construct_document(node)


def is_endless(path: str) -> bool:
    """Says whether a text names a pipe or a device, as reading one may never end."""
    path = os.path.expanduser(path.removeprefix("file://"))  # as jsonargparse reads it
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _measure(node: Node, sizes: dict[int, int]) -> int:
    """Counts the values in a node with all aliases written out, and stores the count in ``sizes``.

    Raises:
        MarkedYAMLError: If the node has a mistake.
    """
    if known := sizes.get(id(node)):
        return known
    if id(node) in sizes:
        _refuse("an alias within the value that it stands for", node)
    sizes[id(node)] = 0
    parts: list[Node] = []
    if isinstance(node, MappingNode):
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, ScalarNode)):
            if key.value in lines:
                _refuse(f"the key {key.value!r} of line {lines[key.value]} again", key)
            lines[key.value] = key.start_mark.line + 1
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, SequenceNode):
        parts = node.value
    elif "\0" in node.value:
        _refuse("a null byte", node)
    elif is_endless(node.value):
        _refuse(f"{node.value!r}, a pipe or a device", node)
    sizes[id(node)] = 1 + sum(_measure(part, sizes) for part in parts)
    return sizes[id(node)]


def _refuse(what: str, part: Any) -> NoReturn:
    raise MarkedYAMLError(problem=what, problem_mark=part.start_mark)
