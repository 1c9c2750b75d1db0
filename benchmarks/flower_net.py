"""Flower's processes on loopback, `python -m benchmarks.flower_net FOLDER`: whoever starts them also ends them."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[1]
MARK = "LIGHTNING_FED_NET"  # whose value names all processes of a net
CONNECTION = '[superlink]\ndefault = "net"\n[superlink.net]\naddress = "{host}:{port}"\n{trust}\n'


def free_port() -> int:
    """Returns a port that nobody uses now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _dies_with_parent() -> None:
    """Lets Linux end a process if this one is killed, which then has no time to do it."""
    with suppress(OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def alive(mark: str) -> list[str]:
    """The processes of a net that still run."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            own = f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0")
            if own and "State:\tZ" not in (place / "status").read_text():
                found.append((place / "cmdline").read_text().replace("\0", " "))
    return found


def wait_for(is_so: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """Waits until something is so, and returns it; raises after some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := is_so():
            return found
        time.sleep(0.1)
    raise TimeoutError(f"{what} took more than {seconds:.0f} s")


class Net:
    """Flower's processes, each of which leads a group of its own.

    Args:
        folder: Where they work; `apps/` has the apps.
        nodes: How many SuperNodes to start.
        certificates: The folder of ca.pem, server.pem, server.key and, for each node, node0 and so on; None for no TLS.
        database: Whether the SuperLink keeps what it knows in a file, for one that is started after it.
    """

    def __init__(self, folder: Path, nodes: int = 2, certificates: Path | None = None, database: bool = False) -> None:
        self.folder, self.certificates, self.mark = folder, certificates, f"{os.getpid()}-{time.time_ns()}"
        self.host = "127.0.0.1" if certificates is None else "localhost"
        self.port, self.started = free_port(), dict[str, subprocess.Popen[bytes]]()
        (folder / "home").mkdir(parents=True, exist_ok=True)
        trust = "insecure = true" if certificates is None else f'root-certificates = "{certificates}/ca.pem"'
        (folder / "home" / "config.toml").write_text(CONNECTION.format(host=self.host, port=self.port, trust=trust))
        self.env = {
            **os.environ, MARK: self.mark, "PATH": f"{BIN}:{os.environ['PATH']}", "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "NO_COLOR": "1", "COLUMNS": "200",
        }  # fmt: skip
        self.env["PYTHONPATH"] = str(ROOT)
        self.nodes, self.kept = range(nodes), ["--database", folder / "superlink.db"] if database else []

    def __enter__(self) -> "Net":
        try:
            self.start_link()
            for node in self.nodes:
                self.start_node(node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                [str(BIN / str(command[0])), *map(str, command[1:])], env=self.env, cwd=self.folder, stdout=log,
                stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_dies_with_parent,
            )  # fmt: skip
        return self.started[name]

    def log(self, name: str) -> str:
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def start_link(self) -> None:
        safe = self.certificates
        tls = ["--insecure"] if safe is None else [
            "--ssl-ca-certfile", safe / "ca.pem", "--ssl-certfile", safe / "server.pem",
            "--ssl-keyfile", safe / "server.key", "--enable-supernode-auth",
        ]  # fmt: skip
        where = [
            "--host",
            "127.0.0.1" if safe is None else "0.0.0.0",
            "--port",
            self.port,
            "--disable-runtime-dependency-installation",
        ]
        self.start("link", "flower-superlink", *tls, *where, *self.kept)
        wait_for(self._listens, "the SuperLink")

    def _listens(self) -> bool:
        with socket.socket() as line:
            return line.connect_ex(("127.0.0.1", self.port)) == 0

    def start_node(self, node: int) -> None:
        safe = self.certificates
        tls = ["--insecure"] if safe is None else [
            "--root-certificates", safe / "ca.pem", "--auth-supernode-private-key", safe / f"node{node}",
        ]  # fmt: skip
        folder = self.folder / f"site{node}"
        folder.mkdir(exist_ok=True)
        where = ["--superlink", f"{self.host}:{self.port}", "--host", "127.0.0.1", "--port", free_port()]
        self.start(f"node{node}", "flower-supernode", *tls, *where, "--node-config", f'folder="{folder}"')

    def new(self, app: str, *words: str) -> None:
        """Writes an app, and copies it to the nodes, as its users do."""
        self.run("lightning-fed", "flower", "new", f"apps/{app}", *words)
        for node in self.nodes:
            subprocess.run(["cp", "-r", f"apps/{app}", f"site{node}/{app}"], cwd=self.folder, check=True)

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def start_worker(self, app: str, node: int, *words: str) -> str:
        name = f"worker-{app}-{node}"
        self.start(name, "lightning-fed", "flower", "node", f"site{node}/{app}", *words)
        return name

    def await_worker(self, worker: str) -> None:
        wait_for(lambda: self.started[worker].poll() is not None or "ready for" in self.log(worker), worker, 300)
        assert self.started[worker].poll() is None, self.log(worker)

    def submit(self, app: str, options: str = "", **config: object) -> str:
        """Starts a run of an app; returns its id."""
        given = {"options": f'"{options}"', "nodes": len(self.nodes), **config}
        text = " ".join(f"{name}={value}" for name, value in given.items())
        said = self.run("flwr", "run", f"apps/{app}", "net", "--run-config", text)
        found = re.search(r"started run (\d+)", said)
        assert found, said
        return found.group(1)

    def await_run(self, run: str, seconds: float = 600) -> None:
        """Waits until a run has ended; the SuperLink says so long before `flwr` could be asked."""
        wait_for(lambda: re.search(rf"Finished task \d+ of run {run}", self.log("link")), "the run", seconds)

    def said(self, run: str) -> str:
        """What the ServerApp has printed."""
        return self.run("flwr", "log", run, "net", "--show")

    def end(self, name: str, how: int = signal.SIGTERM) -> None:
        """Ends a process and all that it has started, some of it in a session of its own."""
        process = self.started.pop(name)
        family = _family(process.pid)
        for number in (how, signal.SIGKILL):
            for member in family:
                with suppress(ProcessLookupError):
                    os.kill(member, number)
            with suppress(TimeoutError):
                wait_for(lambda: process.poll() is not None and not any(map(_runs, family)), name, 10)
                break

    def close(self) -> None:
        for name in list(self.started):
            with suppress(Exception):
                self.end(name)


def _state(process: int) -> list[str]:
    """Returns what the system says of a process, from its state on; nothing of one that has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _runs(process: int) -> bool:
    return _state(process)[:1] not in ([], ["Z"])


def _family(process: int) -> list[int]:
    """Returns a process, and all that it and these have started."""
    everyone = [int(place.name) for place in Path("/proc").glob("[0-9]*")]
    own = [each for each in everyone if _state(each)[1:2] == [str(process)]]
    return [process, *(one for child in own for one in _family(child))]


def main() -> None:
    """Holds a net with one worker until it is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with Net(Path(sys.argv[1])) as net:
        net.new("held", "--config", "quickstart")
        net.await_worker(net.start_worker("held", 0, "--clients", "0:20"))
        print(net.mark, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
