# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of measurements: time and ratio over message size, one column per collective."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS, THEIRS, PARITY = "#0b6e8f", "#d1711f", "#6b7280"
# Colour and marker of what is compared: of names that are not in STYLES, in this order.
OTHER_STYLES = (
    ("#b0508f", "<"),
    ("#4a7fb5", ">"),
    ("#9a8c3f", "*"),
    ("#c0392b", "D"),
    ("#6a4cc4", "p"),
    ("#2e9e5b", "h"),
    ("#e0a500", "v"),
    ("#5c4033", "^"),
    ("#e377c2", "d"),
    ("#111827", "P"),
)
STYLES = {
    "mpi": (THEIRS, "s"),
    "intel": ("#8a6d3b", "v"),
    "nccl": ("#5b8c2a", "^"),
    "blocking": ("#7a7f87", "d"),
    "registered": ("#7b5ea7", "P"),
    "requests": ("#3d7a78", "X"),
}


@dataclass
class Compared:
    """Another library at one size: its time in microseconds, and how often Tributary's fits into it."""

    time_us: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass
class Point:
    """One size: Tributary's time in microseconds, and the others by their names in STYLES."""

    bytes: int
    tributary_us: float | None
    compared: dict[str, Compared] = field(default_factory=dict)
    floor_us: float | None = None  # the least that memory has to move


@dataclass
class Panel:
    """One column of the picture."""

    title: str
    points: list[Point] = field(default_factory=list)


def _size_label(value: float, _: object = None) -> str:
    for unit in ("", "K", "M", "G"):
        if value < 1024:
            return f"{value:.0f}{unit}"
        value /= 1024
    return f"{value:.0f}T"


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:  # what fails later than opening it does not name it
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        plt.close(figure)


def _panels(columns: int, has_ratios: bool = True) -> tuple[Any, Any]:
    """A figure: per column times above and ratios below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    made: tuple[Any, Any] = plt.subplots(
        1 + has_ratios,
        columns,
        figsize=(max(5.2, 3.4 * columns + 0.8), 3.2 + 2 * has_ratios),
        sharex="col",
        sharey="row",
        squeeze=False,
        height_ratios=(3, 2)[: 1 + has_ratios],
        layout="constrained",
    )
    return made


def _label_sizes(axis: Any, sizes: Sequence[int]) -> None:
    """Name sizes that were measured, as many as there is room for."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks = sorted(set(sizes))
    while len(ticks) > 6:
        ticks = ticks[::2]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_size_label))


def _dress(axes: Any, column: int, title: str, sizes: Sequence[int]) -> None:
    """Title and scales of a column, whose uppermost panel has times."""
    upper, lowest = axes[0][column], axes[-1][column]
    upper.set_title(textwrap.fill(title, 36), fontsize=10, fontweight="bold")
    upper.set_xscale("log", base=2)
    upper.set_yscale("log")
    upper.grid(True, which="major", color="#e5e7eb", lw=0.7)
    _label_sizes(lowest.xaxis, sizes)
    lowest.set_xlabel("bytes")


def _frame(figure: Any, axes: Any, title: str, subtitle: str) -> None:
    """Titles above the panels and the legend below them, for which the figure grows: neither lies on a curve."""
    width = figure.get_figwidth()
    titles = textwrap.wrap(title, int(width * 9.5))
    subtitles = textwrap.wrap(subtitle, int(width * 15.5))
    top, middle, bottom = 0.07, 0.07 + 0.21 * len(titles), 0.05  # inches, from above
    head = middle + 0.15 * len(subtitles) + bottom

    curves: dict[str, Any] = {}  # of all panels: the first may lack some
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            curves.setdefault(label, handle)
    # A letter takes some 0.07 inches, and a line beside its text as much as ten.
    per_row = max(1, int(width / 0.07 / (max(map(len, curves), default=0) + 10)))
    rows = -(-len(curves) // per_row)

    height = figure.get_figheight() + head + 0.2 * rows
    figure.set_figheight(height)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - head / height))
    style = {"ha": "left", "va": "top"}
    wrapped = "\n".join(titles)
    figure.text(0.01, 1 - top / height, wrapped, fontsize=12, fontweight="bold", **style)
    wrapped = "\n".join(subtitles)
    figure.text(0.01, 1 - middle / height, wrapped, fontsize=8.5, color=PARITY, **style)
    figure.legend(curves.values(), curves, frameon=False, loc="outside lower center", ncols=per_row)


def draw(
    panels: Sequence[Panel],
    path: Path,
    title: str,
    subtitle: str,
    names: Mapping[str, str],
    others: Mapping[str, Sequence[tuple[int, float, float]]] | None = None,
) -> None:
    """Write the picture to `path` (the suffix says the format).

    `names`: how the libraries are called, by their keys in STYLES. `others`: (bytes, MPI's time, ours) by another benchmark, per panel title.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    points = [point for panel in panels for point in panel.points]
    there = dict.fromkeys(name for point in points for name in point.compared)
    libraries = [name for name in STYLES if name in there] + [n for n in there if n not in STYLES]
    styles = dict(STYLES)
    for place, name in enumerate(name for name in libraries if name not in STYLES):
        styles[name] = OTHER_STYLES[place % len(OTHER_STYLES)]
    known_ratios = [
        other.ratio for point in points for other in point.compared.values() if other.ratio
    ]
    for panel in panels:
        known_ratios += [a / b for _, a, b in (others or {}).get(panel.title, ())]
    figure, axes = _panels(len(panels), has_ratios=bool(known_ratios))
    for column, panel in enumerate(panels):
        upper = axes[0][column]
        lines = [
            (
                names.get(name, name),
                *styles[name],
                [(p.bytes, p.compared[name].time_us) for p in panel.points if name in p.compared],
            )
            for name in libraries
        ]
        ours = [(p.bytes, p.tributary_us) for p in panel.points if p.tributary_us is not None]
        lines.append(("Tributary", OURS, "o", ours))
        for label, colour, marker, known in lines:
            if known:
                upper.plot(
                    *zip(*known, strict=True),
                    color=colour,
                    marker=marker,
                    ms=3.5,
                    lw=1.6,
                    label=label,
                )
        if floor := [(p.bytes, p.floor_us) for p in panel.points if p.floor_us is not None]:
            upper.plot(*zip(*floor, strict=True), color=PARITY, lw=1, ls=":", label="floor")
        for size, before, after in (others or {}).get(panel.title, ()):
            upper.plot(size, before, color=THEIRS, marker="x", ms=4, lw=0, alpha=0.6)
            upper.plot(size, after, color=OURS, marker="x", ms=4, lw=0, alpha=0.6)
        _dress(axes, column, panel.title, [p.bytes for p in panel.points])
    axes[0][0].set_ylabel("time per call, µs")
    for panel, lower in zip(panels, axes[1] if known_ratios else (), strict=False):
        for size, before, after in (others or {}).get(panel.title, ()):
            lower.plot(size, before / after, color=OURS, marker="x", ms=4, lw=0, alpha=0.6)
        lower.axhline(1, color=PARITY, lw=1, ls="--")
        for name in libraries:
            ratios = [
                (p.bytes, other.ratio, other.low or other.ratio, other.high or other.ratio)
                for p in panel.points
                if (other := p.compared.get(name)) and other.ratio
            ]
            if not ratios:
                continue
            sizes, middle, low, high = zip(*ratios, strict=True)
            # Several lines have the colours of the libraries that they are ratios to.
            colour, marker = styles[name] if len(libraries) > 1 else (OURS, "o")
            lower.fill_between(sizes, low, high, color=colour, alpha=0.18, lw=0)
            lower.plot(sizes, middle, color=colour, marker=marker, ms=3.5, lw=1.6)
        lower.set_yscale("log", base=2)
        lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        lower.grid(True, which="major", color="#e5e7eb", lw=0.7)
        # A span may reach far beyond its point where something else ran meanwhile: the points set the scale.
        lower.set_ylim(min(0.45, min(known_ratios) / 1.3), max(2.2, max(known_ratios) * 1.3))
        lower.yaxis.set_major_locator(LogLocator(base=2))
        lower.yaxis.set_minor_locator(NullLocator())
    if known_ratios:
        faster = "times faster than each" if len(libraries) > 1 else "times faster"
        axes[1][0].set_ylabel(faster)
    _frame(figure, axes, title, subtitle)
    _save(figure, path)


# -------------------------------------------------------------------------------------------------- tuning


@dataclass
class TuningPoint:
    """One size, in microseconds: the default table's choice, the tuned one, the best candidate."""

    bytes: int
    default_us: float
    tuned_us: float
    best_us: float


@dataclass
class TuningPanel:
    """One column of the picture."""

    title: str
    points: list[TuningPoint] = field(default_factory=list)


def draw_tuning(panels: Sequence[TuningPanel], path: Path, title: str, subtitle: str) -> None:
    """Times over bytes, and below them how far the tuned and the default choice are from the best candidate."""
    figure, axes = _panels(len(panels))
    lines = (("default table", THEIRS, "s", "default_us"), ("tuned", OURS, "o", "tuned_us"))
    for column, panel in enumerate(panels):
        upper, lower = axes[0][column], axes[1][column]
        sizes = [p.bytes for p in panel.points]
        upper.plot(
            sizes,
            [p.best_us for p in panel.points],
            color=PARITY,
            ls="--",
            lw=1.2,
            label="best candidate",
        )
        for label, colour, marker, name in lines:
            times = [getattr(p, name) for p in panel.points]
            style = {"color": colour, "marker": marker, "ms": 3.5, "lw": 1.6}
            upper.plot(sizes, times, label=label, **style)
            best = [p.best_us for p in panel.points]
            lower.plot(sizes, [a / b for a, b in zip(times, best, strict=True)], **style)
        for limit in (1.1, 1.25):
            lower.axhline(limit, color="#e5e7eb", lw=1)
        lower.axhline(1, color=PARITY, lw=1, ls="--")
        _dress(axes, column, panel.title, sizes)
    axes[0][0].set_ylabel("time per call, µs")
    axes[1][0].set_ylabel("time / best candidate's")
    _frame(figure, axes, title, subtitle)
    _save(figure, path)
