# SPDX-License-Identifier: BSD-3-Clause
"""The Makefile keeps to its folder."""

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"


def _make(folder: Path, *words: str) -> str:
    shutil.copy(MAKEFILE, folder)
    if not shutil.which("make"):
        pytest.skip("make is not here")
    done = subprocess.run(
        ["make", "-s", *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_clean_removes_the_build_folder_that_was_named(tmp_path: Path) -> None:
    for name in ("build", "build-asan", "out", "elsewhere/mine", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "CMakeCache.txt").touch()
    _make(tmp_path, "clean", "BUILD=elsewhere/mine")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"Makefile", "elsewhere", "other"}
    assert not (tmp_path / "elsewhere/mine").exists()


@pytest.mark.parametrize("name", [".", "notes"])
def test_clean_removes_nothing_but_builds(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes").mkdir()
    for file in ("CMakeCache.txt", "CMakeLists.txt", "notes/file"):
        (tmp_path / file).touch()
    _make(tmp_path, "clean", f"BUILD={name}")
    assert (tmp_path / "CMakeLists.txt").exists() and (tmp_path / "notes/file").exists()


def test_caches_are_below_the_folder(tmp_path: Path) -> None:
    show = "show: ; @echo $(PIP); echo $$MPLCONFIGDIR"
    pip, fonts = _make(tmp_path, "--eval", show, "show").splitlines()
    assert "--no-cache-dir" in pip
    assert Path(fonts).is_relative_to(tmp_path / ".venv")
