# SPDX-License-Identifier: BSD-3-Clause
"""Measurements: starting the native benchmark, and what its lines mean. How it measures stands in tools/bench.cpp."""

import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tributary import mpi, plot, tree
from tributary.errors import UserError

COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_block")
COPIES = ("allgather", "broadcast")  # of GPU buffers, ...
COPYING = ("blocking", "stream", "graph")  # ... in these modes
MEMORIES = ("host", "cuda")
MODES = ("blocking", "nonblocking", "persistent", "stream", "graph")
ON_STREAM = ("stream", "graph")
STARTS = ("clock", "barrier")
MOST_OFFSET = 4096  # of buffers, in elements
# For a launcher to end after its ranks.
_PATIENCE_S = 20
# What MPICH's launcher, and Intel's, write around the lines that name a rank that was killed and the signal.
_BANNER = re.compile(
    r"=*|=\s+CLEANING UP REMAINING PROCESSES|=\s+YOU CAN IGNORE THE BELOW CLEANUP MESSAGES"
    r"|This typically refers to a problem with your application\.|Please see the FAQ page .*"
)
# What Tributary can be compared with. intel: Intel MPI on GPU buffers; blocking: its own blocking call; registered: its own call on a stream, with a
# registered buffer for results; requests: the same started as persistent operations. Besides there is "floor", which is no library.
COMPARED = ("mpi", "intel", "nccl", "blocking", "registered", "requests")


@dataclass(frozen=True)
class Side:
    """One library at one size."""

    library: str
    algorithm: str
    times_us: tuple[float, ...]  # one per repeat
    wrong: int | None  # None: not checked
    # The same while the caller computes for compute_us: of each repeat, how much of the shorter one was hidden.
    overlaps: tuple[float, ...] = ()

    @property
    def time_us(self) -> float:
        """The point: the median of the repeats."""
        return statistics.median(self.times_us)

    @property
    def overlap(self) -> float | None:
        """The part of the operation that ran while its caller computed: 0 to 1."""
        return statistics.median(self.overlaps) if self.overlaps else None


@dataclass(frozen=True)
class Result:
    """One collective at one size."""

    collective: str
    ranks: int
    bytes: int
    tributary: Side | None
    mpi: Side | None
    nccl: Side | None = None
    memory: str = "host"
    mode: str = "blocking"
    blocking: Side | None = None
    floor: Side | None = None  # the least that memory has to move
    registered: Side | None = None
    requests: Side | None = None
    intel: Side | None = None
    settings: dict[str, Side] = field(default_factory=dict)  # by "VARIABLE=VALUE"

    @property
    def compared(self) -> dict[str, Side]:
        """The other libraries, by their names in COMPARED, and Tributary with other settings."""
        sides = {
            "mpi": self.mpi,
            "intel": self.intel,
            "nccl": self.nccl,
            "blocking": self.blocking,
            "registered": self.registered,
            "requests": self.requests,
        }
        return {name: side for name, side in sides.items() if side} | self.settings

    def ratios_to(self, other: str) -> tuple[float, ...]:
        """The other library's time / Tributary's, per repeat: above 1, Tributary is faster."""
        side = self.compared.get(other)
        if self.tributary is None or side is None:
            return ()
        return tuple(a / b for a, b in zip(side.times_us, self.tributary.times_us, strict=True))

    def ratio_to(self, other: str) -> float | None:
        """Median of the ratios."""
        ratios = self.ratios_to(other)
        return statistics.median(ratios) if ratios else None

    def passes_against(self, other: str) -> bool | None:
        """Whether Tributary is at least as fast, or the interval touches 1."""
        ratios = self.ratios_to(other)
        return max(ratios) >= 1 if ratios else None

    @property
    def floors(self) -> float | None:
        """How many times the floor's time Tributary takes."""
        if self.tributary is None or self.floor is None:
            return None
        pairs = zip(self.tributary.times_us, self.floor.times_us, strict=True)
        return statistics.median(a / b for a, b in pairs)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratios to the MPI."""
        return self.ratios_to("mpi")

    @property
    def ratio(self) -> float | None:
        """The ratio to the MPI."""
        return self.ratio_to("mpi")

    @property
    def passes(self) -> bool | None:
        """Whether Tributary passes against the MPI."""
        return self.passes_against("mpi")

    def algbw(self, side: Side) -> float:
        """GB/s: bytes of the vector over time."""
        return self.bytes / side.time_us / 1000

    def busbw(self, side: Side) -> float:
        """GB/s as nccl-tests count them: what a perfect algorithm must move per rank, over time."""
        factor = {"allreduce": 2 * (self.ranks - 1) / self.ranks, "reduce": 1.0, "broadcast": 1.0}
        return self.algbw(side) * factor.get(self.collective, (self.ranks - 1) / self.ranks)

    def rows(self) -> list[dict[str, Any]]:
        """For the JSON file: one row per library."""
        where = {} if self.memory == "host" else {"memory": self.memory}
        if where or self.mode != "blocking":
            where["mode"] = self.mode
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
                **where,
                **({} if side.overlap is None else {"overlap": round(side.overlap, 3)}),
            }
            for side in (self.tributary, *self.compared.values(), self.floor)
            if side
        ]


def compared_names(results: list[Result]) -> list[str]:
    """What Tributary is compared with in some of them, in the order of tables."""
    there = dict.fromkeys(name for result in results for name in result.compared)
    return [name for name in COMPARED if name in there] + [n for n in there if n not in COMPARED]


def data_text(begin: dict[str, Any]) -> str:
    """What is reduced, in words, and how calls follow each other where that is not as usual."""
    burst = begin.get("burst", 1) if begin.get("mode") not in ON_STREAM else 1
    offset = begin.get("offset", 0)
    return (
        f"{begin['dtype']} {begin['op']}"
        + (", inputs written before each call" if begin.get("is_fresh") else "")
        + (", in place" if begin.get("is_in_place") else "")
        + (f", buffers offset by {offset} element{'s' * (offset > 1)}" if offset else "")
        + (f", {burst} calls in a row" if burst > 1 else "")
        + (", started by barriers" if begin.get("start", "barrier") == "barrier" else "")
    )


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
    memory: str = "host"
    mode: str = "blocking"
    burst: int | None = None  # operations timed together; None: the native benchmark's choice
    start: str = "clock"  # one of STARTS
    nccl: str | None = None  # its file; None: wherever it is found
    is_mpi_gpu_aware: bool = False
    tune: str = ""  # value of the info key trib_tune; then nothing is timed
    overlap: bool = False  # also time operations while their callers compute
    is_fresh: bool = False  # inputs are written again before each call
    is_in_place: bool = False  # results overwrite the inputs
    offset: int = 0  # elements by which buffers begin behind a page or an allocation
    ways: tuple[str, ...] = ()  # values of the info key trib_algorithm, to be timed as well

    def arguments(self) -> list[str]:
        """For the native benchmark."""
        words = [
            *(self.collective, "--sizes", ",".join(map(str, self.sizes))),
            *("--dtype", self.dtype, "--op", self.op, "--root", str(self.root)),
            *("--compare", self.compare, "--check", str(int(self.check))),
            *("--repeats", str(self.repeats), "--batch-ms", str(self.batch_ms)),
        ]
        if self.memory != "host":
            words += ["--memory", self.memory, "--mode", self.mode]
        elif self.mode != "blocking":
            words += ["--mode", self.mode]
        if self.tune:
            words += ["--tune", self.tune]
        if self.overlap:
            words += ["--overlap", "1"]
        if self.is_fresh:
            words += ["--fresh", "1"]
        if self.is_in_place:
            words += ["--in-place", "1"]
        if self.offset:
            words += ["--offset", str(self.offset)]
        if self.burst:
            words += ["--burst", str(self.burst)]
        if self.start != "clock":
            words += ["--start", self.start]
        if self.ways:
            words += ["--ways", ",".join(self.ways)]
        if self.memory != "host":
            words += ["--mpi-gpu-aware", str(int(self.is_mpi_gpu_aware))]
            if "nccl" in self.compare.split(","):
                words += ["--nccl", self.nccl or ":".join(nccl_files())]
        return words


@dataclass
class Measurement:
    """What came out."""

    job: Job
    begin: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    vendor: str = ""  # of the MPI
    is_complete: bool = False  # the job came to its end

    @property
    def mpi_title(self) -> str:
        """Such as "MPICH 5.0.2"."""
        return mpi_title(self.begin.get("mpi", ""))

    @property
    def nccl_title(self) -> str:
        """Such as "NCCL 2.28.9"."""
        return f"NCCL {self.begin.get('nccl', '')}".strip()

    @property
    def gpus_title(self) -> str:
        """Such as "4 x NVIDIA H200"; "" for host memory."""
        gpus: dict[str, int] = self.begin.get("gpus", {})
        return ", ".join(f"{count} x {name}" for name, count in gpus.items())

    @property
    def wrong(self) -> int:
        """Wrong elements of Tributary's, over all sizes."""
        return sum(r.tributary.wrong or 0 for r in self.results if r.tributary)

    @property
    def planned(self) -> int:
        """How many results there are to be."""
        return len(self.job.sizes) * (len(COLLECTIVES) if self.job.collective == "all" else 1)


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


def nccl_files() -> list[str]:
    """Where NCCL may be, best first: wherever the loader finds it, then in a Python's packages (PyTorch brings it)."""
    folders = [Path(folder) for folder in sys.path if folder]
    if python := shutil.which("python3"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [python, "-c", "import sys; print(*sys.path, sep='\\n')"],
                capture_output=True,
                text=True,
                timeout=20,
                check=True,
                stdin=subprocess.DEVNULL,
            )
            folders += [Path(folder) for folder in done.stdout.splitlines() if folder]
    files = [folder / "nvidia/nccl/lib/libnccl.so.2" for folder in folders]
    found = [str(file) for file in files if file.is_file()]
    return ["libnccl.so.2", *dict.fromkeys(found)]


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
    for line in lines(job, measurement):
        if line["type"] == "row":
            result = read_result(line, measurement.begin, measurement.vendor)
            measurement.results.append(result)
            yield result


def lines(job: Job, measurement: Measurement) -> Iterator[dict[str, Any]]:
    """Run the native benchmark; its lines on single sizes as they come. Fills the rest of `measurement`."""
    program = _program(job.mpi)
    abi = tree.ABI_OF[job.mpi]
    if job.tune or job.ways:
        tree.need_preload_library(abi)
    has_preload = tree.preload_library(abi) is not None
    plan = mpi.plan(program, job.ranks, job.mpi, job.launcher, job.settings, preload=has_preload)
    argv = plan.argv([str(program), *job.arguments()])
    measurement.command = argv
    measurement.vendor = plan.vendor
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=plan.full_environment(),
    )
    assert process.stdout is not None
    is_complete = False
    problem = ""
    try:
        for text in process.stdout:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                if not _BANNER.fullmatch(text.strip()):
                    measurement.notes.append(re.sub(r"^=\s+", "", text.rstrip()))
                continue
            if line["type"] == "begin":
                measurement.begin = line
            elif line["type"] == "note":
                measurement.notes.append(line["text"].strip())
            elif line["type"] == "error":
                problem = line["text"]
            elif line["type"] == "end":
                is_complete = True
            else:
                yield line
    except BaseException:  # Ctrl-C, too
        process.terminate()
        raise
    finally:
        status = _wait(process)
    if problem:
        raise UserError(problem)
    if status != 0 or not is_complete:
        notes = [] if measurement.results else measurement.notes  # else they stand in the report
        text = f"the benchmark ended with status {status}: {shlex.join(argv)}"
        raise UserError("\n".join([text, *notes]))
    measurement.is_complete = True


def _wait(process: subprocess.Popen[str]) -> int:
    """Until a launcher, whose ranks are done or were told to be, has ended. One that does not is killed."""
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.kill()
    return process.wait()


def read_result(line: dict[str, Any], begin: dict[str, Any], vendor: str) -> Result:
    """A line of type "row"; `begin` is the job's first one, `vendor` the MPI's."""

    def side(name: str, library: str, overlapped: str = "") -> Side | None:
        data = line["sides"].get(name)
        if data is None:
            return None
        overlaps: tuple[float, ...] = ()
        if beside := line["sides"].get(overlapped):
            compute = beside["compute_us"]
            pairs = zip(data["time_us"], beside["time_us"], strict=True)
            overlaps = tuple(
                min(1.0, max(0.0, (alone + compute - both) / min(alone, compute)))
                for alone, both in pairs
            )
        return Side(
            data.get("library", library),
            data["algorithm"],
            tuple(data["time_us"]),
            data["wrong"],
            overlaps,
        )

    return Result(
        line["collective"],
        begin["ranks"],
        line["bytes"],
        side("tributary", "tributary", "overlapped"),
        side("mpi", vendor, "mpi_overlapped"),
        side("nccl", "nccl"),
        begin.get("memory", "host"),
        begin.get("mode", "blocking"),
        side("blocking", "blocking"),
        side("floor", "floor"),
        side("registered", "registered"),
        side("requests", "requests"),
        side("intel", "intel"),
        {name: its for name in line["sides"] if "=" in name and (its := side(name, name))},
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
    tuning_file = tree.info()["tuning"]["file"]
    # Only with GPU buffers; nccl_settings: the variables NCCL_...
    of_gpus = ("memory", "mode", "operations_per_sync", "gpus", "driver", "cuda")
    of_nccl = ("nccl", "nccl_library", "nccl_settings")
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
        "is_fresh": begin.get("is_fresh"),
        "is_in_place": begin.get("is_in_place"),
        "offset": begin.get("offset"),
        "start": begin.get("start"),
        "burst": begin.get("burst"),
        "repeats": begin.get("repeats"),
        "settings": {**tree.environment_settings(), **measurement.job.settings},
        "tuning_file": tuning_file if tuning_file and Path(tuning_file).is_file() else None,
        "command": shlex.join(measurement.command),
        "is_complete": measurement.is_complete,
        **{key: begin[key] for key in (*of_gpus, *of_nccl) if key in begin},
    }


def _ratio_row(result: Result, other: str) -> dict[str, Any]:
    ratios = result.ratios_to(other)
    return {
        "collective": result.collective,
        "library": result.compared[other].library,
        "bytes": result.bytes,
        "ratio": round(statistics.median(ratios), 4),
        "low": round(min(ratios), 4),
        "high": round(max(ratios), 4),
    }


def document(measurement: Measurement) -> dict[str, Any]:
    """The JSON file."""
    return {
        "environment": environment(measurement),
        "rows": [row for result in measurement.results for row in result.rows()],
        "ratios": [
            _ratio_row(result, other)
            for result in measurement.results
            for other in result.compared
            if result.tributary
        ],
    }


def panels(results: list[Result]) -> list[plot.Panel]:
    """For the picture: one column per collective."""
    columns: dict[str, plot.Panel] = {}
    for r in results:
        column = columns.setdefault(r.collective, plot.Panel(function_name(r.collective, r.mode)))
        compared = {}
        for other, side in r.compared.items():
            ratios = r.ratios_to(other)
            compared[other] = plot.Compared(
                side.time_us,
                statistics.median(ratios) if ratios else None,
                min(ratios, default=None),
                max(ratios, default=None),
            )
        ours = r.tributary.time_us if r.tributary else None
        floor = r.floor.time_us if r.floor else None
        column.points.append(plot.Point(r.bytes, ours, compared, floor))
    return list(columns.values())


def function_name(collective: str, mode: str) -> str:
    """What a program calls."""
    if mode in ON_STREAM:
        return f"trib_{collective}"
    if mode == "nonblocking":
        return f"MPI_I{collective}"
    name = {"broadcast": "Bcast"}.get(collective, collective.capitalize())
    return f"MPI_{name}" + ("_init" if mode == "persistent" else "")
