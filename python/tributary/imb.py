# SPDX-License-Identifier: BSD-3-Clause
"""IMB-MPI1, Intel's MPI benchmark, an ordinary MPI program: running it with and without the preload library."""

import re
import shlex
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tributary import bench, mpi
from tributary.errors import UserError

# IMB's names differ from MPI's in nothing but the case.
_HEADING = re.compile(r"# Benchmarking (\w+)")
Times = dict[tuple[str, int], float]


def read_tables(text: str) -> Times:
    """(collective, bytes) to t_max in microseconds: the mean over calls of the slowest rank."""
    times: Times = {}
    collective = ""
    for line in text.splitlines():
        heading = _HEADING.match(line)
        if heading:
            collective = heading.group(1).lower()
            continue
        cells = line.split()
        if (
            collective in bench.COLLECTIVES
            and len(cells) == 5
            and cells[0].isdigit()
            and int(cells[0]) > 0
        ):
            times[collective, int(cells[0])] = float(cells[3])
    return times


@dataclass(frozen=True)
class Statistics:
    """What Tributary says at the end of a job with TRIB_STATS=1, per rank on average."""

    served: dict[str, dict[str, int]] = field(default_factory=dict)  # collective: algorithm: calls
    left: dict[str, int] = field(default_factory=dict)  # reason: calls


def read_statistics(text: str) -> Statistics:
    """Read the table that TRIB_STATS=1 prints."""
    served: dict[str, dict[str, int]] = {}
    left: dict[str, int] = {}
    part = ""
    for line in text.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if line.startswith("tributary: statistics"):
            part = "statistics"
        elif part and cells[0] in ("served", "left to the MPI"):
            part = cells[0]
        elif part == "served" and line.startswith("  ") and len(cells) >= 4:
            of = served.setdefault(cells[0], {})
            of[cells[1]] = of.get(cells[1], 0) + round(float(cells[2]))
        elif part == "left to the MPI" and line.startswith("  ") and len(cells) == 2:
            left[cells[0]] = left.get(cells[0], 0) + round(float(cells[1]))
        elif not line.startswith("  "):
            part = ""
    return Statistics(served, left)


@dataclass
class Comparison:
    """Medians over the runs."""

    without: Times
    with_tributary: Times
    statistics: Statistics


def _median(runs: Sequence[Times]) -> Times:
    return {key: statistics.median(run[key] for run in runs if key in run) for key in runs[0]}


def compare(
    sizes: Sequence[int],
    ranks: int,
    runs: int,
    scratch: Path,
    say: Callable[[str], None],
) -> Comparison:
    """Run IMB-MPI1 from Intel MPI's wheel, in turn without and with Tributary."""
    intel = mpi.wheel("intel")
    program = intel.prefix / "bin" / "IMB-MPI1" if intel else None
    if program is None or not program.is_file():
        raise UserError("IMB-MPI1 is not here: `make build` installs it (impi-rt, from PyPI)")
    scratch.mkdir(parents=True, exist_ok=True)
    lengths = scratch / "imb-sizes.txt"
    lengths.write_text("".join(f"{size}\n" for size in sizes))
    arguments = ["-npmin", str(ranks), "-msglen", str(lengths)]
    # Lengths beyond -msglog are cut to it. 160 MB per size: ten calls at 16 MiB instead of two.
    arguments += ["-msglog", f"0:{max(sizes).bit_length()}", "-iter", "1000,160"]
    arguments += bench.COLLECTIVES

    def once(name: str, preload: bool, settings: dict[str, str]) -> tuple[str, str]:
        plan = mpi.plan(program, ranks, "intel", settings=settings, preload=preload)
        argv = plan.argv([str(program), *arguments])
        say(f"IMB-MPI1, {name.replace('-', ' ')}")
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            env=plan.full_environment(),
            stdin=subprocess.DEVNULL,
        )
        (scratch / f"imb-{name}.txt").write_text(done.stdout + done.stderr)
        if done.returncode != 0:
            tail = (done.stdout + done.stderr).strip()[-2000:]
            raise UserError(
                f"IMB-MPI1 ended with status {done.returncode}:\n{tail}\n{shlex.join(argv)}"
            )
        return done.stdout, done.stderr

    outputs: dict[bool, list[Times]] = {False: [], True: []}
    for turn in range(runs):
        for preload in (turn % 2 == 1, turn % 2 == 0):
            name = f"{'with' if preload else 'without'}-{turn + 1}"
            times = read_tables(once(name, preload, {})[0])
            if not times:
                raise UserError(f"IMB-MPI1 printed no table; see {scratch}/imb-{name}.txt")
            outputs[preload].append(times)
    # By itself: counting takes two looks at the clock per call, which would show in the times.
    said = "".join(once("with-statistics", True, {"TRIB_STATS": "1"}))
    return Comparison(_median(outputs[False]), _median(outputs[True]), read_statistics(said))
