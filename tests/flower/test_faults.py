"""Nodes and servers that are killed, late, back or new, as processes: the run is that of the clients that entered."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.flower_net import ROOT, Net, alive, wait_for
from lightning_fed.cli.flower.command import NodeCLI
from lightning_fed.engines.fleet.packets import unpack
from lightning_fed.trainer.fleet import LocalFleet, Node
from tests.flower.test_methods import BASE, CLIENTS, gap, in_process, weights

pytestmark = pytest.mark.slow

# Clients keep a head of their own, so that one who goes on from another round's would show.
METHOD = f"{BASE} --client FedPer --trainer.clients_per_round 20"
PARTS = [range(9), range(9, 20)]


class Forgetful(LocalFleet):
    """Loses what the second node replies in some rounds."""

    lost: tuple[int, ...] = ()

    def ask(self, packets: Mapping[str, bytes]) -> dict[str, bytes | str]:
        replies = super().ask(packets)
        facts = [unpack(packet)[0] for packet in packets.values()]
        if facts[0]["kind"] == "train" and facts[0]["round"] in self.lost:
            replies.pop("1", None)
        return replies


def failed(run: Path) -> list[float]:
    """How many clients had failed in each round that has ended."""
    if not (run / "metrics.csv").exists():
        return []
    with (run / "metrics.csv").open() as file:
        return [float(row.get("clients/failed") or 0) for row in csv.DictReader(file)][1:]


def test_nodes_that_are_killed_late_back_or_new(tmp_path: Path) -> None:
    words = f"{METHOD} --trainer.tolerance.max_diverged 0.95 --trainer.max_rounds 60"
    with Net(tmp_path) as net:
        net.new("faults", *words.split())
        workers = [net.start_worker("faults", node, "--clients", CLIENTS[node]) for node in net.nodes]
        for worker in workers:
            net.await_worker(worker)
        folder = tmp_path / "runs" / "faults" / "version_0"
        net.submit("faults", "--trainer.name faults", deadline=15.0)

        def happens(failures: int) -> None:
            """Waits for a round that ends now with so many failures."""
            since = len(failed(folder))
            wait_for(lambda: failures in failed(folder)[since:], f"{failures} failures", 240)

        happens(0)
        net.end("node1", signal.SIGKILL)  # in the middle of whatever it does
        happens(11)
        net.start_node(1)  # under another name; its worker has lived on
        happens(0)
        os.killpg(net.started[workers[1]].pid, signal.SIGSTOP)  # late
        happens(11)
        os.killpg(net.started[workers[1]].pid, signal.SIGCONT)
        happens(0)
        net.end(workers[1], signal.SIGKILL)
        net.end("node1")
        happens(11)
        shutil.copytree(
            tmp_path / "site1" / "faults", tmp_path / "site2" / "faults", ignore=shutil.ignore_patterns("*.sock")
        )
        net.start_node(2)  # a new node, which has got the records of the clients
        net.await_worker(net.start_worker("faults", 2, "--clients", CLIENTS[1]))
        happens(0)
        net.end("link", signal.SIGTERM)  # the run is told to end
    wait_for(lambda: not alive(net.mark), "the end of all that was started", 30)
    last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["federated"]["round"]
    failures = failed(folder)[:last]
    assert set(failures) == {0.0, 11.0}
    expect_as_if_lost(words, [at for at, count in enumerate(failures, 1) if count], last, folder)


def expect_as_if_lost(words: str, lost: list[int], last: int, folder: Path) -> None:
    """The run is that of nodes in one process, of which the second has lost its replies in these rounds."""
    nodes = {}
    for name, clients in enumerate(PARTS):
        cli = NodeCLI(words.split(), builds=True)
        nodes[str(name)] = Node(cli.trainer, cli.model, cli.datamodule, list(clients))
    server = NodeCLI(
        [*words.split(), "--trainer.max_rounds", str(last), "--trainer.default_root_dir", str(folder)], builds=True
    )
    server.trainer.fleet = fleet = Forgetful(nodes)
    fleet.lost = tuple(lost)
    server.trainer.fit(server.model, datamodule=server.datamodule)
    assert gap(server.model.state_dict(), weights(folder)) == 0


@pytest.mark.parametrize("database", [True, False], ids=["with a database", "without"])
def test_a_server_that_is_killed_goes_on_where_it_was(database: bool, tmp_path: Path) -> None:
    """Workers live on. So do SuperNodes, if the new SuperLink knows them; else they end, and are started anew."""
    with Net(tmp_path, database=database) as net:
        net.new("killed", *METHOD.split())
        workers = [net.start_worker("killed", node, "--clients", CLIENTS[node]) for node in net.nodes]
        for worker in workers:
            net.await_worker(worker)
        folder = tmp_path / "runs" / "killed" / "version_0"
        net.submit("killed", "--trainer.name killed")
        wait_for(lambda: len(failed(folder)) >= 2, "two rounds", 240)
        net.end("link", signal.SIGKILL)
        (tmp_path / "link.log").unlink()
        done = len(failed(folder))
        assert done < 5
        net.start_link()
        for node in [] if database else net.nodes:
            process = net.started[f"node{node}"]
            wait_for(lambda process=process: process.poll() is not None, "the end of a node", 240)
            net.start_node(node)
        lives_on = [net.started[name] for name in (*workers, *(f"node{node}" for node in net.nodes))]
        net.await_run(net.submit("killed", "--trainer.name killed --ckpt_path last"))
        assert all(process.poll() is None for process in lives_on)
    assert gap(in_process(METHOD, tmp_path / "undisturbed")[0], weights(folder)) == 0
    assert failed(folder) == [0.0] * 5


def test_a_node_that_lies_is_refused_named_and_counted(tmp_path: Path) -> None:
    words = f"{METHOD} --trainer.tolerance.max_diverged 0.95 --trainer.max_rounds 6"
    with Net(tmp_path) as net:
        net.new("hostile", *words.split())
        honest = net.start_worker("hostile", 0, "--clients", CLIENTS[0])
        liar = Path(__file__).with_name("hostile_node.py")
        net.start("liar", "python", liar, "node", "site1/hostile", "--clients", CLIENTS[1])
        for worker in (honest, "liar"):
            net.await_worker(worker)
        run = net.submit("hostile", "--trainer.name hostile")
        net.await_run(run)
        said = " ".join(net.said(run).split())
    folder = tmp_path / "runs" / "hostile" / "version_0"
    assert failed(folder) == [0.0, 11.0, 11.0, 11.0, 11.0, 0.0]
    whys = ["got (4160,) in", "got (4159,) in", "Expected a reply of at most", "Expected a reply to the question"]
    for at, why in enumerate(whys, 2):
        assert re.search(rf"Client 9 failed in round {at} [^.]*: node \d+: [^.]*{re.escape(why)}", said)
    expect_as_if_lost(words, [2, 3, 4, 5], 6, folder)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_harness_that_is_ended_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "benchmarks.flower_net", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        lines = (line.strip() for line in harness.stdout)
        mark = next(line for line in lines if line.startswith(f"{harness.pid}-"))
        assert len(alive(mark)) >= 4
        harness.send_signal(how)
        harness.wait(60)
    wait_for(lambda: not alive(mark), "the end of all that it started", 30)
