"""Reads the file of an offline W&B run: LevelDB's log format with protobuf records.

A file is a row of blocks; the first begins with a header of W&B's own. A record is one chunk, or several where it goes
on in the next block; less of a block than the head of a chunk needs is padding.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEAD = 32768, 7
HEADER = b":W&B\xe1\xbe\x00"
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields kind and content of each chunk that is there as a whole and unharmed."""
    position = len(HEADER)
    while True:
        if BLOCK - position % BLOCK < HEAD:
            position += BLOCK - position % BLOCK
        head, start = data[position : position + HEAD], position + HEAD
        if len(head) < HEAD:
            return
        checksum, length, kind = struct.unpack("<IHB", head)
        position = start + length
        content = data[start:position]
        if len(content) < length or zlib.crc32(bytes([kind]) + content) != checksum:
            return
        yield kind, content


def contents(data: bytes) -> Iterator[bytes]:
    """Yields what the whole records of a file hold; an end that is still being written is passed over."""
    assert data.startswith(HEADER), "no header of W&B"
    parts = b""
    for kind, content in chunks(data):
        parts = content if kind in (FULL, FIRST) else parts + content
        if kind in (FULL, LAST):
            yield parts


def records(path: Path) -> Iterator[Any]:
    """Yields the records of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    for content in contents(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        yield record


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


def start(path: Path) -> dict[str, Any]:
    """What the run was opened with."""
    run = next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
    return {"run_group": run.run_group, "job_type": run.job_type, "tags": list(run.tags)}


def summary(path: Path) -> dict[str, Any]:
    """What was written to the run's summary by itself."""
    found = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "summary":
            found.update({item.key or "/".join(item.nested_key): item.value_json for item in record.summary.update})
    return {name: json.loads(text) for name, text in found.items()}
