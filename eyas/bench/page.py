"""A benchmark as one page of HTML that needs nothing beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from eyas.bench import plots
from eyas.bench.figures import DEFINITIONS, PLAIN
from eyas.bench.grid import Report
from eyas.bench.report import HEADLINES, condition_rows, figure_rows, remarks, shortened, span, title
from eyas.bench.training_log import TrainingLog
from eyas.files import write_text


def html(report: Report, log: TrainingLog | None = None) -> str:
    """All races, and the training they follow, as one page that loads nothing."""
    names = list(report.races[0].drafters)
    bests = [(race, *race.best) for race in report.races if race.best]
    return render_page(
        "report.html.j2",
        report=report,
        first=report.races[0],
        best=max(bests, key=lambda found: found[2].speedup.value, default=None),
        headlines=HEADLINES,
        target=Path(report.races[0].conditions.target).name,
        series={name: plots.series(i) for i, name in enumerate(names)},
        speculative=[name for name in names if name != PLAIN],
        views=[
            {
                "race": race,
                "title": title(race).plain,
                "best": race.best,
                "plain": race.drafters[PLAIN],
                "rows": list(figure_rows(race)),
                "remarks": remarks(race),
                "speed": plots.speed(race, f"speed{i}"),
                "acceptance": plots.acceptance(race, f"acceptance{i}"),
                "position": plots.position(race, f"position{i}"),
            }
            for i, race in enumerate(report.races)
        ],
        batches=plots.batches(report.races),
        sweep_plots=plots.sweep(report.sweep) if report.sweep else [],
        conditions=condition_rows(report.races[0].conditions),
        definitions=DEFINITIONS,
        training=plots.training(log) if log else [],
    )


def render_page(template: str, **told: Any) -> str:
    """The template `template` of this room, filled with `told`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eyas.bench"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(span=span, shortened=shortened)
    return environment.get_template(template).render(**told)


def write_html(report: Report, path: Path, log: TrainingLog | None = None) -> None:
    """Write the page. Raises EyasError when it cannot be written."""
    write_text(path, html(report, log))
