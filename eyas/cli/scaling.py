"""`eyas scaling`: how acceptance grows with training data, EAGLE-3 against EAGLE-2."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from eyas.cli.options import Force, TargetChoice, Yes, consent, takes_target
from eyas.cli.output import stdout
from eyas.data.texts import training_texts
from eyas.errors import EyasError, first_fault
from eyas.progress import console
from eyas.scaling.plan import StudyConfig
from eyas.scaling.show import plot, sentences, table
from eyas.scaling.study import run_study
from eyas.training.settings import assign


@takes_target(weights="fp16")
def scaling(
    responses: Annotated[Path, typer.Argument(help="answers of the target, as `eyas respond` writes them")],
    target: TargetChoice,
    out: Annotated[Path, typer.Option(help="folder of the study; an interrupted one goes on there")] = Path("runs/scaling"),
    drafters: Annotated[
        str, typer.Option(help="eagle3, eagle1 (decoded as EAGLE-2) and medusa, commas between")
    ] = "eagle3,eagle1",
    sizes: Annotated[str, typer.Option(help="multiples of --texts")] = "1,2,4,8",
    texts: Annotated[int, typer.Option(help="texts to learn from at size 1")] = StudyConfig.model_fields["texts"].default,
    epochs: Annotated[float, typer.Option(help="of every arm where epochs are equal")] = StudyConfig.model_fields[
        "epochs"
    ].default,
    equal_steps: Annotated[bool, typer.Option(help="train every size once more with equal steps")] = True,
    choose: Annotated[int, typer.Option(help="texts that choose each arm's checkpoint")] = StudyConfig.model_fields[
        "choose"
    ].default,
    test: Annotated[int, typer.Option(help="texts that acceptance is estimated on")] = StudyConfig.model_fields["test"].default,
    answers: Annotated[
        int, typer.Option(help="of these, how many prompts are answered by decoding")
    ] = StudyConfig.model_fields["answers"].default,
    tree: Annotated[str, typer.Option(help="dynamic tree of all arms")] = StudyConfig.model_fields["tree"].default,
    tokens: Annotated[int, typer.Option(help="of each answer to a test prompt")] = StudyConfig.model_fields["tokens"].default,
    temperature: Annotated[float, typer.Option(help="of these answers")] = 0.0,
    max_length: Annotated[int, typer.Option(help="longer texts are left out, in tokens")] = StudyConfig.model_fields[
        "max_length"
    ].default,
    set_: Annotated[list[str] | None, typer.Option("--set", help="a setting of training, e.g. unroll=3; repeatable")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    features: Annotated[Path | None, typer.Option(help="feature store; default: in the study's folder")] = None,
    yes: Yes = False,
    force: Force = False,
) -> None:
    """Train heads on 1x, 2x, 4x, 8x of RESPONSES, everything else equal, and say what more data brings.

    Ctrl-C loses nothing: run the same command again.
    """
    settings: dict[str, object] = {}
    assign(settings, set_ or [])
    try:
        study = StudyConfig(
            drafters=_parts(drafters), sizes=_parts(sizes), texts=texts, epochs=epochs, choose=choose, test=test,
            answers=answers, tree=tree, tokens=tokens, temperature=temperature, max_length=max_length, equal_steps=equal_steps,
            seed=seed, settings=settings,
        )  # fmt: skip
    except ValidationError as error:
        raise EyasError(first_fault(error)) from error
    model = target.load()
    samples = training_texts(responses, model)
    try:
        result = run_study(model, samples, out, study, features=features or out / "features", consent=consent(yes, force))
    except KeyboardInterrupt:
        console.print(f"stopped; the study is kept in {out}, run the same command again to go on", markup=False)
        raise typer.Exit(130) from None
    page = stdout()
    page.print(table(result))
    for sentence in sentences(result):
        page.print(sentence, markup=False)
    plot(result, out / "scaling.svg")
    page.print(f"{out / 'scaling.json'}, {out / 'scaling.svg'}", markup=False)


def _parts(told: str) -> Any:
    """The parts between commas, for pydantic to read."""
    return [part.strip() for part in told.split(",") if part.strip()]
