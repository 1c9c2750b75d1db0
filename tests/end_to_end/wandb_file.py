"""Reads the file of an offline W&B run: LevelDB's log format with protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK = 32768
_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Yields the records of a .wandb file; a cut-off end is where it stops."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", f"{path} has no W&B header"
    position, parts = 7, b""
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:  # the rest of a block that holds no header is padding
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
        elif kind not in (_FIRST, _MIDDLE):
            return


def history(path: Path) -> list[dict[str, Any]]:
    """The logged rows."""
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def config(path: Path) -> dict[str, Any]:
    """The run's config."""
    merged: dict[str, Any] = {}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        update = record.run.config.update if kind == "run" else record.config.update if kind == "config" else []
        for item in update:
            merged[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return merged


def metric_axes(path: Path) -> dict[str, str]:
    """The x-axis of each metric name or glob, as last defined."""
    axes = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "metric":
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    return axes
