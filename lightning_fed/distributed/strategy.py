"""The Fabric strategy whose processes train different clients of a cohort and never share gradients."""

import atexit
import builtins
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from signal import Signals
from typing import Any, TypeVar

from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from torch import Tensor
from torch import distributed as dist
from torch.nn import Module

from lightning_fed.distributed.processes import Processes

__all__ = ["NAME", "ClientsStrategy", "processes_of"]

NAME = "clients"

_ALONE = Processes()

_T = TypeVar("_T")
_POLL_S, _END_S = 0.5, 30.0


class ClientsStrategy(DDPStrategy):
    """Holds processes together that train different clients; set by ``strategy: clients``, or by ``devices`` alone.

    Started as Fabric starts those of DDP: by the first one, by torchrun, or by SLURM. Modules are not wrapped and
    gradients stay where they are. Small objects go through gloo on the host, tensors of a GPU through NCCL.

    Args:
        timeout: How long a process waits for another one that lives: longer than the difference of their shares of a
            round can be.
        **kwargs: Passed to Fabric's strategy.

    Attributes:
        processes: The processes of the run, as soon as Fabric has said how many they are.
    """

    processes: Processes

    def __init__(self, timeout: timedelta = timedelta(hours=6), **kwargs: Any) -> None:
        super().__init__(timeout=timeout, start_method="popen", **kwargs)
        self._backward_sync_control = None

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]  # Fabric's wraps it
        """Returns the module as it is."""
        return module

    def setup_environment(self) -> None:
        """Waits for all processes."""
        super().setup_environment()
        atexit.register(_part)
        self._launcher.joined.set()  # type: ignore[union-attr]  # made below

    def find_lost(self) -> str:
        """Says which process has ended, as far as this one knows."""
        return self._launcher.find_lost() or "another one"  # type: ignore[union-attr]  # made below

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all processes."""
        self.processes.exchange(None, "barrier")

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """Returns the object of one process on all."""
        return self.processes.exchange(obj, "broadcast")[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether all processes, or any, say so."""
        return (builtins.all if all else any)(self.processes.exchange(bool(decision), "decision"))

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduces a tensor over the processes, in place."""
        self.processes.exchange(None, "all_reduce")
        return super().all_reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stacks the tensors of all processes."""
        self.processes.exchange(None, "all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        self.processes = Processes(self.global_rank, self.world_size, self.find_lost)

    def _get_process_group_backend(self) -> str:
        """Lets objects travel over the host's sockets, which close when a process dies; NCCL's wait."""
        tensors = super()._get_process_group_backend()
        return "cpu:gloo,cuda:nccl" if tensors == "nccl" else tensors


class _Launcher(_SubprocessScriptLauncher):
    """Starts the script again for each further process, as Fabric does, and sees how they end.

    Fabric's kills the first process within seconds after another has failed, without a word. Here the others raise an
    error of their own at their next exchange; only before all have joined there is none, and the first process ends.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.joined = threading.Event()  # set when all processes have found each other

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts the processes of this node and calls a function in this one."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            atexit.register(self._end, _END_S)
            threading.Thread(target=self._watch, daemon=True).start()
        _set_num_threads_if_needed(self.num_processes)
        return function(*args, **kwargs)

    def find_lost(self) -> str | None:
        """Says which of the processes started here has ended badly; waits a moment for its end."""
        deadline = time.monotonic() + 2.0
        while self.procs and time.monotonic() < deadline:
            for rank, process in enumerate(self.procs, 1):
                if process.poll():
                    return f"process {rank} (pid {process.pid}, {_how(process.returncode)})"
            time.sleep(0.05)
        return None

    def _watch(self) -> None:
        """Ends this process if another one ends before it has joined: nothing else would notice."""
        while not self.joined.wait(_POLL_S):
            for rank, process in enumerate(self.procs, 1):
                if process.poll() is not None and not self.joined.is_set():
                    sys.stderr.write(
                        f"Expected process {rank} to join the run, but it has ended before ({_how(process.returncode)})"
                        ": each process runs the whole script, which must come to the same call of the trainer.\n"
                    )
                    sys.stderr.flush()
                    self._end(0.0)
                    os._exit(1)

    def _end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.procs:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
            if process.poll() is None:
                process.kill()


def _part() -> None:
    """Ends torch's threads, which would end the interpreter otherwise."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _how(code: int) -> str:
    return f"killed by {Signals(-code).name}" if code < 0 else f"exit code {code}"


STRATEGY_REGISTRY.register(
    NAME,
    ClientsStrategy,
    description="Processes that train different clients of a cohort",
    override=True,
)


def processes_of(fabric: Fabric) -> Processes:
    """Returns the processes that share a run."""
    return fabric.strategy.processes if isinstance(fabric.strategy, ClientsStrategy) else _ALONE
