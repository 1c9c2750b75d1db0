"""How much memory may be filled: of a GPU, or of the machine and the container that this process is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

__all__ = ["container_bytes", "free_bytes", "machine_bytes"]

# The files of a control group: its limit, its use, and what of that are files which the kernel drops when asked.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Returns half of a GPU's free memory, or a quarter of what the machine and the container have left."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    machine = machine_bytes()
    container = container_bytes()
    return (machine if container is None else min(machine, container)) // 4


def machine_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Returns what the machine can give without swapping; where it does not say so, all that it has.

    Args:
        meminfo: Says on Linux how much there is; memory of files that are merely cached is available.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        has_pages = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ())
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if has_pages else 2**32


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
