# SPDX-License-Identifier: BSD-3-Clause
"""How the subcommands print: consoles and tables that are readable in a terminal, a pipe and a log."""

from typing import NoReturn

from rich import box
from rich.console import Console
from rich.table import Table


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Leave it to main, as for all else that is printed; Console's own would exit with 1."""
        self.quiet = True
        raise BrokenPipeError


def console() -> Console:
    """Standard output. Where it is no terminal, its width is not known: wide enough for every table here."""
    made = _Console(highlight=False)
    return made if made.is_terminal else _Console(highlight=False, width=120)


def table(title: str | None = None) -> Table:
    """A table with one rule below its head."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
