# SPDX-License-Identifier: BSD-3-Clause
"""Find out which algorithm, slice and protocol is best on this machine, and keep it in the tuning file.

Programs do this by themselves, in MPI_Allreduce_init and its like, for the sizes that they use, and for a tenth of a second
each. `trib tune` does it beforehand, for many sizes and more thoroughly; blocking, nonblocking and persistent reductions of later
jobs with as many ranks then take what was found. Sizes that are in the file already are not measured again without --again.

The file is tributary/tuning.json in XDG_CACHE_HOME or ~/.cache; TRIB_TUNING_FILE names another one, by an absolute path, or
none. `trib info tuning` says which one it is, and what this machine is called in it.

With --memory cuda, copy engines are among what is measured from 4 MiB on, and with TRIB_DETERMINISM=any sums by cuBLAS. Give long
vectors time: --budget 10000 for some hundred MiB.

--show prints what is known of this machine. --check times it anew: the choice of the tuning file, that of the default table, and
every candidate that came near the best one when it was tuned, interleaved in one job. A ratio is a time over that of the best of
them: 1 is as good as it gets. What was found with TRIB_DETERMINISM=order or any, or for whole numbers, is timed with that setting;
with a --dtype of whole numbers, it alone. On GPUs it is kernels that are timed, on buffers that are not mapped, as when it was tuned
(TRIB_RESIDENT=0, TRIB_MAP=off).

examples:
  trib tune -n 2
  trib tune allreduce -n 16 --sizes 1K:16M:4 --budget 1000
  trib tune all -n 4 --memory cuda
  trib tune --show --plot out/tuning.png
  trib tune allreduce -n 2 --check --plot out/check.png
  trib tune all -n 4 --memory cuda --check
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tributary import bench, mpi, plot, tree, tuning
from tributary.cli import arguments, output
from tributary.cli import bench as bench_command
from tributary.cli.output import Column
from tributary.cli.progress import steps
from tributary.errors import UserError

HELP = "measure what is best on this machine, and keep it"

# As in src/comm/tuner.hpp and src/base/config.cpp.
_MOST_BYTES = {"host": 64 << 20, "cuda": 1 << 30}
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
        type=arguments.number_from(1, _MOST_MS),
        default=500,
        help=f"milliseconds per size, at most; up to {_MOST_MS} (default: 500)",
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
    arguments.check_mpi(parsed.mpi)
    if (parsed.plot or parsed.json) and not (parsed.show or parsed.check):
        option = "--plot" if parsed.plot else "--json"
        raise UserError(f"{option}: with --show or --check only")
    arguments.check_results(parsed)


def _job(parsed: argparse.Namespace) -> bench.Job:
    """A persistent job of the benchmark with these arguments."""
    words = argparse.Namespace(**vars(parsed))
    defaults = argparse.ArgumentParser()
    bench_command.add_arguments(defaults)
    for name, value in vars(defaults.parse_args([parsed.collective])).items():
        if not hasattr(words, name):
            setattr(words, name, value)
    words.sizes = "4:16M" if parsed.sizes is None else parsed.sizes
    words.mode, words.compare = "persistent", "none"
    words.json = words.plot = None
    job = bench_command.job_of(words)
    cores = mpi.usable_cores()
    if parsed.memory == "host" and cores < 2:
        raise UserError(
            "tuning in host memory needs 2 cores, as ranks that share one measure the scheduler; "
            "this process may run on 1"
        )
    if parsed.memory == "host" and job.ranks > cores:
        raise UserError(
            f"-n: {job.ranks} ranks on {cores} cores: it would be the scheduler that is measured; "
            f"accepted: 2 to {cores}"
        )
    if job.ranks < 2:
        raise UserError(f"-n: {job.ranks}: accepted: 2 or more")
    return job


def _selected(parsed: argparse.Namespace) -> list[tuning.Finding]:
    """What the file knows of this machine and the arguments name."""
    found = tuning.of_this_machine(tuning.read(tuning.path()))
    sizes = [] if parsed.sizes is None else arguments.read_sizes(parsed.sizes)
    octaves = {size.bit_length() for size in sizes}  # each has one finding
    places = {"host": ("host",), "cuda": ("device",)}
    return [
        f
        for f in found
        if parsed.collective in (f.collective, "all")
        and (not octaves or f.bytes.bit_length() in octaves)
        and (parsed.ranks is None or f.ranks == parsed.ranks)
        and f.place in places[parsed.memory]
    ]


# ---------------------------------------------------------------------------------------------- to fill it


def _lost_text(lost: list[tuning.Tuned]) -> str:
    """That there are no findings, and why that may be. The library knows, but does not tell."""
    sizes = ", ".join(f"{one.collective} {arguments.size_text(one.bytes)}" for one in lost)
    settings = tree.environment_settings()
    settings.pop("TRIB_TUNING_FILE", None)
    here = ", ".join(f"{name}={value}" for name, value in settings.items())
    return (
        f"nothing was kept for this machine of {sizes}: --budget was too short, the file could not be written, "
        "or nothing is measured with these settings and buffers"
        + (f" (set here: {here})" if here else "")
    )


def _check_file(file: Path) -> None:
    """It can be written, and so can its folder: the library replaces the file as a whole, under a lock beside it."""
    is_named = "TRIB_TUNING_FILE" in tree.environment_settings()
    which = "TRIB_TUNING_FILE"
    if not is_named:
        which = f"the default tuning file ({which} names another one)"
    arguments.check_output(file, which)
    folder = Path(os.path.realpath(file)).parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{which}: {file} cannot be replaced, as {folder} cannot be written to: {error.strerror}; "
            "accepted: a file in a folder that can be written to"
        ) from None


def fill(parsed: argparse.Namespace, console: Console) -> list[tuning.Finding]:
    """Have the library measure; what is known of these sizes then."""
    if parsed.memory != "host":
        arguments.check_gpus(parsed.launcher)
    job = _job(parsed)
    file = tuning.path()
    _check_file(file)
    parsed.ranks, parsed.sizes = job.ranks, None

    def known() -> dict[tuple[str, int], list[tuning.Finding]]:
        rows: dict[tuple[str, int], list[tuning.Finding]] = {}
        for f in _selected(parsed):
            rows.setdefault((f.collective, f.bytes.bit_length()), []).append(f)
        return rows

    before = known()  # a damaged file is said before anything is measured
    most = _MOST_BYTES[parsed.memory]
    too_long = [size for size in job.sizes if size > most]
    if too_long:
        raise UserError(
            f"--sizes: {arguments.size_text(too_long[0])}: vectors of up to {arguments.size_text(most)} are measured"
        )
    if text := bench_command.rounding_text(job):
        print(f"trib tune: {text}", file=sys.stderr)
    job.tune = "again" if parsed.again else "on"
    job.settings["TRIB_TUNE_BUDGET_MS"] = str(parsed.budget)
    measurement = bench.Measurement(job)
    collectives = len(bench.COLLECTIVES) if job.collective == "all" else 1
    tuned: list[tuning.Tuned] = []
    try:
        with steps(f"{job.mpi}, {job.ranks} ranks", len(job.sizes) * collectives) as step:
            for one in tuning.fill(job, measurement):
                tuned.append(one)
                step(
                    f"{one.collective} {arguments.size_text(one.bytes)}: {one.seconds * 1000:.0f} ms"
                )
    finally:
        for note in measurement.notes:
            console.print(f"note: {note}")
        after = known()
        kept = {
            key: after[key] for key in after if not parsed.again or after[key] != before.get(key)
        }
        keys = dict.fromkeys((one.collective, one.bytes.bit_length()) for one in tuned)
        lost = [one for one in tuned if (one.collective, one.bytes.bit_length()) not in kept]
        is_told = len(lost) < len(tuned) or arguments.may_be_elsewhere(parsed.launcher)
        if is_told:
            output.say_file(console, "findings", file)
    if not is_told:
        raise UserError(_lost_text(lost))
    if lost:
        console.print(f"note: {_lost_text(lost)}")
    return [finding for key in keys for finding in kept.get(key, ())]


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
    console.print(f"{tuning.machine()}\n")
    time = arguments.time_text
    for group, rows in _group(findings).items():
        columns = [
            Column("bytes", [arguments.bytes_text(f.bytes) for f in rows]),
            Column("default\nus", [time(f.default_us) for f in rows]),
            Column("tuned\nus", [time(f.time_us) for f in rows]),
            Column("ratio", [f"{f.default_us / f.time_us:.2f}" for f in rows]),
            Column("least\nus", [time(f.least_us) for f in rows], spare=1),
            Column("tuned choice", [f.choice for f in rows], is_text=True),
            Column("candidates", [str(len(f.candidates)) for f in rows], spare=2),
        ]
        output.print_figures(console, columns, _title(group))
    better = [f for f in findings if not f.is_default and f.way.is_known]
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
                "choice": f.choice.removeprefix("the "),
                "tuned_us": f.time_us,
                "default_us": f.default_us,
                "least_us": f.least_us,
            }
            for f in findings
        ]
        _write(parsed, {"machine": tuning.machine(), "findings": shown})
    show(findings, console)


# ----------------------------------------------------------------------------------------------- to check it


def _cell(ratio: float, limit: float) -> Text:
    return Text(f"{ratio:.2f}", "green" if ratio <= limit else "red")


def _check(parsed: argparse.Namespace, console: Console) -> None:
    if parsed.memory != "host":
        arguments.check_gpus(parsed.launcher)
    if findings := _selected(parsed):  # a damaged file is said first
        job = _job(parsed)
        parsed.ranks = job.ranks
        dtypes = {row["name"]: row for row in tree.info()["dtypes"]}
        freedoms = ("any",) if dtypes[job.dtype]["is_exact"] else ("run", "order", "any")
        findings = [
            f
            for f in findings
            if f.ranks == job.ranks and f.nodes == 1 and f.determinism in freedoms
        ]
    if not findings:
        ranks = f"{parsed.ranks} ranks on this machine" if parsed.ranks else "this machine"
        raise UserError(
            f"nothing to check: {tuning.path()} has no findings for {ranks} and these arguments; `trib tune` measures some"
        )
    checks: list[tuning.Check] = []
    try:
        with steps(f"{parsed.ranks} ranks", len(findings)) as step:
            for f in findings:
                job = _job(parsed)
                job.batch_ms = 10
                job.check = f.bytes <= _MOST_BYTES["host"]  # which looks at each element
                checks.append(tuning.check(f, job))
                last = checks[-1]
                step(
                    f"{f.collective} {arguments.size_text(f.bytes)}: tuned {last.tuned_ratio:.2f}, default {last.default_ratio:.2f}"
                )
    finally:  # whatever ended it: what was measured is not lost
        if checks:
            _keep_checks(parsed, checks, console)
            if len(checks) < len(findings):
                console.print(f"Ended early: {len(checks)} of {len(findings)} sizes were measured.")


def _keep_checks(parsed: argparse.Namespace, checks: list[tuning.Check], console: Console) -> None:
    """Draw, write and print them."""
    by_finding = {id(c.finding): c for c in checks}
    groups = {
        group: [by_finding[id(f)] for f in rows]
        for group, rows in _group([c.finding for c in checks]).items()
    }
    if parsed.plot:
        panels = [
            plot.TuningPanel(
                _title(group),
                [
                    plot.TuningPoint(c.finding.bytes, c.default_us, c.tuned_us, c.best_us)
                    for c in rows
                ],
            )
            for group, rows in groups.items()
        ]
        _draw(parsed, panels, f"Tuned choices, measured again, {parsed.ranks} ranks")
    if parsed.json:
        checked = [
            {
                "collective": c.finding.collective,
                "place": c.finding.place,
                "determinism": c.finding.determinism,
                "bytes": c.finding.bytes,
                "choice": c.finding.persistent_choice.removeprefix("the "),
                "tuned_us": round(c.tuned_us, 4),
                "default_us": round(c.default_us, 4),
                "candidates_us": {way: round(us, 4) for way, us in c.ways_us.items()},
                "tuned_ratio": round(c.tuned_ratio, 4),
                "default_ratio": round(c.default_ratio, 4),
            }
            for c in checks
        ]
        _write(parsed, {"machine": tuning.machine(), "ranks": parsed.ranks, "checks": checked})
    time = arguments.time_text
    for group, rows in groups.items():
        columns = [
            Column("bytes", [arguments.bytes_text(c.finding.bytes) for c in rows]),
            Column("best\nus", [time(c.best_us) for c in rows], spare=1),
            Column("tuned\nus", [time(c.tuned_us) for c in rows]),
            Column("tuned /\nbest", [_cell(c.tuned_ratio, 1.1) for c in rows]),
            Column("default\nus", [time(c.default_us) for c in rows]),
            Column("default /\nbest", [_cell(c.default_ratio, 1.25) for c in rows]),
            Column(
                "tuned choice",
                [c.finding.persistent_choice for c in rows],
                spare=2,
                is_text=True,
            ),
        ]
        output.print_figures(console, columns, _title(group) + ", measured again")
    console.print(
        f"Tuned choice within 10% of the best candidate at {sum(c.tuned_ratio <= 1.1 for c in checks)} of {len(checks)} sizes "
        f"(worst: {max(c.tuned_ratio for c in checks):.2f}), default table within 25% at "
        f"{sum(c.default_ratio <= 1.25 for c in checks)} (worst: {max(c.default_ratio for c in checks):.2f})."
    )


def _write(parsed: argparse.Namespace, document: dict[str, Any]) -> None:
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(parsed.json, json.dumps(document, indent=1) + "\n")


def run(parsed: argparse.Namespace) -> int:
    """Fill, show or check."""
    _check_arguments(parsed)
    if not parsed.show:  # which shows findings for any number of ranks
        arguments.take_variables(parsed)
    console = output.console()
    if parsed.check:
        _check(parsed, console)
    elif parsed.show:
        _show(parsed, console)
    elif findings := fill(parsed, console):
        show(findings, console)
    for what, file in (("picture", parsed.plot), ("data", parsed.json)):
        if file:
            output.say_file(console, what, file)
    return 0
