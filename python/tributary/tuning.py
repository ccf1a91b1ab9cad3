# SPDX-License-Identifier: BSD-3-Clause
"""What was found out about this machine: reading the tuning file, having it filled, and measuring again.

The library writes the file (src/tune/tuning_file.cpp says what stands in it) while it makes persistent reductions; here
the native benchmark is made to make some.
"""

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tributary import bench, tree
from tributary.errors import UserError


@dataclass(frozen=True)
class Way:
    """One way to do a reduction."""

    algorithm: str
    slice: int
    protocol: str | None = None  # GPUs
    blocks: int | None = None
    engine: str | None = None

    @property
    def text(self) -> str:
        """For people."""
        parts = [self.algorithm, f"slices of {self.slice >> 10} KiB"]
        if self.protocol:
            parts += [self.protocol, f"{self.blocks} blocks"]
        if self.engine:
            parts.append(f"engine {self.engine}")
        return ", ".join(parts)

    @property
    def key(self) -> str:
        """As a value of the info key trib_algorithm, which names no engine: what it is for goes by kernels."""
        text = f"{self.algorithm}:{self.slice}"
        return f"{text}:{self.protocol}:{self.blocks}" if self.protocol else text

    @property
    def is_known(self) -> bool:
        """Another version may have written the file."""
        return any(row["name"] == self.algorithm for row in tree.info()["algorithms"])

    @property
    def is_of_kernels(self) -> bool:
        """On GPUs: not by an engine that the host drives, which persistent reductions do without."""
        return self.engine in (None, "kernel")


@dataclass(frozen=True)
class Finding:
    """A row of the file."""

    machine: str
    collective: str
    place: str
    determinism: str
    ranks: int
    nodes: int
    layout: str  #: what ranks share within a node; empty: nothing that counts
    bytes: int
    is_default: bool
    way: Way
    time_us: float
    default_us: float
    least_us: float
    candidates: dict[Way, float] = field(default_factory=dict, hash=False)
    #: where `way` has another engine: the best of the kernels, unless the default's is as good
    kernel: Way | None = None

    @property
    def choice(self) -> str:
        """For people."""
        if self.is_default:
            return "the default"
        if not self.way.is_known:
            return f"the default ({self.way.algorithm} is not known here)"
        return self.way.text

    @property
    def persistent_choice(self) -> str:
        """The same, of persistent reductions."""
        if self.way.is_of_kernels:
            return self.choice
        return self.kernel.text if self.kernel else "the default"


def missing() -> str:
    """Why there is no file; empty: there is one."""
    if tree.info()["tuning"]["file"]:
        return ""
    if os.environ.get("TRIB_TUNING_FILE") == "none":
        return "TRIB_TUNING_FILE=none"
    return "neither HOME nor XDG_CACHE_HOME names a folder"


def path() -> Path:
    """The file that the settings name."""
    if why := missing():
        raise UserError(
            f"{why}: findings are kept nowhere; TRIB_TUNING_FILE may be an absolute path"
        )
    return Path(tree.info()["tuning"]["file"])


def machine() -> str:
    """How the file calls this machine."""
    return str(tree.info()["tuning"]["machine"])


def _way(row: dict[str, Any]) -> Way:
    return Way(
        row["algorithm"], row["slice"], row.get("protocol"), row.get("blocks"), row.get("engine")
    )


def _finding(machine_name: str, row: dict[str, Any]) -> Finding:
    return Finding(
        machine=machine_name,
        collective=row["collective"],
        place=row["place"],
        determinism=row["determinism"],
        ranks=row["ranks"],
        nodes=row["nodes"],
        layout=row.get("layout", ""),
        bytes=row["bytes"],
        is_default=row["is_default"],
        way=_way(row),
        time_us=row["time_us"],
        default_us=row["default_us"],
        least_us=row["least_us"],
        candidates={_way(candidate): candidate["time_us"] for candidate in row["candidates"]},
        kernel=_way(row["kernel"]) if "kernel" in row else None,
    )


def read(file: Path) -> list[Finding]:
    """All findings; none if the file is not there. The library says whether it would take the file."""
    if file.exists() and not file.is_file():
        raise UserError(f"{file} is no plain file; TRIB_TUNING_FILE names another one")
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    if not text:
        return []
    try:
        document = tree.findings(text)
    except UserError as error:
        raise UserError(
            f"{file} is damaged or not Tributary's ({error}); remove it, or name another file by TRIB_TUNING_FILE"
        ) from None
    return [_finding(name, row) for name, rows in document["machines"].items() for row in rows]


def of_this_machine(findings: list[Finding]) -> list[Finding]:
    """Those that hold here. Rows for GPUs name these behind the machine."""
    here = machine()
    return [f for f in findings if f.machine == here or f.machine.startswith(here + ", ")]


@dataclass(frozen=True)
class Tuned:
    """A reduction that the library has looked at."""

    collective: str
    bytes: int
    seconds: float


def fill(job: bench.Job, measurement: bench.Measurement) -> Iterator[Tuned]:
    """Have the library measure what the job names; each size as it is done."""
    for line in bench.lines(job, measurement):
        if line["type"] == "tuned":
            yield Tuned(line["collective"], line["bytes"], line["seconds"])


@dataclass(frozen=True)
class Check:
    """A finding, measured again: times of calls in microseconds, each the median of the repeats."""

    finding: Finding
    tuned_us: float
    default_us: float
    ways_us: dict[str, float]

    @property
    def best_us(self) -> float:
        """Of the best of all ways."""
        return min(self.tuned_us, self.default_us, *self.ways_us.values())

    @property
    def tuned_ratio(self) -> float:
        """The tuned choice's time over the best one's."""
        return self.tuned_us / self.best_us

    @property
    def default_ratio(self) -> float:
        """The default table's choice's time over the best one's."""
        return self.default_us / self.best_us


def worth_measuring(finding: Finding, factor: float = 1.5) -> list[Way]:
    """The candidates that were not far behind the best one, of those that persistent reductions can have."""
    times = {
        way: us for way, us in finding.candidates.items() if way.is_of_kernels and way.is_known
    }
    least = min(times.values(), default=0)
    return [way for way, us in times.items() if us <= factor * least]


def check(finding: Finding, job: bench.Job) -> Check:
    """Time the tuned choice, the default table's, and the other candidates, interleaved in one job."""
    keys = tuple(dict.fromkeys(way.key for way in worth_measuring(finding)))
    job.ways = ("default", *keys)
    job.collective, job.sizes = finding.collective, [finding.bytes]
    job.settings["TRIB_DETERMINISM"] = finding.determinism  # whose findings are used
    if finding.place == "device":  # as it was tuned: without kernels that linger, or map buffers
        job.settings |= {"TRIB_RESIDENT": "0", "TRIB_MAP": "off"}
    rows = [r for r in bench.lines(job, bench.Measurement(job)) if r["type"] == "row"]
    if len(rows) != 1:
        raise UserError(f"the benchmark gave {len(rows)} results instead of one")
    sides = rows[0]["sides"]
    times = {
        name.removeprefix("way "): statistics.median(side["time_us"])
        for name, side in sides.items()
    }
    return Check(finding, times.pop("tributary"), times.pop("default"), times)
