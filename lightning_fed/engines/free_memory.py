"""How much memory may be filled: of a GPU, or of the machine and the container that this process is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

__all__ = ["container_bytes", "free_bytes"]

# The files of a control group: its limit, its use, and what of that are files which the kernel drops when asked.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Returns half of a GPU's free memory, or a quarter of what the machine and the container have left."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    pages = next((name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in names), None)
    machine = 2**32 if pages is None else os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    container = container_bytes()
    return (machine if container is None else min(machine, container)) // 4


def container_bytes(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns what the limits of this process's control groups leave (Linux, versions 1 and 2); None without any.

    The limit of every parent holds too. As container runtimes do, files that are merely cached do not count as used.

    Args:
        membership: Names the groups of this process, one line for each hierarchy: NUMBER:CONTROLLERS:PATH.
        mount: Where the groups are folders.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # another system
        return None
    left = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            left += [_left(folder, *_V2) for folder in _with_parents(mount, path)]
        elif "memory" in controllers.split(","):
            left += [_left(folder, *_V1) for folder in _with_parents(mount / "memory", path)]
    return min((bytes for bytes in left if bytes is not None), default=None)


def _with_parents(root: Path, path: str) -> Iterator[Path]:
    """Yields a group's folder and those of its parents; within a container often only the root is there."""
    parts = PurePosixPath(path).parts[1:]
    for count in range(len(parts), -1, -1):
        if ".." not in parts[:count]:  # a group outside of what this process may see
            yield root.joinpath(*parts[:count])


def _left(folder: Path, limit: str, use: str, cached: str) -> int | None:
    """Returns what one group leaves; None if it has no limit, or no such files."""
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return None
        used = int((folder / use).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(int(most) - used + int(stat.get(cached, 0)), 0)
    except (OSError, ValueError):
        return None
