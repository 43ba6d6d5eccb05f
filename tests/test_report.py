"""What people see of a race: coloured text, tables, the page, and the commands that show them."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from eyas.bench.arithmetic import figures_of
from eyas.bench.colour import ACCEPTED_STYLE, Colourer, Stretch, merged, stretches, styled
from eyas.bench.figures import DEFINITIONS, PLAIN, Entry, RaceReport
from eyas.bench.grid import Report
from eyas.bench.items import Item
from eyas.bench.page import html, write_html
from eyas.bench.plots import series, smooth
from eyas.bench.race import Rules, race
from eyas.bench.report import markdown, sample_text, span, summary, table
from eyas.bench.training_log import read_training_log
from eyas.cli import generate as generate_command
from eyas.cli.app import app
from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.heads.files import head_hash, save_head
from eyas.heads.start import new_head
from tests.tiny import save_target, tiny_target

# -- coloured text --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(text=st.text(max_size=40), data=st.data())
def test_stretches_are_the_decoded_text(text: str, data: st.DataObject) -> None:
    tokenizer = tiny_target().tokenizer
    ids = [i for i in tokenizer(text, add_special_tokens=False)["input_ids"] if i is not None]
    accepted = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    found = stretches(ids, accepted, tokenizer)
    assert "".join(s.text for s in found) == tokenizer.decode(ids, skip_special_tokens=True)
    assert all(a.accepted != b.accepted for a, b in pairwise(found))


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 159), max_size=30), data=st.data())
def test_any_tokens_can_be_coloured(ids: list[int], data: st.DataObject) -> None:
    """A random target writes byte tokens that make no characters."""
    tokenizer = tiny_target().tokenizer
    accepted = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    whole = "".join(s.text for s in stretches(ids, accepted, tokenizer))
    assert whole == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_split_over_tokens_takes_the_colour_of_its_last() -> None:
    class Bytes:
        def decode(self, ids: list[int], **_: object) -> str:
            return bytes(ids).decode("utf-8", "replace")

    ids = list("aé🙂b".encode())  # 1 + 2 + 4 + 1 bytes
    accepted = [False, True, False, True, True, True, True, False]
    assert stretches(ids, accepted, Bytes()) == [("aé", False), ("🙂", True), ("b", False)]  # type: ignore[arg-type]
    assert stretches(ids[:4], [True] * 4, Bytes()) == [("aé", True), ("\ufffd", False)]  # type: ignore[arg-type]


def test_colours_can_be_fed_round_by_round() -> None:
    tokenizer = tiny_target().tokenizer
    ids = tokenizer("some text, fed in parts", add_special_tokens=False)["input_ids"]
    accepted = [i % 3 == 0 for i in range(len(ids))]
    colourer = Colourer(tokenizer)
    parts = [s for i in range(0, len(ids), 4) for s in colourer.feed(ids[i : i + 4], accepted[i : i + 4])]
    assert merged(parts + colourer.rest()) == stretches(ids, accepted, tokenizer)


def test_colour_marks_accepted_drafts_only() -> None:
    target = tiny_target()
    engine = Engine(target, Eagle3Drafter(target, a_head()), tree=TreeShape(3, 8, 24), max_length=128)
    results = engine.generate([Request([1, 40 + i, 7], SamplingParams(max_new_tokens=40)) for i in range(6)])
    result = max(results, key=lambda r: sum(r.accepted))
    assert any(result.accepted)
    found = stretches(result.ids, result.accepted, target.tokenizer)
    text = styled(found)
    assert text.plain == target.tokenizer.decode(result.ids, skip_special_tokens=True)
    marked = "".join(text.plain[s.start : s.end] for s in text.spans if s.style == ACCEPTED_STYLE)
    assert marked == "".join(s.text for s in found if s.accepted)


def a_head() -> object:
    return new_head(tiny_target(), torch.zeros(tiny_target().vocab_size, dtype=torch.long))


# -- the report -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> RaceReport:
    target = tiny_target()
    engines = {
        PLAIN: Engine(target, max_length=256),
        "EAGLE-3": Engine(target, Eagle3Drafter(target, a_head()), tree=TreeShape(3, 4, 10), max_length=256),
    }
    items = [Item(f"p{i}", "s", "c<&>", ({"role": "user", "content": f"<b>{i}</b>"},)) for i in range(3)]
    params = SamplingParams(max_new_tokens=20)
    entry = Entry(name="EAGLE-3", source="runs/head", hash="abc123")
    return race(target, engines, items, params, entries={"EAGLE-3": entry}, rules=Rules(noise=1))


def grid(*races: RaceReport) -> Report:
    return Report(contestants=[], planned=[one.cell for one in races], races=list(races))


def printed(shown: object, width: int = 150) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_table_has_every_figure_beside_its_definition(report: RaceReport) -> None:
    shown = printed(table(report))
    for label in ("tokens/s", "speed-up", "tokens identical", "tau", "target forwards", "n-alpha", "joint", "prefill"):
        (line,) = [line for line in shown.splitlines() if line.startswith(label)]
        assert DEFINITIONS[label][:30] in line
    assert re.search(r"tokens identical\s+-\s+yes", shown)
    for told in ("abc123", "3x4x10", report.conditions.fingerprint, report.conditions.template, "float32", "T 0"):
        assert told in shown
    assert "noise" in shown


def test_table_tells_of_differing_tokens_and_many_drafters(report: RaceReport) -> None:
    worse = report.model_copy(deep=True)
    worse.drafters["EAGLE-3"].differing = 2
    for number in range(8):
        worse.drafters["other" + str(number) * (number > 0)] = worse.drafters["EAGLE-3"]
    worse.interrupted = True
    shown = printed(table(worse), 100)
    assert re.search(r"^other7 .* no: 2 of 3 differ .*\d\.\d\d \[", shown, re.MULTILINE)
    assert re.search(r"^ +target .* peak *\n +forwards .* memory *$", shown, re.MULTILINE)
    assert "…" not in printed(table(worse), 100).split("accepted at depth")[0]
    shown = printed(table(worse))
    assert "no: 2 of 3 differ" in shown
    assert "n-alpha, other" in shown
    assert f"tau: {DEFINITIONS['tau']}" in shown
    assert "interrupted" in shown


def test_tau_and_speed_up_of_every_suite(report: RaceReport) -> None:
    two = report.model_copy(deep=True)
    for row in two.rows[1:]:
        row.suite = "t|u"
    told = {"source": "runs/head", "head": "abc123", "tree": "3x4x10", "peak_mib": 1.0}
    two.drafters = {name: figures_of(two.rows, name, **told) for name in two.drafters}
    part = two.drafters["EAGLE-3"].parts["suite"]["t|u"]
    cell = f"{part.tau:.2f}  {part.speedup:.2f}x"
    for shown in (printed(table(two)), printed(summary(grid(two, two)))):
        assert re.search(r"tau, speed-up +s +t\|u", shown) and cell in shown
    assert "tau, speed-up" not in printed(table(report))
    page = markdown(grid(two).model_copy(update={"commands": ["eyas bench --json r.json"]}))
    assert "| drafter | tau | speed-up | tokens identical | s | t\\|u |" in page and f"{cell} |" in page
    assert "### T 0, batch 1" in page and "abc123" in page and page.endswith("```\neyas bench --json r.json\n```\n")


def test_no_contestant_has_the_colour_of_plain_decoding() -> None:
    assert [series(n) for n in (0, 1, 11, 12, 22, 23)] == [0, 1, 11, 1, 11, 1]


def test_speed_up_shows_its_interval(report: RaceReport) -> None:
    found = report.drafters["EAGLE-3"].speedup
    assert re.fullmatch(r"\d\.\d\dx \[\d\.\d\d, \d\.\d\d\]", span(found))


def test_sample_is_shown_under_its_question(report: RaceReport) -> None:
    shown = sample_text(report)
    assert shown.plain.startswith('EAGLE-3 answers "<b>0</b>"')
    assert shown.plain.endswith("".join(text for text, _ in report.samples[0].stretches))
    assert sample_text(report.model_copy(update={"samples": []})).plain == ""


class Page(HTMLParser):
    """Collects what a browser would load, and checks that elements close."""

    VOID = ("meta", "br", "path", "use", "rect", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.ids += [told["id"]] if told.get("id") else []
        self.loads += [v for k, v in attrs if k in ("src", "href", "data", "srcset") and v and not v.startswith("#")]
        self.loads += [tag] if tag in ("script", "link", "iframe", "img") else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def log_lines(path: Path, *, cut: bool = False) -> Path:
    step = {"tokens": 9, "lr": 1e-4, "unroll": 2, "grad_norm": 1.0, "tokens_per_s": 100.0}
    lines = [
        {"step": i, "minutes": i / 10, "loss": [9 - i / 10] * (1 + i // 10), "accuracy": [0.3] * (1 + i // 10), **step}
        for i in range(20)
    ]  # fmt: skip
    lines.append({"eval": True, "step": 19, "minutes": 2.0, "n_alpha": [0.5, 0.4], "tau_estimate": 1.7})
    text = "\n".join(json.dumps(line) for line in lines) + "\n"
    path.write_text(text + '{"step": 20, "min' if cut else text)
    return path


def test_page_stands_alone(report: RaceReport, tmp_path: Path) -> None:
    log = read_training_log(log_lines(tmp_path / "log.jsonl"))
    write_html(grid(report), tmp_path / "page.html", log)
    text = (tmp_path / "page.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.loads == []
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', text)) <= set(page.ids)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", text)
    assert text.count("<svg") == 5  # speed, acceptance, and three of the training
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert not re.search(r"#0000[ef]\d", text)  # every reserved colour became one of the page's
    assert "1.70" in text  # the last evaluation


def test_page_and_summary_of_a_grid(report: RaceReport, tmp_path: Path) -> None:
    warm = report.model_copy(deep=True, update={"conditions": report.conditions.model_copy(update={"batch": 4})})
    several = grid(report, warm)
    several.planned.append((1.0, 1))
    page = Page()
    page.feed(html(several))
    assert page.open == [] and page.loads == []
    assert len(page.ids) == len(set(page.ids))
    text = html(several)
    assert text.count("<details") == 4 and "All races" in text and "Speed-up by batch size" in text
    assert "the best of 2 races" in text and "interrupted before all" in text
    shown = printed(summary(several), 100)
    assert re.search(r"0 +1 +plain .*\n +EAGLE-3 .*yes *\n0 +4 +plain", shown)
    assert "not run to the end: T 1 at batch 1" in shown and "T 0, batch 4: noise" in shown


def test_page_escapes_what_it_quotes(report: RaceReport) -> None:
    text = html(grid(report))
    assert "<b>0</b>" not in text and "&lt;b&gt;0&lt;/b&gt;" in text
    assert "c&lt;&amp;&gt;" in text


def test_page_shows_what_matters(report: RaceReport) -> None:
    text = html(grid(report))
    head = report.drafters["EAGLE-3"]
    for told in (
        f"{head.speedup.value:.2f}&times;",
        f"{head.tau.value:.2f}",
        "abc123",
        "3x4x10",
        report.conditions.machine,
    ):
        assert told in text
    for label in ("tau", "n-alpha", "joint", "speed-up", "noise"):
        assert DEFINITIONS[label].replace("'", "&#39;").replace("<", "&lt;") in text
    assert "How the head was trained" not in text
    assert "<mark>" in text
    worse = report.model_copy(deep=True)
    worse.drafters["EAGLE-3"].differing = 1
    assert "1 of 3 answers is not plain decoding" in html(grid(worse))


def test_page_without_a_drafter() -> None:
    target = tiny_target()
    items = [Item("p", "s", "c", ids=(5, 6))]
    alone = race(target, {PLAIN: Engine(target, max_length=64)}, items, SamplingParams(max_new_tokens=8))
    assert "No drafter took part" in html(grid(alone))
    assert "tokens/s" in printed(table(alone))


def test_training_log_may_be_cut_but_not_wrong(tmp_path: Path) -> None:
    log = read_training_log(log_lines(tmp_path / "cut.jsonl", cut=True))
    assert len(log.loss) == 20
    assert log.eval_tau == [1.7]
    assert len(log.accuracy[0]) == 1 and len(log.accuracy[-1]) == 2
    (tmp_path / "other.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
    with pytest.raises(EyasError, match="line 1 is not a line of a training log"):
        read_training_log(tmp_path / "other.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(EyasError, match="no step"):
        read_training_log(tmp_path / "empty.jsonl")
    with pytest.raises(EyasError, match="cannot read"):
        read_training_log(tmp_path / "none.jsonl")


def test_smoothing_starts_without_bias() -> None:
    assert smooth([2.0] * 100) == pytest.approx([2.0] * 100)
    assert smooth([1.0, 3.0]) == [1.0, 3.0]


# -- streaming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("show_drafts", [True, False])
def test_generate_streams_the_answer_and_its_statistics(show_drafts: bool) -> None:
    target = tiny_target()
    engine = Engine(target, Eagle3Drafter(target, a_head()), tree=TreeShape(3, 8, 24), max_length=128)
    request = Request([1, 41, 7], SamplingParams(max_new_tokens=40))
    plain = Engine(target, max_length=128).generate([request])[0]
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system="standard")
    generate_command.show(engine, request, console, show_drafts=show_drafts)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("\x1b[1;32m" in shown) == (show_drafts and engine.stats.accepted > 0)
    bare = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert re.search(r"\d+ tokens in .* s, .* tokens/s after .* of prefill, tau \d\.\d\d, \d+ target forwards", bare)
    assert re.search(r"\d+ near-ties", bare)  # of stock products
    said = target.tokenizer.decode(plain.ids, skip_special_tokens=True)
    assert printable(bare).startswith(printable(said))


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, a head for it and a suite of three prompts."""
    folder = tmp_path_factory.mktemp("disk")
    target = tiny_target()
    save_target(target, folder / "target")
    save_head(a_head(), folder / "head")  # type: ignore[arg-type]
    log_lines(folder / "head" / "log.jsonl")
    rows = [{"id": f"p{i}", "category": "chat", "turns": [f"say {i}", "again"]} for i in range(3)]
    (folder / "mt.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(disk: Path, *arguments: str) -> str:
    """What a command prints; an EyasError comes out as it is."""
    found = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160"})
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


def test_bench_from_the_command_line(disk: Path) -> None:
    common = ["bench", "--target", disk / "target", "--drafter", disk / "head", "--max-new-tokens", "12", "--tree", "2x2x4"]
    suites = ["--suites", disk, "--suite", "mt", "--limit", "2"]
    shown = command(disk, *common, *suites, "--json", disk / "out" / "a.json", "--html", disk / "out" / "a.html")
    assert re.search(r"tokens identical\s+-\s+yes", shown)
    (report,) = Report.read(disk / "out" / "a.json").races
    assert [(row.id, row.turn) for row in report.rows] == [("p0", 1), ("p0", 2), ("p1", 1), ("p1", 2)]
    assert report.drafters["head"].head == head_hash(disk / "head")
    assert report.drafters["head"].tree == "2x2x4"
    assert "How the head was trained" in (disk / "out" / "a.html").read_text()
    command(disk, *common, "--prompts", disk / "mt.jsonl", "--json", disk / "out" / "b.json")
    compared = command(disk, "bench", "compare", disk / "out" / "a.json", disk / "out" / "b.json")
    assert "2 prompts in both, 1 in one only" in compared


def test_bench_says_what_is_wrong_before_it_runs(disk: Path) -> None:
    bench = ["bench", "--target", disk / "target"]
    with pytest.raises(EyasError, match="--prompts"):
        command(disk, *bench)
    with pytest.raises(EyasError, match="no drafter"):
        command(disk, *bench, "--head", disk / "none", "--prompts", disk / "mt.jsonl")
    with pytest.raises(EyasError, match="called 'head'"):
        command(disk, *bench, "--head", disk / "head", "--head", disk / "head")
    with pytest.raises(EyasError, match="it is a folder"):
        command(disk, *bench, "--prompts", disk / "mt.jsonl", "--json", disk)
    with pytest.raises(EyasError, match="chain:K"):
        command(disk, *bench, "--tree", "big")


def test_generate_from_the_command_line(disk: Path) -> None:
    asked = ["generate", "--target", disk / "target", "--max-new-tokens", "12", "hello"]
    plain = command(disk, *asked)
    drafted = command(disk, *asked, "--head", disk / "head", "--tree", "chain:2")
    assert "tau 1.00" in plain
    assert "drafted tokens accepted" in drafted
    assert plain.rsplit("tokens in", 1)[0] == drafted.rsplit("tokens in", 1)[0]  # the same text


def printable(text: str) -> str:
    return "".join(c for c in text if c.isprintable() and not c.isspace())


def test_merged_drops_the_empty() -> None:
    assert merged([Stretch("", True), Stretch("a", False), Stretch("", True), Stretch("b", False)]) == [("ab", False)]
