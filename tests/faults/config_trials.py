"""Trials for the campaign of configurations: right ones, and what is done to them."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

__all__ = ["VALUES", "Trial", "bomb", "make_trial", "places"]

_BASE = """
trainer: {accelerator: cpu, max_rounds: 1, clients_per_round: 3, local_steps: 1, enable_progress_bar: false}
data:
  class_path: Digits
  init_args: {num_clients: 5, batch_size: 10, partitioner: {class_path: IID}}
model:
  class_path: ImageClassifier
  init_args:
    backbone: {class_path: MLP, init_args: {hidden: [8]}}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
"""
_PARTS = (
    "",
    "aggregator: {class_path: FedAvg, init_args: {lr: 0.5, mask: {class_path: SignAgreement}}}",
    "client: [{class_path: FedProx, init_args: {mu: 0.1}}]",
    "{aggregator: {class_path: FedAdam}, client: {class_path: SCAFFOLD}}",
    "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/loss}}]}",
    "{trainer: {engine: vectorized, chunk_size: 2}, optimizer: {class_path: SGD, init_args: {lr: 0.1}}}",
)
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 10**15, 10**30, -(10**30), 0.5, -0.5, 1e308, float("nan"), float("inf"), "", " ",
    "x", "1:30", "a" * 300, "ünï\u202eçode\u2028", "\x85", "null", "~", "1e3", "0x10", "-", "../x",
    "no.such.Thing", "a.b.", "torch.nn.Linear", "FedAvg", "os.path.join", "builtins.dict", "..", "SGD",
    "Digits", "2020-01-01", b"bytes", "[" * 200, "{a: 1, a: 2}", [], {}, [None], [[]], [1, 2], [10**15],
    {"a": 1}, [{}], {1: 2}, {None: None}, {"init_args": {}}, {"class_path": "FedAvg"}, {"class_path": None},
    {"class_path": "MLP", "init_args": None}, {"class_path": "Shards", "init_args": {"classes_per_client": 99}},
    "$x$ ${y}", "a|b", "5**", "a\nb", "=1+1", "\x1b[2J",
    "http://127.0.0.1:9/x", "file:///etc/passwd", "pipe", "file://pipe", "/dev/zero", "/dev/stdin",
    "torch.utils.collect_env.run",
    {"class_path": "torch.utils.data.datapipes.map.Mapper", "init_args": {"fn": "os.system"}},
)  # fmt: skip
_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_PORT", "SLURM_NTASKS",
    "SLURM_PROCID", "SLURM_LOCALID", "JSM_NAMESPACE_RANK", "TORCHELASTIC_RUN_ID", "PL_GLOBAL_SEED",
    "LIGHTNING_FED_DATA", "PL_FIT__TRAINER", "PL_FIT__TRAINER__MAX_ROUNDS", "PL_FIT__TRAINER__CALLBACKS",
    "PL_FIT__MODEL", "PL_FIT__DATA", "PL_FIT__AGGREGATOR", "PL_FIT__CLIENT", "PL_FIT__CONFIG",
    "PL_FIT__WEIGHTS", "PL_FIT__SEED_EVERYTHING", "PL_CONFIG",
)  # fmt: skip
_TEXTS = (
    "x", "", "-1", "1.5", "a" * 5000, "[" * 3000, "{a: 1", "null", "ü", "\udcff", "no.such.Thing", "1" * 400, "../x",
    "&a [*a]", "http://127.0.0.1:9/x", "pipe", "file://pipe", "/dev/zero", "$x|y", "a\nb",
)  # fmt: skip
_SIGNS = (
    "&a ", "*a", "<<: *a\n", "!!python/object/apply:os.getcwd []", "!!int ", "---\n", "%YAML 1.1\n", "\t",
    "\r\n", "? ", "- ", ": ", "{", "}", "[" * 500, "- " * 500, "|\n", "\ufeff", "\0", "#", "'", '"', "...\n",
    "<<: {}\n", "!!binary ", "!!set ",
)  # fmt: skip
_NAMES = ("class_path", "init_args", "lr", "trainer", "model", "name", "a.b")
_CLASSES = (
    "FedAvg", "FedAdam", "Krum", "SCAFFOLD", "FedProx", "MLP", "LeNet", "Digits", "ImageClassifier", "Adam",
    "IID", "Shards",
)  # fmt: skip
_OPTIONS = (
    "trainer.max_rounds", "trainer.callbacks", "trainer.callbacks+", "trainer.name", "trainer.devices",
    "trainer", "model", "data", "model.backbone", "model.backbone.hidden", "data.num_clients",
    "data.partitioner", "aggregator", "aggregator.lr", "client", "client+", "config", "seed_everything",
    "weights", "ckpt_path", "optimizer.lr", "trainer.plugins", "trainer.max_time", "link_data", "model.help",
    "print_config", "model.init_args", "data.init_args.batch_size", "nothing",
)  # fmt: skip

Expected = Literal["any", "refused", "same"]


@dataclass
class Trial:
    """What one trial gives to the program.

    Attributes:
        files: Texts of configuration files, in order.
        words: Words after them.
        variables: Of the environment.
        expected: What must become of it, where that is known.
        mutations: What was done, for the report.
    """

    files: list[bytes]
    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    expected: Expected = "any"
    mutations: list[str] = field(default_factory=list)


def make_trial(seed: int, number: int) -> Trial:
    """Makes a trial: a configuration of one or two files that is right, and one to three mutations of it."""
    rng = random.Random(f"{seed}/{number}")
    trees = [yaml.safe_load(text) for text in (_BASE, rng.choice(_PARTS)) if text]
    trial = Trial([yaml.safe_dump(tree).encode() for tree in trees])
    if rng.random() < 0.3:  # one of those whose effect is known
        rng.choice(_KNOWN)(rng, trial, trees)
        return trial
    for _ in range(rng.randint(1, 3)):
        rng.choice(_UNKNOWN)(rng, trial, trees)
    return trial


def _copy(tree: Any) -> Any:
    return yaml.safe_load(yaml.safe_dump(tree))


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Lists every container with every key or index of it."""
    if not isinstance(tree, (dict, list)):
        return []
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    return [(tree, key) for key in keys] + [place for key in keys for place in places(tree[key])]


def _change_tree(name: str, change: Callable[[random.Random, Any, Any], None]) -> Callable[..., None]:
    """Makes a mutation that changes one place of one file's tree."""

    def mutate(rng: random.Random, trial: Trial, trees: list[Any]) -> None:
        at = rng.randrange(len(trees))
        found = places(trees[at])
        if found:
            container, key = rng.choice(found)
            trial.mutations.append(f"{name} {key!r} in file {at}")
            change(rng, container, key)
            trial.files[at] = yaml.safe_dump(trees[at], allow_unicode=rng.random() < 0.5).encode()

    return mutate


def _set(rng: random.Random, container: Any, key: Any) -> None:
    container[key] = _copy(rng.choice(VALUES))


def _delete(rng: random.Random, container: Any, key: Any) -> None:
    del container[key]


def _retarget(rng: random.Random, container: Any, key: Any) -> None:
    value = container[key]
    del container[key]
    if isinstance(container, dict):
        container[rng.choice([*_NAMES, f"{key}s", f"{key}+"])] = value


def _swap_class(rng: random.Random, container: Any, key: Any) -> None:
    container[key] = {"class_path": rng.choice(_CLASSES), "init_args": {} if rng.random() < 0.5 else {"lr": 0.1}}


def _change_text(name: str, change: Callable[[random.Random, bytes], bytes]) -> Callable[..., None]:
    """Makes a mutation that changes the bytes of one file."""

    def mutate(rng: random.Random, trial: Trial, trees: list[Any]) -> None:
        at = rng.randrange(len(trial.files))
        trial.mutations.append(f"{name} in file {at}")
        trial.files[at] = change(rng, trial.files[at])

    return mutate


def _cut(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randint(0, len(text))]


def _throw_bytes(rng: random.Random, text: bytes) -> bytes:
    at = rng.randint(0, len(text))
    return text[:at] + rng.randbytes(rng.randint(1, 4)) + text[at + rng.randint(0, 3) :]


def _throw_signs(rng: random.Random, text: bytes) -> bytes:
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(_SIGNS).encode() + text[at:]


def _move_line(rng: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True) or [b""]
    line = lines.pop(rng.randrange(len(lines)))
    lines.insert(rng.randint(0, len(lines)), b" " * rng.randint(0, 4) + line)
    return b"".join(lines)


def bomb(rng: random.Random, text: bytes) -> bytes:
    deep = b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9))
    merged = b"a0: &a0 {x: 1}\n" + deep.replace(b" [", b" {<<: [").replace(b"]", b"]}")
    long = b"a: &a %s\nb: [%s]\n" % (b"x" * 10_000, b", ".join([b"*a"] * 90_000))
    within = text.replace(b"init_args:", b"init_args: &a\n   b: *a", 1)
    recursive = (text + b"client: &c [*c]\n", text + b"client: &c {a: *c}\n", within, b"&a {b: *a}")
    return rng.choice([*recursive, b"a0: &a0 [x]\n" + deep + text, merged + text, long + text])


def _word(rng: random.Random, trial: Trial, trees: list[Any]) -> None:
    option, values = (
        rng.choice(_OPTIONS),
        [*_TEXTS, "FedAvg", "{class_path: FedAvg}", "[1, 2]", "3", "true", "quickstart"],
    )
    value = rng.choice(values)
    trial.words += rng.choice([[f"--{option}", value], [f"--{option}={value}"], [f"--{option}"], [value]])
    trial.mutations.append(f"word {trial.words[-2:]}"[:60])


def _variable(rng: random.Random, trial: Trial, trees: list[Any]) -> None:
    name = rng.choice(_VARIABLES)
    trial.variables[name] = rng.choice(_TEXTS)
    trial.mutations.append(f"variable {name}")


def _unknown_key(rng: random.Random, trial: Trial, trees: list[Any]) -> None:
    groups = [place for container, key in places({"": trees[0]}) if isinstance(place := container[key], dict)]
    rng.choice(groups)["nothing"] = rng.choice([{}, 1, None, "x", [1], {"a": 1}])
    trial.files[0] = yaml.safe_dump(trees[0]).encode()
    trial.expected, trial.mutations = "refused", ["an unknown key"]


def _key_twice(rng: random.Random, trial: Trial, trees: list[Any]) -> None:
    lines = trial.files[0].splitlines(keepends=True)
    at = rng.choice([i for i, line in enumerate(lines) if line.rstrip()[-1:] != b":" and b"- " not in line])
    lines.insert(at, lines[at])
    trial.files[0] = b"".join(lines)
    trial.expected, trial.mutations = "refused", ["a key twice"]


def _empty_group(rng: random.Random, trial: Trial, trees: list[Any]) -> None:
    value = rng.choice(["", "3", "[]", "[1]", "null", "false", "''"])
    trial.files.append(f"seed_everything: 0\ntrainer: {value}\n".encode())
    trial.expected, trial.mutations = "refused", [f"trainer: {value}"]


def _empty_mapping(rng: random.Random, trial: Trial, trees: list[Any]) -> None:
    name = rng.choice(["trainer", "aggregator", "data", "model"])
    trial.files.append(f"{name}: {{}}\n".encode())
    trial.expected, trial.mutations = "same", ["nothing new"]


_KNOWN = (_unknown_key, _key_twice, _empty_group, _empty_mapping)
_UNKNOWN = (
    *[_change_tree("set", _set)] * 4, _change_tree("delete", _delete), _change_tree("retarget", _retarget),
    *[_change_tree("swap class", _swap_class)] * 2, _change_text("cut", _cut), _change_text("bytes", _throw_bytes),
    *[_change_text("signs", _throw_signs)] * 2, _change_text("line", _move_line), _change_text("aliases", bomb),
    *[_word] * 3, *[_variable] * 2,
)  # fmt: skip
