# SPDX-License-Identifier: BSD-3-Clause
"""Installs the build (TRIB_HOME) somewhere else, and uses that tree as a user does."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tributary import __version__, mpi

HERE = Path(__file__).parent
BUILD = Path(os.environ.get("TRIB_HOME", HERE.parents[1] / "build"))
TRIB = [sys.executable, "-c", "import sys; from tributary.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("installed")
    subprocess.run(
        ["cmake", "--install", BUILD, "--prefix", where], check=True, capture_output=True
    )
    return where


def _compile(name: str, out: Path, *flags: str | Path) -> Path:
    installed = mpi.wheel(name)
    if installed is None or installed.library is None:
        pytest.skip(f"{mpi.TITLES[name]} from PyPI is not here")
    program = out / f"program-{name}"
    subprocess.run(
        [
            *("gcc", HERE / "program.c", "-o", program, f"-I{installed.prefix / 'include'}"),
            *(*flags, installed.library, f"-Wl,-rpath,{installed.prefix / 'lib'}"),
        ],
        check=True,
    )
    return program


def _output(*words: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + done.stderr


def _run(prefix: Path, *words: str | Path) -> tuple[str, str]:
    done = subprocess.run(
        [*TRIB, *words],
        env={**os.environ, "TRIB_HOME": str(prefix)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_a_program_that_knows_nothing_of_it(name: str, prefix: Path, tmp_path: Path) -> None:
    program = _compile(name, tmp_path)
    out, error = _run(prefix, "run", "-n", "2", "--stats", "--", program)
    assert out == "ranks 2 sum 3\n"
    assert "allreduce" in error and "no calls were left to the MPI" in error


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_a_program_that_uses_the_api(name: str, prefix: Path, tmp_path: Path) -> None:
    lib = next(prefix.rglob(f"libtributary_{name}.so")).parent
    flags = [
        "-DWITH_API",
        f"-I{prefix / 'include'}",
        f"-L{lib}",
        f"-ltributary_{name}",
        "-ltributary",
    ]
    program = _compile(name, tmp_path, *flags, f"-Wl,-rpath,{lib}")
    plan = mpi.plan(program, 2, preload=False)
    done = subprocess.run(
        plan.argv([str(program)]),
        env=plan.full_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "ranks 2 sum 3\n" in done.stdout
    assert f"version {__version__} algorithm " in done.stdout
    assert "bfloat16 0x4000" in done.stdout


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_persistent_reductions_of_an_mpi_that_has_them(
    name: str, prefix: Path, tmp_path: Path
) -> None:
    program = _compile(name, tmp_path, "-DWITH_PERSISTENT", f"-I{prefix / 'include'}", "-Werror")
    out, error = _run(prefix, "run", "-n", "2", "--stats", "--", program)
    assert out == "ranks 2 sum 3\n"
    assert "allreduce_init" in error


def test_persistent_reductions_of_an_mpi_that_has_none(prefix: Path, tmp_path: Path) -> None:
    compiler = shutil.which("mpicc.openmpi")
    if compiler is None or "Open MPI 4" not in _output(compiler, "--showme:version"):
        pytest.skip("the system has no Open MPI 4")
    program = tmp_path / "program"
    lib = next(prefix.rglob("libtributary_openmpi.so")).parent
    subprocess.run(
        [
            *(compiler, HERE / "program.c", "-o", program, "-DWITH_PERSISTENT", "-Werror"),
            *(f"-I{prefix / 'include'}", f"-L{lib}", "-ltributary_openmpi", f"-Wl,-rpath,{lib}"),
        ],
        check=True,
    )
    # Linked, which is enough, and preloaded as well.
    made = mpi.plan(program, 2, preload=False)
    assert "ranks 2 sum 3\n" in _output(*made.argv([str(program)]), env=made.full_environment())
    out, error = _run(prefix, "run", "-n", "2", "--stats", "--", program)
    assert out == "ranks 2 sum 3\n"
    assert "allreduce_init" in error and "no calls were left to the MPI" in error


def test_the_tools_work_from_there(prefix: Path) -> None:
    assert "host" in _run(prefix, "info")[0]
    assert _run(prefix, "preload", "--mpi", "mpich")[0].startswith(str(prefix))
