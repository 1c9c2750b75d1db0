"""A run with TLS and keys of nodes: who has no key that the server knows does not take part."""

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
    trust = tmp_path / "trust"
    trust.mkdir()
    subprocess.run(["sh", "-ec", CERTIFICATES], cwd=trust, check=True, capture_output=True)
    net = Net(tmp_path / "net", certificates=trust)
    try:
        net.start_link()
        for node in net.nodes:
            net.run("flwr", "supernode", "register", f"{trust}/node{node}.pub", "net")
            net.start_node(node)
        (trust / "stranger").rename(trust / "node2")
        net.start_node(2)
        wait_for(lambda: net.started["node2"].poll() is not None, "the end of a node that is not known")
        words = f"{BASE} --trainer.max_rounds 2"
        net.new("safe", *words.split())
        for node, clients in enumerate(("0:9", "9:20")):
            net.await_worker(net.start_worker("safe", node, "--clients", clients))
        net.await_run(net.submit("safe", "--trainer.name safe"))
    finally:
        net.close()
    assert gap(in_process(words, tmp_path)[0], weights(tmp_path / "net" / "runs" / "safe" / "version_0")) == 0
