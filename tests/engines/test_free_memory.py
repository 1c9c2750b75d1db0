"""How much memory a container leaves, read from files as the kernel writes them; and that the engine asks."""

from pathlib import Path

import pytest
import torch

from lightning_fed.engines import free_memory
from lightning_fed.engines.free_memory import container_bytes, free_bytes, machine_bytes

V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), (
    "memory.max", "memory.current", "inactive_file",
)  # fmt: skip
GIB = 2**30


def membership(folder: Path, *lines: str) -> Path:
    path = folder / "of-this-process"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def group(folder: Path, names: tuple[str, str, str], limit: object, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\nactive_file 7\n")


def test_the_limit_less_what_is_used(tmp_path: Path) -> None:
    group(tmp_path / "job", V2, 4 * GIB, GIB, cached=0)
    assert container_bytes(membership(tmp_path, "0::/job"), tmp_path) == 3 * GIB


def test_cached_files_are_free(tmp_path: Path) -> None:
    """A container that has read a large data set has filled its limit with them."""
    group(tmp_path, V2, 4 * GIB, 4 * GIB, cached=3 * GIB)
    assert container_bytes(membership(tmp_path, "0::/"), tmp_path) == 3 * GIB


@pytest.mark.parametrize("tightest", ["user", "user/job", "user/job/step"])
def test_the_tightest_parent_counts(tmp_path: Path, tightest: str) -> None:
    for name in ("user", "user/job", "user/job/step"):
        group(tmp_path / name, V2, 2 * GIB if name == tightest else "max", GIB, cached=0)
    assert container_bytes(membership(tmp_path, "0::/user/job/step"), tmp_path) == GIB


def test_within_a_container_only_the_root_is_there(tmp_path: Path) -> None:
    group(tmp_path, V2, 2 * GIB, GIB, cached=0)
    for path in ("/docker/0123", "/../other", "/"):
        assert container_bytes(membership(tmp_path, f"0::{path}"), tmp_path) == GIB


def test_version_1_and_both_at_once(tmp_path: Path) -> None:
    group(tmp_path / "memory" / "docker" / "a:b", V1, 3 * GIB, 2 * GIB, cached=GIB // 2)
    group(tmp_path / "memory", V1, 0x7FFFFFFFFFFFF000, 9 * GIB, cached=0)
    lines = ("11:cpu,cpuacct:/docker/a:b", "4:hugetlb,memory:/docker/a:b", "1:name=systemd:/", "0::/system.slice")
    assert container_bytes(membership(tmp_path, *lines), tmp_path) == 3 * GIB // 2


def test_no_limit_and_no_such_system(tmp_path: Path) -> None:
    group(tmp_path, V2, "max", GIB, cached=0)
    assert container_bytes(membership(tmp_path, "0::/"), tmp_path) is None
    assert container_bytes(membership(tmp_path, "4:cpu:/", "0::/"), tmp_path / "nowhere") is None
    assert container_bytes(tmp_path / "missing", tmp_path) is None


def test_more_than_the_limit_is_nothing_left(tmp_path: Path) -> None:
    group(tmp_path, V2, GIB, 2 * GIB, cached=0)
    assert container_bytes(membership(tmp_path, "0::/"), tmp_path) == 0


def test_a_quarter_of_what_the_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_bytes(torch.device("cpu"))
    monkeypatch.setattr(free_memory, "container_bytes", lambda: 4096)
    assert free_bytes(torch.device("cpu")) == 1024 < free
    monkeypatch.setattr(free_memory, "container_bytes", lambda: 2**62)
    assert 1024 < free_bytes(torch.device("cpu")) < 2**60


def test_cached_files_of_the_machine_are_free_too(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  24000 kB\nMemFree:  9 kB\nMemAvailable:  9000 kB\nHugePages: 0\n")
    assert machine_bytes(tmp_path / "meminfo") == 9000 * 1024
    total = machine_bytes(tmp_path / "of another system")
    assert GIB // 4 < machine_bytes() <= total
