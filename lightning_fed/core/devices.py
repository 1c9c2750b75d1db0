"""Operations that differ between accelerators and the CPU."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.errors import FederatedError

__all__ = [
    "copy_each", "copy_into", "cudnn_layer", "data_to", "device_streams", "free_memory", "full_precision",
    "is_device_fault", "on_each", "out_of_memory", "same_each", "same_values", "seed_devices", "set_device_streams",
    "single_at_least", "to_device", "why_not_mixed", "wide_dtype",
]  # fmt: skip

# For these dtypes torch runs an operation on a list of tensors as one kernel; CUDA refuses some of the others.
_LISTED = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip


@cache
def _accelerator() -> Any:
    """Returns torch's module for the kind of device that this process may use beside the CPU, None without one."""
    try:
        device = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        return None
    return None if device is None else torch.get_device_module(device)


def _in_use() -> Any:
    """Returns the same module, but None if nothing has used the device yet: random streams alone must not start it."""
    module = _accelerator()
    asked = None if module is None else getattr(module, "is_initialized", None) or module.is_available
    return module if asked is not None and asked() else None


def seed_devices(seed: int) -> None:
    """Seeds the random streams of all devices in use but the CPU."""
    if (module := _in_use()) is not None:
        seed_all = getattr(module, "manual_seed_all", None) or module.manual_seed  # MPS is one
        seed_all(seed)


def device_streams() -> list[Tensor]:
    """Returns the states of the random streams of all devices in use but the CPU."""
    if (module := _in_use()) is None:
        return []
    return list(module.get_rng_state_all()) if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]


def set_device_streams(states: list[Tensor]) -> None:
    """Puts back what ``device_streams`` returned."""
    module = _accelerator()
    if states and hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(states)
    elif states:
        module.set_rng_state(states[0])


def is_device_fault(error: BaseException) -> bool:
    """Returns whether a device reports a fault of any work queued before; nothing runs on the device any more."""
    known = isinstance(error, getattr(torch, "AcceleratorError", ()))  # torch 2.6 has none
    return known or (isinstance(error, RuntimeError) and str(error).startswith("CUDA error"))


def cudnn_layer(module: nn.Module, device: torch.device) -> str | None:
    """Names a recurrent layer of a module that cuDNN computes on a device; None if there is none."""
    if device.type != "cuda" or not torch.backends.cudnn.enabled:
        return None
    return next((type(part).__name__ for part in module.modules() if isinstance(part, nn.RNNBase)), None)


def why_not_mixed(module: nn.Module, device: torch.device) -> str | None:
    """Says why a device does not train a module's recurrent layers under ``bf16-mixed``; None if it does."""
    if layer := cudnn_layer(module, device):
        return f"cuDNN would compute its {layer} in float16 without a loss scale"
    has_lstm = any(isinstance(part, nn.LSTM) for part in module.modules())
    return "this CPU has no LSTM in bfloat16" if has_lstm and device.type == "cpu" and not _lstm_in_bfloat16() else None


@torch.inference_mode(False)
@torch.enable_grad()
def _lstm_in_bfloat16() -> bool:
    # Which CPUs have one differs between versions of oneDNN, and no function of torch tells it.
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16):
        try:
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))[0].sum().backward()
        except RuntimeError:
            return False
    return True


def free_memory(device: torch.device) -> int:
    """Returns the free bytes of a GPU, including memory that torch has reserved there and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


@contextmanager
def full_precision() -> Iterator[None]:
    """Lets no device compute in TF32 or bfloat16 with numbers of float32 within the block."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    # How each is read, set, and set strictly; the parts are for torch's newer way, which the older cannot always tell.
    flags: Any = [
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", [cuda, mkldnn], ["matmul"]),
        (partial(getattr, cudnn, "allow_tf32"), partial(setattr, cudnn, "allow_tf32"), False, [cudnn, mkldnn],
         ["conv", "rnn"]),
    ]  # fmt: skip
    changes: list[tuple[Any, Any, Any]] = []
    for read, write, strict, kinds, names in flags:
        try:
            changes.append((write, read(), strict))
        except RuntimeError:
            parts = [part for kind in kinds for name in names if (part := getattr(kind, name, None)) is not None]
            changes += [(partial(setattr, part, "fp32_precision"), part.fp32_precision, "ieee") for part in parts]
    changes = [each for each in changes if each[1] not in ("none", each[2])]
    try:
        for write, _, strict in changes:
            write(strict)
        yield
    finally:
        for write, before, _ in changes:
            write(before)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Sends a host tensor to a device; to a GPU from pinned memory, without waiting for the copy."""
    if device.type == "cpu":
        return values
    # On other devices the host tensor could be freed before the copy has ended.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def data_to(values: Tensor, device: torch.device | str) -> Tensor:
    """Moves a tensor of a data set to a device, and says what to change where it does not fit there."""
    try:
        return values.to(device)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise FederatedError(
            f"Expected the data to fit into the memory of {device}, but {values.nbytes / 2**30:.1f} GiB does not fit: "
            "set `--data.in_memory false`, which sends them batch by batch."
        ) from error


def out_of_memory(error: Exception) -> bool:
    """Returns whether an exception means out of memory; on the CPU torch has no class for it."""
    told = ("not enough memory", "an't allocate memory", "out of memory")
    by_text = isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    return by_text or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def copy_into(out: Tensor, values: Tensor) -> None:
    """Copies a tensor into another; a copy from the host to a GPU uses pinned memory and is not waited for."""
    is_sent = out.device.type == "cuda" and values.device.type == "cpu"
    out.copy_(values.pin_memory() if is_sent else values, non_blocking=is_sent)


def on_each(operation: str, *columns: Iterable[Tensor], args: tuple[Any, ...] = (), **options: Any) -> None:
    """Calls an in-place method on each tensor of the first list, on a device as one kernel for all of one dtype.

    The call gets one tensor from each further list, and then ``args`` and options.
    """
    groups: dict[tuple[Any, ...], list[tuple[Tensor, ...]]] = defaultdict(list)
    for row in zip(*columns, strict=True):
        listed = all(type(tensor) is Tensor and tensor.dtype in _LISTED for tensor in row)
        groups[(listed, *((tensor.dtype, tensor.device) for tensor in row))].append(row)
    for (listed, *_), rows in groups.items():
        if listed:  # in parts of one dtype each: torch would take a mixed list one by one
            getattr(torch, f"_foreach_{operation}")(*map(list, zip(*rows, strict=True)), *args, **options)
            continue
        for first, *others in rows:
            getattr(first, operation)(*others, *args, **options)


def copy_each(out: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copies tensors into others; see ``on_each``."""
    on_each("copy_", out, values)


def same_each(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[bool]:
    """Says of each pair of tensors whether they hold the same numbers, in one read of the device; NaN is NaN."""
    same = [((a == b) | ((a != a) & (b != b))).all() if a.shape == b.shape else a.new_zeros((), dtype=torch.bool)
            for a, b in pairs]  # fmt: skip
    found: list[bool] = torch.stack(same).tolist() if same else []
    return found


def same_values(one: Tensor, other: Tensor) -> bool:
    """Says whether two tensors hold the same numbers; NaN is the same as NaN."""
    return same_each([(one, other)])[0]


def wide_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype to sum in: float64, or float32 on a device without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def single_at_least(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to keep numbers in: float32 for narrower floating-point numbers, otherwise their own."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else dtype
