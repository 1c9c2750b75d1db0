"""How the C library keeps memory that training frees, to use it again."""

import ctypes
import os
import platform

__all__ = ["keep_freed_memory"]

# As <malloc.h> numbers them; the second cannot be larger than 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_IN_HEAP = 1 << 28, 1 << 25
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Lets glibc keep up to 256 MiB of freed memory, and take matrices of up to 32 MiB from it.

    Otherwise it gives large tensors back to the system as they are freed, and every step waits for empty pages anew.
    It is left as it is where the environment says how memory is to be kept.

    Returns:
        Whether there is a glibc, and it does so now.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _CHOSEN_BY_USER):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP))
