# SPDX-License-Identifier: BSD-3-Clause
import contextlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tributary import elf

Make = Callable[..., Path]


def test_reads_needed_and_runpath(make_program: Make) -> None:
    program = make_program("libmpi.so.12", "-Wl,--enable-new-dtags,-rpath,LIB")
    read = elf.read(program)
    assert read.needed[0] == "libmpi.so.12"
    assert read.runpath and not read.rpath
    assert read.is_dynamic


def test_what_is_not_elf_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n" + "#" * 100)
    with pytest.raises(elf.NotElfError):
        elf.read(script)


def test_damaged_files_do_not_crash(make_program: Make, tmp_path: Path) -> None:
    data = make_program("libmpi.so.12").read_bytes()
    for length in (5, 64, 200, 1000, len(data) // 2):
        cut = tmp_path / f"cut{length}"
        cut.write_bytes(data[:length])
        with contextlib.suppress(elf.NotElfError):
            elf.read(cut)
    # e_phoff: where the table of segments is, which names the other parts.
    for number in (0xFFFF_FFFF_FFFF_FFFF, 1 << 62):
        lie = tmp_path / f"lie{number}"
        lie.write_bytes(data[:32] + number.to_bytes(8, "little") + data[40:])
        with pytest.raises(elf.NotElfError):
            elf.read(lie)


def test_library_path_beats_runpath_but_not_rpath(make_program: Make, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    program = make_program("libmpi.so.12", "-Wl,--enable-new-dtags,-rpath,LIB")
    shutil.copy(tmp_path / "lib/libmpi.so.12", other)
    assert elf.libraries(program, "")["libmpi.so.12"] == tmp_path / "lib/libmpi.so.12"
    assert elf.libraries(program, str(other))["libmpi.so.12"] == other / "libmpi.so.12"
    elf.read.cache_clear()  # the same path again
    program = make_program("libmpi.so.12", "-Wl,--disable-new-dtags,-rpath,LIB")
    assert elf.libraries(program, str(other))["libmpi.so.12"] == tmp_path / "lib/libmpi.so.12"


def test_origin_is_filled_in(make_program: Make, tmp_path: Path) -> None:
    program = make_program("libmpi.so.40", "-Wl,-rpath,$ORIGIN/lib")
    assert elf.libraries(program, "")["libmpi.so.40"] == tmp_path / "lib/libmpi.so.40"


def test_missing_library_is_none(make_program: Make) -> None:
    program = make_program("libmpi_no_such.so.9")
    assert elf.libraries(program, "")["libmpi_no_such.so.9"] is None


def test_agrees_with_the_loader() -> None:
    """As ldd says it, which runs the loader: allowed here, on programs of the system."""
    program = Path(shutil.which("git") or "/bin/bash")
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    expected = {
        words[0]: Path(words[2]).resolve()
        for words in (line.split() for line in said.splitlines())
        if len(words) >= 3 and words[1] == "=>"
    }
    found = elf.libraries(program, "")
    assert {name: path.resolve() for name, path in found.items() if path} == expected
