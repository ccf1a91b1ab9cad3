# SPDX-License-Identifier: BSD-3-Clause
"""Run an MPI program as CTest's command, with and without a preload library.

A program that cannot run here prints "skipped: REASON" and exits with 77, on all ranks; then so does this.
The build writes mpis.json: for each MPI its kind (mpich, intel, openmpi), launcher, prefix and preload library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# The user's findings have no say here, and tests whose subject is something else do not measure.
WITHOUT_TUNING = {"TRIB_TUNING_FILE": "none", "TRIB_TUNE_BUDGET_MS": "0"}


@dataclass
class Mpi:
    name: str
    kind: str
    launcher: str
    root: str
    preload: str
    large_count: bool = True
    options: list[str] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        variables = {}
        if self.kind == "openmpi":
            # PMIx and its friends look for their files where they were built, not where they are.
            if self.root:
                variables = dict.fromkeys(["OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"], self.root)
            variables["OMPI_MCA_btl_base_warn_component_unused"] = "0"
            # It sleeps for a second before it says that there is no network for it, in every rank's MPI_Init.
            variables["OMPI_MCA_btl"] = "^ofi"
        if self.kind == "intel":
            variables = {
                "I_MPI_ROOT": self.root,
                "I_MPI_FABRICS": "shm",
                "LD_LIBRARY_PATH": self.root + "/lib",
            }
        return variables

    def options_to_keep_others(self) -> list[str]:
        """So that a rank's end does not end the others."""
        return ["-disable-auto-cleanup"] if self.kind == "mpich" else []

    def options_to_tolerate_faults(self) -> list[str]:
        return ["--with-ft", "ulfm"] if self.kind == "openmpi" else []

    def command(self, ranks: int) -> list[str]:
        options = list(self.options)
        if self.kind == "openmpi":
            options += ["--oversubscribe", "--bind-to", "none"]
            if os.getuid() == 0:
                options.append("--allow-run-as-root")
        return [self.launcher, *options, "-n", str(ranks)]


@dataclass
class Result:
    status: int
    output: str
    timed_out: bool = False


SKIPPED = 77  # CTest's SKIP_RETURN_CODE


def reason_to_skip(result: Result, ranks: int) -> str | None:
    """What all ranks gave as a reason. Launchers make one of their exit statuses, and may run their lines together."""
    reasons = re.findall(r"skipped: .*?(?=skipped: |$)", result.output, re.MULTILINE)
    return reasons[0] if result.status == SKIPPED and len(reasons) == ranks else None


def known(file: str | Path) -> dict[str, Mpi]:
    return {row["name"]: Mpi(**row) for row in json.loads(Path(file).read_text())}


def run(
    mpi: Mpi,
    ranks: int,
    command: list[str],
    *,
    preload: str | None = "",
    env: dict[str, str] | None = None,
    timeout: float = 120,
    options: list[str] | None = None,
    also: list[list[str]] | None = None,
) -> Result:
    """Preload "": the library of this MPI; None: nothing. Also: commands of the job's other ranks, as many for each."""
    variables = dict(os.environ)
    for name in list(variables):
        if name.startswith("TRIB_"):
            del variables[name]
    variables |= mpi.environment()
    inner = ["env"]
    if preload is not None:
        libraries = preload or mpi.preload
        if (env or {}).get("TRIB_SHARED_HEAP") == "1":
            libraries += f":{Path(libraries).parent}/libtributary_heap.so"
        inner.append(f"LD_PRELOAD={libraries}")
    inner += [f"{name}={value}" for name, value in {**WITHOUT_TUNING, **(env or {})}.items()]
    launcher = mpi.command(ranks)
    others = [word for other in also or [] for word in (":", "-n", str(ranks), *inner, *other)]
    process = subprocess.Popen(
        [launcher[0], *(options or []), *launcher[1:], *inner, *command, *others],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return Result(process.returncode, output.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its ranks
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return Result(124, output.decode(errors="replace"), timed_out=True)


@contextlib.contextmanager
def side_by_side(settings: dict[str, str]) -> Iterator[dict[str, str]]:
    """Variables for jobs whose ranks all launch kernels that wait, though they share a GPU: of an MPS of their own.

    Without one, a GPU takes processes in turns, milliseconds in every call. None for other jobs, where an MPS has been
    chosen (CUDA_MPS_PIPE_DIRECTORY), and where there is none to be had.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    is_chosen = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    if settings.get("TRIB_SHARED_GPU") not in ("all", "halves") or is_chosen or control is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="trib-mps-") as folder:
        variables = {}
        for what in ("PIPE", "LOG"):
            variables[f"CUDA_MPS_{what}_DIRECTORY"] = f"{folder}/{what.lower()}"
            Path(folder, what.lower()).mkdir()
        environment = os.environ | variables
        if subprocess.run([control, "-d"], env=environment, check=False).returncode != 0:
            yield {}
            return
        try:
            yield variables
        finally:
            subprocess.run([control], input=b"quit -t 5\n", env=environment, check=False)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mpis", required=True)
    parser.add_argument("--mpi", required=True)
    parser.add_argument("--ranks", required=True, help="1,2,3")
    parser.add_argument("--no-preload", action="store_true")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument(
        "--attempts", type=int, default=1, help="for MPIs that fail by themselves at times"
    )
    parser.add_argument(
        "--keep-others",
        action="store_true",
        help="the launcher leaves the other ranks alone when one ends",
    )
    parser.add_argument(
        "--tolerate-faults", action="store_true", help="as the MPI's launcher is told to"
    )
    parser.add_argument(
        "--also", action="append", default=[], help="a command that as many ranks run"
    )
    parser.add_argument("--expect", action="append", default=[], help="text in the output")
    parser.add_argument(
        "--reject",
        action="append",
        default=[],
        help="a regular expression for what is not in the output",
    )
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    settings = dict(item.split("=", 1) for item in arguments.env)
    with side_by_side(settings) as variables:
        return run_all(arguments, settings | variables)


def run_all(arguments: argparse.Namespace, settings: dict[str, str]) -> int:
    """One job for each number of ranks: CTest's verdict."""
    mpi = known(arguments.mpis)[arguments.mpi]
    options = mpi.options_to_keep_others() if arguments.keep_others else []
    if arguments.tolerate_faults:
        options += mpi.options_to_tolerate_faults()
    for ranks in map(int, arguments.ranks.split(",")):
        for attempt in range(arguments.attempts):
            result = run(
                mpi,
                ranks,
                arguments.command,
                preload=None if arguments.no_preload else "",
                env=settings,
                timeout=arguments.timeout,
                options=options,
                also=[command.split() for command in arguments.also],
            )
            if reason := reason_to_skip(result, ranks):
                print(reason)
                return SKIPPED
            missing = [text for text in arguments.expect if text not in result.output]
            unwanted = [text for text in arguments.reject if re.search(text, result.output)]
            if result.status == 0 and not missing and not unwanted:
                break
            print(f"--- {mpi.name}, {ranks} ranks, attempt {attempt + 1}: status {result.status}")
            print(result.output)
            if missing:
                print(f"--- missing in the output: {missing}")
            if unwanted:
                print(f"--- not to be in the output: {unwanted}")
        else:
            return 1
        print(f"{mpi.name}, {ranks} ranks: fine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
