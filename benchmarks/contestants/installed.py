"""Which other frameworks are installed, and how they come to be."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["PEERS", "install", "why_not"]

# What a peer is called here, its distribution, and what pip is asked for.
PEERS = {
    "flower": ("flwr", "flwr[simulation]"),
    "pfl": ("pfl", "pfl[pytorch]"),
    "fedlab": ("fedlab", "fedlab"),
}

_REASONS = Path(sys.prefix) / "peers-not-installed.json"


def install() -> None:
    """Installs the peers one by one, and keeps pip's reason for each that cannot be."""
    reasons = {}
    for peer, (_, requirement) in PEERS.items():
        command = [sys.executable, "-m", "pip", "install", requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["pip gave no reason"]
            reasons[peer] = f"pip install {requirement!r} failed: {errors[-1]}"
        print(f"{peer}: {reasons.get(peer, 'installed')}", flush=True)
    _REASONS.write_text(json.dumps(reasons, indent=2) + "\n")


def why_not(peer: str) -> str | None:
    """Returns the reason why a peer is not there, None if it is."""
    try:
        version(PEERS[peer][0])
    except PackageNotFoundError:
        reasons = json.loads(_REASONS.read_text()) if _REASONS.exists() else {}
        return str(reasons.get(peer, "not installed: run `make bench-peers`"))
    return None
