# SPDX-License-Identifier: BSD-3-Clause
"""How the subcommands print: consoles and tables that are readable in a terminal, a pipe and a log."""

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Sentences and tables of text are folded there where no terminal says how wide it is.
_WIDTH = 120
# No table of figures is wider.
_UNLIMITED = 10000


class _Console(Console):
    """Brackets and colons in names of files are what they are: what has a style is a `Text`."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, width=width)

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to main, as for all else that is printed; Console's own would exit with 1."""
        self.quiet = True
        raise BrokenPipeError


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole, or leave the one before as it was. OSError names the file."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            path.write_text(text)
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _replace(target: Path, text: str) -> None:
    draft = target.with_name(f".{target.name[:200]}.{os.getpid()}")
    try:
        draft.write_text(text)
        if target.exists():
            shutil.copymode(target, draft)
        draft.replace(target)
    except PermissionError:  # of the folder, maybe
        draft.unlink(missing_ok=True)
        target.write_text(text)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def console() -> Console:
    """Standard output."""
    made = _Console()
    return made if made.is_terminal else _Console(_WIDTH)


def say_file(console: Console, what: str, path: object) -> None:
    """Such as "picture: out/x.png", in one line that can be copied."""
    console.print(f"{what}: {path}", soft_wrap=True)


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


@dataclass
class Column:
    """Of a table of figures."""

    heading: str
    cells: Sequence[str | Text]
    #: Where a terminal is too narrow, columns with the highest number are left out first; 0: never.
    spare: int = 0
    is_text: bool = False


def _made_of(
    columns: Sequence[Column], title: str | None, ends: Collection[int], console: Console
) -> Table:
    made = table(title)
    for column in columns:
        justify = "left" if column.is_text else "right"
        made.add_column(column.heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    rows = zip(*(column.cells for column in columns), strict=True)
    for number, cells in enumerate(rows):
        made.add_row(*cells, end_section=number in ends)
    options = console.options.update(max_width=_UNLIMITED)
    made.width = console.measure(made, options=options).maximum
    return made


def print_figures(
    console: Console,
    columns: Sequence[Column],
    title: str | None = None,
    ends: Collection[int] = (),
) -> None:
    """Print a table that is never cut: if need be it is wider than the terminal. `ends`: rows with a rule below."""
    made = _made_of(columns, title, ends, console)
    while console.is_terminal and (made.width or 0) > console.width:
        most_spare = max(columns, key=lambda column: column.spare)
        if not most_spare.spare:
            break
        columns = [column for column in columns if column is not most_spare]
        made = _made_of(columns, title, ends, console)
    console.print(made, crop=False)
