"""Makes the C library keep memory that training frees, to use it again."""

import ctypes
import os
import platform

__all__ = ["keep_freed_memory"]

# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>: keep up to 256 MiB, for blocks up to 32 MiB (the maximum).
_OPTIONS = ((-1, 1 << 28), (-3, 1 << 25))
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Lets glibc keep large matrices that steps free, unless environment variables already set this."""
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in _CHOSEN_BY_USER):
        for option, value in _OPTIONS:
            ctypes.CDLL(None).mallopt(option, value)
