"""The page: its structure and numbers as they are written, and what a real browser makes of it."""

import json
import math
import sys
from html import escape, unescape
from pathlib import Path

import pytest
import yaml

from lightning_fed.errors import FederatedError
from lightning_fed.lab import notebook
from lightning_fed.lab.report.page import client_table, config_differences, split_pictures
from lightning_fed.lab.report.runs import Method, group_runs, load_runs
from lightning_fed.lab.report_command import main
from tests.cli.test_yaml import ENDLESS
from tests.lab.report.parts import Page, fits_the_window, opened, write_run

HOSTILE = "</script><script>broken()</script><img src=http://x.invalid/y>&amp;\"'"
ROWS = (
    "round,val/acc,val/loss,mask/mean,update/norm,comm/bytes_up\n0,0.1,2.3,,,\n1,0.5,1.5,0.6,2,100\n"
    "2,{acc},{loss},0.7,1,200\n"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    pytest.importorskip("plotly", reason='the page needs plotly: pip install "lightning_fed[html]"')
    root = tmp_path_factory.mktemp("page")
    for group, label in {"a": "FedAvg", "b": HOSTILE}.items():
        for seed, acc in enumerate([0.7, 0.8 if group == "a" else 0.9]):
            path = write_run(root, group, seed, label=label, text=ROWS.format(acc=acc, loss=1 - acc))
            (path / "config.yaml").write_text(yaml.safe_dump({"aggregator": {"lr": 1.0, "note": label}}))
            (path / "split.png").write_bytes(b"\x89PNG")
            (path / "clients.csv").write_text("round,client,acc\n2,0,0.25\n2,1,0.75\n2,10,0.5\n")
    write_run(root, "c", 0, label="unmeasured", text="round,val/loss\n0,1.0\n")
    assert main([str(root), "--format", "html", "--metric", "val/acc", "--target", "0.85"]) == 0
    return root / "report-val_acc.html"


def test_table_and_sections_hold_what_was_measured(page: Path) -> None:
    read = Page(page.read_text(encoding="utf-8"))
    differ = "What differs between the methods"
    title = "val/acc (%), mean ± std over 2 seeds"
    assert read.headings == [
        "val/acc",
        title,
        "Curves",
        "Other metrics",
        "Agreement",
        "Updates",
        differ,
        "Clients",
        "Split",
    ]
    table, differences, *clients = read.tables
    assert table == [
        ["method", "final", "best", "last 10", "round to 0.85"],
        [HOSTILE, "80.00 ± 14.14", "80.00 ± 14.14", "46.67 ± 4.71", "1 of 2 seeds"],
        ["FedAvg", "75.00 ± 7.07", "75.00 ± 7.07", "45.00 ± 2.36", "0 of 2 seeds"],
    ]
    assert differences == [["option", HOSTILE, "FedAvg"], ["aggregator.note", HOSTILE, "FedAvg"]]
    assert clients == 2 * [[["round", "client", "acc"], ["2", "0", "0.25"], ["2", "1", "0.75"], ["2", "10", "0.5"]]]
    assert "which did not measure val/acc" in page.read_text(encoding="utf-8")


def test_nothing_is_fetched_and_no_name_becomes_a_tag(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    read = Page(text)
    assert len(read.links) == 1
    assert read.links[0].startswith("data:image/png;base64,")
    assert len(read.scripts) == text.count("<script") == text.count("</script>") == 2 + len(read.figures())
    assert "<img src=http" not in text
    assert "default-src 'none'" in text


def test_curves_are_those_of_the_picture(page: Path) -> None:
    (traces, layout), *others = Page(page.read_text(encoding="utf-8")).figures()
    assert [figure[1]["yaxis"]["title"]["text"] for figure in others] == [
        "val/loss, less is better",
        "mask/mean",
        "update/norm",
    ]
    band, line, *_ = traces
    assert [trace.get("showlegend", True) for trace in traces] == [False, True, False, True]
    assert [trace["legendgroup"] for trace in traces] == ["0", "0", "1", "1"]
    assert (line["x"], line["y"]) == ([0, 1, 2], pytest.approx([0.1, 0.5, 0.8]))
    half = 0.2 / math.sqrt(2)
    assert band["y"] == pytest.approx([0.1, 0.5, 0.8 + half, 0.8 - half, 0.5, 0.1], rel=1e-5)
    assert line["name"] == f"{escape(HOSTILE, quote=False)} (2 seeds)"
    axes, bands = layout["updatemenus"]
    by_bytes = next(button for button in axes["buttons"] if button["label"] == "comm/bytes_up")
    assert by_bytes["args"][0]["x"] == 2 * [[0, 100, 200, 200, 100, 0], [0, 100, 200]]
    (button,) = bands["buttons"]
    assert (button["args"], button["args2"]) == ([{"opacity": 0}, [0, 2]], [{"opacity": 0.25}, [0, 2]])


def test_the_users_metrics_are_drawn_with_their_goals_and_backquotes_are_code(tmp_path: Path) -> None:
    """Whatever their names; the bookkeeping of the framework is not."""
    pytest.importorskip("plotly")
    names = [
        "val/mae",
        "val/auroc",
        "val/energy",
        "val_loss",
        "mine",
        "test/acc/night",
        "time/round",
        "clients/trained",
    ]
    names += ["lr", "per_client/mae", "gradients", "comm/rounds", "gap/acc/night", "gradient/norm", "samples"]
    rows = "".join(f"{at},{','.join(['0.5'] * len(names))}\n" for at in (0, 1, 2, 3, 5))
    path = write_run(tmp_path, "a", 0, label="A `b` c", text=f"round,{','.join(names)}\n{rows}")
    (path / "goals.json").write_text('{"val/energy": "min"}')
    assert main([str(tmp_path), "--format", "html", "--metric", "val/mae"]) == 0
    text = (tmp_path / "report-val_mae.html").read_text(encoding="utf-8")
    read = Page(text)
    assert [figure[1]["yaxis"]["title"]["text"] for figure in read.figures()] == [
        "val/mae, less is better", "mine", "val/auroc, more is better", "val/energy, less is better",
        "val_loss, less is better",
    ]  # fmt: skip
    assert ["test/acc/night", "0.5"] in read.tables[1]
    assert "<p><code>last 10</code> is the mean of" in text
    # One figure alone has the whole width, several share it.
    assert [text.count('<div class="curves">'), text.count('<div class="chart">')] == [1, 5]


def test_layers_are_a_table(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    for seed, last in enumerate([0.25, 0.75]):
        rows = f"round,val/acc,agreement/mean,agreement/mean/w.1\n0,0.1,,\n1,0.2,0.5,0.1\n2,0.3,0.5,{last}\n"
        write_run(tmp_path, "a", seed, label="A", text=rows)
    write_run(tmp_path, "b", 0, [0.1, 0.2], label="B", metric="val/acc")
    assert main([str(tmp_path), "--format", "html"]) == 0
    read = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert read.tables[1] == [["at the last measurement", "A", "B"], ["agreement/mean/w.1", "0.5", ""]]
    assert [figure[1]["yaxis"]["title"]["text"] for figure in read.figures()] == [
        "val/acc, more is better",
        "agreement/mean",
    ]


def test_what_is_measured_once_is_a_point(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    for seed, acc in enumerate([0.5, 0.6]):
        write_run(tmp_path, "a", seed, {15: acc}, label="A method of so long a name that it is broken")
    assert main([str(tmp_path), "--format", "html"]) == 0
    ((points, layout),) = Page((tmp_path / "report.html").read_text(encoding="utf-8")).figures()
    (point,) = points
    assert (point["mode"], point["x"], point["y"]) == (
        "markers",
        [0.55],
        ["A method of so long a<br>name that it is broken<br>(2 seeds)"],
    )
    assert point["error_x"]["array"] == pytest.approx([0.1 / math.sqrt(2)], rel=1e-5)
    assert layout["xaxis"]["range"] == pytest.approx([0.43, 0.67])
    assert layout["xaxis"]["tickformat"] == "~%"
    assert "updatemenus" not in layout


def test_more_methods_than_colours_have_a_table(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    for at in range(15):
        write_run(tmp_path, str(at), 0, label=str(at), text=f"round,test/acc,mask/mean\n1,0.5,0.{at + 10}\n2,0.6,0.5\n")
    assert main([str(tmp_path), "--format", "html"]) == 0
    read = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(read.figures()) == 1
    assert read.tables[1][1] == ["mask/mean", *["0.5"] * 15]


def test_clients_are_counted_and_the_first_of_many_are_shown(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("plotly")
    monkeypatch.setattr("lightning_fed.lab.report.page._MOST_CLIENTS", 4)
    for group, count in {"a": 1, "b": 3}.items():
        clients = "".join(f"1,{at}\n" for at in range(count))
        (write_run(tmp_path, group, 0, [0.1, 0.2]) / "clients.csv").write_text("round,client\n" + clients)
    assert main([str(tmp_path), "--format", "html"]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ": 1 client</summary>" in text
    assert ": the first 2 of 3 clients</summary>" in text


def test_a_missing_plotly_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    write_run(tmp_path, values=[0.1, 0.2])
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(FederatedError, match=r"--format html.*pip install 'lightning_fed\[html\]'"):
        main([str(tmp_path), "--format", "html"])
    assert not list(tmp_path.glob("report*"))


@pytest.mark.slow
def test_a_browser_finds_no_error_and_shows_the_numbers(page: Path, tmp_path: Path) -> None:
    use = """
      const click = (where, kinds) => kinds.forEach(kind => where.dispatchEvent(new MouseEvent(kind, {bubbles: true})));
      document.querySelectorAll("table")[0].querySelectorAll("button")[1].click();
      document.querySelectorAll("table")[2].querySelectorAll("button")[2].click();
      document.querySelectorAll("table")[2].querySelectorAll("button")[2].click();
      setTimeout(() => click(document.querySelector("#curves-0 .legendtoggle"), ["mousedown", "mouseup"]), 500);
      setTimeout(() => click(document.querySelectorAll("#curves-0 .updatemenu-button")[0], ["click"]), 2000);
      setTimeout(() => {
        const data = document.getElementById("curves-0").data;
        const drawn = data.map(trace => [trace.visible ?? true, trace.opacity ?? 1]);
        const names = [...document.querySelectorAll("#curves-0 .legendtext")].map(text => text.textContent);
        document.title = JSON.stringify([names, drawn]);
      }, 3000);
    """
    shown, console = opened(page, use, tmp_path)
    assert console == []
    read = Page(shown)
    # Sorted by the final value, and by the clients' accuracy from the top.
    assert [line[1] for line in read.tables[0][1:]] == ["75.00 ± 7.07", "80.00 ± 14.14"]
    assert [line[2] for line in read.tables[2][1:]] == ["0.75", "0.5", "0.25"]
    assert shown.count('class="main-svg"') >= 3
    names, drawn = json.loads(unescape(shown.partition("<title>")[2].partition("</title>")[0]))
    assert names == [f"{HOSTILE} (2 seeds)", "FedAvg (2 seeds)"]
    # The legend hides the first method with its band, the button all bands.
    assert drawn == [["legendonly", 0], ["legendonly", 1], [True, 0], [True, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
def test_a_page_is_as_wide_as_the_window(page: Path, tmp_path: Path, width: int) -> None:
    assert fits_the_window(page, tmp_path, width)


@pytest.mark.slow
def test_a_page_that_is_wider_would_be_found(page: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide.html"
    text = page.read_text(encoding="utf-8")
    wide.write_text(text.replace("<body>", '<body><div style="width: 500px">wide</div>'), encoding="utf-8")
    assert not fits_the_window(wide, tmp_path, 400)
    assert fits_the_window(wide, tmp_path, 1280)


@pytest.mark.slow
def test_an_error_in_a_page_would_be_found(tmp_path: Path) -> None:
    empty = tmp_path / "empty.html"
    empty.write_text('<!DOCTYPE html><meta http-equiv="Content-Security-Policy" content="img-src data:"><body></body>')
    _, console = opened(empty, "new Image().src = 'http://x.invalid/y.png'; broken();", tmp_path)
    assert any("broken is not defined" in line for line in console)
    assert any("Content Security Policy" in line for line in console)


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


@pytest.mark.parametrize("other", [None, "", "- a list"])
def test_a_config_that_says_nothing_is_not_compared(tmp_path: Path, other: str | None) -> None:
    assert config_differences(methods_of(tmp_path, a=FEDAVG, b=other)) == []


@pytest.mark.parametrize("other", ["a: [broken", "a: !!python/object:os.x {}", "\0", *ENDLESS])
def test_a_config_that_cannot_be_read_is_told(tmp_path: Path, other: str) -> None:
    with pytest.warns(UserWarning, match="Left out the options of a run. Expected .*/config.yaml to be a file of YAML"):
        assert config_differences(methods_of(tmp_path, a=FEDAVG, b=other)) == []


def test_an_option_of_thousands_of_brackets_is_text(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    methods_of(tmp_path, a="a: x", b=f"a: '{'[' * 100_000}'")
    assert set(notebook.load_runs(tmp_path)["a"]) == {"x", "[" * 100_000}


def test_clients_are_read_whole(tmp_path: Path) -> None:
    table = tmp_path / "clients.csv"
    assert client_table(table) == []
    table.write_text("round,client,samples,classes,no,loss,acc\n3,0,65,2,,0.804498,0.75\n3,100000,7,,,nan,1\n3,1,6")
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
