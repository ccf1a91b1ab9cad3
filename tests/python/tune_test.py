# SPDX-License-Identifier: BSD-3-Clause
"""`trib tune`: what it refuses, what it puts into the file and how it shows it. A small run, and one measured again."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import built_or_skip, wheel_or_skip

from tributary import bench, mpi, tree, tuning
from tributary.cli import arguments
from tributary.errors import UserError

Trib = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    built_or_skip("trib-info")
    path = tmp_path / "deep/tuning.json"
    monkeypatch.setenv("TRIB_TUNING_FILE", str(path))
    tree.info.cache_clear()
    return path


def _row(**more: object) -> dict[str, object]:
    return {
        "collective": "allreduce",
        "place": "host",
        "determinism": "run",
        "ranks": 2,
        "nodes": 1,
        "bytes": 65536,
        "is_default": False,
        "algorithm": "two_shot",
        "slice": 32768,
        "time_us": 2.0,
        "default_us": 3.0,
        "least_us": 2.0,
        "candidates": [
            {"algorithm": "one_shot", "slice": 262144, "time_us": 3.0},
            {"algorithm": "two_shot", "slice": 32768, "time_us": 2.0},
            {"algorithm": "two_shot", "slice": 65536, "time_us": 9.0},
        ],
        **more,
    }


def _write(file: Path, machine: str, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": "tributary tuning", "version": 1, "machines": {machine: rows}}
    file.write_text(json.dumps(document))


def test_errors_name_argument_and_accepted_values(trib: Trib, file: Path) -> None:
    cores = mpi.usable_cores()
    for words, texts in {
        ("magic",): ("COLLECTIVE", "magic", "allreduce", "all"),
        ("all", "--memory", "rom"): ("--memory", "host, cuda"),
        ("--show", "--mpi", "nompi"): ("--mpi", "mpich"),
        ("all", "--budget", "60001"): ("--budget", "60000"),
        ("all", "--budget", "0"): ("--budget", "1 or more, up to 60000"),
        ("--show", "--sizes="): ("--sizes", "4, 64K"),
        ("all", "--sizes", "4:"): ("--sizes",),
        ("all", "-n", "2", "--sizes", "1G"): ("--sizes", "64 Mi"),
        ("all", "-n", "1"): ("-n", "2 or more"),
        ("all", "-n", str(cores + 1)): ("-n", "the scheduler", f"2 to {cores}"),
        ("all", "-n", "2", "--dtype", "quad"): ("--dtype", "float"),
        ("--show", "--plot", "x.bmp"): ("--plot", ".png"),
        ("--plot", "x.png"): ("--plot", "--show or --check"),
        ("--show",): ("nothing is known", str(file), "trib tune"),
        ("--check",): ("nothing to check", str(file)),
    }.items():
        if cores < 2 and "2" in words:
            continue
        status, _, error = trib("tune", *words)
        assert status == 2, words
        for text in texts:
            assert text in error, (words, error)


def test_without_a_file(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    built_or_skip("trib-info")
    status, _, error = trib("tune", "--show")
    assert status == 2 and "TRIB_TUNING_FILE=none" in error and "absolute path" in error
    for name in ("TRIB_TUNING_FILE", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    tree.info.cache_clear()
    why = "neither HOME nor XDG_CACHE_HOME names a folder"
    assert why in trib("tune", "--show")[2] and f"none: {why}" in trib("info", "tuning")[1]


def test_reading(file: Path) -> None:
    assert tuning.read(file) == []
    _write(file, "here", [_row()])
    (finding,) = tuning.read(file)
    assert (finding.machine, finding.bytes, finding.way.key) == ("here", 65536, "two_shot:32768")
    assert [way.key for way in tuning.worth_measuring(finding)] == [
        "one_shot:262144",
        "two_shot:32768",
    ]
    assert [way.key for way in finding.candidates][2] == "two_shot:65536"
    for text, words in {
        "precious": "damaged",
        '{"format": "tributary tuning", "version": 2, "machines": {}}': "another version",
        '{"format": "other"}': "not a tuning file",
        '{"format": "tributary tuning", "version": 1, "machines": {"here": [{}]}}': "damaged",
        "[]": "damaged",
    }.items():
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            tuning.read(file)
    file.write_text("")
    assert tuning.read(file) == []
    with pytest.raises(UserError, match="no plain file"):
        tuning.read(Path("/dev/full"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"time_us": 0},
        {"bytes": "x"},
        {"collective": 7},
        {"ranks": True},
        {"candidates": [{"algorithm": "ring", "slice": 4096, "time_us": None}]},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["--show", "--check", "--again"])
def test_wrong_rows_are_named(wrong: dict[str, object], form: str, trib: Trib, file: Path) -> None:
    _write(file, tuning.machine(), [_row(**wrong)])
    status, out, error = trib("tune", "-n", "2", form)
    assert (status, out) == (2, "")
    assert error.startswith(f"trib tune: {file} is damaged")
    assert f'"{next(iter(wrong))}"' in error or "time_us" in error


def test_a_file_that_cannot_be_written(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    built_or_skip("trib-info")
    monkeypatch.setattr(bench, "lines", lambda *_: pytest.fail("it was started"))
    for name, text in {"/proc/x.json": "cannot be written", "/dev/full": "no plain file"}.items():
        monkeypatch.setenv("TRIB_TUNING_FILE", name)
        tree.info.cache_clear()
        status, _, error = trib("tune", "allreduce", "-n", "2", "--sizes", "4")
        assert status == 2 and name in error and text in error


def test_a_folder_that_cannot_be_written_to(
    trib: Trib, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library makes its lock and the next version of the file there."""
    built_or_skip("trib-bench-mpich")
    _write(file, tuning.machine(), [])
    monkeypatch.setattr(bench, "lines", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(mpi, "usable_cores", lambda: 2)

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    status, _, error = trib("tune", "allreduce", "-n", "2", "--sizes", "4")
    assert status == 2
    assert error.startswith(
        f"trib tune: TRIB_TUNING_FILE: {file} cannot be replaced, as {file.parent} cannot be written to: Permission denied"
    )


def test_the_default_file_is_called_so(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    built_or_skip("trib-bench-mpich")
    monkeypatch.setattr(bench, "lines", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(mpi, "usable_cores", lambda: 2)
    monkeypatch.delenv("TRIB_TUNING_FILE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/x")
    status, _, error = trib("tune", "allreduce", "-n", "2", "--sizes", "4")
    assert status == 2
    assert error.startswith(
        "trib tune: the default tuning file (TRIB_TUNING_FILE names another one): /proc/x/"
    )


def test_one_core_is_too_few(trib: Trib, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_or_skip("trib-bench-mpich")
    monkeypatch.setattr(mpi, "usable_cores", lambda: 1)
    for words in ((), ("-n", "2")):
        status, _, error = trib("tune", *words, "--sizes", "4")
        assert status == 2 and "needs 2 cores" in error and "may run on 1\n" in error


def test_showing_is_not_for_trib_n_alone(
    trib: Trib, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(file, tuning.machine(), [_row()])
    monkeypatch.setenv("TRIB_N", "3")
    assert "MPI_Allreduce, 2 ranks" in trib("tune", "--show")[1]
    assert trib("tune", "--show", "-n", "3")[0] == 2


def test_what_is_not_kept_is_said(trib: Trib, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_or_skip("trib-bench-mpich")
    monkeypatch.setenv("TRIB_ALGORITHM", "ring")

    def measures(*_: object) -> Iterator[dict[str, object]]:
        yield {"type": "tuned", "collective": "allreduce", "bytes": 65536, "seconds": 0.1}
        yield {"type": "tuned", "collective": "allreduce", "bytes": 4, "seconds": 0.1}

    monkeypatch.setattr(bench, "lines", measures)
    monkeypatch.setattr(mpi, "usable_cores", lambda: 2)
    words = ("tune", "allreduce", "-n", "2", "--sizes", "4,64K")
    status, out, error = trib(*words)
    assert (status, out) == (2, "")
    assert "nothing was kept for this machine of allreduce 64 KiB, allreduce 4 B: " in error
    assert "TRIB_ALGORITHM=ring" in error
    _write(file, tuning.machine(), [_row(bytes=65540)])  # its octave's
    status, out, _ = trib(*words)
    assert status == 0 and f"findings: {file}\n" in out
    assert "note: nothing was kept for this machine of allreduce 4 B" in out
    status, out, error = trib(*words, "--again")
    assert (status, out) == (
        2,
        "",
    ) and "nothing was kept for this machine of allreduce 64 KiB" in error
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # it may be kept for another machine
    assert trib(*words, "--again")[0] == 0


def test_sizes_name_octaves(trib: Trib, file: Path) -> None:
    """The file has one finding for each power of two."""
    _write(file, tuning.machine(), [_row(bytes=8), _row(bytes=65536)])
    status, out, _ = trib("tune", "--show", "--sizes", "12")
    assert status == 0 and "64 Ki" not in out and "1 of 1 sizes" in out
    assert trib("tune", "--show", "--sizes", "4")[0] == 2


def test_ratios_of_a_check_are_those_of_its_times() -> None:
    check = tuning.Check(tuning._finding("here", _row()), 3.0, 4.0, {"ring:64": 2.0})
    assert (check.best_us, check.tuned_ratio, check.default_ratio) == (2.0, 1.5, 2.0)


def _gpu_row(**more: object) -> dict[str, object]:
    def way(algorithm: str, blocks: int, engine: str, time_us: float) -> dict[str, object]:
        protocol = "packet" if blocks < 132 else "simple"
        return {
            **{"algorithm": algorithm, "slice": 4096, "protocol": protocol, "blocks": blocks},
            **{"engine": engine, "time_us": time_us},
        }

    kernel = way("two_shot", 132, "kernel", 4.0)
    del kernel["time_us"]
    return {
        **_row(place="device", determinism="any", time_us=1.0, least_us=1.0),
        **way("two_shot", 132, "gemv", 1.0),
        "kernel": kernel,
        "candidates": [
            way("two_shot", 132, "gemv", 1.0),
            way("two_shot", 132, "copy", 1.1),
            way("two_shot", 132, "kernel", 4.0),
            way("two_shot", 32, "kernel", 5.0),
            way("one_shot", 132, "kernel", 7.0),
        ],
        **more,
    }


def test_ways_of_gpus_are_those_of_kernels(file: Path) -> None:
    _write(file, "here", [_gpu_row()])
    (finding,) = tuning.read(file)
    assert [way.key for way in tuning.worth_measuring(finding)] == [
        "two_shot:4096:simple:132",
        "two_shot:4096:packet:32",
    ]
    assert "engine gemv" in finding.choice and "engine kernel" in finding.persistent_choice
    assert tuning._finding("here", _row()).persistent_choice.startswith("two_shot")
    row = _gpu_row()
    del row["kernel"]  # the default's is as good
    assert tuning._finding("here", row).persistent_choice == "the default"


def _timed_jobs(monkeypatch: pytest.MonkeyPatch) -> list[bench.Job]:
    """What checks would have the benchmark do, which is not started."""
    jobs: list[bench.Job] = []

    def measure(job: bench.Job, _: bench.Measurement) -> Iterator[dict[str, object]]:
        jobs.append(job)
        names = ("tributary", *(f"way {way}" for way in job.ways))
        yield {"type": "row", "sides": {name: {"time_us": [2.0, 2.0]} for name in names}}

    monkeypatch.setattr(bench, "lines", measure)
    monkeypatch.setattr(arguments, "check_gpus", lambda _: None)
    monkeypatch.setattr(mpi, "usable_cores", lambda: 2)
    return jobs


def test_checks_on_gpus(
    trib: Trib, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_or_skip("trib-bench-mpich")
    _write(file, tuning.machine(), [_row(), _gpu_row(), _gpu_row(bytes=64, determinism="run")])
    jobs = _timed_jobs(monkeypatch)
    data = tmp_path / "x.json"
    words = ("tune", "--check", "-n", "2", "--memory", "cuda", "--json", data)
    status, out, error = trib(*words)
    assert status == 0, error
    assert len(jobs) == 2
    for job in jobs:
        assert job.memory == "cuda"
        assert job.ways == ("default", "two_shot:4096:simple:132", "two_shot:4096:packet:32")
        assert job.settings["TRIB_RESIDENT"] == "0" and job.settings["TRIB_MAP"] == "off"
        assert job.check
    assert {job.sizes[0]: job.settings["TRIB_DETERMINISM"] for job in jobs} == {
        64: "run",
        65536: "any",
    }
    assert "engine gemv" not in out and "determinism any, measured again" in out
    checks = json.loads(data.read_text())["checks"]
    assert {(row["place"], row["determinism"], row["bytes"]) for row in checks} == {
        ("device", "run", 64),
        ("device", "any", 65536),
    }


def test_checks_of_whole_numbers(trib: Trib, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have findings of their own, which calls on others use with TRIB_DETERMINISM=any."""
    built_or_skip("trib-bench-mpich")
    rows = [
        _row(determinism=determinism, bytes=bytes)
        for determinism, bytes in (("run", 4), ("order", 64), ("any", 1024))
    ]
    _write(file, tuning.machine(), rows)
    jobs = _timed_jobs(monkeypatch)
    for words, determinisms in {
        (): {"run", "order", "any"},
        ("--dtype", "int"): {"any"},
        ("--dtype", "byte", "--op", "bor"): {"any"},
    }.items():
        jobs.clear()
        status, _, error = trib("tune", "--check", "-n", "2", *words)
        assert status == 0, error
        assert {job.settings["TRIB_DETERMINISM"] for job in jobs} == determinisms
        assert not any("TRIB_MAP" in job.settings for job in jobs)
    _write(file, tuning.machine(), rows[:1])
    status, _, error = trib("tune", "--check", "-n", "2", "--dtype", "int")
    assert status == 2 and "nothing to check" in error


def test_lengths_that_are_measured(trib: Trib, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs those, too, that copy engines are for."""
    built_or_skip("trib-bench-mpich")
    jobs: list[bench.Job] = []

    def measure(job: bench.Job, _: bench.Measurement) -> Iterator[dict[str, object]]:
        jobs.append(job)
        yield {"type": "tuned", "collective": "allreduce", "bytes": 65536, "seconds": 0.1}

    _timed_jobs(monkeypatch)
    monkeypatch.setattr(bench, "lines", measure)
    for memory, most in {"host": "64M", "cuda": "1G"}.items():
        words = ("tune", "allreduce", "-n", "2", "--memory", memory, "--sizes")
        status, _, error = trib(*words, f"{most},2G")
        assert status == 2 and f"up to {most[:-1]} {most[-1]}i" in error and not jobs
        trib(*words, most)
        assert jobs.pop().sizes == [arguments.read_sizes(most)[0]]


def test_checks_are_kept_when_it_ends_early(
    trib: Trib, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_or_skip("trib-bench-mpich")
    _write(file, tuning.machine(), [_row(bytes=8), _row(bytes=65536)])
    checks = []

    def check(finding: tuning.Finding, _: bench.Job) -> tuning.Check:
        if checks:
            raise KeyboardInterrupt
        checks.append(tuning.Check(finding, 3.0, 4.0, {"ring:64": 2.0}))
        return checks[0]

    monkeypatch.setattr(tuning, "check", check)
    monkeypatch.setattr(mpi, "usable_cores", lambda: 2)
    data, picture = tmp_path / "x.json", tmp_path / "x.png"
    status, out, _ = trib("tune", "--check", "-n", "2", "--json", data, "--plot", picture)
    assert status == 130 and "1.50" in out and "1 of 2 sizes were measured" in out
    assert [row["bytes"] for row in json.loads(data.read_text())["checks"]] == [8]
    assert picture.stat().st_size > 5000


def test_nothing_is_tuned_without_the_library(
    trib: Trib, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    (tmp_path / "bin").mkdir()
    for name in ("trib-info", program.name):
        (tmp_path / "bin" / name).symlink_to(program.with_name(name))
    monkeypatch.setenv("TRIB_HOME", str(tmp_path))
    monkeypatch.setattr(mpi, "usable_cores", lambda: 2)
    status, _, error = trib("tune", "allreduce", "-n", "2", "--mpi", "mpich", "--sizes", "4")
    assert status == 2 and error.startswith("trib tune: there is no preload library for mpich")


def test_showing_what_is_known_of_this_machine(trib: Trib, file: Path, tmp_path: Path) -> None:
    _write(
        file,
        tuning.machine(),
        [
            _row(),
            _row(bytes=4, is_default=True, time_us=0.5, default_us=0.5, least_us=0.5),
            _row(collective="reduce", ranks=3),
            _row(place="device", protocol="packet", blocks=32, candidates=[]),
        ],
    )
    picture, data = tmp_path / "x.png", tmp_path / "x.json"
    status, out, error = trib("tune", "--show", "--plot", picture, "--json", data)
    assert status == 0, error
    for text in ("MPI_Allreduce, 2 ranks", "MPI_Reduce, 3 ranks", "the default", "1.50", "2 of 3"):
        assert text in out, out
    assert picture.stat().st_size > 5000
    assert [row["bytes"] for row in json.loads(data.read_text())["findings"]] == [4, 65536, 65536]
    status, out, _ = trib("tune", "allreduce", "--show", "--memory", "cuda")
    assert status == 0 and "packet, 32 blocks" in out
    status, out, _ = trib("tune", "allreduce", "--show", "--sizes", "4")
    assert status == 0 and "64 Ki" not in out
    _write(file, tuning.machine(), [_row(algorithm="of_tomorrow")])
    status, out, _ = trib("tune", "--show")
    assert status == 0 and "of_tomorrow is not known here" in " ".join(out.split()), out
    assert "0 of 1 sizes" in out, out
    _write(file, "another machine", [_row()])
    assert trib("tune", "--show")[0] == 2


def test_findings_for_other_buffers_are_named(trib: Trib, file: Path) -> None:
    gpus = _row(place="device", protocol="packet", blocks=32, candidates=[])
    _write(file, tuning.machine(), [gpus, {**gpus, "bytes": 4}])
    status, _, error = trib("tune", "--show")
    assert status == 2 and "2 for buffers on GPUs: --memory cuda shows them" in error
    assert "nothing is known" in trib("tune", "reduce", "--show")[2]
    _write(file, tuning.machine(), [_row()])
    status, _, error = trib("tune", "--show", "--memory", "cuda")
    assert status == 2 and "1 for buffers in host memory: --memory host shows them" in error


def test_help_says_where_the_file_is(trib: Trib) -> None:
    out = trib("tune", "--help")[1]
    assert "TRIB_TUNING_FILE" in out and "tributary/tuning.json" in out


def test_a_small_run(trib: Trib, file: Path, tmp_path: Path) -> None:
    if mpi.usable_cores() < 2:
        pytest.skip("nothing is measured with more ranks than cores")
    built_or_skip("trib-bench-mpich")
    wheel_or_skip("mpich")
    job = ("-n", "2", "--mpi", "mpich", "--sizes", "4,64K")
    status, out, error = trib("tune", "all", *job, "--budget", "3000")
    assert status == 0, error
    assert "reduce_scatter_block 64 KiB" in error and f"findings: {file}" in out
    found = tuning.read(file)
    assert {f.collective for f in found} == {
        "allreduce",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_block",
    }
    assert {f.machine for f in found} == {tuning.machine()}
    assert all(f.time_us <= f.default_us or f.is_default for f in found)
    assert all(f.candidates for f in found)

    before = file.read_text()
    status, _, error = trib("tune", "all", *job)
    assert status == 0 and file.read_text() == before, error
    status, _, error = trib("tune", "allreduce", *job, "--again", "--budget", "3000")
    assert status == 0 and file.read_text() != before, error

    picture, data = tmp_path / "x.png", tmp_path / "x.json"
    status, out, error = trib(
        *("tune", "allreduce", "-n", "2", "--mpi", "mpich", "--check", "--repeats", "2"),
        *("--plot", picture, "--json", data),
    )
    assert status == 0, error
    assert "measured again" in out and "of 2 sizes" in out
    assert picture.stat().st_size > 5000
    checks = json.loads(data.read_text())["checks"]
    assert len(checks) == 2 and all(row["tuned_ratio"] > 0.5 for row in checks)

    file.write_text("precious")
    status, _, error = trib("tune", "all", *job)
    assert status == 2 and "damaged" in error and file.read_text() == "precious"
