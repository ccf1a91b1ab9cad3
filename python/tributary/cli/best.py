# SPDX-License-Identifier: BSD-3-Clause
"""`trib bench` with several MPIs: a job for each, and at every size the MPI that comes nearest to Tributary."""

import argparse
import json
import os
import re
import statistics
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from tributary import bench, mpi, plot, tree
from tributary.cli import arguments, output
from tributary.cli import bench as command
from tributary.cli.output import Column
from tributary.errors import UserError

# A priority above those that components of Open MPI's have by default.
_PREFERRED = "100"


@dataclass
class Job:
    """One of the MPIs: "openmpi+han" is Open MPI whose component `han` is preferred."""

    name: str
    measurement: bench.Measurement

    @property
    def title(self) -> str:
        """Such as "Open MPI 5.0.11, han"."""
        component = self.name.partition("+")[2]
        return self.measurement.mpi_title + (f", {component}" if component else "")


def is_wanted(names: str | None) -> bool:
    """Whether the value of --mpi names more than one MPI."""
    return names is not None and (names == "all" or "," in names or "+" in names)


def _names(text: str) -> list[str]:
    if text == "all":
        there = {one.vendor for one in (*mpi.wheels(), *mpi.on_path())}
        found: list[str] = [
            name
            for name in ("mpich", "openmpi", "intel")
            if name in there and tree.program(f"trib-bench-{tree.ABI_OF[name]}")
        ]
        if not found:
            raise UserError(f"--mpi all: no MPI was found; accepted: a list of {_ACCEPTED}")
        return found
    return list(dict.fromkeys(text.split(",")))


# Of Open MPI's collectives: of another name it says nothing, and does as it always does.
_COMPONENTS = "acoll, adapt, basic, han, hcoll, inter, libnbc, self, sm, sync, tuned, ucc, xhc"
_ACCEPTED = f"{', '.join(mpi.NAMES)}, and openmpi+COMPONENT ({_COMPONENTS})"


def jobs_of(parsed: argparse.Namespace) -> list[Job]:
    """What the arguments ask for, checked."""
    if parsed.memory != "host":
        raise UserError(f"--mpi {parsed.mpi}: several are for --memory host")
    if parsed.compare is not None and "mpi" not in parsed.compare.split(","):
        raise UserError(
            f"--compare: {parsed.compare or 'an empty name'}: with several MPIs it has to name mpi"
        )
    jobs = []
    for name in _names(parsed.mpi):
        vendor, _, component = name.partition("+")
        if vendor not in mpi.NAMES or (
            name != vendor and (vendor != "openmpi" or component not in _COMPONENTS.split(", "))
        ):
            raise UserError(f"--mpi: {name or 'an empty name'} is none of {_ACCEPTED}")
        words = argparse.Namespace(**{**vars(parsed), "mpi": vendor})
        job = command.job_of(words)
        if component:
            job.settings[f"OMPI_MCA_coll_{component}_priority"] = _PREFERRED
        jobs.append(Job(name, bench.Measurement(job)))
    return jobs


@dataclass
class Size:
    """One collective at one size, by the jobs that measured it."""

    collective: str
    bytes: int
    results: dict[str, bench.Result]  # by the job's name

    @property
    def ratios(self) -> dict[str, float]:
        """Each MPI's time over Tributary's in the same job."""
        known = {name: result.ratio for name, result in self.results.items()}
        return {name: ratio for name, ratio in known.items() if ratio is not None}

    @property
    def nearest(self) -> str:
        """The MPI of the least ratio."""
        return min(self.ratios, key=lambda name: self.ratios[name])

    @property
    def passes(self) -> bool:
        """Whether Tributary is at least as fast as each of them, or the interval touches 1."""
        return all(self.results[name].passes for name in self.ratios)

    @property
    def tributary_us(self) -> float:
        """The median of the jobs'."""
        return statistics.median(
            side.time_us for result in self.results.values() if (side := result.tributary)
        )


def sizes_of(jobs: list[Job]) -> list[Size]:
    """Joined by collective and size, where there is anything to compare."""
    sizes: dict[tuple[str, int], Size] = {}
    for job in jobs:
        for result in job.measurement.results:
            key = result.collective, result.bytes
            sizes.setdefault(key, Size(*key, {})).results[job.name] = result
    return [size for size in sizes.values() if size.ratios]


def _ratio_cell(size: Size, name: str) -> str | Text:
    return command.ratio_cell(size.results[name], "mpi") if name in size.results else "-"


def _nearest_time(size: Size) -> str:
    side = size.results[size.nearest].mpi
    return arguments.time_text(side.time_us) if side else "-"


def table(sizes: list[Size], jobs: list[Job]) -> list[Column]:
    """One collective."""
    titles = {job.name: job.title for job in jobs}
    columns = [
        Column("bytes", [arguments.bytes_text(size.bytes) for size in sizes]),
        Column("Tributary\nus", [arguments.time_text(size.tributary_us) for size in sizes]),
    ]
    for name, title in titles.items():
        heading = re.sub(r" (?=\d)", "\n", title, count=1) + " /\nTributary"
        columns.append(Column(heading, [_ratio_cell(size, name) for size in sizes]))
    return [
        *columns,
        Column("nearest", [titles[size.nearest] for size in sizes], is_text=True),
        Column("its\nus", [_nearest_time(size) for size in sizes], spare=1),
    ]


def verdict(sizes: list[Size]) -> str:
    """One sentence on the nearest of them."""
    lowest = min(sizes, key=lambda size: size.ratios[size.nearest])
    return (
        f"Against the best of them Tributary is at least as fast at {sum(size.passes for size in sizes)} of {len(sizes)} sizes "
        f"(an interval that touches 1 counts); lowest ratio {lowest.ratios[lowest.nearest]:.2f} "
        f"({lowest.collective}, {arguments.size_text(lowest.bytes)}, {lowest.nearest})."
    )


def _panels(sizes: list[Size]) -> list[plot.Panel]:
    panels: dict[str, plot.Panel] = {}
    for size in sizes:
        mode = next(iter(size.results.values())).mode
        title = bench.function_name(size.collective, mode)
        compared = {}
        for name, ratio in size.ratios.items():
            result = size.results[name]
            if result.mpi:
                compared[name] = plot.Compared(
                    result.mpi.time_us, ratio, min(result.ratios), max(result.ratios)
                )
        point = plot.Point(size.bytes, size.tributary_us, compared)
        panels.setdefault(size.collective, plot.Panel(title)).points.append(point)
    return list(panels.values())


def _draw(parsed: argparse.Namespace, jobs: list[Job], sizes: list[Size]) -> None:
    job, where = jobs[0].measurement.job, bench.environment(jobs[0].measurement)
    plot.draw(
        _panels(sizes),
        parsed.plot,
        f"Tributary and {len(jobs)} MPIs, {arguments.count_text(job.ranks, 'rank')}",
        f"{where['processor']}, {arguments.count_text(where['cores'], 'core')}; {bench.data_text(jobs[0].measurement.begin)}; a job for each MPI, in which it and Tributary take turns, "
        f"median of {job.repeats} repeats; band: their span",
        {one.name: one.title for one in jobs},
    )


def run(parsed: argparse.Namespace) -> int:
    """Measure under each MPI, then print, draw and write all of it; 1 if results were wrong."""
    jobs = jobs_of(parsed)
    arguments.check_results(parsed)
    if text := command.rounding_text(jobs[0].measurement.job):
        print(f"trib bench: {text}", file=sys.stderr)
    measured: list[Job] = []
    try:
        for job in jobs:
            measured.append(job)
            command.measure_with_progress(job.measurement)
    finally:  # whatever ended it: what was measured is not lost
        _keep(parsed, [job for job in measured if job.measurement.results])
    return 1 if any(job.measurement.wrong for job in jobs) else 0


def _keep(parsed: argparse.Namespace, jobs: list[Job]) -> None:
    """Write the files, then print, also if they cannot be written."""
    if not jobs:
        return
    sizes = sizes_of(jobs)
    console = output.console()
    try:
        if parsed.json:
            documents = {job.name: bench.document(job.measurement) for job in jobs}
            output.write_text(parsed.json, json.dumps({"jobs": documents}, indent=1) + "\n")
        if parsed.plot and sizes:
            _draw(parsed, jobs, sizes)
    finally:
        _report(console, jobs, sizes)
    for what, path in (("measurements", parsed.json), ("picture", parsed.plot if sizes else None)):
        if path:
            output.say_file(console, what, os.fspath(path))


def _report(console: Console, jobs: list[Job], sizes: list[Size]) -> None:
    measurement = jobs[0].measurement
    for collective in bench.COLLECTIVES:
        rows = [size for size in sizes if size.collective == collective]
        if rows:
            title = bench.function_name(collective, measurement.job.mode)
            ranks = arguments.count_text(measurement.job.ranks, "rank")
            data = bench.data_text(measurement.begin)
            output.print_figures(console, table(rows, jobs), f"{title}, {ranks}, {data}")
    for job in jobs:
        for note in job.measurement.notes:
            console.print(f"note: {job.title}: {note}")
        if not job.measurement.is_complete:
            done = f"{len(job.measurement.results)} of {job.measurement.planned} results"
            console.print(f"{job.title} ended early: {done} are there.", style="yellow")
        if job.measurement.wrong:
            console.print(f"{job.title}: {job.measurement.wrong} elements were wrong.", style="red")
    command.say_if_crowded(measurement, console)
    if not sizes:
        console.print(
            "There is nothing to compare: Tributary's preload library is not built.", style="yellow"
        )
    elif not any(command.is_served(result) for size in sizes for result in size.results.values()):
        console.print("Tributary left all calls to the MPI.", style="yellow")
    else:
        console.print(verdict(sizes))
