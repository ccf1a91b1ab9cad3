# SPDX-License-Identifier: BSD-3-Clause
"""Print the schedule of a collective, step by step, and draw it; or verify one that was written by hand.

What is printed is a text that can be changed and read back with --verify; docs/adding.md explains its lines. Without
--direct it is the lowered form, which the host and GPUs run: only scratch is shared. With --direct it is the schedule as
the algorithm is written. The picture has ranks as lanes. Steps stand as far to the left as what they need permits, and
arrows show where their data come from.

examples:
  trib schedule allreduce -n 4
  trib schedule allreduce --algorithm ring -n 8 --direct --plot out/ring.png
  trib schedule reduce --algorithm tree4 -n 8 --domains 0,0,0,0,1,1,1,1 --direct --plot out/sockets.png
  trib schedule allreduce --algorithm recursive_doubling -n 8 --program --bytes 1K --rank 0
  trib schedule reduce --root 2 --bytes 64K -n 8 --rank 2
  trib schedule allreduce -n 3 --algorithm two_shot > mine.txt
  trib schedule --verify mine.txt --plot out/mine.png
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tributary import schedule, schedule_plot
from tributary.cli import arguments, output
from tributary.errors import UserError

HELP = "print, draw and verify schedules"

_MAX_DRAWN = 32
_COLOURS = {
    r"\bcopy\b": "cyan",
    r"\breduce\b": "yellow",
    r"^ .*\b(?:signal|wait)\b.*$": "bright_black",
    r"^rank \d+$": "bold",
    r"^#.*$": "green",
}


def _size(text: str) -> int:
    return arguments.read_bytes(text, "--bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which schedule, and the forms of output."""
    add = parser.add_argument
    add(
        "collective",
        metavar="COLLECTIVE",
        nargs="?",
        help="allreduce, reduce, reduce_scatter, reduce_scatter_block, allgather or broadcast",
    )
    add(
        "--algorithm",
        metavar="NAME",
        help="by which algorithm (default: auto, the one that a call of --bytes gets)",
    )
    add(
        "--bytes",
        metavar="SIZE",
        type=_size,
        help="of the vector, for auto and --program (default: 4)",
    )
    add(
        "-n",
        "--ranks",
        metavar="N",
        dest="ranks",
        type=arguments.positive,
        help="number of ranks (default: 4)",
    )
    add(
        "--root",
        metavar="RANK",
        type=arguments.number_from(0),
        help="root of reduce or broadcast (default: 0)",
    )
    add(
        "--domains",
        metavar="D,D,...",
        help="how ranks share sockets or caches: the domain of each rank, as 0,0,1,1; inner levels behind a slash",
    )
    add("--in-place", action="store_true", help="with --direct: for calls in place")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--direct", action="store_true", help="as the algorithm is written: peers' memory in reach"
    )
    forms.add_argument(
        "--attach", action="store_true", help="lowered, but peers' inputs are read directly"
    )
    forms.add_argument(
        "--program",
        action="store_true",
        help="the instructions that the host's processors run: the lowered steps, with their places in shared memory; "
        "and the shorter ones of calls of --bytes",
    )
    add(
        "--rank",
        metavar="R",
        type=arguments.number_from(0),
        help="print only this rank's steps",
    )
    add("--verify", metavar="FILE", help="read a schedule (-: standard input), and verify it")
    add("--json", metavar="FILE", type=Path, help="write it as JSON")
    add("--plot", metavar="FILE", type=Path, help="draw it (.png, .svg, .pdf)")


def _native(parsed: argparse.Namespace) -> list[str]:
    """The arguments for trib-schedule, which has the same ones."""
    words: list[str] = []
    for option in ("algorithm", "bytes", "ranks", "root", "domains"):
        if (value := getattr(parsed, option)) is not None:
            words += ["-n" if option == "ranks" else f"--{option}", str(value)]
    for form in ("in_place", "direct", "attach", "program"):
        words += [f"--{form.replace('_', '-')}"] if getattr(parsed, form) else []
    if parsed.verify:
        if parsed.collective:
            raise UserError("--verify FILE: the file says which COLLECTIVE; give one of the two")
        if words:
            raise UserError(f"{words[0]}: with a COLLECTIVE only, not with --verify FILE")
        return ["--verify", parsed.verify]
    if not parsed.collective:
        raise UserError("COLLECTIVE is missing; or --verify FILE (trib schedule --help)")
    return [parsed.collective, *words]


def _number(value: float) -> str:
    return f"{value:.4g}"


def _title(document: dict[str, Any]) -> str:
    text = f"{document['algorithm']} {document['collective']}".strip()
    text += f", {arguments.count_text(document['ranks'], 'rank')}" + (
        ", in place" if document["in_place"] else ""
    )
    levels = "/".join(",".join(map(str, level)) for level in document.get("levels", ()))
    return text + (f", domains {levels}" if levels else "")


def in_words(document: dict[str, Any], numbers: schedule.Summary) -> list[str]:
    """What the summary says, line by line."""
    lowered = document["form"] == "lowered"

    count = arguments.count_text
    form = [document["form"], count(document["chunks"], "chunk")]
    if lowered:
        slots = f"up to {count(numbers.slots, 'slot')} per rank ({_number(numbers.payload)} n)"
        form += [count(numbers.stages, "stage"), slots]
    return [
        ", ".join(form),
        f"longest chain of copies and reductions: {numbers.depth}; up to {count(numbers.steps, 'step')} per rank; "
        f"in all {numbers.copies} {'copy' if numbers.copies == 1 else 'copies'}, {count(numbers.reductions, 'reduction')}, {count(numbers.signals, 'signal')}",
        f"bytes between ranks: {_number(numbers.moved)} n in all, up to {_number(numbers.most_moved)} n into one rank "
        "(n: the vector)",
    ]


def _section(text: str, rank: int) -> str:
    return "rank " + text.split("\nrank ")[rank + 1].rstrip("\n") + "\n"


def _print(text: str, console: Console) -> None:
    for line in text.splitlines():
        shown = Text(line)
        for pattern, colour in _COLOURS.items():
            shown.highlight_regex(re.compile(pattern), colour)
        console.print(shown, soft_wrap=True)


def run(parsed: argparse.Namespace) -> int:
    """Print, write, draw; 1 if a schedule is wrong."""
    if parsed.verify == "":
        raise UserError("--verify=: accepted: a file, or - for standard input")
    arguments.check_results(parsed, parsed.verify)
    if parsed.verify == "-" and sys.stdin is None:
        raise UserError("--verify -: standard input is closed")
    text = sys.stdin.buffer.read() if parsed.verify == "-" else None
    document = schedule.ask(_native(parsed), text)
    ranks, fault = document["ranks"], document.get("fault", "")
    if parsed.plot and ranks > _MAX_DRAWN:
        raise UserError(f"--plot: {ranks} ranks; accepted: up to {_MAX_DRAWN}")
    if parsed.rank is not None and parsed.rank >= ranks:
        raise UserError(f"--rank: {parsed.rank} is not among the ranks 0 to {ranks - 1}")
    found = schedule.flow(document)
    numbers = schedule.summary(document, found)
    lines = in_words(document, numbers)
    console = output.console()
    _print("\n".join(f"# {line}" for line in [_title(document), *lines]), console)
    if parsed.program:
        shown = document["programs"]
        _print("\n" + "\n".join(shown if parsed.rank is None else [shown[parsed.rank]]), console)
    elif parsed.rank is not None:
        _print("\n" + _section(document["text"], parsed.rank), console)
    elif not parsed.verify:
        _print("\n" + document["text"], console)
    if parsed.json:
        parsed.json.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(
            parsed.json, json.dumps({**document, "summary": vars(numbers)}, indent=1) + "\n"
        )
        output.say_file(console, "# as JSON", parsed.json)
    if parsed.plot:
        schedule_plot.draw(document, found, parsed.plot, _title(document), lines, fault)
        output.say_file(console, "# picture", parsed.plot)
    if parsed.verify and not fault:
        _print("# verified: right values in any order of events, no race, no deadlock", console)
    if fault:
        print(f"trib schedule: {parsed.verify}: wrong: {fault}", file=sys.stderr)
    return 1 if fault else 0
