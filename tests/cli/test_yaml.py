"""YAML that is surely a mistake is refused, each file for itself, and a sentence names the file that it stands in."""

import os

import pytest
import yaml

from lightning_fed.cli.yaml_loader import ConfigLoader, PlainLoader
from tests.parts import quick_first

BASE = ("fit", "--model", "Plain", "--data", "Digits")
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
ENDLESS = (
    BOMB,
    "&a {b: *a}",
    "a: &a [*a]",
    "a: " + "[" * 900 + "]" * 900,
    "a0: &a0 {x: 1, y: 2}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9)),
    f"a: &a {'x' * 10_000}\nb: [{', '.join(['*a'] * 90_000)}]",
    f"a: {'9' * 5000}",
)


@pytest.mark.parametrize("loader", [PlainLoader, ConfigLoader])
@pytest.mark.parametrize("text", ENDLESS, ids=range(len(ENDLESS)))
def test_what_would_grow_is_refused(loader, text):
    with pytest.raises(yaml.YAMLError):
        yaml.load(text, Loader=loader)


@pytest.mark.parametrize(
    "text", ["[1:30, off, 1e3, 0x10]", "{a: &a {c: 1}, b: {<<: *a, c: 2}}", "a: 1\na: 2", "d: 2020-01-01"]
)
def test_other_files_are_read_as_pyyaml_reads_them(text):
    assert yaml.load(text, Loader=PlainLoader) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainer:\n  max_rounds: 3\n  max_rounds: 4\n", "the key 'max_rounds' of line 2 again"),
        ("trainer: {name: x}\nseed_everything: 1\n'trainer': {}\n", "the key 'trainer' of line 1 again"),
        ("trainer: &a\n  name: *a\n", "an alias within the value that it stands for"),
        ("&a {<<: *a}", "an alias within the value that it stands for"),
        (BOMB, "aliases that come to more than 100,000 values"),
        ("trainer: " + "[" * 900 + "]" * 900, "values nested more than 100 deep"),
        ("- " * 100_000, "values nested more than 100 deep"),
        ('name: "a\\0b"', "a null byte"),
        ("{!!int lr: 0.1}", "a value that is no int"),
        ("a: !!bool maybe", "a value that is no bool"),
        ("[!!timestamp soon]", "a value that is no timestamp"),
    ],
)
def test_what_is_refused(text, says):
    with pytest.raises(yaml.YAMLError) as error:
        yaml.load(text, Loader=ConfigLoader)
    assert error.value.problem == says


def test_where_the_library_refuses_first_its_error_is_one_of_yaml_too():
    with pytest.raises(yaml.YAMLError, match="nest"):  # PyYAML 6.0.4 has a limit of its own, of 1,000
        yaml.load("[" * 100_000 + "]" * 100_000, Loader=ConfigLoader)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"),
        ("[1:30:00, 1:30.5, 01:30]", ["1:30:00", "1:30.5", "01:30"]),
        ("[off, yes, 1e3, 12, 0x10]", [False, True, 1000.0, 12, 16]),
        ("{a: &a [1], b: *a}", {"a": [1], "b": [1]}),
        ("{a: &a {c: 1}, b: {<<: *a, c: 2}}", {"a": {"c": 1}, "b": {"c": 2}}),
        ("[" * 100 + "]" * 100, None),
    ],
)
def test_what_is_read(text, value):
    read = yaml.load(text, Loader=ConfigLoader)
    assert value in (None, read)


@pytest.mark.parametrize("value", quick_first(1, ["", "3", "[1]", "null", "true"]))
def test_a_group_without_options_drops_none_of_the_files_before(cli, mistake, value):
    good, empty = cli.file("good.yaml", "trainer: {max_rounds: 7}\n"), f"seed_everything: 1\ntrainer: {value}\n"
    sentence = mistake(*BASE, "--config", good, "--config", cli.file("wrong.yaml", empty))
    assert sentence.startswith("Expected `--trainer` to be a mapping of options, got ")
    assert sentence.endswith(f"{cli.folder}/wrong.yaml.")


def test_a_group_with_no_options_changes_none(cli):
    good, empty = cli.file("good.yaml", "trainer: {max_rounds: 7}\n"), cli.file("empty.yaml", "trainer: {}")
    assert cli.run("--config", good, "--config", empty).trainer.max_rounds == 7


@pytest.mark.parametrize(
    ("text", "option"),
    quick_first(
        2,
        [
            ("trainer: {nothing: {}}", "trainer.nothing"),
            ("aggregator: {class_path: FedAvg, init_args: {nothing: {}}}", "aggregator.nothing"),
            ("nothing: {}", "nothing"),
            ("model: {class_path: Plain, nothing: 1}", "model.nothing"),
            ("trainer: {callbacks: [{class_path: EarlyStopping, nothing: 1}]}", "trainer.callbacks.nothing"),
            ("aggregator: {class_path: FedAvg, nothing: {}}", "aggregator.nothing"),
        ],
    ),
)
def test_an_unknown_key(cli, mistake, text, option):
    sentence = mistake(*BASE, "--config", cli.file("wrong.yaml", text))
    assert sentence.startswith(f"There is no option `--{option}` in {cli.folder}/wrong.yaml; ")


@pytest.mark.parametrize(
    ("text", "says"),
    quick_first(
        2,
        [
            ("trainer:\n  name: a\n  name: b\n", "the key 'name' of line 2 again at line 3, column 3"),
            (
                "trainer: {name: a\0b}",
                "unacceptable character #x0000: control characters are not allowed at position 17",
            ),
            ("trainer: {max_rounds: 1", "while parsing a flow mapping at line 1, column 10 did not find"),
            ("trainer: " + "- " * 100_000, "block sequence entries are not allowed"),
        ],
    ),
)
def test_the_sentence_about_a_file(cli, mistake, text, says):
    sentence = mistake(*BASE, "--config", cli.file("wrong.yaml", text))
    assert sentence.startswith(f"Expected {cli.folder}/wrong.yaml to be YAML, got {says}")
    assert sentence.endswith("; correct it there.")


def test_the_sentence_about_a_word(mistake):
    assert mistake(*BASE, "--config", "trainer: {name: a, name: b}") == (
        "Expected the text given to `--config` to be YAML, got the key 'name' of line 1 again at line 1, column 20; "
        "correct it there."
    )


def test_minutes_given_as_a_word_are_no_number(mistake):
    assert "got '1:30'" in mistake(*BASE, "--trainer.max_rounds", "1:30")


@pytest.mark.parametrize("arguments", quick_first(1, ["", "3", "[1]"]))
def test_arguments_that_are_no_mapping(cli, mistake, arguments):
    sentence = mistake(
        *BASE, "--config", cli.file("wrong.yaml", f"aggregator:\n  class_path: FedAvg\n  init_args: {arguments}")
    )
    assert sentence.startswith("Expected `--aggregator.init_args` to be a mapping of options, got ")


@pytest.mark.parametrize("path", quick_first(1, ["3", "null", "[a]"]))
def test_a_class_path_that_is_no_text(cli, mistake, path):
    sentence = mistake(*BASE, "--config", cli.file("wrong.yaml", f"model: {{class_path: {path}}}"))
    assert sentence.startswith("Expected `--model` to name a known class or an import path, got ")


@pytest.mark.parametrize(
    ("text", "part", "says"),
    quick_first(
        2,
        [
            (
                "trainer: part.yaml",
                "max_rounds: x",
                "Expected `--trainer.max_rounds` to be of type int, got 'x' in part.yaml.",
            ),
            (
                "trainer: part.yaml",
                "name: a\nname: b",
                "Expected part.yaml to be YAML, got the key 'name' of line 1 again ",
            ),
            ("aggregator: part.yaml", "class_path: FedAvg\ninit_args: {lr: x}", "/whole.yaml."),
            (
                "aggregator: part.yaml",
                "class_path: FedAvg\nclass_path: A",
                "Expected part.yaml to be YAML, got the key ",
            ),
            ("config: [part.yaml]", "", "Expected `--config` to be a single file, got \"['part.yaml']\" in "),
            ("trainer: missing.yaml", "", "Expected `--trainer` to name a file, got 'missing.yaml' in "),
            ("data:", "", "to hold options as `name: value`, got 'data:'."),
        ],
    ),
)
def test_the_file_that_the_mistake_is_in(cli, mistake, text, part, says):
    cli.file("part.yaml", part)
    assert says in mistake(*BASE, "--config", cli.file("whole.yaml", text))


@pytest.mark.parametrize("option", quick_first(1, ["--trainer.max_rounds", "--model"]))
@pytest.mark.parametrize("word", quick_first(1, ["[" * 3000 + "]" * 3000, "a" * 5000]))
def test_a_word_of_thousands_of_letters_is_cut(mistake, option, word):
    sentence = mistake(*BASE, option, word)
    assert "…" in sentence
    assert len(sentence) < 500


def test_a_default_of_lightnings_that_is_no_plain_word(cli):
    words = ("--trainer.callbacks", "lightning.pytorch.callbacks.Timer", "--trainer.callbacks.duration", "00:00:01:00")
    (timer,) = yaml.safe_load(yaml.safe_dump(cli.config(*words)))["trainer"]["callbacks"]
    assert timer["init_args"]["interval"] == "step"


@pytest.mark.parametrize("words", [("--config",), ("--trainer",), ("--weights",)])
@pytest.mark.parametrize("written", ["pipe", "~/pipe", "file://{}/pipe"])
def test_a_pipe_is_refused_and_not_waited_for(cli, mistake, monkeypatch, words, written):
    """However jsonargparse would find it."""
    monkeypatch.setenv("HOME", str(cli.folder))
    os.mkfifo(cli.folder / "pipe")
    name = written.format(cli.folder)
    assert mistake("fit", "--model", "Plain", "--data", "Digits", *words, name).startswith(
        f"Expected a file, got {name!r}, "
    )


@pytest.mark.parametrize(
    "text", ["trainer: pipe", "trainer: ~/pipe", "{trainer: {callbacks: [pipe]}}", "data: {init_args: {a: pipe}}"]
)
@pytest.mark.parametrize("inline", [False, True])
def test_nor_is_one_that_a_configuration_names(cli, mistake, monkeypatch, text, inline):
    monkeypatch.setenv("HOME", str(cli.folder))
    os.mkfifo(cli.folder / "pipe")
    given = text if inline else cli.file("a.yaml", text)
    assert "pipe', a pipe or a device" in mistake("fit", "--model", "Plain", "--data", "Digits", f"--config={given}")


@pytest.mark.parametrize("name", ["CONFIG", "TRAINER", "MODEL"])
def test_a_pipe_in_a_variable_is_refused_too(cli, mistake, monkeypatch, name):
    os.mkfifo(cli.folder / "pipe")
    monkeypatch.setenv(f"PL_FIT__{name}", "pipe")
    assert mistake("fit", "--model", "Plain", "--data", "Digits").startswith("Expected a file, got 'pipe', ")


@pytest.mark.parametrize("scheme", ["http", "s3", "github"])
def test_no_configuration_is_fetched(mistake, scheme):
    said = mistake("fit", "--config", f"{scheme}://127.0.0.1:9/x.yaml")
    assert said.startswith(f"Expected `--config` to name a file, got '{scheme}://")


def test_no_seed_is_one_sentence(cli, mistake):
    file = cli.file("null.yaml", "seed_everything: null\n")
    said = mistake("fit", "--model", "Plain", "--data", "Digits", "--config", file, code=1)
    assert said == "Expected `--seed_everything` to be in [0, 4294967295], got null."


def test_a_bundled_data_module_takes_no_unknown_options(cli, mistake):
    file = cli.file("d.yaml", "data: {class_path: Digits, dict_kwargs: {nothing: 3}}")
    said = mistake("fit", "--model", "Plain", "--config", file, code=1)
    assert said == "Expected only options that Digits has, got `nothing`: leave it out."


WRONG = "{class_path: %s, dict_kwargs: {nothing: 1}}"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("client: %s", "FedPer"), ("client: [%s]", "FedProx"), ("aggregator: %s", "FedAvgM"),
        ("aggregator: {class_path: FedAvg, init_args: {mask: %s}}", "SignAgreement"),
        ("trainer: {callbacks: [%s]}", "UpdateAgreement"), ("trainer: {sampler: %s}", "UniformSampler"),
        ("data: {class_path: Digits, init_args: {partitioner: %s}}", "IID"),
        ("data: %s", "lightning_fed.data.FederatedDataModule"), ("model: %s", "Plain"),
    ],
)  # fmt: skip
@pytest.mark.quick(2)
def test_options_that_a_class_does_not_have_are_told(cli, mistake, key, name):
    """jsonargparse passes what is in ``dict_kwargs`` on without a look at the class."""
    file = cli.file("d.yaml", key % (WRONG % name))
    said = mistake("fit", "--model", "Plain", "--data", "Digits", "--config", file, code=1)
    assert said == f"Expected only options that {name.rpartition('.')[2]} has, got `nothing` in `dict_kwargs`."


@pytest.mark.parametrize("options", ["{self: 1}", "{1: 1}"])
def test_options_that_no_class_can_have_are_told(cli, mistake, options):
    file = cli.file("d.yaml", f"client: {{class_path: FedPer, dict_kwargs: {options}}}")
    said = mistake("fit", "--model", "Plain", "--data", "Digits", "--config", file, code=1)
    assert said.startswith("Expected `init_args` and `dict_kwargs` that can be given, but: ")


@pytest.mark.parametrize("option", ["optimizer", "lr_scheduler"])
def test_options_of_an_optimizer_that_would_be_lost_are_refused(cli, mistake, option):
    parts = {"optimizer": "SGD, init_args: {lr: 0.1}", "lr_scheduler": "StepLR, init_args: {step_size: 1}"}
    parts[option] += ", dict_kwargs: {nothing: 1}"
    file = cli.file("d.yaml", "".join(f"{name}: {{class_path: {part}}}\n" for name, part in parts.items()))
    said = mistake("fit", "--model", "Plain", "--data", "Digits", "--config", file, code=1)
    assert said == f"Expected the options of `--{option}` in `init_args`, got some in `dict_kwargs`."
