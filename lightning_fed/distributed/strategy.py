"""The Fabric strategy for processes that train different clients of a cohort and never share gradients."""

import atexit
import builtins
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from signal import SIGTERM, Signals
from typing import Any, ClassVar, TypeVar

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _init_dist_connection, _set_num_threads_if_needed
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not declare it
from torch.nn import Module

from lightning_fed.distributed.processes import Processes
from lightning_fed.distributed.pulse import ENDED, Pulse, when_orphaned

__all__ = ["ClientsStrategy", "NAME", "processes_of"]

NAME = "clients"

_T = TypeVar("_T")
_POLL_S, _END_S = 0.5, 10.0
_PARENT = "LIGHTNING_FED_FIRST_PROCESS"


class ClientsStrategy(DDPStrategy):
    """Runs processes that train different clients; chosen by ``strategy: clients``, or just by ``devices``.

    Processes start as in Fabric's DDP: from the first process, by torchrun, or by SLURM. Modules are not wrapped, and
    gradients are not exchanged. Small objects go through gloo on the host, tensors of a GPU through NCCL.

    Args:
        timeout: How long a process waits for another one that lives. It must be longer than the processes can differ
            in the time for their part of a round.
        **kwargs: Passed to Fabric's strategy.

    Attributes:
        processes: The processes of the run, set when Fabric knows their number.
        silence_s: Seconds without a sign of life after which a process counts as lost, also while processes join.
    """

    silence_s = 1800.0
    pulse: ClassVar[Pulse | None] = None

    processes: Processes

    def __init__(self, timeout: timedelta = timedelta(days=7), **kwargs: Any) -> None:
        super().__init__(timeout=timeout, start_method="popen", **kwargs)
        self._backward_sync_control = None

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]  # Fabric's wraps it
        return module

    def setup_environment(self) -> None:
        launcher: Any = self._launcher  # made below
        threading.Thread(target=launcher.watch, args=(self.silence_s,), daemon=True).start()
        if ClientsStrategy.pulse is None and isinstance(self.cluster_environment, TorchElasticEnvironment):
            when_orphaned(_stop)
        super().setup_environment()
        launcher.joined.set()
        if ClientsStrategy.pulse is None:  # one for all trainers of a script, like torch's process group
            ClientsStrategy.pulse = Pulse(self.global_rank, self.world_size, dist.distributed_c10d._get_default_store())
            atexit.register(_part, ClientsStrategy.pulse, launcher)
        self.processes.pulse = launcher.pulse = ClientsStrategy.pulse
        launcher.pulse.limit_s = self.silence_s

    def _setup_distributed(self) -> None:
        """Lets torch's store listen only on this machine if all processes are here; the default is every interface."""
        environment = self.cluster_environment
        if dist.is_initialized() or self.num_nodes > 1 or isinstance(environment, TorchElasticEnvironment):
            super()._setup_distributed()
            return
        assert environment is not None
        self._set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        host, port, first = "127.0.0.1", environment.main_port, self.global_rank == 0
        listener = socket.create_server((host, port)).detach() if first else None
        options: dict[str, Any] = {"timeout": self._timeout}
        # In older versions of torch the libuv store does not accept a socket that already listens.
        options["store"] = TCPStore(
            host, port, self.world_size, first, master_listen_fd=listener, use_libuv=False, **options
        )
        if self.root_device.type != "cpu":
            options["device_id"] = self.root_device
        _init_dist_connection(environment, self._process_group_backend, **options)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.processes.exchange(None, "barrier")

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        return self.processes.exchange(obj, "broadcast")[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return (builtins.all if all else any)(self.processes.exchange(bool(decision), "decision"))

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        self.processes.exchange(None, "all_reduce")
        return super().all_reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self.processes.exchange(None, "all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        self.processes = Processes(self.global_rank, self.world_size, self._launcher.find_lost)

    def _get_process_group_backend(self) -> str:
        """Sends objects over the host's sockets, which close when a process dies; NCCL would wait."""
        tensors = super()._get_process_group_backend()
        return "cpu:gloo,cuda:nccl" if tensors == "nccl" else tensors


class _Launcher(_SubprocessScriptLauncher):
    """Starts the script again for each further process, as Fabric does, and notices how they end.

    Fabric's launcher kills the first process within seconds after another one fails, without a message. Here the others
    raise the error at their next exchange. Before all have joined there is no exchange, so each process ends itself.

    Attributes:
        joined: Set when all processes have found each other.
        pulse: From then on it tells the others of a process that has ended.
    """

    pulse: Pulse | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.joined = threading.Event()

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_PARENT] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[_PARENT]
            atexit.register(self.kill_others, _END_S)
        _set_num_threads_if_needed(self.num_processes)
        return function(*args, **kwargs)

    def find_lost(self) -> str:
        """Returns which process started here has failed, empty if none has; waits a moment for its end."""
        deadline = time.monotonic() + 2.0
        while self.procs and time.monotonic() < deadline:
            if lost := self._find_ended():
                return lost
            time.sleep(0.05)
        return ""

    def _find_ended(self, badly: bool = True) -> str:
        """Returns which process started here has ended, empty if none has."""
        for rank, process in enumerate(self.procs, 1):
            code = process.poll()
            if code or (code == 0 and not badly):
                how = f"killed by {Signals(-code).name}" if code < 0 else f"exit code {code}"
                return f"process {rank} (pid {process.pid}, {how})"
        return ""

    def kill_others(self, seconds: float = 0.0) -> None:
        """Kills the processes started here that do not end by themselves in time."""
        deadline = time.monotonic() + seconds
        for process in self.procs:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
            if process.poll() is None:
                process.kill()

    def watch(self, seconds: float) -> None:
        """Ends this process if another one ends before all have joined, or if joining takes longer than ``seconds``."""
        first, polls = os.environ.get(_PARENT), 0
        while not self.joined.wait(_POLL_S):
            polls += 1
            ended = self._find_ended(badly=False)
            if first is not None and os.getppid() != int(first):
                ended = "process 0"
            if ended:
                self._give_up(f"{ended} to join the run, but it has ended before")
            if polls * _POLL_S > seconds:
                self._give_up(f"all processes to join the run within {seconds / 60:.3g} minutes, but not all have")
        while self.procs:
            time.sleep(_POLL_S)
            if self.pulse is not None and (lost := self._find_ended()):
                self.pulse.note_loss(lost, ENDED)
                return

    def _give_up(self, what: str) -> None:
        if not self.joined.is_set():
            reason = "each process runs the whole script, which must come to the same call of the trainer"
            sys.stderr.write(f"Expected {what}: {reason}.\n")
            self.end_all()

    def end_all(self) -> None:
        """Kills this process and all that it has started."""
        self.kill_others()
        print(end="", flush=True)  # user code may have set `sys.stdout` to None
        sys.stderr.flush()
        os._exit(1)


def _stop() -> None:
    """Asks this process to stop after the round, and with it the others: a torchrun that was killed asks nobody."""
    sys.stderr.write("torchrun has ended without its processes, so the run stops after this round.\n")
    os.kill(os.getpid(), SIGTERM)


def _part(pulse: Pulse, launcher: _Launcher) -> None:
    """Ends the threads of this process. Those of torch would otherwise crash the interpreter at exit."""
    pulse.end()
    if not all(work.is_completed() for work in pulse.given_up):  # exit would wait for torch's threads
        launcher.end_all()
    if dist.is_initialized():
        dist.destroy_process_group()


STRATEGY_REGISTRY.register(NAME, ClientsStrategy, "Processes that train different clients of a cohort", override=True)


def processes_of(fabric: Fabric) -> Processes:
    """Returns the processes of a run."""
    return fabric.strategy.processes if isinstance(fabric.strategy, ClientsStrategy) else Processes()
