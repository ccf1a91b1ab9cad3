# SPDX-License-Identifier: BSD-3-Clause
"""Show what Tributary does for a program that knows nothing of it.

Runs IMB-MPI1, Intel's MPI benchmark as it comes from PyPI, without and with Tributary under it, then `trib bench` against
the same MPI; prints the times side by side and draws them. About two minutes.

examples:
  trib demo
  trib demo -n 4 --out /tmp/demo --runs 3
"""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tributary import bench, imb, plot, tree
from tributary.cli import arguments, output
from tributary.cli.bench import measure_with_progress, rounding_text, verdict, whole_sizes
from tributary.cli.output import Column

HELP = "an MPI benchmark that is not ours, without and with Tributary"

_PICTURE, _DATA = "demo.png", "demo.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where and how long."""
    parser.add_argument(
        "-n",
        "--ranks",
        metavar="N",
        type=arguments.positive,
        default=2,
        help="number of ranks (default: 2)",
    )
    parser.add_argument(
        "--sizes",
        metavar="LIST",
        default="4:16M:4",
        help="bytes, as in trib bench (default: 4:16M:4)",
    )
    parser.add_argument(
        "--runs",
        metavar="N",
        type=arguments.positive,
        default=5,
        help="runs of IMB of each kind (default: 5)",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("out"), help="where files go (default: out)"
    )


def _print_table(compared: imb.Comparison, measured: bench.Measurement, console: Console) -> None:
    title = " ".join(measured.mpi_title.split()[:-1]) or measured.mpi_title
    points = {(r.collective, r.bytes): r for r in measured.results}
    rows: list[list[str | Text]] = []
    ends = []
    for collective in bench.COLLECTIVES:
        rows.append([Text(collective, "bold"), *[""] * 7])
        for size in sorted(
            {key[1] for key in (*compared.without, *points) if key[0] == collective}
        ):
            before = compared.without.get((collective, size))
            after = compared.with_tributary.get((collective, size))
            r = points.get((collective, size))
            theirs = r.mpi.time_us if r and r.mpi else None
            ours = r.tributary.time_us if r and r.tributary else None
            served_by = r.tributary.algorithm if r and r.tributary else ""
            cells = [*_cells(before, after), *_cells(theirs, ours), served_by]
            rows.append([arguments.bytes_text(size), *cells])
        ends.append(len(rows) - 1)
    headings = (
        "bytes",
        f"IMB-MPI1\n{title}\nus",
        "IMB-MPI1\n+ Tributary\nus",
        "ratio",
        f"trib bench\n{title}\nus",
        "trib bench\nTributary\nus",
        "ratio",
    )
    cells_of = [list(column) for column in zip(*rows, strict=True)]
    columns = [Column(*pair) for pair in zip(headings, cells_of[:-1], strict=True)]
    columns.append(Column("served by", cells_of[-1], spare=1, is_text=True))
    output.print_figures(console, columns, ends=ends)


def _cells(before: float | None, after: float | None) -> list[str | Text]:
    """Two times and their ratio; nothing where one of them is missing."""
    if not before or not after:
        return ["", "", ""]
    ratio = before / after
    colour = "green" if ratio >= 1 else "yellow" if ratio >= 0.95 else "red"
    time = arguments.time_text
    return [time(before), time(after), Text(f"{ratio:.2f}", colour)]


def served_in_words(found: imb.Statistics) -> list[str]:
    """Who served which calls of IMB, in sentences."""
    lines = []
    for collective, algorithms in found.served.items():
        how = ", ".join(f"{calls:,} by {algorithm}" for algorithm, calls in algorithms.items())
        lines.append(
            f"MPI_{collective.capitalize()}: Tributary served {sum(algorithms.values()):,} calls per rank ({how})."
        )
    if found.served and not found.left:
        lines.append(
            "No reduction was left to the MPI; everything else (barriers, broadcasts, messages) is the MPI's as ever."
        )
    for reason, calls in found.left.items():
        lines.append(f"Left to the MPI: {calls:,} calls per rank ({reason}).")
    if not found.served:
        lines.append("Tributary served no call: all of them went to the MPI.")
    return lines


def run(parsed: argparse.Namespace) -> int:
    """Run, print, draw."""
    start = time.monotonic()
    job = bench.Job("all", parsed.ranks, arguments.read_sizes(parsed.sizes), mpi="intel")
    tree.need_preload_library("mpich")
    tree.check_settings({})
    for name in (_PICTURE, _DATA):
        arguments.check_output(parsed.out / name, "--out")
    if text := rounding_text(job):
        print(f"trib demo: {text}", file=sys.stderr)
        job.sizes = sorted(set(whole_sizes(job)))

    def say(text: str) -> None:
        print(f"demo: {text}", file=sys.stderr, flush=True)

    compared = imb.compare(job.sizes, parsed.ranks, parsed.runs, parsed.out, say)
    say("trib bench all, against the same MPI")
    measured = bench.Measurement(job)
    try:
        measure_with_progress(measured)
    finally:  # whatever ended it: what was measured is not lost
        if measured.results:
            _keep(compared, measured, parsed)
    say(f"done in {time.monotonic() - start:.0f} s")
    return 1 if measured.wrong else 0


def _keep(
    compared: imb.Comparison, measured: bench.Measurement, parsed: argparse.Namespace
) -> None:
    """Write the files, then print: who reads that may leave."""
    document = bench.document(measured)
    document["imb"] = [
        {
            "collective": name,
            "bytes": size,
            "without_us": before,
            "with_us": compared.with_tributary.get((name, size)),
        }
        for (name, size), before in compared.without.items()
    ]
    picture, data = parsed.out / _PICTURE, parsed.out / _DATA
    output.write_text(data, json.dumps(document, indent=1) + "\n")
    where = document["environment"]
    ranks = arguments.count_text(parsed.ranks, "rank")
    cores = arguments.count_text(where["cores"], "core")
    repeats = measured.job.repeats
    plot.draw(
        bench.panels(measured.results),
        picture,
        f"Tributary under {measured.mpi_title}, {ranks}",
        f"{where['processor']}, {cores}; float sum; trib bench: same job, interleaved, median of {repeats} repeats "
        "(band: their span); crosses: IMB-MPI1",
        {"mpi": measured.mpi_title},
        {
            f"MPI_{collective.capitalize()}": [
                (
                    size,
                    compared.without[collective, size],
                    compared.with_tributary[collective, size],
                )
                for name, size in sorted(compared.without)
                if name == collective and (name, size) in compared.with_tributary
            ]
            for collective in bench.COLLECTIVES
        },
    )
    console = output.console()
    console.print()
    console.print(
        Text("Four reductions without and with Tributary", "bold"),
        f": {ranks}, float sum, {where['processor']}, {cores}\n"
        f"IMB-MPI1 (left) is not ours and not changed; median of {parsed.runs} runs of each kind, its t_max (mean over calls, slowest rank). "
        f"trib bench (right) interleaves both sides in one job; median over calls and {repeats} repeats. Ratio: the MPI's time / Tributary's.",
        sep="",
    )
    _print_table(compared, measured, console)
    console.print("Who served the calls of IMB-MPI1", style="bold")
    for line in served_in_words(compared.statistics):
        console.print(f"  {line}")
    console.print(Text("trib bench", "bold"), f": {verdict(measured.results)}", sep="")
    output.say_file(console, "picture", picture)
    output.say_file(console, "measurements", data)
    output.say_file(console, "IMB's own output", f"{parsed.out}/imb-*.txt")
    console.print(
        f"Try it on your program: .venv/bin/trib run -n {parsed.ranks} --stats -- ./your-program"
    )
