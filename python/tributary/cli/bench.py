# SPDX-License-Identifier: BSD-3-Clause
"""Measure reductions: Tributary against the MPI's own, interleaved in one job.

A time is the median of the repeats, each the median over calls, of a call's slowest rank. The ratio is the MPI's time
over Tributary's: above 1, Tributary is faster; the interval beside it spans the repeats. Bandwidths are Tributary's, as
nccl-tests define them (bytes: of the whole vector). `wrong` counts elements that differ from a reference.

examples:
  trib bench allreduce -n 2
  trib bench all -n 2 --mpi openmpi --json out/openmpi.json --plot out/openmpi.png
  trib bench reduce -n 4 --sizes 4:1M:4 --dtype double --op max
  trib bench allreduce -n 8 --algorithm ring --compare none
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tributary import bench, mpi, plot, tree
from tributary.cli import arguments, output
from tributary.errors import UserError

HELP = "measure reductions, against the MPI's own"

# What C programmers call the types.
_ALIASES = {
    "float": "f32",
    "double": "f64",
    "longdouble": "f80",
    "char": "i8",
    "short": "i16",
    "int": "i32",
    "long": "i64",
    "unsigned": "u32",
    "half": "f16",
    "float16": "f16",
    "bfloat16": "bf16",
    "bool": "l8",
    "complex": "cf32",
    "double_complex": "cf64",
    "float_int": "f32_i32",
    "double_int": "f64_i32",
    "2int": "i32_i32",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to measure."""
    parser.add_argument(
        "collective", metavar="COLLECTIVE", help=f"{', '.join(bench.COLLECTIVES)}, or all"
    )
    arguments.add_job_arguments(parser)
    add = parser.add_argument
    add(
        "--sizes",
        metavar="LIST",
        default="4:16M",
        help="bytes, FIRST:LAST[:FACTOR] or a list (default: 4:16M)",
    )
    add(
        "--dtype",
        metavar="TYPE",
        default="float",
        help="element type (default: float; trib info lists them)",
    )
    add("--op", metavar="OP", default="sum", help="operator (default: sum)")
    add("--root", metavar="RANK", type=int, default=0, help="root of reduce (default: 0)")
    add("--memory", metavar="KIND", default="host", help="where the buffers are: host (default)")
    add(
        "--algorithm",
        metavar="NAME",
        default=None,
        help="Tributary's algorithm (default: by its table)",
    )
    add(
        "--compare",
        metavar="WHAT",
        default="mpi",
        help="mpi (default): the MPI's own as well; none",
    )
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare results with a reference (default)",
    )
    add(
        "--repeats",
        metavar="N",
        type=arguments.positive,
        default=5,
        help="interleaved repeats (default: 5)",
    )
    add(
        "--batch-ms",
        metavar="MS",
        type=float,
        default=25,
        help="time of a batch of calls (default: 25)",
    )
    add("--json", metavar="FILE", type=Path, help="write the measurements, with the environment")
    add("--plot", metavar="FILE", type=Path, help="draw them (.png, .svg, .pdf)")


def _choice(option: str, value: str, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        raise UserError(f"{option}: {value} is none of {', '.join(accepted)}")
    return value


def job_of(parsed: argparse.Namespace) -> bench.Job:
    """What the arguments ask for, checked."""
    info = tree.info()
    dtypes = tuple(row["name"] for row in info["dtypes"])
    collective = _choice("COLLECTIVE", parsed.collective, (*bench.COLLECTIVES, "all"))
    dtype = _choice("--dtype", _ALIASES.get(parsed.dtype, parsed.dtype), (*dtypes, *_ALIASES))
    op = _choice("--op", parsed.op, tuple(info["operators"]))
    if dtype not in info["operators"][op]:
        raise UserError(
            f"--op {op}: MPI does not define it on {parsed.dtype}; it is on {', '.join(info['operators'][op])}"
        )
    _choice("--memory", parsed.memory, ("host",))
    if parsed.plot and parsed.plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot: {parsed.plot}: accepted suffixes: .png, .svg, .pdf")
    settings: dict[str, str] = {}
    if parsed.algorithm:
        names = tuple(row["name"] for row in info["algorithms"])
        settings["TRIB_ALGORITHM"] = _choice("--algorithm", parsed.algorithm, ("auto", *names))
    ranks = parsed.ranks or max(2, mpi.usable_cores())
    if not 0 <= parsed.root < ranks:
        raise UserError(f"--root: {parsed.root} is not among the ranks 0 to {ranks - 1}")
    return bench.Job(
        collective=collective,
        ranks=ranks,
        sizes=arguments.read_sizes(parsed.sizes),
        mpi=arguments.check_mpi(parsed.mpi) or bench.default_mpi(),
        dtype=dtype,
        op=op,
        root=parsed.root,
        compare=_choice("--compare", parsed.compare, ("mpi", "none")),
        check=parsed.check,
        repeats=parsed.repeats,
        batch_ms=parsed.batch_ms,
        launcher=parsed.launcher,
        settings=settings,
    )


def measure_with_progress(job: bench.Job) -> bench.Measurement:
    """Measure, and show on standard error how far it is."""
    measurement = bench.Measurement(job)
    collectives = len(bench.COLLECTIVES) if job.collective == "all" else 1
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(
            f"{job.mpi}, {job.ranks} ranks", total=len(job.sizes) * collectives
        )
        for result in bench.measure(job, measurement):
            text = f"{result.collective} {arguments.bytes_text(result.bytes)}B"
            if result.tributary:
                text += f": {arguments.time_text(result.tributary.time_us)} us"
            if result.ratio:
                text += f", ratio {result.ratio:.2f}"
            progress.update(task, advance=1, description=text)
            if not console.is_terminal:
                print(text, file=sys.stderr, flush=True)
    return measurement


def table(results: list[bench.Result], title: str, mpi_title: str) -> Table:
    """One collective."""
    made = output.table(title)
    made.add_column("bytes", justify="right", no_wrap=True)
    both = any(r.tributary for r in results) and any(r.mpi for r in results)
    if any(r.mpi for r in results):
        made.add_column(f"{mpi_title}\nus", justify="right", no_wrap=True)
    if any(r.tributary for r in results):
        made.add_column("Tributary\nus", justify="right", no_wrap=True)
    if both:
        made.add_column("ratio", justify="right", no_wrap=True)
        made.add_column("interval", justify="right", no_wrap=True)
    made.add_column("algbw\nGB/s", justify="right", no_wrap=True)
    made.add_column("busbw\nGB/s", justify="right", no_wrap=True)
    made.add_column("wrong", justify="right", no_wrap=True)
    made.add_column("algorithm", no_wrap=True)
    for r in results:
        side = r.tributary or r.mpi
        if side is None:
            continue
        cells = [arguments.bytes_text(r.bytes)]
        cells += (
            [arguments.time_text(r.mpi.time_us) if r.mpi else "-"]
            if any(x.mpi for x in results)
            else []
        )
        cells += [arguments.time_text(r.tributary.time_us)] if r.tributary else []
        if both:
            colour = "red" if r.passes is False else "green" if (r.ratio or 0) >= 1 else "yellow"
            cells += (
                [f"[{colour}]{r.ratio:.2f}[/]", f"{min(r.ratios):.2f} - {max(r.ratios):.2f}"]
                if r.ratio
                else ["-", "-"]
            )
        wrong = [s.wrong for s in (r.tributary, r.mpi) if s and s.wrong is not None]
        text = (
            "-"
            if not wrong
            else str(side.wrong)
            if not any(wrong)
            else f"[red]{' / '.join(map(str, wrong))}[/]"
        )
        cells += [f"{r.algbw(side):.2f}", f"{r.busbw(side):.2f}", text, side.algorithm]
        made.add_row(*cells)
    return made


def verdict(results: list[bench.Result]) -> str:
    """One sentence on the ratios."""
    known = [r for r in results if r.ratio is not None]
    if not known:
        return ""
    passed = sum(1 for r in known if r.passes)
    lowest = min(known, key=lambda r: r.ratio or 0)
    return (
        f"Tributary is at least as fast at {passed} of {len(known)} sizes (an interval that touches 1 counts); "
        f"lowest ratio {lowest.ratio:.2f} ({lowest.collective}, {arguments.bytes_text(lowest.bytes)}B)."
    )


def report(measurement: bench.Measurement, console: Console) -> None:
    """Print the tables."""
    begin = measurement.begin
    for collective in bench.COLLECTIVES:
        results = [r for r in measurement.results if r.collective == collective]
        if results:
            title = f"MPI_{collective.capitalize()}, {begin['ranks']} ranks, {begin['dtype']} {begin['op']}"
            console.print(table(results, title, measurement.mpi_title))
    if not begin.get("preload"):
        console.print(
            "[yellow]Tributary's preload library is not built: these are the MPI's times alone.[/]"
        )
    unserved = {
        r.collective for r in measurement.results if r.tributary and r.tributary.algorithm == "mpi"
    }
    if unserved:
        console.print(
            f"[yellow]Tributary left these calls to the MPI: {', '.join(sorted(unserved))}.[/]"
        )
    for note in measurement.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if begin.get("is_oversubscribed"):
        console.print(
            f"note: {begin['ranks_on_host']} ranks share {begin['cores']} cores: these times are mostly the scheduler's"
        )
    if text := verdict(measurement.results):
        console.print(text)


def run(parsed: argparse.Namespace) -> int:
    """Measure, print, write; 1 if results were wrong."""
    job = job_of(parsed)
    measurement = measure_with_progress(job)
    console = output.console()
    report(measurement, console)
    if parsed.json:
        parsed.json.parent.mkdir(parents=True, exist_ok=True)
        parsed.json.write_text(json.dumps(bench.document(measurement), indent=1) + "\n")
        console.print(f"measurements: {parsed.json}")
    if parsed.plot:
        where = bench.environment(measurement)
        plot.draw(
            bench.panels(measurement.results),
            parsed.plot,
            f"Tributary and {measurement.mpi_title}, {job.ranks} ranks",
            f"{where['processor']}, {where['cores']} cores; {job.dtype} {job.op}; same job, interleaved, "
            f"median of {job.repeats} repeats; band: their span",
            measurement.mpi_title,
        )
        console.print(f"picture: {parsed.plot}")
    if measurement.wrong:
        console.print(f"[red]{measurement.wrong} elements were wrong.[/]")
        return 1
    return 0
