"""A benchmark for people: tables for the terminal, and for a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyas.bench.colour import Stretch, styled
from eyas.bench.figures import DEFINITIONS, PLAIN, Conditions, Figures, Interval, RaceReport
from eyas.bench.grid import Report
from eyas.tables import bare_table, markdown_table

HEADLINES = ("tokens/s", "speed-up", "tokens identical")
FIRST = (*HEADLINES, "near-ties", "tau")  # figures of the first table where drafters have rows of their own
MOST_PARTS = 10  # told in a line of the terminal; the JSON and the page hold all


def table(race: RaceReport, *, explained: bool = True) -> RenderableType:
    """A race's figures for a terminal, then acceptance by depth and by part; `explained`: each with its definition, and the
    conditions below."""
    beside = explained and len(race.drafters) <= 2  # with more drafters there is no room beside the figures
    parts: list[RenderableType] = [_by_figure(race, beside)] if len(race.drafters) <= 2 else [*_by_drafter(race)]
    drafters = {name: f for name, f in race.drafters.items() if f.n_alpha}
    if drafters:
        parts += ["", _by_depth(drafters, beside)]
    suites = suite_rows(race)
    if suites:
        parts += ["", bare_table(*suites)]
    lines = [line for name, f in race.speculative.items() for line in part_lines(name if len(race.speculative) > 1 else "", f)]
    if lines:
        parts += ["", *map(Text, lines)]
    if explained and not beside:
        parts += ["", *definitions()]
    if explained:
        parts += ["", *[Text(line, style="dim") for line in footnotes(race)]]
    return Group(*parts)


def _by_figure(race: RaceReport, beside: bool) -> Table:
    """A row for every figure, its definition `beside` it."""
    shown = bare_table(["", *race.drafters, *[""] * beside])
    if beside:
        _explain(shown)
    for label, cells in figure_rows(race):
        style = "bold" if label in HEADLINES else ""
        shown.add_row(Text(label), *[Text(c, style) for c in cells], *[Text(DEFINITIONS[label])] * beside)
    return shown


def _by_drafter(race: RaceReport) -> Iterator[RenderableType]:
    """A row for every drafter: first what is asked first, then the rest."""
    rows = list(figure_rows(race))
    for number, chosen in enumerate(([r for r in rows if r[0] in FIRST], [r for r in rows if r[0] not in FIRST])):
        by_drafter = zip(race.drafters, *(cells for _, cells in chosen), strict=True)
        yield from [""] * number
        yield bare_table(["", *(label.replace(" ", "\n") for label, _ in chosen)], by_drafter)


def _by_depth(drafters: dict[str, Figures], beside: bool) -> Table:
    """How much was accepted at every depth of the draft, in both ways of counting."""
    deepest = max(len(f.n_alpha) for f in drafters.values())
    shown = bare_table(["accepted at depth", *map(str, range(1, deepest + 1)), *[""] * beside])
    if beside:
        _explain(shown)
    for name, f in drafters.items():
        for kind, rates in (("n-alpha", f.n_alpha), ("joint", f.joint)):
            cells = [f"{r:.2f}" for r in rates] + [""] * (deepest - len(rates))
            shown.add_row(kind if len(drafters) == 1 else Text(f"{kind}, {name}"), *cells, *[Text(DEFINITIONS[kind])] * beside)
    return shown


def _explain(shown: Table) -> None:
    """Make the last column one of definitions, which may wrap."""
    last = shown.columns[-1]
    last.style, last.justify, last.ratio, last.no_wrap = "dim", "left", 1, False


def suite_rows(race: RaceReport) -> tuple[list[str], list[list[str]]] | None:
    """(headings, rows): tau and speed-up of every drafter in every suite; None where there is one suite, or plain alone."""
    suites = list(race.drafters[PLAIN].parts["suite"])
    if len(suites) < 2 or not race.speculative:
        return None
    rows = []
    for name, f in race.speculative.items():
        parts = [f.parts["suite"][suite] for suite in suites]
        rows.append([name, *(f"{part.tau:.2f}  {part.speedup:.2f}x" for part in parts)])
    return ["tau, speed-up", *suites], rows


def part_lines(name: str, f: Figures) -> Iterator[str]:
    """tau by category, turn and position, a line each, where there is more than one part."""
    for kind, parts in f.parts.items():
        same = kind == "category" and parts.keys() == f.parts["suite"].keys()
        if len(parts) > 1 and kind != "suite" and not same:
            told = [f"{part} {one.tau:.2f}" for part, one in parts.items()]
            more = [f"and {len(told) - MOST_PARTS} more"] if len(told) > MOST_PARTS else []
            yield f"tau by {kind}{f', {name}' if name else ''}:  " + "  ".join(told[:MOST_PARTS] + more)


def definitions() -> list[Text]:
    """What every figure means, a line each."""
    return [Text(f"{label}: {told}", "dim") for label, told in DEFINITIONS.items()]


def title(race: RaceReport) -> Text:
    """Which of a report's races this is."""
    return Text("T {:g}, batch {}".format(*race.cell), "bold underline")


def summary(report: Report) -> RenderableType:
    """All races of a report in one table: speed-up and tau of every drafter, and whether its tokens were plain's; then tau and
    speed-up by suite."""
    rows: list[list[str]] = []
    by_suite: list[RenderableType] = []
    for race in report.races:
        cell = [f"{race.cell[0]:g}", str(race.cell[1])]
        for name, f in race.drafters.items():
            told = _told(f)
            speedup, same = ("1", "-") if name == PLAIN else (told["speedup"], told["same"])
            rows.append([*cell, name, told["speed"], speedup, told["tau"], same])
            cell = ["", ""]
        suites = suite_rows(race)
        if suites:
            by_suite += ["", title(race), bare_table(*suites)]
    first = report.races[0]
    lines = [_told_conditions(first, ("T", "batch")), *_drafters(first)]
    lines += [f"{title(race)}: {line}" for race in report.races for line in remarks(race)]
    unfinished = ", ".join("T {:g} at batch {}".format(*cell) for cell in report.unfinished)
    if unfinished:
        lines.append(f"not run to the end: {unfinished}")
    shown = bare_table(["T", "batch", "drafter", "tokens/s", "speed-up", "tau", "identical"], rows)
    return Group(shown, *by_suite, "", *definitions(), "", *[Text(line, "dim") for line in lines])


def markdown(report: Report) -> str:
    """The report for a page of Markdown: a table of drafters and suites for every race, what it depends on, the command."""
    parts = []
    for race in report.races:
        headings = ["drafter", "tau", "speed-up", "tokens identical"]
        cells: dict[str, list[str]] = {name: [] for name in race.speculative}
        suites = suite_rows(race)
        if suites:
            headings += suites[0][1:]
            cells = {name: told for name, *told in suites[1]}
        rows = [[name, span(f.tau, ""), span(f.speedup), f.same, *cells[name]] for name, f in race.speculative.items()]
        parts += [f"### {title(race)}", markdown_table(headings, rows), "\n".join(footnotes(race))]
    return "\n\n".join([*parts, *(f"```\n{command}\n```" for command in report.commands)]) + "\n"


def figure_rows(race: RaceReport) -> Iterator[tuple[str, list[str]]]:
    """(figure, its value for every drafter) in the order of a table; figures without a meaning for one show a dash."""
    drafters = race.drafters

    def row(label: str, plain: str, cell: str) -> tuple[str, list[str]]:
        pattern = {True: plain, False: cell}
        return label, [pattern[name == PLAIN].format(f=f, **_told(f)) for name, f in drafters.items()]

    yield row("tokens/s", "{speed}", "{speed}")
    yield row("speed-up", "1", "{speedup}")
    yield row("tokens identical", "-", "{same}")
    if not race.conditions.bit_exact:
        yield row("near-ties", "{ties}", "{ties}")
    yield row("tau", "1", "{tau}")
    yield row("target forwards", "{f.target_forwards:,}", "{f.target_forwards:,}")
    yield row("k", "-", "{f.k:.1f}")
    yield row("drafted", "-", "{f.drafted:,}")
    yield row("accepted", "-", "{f.accepted:,}")
    yield row("time", "{time}", "{time}")
    yield row("prefill", "{f.prefill_s:.1f} s", "{f.prefill_s:.1f} s")
    yield row("peak memory", "{memory}", "{memory}")


def _told(f: Figures) -> dict[str, str]:
    time = f"{100 * f.share_draft:.0f}/{100 * f.share_verify:.0f}/{100 * f.share_other:.0f} %"
    told = {"speed": f"{f.tokens_per_s.value:.1f}", "speedup": span(f.speedup), "same": f.same, "time": time}
    told["tau"] = span(f.tau, "")
    told["memory"] = f"{f.peak_mib:,.0f} MiB" if f.peak_mib else "-"
    told["ties"] = "-" if f.is_peer else f"{f.near_ties:,}"  # a peer counts none
    if f.is_peer and not f.share_verify:
        told["time"] = "-"  # nor do all tell where it goes
    return told


def span(interval: Interval, unit: str = "x") -> str:
    """A speed-up with its interval: 1.42x [1.36, 1.49]."""
    told = f"{interval.value:.2f}{unit}"
    return told if interval.low == interval.high else f"{told} [{interval.low:.2f}, {interval.high:.2f}]"


def footnotes(race: RaceReport) -> list[str]:
    """What has to be known beside the figures: conditions, drafters, noise, what was left out."""
    return [_told_conditions(race, ()), *_drafters(race), *remarks(race)]


def _told_conditions(race: RaceReport, without: tuple[str, ...]) -> str:
    rows = condition_rows(race.conditions, short=True)
    return ", ".join(f"{key} {value}" for key, value in rows if key not in without)


def _drafters(race: RaceReport) -> list[str]:
    return [f"{name}: {f.source}, weights {f.head or '-'}, tree {f.tree}" for name, f in race.speculative.items()]


def remarks(race: RaceReport) -> list[str]:
    """What has to be known of one race: its noise, what was left out, that it was stopped."""
    lines = []
    if race.noise is not None:
        low, high = 100 * (race.noise.ratio.low - 1), 100 * (race.noise.ratio.high - 1)
        lines.append(f"noise {low:+.1f} to {high:+.1f} %: {DEFINITIONS['noise']}")
        if race.noise.differing:
            lines.append(f"plain decoding contradicts itself: {race.noise.differing} answers differ when run again")
    if race.skipped:
        first = race.skipped[0]
        count = "1 prompt" if len(race.skipped) == 1 else f"{len(race.skipped)} prompts"
        lines.append(f"left out: {count} for want of room (first: {first.id}, {first.why})")
    if race.interrupted:
        lines.append("interrupted: the race was stopped before all prompts were answered")
    return lines


def condition_rows(c: Conditions, *, short: bool = False) -> list[tuple[str, str]]:
    """(name, value) of the conditions; `short` leaves out what a terminal's line has no room for."""
    prompts = f"{c.prompts} ({', '.join(c.suites)})"
    if c.repeated:
        prompts += f", {c.repeated} asked again to fill batches"
    length = f"{c.max_new_tokens}, EOS ignored" if c.ignore_eos else f"up to {c.max_new_tokens}"
    seed = str(c.seed) if c.rule == "coupled" else f"{c.seed}, {c.rule} sampling"
    main = [
        ("target", f"{c.target} ({c.fingerprint})"), ("T", f"{c.temperature:g}"), ("seed", seed),
        ("new tokens", length), ("batch", str(c.batch)), ("prompts", prompts),
        ("dtype", c.dtype), ("weights", c.weights), ("tokens", "bit-exact" if c.bit_exact else "exact up to near-ties"),
        ("template", c.template),
        ("machine", f"{c.machine}, {c.threads} threads" if c.threads != 1 else f"{c.machine}, 1 thread"),
    ]  # fmt: skip
    if short:
        return main
    sampling = f"top-p {c.top_p:g}, top-k {c.top_k or 'off'}, min-p {c.min_p:g}"
    software = f"eyas {c.eyas}, torch {c.torch}, transformers {c.transformers}"
    return [*main, ("device", c.device), ("sampling", sampling), ("software", software), ("date", c.date)]


def sample_text(race: RaceReport) -> Text:
    """The first kept answer, accepted drafts in colour, under its question; empty when none was kept."""
    if not race.samples:
        return Text()
    sample = race.samples[0]
    question = shortened(sample.prompt, 70)
    head = Text(f'{sample.drafter} answers "{question}" (bold green: drafted and accepted)\n', "dim")
    return head + styled(Stretch(*told) for told in sample.stretches)


def shortened(text: str, length: int) -> str:
    """`text` on one line, at most `length` characters long."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."
