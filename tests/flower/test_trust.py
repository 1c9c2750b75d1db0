"""A run with TLS and keys of nodes: who has no key that the server knows does not take part."""

import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.flower_net import Net, wait_for
from tests.flower.test_methods import BASE, gap, in_process, weights

pytestmark = pytest.mark.slow

# As docs/network.md has it.
CERTIFICATES = """
openssl req -x509 -newkey rsa:3072 -nodes -days 365 -subj /CN=our-study -keyout ca.key -out ca.pem
openssl req -newkey rsa:3072 -nodes -subj /CN=localhost -keyout server.key -out server.csr
printf 'subjectAltName = DNS:localhost,IP:127.0.0.1' > server.ext
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -extfile server.ext -out server.pem
ssh-keygen -q -t ecdsa -b 384 -N '' -f node0
ssh-keygen -q -t ecdsa -b 384 -N '' -f node1
ssh-keygen -q -t ecdsa -b 384 -N '' -f stranger
"""


def test_a_run_by_tls_with_nodes_that_are_known(tmp_path: Path) -> None:
    """They stay known to a SuperLink that is started after one that was killed, as does a SuperNode that was killed."""
    trust = tmp_path / "trust"
    trust.mkdir()
    subprocess.run(["sh", "-ec", CERTIFICATES], cwd=trust, check=True, capture_output=True)
    net = Net(tmp_path / "net", certificates=trust, database=True)
    try:
        net.start_link()
        for node in net.nodes:
            net.run("flwr", "supernode", "register", f"{trust}/node{node}.pub", "net")
            net.start_node(node)
            wait_for(lambda name=f"node{node}": "SuperNode ID" in net.log(name), "a node")
        for name in ("link", "node0"):
            net.end(name, signal.SIGKILL)
        net.start_link()
        (trust / "stranger").rename(trust / "node2")
        net.start_node(2)
        wait_for(lambda: net.started["node2"].poll() is not None, "the end of a node that is not known")
        wait_for(lambda: starts_again(net, 0), "a node that is back", 240)
        words = f"{BASE} --trainer.max_rounds 2"
        net.new("safe", *words.split())
        for node, clients in enumerate(("0:9", "9:20")):
            net.await_worker(net.start_worker("safe", node, "--clients", clients))
        net.await_run(net.submit("safe", "--trainer.name safe"))
    finally:
        net.close()
    assert gap(in_process(words, tmp_path)[0], weights(tmp_path / "net" / "runs" / "safe" / "version_0")) == 0


def starts_again(net: Net, node: int) -> bool:
    """Starts a node; whether it stays, as it does once the SuperLink has missed the one before."""
    name = f"node{node}"
    (net.folder / f"{name}.log").write_text("")
    net.start_node(node)
    ended = wait_for(
        lambda: net.started[name].poll() is not None or "SuperNode ID" in net.log(name), "the node's start"
    )
    return bool(ended) and net.started[name].poll() is None
