# SPDX-License-Identifier: BSD-3-Clause
"""`trib schedule`: what it prints reads back, faults are said, and the graph behind the picture."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import built_or_skip

from tributary import schedule
from tributary.cli.schedule import in_words

Trib = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _needs_schedule() -> None:
    built_or_skip("trib-schedule")


def ask(words: str) -> dict[str, Any]:
    return schedule.ask(words.split())


def test_steps_are_printed(trib: Trib) -> None:
    status, out, _ = trib("schedule", "allreduce", "--algorithm", "two_shot", "-n", 3, "--direct")
    assert status == 0
    assert out.startswith("# two_shot allreduce, 3 ranks\n# direct, 3 chunks\n")
    assert "\nrank 2\n  signal 0 1\n" in out
    assert "  reduce out(1, 1) out(2, 1) out(0, 1) <- in(0, 1) in(1, 1) in(2, 1)\n" in out


def test_lowered_is_the_default(trib: Trib) -> None:
    _, out, _ = trib("schedule", "reduce", "--root", 1, "-n", 2, "--algorithm", "one_shot")
    assert "# lowered, 1 chunk, 2 stages, up to 1 slot per rank (1 n)\n" in out
    assert "\n  1: wait 0 slot 0\n" in out and "root 1\n" in out


def test_one_rank(trib: Trib) -> None:
    words = ["schedule", "allreduce", "--algorithm", "ring", "-n", 4, "--rank"]
    status, out, _ = trib(*words, 3)
    assert status == 0 and "rank 3\n" in out and "rank 2\n" not in out
    status, out, error = trib(*words, 4)
    assert (status, out) == (2, "") and "0 to 3" in error


def test_programs(trib: Trib) -> None:
    words = ["schedule", "allreduce", "--algorithm", "two_shot", "-n", 3, "--program"]
    status, out, _ = trib(*words)
    assert status == 0 and out.startswith("# two_shot allreduce, 3 ranks\n")
    programs = re.findall(
        r"^rank (\d): (\d+) instructions of \d+ bytes, .* 3 flags, 3 units", out, re.MULTILINE
    )
    # Its own two inputs are told, two are awaited, one is folded and told, two results are awaited and copied.
    assert programs == [("0", "12"), ("1", "12"), ("2", "12")]
    assert re.search(
        r"^ *6  stage 1  reduce  out chunk \d, scratch of \d unit 2 <- ", out, re.MULTILINE
    )
    assert re.search(r"^ *8  stage 2  wait    flag 2 of \d$", out, re.MULTILINE)
    status, out, _ = trib(*words, "--rank", 1)
    assert status == 0 and "rank 1: 12" in out and "rank 2: " not in out
    assert trib(*words, "--rank", 3)[0] == 2
    for option in ("--rank", "--root"):
        error = trib("schedule", "reduce", option, "x")[2]
        assert f"argument {option}: 'x' is no number of 0 or more" in error
    assert "--verify=: accepted: a file" in trib("schedule", "--verify=")[2]


_TWO_RANKS = """\
rank 0: 4 instructions of 16 bytes, 5 operands of 16; 2 stages; in each of 4 windows 1 flags, 1 units of scratch
   0  stage 0  copy    scratch of 0 unit 0 <- in chunk 0
   1  stage 0  signal  flag 0 of 0
   2  stage 1  wait    flag 0 of 1
   3  stage 1  reduce  out chunk 0 <- in chunk 0, scratch of 1 unit 0

calls of 1024 bytes: 4 instructions of 24 bytes, 5 places of 16
   0  copy    large scratch of 0 byte 0 <- in byte 0; 1024 bytes
   1  signal  flag 0 of 0
   2  wait    flag 0 of 1
   3  reduce  out byte 0 <- in byte 0, large scratch of 1 byte 0; 1024 bytes
"""


def test_programs_of_a_length(trib: Trib) -> None:
    words = ["schedule", "allreduce", "--algorithm", "one_shot", "-n", 2, "--program", "--rank", 0]
    # Four bytes lie in the line of the flag, longer ones in cells or scratch, and long calls take more runs than one.
    assert "   0  copy    line 0 of 0 byte 0 <- in byte 0; 4 bytes\n" in trib(*words)[1]
    assert trib(*words, "--bytes", "1K")[1].endswith(_TWO_RANKS)
    # What one of two ranks asks for while it waits: whole payloads of up to 512 bytes that are not in the line.
    root = ["schedule", "reduce", *words[2:]]
    asked = {
        length: ", asks for" in trib(*root, "--bytes", length)[1] for length in (4, 52, 512, 516)
    }
    assert asked == {4: False, 52: True, 512: True, 516: False}
    assert "wait    flag 0 of 1, asks for payload, lines: 4\n" in trib(*root, "--bytes", 200)[1]
    # Where peers take back what they write, ranks that write as well do not.
    takes_back = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    assert (", asks for" in trib(*words, "--bytes", 200)[1]) is not takes_back
    text = trib(*words, "--bytes", "16K")[1]
    assert "out byte 0 <- in byte 0, large scratch of 1 byte 0; 16384 bytes\n" in text
    assert "\ncalls of 16777216 bytes: the list above in " in trib(*words, "--bytes", "16M")[1]
    words[words.index("-n") + 1] = 3
    text = trib(*words, "--bytes", 200)[1]
    assert "copy    cell 0..3 of 0 <- in byte 0; 200 bytes\n" in text and "asks for" not in text
    words = ["schedule", "reduce_scatter", "--algorithm", "one_shot", "-n", 3, "--program"]
    text = trib(*words, "--rank", 2, "--bytes", 40)[1]
    assert re.search(r"reduce  out byte 0 <- .*, in byte 28; 12 bytes\n$", text)


def test_domains(trib: Trib) -> None:
    words = ["schedule", "reduce", "--algorithm", "tree4", "-n", 4, "--direct", "--domains"]
    status, out, _ = trib(*words, "1,0,1,0")
    assert status == 0 and out.startswith("# tree4 reduce, 4 ranks, domains 0,1,0,1\n")
    assert "reduce out(0, 0) <- in(0, 0) in(2, 0)\n" in out
    assert "reduce scratch(1 slot 0, 0) <- in(1, 0) in(3, 0)\n" in out
    status, _, error = trib(*words, "0,1")
    assert status == 2 and "--domains: 0,1: accepted: 4 numbers" in error


@pytest.mark.parametrize(
    ("words", "name"),
    [("allreduce -n 4", "one_shot"), ("allreduce -n 8 --bytes 1M", "two_shot")],
)
def test_the_table_chooses(trib: Trib, words: str, name: str) -> None:
    assert f"# {name} allreduce" in trib("schedule", *words.split())[1]


@pytest.mark.parametrize("form", ["--direct", "--attach", ""])
def test_what_is_printed_can_be_verified(trib: Trib, tmp_path: Path, form: str) -> None:
    words = ["schedule", "allreduce", "--algorithm", "rabenseifner", "-n", "5", *form.split()]
    status, out, _ = trib(*words)
    assert status == 0
    file = tmp_path / "schedule.txt"
    file.write_text(out)
    status, out, error = trib("schedule", "--verify", file)
    assert (status, error) == (0, "")
    assert "# verified: " in out and "# rabenseifner allreduce, 5 ranks\n" in out


def test_a_fault_is_named_and_drawn(trib: Trib, tmp_path: Path) -> None:
    text = trib("schedule", "allreduce", "--algorithm", "ring", "-n", 3)[1]
    file, picture = tmp_path / "wrong.txt", tmp_path / "wrong.png"
    file.write_text(text.replace("  0: signal slot 0\n", "", 1))
    status, _, error = trib("schedule", "--verify", file, "--plot", picture)
    assert status == 1
    assert f"{file}: wrong: deadlock" in error and "waits for ever" in error
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_wrong_texts_are_errors_with_the_line(trib: Trib, tmp_path: Path) -> None:
    file = tmp_path / "wrong.txt"
    file.write_text("schedule allreduce\nranks 2\nchunks 1\nform straight\n")
    status, out, error = trib("schedule", "--verify", file)
    assert (status, out) == (2, "")
    assert error == (
        f"trib schedule: {file}: line 4: `straight` is no form; accepted: direct, lowered\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "COLLECTIVE is missing"),
        ("allreduce --verify x", "give one of the two"),
        ("gather", "none of allreduce, reduce, reduce_scatter"),
        ("allreduce --algorithm rong", "auto, one_shot, two_shot"),
        ("broadcast --algorithm ring", "ring has no broadcast; accepted: auto, one_shot, two_shot"),
        ("allreduce -n 1", "-n: 1: accepted: 2 to 128"),
        ("reduce -n 4 --root 4", "--root: 4: accepted: 0 to 3"),
        ("allreduce --root 1", "--root: allreduce has none"),
        ("allreduce --bytes x", "--bytes: 'x' is no size"),
        ("allreduce --in-place", "--in-place: only with --direct"),
        ("allreduce --program --direct", "not allowed with"),
        ("--program --verify x", "not with --verify"),
        ("allreduce --plot x.gif", ".png, .svg, .pdf"),
        ("allreduce -n 33 --plot x.png", "--plot: 33 ranks; accepted: up to 32"),
        ("--verify /nowhere", "/nowhere: it cannot be read"),
        ("--verify /", "/: it cannot be read"),
        ("--verify x -n 3", "-n: with a COLLECTIVE only"),
        ("--verify x --direct", "--direct: with a COLLECTIVE only"),
        ("--verify x --json ./x", "--json: x: this file is that of --verify already"),
    ],
)
def test_wrong_arguments(trib: Trib, words: str, message: str) -> None:
    status, _, error = trib("schedule", *words.split())
    assert status == 2 and message in error


def test_bytes_that_are_no_text(trib: Trib, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"schedule \xff\xfe\n")))
    status, out, error = trib("schedule", "--verify", "-")
    assert (status, out) == (2, "") and error.startswith("trib schedule: -: line 1: ")


def test_json_and_plot(trib: Trib, tmp_path: Path) -> None:
    data, picture = tmp_path / "out" / "s.json", tmp_path / "out" / "s.svg"
    words = ["schedule", "reduce_scatter", "--algorithm", "tree4", "-n", 6]
    assert trib(*words, "--json", data, "--plot", picture)[0] == 0
    document = json.loads(data.read_text())
    assert (document["collective"], document["ranks"]) == ("reduce_scatter", 6)
    assert len(document["schedules"]) == 6 and document["summary"]["depth"] > 0
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("algorithm", "ranks", "steps", "volume"),
    [  # as docs/algorithms.md says
        ("one_shot", 5, 1, 4),
        ("two_shot", 4, 1, 1.5),
        ("ring", 4, 3, 1.5),
        ("recursive_doubling", 8, 3, 3),
        ("rabenseifner", 8, 6, 1.75),
        ("binomial", 8, 6, 3),
        ("tree4", 16, 4, 6),
    ],
)
def test_steps_and_bytes_of_allreduce(
    algorithm: str, ranks: int, steps: int, volume: float
) -> None:
    document = ask(f"allreduce --algorithm {algorithm} -n {ranks} --direct")
    numbers = schedule.summary(document, schedule.flow(document))
    assert (numbers.depth, numbers.most_moved) == (steps, volume)


@pytest.mark.parametrize("algorithm", ["two_shot", "returning_two_shot", "ring"])
def test_what_moves_through_scratch_is_counted_once(algorithm: str) -> None:
    document = ask(f"allreduce --algorithm {algorithm} -n 4")
    numbers = schedule.summary(document, schedule.flow(document))
    assert (numbers.moved, numbers.most_moved) == (6, 1.5)


def test_arrows_come_from_where_data_were_made() -> None:
    found = schedule.flow(ask("allreduce --algorithm two_shot -n 2"))
    assert not found.stuck
    for node in found.nodes:
        for read in node.reads:
            if read.node is not None:
                source = found.nodes[read.node]
                assert source.rank == read.rank and source.column < node.column
    last = [node for node in found.nodes if node.column == 3]
    assert [(node.rank, node.verb, node.chunk) for node in last] == [(0, "copy", 1), (1, "copy", 0)]
    assert [found.nodes[node.reads[0].node or 0].verb for node in last] == ["reduce", "reduce"]


def test_data_written_to_peers_are_read_there() -> None:
    found = schedule.flow(ask("broadcast --algorithm two_shot -n 4 --direct"))
    assert any(node.lands for node in found.nodes)
    assert all(signal.giver != signal.taker for signal in found.signals)


def test_who_waits_for_ever() -> None:
    document = ask("allreduce --algorithm ring -n 3 --direct")
    del document["schedules"][1]["steps"][0]  # its first signal
    assert sorted(schedule.flow(document).stuck) == [2]  # which takes each for the one before


def test_words_have_their_plurals() -> None:
    document = ask("allreduce --algorithm two_shot -n 2 --direct")
    assert in_words(document, schedule.summary(document, schedule.flow(document))) == [
        "direct, 2 chunks",
        "longest chain of copies and reductions: 1; up to 5 steps per rank; in all 0 copies, 2 reductions, 4 signals",
        "bytes between ranks: 2 n in all, up to 1 n into one rank (n: the vector)",
    ]
