"""A measured server for people: tables for the terminal, and one page of HTML that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from eyas.bench.live import plots
from eyas.bench.live.advice import ASSUMPTIONS
from eyas.bench.live.figures import DEFINITIONS, Advice, Level, LiveReport, Side, Spread
from eyas.bench.page import render_page
from eyas.bench.report import span
from eyas.files import write_text
from eyas.tables import bare_table

COUNTED = "by the server's counters over all levels"
ESTIMATED = "estimated from the server's mean acceptance length, as if drafts at all depths were accepted alike often"
SPREADS = "two values are the median and the 95th percentile over answers"
HEADINGS = ("at a time", "tokens/s", "first token", "per token", "answer", "accepted")
AGAINST = ("at a time", "tokens/s", "baseline", "speed-up")


def table(report: LiveReport) -> RenderableType:
    """The figures for a terminal, the advice, and what all of it means."""
    parts: list[RenderableType] = []
    for title, names, rows in grids(report):
        parts += [Text(title, "bold"), bare_table(names, rows, left=0), ""]
    told = ", ".join(f"{name} {value}" for name, value in condition_rows(report))
    parts += [Text(line, "dim") for line in (*footnotes(report), told)]
    return Group(*parts, "", *[Text(f"{name}: {told}", "dim") for name, told in DEFINITIONS.items()], Text(SPREADS, "dim"))


def grids(report: LiveReport) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """(title, headings, rows) of every table: the servers, one against the other, and what is advised."""
    for name, side in sides(report):
        yield f"{name} {side.url}, {side.model}", HEADINGS, [_level(level) for level in side.levels]
    if report.speedups:
        yield "with the head against the baseline", AGAINST, list(_against(report))
    if report.advice:
        steps = [f"{k} step" if k == 1 else f"{k} steps" for k in range(len(report.tokens_per_round))]
        rows = [
            [str(a.concurrency), f"{a.round_cost:.2f}x", *[f"{s:.2f}x" for s in a.speedups], best(a)] for a in report.advice
        ]
        yield "speed-up that so many draft steps a round would bring", ("at a time", "a round costs", *steps, "best"), rows


def sides(report: LiveReport) -> list[tuple[str, Side]]:
    return [("server", report.server), *([("baseline", report.baseline)] if report.baseline else [])]


def _level(level: Level) -> list[str]:
    times = [_seconds(spread) for spread in (level.first, level.per_token, level.answer)]
    accepted = f"{level.acceptance.length:.2f}" if level.acceptance else "-"
    return [str(level.concurrency), f"{level.tokens_per_s:.1f}", *times, accepted]


def _against(report: LiveReport) -> Iterator[list[str]]:
    for concurrency, ratio in report.speedups.items():
        speeds = [f"{level.tokens_per_s:.1f}" for _, side in sides(report) if (level := side.at(concurrency))]
        yield [str(concurrency), *speeds, span(ratio)]


def _seconds(spread: Spread) -> str:
    """Median and 95th percentile: milliseconds below a second."""
    if spread.median != spread.median:
        return "-"
    if spread.p95 < 1:
        return f"{1000 * spread.median:.0f}, {1000 * spread.p95:.0f} ms"
    return f"{spread.median:.2f}, {spread.p95:.2f} s"


def best(advice: Advice) -> str:
    """The number of steps that brings most, in words: the most that were measured may not be the most that pay."""
    if advice.best == 0:
        return "do not draft"
    return f"{advice.best}" if advice.best < len(advice.speedups) - 1 else f"{advice.best} or more"


def footnotes(report: LiveReport) -> list[str]:
    """What has to be known beside the figures: acceptance, what is missing for the advice, failures, conditions."""
    lines = []
    if report.tokens_per_round:
        told = ", ".join(f"{tokens:.2f} with {k}" for k, tokens in enumerate(report.tokens_per_round[1:], 1))
        lines.append(f"tokens a round: {told} draft steps, {ESTIMATED if report.estimated else COUNTED}")
    if report.advice:
        lines.append(f"advice: {ASSUMPTIONS}")
    elif report.server.drafts:
        lines.append(f"advice: {_why_none(report)}")
    if report.conditions.beyond_openai:
        lines.append(
            f"asked for by {', '.join(report.conditions.beyond_openai)}, which OpenAI's API lacks: a server that does not know "
            "these may refuse or ignore them"
        )
    for name, side in sides(report):
        if side.remark and (name == "server" or side.drafts):
            lines.append(f"{name}: {side.remark}")
        for level in side.levels:
            if level.asked > report.conditions.prompts:
                again = level.asked - report.conditions.prompts
                lines.append(f"{name}, {level.concurrency} at a time: {again} of {level.asked} requests ask a prompt again")
            if level.failed:
                reasons = "; ".join(f"{count} times {reason}" for reason, count in level.failures.items())
                lines.append(f"{name}, {level.concurrency} at a time: {level.failed} requests failed ({reasons})")
    if report.baseline is not None and report.baseline.drafts:
        lines.append("the baseline drafts as well, so this is no comparison with plain decoding")
    if report.stopped:
        lines.append(f"stopped early: {report.stopped}; the levels shown were finished")
    return lines


def _why_none(report: LiveReport) -> str:
    """Why there is no advice."""
    if not report.tokens_per_round:
        return "none, for the server tells neither its acceptance by position nor how many steps it drafts"
    if report.baseline is None:
        return "which number of draft steps pays needs --baseline, the same model served without the head"
    return "none, for no concurrency was measured with and without the head"


def condition_rows(report: LiveReport) -> list[tuple[str, str]]:
    c = report.conditions
    return [
        ("T", f"{c.temperature:g}"), ("new tokens", f"up to {c.max_new_tokens}"),
        ("prompts", f"{c.prompts} ({', '.join(c.suites)}), the first question of each"),
        ("asked from", c.machine), ("eyas", c.eyas), ("date", c.date),
    ]  # fmt: skip


def html(report: LiveReport) -> str:
    """The measurement as one page that loads nothing."""
    return render_page(
        "live.html.j2",
        report=report,
        grids=list(grids(report)),
        conditions=condition_rows(report),
        footnotes=[*footnotes(report), SPREADS],
        definitions=DEFINITIONS,
        speed=plots.throughput(report),
        latency=plots.per_token(report),
    )


def write_html(report: LiveReport, path: Path) -> None:
    """Write the page. Raises EyasError when the disk does not take it."""
    write_text(path, html(report))
