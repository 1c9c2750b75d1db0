from pathlib import Path

import pytest
import yaml

from lightning_fed.lab.report.load import Method, group_runs, load_runs
from lightning_fed.lab.report.page import client_table, config_differences, split_pictures
from tests.lab.report.parts import write_run

FEDAVG = {
    "seed_everything": 0,
    "trainer": {"name": "avg", "max_rounds": 5},
    "aggregator": {"class_path": "FedAvg", "init_args": {"lr": 1.0, "mask": None}},
    "client": None,
}
GMA = {
    "seed_everything": 3,
    "trainer": {"name": "gma", "max_rounds": 5},
    "aggregator": {
        "class_path": "FedAvg",
        "init_args": {"lr": 1.0, "mask": {"class_path": "SignAgreement", "init_args": {"threshold": 0.4}}},
    },
    "client": [{"class_path": "FedProx", "init_args": {"mu": 0.1}}, {"class_path": "FedGA"}],
}


def methods_of(root: Path, **configs: object) -> list[Method]:
    for group, config in configs.items():
        path = write_run(root, group, 0, [0.5], label=group)
        if config is not None:
            (path / "config.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return group_runs(load_runs([root])[0], "test/acc")[0]


def test_differences_have_the_names_of_the_command_line(tmp_path: Path) -> None:
    assert config_differences(methods_of(tmp_path, a=FEDAVG, b=GMA)) == [
        ["option", "a", "b"],
        ["aggregator.mask", "null", "SignAgreement"],
        ["client", "null", ""],
        ["aggregator.mask.threshold", "", "0.4"],
        ["client.0", "", "FedProx"],
        ["client.0.mu", "", "0.1"],
        ["client.1", "", "FedGA"],
    ]


@pytest.mark.parametrize("other", [None, "", "- a list", "a: [broken", "a: !!python/object:os.x {}", "\0"])
def test_a_config_that_says_nothing_is_not_compared(tmp_path: Path, other: str | None) -> None:
    assert config_differences(methods_of(tmp_path, a=FEDAVG, b=other)) == []


def test_clients_are_read_whole(tmp_path: Path) -> None:
    table = tmp_path / "clients.csv"
    assert client_table(table) == []
    table.write_text("round,client,samples,classes,loss,acc\n3,0,65,2,0.804498,0.75\n3,100000,7,,nan,1\n3,1,6")
    assert client_table(table) == [
        ["round", "client", "samples", "classes", "loss", "acc"],
        ["3", "0", "65", "2", "0.8045", "0.75"],
        ["3", "100000", "7", "", "nan", "1"],
    ]


def test_each_picture_of_a_split_is_found_once(tmp_path: Path) -> None:
    methods = methods_of(tmp_path, a=None, b=None, c=None, d=None)
    for method, name, picture in zip(methods, ["split", "split", "sizes"], [b"1", b"1", b"2"], strict=False):
        (method.runs[0].path / f"{name}.png").write_bytes(picture)
    (methods[0].runs[0].path / "sizes.png").write_bytes(b"3")
    assert split_pictures(methods) == {b"1": ["a, seed 0", "b, seed 0"], b"2": ["c, seed 0"]}
