"""A check-up for people: one screen of it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from eyas.doctor.check import Checkup
from eyas.doctor.trials import spelt
from eyas.tables import bare_table
from eyas.training.acceptance import chain_tau

STYLES = {"ill": "bold red", "warning": "yellow"}


def screen(checkup: Checkup) -> RenderableType:
    """The verdict, every finding with its cure, and what was accepted."""
    ills = [finding.name for finding in checkup.findings if finding.severity == "ill"]
    verdict = Text(f"ill: {', '.join(ills)}", "bold red") if ills else Text("healthy", "bold green")
    parts: list[RenderableType] = [
        Text.assemble(verdict, (f"   {checkup.head} ({checkup.layout} layout) for {checkup.target}", "dim")), ""
    ]  # fmt: skip
    for finding in checkup.findings:
        where = f"  [{', '.join(finding.engines)}]" if finding.engines else ""
        parts += [
            Text.assemble((finding.name, STYLES[finding.severity]), (where, "dim")),
            Text(f"  {finding.told}"),
            Text.assemble("  ", ("cure: ", "bold"), finding.cure),
            "",
        ]
    parts.append(_acceptance(checkup) if checkup.measured else Text("it cannot be run, so nothing was measured"))
    return Group(*parts)


def _acceptance(checkup: Checkup) -> RenderableType:
    shown = bare_table(["accepted of a greedy chain", "n-alpha", "tau"])
    for one in checkup.measured:
        shown.add_row(f"as {', '.join(one.engines)} read it", spelt(one.n_alpha), f"{one.tau:.2f}")
        if one.cured:
            shown.add_row(f"  cured of {', '.join(one.cured)}", spelt(one.cured_n_alpha), f"{one.cured_tau:.2f}")
    if checkup.logged_n_alpha:
        shown.add_row(
            "its training log, held-out texts", spelt(checkup.logged_n_alpha), f"{chain_tau(checkup.logged_n_alpha):.2f}"
        )
    return Group(shown, Text(f"judged on {checkup.tokens:,} tokens of the target", "dim"))
