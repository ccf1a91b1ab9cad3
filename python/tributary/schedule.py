# SPDX-License-Identifier: BSD-3-Clause
"""Schedules as trib-schedule gives them, and what follows: which step needs which, and how much moves between ranks."""

import json
import subprocess
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tributary import tree
from tributary.errors import UserError

# One chunk of one buffer: rank, buffer, slot, chunk.
_Cell = tuple[int, str, int, int]


def ask(arguments: Sequence[str], text: bytes | None = None) -> dict[str, Any]:
    """What trib-schedule says to these arguments, as a document; `text` is its standard input."""
    command = [str(tree.need_program("trib-schedule")), *arguments, "--format", "json"]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    # 1: the schedule is wrong, which the document says.
    if done.returncode not in (0, 1) or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().removeprefix("trib-schedule: ")
        raise UserError(said or f"{command[0]} failed")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@dataclass(frozen=True)
class Read:
    """Where a step's source comes from: the node that made it, or the input of `rank` (node None)."""

    rank: int
    node: int | None


@dataclass
class Node:
    """A copy or reduce step in its place: `column` is 1 + the longest chain of steps that it depends on."""

    rank: int
    index: int  #: of the step, on its rank
    verb: str
    chunk: int
    span: int
    column: int
    reads: list[Read]
    lands: list[int]  #: other ranks that it writes to
    is_result: bool  #: writes to its own rank's `out`


@dataclass(frozen=True)
class Signal:
    """From one rank to another; the nodes are the last of the giver's and the next of the taker's."""

    giver: int
    taker: int
    after: int | None
    before: int | None


@dataclass
class Flow:
    """A schedule as a graph."""

    nodes: list[Node] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    stuck: dict[int, int] = field(
        default_factory=dict
    )  #: ranks that wait for ever, and at which step

    @property
    def depth(self) -> int:
        """The longest chain of copies and reductions, each of which needs the one before."""
        return max((node.column for node in self.nodes), default=0)


def _cells(location: dict[str, Any]) -> list[_Cell]:
    first, span = location["chunk"], location["span"]
    slot = location.get("slot", -1)
    return [
        (location["rank"], location["buffer"], slot, chunk) for chunk in range(first, first + span)
    ]


class _Tracer:
    """Runs all ranks in an order that the signals permit, with a logical clock each."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.steps: list[list[dict[str, Any]]] = [row["steps"] for row in document["schedules"]]
        self.flow = Flow()
        self.clock = [0] * len(self.steps)
        self.last: list[int | None] = [None] * len(self.steps)
        self.writer: dict[_Cell, int] = {}
        # Direct: signals on their way, by giver and taker. Lowered: those of slots, which stay.
        self.sent: dict[tuple[int, int], deque[tuple[int, int | None]]] = defaultdict(deque)
        self.flags: dict[tuple[int, int], tuple[int, int | None]] = {}
        self.waits: list[list[tuple[int, int | None]]] = [[] for _ in self.steps]

    def run(self) -> Flow:
        at = [0] * len(self.steps)
        moved = True
        while moved:
            moved = False
            for rank, steps in enumerate(self.steps):
                while at[rank] < len(steps) and self._perform(rank, at[rank], steps[at[rank]]):
                    at[rank] += 1
                    moved = True
        for rank, steps in enumerate(self.steps):
            self._take(rank, None)
            if at[rank] < len(steps):
                self.flow.stuck[rank] = at[rank]
        return self.flow

    def _perform(self, rank: int, index: int, step: dict[str, Any]) -> bool:
        verb = step["verb"]
        if verb == "signal":
            given = (self.clock[rank], self.last[rank])
            if "slot" in step:
                self.flags[rank, step["slot"]] = given
            for peer in step.get("peers", ()):
                self.sent[rank, peer].append(given)
        elif verb == "wait":
            peer = step["peers"][0]
            if "slot" in step:
                taken = self.flags.get((peer, step["slot"]))
            else:
                taken = self.sent[peer, rank].popleft() if self.sent[peer, rank] else None
            if taken is None:
                return False
            self.clock[rank] = max(self.clock[rank], taken[0])
            self.waits[rank].append((peer, taken[1]))
        else:
            self._move(rank, index, step)
        return True

    def _move(self, rank: int, index: int, step: dict[str, Any]) -> None:
        column = max(self.clock[rank], 1)
        reads: list[Read] = []
        for source in step["from"]:
            for cell in _cells(source):
                read = Read(cell[0], self.writer.get(cell))
                if read.node is not None:
                    column = max(column, self.flow.nodes[read.node].column + 1)
                if read not in reads:
                    reads.append(read)
        number = len(self.flow.nodes)
        first = step["to"][0]
        self.flow.nodes.append(
            Node(
                rank,
                index,
                step["verb"],
                first["chunk"],
                first["span"],
                column,
                reads,
                lands=sorted({to["rank"] for to in step["to"]} - {rank}),
                is_result=any(to["buffer"] == "out" and to["rank"] == rank for to in step["to"]),
            )
        )
        for to in step["to"]:
            for cell in _cells(to):
                self.writer[cell] = number
        self.clock[rank] = column
        self._take(rank, number)
        self.last[rank] = number

    def _take(self, rank: int, before: int | None) -> None:
        for peer, after in self.waits[rank]:
            self.flow.signals.append(Signal(peer, rank, after, before))
        self.waits[rank].clear()


def flow(document: dict[str, Any]) -> Flow:
    """Which step needs which. The document must have all ranks."""
    return _Tracer(document).run()


@dataclass
class Summary:
    """In numbers. A volume counts vectors: 0.5 is half of the vector's bytes."""

    depth: int
    steps: int  #: of the rank that has most
    copies: int
    reductions: int
    signals: int
    moved: float  #: between ranks, in all
    most_moved: float  #: to the rank that takes in most
    stages: int
    slots: int  #: of the rank that has most
    payload: float  #: in the slots of the rank whose slots hold most


def summary(document: dict[str, Any], found: Flow) -> Summary:
    """Of a document with all ranks."""
    chunks = document["chunks"]
    taken_in = [0] * document["ranks"]

    def place_of(location: dict[str, Any]) -> tuple[int, int | None]:
        return location["rank"], location.get("slot")

    # What peers write into a rank's scratch moves when it is read, be it by that rank.
    from_peers = {
        place_of(to)
        for rank, row in enumerate(document["schedules"])
        for step in row["steps"]
        for to in step.get("to", ())
        if to["buffer"] == "scratch" and to["rank"] != rank
    }
    verbs: dict[str, int] = defaultdict(int)
    signals = 0
    for rank, row in enumerate(document["schedules"]):
        for step in row["steps"]:
            verbs[step["verb"]] += 1
            if step["verb"] == "signal":
                signals += len(step.get("peers", (0,)))
            for source in step.get("from", ()):
                if source["rank"] != rank or place_of(source) in from_peers:
                    taken_in[rank] += source["span"]
            for to in step.get("to", ()):
                if to["rank"] != rank and to["buffer"] != "scratch":
                    taken_in[to["rank"]] += to["span"]
    slots = [row.get("slots", []) for row in document["schedules"]]
    return Summary(
        depth=found.depth,
        steps=max(len(row["steps"]) for row in document["schedules"]),
        copies=verbs["copy"],
        reductions=verbs["reduce"],
        signals=signals,
        moved=sum(taken_in) / chunks,
        most_moved=max(taken_in) / chunks,
        stages=document["stages"],
        slots=max(map(len, slots)),
        payload=max(sum(slot["span"] for slot in of_rank) for of_rank in slots) / chunks,
    )
