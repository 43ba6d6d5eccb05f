"""A race for people: tables for the terminal, and one page of HTML that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jinja2
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyas.bench import plots
from eyas.bench.colour import Stretch, styled
from eyas.bench.figures import DEFINITIONS, PLAIN, Conditions, Figures, Interval, RaceReport
from eyas.bench.training_log import TrainingLog
from eyas.files import write_text

HEADLINES = ("tokens/s", "speed-up", "tokens identical")


def table(report: RaceReport) -> RenderableType:
    """The race's figures for a terminal, each with its definition, then acceptance by depth and the conditions."""
    beside = len(report.drafters) <= 2  # with more drafters there is no room beside the figures
    shown = _columns(["", *report.drafters], beside)
    for label, cells in figure_rows(report):
        style = "bold" if label in HEADLINES else ""
        _add(shown, label, [Text(c, style) for c in cells], beside)
    parts: list[RenderableType] = [shown]
    drafters = {name: f for name, f in report.drafters.items() if f.n_alpha}
    if drafters:
        deepest = max(len(f.n_alpha) for f in drafters.values())
        depths = _columns(["accepted at depth", *map(str, range(1, deepest + 1))], beside)
        for name, f in drafters.items():
            for kind, rates in (("n-alpha", f.n_alpha), ("joint", f.joint)):
                cells = [f"{r:.2f}" for r in rates] + [""] * (deepest - len(rates))
                _add(depths, kind if beside else f"{kind}, {name}", [Text(c) for c in cells], beside, kind)
        parts += ["", depths]
    if not beside:
        parts += ["", *[Text(f"{label}: {told}", "dim") for label, told in DEFINITIONS.items()]]
    parts += ["", *[Text(line, style="dim") for line in footnotes(report)]]
    return Group(*parts)


def _columns(names: list[str], definitions: bool) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in names:
        shown.add_column(Text(name), justify="left" if name == names[0] else "right", no_wrap=True)
    if definitions:
        shown.add_column("", style="dim", ratio=1)
    return shown


def _add(shown: Table, label: str, cells: list[Text], definitions: bool, key: str = "") -> None:
    shown.add_row(Text(label), *cells, *([Text(DEFINITIONS[key or label])] if definitions else []))


def figure_rows(report: RaceReport) -> Iterator[tuple[str, list[str]]]:
    """(figure, its value for every drafter) in the order of a table; figures without a meaning for one show a dash."""
    drafters = report.drafters

    def row(label: str, plain: str, cell: str) -> tuple[str, list[str]]:
        pattern = {True: plain, False: cell}
        return label, [pattern[name == PLAIN].format(f=f, **_told(f)) for name, f in drafters.items()]

    yield row("tokens/s", "{speed}", "{speed}")
    yield row("speed-up", "1", "{speedup}")
    yield row("tokens identical", "-", "{same}")
    if not report.conditions.bit_exact:
        yield row("near-ties", "{f.near_ties:,}", "{f.near_ties:,}")
    yield row("tau", "{f.tau.value:.2f}", "{f.tau.value:.2f}")
    yield row("target forwards", "{f.target_forwards:,}", "{f.target_forwards:,}")
    yield row("drafted", "-", "{f.drafted:,}")
    yield row("accepted", "-", "{f.accepted:,}")
    yield row("time", "{time}", "{time}")
    yield row("prefill", "{f.prefill_s:.1f} s", "{f.prefill_s:.1f} s")
    yield row("peak memory", "{f.peak_mib:,.0f} MiB", "{f.peak_mib:,.0f} MiB")


def _told(f: Figures) -> dict[str, str]:
    same = "yes" if f.identical else f"no: {f.differing} of {f.answers} differ"
    time = f"{100 * f.share_draft:.0f}/{100 * f.share_verify:.0f}/{100 * f.share_other:.0f} %"
    return {"speed": f"{f.tokens_per_s.value:.1f}", "speedup": span(f.speedup), "same": same, "time": time}


def span(interval: Interval) -> str:
    """A speed-up with its interval: 1.42x [1.36, 1.49]."""
    told = f"{interval.value:.2f}x"
    return told if interval.low == interval.high else f"{told} [{interval.low:.2f}, {interval.high:.2f}]"


def footnotes(report: RaceReport) -> list[str]:
    """What has to be known beside the figures: conditions, noise, what was left out."""
    lines = [", ".join(f"{key} {value}" for key, value in condition_rows(report.conditions, short=True))]
    for name, f in report.speculative.items():
        lines.append(f"{name}: head {f.head or '-'}, tree {f.tree}")
    if report.noise is not None:
        low, high = 100 * (report.noise.ratio.low - 1), 100 * (report.noise.ratio.high - 1)
        lines.append(f"noise {low:+.1f} to {high:+.1f} %: {DEFINITIONS['noise']}")
        if report.noise.differing:
            lines.append(f"plain decoding contradicts itself: {report.noise.differing} answers differ when run again")
    if report.skipped:
        first = report.skipped[0]
        count = "1 prompt" if len(report.skipped) == 1 else f"{len(report.skipped)} prompts"
        lines.append(f"left out: {count} for want of room (first: {first.id}, {first.why})")
    if report.interrupted:
        lines.append("interrupted: the race was stopped before all prompts were answered")
    return lines


def condition_rows(c: Conditions, *, short: bool = False) -> list[tuple[str, str]]:
    """(name, value) of the conditions; `short` leaves out what a terminal's line has no room for."""
    prompts = f"{c.prompts} ({', '.join(c.suites)})"
    main = [
        ("target", f"{c.target} ({c.fingerprint})"), ("T", f"{c.temperature:g}"), ("seed", str(c.seed)),
        ("new tokens", f"up to {c.max_new_tokens}"), ("batch", str(c.batch)), ("prompts", prompts),
        ("dtype", c.dtype), ("weights", c.weights), ("tokens", "bit-exact" if c.bit_exact else "exact up to near-ties"),
        ("template", c.template),
        ("machine", f"{c.machine}, {c.threads} threads" if c.threads != 1 else f"{c.machine}, 1 thread"),
    ]  # fmt: skip
    if short:
        return main
    sampling = f"top-p {c.top_p:g}, top-k {c.top_k or 'off'}, min-p {c.min_p:g}"
    software = f"eyas {c.eyas}, torch {c.torch}, transformers {c.transformers}"
    return [*main, ("device", c.device), ("sampling", sampling), ("software", software), ("date", c.date)]


def sample_text(report: RaceReport) -> Text:
    """The first kept answer, accepted drafts in colour, under its question; empty when none was kept."""
    if not report.samples:
        return Text()
    sample = report.samples[0]
    question = shortened(sample.prompt, 70)
    head = Text(f'{sample.drafter} answers "{question}" (bold green: drafted and accepted)\n', "dim")
    return head + styled(Stretch(*told) for told in sample.stretches)


def shortened(text: str, length: int) -> str:
    """`text` on one line, at most `length` characters long."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def html(report: RaceReport, log: TrainingLog | None = None) -> str:
    """The race, and the training it follows, as one page that loads nothing."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eyas.bench"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["span"] = span
    environment.filters["shortened"] = shortened
    return environment.get_template("report.html.j2").render(
        report=report,
        best=_best(report),
        plain=report.drafters[PLAIN],
        headlines=HEADLINES,
        target=Path(report.conditions.target).name,
        series={name: i % len(plots.SERIES) for i, name in enumerate(report.drafters)},
        rows=list(figure_rows(report)),
        conditions=condition_rows(report.conditions),
        footnotes=footnotes(report)[1:],
        definitions=DEFINITIONS,
        speed=plots.speed(report),
        acceptance=plots.acceptance(report),
        training=plots.training(log) if log else [],
    )


def _best(report: RaceReport) -> tuple[str, Figures] | None:
    """The fastest drafter beside plain decoding."""
    return max(report.speculative.items(), key=lambda pair: pair[1].speedup.value, default=None)


def write_html(report: RaceReport, path: Path, log: TrainingLog | None = None) -> None:
    """Write the page. Raises EyasError when the disk does not take it."""
    write_text(path, html(report, log))
