"""The report as pictures; matplotlib comes with the extra ``[report]``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from sglang_verify_graphs.cli.report import CostReport, best_steps, even_lengths
from sglang_verify_graphs.errors import CostsError
from sglang_verify_graphs.estimate import Estimate

_COLUMNS = 60
"""Accept lengths of the map of best steps."""


def write_plots(report: CostReport, folder: Path) -> None:
    """Three PNGs; without matplotlib or a folder to write to, a ``CostsError``."""
    try:
        new_figure = import_module("matplotlib.figure").Figure
    except ImportError:
        raise CostsError(
            "--plots needs matplotlib; pip install 'sglang-verify-graphs[report]'"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in (
            ("round_cost", _round_cost), ("break_even", _break_even), ("best_steps", _best_steps),
        ):  # fmt: skip
            figure = new_figure(figsize=(8, 5), layout="constrained")
            draw(report, figure, figure.add_subplot())
            figure.savefig(folder / f"{name}.png", dpi=120)
    except OSError as error:
        raise CostsError(f"cannot write plots to {folder} ({error}); name another folder") from None


def _bars(axes: Any, xs: list[int], estimates: list[Estimate], **style: Any) -> None:
    values = [e.value for e in estimates]
    below = [e.value - e.low for e in estimates]
    above = [e.high - e.value for e in estimates]
    axes.errorbar(xs, values, (below, above), marker="o", capsize=3, **style)


def _round_cost(report: CostReport, figure: Any, axes: Any) -> None:
    for at in report.batches:
        widths = [row.draft_steps + 1 for row in at.steps]
        _bars(axes, widths, [row.round_ms for row in at.steps], label=f"batch {at.batch}")
    axes.set(xlabel="verify width (draft steps + 1)", ylabel="round, ms", ylim=(0, None))
    figure.legend(loc="outside right upper")


def _break_even(report: CostReport, figure: Any, axes: Any) -> None:
    for steps in sorted({row.draft_steps for at in report.batches for row in at.steps} - {0}):
        rows = [(at.batch, r) for at in report.batches for r in at.steps if r.draft_steps == steps]
        needed = [(batch, r.break_even) for batch, r in rows if r.break_even is not None]
        color = f"C{steps % 10}"
        if needed:
            _bars(
                axes, [batch for batch, _ in needed], [e for _, e in needed], color=color,
                label=f"{steps} steps: break-even",
            )  # fmt: skip
        if (seen := rows[0][1].accept_length) is not None:
            label = f"{steps} steps: {report.acceptance}"
            axes.axhline(seen.value, color=color, linestyle="--", label=label)
            axes.axhspan(seen.low, seen.high, color=color, alpha=0.15)
    axes.set(xlabel="batch", ylabel="accept length")
    figure.legend(loc="outside right upper")


def _best_steps(report: CostReport, figure: Any, axes: Any) -> None:
    """Over the accept length of the most steps, each position accepted alike."""
    widest = max(row.draft_steps for at in report.batches for row in at.steps)
    if widest < 1:
        raise CostsError("--plots needs the costs of rounds with drafts; calibrate them")
    lengths = [1 + at * widest / (_COLUMNS - 1) for at in range(_COLUMNS)]
    profiles = [even_lengths(length, widest) for length in lengths]
    grid = []
    for at in report.batches:
        rounds = {row.draft_steps: row.round_ms.value for row in at.steps}
        found = [best_steps(rounds, profile) for profile in profiles]
        grid.append([float("nan") if best is None else best for best in found])
    image = axes.imshow(
        grid, aspect="auto", origin="lower", vmin=0, vmax=widest, interpolation="nearest",
        extent=(1, widest + 1, -0.5, len(grid) - 0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(grid)), [at.batch for at in report.batches])
    axes.set(xlabel=f"accept length at {widest} draft steps", ylabel="batch")
    figure.colorbar(image, label="best draft steps", ticks=range(widest + 1))
