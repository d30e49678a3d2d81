"""Pictures of a run, made from its metrics.jsonl alone."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

SMOOTH_FROM = 40  # points from which on a curve gets a running mean
COLUMNS = 4


class Panel(NamedTuple):
    """One plot: its title, the y-axis' text with the unit, and (metric, legend) pairs."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    limits: tuple[float | None, float | None] = (None, None)
    smooth: bool = True  # add a running mean to long curves
    unless: str | None = None  # a metric whose panel takes this one's place


PANELS = (
    Panel("Reward of sampled responses", "score per response", (("reward/mean", "mean"),)),
    Panel("Validation accuracy", "fraction of problems", (("val/accuracy", "greedy"),), (0.0, 1.0)),
    Panel(
        "Validation score",
        "score per response",
        (("val/score", "greedy"),),
        unless="val/accuracy",
    ),
    Panel(
        "KL(policy, reference)",
        "nats per token",
        (("kl/k1_token_mean", "k1"), ("kl/k3_token_mean", "k3")),
    ),
    Panel(
        "Entropy of the policy", "nats per token", (("policy/entropy", "in updates"),), (0.0, None)
    ),
    Panel(
        "Response length", "tokens per response", (("rollout/length_mean", "mean"),), (0.0, None)
    ),
    Panel(
        "Clipped and truncated",
        "fraction",
        (
            ("policy/clip_fraction", "clipped tokens"),
            ("rollout/truncated_fraction", "truncated responses"),
        ),
        (0.0, None),
    ),
    Panel("Value loss", "½ (value − return)²", (("value/loss", "mean"),), (0.0, None)),
    Panel(
        "Explained variance of the critic",
        "1 is perfect, 0 the mean",
        (("value/explained_variance", "before the update"),),
        (None, 1.0),
    ),
)
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # told apart by colour-blind readers too


def training_curves(
    metrics_path: str | os.PathLike[str],
    output_png: str | os.PathLike[str],
    *,
    title: str | None = None,
    panels: Sequence[Panel] = PANELS,
) -> None:
    """Draws one panel per quantity over the training steps; those without data are left out.

    Args:
      metrics_path: a run's metrics.jsonl; null (a NaN) leaves a gap.
      output_png: written at once or not at all.
      title: above all panels.
      panels: what to draw.

    Raises:
      ValueError: the file holds nothing that could be drawn.
    """
    columns = read_metrics(metrics_path)
    drawn = [
        panel
        for panel in panels
        if panel.unless not in columns and any(name in columns for name, _ in panel.series)
    ]
    if not drawn:
        raise ValueError(f"{metrics_path} holds none of the metrics to draw; run a step first.")
    last_step = max(int(steps[-1]) for steps, _ in columns.values())
    rows = -(-len(drawn) // COLUMNS)
    width = min(len(drawn), COLUMNS)
    figure = Figure(figsize=(3.7 * width, 2.9 * rows + 0.5), dpi=140, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for index, panel in enumerate(drawn, start=1):
        axes = figure.add_subplot(rows, width, index)
        _draw(axes, panel, columns)
        axes.set_xlim(-0.02 * last_step, 1.02 * max(last_step, 1))
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    if any(len(steps) >= SMOOTH_FROM for steps, _ in columns.values()):
        note = "Pale: each step. Dark: running mean over a twentieth of the run."
        figure.supxlabel(note, fontsize=8, color="#555555", x=0.01, ha="left")
    output = pathlib.Path(output_png)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(output.name + ".tmp")
    canvas.print_figure(temporary, format="png")
    os.replace(temporary, output)


def read_metrics(path: str | os.PathLike[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns per metric the steps that have it and its values (NaN for null).

    A last line that a kill has cut short is passed over.
    """
    columns: dict[str, tuple[list[int], list[float]]] = {}
    lines = pathlib.Path(path).read_text("utf-8").split("\n")
    for line in lines[:-1]:
        entry = json.loads(line)
        step = entry.pop("step")
        for name, value in entry.items():
            steps, values = columns.setdefault(name, ([], []))
            steps.append(step)
            values.append(float("nan") if value is None else float(value))
    return {name: (np.array(steps), np.array(values)) for name, (steps, values) in columns.items()}


def _draw(axes: Axes, panel: Panel, columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    ends = []
    for (name, legend), color in zip(panel.series, _COLORS, strict=False):
        if name in columns:
            steps, values = columns[name]
            shown = _curve(axes, steps, values, legend, color, smooth=panel.smooth)
            finite = np.isfinite(shown)
            if finite.any():
                ends.append((shown[finite][-1], steps[finite][-1], color))
    _label_ends(axes, ends)
    axes.set_title(panel.title, fontsize=10, loc="left", fontweight="bold")
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.set_xlabel("training step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _limit(axes, panel.limits)
    if len(panel.series) > 1:
        axes.legend(fontsize=8, frameon=False)


def _limit(axes: Axes, limits: tuple[float | None, float | None]) -> None:
    """Stretches the y-axis to the panel's limits, with a little room for lines at them."""
    low, high = axes.dataLim.intervaly if axes.dataLim.height >= 0 else (0.0, 1.0)
    bottom, top = axes.get_ylim()
    low = bottom if limits[0] is None else min(limits[0], low)
    high = top if limits[1] is None else max(limits[1], high)
    if high <= low:
        high = low + 1.0
    room = 0.03 * (high - low)
    axes.set_ylim(low - room, high + room)


def _curve(
    axes: Axes, steps: np.ndarray, values: np.ndarray, legend: str, color: str, *, smooth: bool
) -> np.ndarray:
    """Draws one curve and returns the values of its strong line."""
    if smooth and len(steps) >= SMOOTH_FROM:
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.4)
        values = _running_mean(values)
    marker = "o" if len(steps) <= 15 or not smooth else None
    axes.plot(steps, values, color=color, linewidth=1.7, marker=marker, ms=3.5, label=legend)
    return values


def _label_ends(axes: Axes, ends: list[tuple[float, int, str]]) -> None:
    """Writes the last value beside each curve; of two, the higher one above the lower one."""
    aligned = ("center",) if len(ends) == 1 else ("top", "bottom", "bottom", "bottom")
    for (value, step, color), va in zip(sorted(ends), aligned, strict=False):
        axes.annotate(
            f"{value:.3g}",
            (step, value),
            xytext=(5, 0),
            textcoords="offset points",
            color=color,
            fontsize=8,
            va=va,
            annotation_clip=False,
        )


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over a window of about a twentieth of the run, centred, NaN passed over."""
    half = max(1, len(values) // 40)
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    finite = np.isfinite(windows)
    sums = np.where(finite, windows, 0.0).sum(axis=1)
    return np.where(np.isfinite(values), sums / np.maximum(finite.sum(axis=1), 1), np.nan)
