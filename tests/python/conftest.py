# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of the command line share: running it in process, and small programs linked with a made-up MPI."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tributary import cli, elf, mpi, tree


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "TRIB_MPI",
        "TRIB_LAUNCHER",
        "TRIB_N",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        *mpi.job_variables(),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRIB_TUNING_FILE", "none")  # the user's findings are not ours to change
    for function in (
        elf.read,
        mpi.on_path,
        mpi.wheels,
        mpi.vendor_of_library,
        tree.info,
        tree.known_settings,
    ):
        function.cache_clear()


@pytest.fixture
def trib(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `trib WORDS...`: exit status, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def make_program(tmp_path: Path) -> Callable[..., Path]:
    """Compile a program linked with an empty library of a given soname, found by `flags`."""

    def make(soname: str, *flags: str, says: str = "", folder: str = "lib") -> Path:
        lib = tmp_path / folder
        lib.mkdir(exist_ok=True)
        source = tmp_path / "library.c"
        source.write_text(f'const char* trib_test_says = "{says}"; void trib_test(void) {{}}\n')
        library = lib / soname
        subprocess.run(
            ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", source, "-o", library], check=True
        )
        main = tmp_path / "main.c"
        main.write_text("void trib_test(void); int main(void) { trib_test(); return 0; }\n")
        program = tmp_path / "program"
        filled = [flag.replace("LIB", str(lib)) for flag in flags]
        subprocess.run(["gcc", main, library, *filled, "-o", program], check=True)
        return program

    return make


def wheel_or_skip(vendor: str) -> mpi.Installation:
    installed = mpi.wheel(vendor)
    if installed is None:
        pytest.skip(f"{mpi.TITLES[vendor]} from PyPI is not here")
    return installed


def built_or_skip(name: str) -> Path:
    path = tree.program(name)
    if path is None:
        pytest.skip(f"{name} is not built")
    return path


def run_bench(settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the native benchmark for a moment, on 2 ranks under MPICH with Tributary; or skip."""
    program = built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    if tree.preload_library("mpich") is None:
        pytest.skip("no preload library is built")
    plan = mpi.plan(program, 2, "mpich", settings=settings)
    return subprocess.run(
        plan.argv([str(program), "allreduce", "--sizes", "64", "--batch-ms", "1"]),
        env=plan.full_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
