"""The published command lines ``pca-visualize`` and ``rotate-visualize``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkscope.cli.common import Quiet, Verbose, Version, errors_as_lines, log, set_up_logging
from qkscope.errors import ConfigError, TableError
from qkscope.progress import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qkscope.analyses.options import PointOptions
    from qkscope.results.job import Job
    from qkscope.results.study import Study

ConfigFile = Annotated[Path, typer.Option("--config", help="A config file.")]
Random = Annotated[bool, typer.Option("--random", help="Draw the heads with --seed.")]
Collage = Annotated[bool, typer.Option("--collage", help="Four heads, two by two.")]
SeedOf = Annotated[int, typer.Option("--seed", help="Seed of the heads.")]
_Layer = Annotated[int | None, typer.Option(min=0, help="This layer.")]
HeadOf = Annotated[int | None, typer.Option("--head", min=0, help="This query head.")]
ScaledPositions = Annotated[
    bool, typer.Option("--scaled-positions", help="Colour bars from 0 to 1: position / (window − 1).")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File to write, .png, .svg or .pdf; by default below the results folder."),
]

pca_visualize_app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
rotate_visualize_app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@pca_visualize_app.command(
    epilog="Example: pca-visualize --config configs/attention-plasticity/qwen3-4b.yaml --random --collage --qk"
)
def pca_visualize(
    config: ConfigFile,
    random: Random = False,
    collage: Collage = False,
    qk: Annotated[bool, typer.Option("--qk", help="Queries and keys together; otherwise queries alone.")] = False,
    seed: SeedOf = 42,
    layer: _Layer = None,
    head: HeadOf = None,
    pc_x: Annotated[int, typer.Option(min=0, max=255, help="Component on the horizontal axis.")] = 0,
    pc_y: Annotated[int, typer.Option(min=0, max=255, help="Component on the vertical axis.")] = 1,
    scaled_positions: ScaledPositions = False,
    output: Output = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Queries and keys of one head, or of four, on two principal components."""
    from qkscope.plot import MOST_POINTS, components_figure

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        from qkscope.analyses.options import PointOptions

        job, chosen = _choose(config, random, 4 if collage else 1, seed, layer, head)
        pca = replace(job.options.pca, n_components=max(job.options.pca.n_components, pc_x + 1, pc_y + 1))
        job = replace(job, options=replace(job.options, pca=pca))
        points = PointOptions(rows=MOST_POINTS, pcs=tuple(sorted({0, 1, pc_x, pc_y})))
        study = _study(job, chosen, ("pca",), points)
        figure = components_figure(study, chosen, (pc_x, pc_y), "qk" if qk else "q", scaled_positions=scaled_positions)
        kind = f"pc{pc_x}-pc{pc_y}{'-qk' if qk else ''}{'-scaled' if scaled_positions else ''}"
        _save(figure, output, job, kind, chosen, seed if random else None)


@rotate_visualize_app.command(
    epilog="Example: rotate-visualize --config configs/attention-plasticity/qwen3-4b.yaml --complement --random"
)
def rotate_visualize(
    config: ConfigFile,
    random: Random = False,
    collage: Collage = False,
    complement: Annotated[bool, typer.Option("--complement", help="The complement of a and b, of one head.")] = False,
    qk: Annotated[bool, typer.Option("--qk", help="Queries and keys together, as always here.")] = False,
    seed: SeedOf = 42,
    layer: _Layer = None,
    head: HeadOf = None,
    scaled_positions: ScaledPositions = False,
    output: Output = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Queries and keys in the plane of drift and separation, or the planes of one head's complement."""
    from qkscope.plot import MOST_POINTS, complement_figure, plane_figure

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        from qkscope.analyses.options import PointOptions

        if complement and collage:
            raise ConfigError("--complement shows one head; leave out --collage")
        job, chosen = _choose(config, random, 4 if collage else 1, seed, layer, head)
        if complement:
            study = _study(job, chosen, ("planes",), PointOptions(rows=MOST_POINTS))
            figure = complement_figure(study, chosen[0], scaled_positions=scaled_positions)
        else:
            study = _study(job, chosen, ("rotation",), PointOptions(rows=MOST_POINTS))
            figure = plane_figure(study, chosen, scaled_positions=scaled_positions)
        kind = f"{'complement' if complement else 'ab-plane'}{'-scaled' if scaled_positions else ''}"
        _save(figure, output, job, kind, chosen, seed if random else None)


def _choose(
    config: Path, random: bool, count: int, seed: int, layer: int | None, head: int | None
) -> tuple[Job, list[tuple[int, int]]]:
    """Return the config's run, and the heads that the options select."""
    from qkscope.headids import choose_heads
    from qkscope.results.config import load_configs
    from qkscope.results.job import Job

    configs = load_configs([config])
    if len(configs) != 1:
        raise ConfigError(f"expected one config, got {len(configs)} in {config}")
    job = Job.from_config(configs[0])
    targets = [(h.layer, h.head) for h in job.selection.of(job.run)]
    targets = [t for t in targets if (layer is None or t[0] == layer) and (head is None or t[1] == head)]
    if not targets:
        named = [f"{name} {number}" for name, number in (("layer", layer), ("head", head)) if number is not None]
        raise ConfigError(
            f"{job.run.model} has no query head with {' and '.join(named)}; see the config's layers and heads"
        )
    if not random and len(targets) > count:
        raise ConfigError("choose a head with --random, or with --layer and --head")
    # Four heads are drawn even if one is shown, so that it is the first one of the collage.
    return job, (choose_heads(targets, seed)[:count] if random else sorted(targets)[:count])


def _study(job: Job, heads: list[tuple[int, int]], analyses: tuple[str, ...], points: PointOptions) -> Study:
    """Tables of the heads; their points are written to points.parquet in the results folder and read back."""
    from qkscope.plot import heads_study
    from qkscope.results.side import POINTS

    folder = _folder(job)
    log.info("reading %s of %s", plural(len(heads), "head"), job.run.source)
    study = heads_study(job, heads, analyses, points)
    if "points" not in study.tables:
        raise TableError(f"{job.run.model}: too few vectors of {heads[0]} for a figure")
    POINTS.write(folder, study.tables["points"])
    points_table = POINTS.read(folder)
    return study if points_table is None else replace(study, tables=study.tables | {"points": points_table})


def _folder(job: Job) -> Path:
    output = job.config.get("output")
    return Path(output["results_dir"]) if isinstance(output, dict) else Path("results")


def _save(
    figure: Figure, output: Path | None, job: Job, kind: str, heads: list[tuple[int, int]], seed: int | None
) -> None:
    from qkscope.figures.style import house_style
    from qkscope.figures.write import save
    from qkscope.headids import head_name

    heads_text = f"seed{seed}" if seed is not None else "-".join(head_name(*head) for head in heads)
    path = output or _folder(job) / "figures" / f"{job.run.model.replace('/', '_')}-{kind}-{heads_text}.png"
    with house_style():
        save(figure, path)
    typer.echo(str(path.resolve()))


def run_pca_visualize() -> None:
    """Entry point of ``pca-visualize``."""
    pca_visualize_app()


def run_rotate_visualize() -> None:
    """Entry point of ``rotate-visualize``."""
    rotate_visualize_app()
