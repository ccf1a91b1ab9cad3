# SPDX-License-Identifier: BSD-3-Clause
"""Measure reductions: Tributary against the MPI's own, and against NCCL, interleaved in one job.

A time is the median of the repeats, each the median over calls, of a call's slowest rank. The ratio is the MPI's time
over Tributary's: above 1, Tributary is faster; the interval beside it spans the repeats. Bandwidths are Tributary's, as
nccl-tests define them (bytes: of the whole vector). `wrong` counts elements that differ from a reference.

With --memory cuda the buffers are on GPUs, and there are as many ranks as GPUs if -n does not say otherwise. A call ends
when its result may be used.
The MPI's own function is then timed with the copies to and from page-locked host memory that its users write around it
("mpi+copy"), unless --mpi-gpu-aware says that it takes GPU buffers. --compare intel is Intel MPI on GPU buffers, its own
support for them switched on (I_MPI_OFFLOAD=1). --mode stream times operations enqueued back to back
on a CUDA stream, --mode graph those of a CUDA graph: by Tributary's C API and by NCCL, per operation. --mode nonblocking and
persistent time MPI_Iallreduce and MPI_Start with the MPI_Wait that follows.

Tributary's side obeys the variables TRIB_..., as programs do (`trib info settings` lists them): TRIB_ENGINE, TRIB_SLICE,
TRIB_SHARED_HEAP=1 and the like are set before `trib bench`, and noted in the file of --json.

examples:
  trib bench allreduce -n 2
  trib bench all -n 2 --mpi openmpi --json out/openmpi.json --plot out/openmpi.png
  trib bench allreduce -n 2 --compare mpi,floor --sizes 1M:64M
  trib bench allreduce -n 2 --mode nonblocking --overlap --sizes 64K:64M:4
  trib bench reduce -n 4 --sizes 4:1M:4 --dtype double --op max
  trib bench allreduce -n 8 --algorithm ring --compare none
  trib bench allreduce -n 4 --memory cuda --compare mpi,nccl --sizes 4:1G
  trib bench all -n 4 --memory cuda --mode graph --json out/graph.json
  TRIB_ENGINE=copy trib bench allreduce -n 4 --memory cuda --sizes 64M:1G
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tributary import bench, mpi, plot, tree
from tributary.cli import arguments, output
from tributary.cli.progress import steps
from tributary.errors import UserError

HELP = "measure reductions, against the MPI's own and NCCL"

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
    add(
        "--memory",
        metavar="KIND",
        default="host",
        help="where the buffers are: host (default), or cuda: on the GPUs",
    )
    add(
        "--mode",
        metavar="MODE",
        default="blocking",
        help="blocking calls (default), nonblocking (MPI_I... and MPI_Wait) or persistent (MPI_Start and MPI_Wait); "
        "with --memory cuda also stream or graph",
    )
    add(
        "--burst",
        metavar="N",
        type=arguments.positive,
        default=None,
        help="operations per synchronisation, on a stream (default: 32) or in a graph (default: 8)",
    )
    add(
        "--overlap",
        action="store_true",
        help="with --mode nonblocking and persistent: also how much of an operation runs while its caller computes as long as it takes",
    )
    add(
        "--algorithm",
        metavar="NAME",
        default=None,
        help="Tributary's algorithm (default: by its table)",
    )
    add(
        "--compare",
        metavar="LIST",
        default=None,
        help="mpi: the MPI's own as well (default), on GPU buffers with copies by hand; intel: Intel MPI's own on GPU buffers; nccl: NCCL, with --memory cuda (default with --mode stream and graph); "
        "blocking: Tributary's blocking call, with --mode nonblocking and persistent; registered: Tributary with a registered "
        "buffer for results, with --mode stream and graph; floor: the time in which all ranks read "
        "their vectors and write their results, which host memory needs at least; VARIABLE=VALUE: Tributary with another setting, on a communicator "
        "of its own; gemv: short for TRIB_ENGINE=gemv; several, as mpi,nccl; none",
    )
    add(
        "--nccl",
        metavar="PATH",
        default=os.environ.get("TRIB_NCCL"),
        help="NCCL's file (TRIB_NCCL; default: libnccl.so.2 where the loader or a Python's packages have it)",
    )
    add(
        "--mpi-gpu-aware",
        action="store_true",
        help="the MPI takes GPU buffers (as Intel MPI with I_MPI_OFFLOAD=1): time it on them, not mpi+copy",
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
        type=arguments.positive_number,
        default=25,
        help="time of a batch of calls (default: 25)",
    )
    add("--json", metavar="FILE", type=Path, help="write the measurements, with the environment")
    add("--plot", metavar="FILE", type=Path, help="draw them (.png, .svg, .pdf)")


def _choice(option: str, value: str, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        raise UserError(f"{option}: {value} is none of {', '.join(accepted)}")
    return value


def _compare(parsed: argparse.Namespace) -> str:
    """The value of --compare, or what fits the mode."""
    is_mpi = parsed.mode not in bench.ON_STREAM
    value: str = parsed.compare or ("mpi" if is_mpi else "nccl")
    accepted: tuple[str, ...] = ("mpi", "intel", "nccl", "none")
    if parsed.memory == "host":
        accepted = ("mpi", "floor", "none")
    if not is_mpi:
        accepted = ("nccl", "registered", "none")
    elif parsed.mode != "blocking":
        accepted = ("blocking", *accepted)
    words = ["TRIB_ENGINE=gemv" if word == "gemv" else word for word in value.split(",")]
    for word in words:
        if "=" in word:
            variable, _, setting = word.partition("=")
            tree.check_settings({variable: setting})
            of_ranks = [row["variable"] for row in tree.info()["settings"] if row["is_shared"]]
            if variable not in of_ranks:
                raise UserError(
                    f"--compare {word}: a setting of the process; of a communicator are {', '.join(of_ranks)}"
                )
            if not is_mpi:
                raise UserError(f"--compare {word}: settings are for calls through MPI")
            continue
        if word == "nccl" and parsed.memory == "host":
            raise UserError(
                "--compare nccl: NCCL reduces GPU buffers only: add --memory cuda "
                f"(with --memory host: {', '.join(accepted)})"
            )
        if word == "intel" and parsed.memory == "host":
            raise UserError(
                "--compare intel: it is for GPU buffers: add --memory cuda, or name the MPI: --mpi intel"
            )
        if word in ("mpi", "intel") and not is_mpi:
            raise UserError(
                f"--compare {word}: an MPI has no operations on a stream; with --mode {parsed.mode}: {', '.join(accepted)}"
            )
        _choice("--compare", word, accepted)
    if "none" in words and len(words) > 1:
        raise UserError(f"--compare {value}: none stands alone")
    if "intel" in words and parsed.mpi not in (None, "intel"):
        raise UserError(f"--compare intel: the job's MPI is another one: --mpi {parsed.mpi}")
    return ",".join(words)


def _default_ranks(memory: str) -> int:
    """As many as cores, or as GPUs."""
    if memory == "host":
        return max(2, mpi.usable_cores())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([name for name in visible.split(",") if name]))
    return max(1, len(list(Path("/dev").glob("nvidia[0-9]*"))))


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
    _choice("--memory", parsed.memory, bench.MEMORIES)
    _choice("--mode", parsed.mode, bench.MODES)
    if parsed.memory == "host" and parsed.mode in bench.ON_STREAM:
        raise UserError(f"--mode {parsed.mode}: it needs GPU buffers: add --memory cuda")
    if parsed.memory == "host" and parsed.mpi_gpu_aware:
        raise UserError("--mpi-gpu-aware: it needs GPU buffers: add --memory cuda")
    if parsed.overlap and parsed.mode not in ("nonblocking", "persistent"):
        raise UserError(
            f"--overlap: nothing overlaps with --mode {parsed.mode}; it is for: nonblocking, persistent"
        )
    settings: dict[str, str] = {}
    if parsed.algorithm:
        names = tuple(row["name"] for row in info["algorithms"])
        settings["TRIB_ALGORITHM"] = _choice("--algorithm", parsed.algorithm, ("auto", *names))
    tree.check_settings(settings)
    compare = _compare(parsed)
    is_intel = "intel" in compare.split(",")
    if is_intel:
        settings["I_MPI_OFFLOAD"] = os.environ.get("I_MPI_OFFLOAD", "1")
    ranks = parsed.ranks or _default_ranks(parsed.memory)
    if not 0 <= parsed.root < ranks:
        raise UserError(f"--root: {parsed.root} is not among the ranks 0 to {ranks - 1}")
    return bench.Job(
        collective=collective,
        ranks=ranks,
        sizes=arguments.read_sizes(parsed.sizes),
        mpi="intel" if is_intel else arguments.check_mpi(parsed.mpi) or bench.default_mpi(),
        dtype=dtype,
        op=op,
        root=parsed.root,
        compare=compare,
        check=parsed.check,
        repeats=parsed.repeats,
        batch_ms=parsed.batch_ms,
        launcher=parsed.launcher,
        settings=settings,
        memory=parsed.memory,
        mode=parsed.mode,
        burst=parsed.burst,
        nccl=parsed.nccl,
        is_mpi_gpu_aware=parsed.mpi_gpu_aware,
        overlap=parsed.overlap,
    )


def rounding_text(job: bench.Job) -> str:
    """What is said of sizes that are no whole elements; empty: all are."""
    width = next(row["bytes"] for row in tree.info()["dtypes"] if row["name"] == job.dtype)
    rounded = [
        f"{arguments.size_text(size)} is measured as {arguments.size_text(max(size // width, 1) * width)}"
        for size in job.sizes
        if size % width
    ]
    if not rounded:
        return ""
    return f"--sizes: elements of {job.dtype} have {width} B: {', '.join(rounded)}"


def measure_with_progress(job: bench.Job) -> bench.Measurement:
    """Measure, and show on standard error how far it is."""
    measurement = bench.Measurement(job)
    collectives = len(bench.COLLECTIVES) if job.collective == "all" else 1
    total = len(job.sizes) * collectives
    with steps(f"{job.mpi}, {arguments.count_text(job.ranks, 'rank')}", total) as step:
        for result in bench.measure(job, measurement):
            text = f"{result.collective} {arguments.size_text(result.bytes)}"
            if result.tributary:
                text += f": {arguments.time_text(result.tributary.time_us)} us"
            for other in result.compared:
                if ratio := result.ratio_to(other):
                    has_one = result.memory == "host" and len(result.compared) == 1
                    to = "" if has_one else f" to {_label(result, other)}"
                    text += f", ratio{to} {ratio:.2f}"
            if result.floors:
                text += f", {result.floors:.2f} of the floor"
            step(text)
    return measurement


def _label(result: bench.Result, other: str) -> str:
    """A library's short name."""
    return "NCCL" if other == "nccl" else result.compared[other].library


def _ratio_cells(result: bench.Result, other: str, has_interval: bool) -> list[str]:
    ratio, ratios = result.ratio_to(other), result.ratios_to(other)
    if not ratio:
        return ["-", "-"] if has_interval else ["-"]
    passes = result.passes_against(other)
    colour = "red" if passes is False else "green" if ratio >= 1 else "yellow"
    cells = [f"[{colour}]{ratio:.2f}[/]"]
    return [*cells, f"{min(ratios):.2f} - {max(ratios):.2f}"] if has_interval else cells


def _wrong_cell(result: bench.Result, side: bench.Side) -> str:
    sides = (result.tributary, *result.compared.values())
    wrong = [s.wrong for s in sides if s and s.wrong is not None]
    if not wrong:
        return "-"
    return f"[red]{' / '.join(map(str, wrong))}[/]" if any(wrong) else str(side.wrong)


def table(
    results: list[bench.Result], title: str, mpi_title: str, nccl_title: str = "NCCL"
) -> Table:
    """One collective."""
    made = output.table(title)
    made.add_column("bytes", justify="right", no_wrap=True)
    # Of the libraries that are there at any size.
    of_results = {other: _label(r, other) for r in results for other in r.compared}
    labels = {other: of_results[other] for other in bench.compared_names(results)}
    has_tributary = any(r.tributary for r in results)
    is_plain = all(r.memory == "host" for r in results) and len(labels) == 1
    for other, label in labels.items():
        heading = {
            "nccl": nccl_title,
            "blocking": "Tributary,\nblocking",
            "registered": "Tributary,\nregistered",
            "intel": f"on GPU buffers\n{mpi_title}",
            "mpi": mpi_title,
        }.get(other, "Tributary,\n" + label.replace("=", "=\n"))
        if label == "mpi+copy":
            heading = f"mpi+copy\n{mpi_title}"
        made.add_column(f"{heading}\nus", justify="right", no_wrap=True)
    if has_tributary:
        made.add_column("Tributary\nus", justify="right", no_wrap=True)
        for label in labels.values():
            heading = (
                "ratio"
                if is_plain
                else f"ratio:\n{label.replace('=', '=' + chr(10))} time /\nTributary's"
            )
            made.add_column(heading, justify="right", no_wrap=True)
            if len(labels) == 1:
                made.add_column("interval", justify="right", no_wrap=True)
    overlapping = [
        name
        for name in ("mpi", "tributary")
        if any((its := getattr(r, name)) and its.overlaps for r in results)
    ]
    for name in overlapping:
        made.add_column(
            f"overlap\n{'Tributary' if name == 'tributary' else mpi_title}",
            justify="right",
            no_wrap=True,
        )
    has_floor = any(r.floor for r in results)
    if has_floor:
        made.add_column("floor\nus", justify="right", no_wrap=True)
    if has_floor and has_tributary:
        made.add_column("Tributary's\ntime / floor", justify="right", no_wrap=True)
    has_room = len(labels) <= 2
    if has_room:
        made.add_column("algbw\nGB/s", justify="right", no_wrap=True)
        made.add_column("busbw\nGB/s", justify="right", no_wrap=True)
    made.add_column("wrong", justify="right", no_wrap=True)
    made.add_column("algorithm", no_wrap=True)
    for r in results:
        side = r.tributary or next(iter(r.compared.values()), None)
        if side is None:
            continue
        cells = [arguments.bytes_text(r.bytes)]
        for other in labels:
            known = r.compared.get(other)
            cells.append(arguments.time_text(known.time_us) if known else "-")
        if has_tributary:
            cells.append(arguments.time_text(r.tributary.time_us) if r.tributary else "-")
            for other in labels:
                cells += _ratio_cells(r, other, has_interval=len(labels) == 1)
        for name in overlapping:
            its = getattr(r, name)
            known_overlap = its.overlap if its else None
            cells.append("-" if known_overlap is None else f"{known_overlap:.0%}")
        if has_floor:
            cells.append(arguments.time_text(r.floor.time_us) if r.floor else "-")
        if has_floor and has_tributary:
            cells.append(f"{r.floors:.2f}" if r.floors else "-")
        if has_room:
            cells += [f"{r.algbw(side):.2f}", f"{r.busbw(side):.2f}"]
        made.add_row(*cells, _wrong_cell(r, side), side.algorithm)
    return made


def _is_served(result: bench.Result) -> bool:
    """Whether Tributary did the reduction itself."""
    if result.tributary is None or (result.ranks == 1 and result.memory == "host"):
        return False
    return result.tributary.algorithm != "mpi"


def verdict(results: list[bench.Result]) -> str:
    """One sentence on the ratios to each library."""
    if not any(map(_is_served, results)):
        if any(r.tributary and r.ranks == 1 for r in results):
            return "One rank has nothing to reduce: the MPI served every call."
        return ""
    sentences = []
    for other in bench.compared_names(results):
        known = [(r, ratio) for r in results if (ratio := r.ratio_to(other)) is not None]
        if not known:
            continue
        passed = sum(1 for r, _ in known if r.passes_against(other))
        least, lowest = min(known, key=lambda pair: pair[1])
        has_one = least.memory == "host" and len(least.compared) == 1
        against = "" if has_one else f"Against {_label(least, other)}: "
        sentences.append(
            f"{against}Tributary is at least as fast at {passed} of {len(known)} sizes (an interval that touches 1 counts); "
            f"lowest ratio {lowest:.2f} ({least.collective}, {arguments.size_text(least.bytes)})."
        )
    return "\n".join(sentences)


def _job_text(begin: dict[str, Any]) -> str:
    text = f"{arguments.count_text(begin['ranks'], 'rank')}, {begin['dtype']} {begin['op']}"
    if begin.get("memory", "host") == "host":
        return text
    mode = {
        "stream": f", {begin.get('operations_per_sync')} operations back to back on a stream",
        "graph": f", a graph of {begin.get('operations_per_sync')} operations",
    }
    return f"{text}, buffers on GPUs{mode.get(begin['mode'], '')}"


def report(measurement: bench.Measurement, console: Console) -> None:
    """Print the tables."""
    begin = measurement.begin
    for collective in bench.COLLECTIVES:
        results = [r for r in measurement.results if r.collective == collective]
        if results:
            name = bench.function_name(collective, results[0].mode)
            title = f"{name}, {_job_text(begin)}"
            console.print(table(results, title, measurement.mpi_title, measurement.nccl_title))
    if measurement.gpus_title:
        settings = [f"{name}={value}" for name, value in begin.get("nccl_settings", {}).items()]
        console.print(
            f"GPUs: {measurement.gpus_title}, driver {begin.get('driver') or 'unknown'}, CUDA {begin['cuda']}"
            + (f", {measurement.nccl_title}" if begin.get("nccl") else "")
            + (f" with {' '.join(settings)}" if settings else ""),
            markup=False,
        )
    if not begin.get("preload"):
        console.print(
            "[yellow]Tributary's preload library is not built: these are the MPI's times alone.[/]"
        )
    unserved = {
        r.collective
        for r in measurement.results
        if r.tributary and r.ranks > 1 and not _is_served(r)
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


def draw(measurement: bench.Measurement, path: Path) -> None:
    """The picture."""
    job, where = measurement.job, bench.environment(measurement)
    place = f"{where['processor']}, {where['cores']} cores"
    mpi_title, compared = measurement.mpi_title, measurement.mpi_title
    names = {"blocking": "its blocking call"}
    if job.memory != "host":
        place = f"{measurement.gpus_title}, {job.mode}"
        sides = [side for r in measurement.results for side in r.compared.values()]
        if any(side.library == "mpi+copy" for side in sides):
            mpi_title = f"mpi+copy ({mpi_title})"
        names = {
            "mpi": mpi_title,
            "intel": f"{measurement.mpi_title} on GPU buffers",
            "nccl": measurement.nccl_title,
            "blocking": "its blocking call",
            "registered": "the same with registered buffers",
        }
        there = bench.compared_names(measurement.results)
        compared = " and ".join(names.get(name, name) for name in there)
    plot.draw(
        bench.panels(measurement.results),
        path,
        f"Tributary and {compared}, {arguments.count_text(job.ranks, 'rank')}",
        f"{place}; {job.dtype} {job.op}; same job, interleaved, "
        f"median of {job.repeats} repeats; band: their span",
        mpi_title,
        nccl=measurement.nccl_title,
        names=names,
    )


def run(parsed: argparse.Namespace) -> int:
    """Measure, print, write; 1 if results were wrong."""
    job = job_of(parsed)
    arguments.check_picture(parsed.plot)
    arguments.check_output(parsed.json, "--json")
    if parsed.memory != "host":
        arguments.check_gpus(parsed.launcher)
    if text := rounding_text(job):
        print(f"trib bench: {text}", file=sys.stderr)
    measurement = measure_with_progress(job)
    console = output.console()
    report(measurement, console)
    if parsed.json:
        parsed.json.parent.mkdir(parents=True, exist_ok=True)
        parsed.json.write_text(json.dumps(bench.document(measurement), indent=1) + "\n")
        console.print(f"measurements: {parsed.json}")
    if parsed.plot:
        draw(measurement, parsed.plot)
        console.print(f"picture: {parsed.plot}")
    if measurement.wrong:
        console.print(f"[red]{measurement.wrong} elements were wrong.[/]")
        return 1
    return 0
