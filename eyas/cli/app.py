"""The command line: one typer application; every command is a thin layer over one library function."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from eyas.cli.bench import app as bench
from eyas.cli.check import check
from eyas.cli.data import show
from eyas.cli.demo import demo
from eyas.cli.export import export
from eyas.cli.generate import generate
from eyas.cli.respond import respond
from eyas.cli.scaling import scaling
from eyas.cli.train import train
from eyas.progress import console
from eyas.target import transformers_quietly
from eyas.threads import choose_threads


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # which typer would pass over in silence
            print("stopped", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
)  # fmt: skip
data = typer.Typer(help="Look at training data.", no_args_is_help=True)
data.command("show")(show)
app.command()(demo)
app.command()(respond)
app.command()(train)
app.command()(scaling)
app.command()(generate)
app.command()(export)
app.command()(check)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")


@app.callback()
def prepare(context: typer.Context) -> None:
    """Train, measure and run EAGLE-3 draft heads: the same tokens, sooner."""
    transformers_quietly()
    if context.invoked_subcommand != "demo":  # which only starts the others
        console.print(f"using {choose_threads()}", style="dim")
