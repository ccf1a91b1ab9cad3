# SPDX-License-Identifier: BSD-3-Clause
"""How far long work is, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def steps(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, or lines where that is no terminal: call it with a text for each step done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(title, total=total)

        def step(text: str) -> None:
            progress.update(task, advance=1, description=text)
            if not console.is_terminal:
                print(text, file=sys.stderr, flush=True)

        yield step
