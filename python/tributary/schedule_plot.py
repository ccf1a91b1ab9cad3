# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of schedules: ranks as lanes, time from left to right, data as arrows from where it is to where it is used."""

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tributary.schedule import Flow, Node, Read, Signal

COLOURS = {"copy": "#0b6e8f", "reduce": "#d1711f"}
_INK, _GREY, _LANE, _BAND = "#1f2937", "#6b7280", "#c3c9d2", "#f4f6f8"
_RED = "#b91c1c"

# Inches: the axes' units, so that boxes have the size that their texts need.
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.95, 0.3, 0.95, 0.68
_LINE = 0.17  # of the texts above the lanes
_BOX, _BETWEEN, _LANDING = 0.2, 0.05, 0.13


def _label(node: Node, chunks: int) -> str:
    if node.span == chunks:
        return "" if chunks == 1 else "all"
    last = node.chunk + node.span - 1
    return str(node.chunk) if node.span == 1 else f"{node.chunk}-{last}"


def _width(label: str) -> float:
    return max(_BOX, 0.07 * len(label) + 0.08)


@dataclass
class _Layout:
    """Where everything stands, in inches."""

    lane: float  #: from one rank to the next
    ranks: int
    x: dict[int, float] = field(default_factory=dict)  #: of each node's middle
    landing: dict[tuple[int, int], float] = field(default_factory=dict)  #: of node on rank
    bands: list[tuple[float, float]] = field(default_factory=list)  #: of each column
    end: float = 0.0

    def y(self, rank: int) -> float:
        return (self.ranks - 1 - rank) * self.lane


def _room(distances: list[int], spread: float = 0.0) -> float:
    """For arrows over so many lanes each: more for steep ones. `spread`: beyond what they need."""
    if not distances:
        return 0.3
    return 0.3 + min(1.6, 0.17 * sum(distances) / len(distances)) + spread


def _distances(nodes: list[Node]) -> list[int]:
    return [abs(read.rank - n.rank) for n in nodes for read in n.reads if read.rank != n.rank]


def _has_arrow(flow: Flow, signal: Signal) -> bool:
    """Whether data go along with the signal."""
    if signal.after is not None and signal.taker in flow.nodes[signal.after].lands:
        return True
    reads = flow.nodes[signal.before].reads if signal.before is not None else []
    return Read(signal.giver, signal.after) in reads


def _lay_out(flow: Flow, ranks: int, chunks: int, spread: float = 0.0) -> _Layout:
    layout = _Layout(lane=0.62 if ranks <= 8 else 0.48, ranks=ranks)
    columns: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(flow.nodes):
        columns[node.column].append(number)
    x = 0.1
    for column in range(1, flow.depth + 1):
        begin = x
        x += _room(_distances([flow.nodes[number] for number in columns[column]]), spread)
        ends = [x] * ranks
        for number in columns[column]:
            node = flow.nodes[number]
            width = _width(_label(node, chunks))
            layout.x[number] = ends[node.rank] + width / 2
            ends[node.rank] += width + _BETWEEN
        x = max(ends)
        arrivals = [0] * ranks
        for number in columns[column]:
            for rank in flow.nodes[number].lands:
                arrivals[rank] += 1
        if any(arrivals):
            x += 0.5 + 0.06 * ranks
            ends = [x] * ranks
            for number in columns[column]:
                for rank in flow.nodes[number].lands:
                    layout.landing[number, rank] = ends[rank]
                    ends[rank] += _LANDING
            x = max(ends)
        x += 0.08
        layout.bands.append((begin, x))
    barrier = [s for s in flow.signals if s.before is None and not _has_arrow(flow, s)]
    layout.end = x + _room([abs(s.giver - s.taker) for s in barrier])
    return layout


class _Picture:
    """Draws one schedule on one pair of axes."""

    def __init__(self, document: Mapping[str, Any], flow: Flow, axes: Any, width: float) -> None:
        self.document, self.flow, self.axes = document, flow, axes
        self.layout = _lay_out(flow, document["ranks"], document["chunks"])
        spare = width - self.layout.end
        if spare > 0:
            flights = {node.column for node in flow.nodes if _distances([node])}
            spread = min(0.9, spare / max(1, len(flights)))
            self.layout = _lay_out(flow, document["ranks"], document["chunks"], spread)
        self.has_signals = False

    def draw(self) -> None:
        self._lanes()
        self._signals()
        self._data()
        for number, node in enumerate(self.flow.nodes):
            self._box(number, node)

    def _lanes(self) -> None:
        layout = self.layout
        top, bottom = layout.y(0) + 0.32, layout.y(layout.ranks - 1) - 0.32
        for column, (begin, end) in enumerate(layout.bands, start=1):
            if column % 2 == 1:
                self.axes.fill_between([begin, end], bottom, top, color=_BAND, lw=0, zorder=0)
            self.axes.text(
                (begin + end) / 2,
                top + 0.05,
                f"step {column}" if end - begin > 0.55 else str(column),
                ha="center",
                va="bottom",
                fontsize=7.5,
                color=_GREY,
            )
        used = {read.rank for node in self.flow.nodes for read in node.reads if read.node is None}
        for rank in range(layout.ranks):
            y = layout.y(rank)
            self.axes.plot([0, layout.end], [y, y], color=_LANE, lw=1.3, zorder=1)
            root = "\n(root)" if self.document.get("root") == rank else ""
            self.axes.text(
                -0.16,
                y,
                f"rank {rank}{root}",
                ha="right",
                va="center",
                fontsize=8.5,
                color=_INK,
                linespacing=1.15,
            )
            if rank in used:
                self.axes.plot(0, y, "o", ms=4.5, color=_GREY, zorder=3)
            if rank in self.flow.stuck:
                self.axes.plot(layout.end, y, "x", ms=7, mew=2, color=_RED, zorder=4)
                text = f"waits for ever\n(its step {self.flow.stuck[rank]})"
                self.axes.text(layout.end + 0.12, y, text, va="center", fontsize=7, color=_RED)

    def _arrow(
        self, begin: tuple[float, float], end: tuple[float, float], shrink: float, **style: Any
    ) -> None:
        from matplotlib.patches import FancyArrowPatch

        self.axes.add_patch(
            FancyArrowPatch(begin, end, shrinkA=2, shrinkB=shrink, arrowstyle="-|>", **style)
        )

    def _data(self) -> None:
        layout = self.layout
        counts: dict[int, int] = defaultdict(int)
        for node in self.flow.nodes:
            counts[node.column] += len(node.reads) + len(node.lands)
        most = max(counts.values(), default=0)  # the fullest column says how fine lines must be
        alpha, width, head = (0.75, 1.0, 6.5) if most < 80 else (0.5, 0.8, 5.5)
        if most > 250:
            alpha, width, head = 0.4, 0.6, 4.0
        for number, node in enumerate(self.flow.nodes):
            style = {
                "color": COLOURS[node.verb],
                "alpha": alpha,
                "lw": width,
                "mutation_scale": head,
                "zorder": 2,
            }
            here = (layout.x[number], layout.y(node.rank))
            for read in node.reads:
                if read.rank == node.rank:
                    continue  # along its own lane
                begin = (0.0, layout.y(read.rank))
                if read.node is not None:
                    made = self.flow.nodes[read.node]
                    x = (
                        layout.x[read.node]
                        if made.rank == read.rank
                        else layout.landing[read.node, read.rank]
                    )
                    begin = (x, layout.y(read.rank))
                self._arrow(begin, here, 7, **style)
            for rank in node.lands:
                there = (layout.landing[number, rank], layout.y(rank))
                self._arrow(here, there, 3, **style)
                self.axes.plot(
                    *there,
                    "o",
                    ms=4.5,
                    mfc="white",
                    mec=COLOURS[node.verb],
                    mew=1.3,
                    zorder=4,
                )

    def _signals(self) -> None:
        """Only those that do not go along with data, which are the barriers."""
        layout = self.layout
        signals = [s for s in self.flow.signals if not _has_arrow(self.flow, s)]
        self.has_signals = bool(signals)
        alpha = 0.8 if len(signals) < 60 else 0.4
        for signal in signals:
            begin = layout.x[signal.after] if signal.after is not None else 0.0
            end = layout.x[signal.before] if signal.before is not None else layout.end
            self._arrow(
                (begin, layout.y(signal.giver)),
                (end, layout.y(signal.taker)),
                7 if signal.before is not None else 0,
                color="#9ca3af",
                alpha=alpha,
                lw=0.6,
                linestyle=(0, (1.5, 2)),
                mutation_scale=5,
                zorder=1.5,
            )

    def _box(self, number: int, node: Node) -> None:
        from matplotlib.patches import FancyBboxPatch

        label = _label(node, self.document["chunks"])
        width, x, y = _width(label), self.layout.x[number], self.layout.y(node.rank)
        rounding = 0.1 if node.verb == "reduce" else 0.03
        self.axes.add_patch(
            FancyBboxPatch(
                (x - width / 2, y - _BOX / 2),
                width,
                _BOX,
                boxstyle=f"round,pad=0,rounding_size={rounding}",
                facecolor=COLOURS[node.verb],
                edgecolor=_INK if node.is_result else "white",
                lw=1.4 if node.is_result else 0.8,
                zorder=5,
            )
        )
        self.axes.text(
            x, y - 0.005, label, ha="center", va="center", fontsize=6.5, color="white", zorder=6
        )


def _legend(figure: Any, document: Mapping[str, Any], flow: Flow, has_signals: bool) -> None:
    from matplotlib.lines import Line2D

    def mark(marker: str, text: str, **style: Any) -> Any:
        return Line2D([], [], ls="", marker=marker, ms=8, label=text, **style)

    verbs = {node.verb for node in flow.nodes}
    handles = []
    if "copy" in verbs:
        handles.append(mark("s", "copy", color=COLOURS["copy"]))
    if "reduce" in verbs:
        handles.append(mark("o", "reduce", color=COLOURS["reduce"]))
    if any(node.is_result for node in flow.nodes):
        handles.append(mark("s", "writes out", mfc="white", mec=_INK, mew=1.4))
    if any(node.lands for node in flow.nodes):
        handles.append(mark("o", "arrives at a peer", mfc="white", mec=_GREY, mew=1.3))
    handles.append(mark("o", "input", color=_GREY, markersize=5))
    if has_signals:
        handles.append(Line2D([], [], color="#9ca3af", lw=1, ls=":", label="signal without data"))
    if document["chunks"] > 1:
        handles.append(Line2D([], [], ls="", label="numbers: chunks"))
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 0),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        handletextpad=0.4,
        columnspacing=1.4,
    )


def draw(
    document: Mapping[str, Any],
    flow: Flow,
    path: Path,
    title: str,
    lines: Sequence[str],
    fault: str = "",
) -> None:
    """Write the picture to `path` (the suffix says the format). `lines` stand below the title, `fault` in red below them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure()
    axes = figure.add_axes((0, 0, 1, 1))
    right = _RIGHT + (0.8 if flow.stuck else 0)
    width = max(0.065 * max(map(len, lines)), 6.4)
    picture = _Picture(document, flow, axes, width - _LEFT - right)
    layout = picture.layout
    width = max(width, _LEFT + layout.end + right)
    below = [(line, _GREY) for line in lines]
    for line in fault.splitlines():
        below += [(part, _RED) for part in textwrap.wrap(line, int(width / 0.065))]
    height = _BOTTOM + layout.y(0) + _TOP + _LINE * len(below)
    figure.set_size_inches(width, height)
    axes.set_xlim(-_LEFT, width - _LEFT)
    axes.set_ylim(-_BOTTOM, height - _BOTTOM)
    axes.axis("off")
    picture.draw()
    x, y = 0.12 - _LEFT, height - _BOTTOM - 0.1
    axes.text(x, y, title, fontsize=12, fontweight="bold", va="top", color=_INK)
    for number, (line, colour) in enumerate(below):
        axes.text(x, y - 0.25 - number * _LINE, line, fontsize=8.5, color=colour, va="top")
    _legend(figure, document, flow, picture.has_signals)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
