# SPDX-License-Identifier: BSD-3-Clause
"""How the subcommands print: consoles and tables that are readable in a terminal, a pipe and a log."""

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Standard output. Where it is no terminal, its width is not known: wide enough for every table here."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=120)


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
