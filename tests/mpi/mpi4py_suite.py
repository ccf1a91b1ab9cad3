# SPDX-License-Identifier: BSD-3-Clause
"""Run mpi4py's test_cco_* without and with the preload library, and compare outcomes.

With --device, run all of its tests that pass arrays on, with arrays on that device, in calls that the MPI gets copies in.

Without a network and without the package in the folder the test is skipped (status 77).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import launch


def source(folder: Path, version: str) -> Path | None:
    root = folder / f"mpi4py-{version}"
    if not (root / "test" / "main.py").exists():
        archive = folder / f"mpi4py-{version}.tar.gz"
        if not archive.exists():
            fetched = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                 "--no-build-isolation", "--no-binary", "mpi4py", f"mpi4py=={version}", "--dest", str(folder)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if not archive.exists():
                print(fetched.stdout, fetched.stderr)
                return None
        with tarfile.open(archive) as file:
            # Debian 12's Python 3.11.2 has no filters yet.
            if hasattr(tarfile, "data_filter"):
                file.extractall(folder, filter="data")
            else:
                file.extractall(folder)
    return root


def outcome(output: str) -> list[str]:
    """Say how each rank ended, and which tests did not pass."""
    return sorted(
        re.findall(r"(?:FAIL|ERROR): \S+ \S+|Ran \d+ tests|\bOK\b|FAILED \(.*?\)", output)
    )


# Why calls of the suite are left to the MPI. Some of its communicators have no other calls than Reduces.
LEFT = {
    "only one rank in the communicator",
    "intercommunicator",
    "nonblocking or a Reduce, before ranks met",
}

# Launchers run the lines of ranks into each other, so that each rank writes to a file of its own. It is the
# process itself that does: what it says as it ends belongs to the outcome, too.
TO_FILES = ["sh", "-c", 'folder=$0; exec "$@" >"$folder/$$" 2>&1']


def run(mpi: launch.Mpi, ranks: int, command: list[str], **options: Any) -> launch.Result:
    with tempfile.TemporaryDirectory() as folder:
        result = launch.run(mpi, ranks, [*TO_FILES, folder, *command], timeout=400, **options)
        texts = [path.read_text(errors="replace") for path in sorted(Path(folder).iterdir())]
    result.output += "\n".join(texts)
    return result


def on_device(root: Path, mpi: launch.Mpi, ranks: int, driver: str) -> bool:
    """Say whether all tests with arrays on a device pass."""
    # What docs/gpu.md names as not covered.
    uncovered = {"test_io", "test_rma", "test_rma_nb", "test_p2p_buf_part"}
    names = [
        path.stem
        for path in sorted((root / "test").glob("test_*.py"))
        if path.stem not in uncovered
        and re.match(r"test_(cco_.*(buf|vec)|p2p_buf|pack|msgzero)", path.stem)
        # Intel MPI's MPI_Gather_init and MPI_Allgather_init take what they send when they are called, on the host, too.
        and not (mpi.name == "intel" and "_pr_" in path.stem)
    ]
    command = [
        sys.executable,
        str(Path(__file__).parent / "mpi4py_device.py"),
        str(root / "test" / "main.py"),
        "-q",
        "-f",
    ]
    env = {"LD_LIBRARY_PATH": mpi.root + "/lib", "TEST_DEVICE": driver, "TRIB_STATS": "1"}
    result = run(mpi, ranks, [*command, *names], env=env)
    passed = re.findall(r"^OK\b.*$", result.output, re.MULTILINE)
    is_good = (
        result.status == 0
        and len(passed) == ranks
        and "GPU buffers through host memory" in result.output
    )
    print(f"{ranks} ranks: {outcome(result.output)}\n" if is_good else result.output[-6000:])
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mpis", required=True)
    parser.add_argument("--mpi", required=True)
    parser.add_argument("--ranks", required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", metavar="DRIVER")
    arguments = parser.parse_args()
    mpi = launch.known(arguments.mpis)[arguments.mpi]
    root = source(arguments.folder, arguments.version)
    if root is None:
        print("no source package of mpi4py")
        return 77
    if arguments.device:
        return not all(
            on_device(root, mpi, int(ranks), arguments.device)
            for ranks in arguments.ranks.split(",")
        )
    names = sorted(path.stem for path in (root / "test").glob("test_cco_*.py"))
    command = [sys.executable, str(root / "test" / "main.py"), "-q", "-f", *names]
    env = {"LD_LIBRARY_PATH": mpi.root + "/lib"}
    for ranks in map(int, arguments.ranks.split(",")):
        if ranks > (os.cpu_count() or 1) and mpi.kind == "mpich":
            command[-len(names) :] = names = [
                "test_cco_buf"
            ]  # MPICH is very slow with more ranks than cores
        plain = run(mpi, ranks, command, preload=None, env=env)
        ours = run(mpi, ranks, command, env=env | {"TRIB_STATS": "1"})
        served = set(
            re.findall(
                r"^  (i?(?:all)?reduce(?:_scatter(?:_block)?)?(?:_init)?) .*$",
                ours.output,
                re.MULTILINE,
            )
        )
        wanted = {"allreduce", "reduce", "reduce_scatter", "reduce_scatter_block"}
        if len(names) > 1:
            wanted |= {"i" + name for name in wanted} | {name + "_init" for name in wanted}
        left = set(re.findall(r"^  (\S.*?) +\d+$", ours.output, re.MULTILINE))
        if (
            outcome(plain.output) != outcome(ours.output)
            or plain.status != ours.status
            or not wanted <= served
            or not left <= LEFT
        ):
            print("--- without:", plain.status, plain.output[-3000:], sep="\n")
            print("--- with:", ours.status, ours.output[-6000:], sep="\n")
            return 1
        statistics = ours.output.find("tributary: statistics")
        print(f"{ranks} ranks: {outcome(ours.output)}\n{ours.output[statistics:]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
