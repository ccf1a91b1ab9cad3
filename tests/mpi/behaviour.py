# SPDX-License-Identifier: BSD-3-Clause
"""How the preload library behaves as a guest: one function per promise. `behaviour.py --list` names them."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import launch


class Context:
    def __init__(self, mpis_file: str, name: str, programs: Path, suffix: str):
        self.mpis_file, self.mpis = mpis_file, launch.known(mpis_file)
        self.mpi, self.programs, self.suffix = self.mpis[name], programs, suffix

    def program(self, name: str) -> str:
        return str(self.programs / f"mpi_{name}_{self.suffix}")

    def run(self, ranks: int, command: list[str], **options) -> launch.Result:
        return launch.run(self.mpi, ranks, command, **options)


def expect(condition: bool, result: launch.Result | str) -> None:
    if not condition:
        print(result.output if isinstance(result, launch.Result) else result)
        caller = sys._getframe(1)
        sys.exit(f"{caller.f_code.co_name}, line {caller.f_lineno}: not as expected")


def our_segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*trib*")}


def inert(context: Context) -> None:
    """Nothing happens in programs without MPI."""
    for command in (
        ["bash", "-c", "echo fine"],
        [sys.executable, "-c", "import ctypes; print('fine')"],
    ):
        done = subprocess.run(
            ["env", f"LD_PRELOAD={context.mpi.preload}", "LD_BIND_NOW=1", "TRIB_STATS=1", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        expect(done.returncode == 0 and done.stdout == "fine\n" and done.stderr == "", str(done))


def bind_now(context: Context) -> None:
    """All symbols resolve at once; nothing but the interposed functions and the C API is shown; no MPI is linked."""
    result = context.run(2, [context.program("communicators")], env={"LD_BIND_NOW": "1"})
    expect(result.status == 0, result)
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", context.mpi.preload],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {line.split()[-1] for line in shown.splitlines()}
    allowed = re.compile(
        r"(MPI_I?(Allreduce|Reduce|Reduce_scatter|Reduce_scatter_block)(_init)?(_c)?"
        r"|MPI_(Start|Startall|Cancel|Request_free|(Wait|Test)(all|any|some)?|Request_get_status(_all|_any|_some)?)"
        r"|MPIX_(Allreduce|Reduce|Reduce_scatter|Reduce_scatter_block)_init|MPIX_Comm_revoke|MPIX_Request_is_complete|MPI_(Type|Op)_free"
        r"|MPI_(Alloc_mem|Free_mem|Barrier|Cart_create|Cart_sub|Comm_create)"
        r"|MPI_I?(Bcast|(Gather|Scatter|(Neighbor_)?(Allgather|Alltoall))v?|(Neighbor_)?Alltoallw|Scan|Exscan)(_init)?(_c)?"
        r"|MPI_(Pack|Unpack)(_external)?(_c)?"
        r"|MPI_I?[BSR]?send(_init)?(_c)?|MPI_I?(M?recv|Sendrecv|Sendrecv_replace)(_c)?|MPI_Recv_init(_c)?|MPI_Reduce_local(_c)?"
        r"|MPI_(Comm_dup|Comm_dup_with_info|Comm_idup|Comm_idup_with_info|Comm_split|Comm_split_type|Comm_free|Comm_disconnect)"
        r"|MPI_(Session_init|Session_finalize|Init|Init_thread|Finalize)"
        r"|mpi_(i(allreduce|reduce|reduce_scatter|reduce_scatter_block)|(allreduce|reduce|reduce_scatter|reduce_scatter_block)_init)_(c_)?f08ts_(large_)?"
        r"|mpi_(start|startall|(wait|test)(all|any|some)?|cancel|request_free|request_get_status(_all|_any|_some)?)_f08_"
        r"|(mpi_|MPI_)(allreduce|reduce|reduce_scatter|reduce_scatter_block|init|init_thread|finalize|free_mem|comm_free|comm_disconnect|comm_idup|comm_idup_with_info)(_|__|_f08_)?|dlsym|trib_\w+)",
        re.IGNORECASE,
    )
    # Open MPI's Fortran has the names of C, with a suffix.
    fortran = r"_(f08_)?$" if context.mpi.kind == "openmpi" else r"$."
    strange = [
        name
        for name in sorted(names)
        if not allowed.fullmatch(name) and not allowed.fullmatch(re.sub(fortran, "", name))
    ]
    expect(not strange, "\n".join(strange))
    expect(context.mpi.large_count == ("MPI_Allreduce_c" in names), "\n".join(sorted(names)))
    needed = subprocess.run(
        ["readelf", "-d", context.mpi.preload], capture_output=True, text=True, check=True
    ).stdout
    expect("NEEDED" in needed and not re.search(r"NEEDED.*libmpi", needed), needed)


def other_family(context: Context) -> None:
    """Under an MPI of another family it says so once and passes every call through."""
    for other in {mpi.preload for mpi in context.mpis.values()} - {context.mpi.preload}:
        for name in ("passthrough", "communicators"):
            result = context.run(
                3,
                [context.program(name)],
                preload=other,
                env={"TEST_UNSERVED": "1", "TRIB_STATS": "1"},
            )
            expect(result.status == 0, result)
            expect(result.output.count("this preload library is for") == 1, result)


def stats(context: Context) -> None:
    """TRIB_STATS prints one table per job, on standard error, also where nothing was called."""
    result = context.run(3, [context.program("passthrough")], env={"TRIB_STATS": "1"})
    expect(
        result.status == 0
        and result.output.count("tributary: statistics, average of 3 ranks") == 1,
        result,
    )
    expect(re.search(r"^  allreduce +\w+ +\d+ ", result.output, re.MULTILINE) is not None, result)
    # One of them on a derived type: only that with a predefined operator counts as such.
    expect(
        re.search(r"^  user-defined operator +2$", result.output, re.MULTILINE) is not None, result
    )
    result = context.run(2, [context.program("passthrough")])
    expect(result.status == 0 and "tributary" not in result.output, result)
    if context.mpi.name == "mpich":  # which takes its time, and depends on no MPI
        late = {"TRIB_STATS": "1", "TEST_LATE": "11"}
        result = context.run(2, [context.program("passthrough")], env=late, timeout=40)
        expect(result.status == 0 and "average of 2 ranks" in result.output, result)
    start = time.monotonic()
    program = context.program("passthrough")
    result = context.run(1, ["env", "TRIB_STATS=1", program], also=[[program]])
    expect(result.status == 0 and result.output.count("tributary: statistics") == 1, result)
    expect("rank 0 alone (TRIB_STATS=1 is not set on all ranks)" in result.output, result)
    expect(time.monotonic() - start < 8, f"{time.monotonic() - start} s")  # it waits for nobody
    result = context.run(1, [context.program("passthrough")], env={"TRIB_STATS": "1"})
    expect("no calls were served" in result.output and "only one rank" in result.output, result)
    result = context.run(2, [context.program("lifetime"), "session"], env={"TRIB_STATS": "1"})
    if result.status == 0 and context.mpi.large_count:
        expect(result.output.count("tributary: statistics, this rank (rank 0 of 2)") == 1, result)
    if context.mpi.kind == "mpich":  # the others end with the world, or crash
        command = [context.program("lifetime"), "world-in-session"]
        for _ in range(5):  # as in CMakeLists.txt: MPICH 5.0.2 hangs in some such jobs
            result = context.run(2, command, env={"TRIB_STATS": "1"}, timeout=10)
            if not result.timed_out:
                break
        expect(result.status == 0 and result.output.count("tributary: statistics") == 1, result)


def settings(context: Context) -> None:
    """A setting that is wrong becomes an MPI error that names it; TRIB_ENABLE=0 leaves all to the MPI."""
    result = context.run(
        2, [context.program("passthrough")], env={"TRIB_TIMEOUT": "soon"}, timeout=60
    )
    expect(result.status != 0 and not result.timed_out and "TRIB_TIMEOUT" in result.output, result)
    result = context.run(
        2, [context.program("passthrough")], env={"TRIB_ALGORITHM": "rign"}, timeout=60
    )
    expect(result.status != 0 and not result.timed_out and "rign" in result.output, result)
    result = context.run(
        2,
        [context.program("passthrough")],
        env={"TRIB_ENABLE": "0", "TEST_UNSERVED": "1", "TRIB_STATS": "1"},
    )
    expect(result.status == 0 and "no calls were served" in result.output, result)


def disagreement(context: Context) -> None:
    """Ranks that disagree get an error that names both sides, and none hangs."""
    for case in (
        "count",
        "op",
        "own-op",
        "own-op-reduce",
        "own-op-init",
        "type",
        "root",
        "roots",
        "old-roots",
        "collective",
        "counts",
        "first",
        "large-count",
        "throws",
        "active",
        "agree",
        "refused",
    ):
        for ranks in (2, 3) if context.mpi.kind == "mpich" else (3,):
            result = context.run(ranks, [context.program("errors"), case], timeout=40)
            expect(result.status == 0, result)


def time_limit(context: Context) -> None:
    """A peer that does not come in time is an error after TRIB_TIMEOUT."""
    for ranks, case in (
        (2, "timeout"),
        (3, "timeout"),
        (3, "timeout-any"),
        (2, "timeout-test"),
        (2, "unprepared"),
        (3, "unprepared"),
    ):
        if ranks == 2 and case != "timeout-test" and context.mpi.kind != "mpich":
            continue
        env = {"TRIB_TIMEOUT": "1"}
        result = context.run(ranks, [context.program("errors"), case], env=env, timeout=40)
        expect(result.status == 0, result)
    if context.mpi.name == "mpich":  # nothing depends on the MPI
        env = {"TRIB_TIMEOUT": "2"}
        result = context.run(3, [context.program("stopped")], env=env, timeout=40)
        expect(result.status == 0 and "stopped ranks checked" in result.output, result)


UNSHARE = "unshare --map-root-user --pid --fork --mount-proc"
# The shell is process 1, which does not kill itself.
IN_CONTAINER = f"{UNSHARE} sh -c '\"$@\"; exit $?' sh "


def may_make_namespaces() -> bool:
    """Whether processes can get numbers of their own, as in a container for each."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE.split(), "true"], check=False).returncode == 0


def kill_one(context: Context, ranks: int, case: str, prefix: str = "") -> list[int]:
    """Kill half of the ranks or one, which others must notice, and return after how many milliseconds they say."""
    left = (ranks + 1) // 2 if "many" in case else ranks - 1
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        told.touch()
        program = f"{prefix}{context.program('errors')} {case} {told}"
        # The launcher watches the shell, or else it would kill the other ranks as well.
        script = f"{program}; for i in $(seq 200); do [ $(wc -l <{told}) -ge {left} ] && exit 0; sleep 0.05; done"
        result = context.run(ranks, ["sh", "-c", script], timeout=60)
        text = told.read_text()
    noticed = re.findall(r"rank \d+: noticed after (\d+) ms", result.output)
    if context.mpi.kind == "openmpi" and not text and not noticed:
        # It may have been first to notice, and have ended the job.
        expect(re.search(r"noticed that process rank \d+", result.output) is not None, result)
    else:
        expect(text == "as expected\n" * left, f"{ranks} ranks, {case}:\n{result.output}")
    return [*map(int, noticed)]


def killed(context: Context) -> None:
    """After kill -9 of a rank its peers get an error, and nothing of ours is left in /dev/shm."""
    before = our_segments()
    cases = [(2, "killed"), (3, "killed"), (2, "killed-test"), (3, "killed-any")]
    cases += [(2, "killed-first"), (3, "killed-first"), (3, "killed-large"), (2, "killed-init")]
    cases += [
        (3, "killed-seldom"),
        (2, "killed-waitall"),
        (3, "killed-testall"),
        (2, "killed-some"),
    ]
    cases += [(2, "killed-freed"), (3, "killed-freed-return")]
    # Half of the ranks, while the others sleep, as there are not so many cores; and one that nobody waits for.
    cases += [(8, "killed-many-later"), (3, "killed-behind")]
    longest = max(time for ranks, case in cases for time in [0, *kill_one(context, ranks, case)])
    print(f"deaths checked: noticed after {longest} ms at most")
    for segment in ("memfd", "file"):
        context.run(
            3, [context.program("errors"), "killed"], env={"TRIB_SEGMENT": segment}, timeout=40
        )
    time.sleep(0.2)
    expect(our_segments() <= before, str(our_segments()))


def killed_in_containers(context: Context) -> None:
    """The same where each rank has process numbers of its own, which others do not see."""
    if context.mpi.kind == "openmpi":
        print(
            "killed_in_containers: not tried: this MPI itself crashes where ranks have the same number"
        )
        return
    if not may_make_namespaces():
        print("killed_in_containers: not tried: no process namespaces may be made here")
        return
    before = our_segments()
    cases = [
        (2, "killed"),
        (3, "killed-any"),
        (2, "killed-test"),
        (3, "killed-behind"),
        (3, "killed-large"),
    ]
    times = [time for ranks, case in cases for time in kill_one(context, ranks, case, IN_CONTAINER)]
    print(f"deaths checked: noticed after {max(times, default=0)} ms at most")
    time.sleep(0.2)
    expect(our_segments() <= before, str(our_segments()))


class NotHereError(Exception):
    """A check that this machine cannot do, and why."""


def used_mib() -> list[int]:
    """How much memory of each GPU is in use, in MiB; nothing where that cannot be asked."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return [*map(int, result.stdout.split())] if result.returncode == 0 else []


def expect_freed(before: list[int]) -> None:
    """Wait until GPUs have no more memory in use than `before`; a killed process takes a moment to be gone."""
    for _ in range(100):
        now = used_mib()
        if all(is_used <= was for is_used, was in zip(now, before, strict=True)):
            return
        time.sleep(0.1)
    expect(False, f"MiB in use on GPUs before: {before}, ten seconds after: {now}")


def kill_on_gpus(
    context: Context, cases: list[tuple[int, str]], prefix: str = "", **env: str
) -> None:
    """After kill -9 of a rank its peers get an error within a second, and the GPU is free, with all of its memory."""
    before = used_mib()
    longest = 0
    for number, (ranks, arguments) in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "told"
            told.touch()
            # The launcher watches the shell, or else it would kill the other ranks as well.
            script = (
                f"{prefix}{context.program('gpu_killed')} {arguments}; s=$?; [ $s = 77 ] && exit 77; [ $s = 0 ] && echo fine >>{told}; "
                f"for i in $(seq 100); do [ $(wc -l <{told}) -ge {ranks - 1} ] && exit 0; sleep 0.1; done"
            )
            result = context.run(ranks, ["sh", "-c", script], timeout=60, env=env)
        if "skipped: " in result.output:
            if number > 0:  # too many ranks for the GPUs that are here
                continue
            raise NotHereError(result.output[result.output.index("skipped: ") :].splitlines()[0])
        noticed = re.findall(r"rank \d+: noticed after (\d+) ms", result.output)
        expect(len(noticed) == ranks - 1, f"{ranks} ranks, {arguments}, {env}:\n{result.output}")
        longest = max(longest, *map(int, noticed))
    expect_freed(before)
    settings = "".join(f" with {name}={value}" for name, value in env.items())
    print(f"deaths checked{settings}: noticed after {longest} ms at most")


def gpu_killed(context: Context) -> None:
    """In blocking reductions of GPU buffers. Rank 0 leads the ranks that share its GPU."""
    cases = [(2, "10"), (2, "300000"), (2, "300000 first"), (4, "10 first"), (4, "300000")]
    cases += [(7, "3000"), (7, "3000 first")]
    cases += [
        (ranks, count + " inside")
        for ranks in (2, 4, 5)
        for count in ("10", "3000000", "3000000", "3000000 first")
    ]
    cases += [(ranks, "8000000 inside reduce") for ranks in (2, 3, 4)]
    cases += [(ranks, "8000000 inside reduce first") for ranks in (2, 4)]
    # By copy engines, where each rank has a GPU.
    cases += [(2, "40000000 inside"), (2, "40000000 inside first")]
    kill_on_gpus(context, cases)
    copied = [(2, "3000000 inside"), (4, "10000000 inside"), (4, "10000000 inside first")]
    kill_on_gpus(context, copied, TRIB_ENGINE="copy")
    short = [(2, "10"), (2, "10 first"), (2, "10 inside"), (4, "10 inside first")]
    kill_on_gpus(context, short, TRIB_RESIDENT="100")
    # Through host memory.
    long = [(2, "300000 inside"), (2, "3000000 inside first"), (4, "300000 inside")]
    kill_on_gpus(context, [(2, "10 inside"), *long], TRIB_P2P="off")


def gpu_killed_requests(context: Context) -> None:
    """In nonblocking and persistent ones."""
    kill_on_gpus(
        context,
        [
            (ranks, f"{words} {form}")
            for form in ("nonblocking", "persistent")
            for ranks, words in (
                (2, "10"),
                (2, "300000 first"),
                (2, "3000000 inside"),
                (2, "3000000 inside first"),
                (4, "300000"),
                (4, "10 inside first"),
                (4, "3000000 inside first"),
            )
        ],
    )


def gpu_killed_in_containers(context: Context) -> None:
    """In calls of ranks that have process numbers of their own."""
    if context.mpi.kind == "openmpi":
        raise NotHereError("skipped: this MPI itself crashes where ranks have the same number")
    if not may_make_namespaces():
        raise NotHereError("skipped: no process namespaces may be made here")
    cases = [(2, "10"), (2, "300000 first"), (2, "3000000 inside"), (4, "300000"), (4, "10 inside")]
    cases += [(2, "300000 persistent"), (4, "10 inside nonblocking")]
    # MPICH would read memory of the processes that have other ranks' numbers here.
    kill_on_gpus(context, cases, IN_CONTAINER, MPIR_CVAR_CH4_CMA_ENABLE="0")


def gpu_killed_stream(context: Context) -> None:
    """In those on a stream."""
    kill_on_gpus(
        context,
        [
            (ranks, words + " stream")
            for ranks in (2, 3, 4)
            for words in (
                "10",
                "300000 first",
                "10 inside",
                "3000000 inside",
                "3000000 inside first",
            )
        ],
    )


def tuning(context: Context) -> None:
    """Persistent reductions measure, other jobs use what was found, no bits change; a damaged file is left alone."""
    if len(os.sched_getaffinity(0)) < 2:
        return  # nothing is measured with more ranks than cores
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deep" / "tuning.json"

        def job(*words: str, **env: str) -> tuple[launch.Result, str]:
            result = context.run(2, [context.program("tuning"), *words], env=env)
            found = re.search(r"^bits (\w+)$", result.output, re.MULTILINE)
            expect(result.status == 0, result)
            return result, found.group(1) if found else ""

        result, bits = job()
        if "no persistent reductions" in result.output:
            return
        expect(bits != "" and "tributary" not in result.output, result)

        kept = {"TRIB_TUNING_FILE": str(file), "TRIB_LOG": "info"}
        result, now = job(**kept, TRIB_TUNE_BUDGET_MS="100")  # the default
        expect(now == bits and result.output.count("tuned allreduce of 65536 bytes") == 1, result)
        result, now = job("off", **kept, TRIB_TUNE_BUDGET_MS="100")
        expect(now == bits and "tuned" not in result.output, result)
        result, now = job("soon", **kept)
        expect(
            now == bits and "info key trib_tune=soon is ignored: accepted are" in result.output,
            result,
        )
        result, now = job("-", "two_shot:4096", **kept, TRIB_STATS="1")
        expect(now == bits and "tuned" not in result.output, result)
        expect(re.search(r"allreduce_init +two_shot +12 ", result.output) is not None, result)

        # With time enough to be sure, on a machine that is busy, too.
        result, now = job("3000", **kept)
        expect(now == bits and file.exists(), result)
        document = json.loads(file.read_text())
        found_rows = [row for rows in document["machines"].values() for row in rows]
        rows = [row for row in found_rows if row["collective"] == "allreduce"]
        expect(
            {"bytes": 65536, "ranks": 2}.items() <= rows[-2].items() and len(rows) == 5, str(rows)
        )
        expect(len({row["collective"] for row in found_rows}) == 4, str(found_rows))
        result, now = job(**kept, TRIB_TUNE_BUDGET_MS="100")
        expect(now == bits and "tuned" not in result.output, result)

        # Blocking and nonblocking calls do what it says.
        for row in rows:
            row |= {"is_default": False, "algorithm": "two_shot", "slice": 4096}
        text = json.dumps(document)
        file.write_text(text)
        result, now = job(**kept, TRIB_STATS="1")
        expect(now == bits, result)
        for form in ("allreduce", "iallreduce", "allreduce_init"):
            expect(
                re.search(rf"^  {form} +two_shot +\d+ ", result.output, re.MULTILINE) is not None,
                result,
            )
            expect(re.search(rf"^  {form} +one_shot", result.output, re.MULTILINE) is None, result)
        result, now = job(**kept, TRIB_STATS="1", TRIB_ALGORITHM="one_shot")
        expect(now == bits and "two_shot" not in result.output, result)

        # The file is not of one MPI.
        for name in ("openmpi", "mpich"):
            if name not in context.mpis or context.mpis[name].kind == context.mpi.kind:
                continue
            other = Context(context.mpis_file, name, context.programs, name)
            result = other.run(2, [other.program("tuning")], env={**kept, "TRIB_STATS": "1"})
            expect(result.status == 0 and f"bits {bits}" in result.output, result)
            for form in ("allreduce", "iallreduce", "allreduce_init"):
                served = re.findall(rf"^  {form} +(\w+) +\d+ ", result.output, re.MULTILINE)
                expect(served == ["two_shot"], result)

        damaged = text[:-9]
        file.write_text(damaged)
        result, now = job("100", TRIB_TUNING_FILE=str(file))
        expect(now == bits and file.read_text() == damaged, result)
        warning = f"tributary: [rank 0] warning: the tuning file {file} is ignored: it is not JSON"
        expect(result.output.count(warning) == 1 and result.output.count("tributary") == 1, result)


def alone(context: Context) -> None:
    """Nonblocking reductions are served also where the program makes no blocking call on the communicator."""
    for ranks, calls in (
        (2, 200),
        (4, 300),
    ):  # halves of 2 ranks are of one, whose calls are the MPI's
        result = context.run(ranks, [context.program("requests"), "alone"], env={"TRIB_STATS": "1"})
        expect(result.status == 0, result)
        served = re.findall(r"^  iallreduce +\w+ +(\d+) ", result.output, re.MULTILINE)
        expect(sum(map(int, served)) == calls, result)


def all_alive(context: Context) -> None:
    """Thousands of requests at once are served, nonblocking and persistent ones; those without room are the MPI's."""
    if len(os.sched_getaffinity(0)) < 2:
        return  # the program makes fewer then
    program = [context.program("requests"), "many"]
    result = context.run(2, [*program, "persistent-order"], env={"TRIB_STATS": "1"})
    has_persistent = "no such section" not in result.output
    if not has_persistent:
        result = context.run(2, program, env={"TRIB_STATS": "1"})
    expect(result.status == 0, result)
    if has_persistent and context.mpi.kind != "intel":
        left = r"left to the MPI +calls\n +no shared memory +\d+\n\s*$"
        expect(re.search(left, result.output) is not None, result)
    else:
        expect("no calls were left to the MPI" in result.output, result)

    def served(rows: str) -> int:
        found = re.findall(rf"^  {rows} +\w+ +(\d+) ", result.output, re.MULTILINE)
        return sum(map(int, found))

    expect(served(r"i\w+") >= 30000, result)  # three times ten thousand
    most = 2000 if context.mpi.kind == "intel" else 4000
    expect(served(r"\w+_init") >= (3 * most if has_persistent else 0), result)


def tool_in_front(context: Context) -> None:
    """Where a tool takes MPI_Wait to the MPI's own, requests are the MPI's, and a warning says so; blocking calls are served."""
    tool = context.programs / f"libmpi_tool_{context.suffix}.so"
    preload = f"{tool}:{context.mpi.preload}"
    program = [context.program("requests"), "first", "nonblocking", "progress-in-set-up"]
    result = context.run(2, program, preload=preload, env={"TRIB_STATS": "1"})
    expect(result.status == 0, result)
    expect(result.output.count("MPI_Wait leads to") == 1, result)
    expect("nonblocking, and MPI_Wait leads elsewhere" in result.output, result)
    result = context.run(2, [context.program("communicators")], preload=preload)
    expect(result.status == 0 and "MPI_Wait" not in result.output, result)
    # It takes no wait, but starts and frees.
    preload = f"{context.programs}/libmpi_tool_starts_{context.suffix}.so:{context.mpi.preload}"
    result = context.run(3, [context.program("starts")], preload=preload)
    expect(result.status == 0 and result.output.count("MPI_Startall leads to") == 1, result)
    # On one rank only it takes what communicators are set up in.
    preload = f"{context.programs}/libmpi_tool_dup_{context.suffix}.so:{context.mpi.preload}"
    program = [context.program("communicators")]
    result = context.run(1, ["env", f"LD_PRELOAD={preload}", *program], also=[program], timeout=40)
    expect(result.status == 0, result)
    # Or blocking reductions: those of the other rank would wait for it.
    preload = f"{context.programs}/libmpi_tool_reduce_{context.suffix}.so:{context.mpi.preload}"
    for program in (
        [context.program("communicators")],
        [context.program("requests"), "first", "nonblocking"],
    ):
        tool = ["env", f"LD_PRELOAD={preload}", *program]
        result = context.run(1, tool, also=[program], env={"TEST_UNSERVED": "1"}, timeout=40)
        expect(result.status == 0 and "leads past Tributary on some ranks" in result.output, result)


def tool_behind(context: Context) -> None:
    """A tool behind Tributary sees what goes to the MPI, from MPI_Init to MPI_Finalize, and what is served it does not see."""
    preload = f"{context.mpi.preload}:{context.programs}/libmpi_tool_state_{context.suffix}.so"
    for program in ("passthrough", "communicators"):
        result = context.run(
            2, [context.program(program)], preload=preload, env={"TRIB_STATS": "1"}
        )
        seen = re.findall(
            r"^tool: (\d+) allreduces, \d+ waits, (\d+) others$", result.output, re.MULTILINE
        )
        expect(result.status == 0 and len(seen) == 2, result)
        expect(all(int(others) > 0 for _, others in seen), result)
        if program == "passthrough":
            expect(all(int(allreduces) > 0 for allreduces, _ in seen), result)
        expect(re.search(r"^  allreduce ", result.output, re.MULTILINE), result)
    # Waits are seen where requests are the MPI's, and only then.
    result = context.run(2, [context.program("requests"), "first", "nonblocking"], preload=preload)
    expect(result.status == 0 and "leads to" not in result.output, result)
    expect(
        len(re.findall(r"^tool: \d+ allreduces, \d+ waits", result.output, re.MULTILINE)) == 2,
        result,
    )


def without_folder(context: Context) -> None:
    """Where the library's folder cannot be read, calls that need nothing from it go on."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "lib"
        there.mkdir()
        preload = Path(context.mpi.preload)
        for name in (preload.name, "libtributary.so"):
            shutil.copy(preload.with_name(name), there)
        result = context.run(
            1, [context.program("errors"), "without", str(there)], preload=str(there / preload.name)
        )
        expect(result.status == 0 and "as expected" in result.output, result)


def unknown_devices(context: Context) -> None:
    """Where a GPU's driver is loaded and the module for GPUs is missing, the MPI gets all reductions."""
    with tempfile.TemporaryDirectory() as folder:
        driver = Path(folder) / "libcuda.so.1"
        command = ["gcc", "-shared", f"-Wl,-soname,{driver.name}", "-x", "c", "/dev/null"]
        subprocess.run([*command, "-o", str(driver)], check=True)
        preload = Path(context.mpi.preload)
        for name in (preload.name, "libtributary.so", "trib_backend_host.so"):
            shutil.copy(preload.with_name(name), folder)
        ours = Path(folder) / preload.name
        program = [context.program("progress")]
        counting = {"TRIB_STATS": "1"}
        result = context.run(2, program, preload=f"{driver}:{ours}", env=counting)
        expect(result.status == 0 and result.output.count("trib_backend_cuda.so") == 1, result)
        expect("GPU driver loaded, and no module for it" in result.output, result)
        expect("one_shot" not in result.output, result)
        result = context.run(2, program, preload=str(ours), env=counting)
        expect(result.status == 0 and "trib_backend_cuda.so" not in result.output, result)
        expect("one_shot" in result.output, result)


def left_out(context: Context) -> None:
    """Where some ranks run without the library, the others say what they wait for."""
    program = context.program("communicators")
    result = context.run(1, [program], also=[["env", "-u", "LD_PRELOAD", program]], timeout=10)
    warning = "MPI_Init waits for ranks that do not come to set up Tributary"
    expect(result.output.count(warning) == 1, result)


def private_mpi(context: Context) -> None:
    """An MPI that is loaded later, privately, is found, and serves."""
    module = str(context.programs / f"libmpi_private_{context.suffix}.so")
    result = context.run(2, [context.program("private"), module], env={"TRIB_STATS": "1"})
    expect(
        result.status == 0 and re.search(r"^  allreduce ", result.output, re.MULTILINE) is not None,
        result,
    )


def looked_up(context: Context) -> None:
    """Functions that a program finds by name in the MPI's file are those of the preload library."""
    names = {"mpich": "libmpi.so.12", "intel": "libmpi.so.12", "openmpi": "libmpi.so.40"}
    name = "libmpi_abi.so.1" if context.mpi.name.startswith("abi") else names[context.mpi.kind]
    script = str(Path(__file__).with_name("looked_up.py"))
    command = [sys.executable, script, f"{context.mpi.root}/lib/{name}"]
    result = context.run(2, command, env={"TRIB_STATS": "1"}, timeout=60)
    expect(result.status == 0 and "sums checked" in result.output, result)
    for served in ("allreduce", "iallreduce"):
        expect(re.search(rf"^  {served} ", result.output, re.MULTILINE) is not None, result)
    expect("no calls were left to the MPI" in result.output, result)
    other = next(iter({mpi.preload for mpi in context.mpis.values()} - {context.mpi.preload}))
    result = context.run(2, command, preload=other, timeout=60)
    expect(result.status == 0 and "sums checked" in result.output, result)
    expect(result.output.count("this preload library is for") == 1, result)


def full_shm(context: Context) -> None:
    """Where /dev/shm is full or tiny, all goes on, with one warning. Only root may try it on a /dev/shm of its own."""
    mount = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"',
        "sh",
    ]
    if context.mpi.kind != "mpich":
        print("full_shm: not tried: this MPI itself dies where /dev/shm is full")
        return
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mount, "true"], check=False, capture_output=True).returncode
    ):
        print("full_shm: not tried: no mounts may be made here")
        return
    for room, warning in (
        (0, "all reductions are left to the MPI"),
        (300_000, "they go in small pieces"),
    ):
        done = subprocess.run(
            [*mount, sys.executable, launch.__file__, "--mpis", context.mpis_file, "--mpi", context.mpi.name,
             "--ranks", "2", "--env", "TRIB_SEGMENT=file", "--expect", warning,
             context.program("full_shm"), str(room)],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        expect(done.returncode == 0, done.stdout + done.stderr)


CHECKS: dict[str, Callable[[Context], None]] = {
    function.__name__.replace("gpu_killed_", "gpu_killed-"): function
    for function in (
        inert,
        bind_now,
        other_family,
        stats,
        settings,
        full_shm,
        disagreement,
        time_limit,
        killed,
        killed_in_containers,
        gpu_killed,
        gpu_killed_requests,
        gpu_killed_in_containers,
        gpu_killed_stream,
        tuning,
        alone,
        all_alive,
        tool_in_front,
        tool_behind,
        without_folder,
        left_out,
        unknown_devices,
        private_mpi,
        looked_up,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mpis")
    parser.add_argument("--mpi")
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--suffix")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("checks", nargs="*")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CHECKS))
        return 0
    context = Context(arguments.mpis, arguments.mpi, arguments.programs, arguments.suffix)
    for name in arguments.checks or CHECKS:
        try:
            CHECKS[name](context)
        except NotHereError as reason:
            print(reason)
            return launch.SKIPPED
        print(f"{name}: fine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
