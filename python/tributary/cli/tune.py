# SPDX-License-Identifier: BSD-3-Clause
"""Find out which algorithm, slice and protocol is best on this machine, and keep it in the tuning file.

Programs do this by themselves, in MPI_Allreduce_init and its like, for the sizes that they use, and for a tenth of a second
each. `trib tune` does it beforehand, for many sizes and more thoroughly; blocking, nonblocking and persistent reductions of later
jobs with as many ranks then take what was found. Sizes that are in the file already are not measured again without --again.

The file is tributary/tuning.json in XDG_CACHE_HOME or ~/.cache; TRIB_TUNING_FILE names another one, by an absolute path, or
none. `trib info tuning` says which one it is, and what this machine is called in it.

--show prints what is known of this machine. --check times it anew: the choice of the tuning file, that of the default table, and
every candidate that came near the best one when it was tuned, interleaved in one job (host memory). A ratio is a time over that
of the best of them: 1 is as good as it gets.

examples:
  trib tune -n 2
  trib tune allreduce -n 16 --sizes 1K:16M:4 --budget 1000
  trib tune all -n 4 --memory cuda
  trib tune --show --plot out/tuning.png
  trib tune allreduce -n 2 --check --plot out/check.png
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tributary import bench, mpi, plot, tuning
from tributary.cli import arguments, output
from tributary.cli import bench as bench_command
from tributary.cli.progress import steps
from tributary.errors import UserError

HELP = "measure what is best on this machine, and keep it"

# As in src/comm/tuner.hpp and src/base/config.cpp.
_MOST_BYTES = 64 << 20
_MOST_MS = 60000

_BUFFERS = {"host": "buffers in host memory", "cuda": "buffers on GPUs"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to tune, show or check."""
    parser.add_argument(
        "collective",
        metavar="COLLECTIVE",
        nargs="?",
        default="all",
        help=f"{', '.join(bench.COLLECTIVES)}, or all (default)",
    )
    arguments.add_job_arguments(parser)
    add = parser.add_argument
    add(
        "--sizes",
        metavar="LIST",
        default=None,
        help="bytes, FIRST:LAST[:FACTOR] or a list (default: 4:16M; with --show and --check: all)",
    )
    add(
        "--memory",
        metavar="KIND",
        default="host",
        help="where the buffers are: host (default), or cuda: on the GPUs",
    )
    add("--dtype", metavar="TYPE", default="float", help="element type (default: float)")
    add("--op", metavar="OP", default="sum", help="operator (default: sum)")
    add(
        "--budget",
        metavar="MS",
        type=arguments.positive,
        default=500,
        help="milliseconds per size, at most (default: 500)",
    )
    add("--again", action="store_true", help="also sizes that are in the file already")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--show", action="store_true", help="measure nothing, print what is known")
    forms.add_argument("--check", action="store_true", help="time what is known again")
    add(
        "--repeats",
        metavar="N",
        type=arguments.positive,
        default=7,
        help="interleaved repeats of --check (default: 7)",
    )
    add("--json", metavar="FILE", type=Path, help="write what is shown or checked")
    add(
        "--plot", metavar="FILE", type=Path, help="draw what is shown or checked (.png, .svg, .pdf)"
    )


def _check_arguments(parsed: argparse.Namespace) -> None:
    accepted = (*bench.COLLECTIVES, "all")
    if parsed.collective not in accepted:
        raise UserError(f"COLLECTIVE: {parsed.collective} is none of {', '.join(accepted)}")
    if parsed.memory not in bench.MEMORIES:
        raise UserError(f"--memory: {parsed.memory} is none of {', '.join(bench.MEMORIES)}")
    if parsed.budget > _MOST_MS:
        raise UserError(f"--budget: {parsed.budget} is more than {_MOST_MS} milliseconds")
    arguments.check_mpi(parsed.mpi)
    if (parsed.plot or parsed.json) and not (parsed.show or parsed.check):
        option = "--plot" if parsed.plot else "--json"
        raise UserError(f"{option}: with --show or --check only")
    if parsed.check and parsed.memory != "host":
        raise UserError("--check: with --memory host only")
    arguments.check_picture(parsed.plot)
    arguments.check_output(parsed.json, "--json")


def _job(parsed: argparse.Namespace) -> bench.Job:
    """A persistent job of the benchmark with these arguments."""
    words = argparse.Namespace(**vars(parsed))
    defaults = argparse.ArgumentParser()
    bench_command.add_arguments(defaults)
    for name, value in vars(defaults.parse_args([parsed.collective])).items():
        if not hasattr(words, name):
            setattr(words, name, value)
    words.sizes, words.mode, words.compare = parsed.sizes or "4:16M", "persistent", "none"
    words.json = words.plot = None
    job = bench_command.job_of(words)
    if parsed.memory == "host" and job.ranks > mpi.usable_cores():
        raise UserError(
            f"-n: {job.ranks} ranks on {mpi.usable_cores()} cores: it would be the scheduler that is measured; "
            f"accepted: 2 to {mpi.usable_cores()}"
        )
    if job.ranks < 2:
        raise UserError(f"-n: {job.ranks}: accepted: 2 or more")
    return job


def _selected(parsed: argparse.Namespace) -> list[tuning.Finding]:
    """What the file knows of this machine and the arguments name."""
    found = tuning.of_this_machine(tuning.read(tuning.path()))
    sizes = set(arguments.read_sizes(parsed.sizes)) if parsed.sizes else None
    places = {"host": ("host",), "cuda": ("device",)}
    return [
        f
        for f in found
        if parsed.collective in (f.collective, "all")
        and (sizes is None or f.bytes in sizes)
        and (parsed.ranks is None or f.ranks == parsed.ranks)
        and f.place in places[parsed.memory]
    ]


# ---------------------------------------------------------------------------------------------- to fill it


def fill(parsed: argparse.Namespace, console: Console) -> None:
    """Have the library measure."""
    job = _job(parsed)
    tuning.read(tuning.path())  # a damaged one is said before anything is measured
    too_long = [size for size in job.sizes if size > _MOST_BYTES]
    if too_long:
        raise UserError(
            f"--sizes: {arguments.size_text(too_long[0])}: vectors of up to {arguments.size_text(_MOST_BYTES)} are measured"
        )
    if parsed.memory != "host":
        arguments.check_gpus(parsed.launcher)
    if text := bench_command.rounding_text(job):
        print(f"trib tune: {text}", file=sys.stderr)
    job.tune = "again" if parsed.again else "on"
    job.settings["TRIB_TUNE_BUDGET_MS"] = str(parsed.budget)
    measurement = bench.Measurement(job)
    collectives = len(bench.COLLECTIVES) if job.collective == "all" else 1
    with steps(f"{job.mpi}, {job.ranks} ranks", len(job.sizes) * collectives) as step:
        for tuned in tuning.fill(job, measurement):
            step(
                f"{tuned.collective} {arguments.size_text(tuned.bytes)}: {tuned.seconds * 1000:.0f} ms"
            )
    for note in measurement.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(f"findings: {tuning.path()}", highlight=False, markup=False)


# ------------------------------------------------------------------------------------------------ to show it


def _group(findings: list[tuning.Finding]) -> dict[tuple[Any, ...], list[tuning.Finding]]:
    groups: dict[tuple[Any, ...], list[tuning.Finding]] = {}
    order = {name: i for i, name in enumerate(bench.COLLECTIVES)}
    for f in sorted(
        findings,
        key=lambda f: (
            f.ranks,
            f.nodes,
            f.layout,
            f.place,
            f.determinism,
            order.get(f.collective, 9),
            f.bytes,
        ),
    ):
        group = (f.collective, f.ranks, f.nodes, f.layout, f.place, f.determinism)
        groups.setdefault(group, []).append(f)
    return groups


def _title(group: tuple[Any, ...]) -> str:
    collective, ranks, nodes, layout, place, determinism = group
    text = f"{bench.function_name(collective, 'blocking')}, {ranks} ranks"
    if nodes > 1:
        text += f" on {nodes} nodes"
    if layout:
        text += f", layout {layout}"
    if place == "device":
        text += ", buffers on GPUs"
    return text + (f", determinism {determinism}" if determinism != "run" else "")


def show(findings: list[tuning.Finding], console: Console) -> None:
    """Print the tables."""
    console.print(f"{tuning.machine()}\n", highlight=False, markup=False)
    for group, rows in _group(findings).items():
        made: Table = output.table(_title(group))
        for column in ("bytes", "default\nus", "tuned\nus", "ratio", "least\nus"):
            made.add_column(column, justify="right", no_wrap=True)
        made.add_column("tuned choice")
        made.add_column("candidates", justify="right", no_wrap=True)
        for f in rows:
            made.add_row(
                arguments.bytes_text(f.bytes),
                arguments.time_text(f.default_us),
                arguments.time_text(f.time_us),
                f"{f.default_us / f.time_us:.2f}",
                arguments.time_text(f.least_us),
                "the default" if f.is_default else f.way.text,
                str(len(f.candidates)),
            )
        console.print(made)
    better = [f for f in findings if not f.is_default]
    console.print(
        f"{len(better)} of {len(findings)} sizes are served better than by the default table."
    )


def _draw(parsed: argparse.Namespace, panels: list[plot.TuningPanel], title: str) -> None:
    plot.draw_tuning(panels, parsed.plot, title, tuning.machine())


def _show(parsed: argparse.Namespace, console: Console) -> None:
    findings = _selected(parsed)
    if not findings:
        other = "cuda" if parsed.memory == "host" else "host"
        there = len(_selected(argparse.Namespace(**{**vars(parsed), "memory": other})))
        if there:
            raise UserError(
                f"{tuning.path()} has no findings for {_BUFFERS[parsed.memory]}, but {there} for {_BUFFERS[other]}: "
                f"--memory {other} shows them"
            )
        raise UserError(
            f"nothing is known: {tuning.path()} has no findings for this machine and these arguments; `trib tune` measures some"
        )
    show(findings, console)
    if parsed.plot:
        panels = [
            plot.TuningPanel(
                _title(group),
                [
                    plot.TuningPoint(f.bytes, f.default_us, f.time_us, min(f.least_us, f.time_us))
                    for f in rows
                ],
            )
            for group, rows in _group(findings).items()
        ]
        _draw(parsed, panels, "What tuning found")
    if parsed.json:
        shown = [
            {
                "collective": f.collective,
                "ranks": f.ranks,
                "place": f.place,
                "determinism": f.determinism,
                "bytes": f.bytes,
                "choice": "default" if f.is_default else f.way.text,
                "tuned_us": f.time_us,
                "default_us": f.default_us,
                "least_us": f.least_us,
            }
            for f in findings
        ]
        _write(parsed, {"machine": tuning.machine(), "findings": shown})


# ----------------------------------------------------------------------------------------------- to check it


def _cell(ratio: float, limit: float) -> str:
    return f"[{'green' if ratio <= limit else 'red'}]{ratio:.2f}[/]"


def _check(parsed: argparse.Namespace, console: Console) -> None:
    parsed.ranks = parsed.ranks or max(2, mpi.usable_cores())
    findings = [f for f in _selected(parsed) if f.determinism == "run" and f.nodes == 1]
    if not findings:
        raise UserError(
            f"nothing to check: {tuning.path()} has no findings for {parsed.ranks} ranks on this machine; `trib tune` measures some"
        )
    checks: list[tuning.Check] = []
    with steps(f"{parsed.ranks} ranks", len(findings)) as step:
        for f in findings:
            job = _job(parsed)
            job.batch_ms = 10
            checks.append(tuning.check(f, job))
            last = checks[-1]
            step(
                f"{f.collective} {arguments.size_text(f.bytes)}: tuned {last.tuned_ratio:.2f}, default {last.default_ratio:.2f}"
            )
    by_finding = {id(c.finding): c for c in checks}
    for group, rows in _group(findings).items():
        made: Table = output.table(_title(group) + ", measured again")
        for column in ("bytes", "best\nus", "tuned\nus", "tuned /\nbest", "default\nus"):
            made.add_column(column, justify="right", no_wrap=True)
        made.add_column("default /\nbest", justify="right", no_wrap=True)
        made.add_column("tuned choice")
        for f in rows:
            c = by_finding[id(f)]
            made.add_row(
                arguments.bytes_text(f.bytes),
                arguments.time_text(c.best_us),
                arguments.time_text(c.tuned_us),
                _cell(c.tuned_ratio, 1.1),
                arguments.time_text(c.default_us),
                _cell(c.default_ratio, 1.25),
                "the default" if f.is_default else f.way.text,
            )
        console.print(made)
    console.print(
        f"Tuned choice within 10% of the best candidate at {sum(c.tuned_ratio <= 1.1 for c in checks)} of {len(checks)} sizes "
        f"(worst: {max(c.tuned_ratio for c in checks):.2f}), default table within 25% at "
        f"{sum(c.default_ratio <= 1.25 for c in checks)} (worst: {max(c.default_ratio for c in checks):.2f})."
    )
    if parsed.plot:
        panels = [
            plot.TuningPanel(
                _title(group),
                [
                    plot.TuningPoint(f.bytes, c.default_us, c.tuned_us, c.best_us)
                    for f in rows
                    for c in (by_finding[id(f)],)
                ],
            )
            for group, rows in _group(findings).items()
        ]
        _draw(parsed, panels, f"Tuned choices, measured again, {parsed.ranks} ranks")
    if parsed.json:
        checked = [
            {
                "collective": c.finding.collective,
                "bytes": c.finding.bytes,
                "choice": "default" if c.finding.is_default else c.finding.way.text,
                "tuned_us": round(c.tuned_us, 4),
                "default_us": round(c.default_us, 4),
                "candidates_us": {way: round(us, 4) for way, us in c.ways_us.items()},
                "tuned_ratio": round(c.tuned_ratio, 4),
                "default_ratio": round(c.default_ratio, 4),
            }
            for c in checks
        ]
        _write(parsed, {"machine": tuning.machine(), "ranks": parsed.ranks, "checks": checked})


def _write(parsed: argparse.Namespace, document: dict[str, Any]) -> None:
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    parsed.json.write_text(json.dumps(document, indent=1) + "\n")


def run(parsed: argparse.Namespace) -> int:
    """Fill, show or check."""
    _check_arguments(parsed)
    console = output.console()
    if parsed.check:
        _check(parsed, console)
    elif parsed.show:
        _show(parsed, console)
    else:
        fill(parsed, console)
        findings = _selected(parsed)
        if findings:
            show(findings, console)
    for option, file in (("picture", parsed.plot), ("data", parsed.json)):
        if file:
            console.print(f"{option}: {file}", highlight=False, markup=False)
    return 0
