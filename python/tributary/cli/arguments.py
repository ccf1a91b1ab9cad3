# SPDX-License-Identifier: BSD-3-Clause
"""Arguments that several subcommands share, and how sizes are read and written."""

import argparse
import errno
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from tributary import mpi, tree
from tributary.errors import UserError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# What fits into an int, as the native programs keep numbers; and bytes that no machine here has.
_MOST = (1 << 31) - 1
_MOST_BYTES = 1 << 50


def read_bytes(text: str, option: str = "--sizes") -> int:
    """A number of bytes such as 4, 64K, 16M, 1G."""
    found = re.fullmatch(r"([0-9]{1,20})([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    size = int(found.group(1)) * _UNITS[found.group(2).upper()] if found else 0
    if not 0 < size <= _MOST_BYTES:
        raise UserError(
            f"{option}: {text!r} is no size; accepted: bytes, as 4, 64K, 16M, 1G, up to {_MOST_BYTES >> 30}G"
        )
    return size


def read_sizes(text: str, option: str = "--sizes") -> list[int]:
    """Sizes as FIRST:LAST (doubling), FIRST:LAST:FACTOR, or a list A,B,C of any of these."""
    sizes: list[int] = []
    for part in text.split(","):
        ends = part.split(":")
        if len(ends) == 1:
            sizes.append(read_bytes(part, option))
            continue
        if len(ends) > 3 or (len(ends) == 3 and (_whole(ends[2]) or 0) < 2):
            raise UserError(
                f"{option}: {part!r} is no range; accepted: FIRST:LAST, FIRST:LAST:FACTOR, as 4:16M, 4:1G:4"
            )
        size, last = read_bytes(ends[0], option), read_bytes(ends[1], option)
        if size > last:
            raise UserError(f"{option}: {part!r} ends below its start")
        factor = int(ends[2]) if len(ends) == 3 else 2
        while size <= last:
            sizes.append(size)
            size *= factor
    return sorted(set(sizes))


def bytes_text(count: float) -> str:
    """Such as 4, 64 Ki, 1.5 Mi (bytes)."""
    for unit in ("", "Ki", "Mi", "Gi"):
        if count < 1024 or unit == "Gi":
            return f"{count:.4g} {unit}".rstrip()
        count /= 1024
    return ""


def size_text(count: float) -> str:
    """Such as 4 B, 64 KiB: for sentences; columns of tables have `bytes_text`."""
    text = bytes_text(count)
    return f"{text}B" if " " in text else f"{text} B"


def count_text(number: int, noun: str) -> str:
    """Such as 1 rank, 2 ranks."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def time_text(microseconds: float) -> str:
    """Three significant digits or so, of microseconds."""
    if microseconds < 10:
        return f"{microseconds:.2f}"
    return f"{microseconds:.1f}" if microseconds < 1000 else f"{microseconds:,.0f}"


def _whole(text: str) -> int | None:
    """A number from 1 to what fits into an int; None: it is none."""
    value = int(text) if re.fullmatch("[0-9]{1,20}", text) else 0
    return value if 1 <= value <= _MOST else None


def number_from(least: int, most: int = _MOST) -> Callable[[str], int]:
    """For argparse: a number between these."""

    def read(text: str) -> int:
        if not (re.fullmatch("[0-9]{1,20}", text) and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(
                f"{text!r} is no number of {least} or more, up to {most}"
            )
        return int(text)

    return read


positive = number_from(1)


def positive_number(text: str) -> float:
    """For argparse: a number above 0, as 25 or 0.5."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def check_output(path: Path | None, option: str) -> None:
    """Make the folder of a file and see that the file can be written: before anything is measured."""
    if path is None:
        return
    if path == Path("-"):
        raise UserError(f"{option}: -: accepted: a file, as /dev/stdout is one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file() and not path.is_dir():
            return  # a pipe or a device: to open it is to use it
        if path.exists():
            with path.open("ab"):
                pass
        else:  # not by making it: somebody else may, meanwhile
            target = Path(os.path.realpath(path))
            if len(os.fsencode(target.name)) > 255:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            with tempfile.TemporaryFile(dir=target.parent):
                pass
    except OSError as error:
        raise UserError(
            f"{option}: {path} cannot be written: {error.strerror}; accepted: a file in a folder that can be written to"
        ) from None


def check_picture(path: Path | None, option: str = "--plot") -> None:
    """As check_output, and the suffix."""
    if path and path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{option}: {path}: accepted suffixes: .png, .svg, .pdf")
    check_output(path, option)


def check_results(parsed: argparse.Namespace, source: str | None = None) -> None:
    """The files of --json and --plot can be written, and neither is the other one nor the `source`."""
    given = {"--verify": source, "--json": parsed.json, "--plot": parsed.plot}
    options: dict[Path, str] = {}
    for option, name in given.items():
        if name is None:
            continue
        try:
            path = Path(name).resolve()
        except OSError as error:  # of a folder that is gone
            raise UserError(
                f"{option}: {name}: the current folder: {error.strerror}; accepted: an absolute path"
            ) from None
        if path in options and not path.is_char_device():
            raise UserError(f"{option}: {name}: this file is that of {options[path]} already")
        options[path] = option
    check_picture(parsed.plot)
    check_output(parsed.json, "--json")


def may_be_elsewhere(launcher: str | None) -> bool:
    """Whether a batch system starts the ranks: these may be on other machines."""
    in_allocation = any(name in os.environ for name in mpi.ALLOCATIONS)
    return in_allocation or (launcher is not None and Path(launcher).name == "srun")


def check_gpus(launcher: str | None) -> None:
    """See that there is one, before a job is started for it."""
    if may_be_elsewhere(launcher):
        return
    gpus = tree.info(with_gpus=True)["gpus"]
    if gpus["missing"] and "driver" in gpus:  # else there is no backend to ask
        raise UserError(f"--memory cuda: there is no GPU here: {gpus['missing']}")


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    value = _whole(text)
    if value is None:
        raise UserError(f"{variable}={text}: accepted: a number of 1 or more, up to {_MOST}")
    return value


def take_variables(parsed: argparse.Namespace) -> None:
    """What TRIB_N and TRIB_LAUNCHER say, where the options are not given. When a command runs: wrong ones are no obstacle
    to --help.
    """
    if parsed.ranks is None:
        parsed.ranks = _number("TRIB_N")
    origin = "--launcher"
    if parsed.launcher is None:
        parsed.launcher, origin = os.environ.get("TRIB_LAUNCHER"), "TRIB_LAUNCHER"
    if parsed.launcher == "":
        raise UserError(f"{origin}=: accepted: mpiexec, srun, or the path of an mpiexec")


_MPIS = "mpich, intel, openmpi or abi"


def add_job_arguments(parser: argparse.ArgumentParser, mpis: str = _MPIS) -> None:
    """-n, --mpi, --launcher: the same wherever a job is started."""
    parser.add_argument(
        "-n",
        "-np",
        "--ranks",
        metavar="N",
        dest="ranks",
        type=positive,
        help="number of ranks (TRIB_N; default: as many as cores, or as a container's limit leaves)",
    )
    add_mpi_argument(parser, mpis)
    parser.add_argument(
        "--launcher",
        metavar="NAME",
        help="mpiexec, srun, or the path of an mpiexec (TRIB_LAUNCHER; default: the mpiexec of the program's MPI)",
    )


def add_mpi_argument(parser: argparse.ArgumentParser, mpis: str = _MPIS) -> None:
    """--mpi, of which these are accepted."""
    parser.add_argument(
        "--mpi",
        metavar="NAME",
        default=os.environ.get("TRIB_MPI"),
        help=f"{mpis} (TRIB_MPI)",
    )


def check_mpi(name: str | None) -> str | None:
    """The value of --mpi or TRIB_MPI, checked."""
    return None if name is None else mpi.check_name(name)
