"""Where a benchmark runs: the process's settings, and what is known of the machine."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["machine", "peak_memory", "resident_memory", "start_with_settings"]

# One thread of torch; and one heap for all threads of Python, which sides in threads share with the main thread:
# glibc's further heaps give memory back to the system in another way, which costs time.
_SETTINGS = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


def start_with_settings(module: str) -> None:
    """Starts this process anew if it has not been started with the settings that a benchmark needs.

    Args:
        module: The module that runs.
    """
    if any(os.environ.get(name) != value for name, value in _SETTINGS.items()):
        os.environ.update(_SETTINGS)
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
    torch.set_num_threads(1)


def peak_memory() -> int:
    """Bytes that this process has had in RAM at most, on Linux.

    Not ``ru_maxrss``: a process inherits that of the one that has started it.
    """
    return _status("VmHWM")


def resident_memory() -> int:
    """Bytes that this process has in RAM now, on Linux."""
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def machine(*packages: str) -> dict[str, Any]:
    """Describes where a run happens, and how busy it is as it begins."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "versions": versions,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": round(os.getloadavg()[0], 2),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
