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

from rich.table import Table

from tributary import bench, imb, plot, tree
from tributary.cli import arguments, output
from tributary.cli.bench import measure_with_progress, verdict

HELP = "an MPI benchmark that is not ours, without and with Tributary"


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


def _table(compared: imb.Comparison, measured: bench.Measurement) -> Table:
    title = " ".join(measured.mpi_title.split()[:-1]) or measured.mpi_title
    table = output.table()
    table.add_column("bytes", justify="right", no_wrap=True)
    for heading in (
        f"IMB-MPI1\n{title}\nus",
        "IMB-MPI1\n+ Tributary\nus",
        "ratio",
        f"trib bench\n{title}\nus",
        "trib bench\nTributary\nus",
        "ratio",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("served by", no_wrap=True)
    points = {(r.collective, r.bytes): r for r in measured.results}
    for collective in bench.COLLECTIVES:
        table.add_section()
        table.add_row(f"[bold]{collective}[/]")
        for size in sorted(
            {key[1] for key in (*compared.without, *points) if key[0] == collective}
        ):
            cells = [arguments.bytes_text(size)]
            before, after = (
                compared.without.get((collective, size)),
                compared.with_tributary.get((collective, size)),
            )
            if before and after:
                cells += [
                    arguments.time_text(before),
                    arguments.time_text(after),
                    _ratio(before / after),
                ]
            else:
                cells += ["", "", ""]
            r = points.get((collective, size))
            if r and r.mpi and r.tributary:
                cells += [
                    arguments.time_text(r.mpi.time_us),
                    arguments.time_text(r.tributary.time_us),
                    _ratio(r.ratio or 0),
                    r.tributary.algorithm,
                ]
            table.add_row(*cells)
    return table


def _ratio(value: float) -> str:
    colour = "green" if value >= 1 else "yellow" if value >= 0.95 else "red"
    return f"[{colour}]{value:.2f}[/]"


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
    sizes = arguments.read_sizes(parsed.sizes)
    tree.need_preload_library("mpich")
    tree.check_settings({})
    picture, data = parsed.out / "demo.png", parsed.out / "demo.json"
    for file in (picture, data):
        arguments.check_output(file, "--out")

    def say(text: str) -> None:
        print(f"demo: {text}", file=sys.stderr, flush=True)

    compared = imb.compare(sizes, parsed.ranks, parsed.runs, parsed.out, say)
    say("trib bench all, against the same MPI")
    job = bench.Job("all", parsed.ranks, sizes, mpi="intel")
    measured = measure_with_progress(job)

    console = output.console()
    where = bench.environment(measured)
    ranks = arguments.count_text(parsed.ranks, "rank")
    console.print()
    console.print(
        f"[bold]Four reductions without and with Tributary[/]: {ranks}, float sum, "
        f"{where['processor']}, {where['cores']} cores\n"
        f"IMB-MPI1 (left) is not ours and not changed; median of {parsed.runs} runs of each kind, its t_max (mean over calls, slowest rank). "
        f"trib bench (right) interleaves both sides in one job; median over calls and {job.repeats} repeats. Ratio: the MPI's time / Tributary's."
    )
    console.print(_table(compared, measured))
    console.print("[bold]Who served the calls of IMB-MPI1[/]")
    for line in served_in_words(compared.statistics):
        console.print(f"  {line}")
    console.print(f"[bold]trib bench[/]: {verdict(measured.results)}")
    plot.draw(
        bench.panels(measured.results),
        picture,
        f"Tributary under {measured.mpi_title}, {ranks}",
        f"{where['processor']}, {where['cores']} cores; float sum; trib bench: same job, interleaved, median of {job.repeats} repeats "
        "(band: their span); crosses: IMB-MPI1",
        measured.mpi_title,
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
    data.write_text(json.dumps(document, indent=1) + "\n")
    console.print(
        f"picture: {picture}   measurements: {data}   IMB's own output: {parsed.out}/imb-*.txt"
    )
    console.print(
        f"Try it on your program: .venv/bin/trib run -n {parsed.ranks} --stats -- ./your-program"
    )
    say(f"done in {time.monotonic() - start:.0f} s")
    return 1 if measured.wrong else 0
