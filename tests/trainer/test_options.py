"""Every bad argument of the trainer ends with one sentence that names the option."""

import math
from dataclasses import fields, replace
from datetime import timedelta
from inspect import signature
from typing import Any, get_type_hints

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import FedAvg
from lightning_fed.errors import FederatedError
from lightning_fed.runs.folder import FLAT_NAMES
from lightning_fed.sampling import BernoulliAvailability, Stragglers, UnequalWork, UniformSampler
from lightning_fed.trainer import Tolerance
from lightning_fed.trainer.options import GROUPS, TrainerOptions, batch_limit

COUNT = [0, -1, 1.5, "3", True, 2**63]
SHARE = [-1, -0.1, 1.5, "all", True, math.nan]
BAD: dict[str, list[Any]] = {
    "accelerator": ["abacus"],
    "devices": [0, "x", 10**6, "1000000", 10**30],
    "num_nodes": [*COUNT, 10**12],
    "strategy": ["ring"],
    "tolerance.process_timeout": [0, -1.0, "30", True, None, math.inf, 1e300, 10**400],
    "precision": ["16-mixed", "8", 7],
    "logger": ["wandb", 3, ["csv"]],
    "callbacks": [3, "FedAvg", [FedAvg], [FedAvg(), FedAvg()]],
    "default_root_dir": [3],
    "name": ["", "/a", "../a", "a/../b", ".", 3],
    "seed": [-1, 1.5, "0", True],
    "max_rounds": [*COUNT, None],
    "clients_per_round": [*SHARE, None, 0, 0.0],
    "local_epochs": [0, -1, 0.0, math.nan, math.inf, "2", True],
    "local_steps": COUNT,
    "local_schedule": ["never", None],
    "participation.sampler": ["uniform", 3, UniformSampler],
    "participation.availability": ["always", 0.5, BernoulliAvailability],
    "participation.stragglers": ["slow", 3, Stragglers],
    "participation.work": ["more", 3, UnequalWork],
    "check_val_every_n_rounds": [*COUNT, None],
    "check_test_every_n_rounds": COUNT,
    "limit_val_batches": SHARE,
    "limit_test_batches": SHARE,
    "limit_predict_batches": SHARE,
    "gradient_clip_val": [-1, -0.5, math.nan, "x", True, [1]],
    "gradient_clip_algorithm": ["median", 1],
    "tolerance.max_diverged": [1.0, -0.1, float("nan"), "x", True],
    "tolerance.on_client_error": ["ignore", None, True, "skip"],
    "full_gradients.mode": ["test", True],
    "full_gradients.batch_size": [0, -1, 2.0, True],
    "full_gradients.weight_decay": [1e-4, "yes", None],
    **{name: [3, "x", {}] for name in GROUPS},
    "client_states": ["ram", None, True],
    "engine": ["parallel", None, True],
    "chunk_size": [0, -1, 1.5, "10", True],
    "compile": ["yes", "lite", None, 2],
    "memory_format": ["contiguous", None, True],
    "accumulate_grad_batches": [*COUNT, {0: 2}],
    "deterministic": ["maybe", 3],
    "fast_dev_run": [-1, 1.5, "x"],
    "enable_progress_bar": ["x", 3],
    "enable_checkpointing": ["x", 3],
    "enable_model_summary": ["x", 3],
    "benchmark": ["x", 3],
    "detect_anomaly": ["x", 3],
    "tolerance.on_write_error": ["skip", True, None],
    "max_time": ["x", "1:2", "", 3, [1], {"foo": 1}, {"minutes": "x"}, timedelta(seconds=-1)],
}
CASES = [(name, value) for name, bad in BAD.items() for value in bad]


def make(**options: Any) -> FederatedTrainer:
    defaults = {"accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False}
    flat = {path: name for name, path in FLAT_NAMES.items()}
    return FederatedTrainer(**{**defaults, **{flat.get(name, name): value for name, value in options.items()}})


def test_every_argument_of_the_trainer_is_covered() -> None:
    parts = {f"{name}.{field.name}" for name, kind in GROUPS.items() for field in fields(kind)}
    assert parts == set(FLAT_NAMES.values())
    assert set(BAD) == parts | set(signature(FederatedTrainer.__init__).parameters) - {"self", "lightning"}


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name}={value!r}"[:60] for name, value in CASES])
def test_bad_value_names_the_option(name: str, value: Any) -> None:
    with pytest.raises(FederatedError) as caught:
        make(**{name: value})
    message = str(caught.value)
    assert message.startswith("Expected ")
    assert f"`--trainer.{name}" in message or f"`{name}`" in message
    assert "\n" not in message


GOOD: list[dict[str, Any]] = [
    {"clients_per_round": 3}, {"clients_per_round": 0.1}, {"clients_per_round": 1.0},
    {"local_steps": 5}, {"local_epochs": 2}, {"local_schedule": "continue"},
    {"limit_val_batches": 0}, {"limit_val_batches": 0.0}, {"limit_test_batches": 7},
    {"gradient_clip_val": 0}, {"gradient_clip_val": 1.5, "gradient_clip_algorithm": "value"},
    {"deterministic": False}, {"fast_dev_run": True}, {"fast_dev_run": 2}, {"fast_dev_run": False},
    {"max_time": "00:00:10:00"}, {"max_time": timedelta(minutes=1)}, {"max_time": {"hours": 1}},
    {"name": "group/gma"}, {"name": "v1..2"}, {"seed": 0}, {"check_test_every_n_rounds": 1},
    {"logger": True}, {"logger": False}, {"logger": CSVLogger("x")},
    {"logger": [CSVLogger("x")]}, {"precision": "bf16-mixed"}, {"devices": 1},
    {"engine": "auto"}, {"engine": "vectorized", "chunk_size": 3}, {"compile": True},
    {"compile": "default"}, {"compile": "reduce-overhead"}, {"compile": "max-autotune"},
    {"client_states": "host"}, {"client_states": "disk"}, {"memory_format": "channels_last"},
]  # fmt: skip


@pytest.mark.parametrize("options", GOOD, ids=[str(options)[:60] for options in GOOD])
def test_good_values_are_taken(options: dict[str, Any]) -> None:
    make(**options)


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK", "SLURM_NTASKS"])
def test_a_variable_of_a_launcher_that_is_no_count(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    for variable, value in {**({} if "SLURM" in name else torchrun), name: "x"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(FederatedError, match=f"^Expected the environment variable {name}, .* got 'x'"):
        FederatedTrainer(accelerator="cpu", devices="auto")


@pytest.mark.parametrize("devices", ["auto", 1])
def test_torchruns_variables_come_together(monkeypatch: pytest.MonkeyPatch, devices: Any) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(FederatedError, match="got TORCHELASTIC_RUN_ID without RANK, LOCAL_RANK, WORLD_SIZE, LOCAL"):
        FederatedTrainer(accelerator="cpu", devices=devices)


def test_epochs_and_steps_exclude_each_other() -> None:
    with pytest.raises(FederatedError, match=r"--trainer\.local_epochs.*--trainer\.local_steps.*both"):
        make(local_epochs=1, local_steps=1)
    assert make().local_epochs == 1
    assert make(local_steps=4).local_epochs is None


@pytest.mark.parametrize(
    ("limit", "total", "expected"),
    [(1.0, 10, None), (1.0, None, None), (0.5, 10, 5), (0.25, 10, 2), (0.0, 10, 0), (0.0, 0, 0), (1, 10, 1), (0, 10, 0),
     (3, None, 3)],
)  # fmt: skip
def test_batch_limit(limit: int | float, total: int | None, expected: int | None) -> None:
    assert batch_limit(limit, total) == expected


@pytest.mark.parametrize(("limit", "total"), [(0.1, 5), (0.5, None), (0.9, 1)])
def test_a_share_that_comes_to_no_batch_is_refused(limit: float, total: int | None) -> None:
    with pytest.raises(FederatedError, match=r"--trainer\.limit_val_batches.*give a count"):
        batch_limit(limit, total)


def test_the_signature_is_that_of_the_options() -> None:
    """An option is one field and its docstring: editors and LightningCLI read the signature, the rest the field."""
    parameters = dict(signature(FederatedTrainer.__init__).parameters)
    del parameters["self"], parameters["lightning"]
    hints, fields_hints = get_type_hints(FederatedTrainer.__init__), get_type_hints(TrainerOptions)
    known = {field.name: (fields_hints[field.name], field.default) for field in fields(TrainerOptions)}
    for name, kind in GROUPS.items():
        assert known[name] == (kind, kind())
        known[name] = (kind | None, None)
        assert all(f"        {field.name}: " in str(kind.__doc__) for field in fields(kind))
    assert {name: (hints[name], given.default) for name, given in parameters.items()} == known
    assert all(f"        {name}: " in str(FederatedTrainer.__doc__) for name in parameters)


PARTS = {
    "sampler": UniformSampler(), "availability": BernoulliAvailability(), "stragglers": Stragglers(),
    "work": UnequalWork([1, 2]), "max_diverged": 0.5, "on_write_error": "continue", "process_timeout": 3.0,
    "full_gradient_mode": "train", "full_gradient_batch_size": 7, "full_gradient_weight_decay": True,
}  # fmt: skip


@pytest.mark.parametrize(("flat", "value"), PARTS.items())
def test_a_part_of_a_group_has_a_name_without_it(flat: str, value: Any) -> None:
    group, part = FLAT_NAMES[flat].split(".")
    grouped = {group: GROUPS[group](**{part: value})}
    assert make(**{flat: value}).options == make(**grouped).options == replace(make().options, **grouped)
    with pytest.raises(FederatedError, match=rf"^Expected `--trainer\.{FLAT_NAMES[flat]}` under one name, got "):
        make(**{flat: value}, **grouped)


def test_groups_and_flat_names_go_together() -> None:
    made = make(tolerance=Tolerance(max_diverged=0.3), on_client_error="skip", process_timeout=3.0)
    assert made.options.tolerance == Tolerance(0.3, "skip", process_timeout=3.0)
    assert made.max_diverged == 0.3
    made.max_diverged = 0.2
    assert made.options.tolerance.max_diverged == 0.2
