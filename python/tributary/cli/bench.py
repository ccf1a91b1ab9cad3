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

With several MPIs (--mpi all: MPICH, Open MPI and Intel MPI as far as they are there; or a list, in which openmpi+COMPONENT is Open MPI
with a component of its collectives preferred, such as sm, han or adapt) each has a job of its own, in which it and Tributary take
turns, and the table says which of them comes nearest at each size.

Tributary's side obeys the variables TRIB_..., as programs do (`trib info settings` lists them): TRIB_ENGINE, TRIB_SLICE,
TRIB_SHARED_HEAP=1 and the like are set before `trib bench`, and noted in the file of --json.

examples:
  trib bench allreduce -n 2
  trib bench all -n 2 --mpi openmpi --json out/openmpi.json --plot out/openmpi.png
  trib bench all -n 2 --mpi all --plot out/all.png
  trib bench reduce -n 16 --mpi mpich,intel,openmpi,openmpi+sm,openmpi+han,openmpi+adapt
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
from rich.text import Text

from tributary import bench, mpi, plot, tree
from tributary.cli import arguments, output
from tributary.cli.output import Column
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
        "collective",
        metavar="COLLECTIVE",
        help=f"{', '.join(bench.COLLECTIVES)}, or all of these; with --memory cuda and --mode {', '.join(bench.COPYING)} also {', '.join(bench.COPIES)}",
    )
    arguments.add_job_arguments(parser, "mpich, intel, openmpi, abi, a list of them, or all")
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
    add(
        "--root",
        metavar="RANK",
        type=arguments.number_from(0),
        default=0,
        help="root of reduce (default: 0)",
    )
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
        help="operations that are timed together: on a stream (default: 32), in a graph (default: 8), or MPI calls in a row, as IMB does (default: 1)",
    )
    add(
        "--start",
        metavar="HOW",
        default="clock",
        help="what ranks wait for before a call: clock (default): all start at the same moment, where they are on one machine and have a core each; or barrier: the MPI's, which lets them go one after the other",
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
        "buffer for results, requests: its persistent operations, both with --mode stream and graph; floor: the time in which all ranks read "
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
        "--fresh",
        action="store_true",
        help="write the inputs again before each call, as programs do: otherwise all calls reduce the same data, of which other ranks' caches may have copies",
    )
    add(
        "--in-place",
        action="store_true",
        help="let results overwrite the inputs (MPI_IN_PLACE), as training jobs do: allreduce and reduce; with --mode stream and graph results are not compared then",
    )
    add(
        "--offset",
        metavar="N",
        type=arguments.number_from(0, bench.MOST_OFFSET),
        default=0,
        help=f"let buffers begin N elements, up to {bench.MOST_OFFSET}, behind a page or an allocation, as parts of larger arrays do (default: 0)",
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
        help="time of a batch of calls, of which it has up to 20000 (default: 25)",
    )
    add("--json", metavar="FILE", type=Path, help="write the measurements, with the environment")
    add("--plot", metavar="FILE", type=Path, help="draw them (.png, .svg, .pdf)")


def _choice(option: str, value: str, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        raise UserError(f"{option}: {value or 'an empty name'} is none of {', '.join(accepted)}")
    return value


def _compare(parsed: argparse.Namespace) -> str:
    """The value of --compare, or what fits the mode."""
    is_mpi = parsed.mode not in bench.ON_STREAM
    default = "mpi" if is_mpi else "nccl"
    value: str = default if parsed.compare is None else parsed.compare
    accepted: tuple[str, ...] = ("mpi", "intel", "nccl", "none")
    if parsed.memory == "host":
        accepted = ("mpi", "floor", "none")
    if not is_mpi:
        accepted = ("nccl", "registered", "requests", "none")
    elif parsed.mode != "blocking":
        accepted = ("blocking", *accepted)
    words = ["TRIB_ENGINE=gemv" if word == "gemv" else word for word in value.split(",")]
    if is_mpi:
        accepted = (*accepted, "VARIABLE=VALUE")
    for word in words:
        if "=" in word:
            variable, _, setting = word.partition("=")
            tree.check_settings({variable: setting})
            is_shared = {row["variable"]: row["is_shared"] for row in tree.info()["settings"]}
            if not is_shared.get(variable):
                what = "a setting of the process" if variable in is_shared else "no setting"
                of_ranks = ", ".join(name for name in is_shared if is_shared[name])
                raise UserError(f"--compare {word}: {what}; of a communicator are {of_ranks}")
            if not is_mpi:
                raise UserError(f"--compare {word}: settings are for calls through MPI")
            if variable == "TRIB_ENGINE" and parsed.memory == "host":
                raise UserError(f"--compare {word}: engines are for GPU buffers: add --memory cuda")
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
    accepted = (*bench.COLLECTIVES, *bench.COPIES, "all")
    collective = _choice("COLLECTIVE", parsed.collective, accepted)
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
    if collective in bench.COPIES and (parsed.memory == "host" or parsed.mode not in bench.COPYING):
        raise UserError(
            f"{collective}: Tributary has it for GPU buffers only: --memory cuda --mode {', '.join(bench.COPYING)}"
        )
    if parsed.memory == "host" and parsed.mpi_gpu_aware:
        raise UserError("--mpi-gpu-aware: it needs GPU buffers: add --memory cuda")
    if parsed.overlap and parsed.mode not in ("nonblocking", "persistent"):
        raise UserError(
            f"--overlap: nothing overlaps with --mode {parsed.mode}; it is for: nonblocking, persistent"
        )
    if parsed.fresh and parsed.memory != "host":
        raise UserError("--fresh: inputs are written again in host memory only: --memory host")
    if parsed.fresh and parsed.overlap:
        raise UserError("--fresh, --overlap: one or the other")
    _choice("--start", parsed.start, bench.STARTS)
    for option, is_given in (("--fresh", parsed.fresh), ("--overlap", parsed.overlap)):
        if is_given and (parsed.burst or 1) > 1:
            raise UserError(f"--burst, {option}: one or the other")
    settings: dict[str, str] = {}
    if parsed.algorithm is not None:
        names = tuple(row["name"] for row in info["algorithms"])
        settings["TRIB_ALGORITHM"] = _choice("--algorithm", parsed.algorithm, ("auto", *names))
    tree.check_settings(settings)
    compare = _compare(parsed)
    if parsed.nccl != os.environ.get("TRIB_NCCL") and "nccl" not in compare.split(","):
        raise UserError(f"--nccl: with --compare nccl only, not with --compare {compare}")
    if (parsed.offset > 0 or parsed.in_place) and "floor" in compare.split(","):
        raise UserError("--compare floor: it is not for --offset and --in-place")
    if parsed.in_place and collective not in ("allreduce", "reduce"):
        raise UserError("--in-place: it is for allreduce, reduce")
    is_intel = "intel" in compare.split(",")
    if is_intel:
        settings["I_MPI_OFFLOAD"] = os.environ.get("I_MPI_OFFLOAD", "1")
    ranks = parsed.ranks or _default_ranks(parsed.memory)
    if parsed.root >= ranks:
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
        start=parsed.start,
        nccl=parsed.nccl,
        is_mpi_gpu_aware=parsed.mpi_gpu_aware,
        overlap=parsed.overlap,
        is_fresh=parsed.fresh,
        is_in_place=parsed.in_place,
        offset=parsed.offset,
    )


def whole_sizes(job: bench.Job) -> list[int]:
    """The sizes in whole elements."""
    width = next(row["bytes"] for row in tree.info()["dtypes"] if row["name"] == job.dtype)
    return [max(size // width, 1) * width for size in job.sizes]


def rounding_text(job: bench.Job) -> str:
    """What is said of sizes that are no whole elements; empty: all are."""
    size_text = arguments.size_text
    rounded = [
        f"{size_text(size)} is measured as {size_text(whole)}"
        for size, whole in zip(job.sizes, whole_sizes(job), strict=True)
        if size != whole
    ]
    return f"--sizes: in whole elements of {job.dtype}, {', '.join(rounded)}" if rounded else ""


def measure_with_progress(measurement: bench.Measurement) -> None:
    """Measure, and show on standard error how far it is."""
    job = measurement.job
    title = f"{job.mpi}, {arguments.count_text(job.ranks, 'rank')}"
    with steps(title, measurement.planned) as step:
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


def _label(result: bench.Result, other: str) -> str:
    """A library's short name."""
    return "NCCL" if other == "nccl" else result.compared[other].library


def ratio_cell(result: bench.Result, other: str) -> str | Text:
    """The ratio to another library, in the colour of a verdict."""
    ratio = result.ratio_to(other)
    if not ratio:
        return "-"
    passes = result.passes_against(other)
    return Text(f"{ratio:.2f}", "red" if passes is False else "green" if ratio >= 1 else "yellow")


def _interval_cell(result: bench.Result, other: str) -> str:
    ratios = result.ratios_to(other)
    return f"{min(ratios):.2f} - {max(ratios):.2f}" if ratios else "-"


def _wrong_cell(result: bench.Result, side: bench.Side) -> str | Text:
    sides = (result.tributary, *result.compared.values())
    wrong = [s.wrong for s in sides if s and s.wrong is not None]
    if not wrong:
        return "-"
    return Text(" / ".join(map(str, wrong)), "red") if any(wrong) else str(side.wrong)


def _time_cell(side: bench.Side | None) -> str:
    return arguments.time_text(side.time_us) if side else "-"


def _heading(other: str, label: str, mpi_title: str, nccl_title: str) -> str:
    if label == "mpi+copy":
        return f"mpi+copy\n{mpi_title}"
    return {
        "nccl": nccl_title,
        "blocking": "Tributary,\nblocking",
        "registered": "Tributary,\nregistered",
        "requests": "Tributary,\nrequests",
        "intel": f"on GPU buffers\n{mpi_title}",
        "mpi": mpi_title,
    }.get(other, "Tributary,\n" + label.replace("=", "=\n"))


def _overlap_cell(side: bench.Side | None) -> str:
    return "-" if side is None or side.overlap is None else f"{side.overlap:.0%}"


def table(results: list[bench.Result], mpi_title: str, nccl_title: str = "NCCL") -> list[Column]:
    """One collective."""
    # Of the libraries that are there at any size.
    of_results = {other: _label(r, other) for r in results for other in r.compared}
    labels = {other: of_results[other] for other in bench.compared_names(results)}
    results = [r for r in results if r.tributary or r.compared]
    sides = [r.tributary or next(iter(r.compared.values())) for r in results]
    has_tributary = any(r.tributary for r in results)
    is_plain = all(r.memory == "host" for r in results) and len(labels) == 1

    columns = [Column("bytes", [arguments.bytes_text(r.bytes) for r in results])]
    for other, label in labels.items():
        times = [_time_cell(r.compared.get(other)) for r in results]
        columns.append(Column(f"{_heading(other, label, mpi_title, nccl_title)}\nus", times))
    if has_tributary:
        columns.append(Column("Tributary\nus", [_time_cell(r.tributary) for r in results]))
        for other, label in labels.items():
            whose = label.replace("=", "=\n")
            heading = "ratio" if is_plain else f"ratio:\n{whose} /\nTributary"
            columns.append(Column(heading, [ratio_cell(r, other) for r in results]))
            if len(labels) == 1:
                intervals = [_interval_cell(r, other) for r in results]
                columns.append(Column("interval", intervals, spare=1))
    for name in ("mpi", "tributary"):
        if any((its := getattr(r, name)) and its.overlaps for r in results):
            whose = "Tributary" if name == "tributary" else mpi_title
            overlaps = [_overlap_cell(getattr(r, name)) for r in results]
            columns.append(Column(f"overlap\n{whose}", overlaps))
    if any(r.floor for r in results):
        columns.append(Column("floor\nus", [_time_cell(r.floor) for r in results]))
        if has_tributary:
            floors = [f"{r.floors:.2f}" if r.floors else "-" for r in results]
            columns.append(Column("Tributary's\ntime / floor", floors))
    pairs = list(zip(results, sides, strict=True))
    return [
        *columns,
        Column("algbw\nGB/s", [f"{r.algbw(side):.2f}" for r, side in pairs], spare=4),
        Column("busbw\nGB/s", [f"{r.busbw(side):.2f}" for r, side in pairs], spare=3),
        Column("wrong", [_wrong_cell(r, side) for r, side in pairs]),
        Column("algorithm", [side.algorithm for side in sides], spare=2, is_text=True),
    ]


def is_served(result: bench.Result) -> bool:
    """Whether Tributary did the reduction itself."""
    if result.tributary is None or (result.ranks == 1 and result.memory == "host"):
        return False
    return result.tributary.algorithm != "mpi"


def verdict(results: list[bench.Result]) -> str:
    """One sentence on the ratios to each library."""
    if not any(map(is_served, results)):
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
    text = f"{arguments.count_text(begin['ranks'], 'rank')}, {bench.data_text(begin)}"
    if begin.get("memory", "host") == "host":
        return text
    mode = {
        "stream": f", {begin.get('operations_per_sync')} operations back to back on a stream",
        "graph": f", a graph of {begin.get('operations_per_sync')} operations",
    }
    return f"{text}, buffers on GPUs{mode.get(begin['mode'], '')}"


def say_if_crowded(measurement: bench.Measurement, console: Console) -> None:
    """Where there were more ranks than cores."""
    begin = measurement.begin
    if begin.get("is_oversubscribed"):
        console.print(
            f"note: {begin['ranks_on_host']} ranks share {arguments.count_text(begin['cores'], 'core')}: these times are mostly the scheduler's"
        )


def report(measurement: bench.Measurement, console: Console) -> None:
    """Print the tables."""
    begin = measurement.begin
    for collective in (*bench.COLLECTIVES, *bench.COPIES):
        results = [r for r in measurement.results if r.collective == collective]
        if results:
            name = bench.function_name(collective, results[0].mode)
            title = f"{name}, {_job_text(begin)}"
            columns = table(results, measurement.mpi_title, measurement.nccl_title)
            output.print_figures(console, columns, title)
    if measurement.gpus_title:
        settings = [f"{name}={value}" for name, value in begin.get("nccl_settings", {}).items()]
        console.print(
            f"GPUs: {measurement.gpus_title}, driver {begin.get('driver') or 'unknown'}, CUDA {begin['cuda']}"
            + (f", {measurement.nccl_title}" if begin.get("nccl") else "")
            + (f" with {' '.join(settings)}" if settings else "")
        )
    if not begin.get("preload"):
        console.print(
            "Tributary's preload library is not built: these are the MPI's times alone.",
            style="yellow",
        )
    unserved = {
        r.collective
        for r in measurement.results
        if r.tributary and r.ranks > 1 and not is_served(r)
    }
    if unserved:
        console.print(
            f"Tributary left these calls to the MPI: {', '.join(sorted(unserved))}.",
            style="yellow",
        )
    for note in measurement.notes:
        console.print(f"note: {note}")
    say_if_crowded(measurement, console)
    if not measurement.is_complete:
        done = f"{len(measurement.results)} of {measurement.planned} results"
        console.print(f"Ended early: {done} are there.", style="yellow")
    if text := verdict(measurement.results):
        console.print(text)


def draw(measurement: bench.Measurement, path: Path) -> None:
    """The picture."""
    job, where = measurement.job, bench.environment(measurement)
    place = f"{where['processor']}, {arguments.count_text(where['cores'], 'core')}"
    names = {
        "mpi": measurement.mpi_title,
        "intel": f"{measurement.mpi_title} on GPU buffers",
        "nccl": measurement.nccl_title,
        "blocking": "its blocking call",
        "registered": "the same with registered buffers",
        "requests": "its persistent operations",
    }
    if job.memory != "host":
        place = f"{measurement.gpus_title}, {job.mode}"
        sides = [side for r in measurement.results for side in r.compared.values()]
        if any(side.library == "mpi+copy" for side in sides):
            names["mpi"] = f"mpi+copy ({measurement.mpi_title})"
    there = bench.compared_names(measurement.results)
    title = " and ".join(["Tributary", *(names[name] for name in there if name in names)])
    plot.draw(
        bench.panels(measurement.results),
        path,
        f"{title}, {arguments.count_text(job.ranks, 'rank')}",
        f"{place}; {bench.data_text(measurement.begin)}; "
        + ("same job, interleaved, " if there else "")
        + f"median of {job.repeats} repeats"
        + ("; band: their span" if there else ""),
        names,
    )


def run(parsed: argparse.Namespace) -> int:
    """Measure, print, write; 1 if results were wrong."""
    from tributary.cli import best  # which measures as this module does

    arguments.take_variables(parsed)
    if best.is_wanted(parsed.mpi):
        return best.run(parsed)
    job = job_of(parsed)
    arguments.check_results(parsed)
    if parsed.memory != "host":
        arguments.check_gpus(parsed.launcher)
    if text := rounding_text(job):
        print(f"trib bench: {text}", file=sys.stderr)
    measurement = bench.Measurement(job)
    try:
        measure_with_progress(measurement)
    finally:  # whatever ended it: what was measured is not lost
        if measurement.results:
            _keep(measurement, parsed)
    return 1 if measurement.wrong else 0


def _keep(measurement: bench.Measurement, parsed: argparse.Namespace) -> None:
    """Write the files, then print: who reads that may leave. If the files cannot be written, print all the same."""
    console = output.console()
    try:
        if parsed.json:
            output.write_text(parsed.json, json.dumps(bench.document(measurement), indent=1) + "\n")
        if parsed.plot:
            draw(measurement, parsed.plot)
    finally:
        report(measurement, console)
    if parsed.json:
        output.say_file(console, "measurements", parsed.json)
    if parsed.plot:
        output.say_file(console, "picture", parsed.plot)
    if measurement.wrong:
        console.print(f"{measurement.wrong} elements were wrong.", style="red")
