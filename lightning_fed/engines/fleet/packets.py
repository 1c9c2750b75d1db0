"""What goes between a server and its nodes: tensors by name and JSON. To read a packet runs nothing that is in it."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_fed.errors import FederatedError, expect

__all__ = [
    "NAMES", "Body", "Facts", "Tensors", "body_of", "pack", "planted", "restored", "squeezed", "unpack",
    "widened",
]  # fmt: skip

Facts: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]
# What the header says of each tensor, and the bytes of all.
Body: TypeAlias = tuple[dict[str, Any], bytes]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "C128": torch.complex128,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 1 << 26


def body_of(tensors: Tensors) -> Body:
    """Lays tensors out one after the other, as safetensors does."""
    entries, parts, at = dict[str, Any](), list[bytes](), 0
    for name, tensor in tensors.items():
        kind = NAMES.get(tensor.dtype)
        expect(kind, f"Expected tensors of the usual dtypes to be sent over a fleet, got {name!r} of {tensor.dtype}.")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at := at + len(data)]}
        parts.append(data)
    return entries, b"".join(parts)


def pack(facts: Facts, tensors: Tensors | Body) -> bytes:
    """Makes a packet: the length of the header in 8 bytes, the header as JSON, the tensors. safetensors can read it.

    Args:
        facts: Primitives, lists and dicts with names; kept in the header as text.
        tensors: Tensors by name, or what ``body_of`` made of them for several packets.
    """
    entries, data = body_of(tensors) if isinstance(tensors, dict) else tensors
    head = {"__metadata__": {"facts": json.dumps(facts, separators=(",", ":"))}, **entries}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def unpack(data: bytes) -> tuple[Facts, Tensors]:
    """Reads a packet, whoever has made it.

    Raises:
        FederatedError: If it is none; other exceptions if it is made to look like one.
    """
    length = int.from_bytes(data[:8], "little")
    expect(len(data) - length >= 8 and length <= _LONGEST_HEADER, f"Expected a packet, got {len(data):,} other bytes.")
    head = json.loads(data[8 : 8 + length])
    facts, tensors, start = json.loads(head.pop("__metadata__")["facts"]), Tensors(), 8 + length
    expect(isinstance(facts, dict), "Expected a packet with facts by name, got others.")
    at = 0
    for name, entry in head.items():
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        fits = all(type(size) is int and size >= 0 for size in shape) and end - begin == prod(shape) * dtype.itemsize
        if not (fits and begin == at and start + end <= len(data)):
            raise FederatedError(
                f"Expected a packet as it was sent, got one cut off or changed at {str(name)[:100]!r}."
            )
        part, at = data[start + begin : start + end], end
        tensors[name] = (
            torch.frombuffer(bytearray(part), dtype=dtype).view(shape) if part else torch.empty(shape).to(dtype)
        )
    expect(start + at == len(data), f"Expected a packet of {start + at:,} bytes, as it says, got {len(data):,}.")
    return facts, tensors


def planted(value: Any, tensors: Tensors, place: str) -> Any:
    """Turns nested tensors and primitives into JSON: the tensors go to ``tensors``, under names below ``place``."""
    if isinstance(value, Tensor):
        tensors[place] = value
        return {"tensor": place}
    if isinstance(value, Mapping):
        return {"items": [[key, planted(part, tensors, f"{place}.{key}")] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        parts = [planted(part, tensors, f"{place}.{at}") for at, part in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise FederatedError(
        f"Expected only tensors and primitives to be sent over a fleet, got a {type(value).__name__} in {place}: "
        "change what its `state_dict` returns."
    )


def restored(value: Any, tensors: Tensors) -> Any:
    """Turns what ``planted`` returned back."""
    if isinstance(value, list):
        return [restored(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(restored(part, tensors) for part in value["tuple"])
    return {key: restored(part, tensors) for key, part in value["items"]}


def squeezed(values: Tensor, bits: int) -> Tensor:
    """Packs integers, of any shape, into ``bits`` bits each, uint8; other values stay as they are."""
    if bits == 8 * values.element_size():
        return values
    ones = (values.detach().cpu().reshape(-1, 1).long() >> torch.arange(bits)) & 1
    return torch.from_numpy(np.packbits(ones.to(torch.uint8).numpy()))


def widened(packed: Tensor, bits: int, shape: list[int], like: str) -> Tensor:
    """Undoes ``squeezed``: returns the integers in their shape and dtype, which ``like`` names."""
    dtype = _DTYPES[like]
    if bits == 8 * dtype.itemsize:
        return packed
    fits = 0 < bits < 64 and prod(shape) * bits <= 8 * packed.numel()
    expect(fits, f"Expected integers of at most 63 bits for the shape {shape}, got {packed.numel()} bytes for {bits}.")
    ones = torch.from_numpy(np.unpackbits(packed.numpy(), count=prod(shape) * bits)).view(-1, bits)
    return (ones.long() << torch.arange(bits)).sum(1).to(dtype).view(shape)
