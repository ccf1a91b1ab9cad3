# SPDX-License-Identifier: BSD-3-Clause
"""Measurements: starting the native benchmark, and what its lines mean. How it measures stands in tools/bench.cpp."""

import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tributary import mpi, plot, tree
from tributary.errors import UserError

COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_block")


@dataclass(frozen=True)
class Side:
    """One library at one size."""

    library: str
    algorithm: str
    times_us: tuple[float, ...]  # one per repeat
    wrong: int | None  # None: not checked

    @property
    def time_us(self) -> float:
        """The point: the median of the repeats."""
        return statistics.median(self.times_us)


@dataclass(frozen=True)
class Result:
    """One collective at one size."""

    collective: str
    ranks: int
    bytes: int
    tributary: Side | None
    mpi: Side | None

    @property
    def ratios(self) -> tuple[float, ...]:
        """MPI's time / Tributary's, per repeat: above 1, Tributary is faster."""
        if self.tributary is None or self.mpi is None:
            return ()
        return tuple(a / b for a, b in zip(self.mpi.times_us, self.tributary.times_us, strict=True))

    @property
    def ratio(self) -> float | None:
        """Median of the ratios."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def passes(self) -> bool | None:
        """Whether Tributary is at least as fast, or the interval touches 1."""
        return max(self.ratios) >= 1 if self.ratios else None

    def algbw(self, side: Side) -> float:
        """GB/s: bytes of the vector over time."""
        return self.bytes / side.time_us / 1000

    def busbw(self, side: Side) -> float:
        """GB/s as nccl-tests count them: what a perfect algorithm must move per rank, over time."""
        factor = {"allreduce": 2 * (self.ranks - 1) / self.ranks, "reduce": 1.0}
        return self.algbw(side) * factor.get(self.collective, (self.ranks - 1) / self.ranks)

    def rows(self) -> list[dict[str, Any]]:
        """For the JSON file: one row per library."""
        return [
            {
                "collective": self.collective,
                "library": side.library,
                "algorithm": side.algorithm,
                "ranks": self.ranks,
                "bytes": self.bytes,
                "time_us": round(side.time_us, 4),
                "algbw_GBps": round(self.algbw(side), 4),
                "busbw_GBps": round(self.busbw(side), 4),
                "wrong": side.wrong,
            }
            for side in (self.tributary, self.mpi)
            if side
        ]


@dataclass
class Job:
    """What to measure."""

    collective: str
    ranks: int
    sizes: list[int]
    mpi: str = "mpich"
    dtype: str = "f32"
    op: str = "sum"
    root: int = 0
    compare: str = "mpi"
    check: bool = True
    repeats: int = 5
    batch_ms: float = 25
    launcher: str | None = None
    settings: dict[str, str] = field(default_factory=dict)


@dataclass
class Measurement:
    """What came out."""

    job: Job
    begin: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def mpi_title(self) -> str:
        """Such as "MPICH 5.0.2"."""
        return mpi_title(self.begin.get("mpi", ""))

    @property
    def wrong(self) -> int:
        """Wrong elements of Tributary's, over all sizes."""
        return sum(r.tributary.wrong or 0 for r in self.results if r.tributary)


def mpi_title(version: str) -> str:
    """The name and number in what MPI_Get_library_version says."""
    first = version.split("\n", 1)[0].split("\0", 1)[0]
    if first.startswith("MPICH Version:"):
        return "MPICH " + first.split(":", 1)[1].strip()
    if first.startswith("Open MPI v"):
        return "Open MPI " + first.removeprefix("Open MPI v").split(",", 1)[0]
    if first.startswith("Intel(R) MPI Library"):
        return (
            "Intel MPI " + first.removeprefix("Intel(R) MPI Library").split(" for ", 1)[0].strip()
        )
    return first.strip() or "the MPI"


def default_mpi() -> str:
    """The first of MPICH, Open MPI, Intel MPI that the benchmark was built for."""
    for name in ("mpich", "openmpi", "abi"):
        if tree.program(f"trib-bench-{name}"):
            return name
    raise UserError(
        "the benchmark is not built: `make build` builds it; TRIB_HOME names another place"
    )


def _program(name: str) -> Path:
    abi = tree.ABI_OF[name]
    path = tree.program(f"trib-bench-{abi}")
    if path is None:
        built = [n for n in mpi.NAMES if tree.program(f"trib-bench-{tree.ABI_OF[n]}")]
        raise UserError(
            f"--mpi {name}: the benchmark was not built for it (built for: {', '.join(built) or 'none'})"
        )
    return path


def measure(job: Job, measurement: Measurement) -> Iterator[Result]:
    """Run the native benchmark; each result as it comes. Fills `measurement`."""
    program = _program(job.mpi)
    abi = tree.ABI_OF[job.mpi]
    has_preload = tree.preload_library(abi) is not None
    plan = mpi.plan(program, job.ranks, job.mpi, job.launcher, job.settings, preload=has_preload)
    argv = plan.argv(
        [
            str(program),
            job.collective,
            "--sizes",
            ",".join(map(str, job.sizes)),
            *("--dtype", job.dtype, "--op", job.op, "--root", str(job.root)),
            *("--compare", job.compare, "--check", str(int(job.check))),
            *("--repeats", str(job.repeats), "--batch-ms", str(job.batch_ms)),
        ]
    )
    measurement.command = argv
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=plan.full_environment(),
    )
    assert process.stdout is not None
    ends = 0
    try:
        for text in process.stdout:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                measurement.notes.append(text.rstrip())
                continue
            if line["type"] == "begin":
                measurement.begin = line
            elif line["type"] == "note":
                measurement.notes.append(line["text"].strip())
            elif line["type"] == "end":
                ends += 1
            elif line["type"] == "row":
                result = _result(line, measurement.begin, plan.vendor)
                measurement.results.append(result)
                yield result
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None and ends == 0:
                process.terminate()
        status = process.wait()
    if status != 0 or ends == 0:
        raise UserError(f"the benchmark ended with status {status}: {' '.join(argv)}")


def _result(line: dict[str, Any], begin: dict[str, Any], vendor: str) -> Result:
    def side(name: str, library: str) -> Side | None:
        data = line["sides"].get(name)
        if data is None:
            return None
        return Side(library, data["algorithm"], tuple(data["time_us"]), data["wrong"])

    return Result(
        line["collective"],
        begin["ranks"],
        line["bytes"],
        side("tributary", "tributary"),
        side("mpi", vendor),
    )


def environment(measurement: Measurement) -> dict[str, Any]:
    """Where and how something was measured."""
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    begin = measurement.begin
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "processor": model or platform.machine(),
        "cores": begin.get("cores", os.cpu_count()),
        "kernel": platform.release(),
        "mpi": measurement.mpi_title,
        "mpi_version": begin.get("mpi", "").strip("\0\n"),
        "mpi_library": begin.get("mpi_library"),
        "tributary": tree.info()["version"],
        "preload": begin.get("preload") or None,
        "ranks": begin.get("ranks"),
        "dtype": begin.get("dtype"),
        "op": begin.get("op"),
        "repeats": begin.get("repeats"),
        "settings": measurement.job.settings,
        "command": " ".join(measurement.command),
    }


def document(measurement: Measurement) -> dict[str, Any]:
    """The JSON file."""
    return {
        "environment": environment(measurement),
        "rows": [row for result in measurement.results for row in result.rows()],
        "ratios": [
            {
                "collective": r.collective,
                "bytes": r.bytes,
                "ratio": round(r.ratio, 4),
                "low": round(min(r.ratios), 4),
                "high": round(max(r.ratios), 4),
            }
            for r in measurement.results
            if r.ratio is not None
        ],
    }


def panels(results: list[Result]) -> list[plot.Panel]:
    """For the picture: one column per collective."""
    columns: dict[str, plot.Panel] = {}
    for r in results:
        column = columns.setdefault(r.collective, plot.Panel(f"MPI_{r.collective.capitalize()}"))
        column.points.append(
            plot.Point(
                r.bytes,
                r.tributary.time_us if r.tributary else None,
                r.mpi.time_us if r.mpi else None,
                r.ratio,
                min(r.ratios) if r.ratios else None,
                max(r.ratios) if r.ratios else None,
            )
        )
    return list(columns.values())
