# SPDX-License-Identifier: BSD-3-Clause
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import built_or_skip

from tributary import tree
from tributary.cli import info
from tributary.errors import UserError

Trib = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _needs_info() -> None:
    built_or_skip("trib-info")


def test_json(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIB_STATS", "1")
    status, out, _ = trib("info", "--json")
    assert status == 0
    data = json.loads(out)
    assert {
        "version",
        "mpis",
        "preload",
        "settings",
        "algorithms",
        "backends",
        "operators",
        "dtypes",
    } <= set(data)
    stats = next(s for s in data["settings"] if s["variable"] == "TRIB_STATS")
    assert (stats["value"], stats["default"], stats["origin"]) == ("1", "0", "environment")
    assert "f32" in data["operators"]["sum"] and "f32" not in data["operators"]["band"]
    assert any(b["name"] == "host" for b in data["backends"])


def test_levels(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWLOC_SYNTHETIC", "pack:2 [numa] l3:2 core:2 pu:1")
    tree.info.cache_clear()
    levels = json.loads(trib("info", "--json")[1])["levels"]
    assert levels["missing"] == ""
    found = {kind["kind"]: kind["domains"] for kind in levels["kinds"]}
    assert found["socket"] == found["numa"] == ["0-3", "4-7"]
    assert found["l3"] == ["0-1", "2-3", "4-5", "6-7"]
    assert "0-3  4-7" in trib("info")[1]


def test_levels_without_hwloc(trib: Trib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libhwloc.so.15").touch()  # which the loader finds first, and refuses
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    tree.info.cache_clear()
    levels = json.loads(trib("info", "--json")[1])["levels"]
    assert "libhwloc.so.15" in levels["missing"] and levels["kinds"] == []
    assert "hwloc: " in trib("info")[1]


def test_for_people(trib: Trib) -> None:
    status, out, _ = trib("info")
    assert status == 0
    for setting in tree.info()["settings"]:
        assert setting["variable"] in out
    for algorithm in tree.info()["algorithms"]:
        assert algorithm["name"] in out


def test_sections(trib: Trib) -> None:
    whole = trib("info")[1]
    names = "mpis, backends, gpus, levels, tuning, settings, algorithms, types"
    assert names in " ".join(trib("info", "--help")[1].split())
    for section in names.split(", "):
        status, out, _ = trib("info", section)
        assert status == 0 and out and len(out) < len(whole)
    status, _, error = trib("info", "settingz")
    assert (status, error) == (2, f"trib info: SECTION: settingz is none of {names}\n")
    assert list(json.loads(trib("info", "types", "--json")[1])) == ["dtypes", "operators"]
    status, _, error = trib("info", "types", "--markdown")
    assert status == 2 and "--markdown" in error


def test_the_tuning_file_is_named(
    trib: Trib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "TRIB_TUNING_FILE=none" in trib("info")[1]
    monkeypatch.setenv("TRIB_TUNING_FILE", str(tmp_path / "t.json"))
    tree.info.cache_clear()
    out = trib("info", "tuning")[1]
    assert "t.json" in out and "not there yet" in out
    assert tree.info()["tuning"]["machine"] in out
    (tmp_path / "t.json").touch()
    assert "not there yet" not in trib("info", "tuning")[1]


def test_brackets_are_no_markup(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    built_or_skip("trib-info")
    monkeypatch.setenv("TRIB_TUNING_FILE", "/[red]/[/x]/t")
    for section in ("settings", "tuning"):
        tree.info.cache_clear()
        status, out, _ = trib("info", section)
        assert status == 0 and "/[red]/[/x]/t" in out


def test_a_wrong_setting_is_named(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIB_STATZ", "1")
    status, _, error = trib("info")
    assert status == 2 and "TRIB_STATZ" in error and "TRIB_STATS" in error


def test_markdown(trib: Trib) -> None:
    status, out, _ = trib("info", "--markdown")
    assert status == 0
    assert "| `TRIB_TIMEOUT` |" in out and "| `ring` |" in out and "| `bf16` | 2 |" in out


def test_pages_are_rewritten_between_marks(tmp_path: Path, trib: Trib) -> None:
    page = tmp_path / "settings.md"
    page.write_text(
        "# Settings\n\n<!-- trib info: settings -->\noutdated\n<!-- end -->\n\nlast line\n"
    )
    assert trib("info", "--markdown", tmp_path)[0] == 0
    text = page.read_text()
    assert (
        "outdated" not in text
        and "`TRIB_TIMEOUT`" in text
        and text.endswith("<!-- end -->\n\nlast line\n")
    )
    assert trib("info", "--markdown", tmp_path)[1] == ""  # nothing left to write
    page.write_text("<!-- trib info: settings -->\nno end\n")
    status, _, error = trib("info", "--markdown", page)
    assert status == 2 and f"--markdown: {page}: nothing to write" in error
    assert trib("info", "--markdown=")[0] == 2
    page.write_text("<!-- trib info: nonsense -->\n<!-- end -->\n")
    status, _, error = trib("info", "--markdown", page)
    assert status == 2 and "nonsense" in error and "settings, algorithms, types" in error


def test_the_documentation_is_up_to_date() -> None:
    """`make docs` mends it."""
    root = Path(__file__).resolve().parents[2]
    data = tree.info()
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if page.is_file():
            text = page.read_text()
            try:
                assert info.rewrite(text, data, page) == text, f"{page}: run `make docs`"
            except UserError as error:
                pytest.fail(str(error))


@pytest.mark.parametrize("words", [(), ("--json",), ("--markdown",)])
def test_a_reader_who_leaves(words: tuple[str, ...]) -> None:
    """As in `trib info | head -1`: no complaints, and the status of a process that SIGPIPE ends."""
    reader, writer = os.pipe()
    os.close(reader)
    program = "import sys; from tributary.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "info", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
