# SPDX-License-Identifier: BSD-3-Clause
"""The `trib` command. Each subcommand is a module of this package with NAME, HELP, `add_arguments` and `run`.

To add one: write its file and name it in `_COMMANDS`.
"""

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from tributary import __version__, tree
from tributary.errors import UserError

# Errors of writing to what is open.
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

_COMMANDS = ("run", "preload", "bench", "tune", "info", "schedule", "demo")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In words that say what is accepted, where argparse's do not."""
        super().error(message.replace("ignored explicit argument", "accepted: it alone, without"))


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="trib",
        description="Fast reductions under any MPI, for programs as they are.",
        epilog="`trib COMMAND --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=f"tributary {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in _COMMANDS:
        module = importlib.import_module(f"tributary.cli.{name}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # The others' arguments are not needed, and may cost time to find out.
        if chosen == name:
            module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def _is_own(option: str) -> bool:
    """Whether `trib` itself has it; options may be cut short."""
    return option == "-h" or (
        len(option) > 2 and any(own.startswith(option) for own in ("--help", "--version"))
    )


def _stop(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(128 + number)


@contextmanager
def _signals_that_interrupt() -> Iterator[None]:
    """Have SIGTERM and SIGHUP do what Ctrl-C does: a job that was started is ended, and what it measured is kept."""
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL  # nohup ignores one
    ]
    for number in numbers:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: list[str], chosen: str | None) -> int:
    # What stands behind `--` belongs to the program that is run. A program that stands before it has `--` itself.
    behind: list[str] = []
    if chosen == "run" and "--" in arguments:
        at = arguments.index("--")
        arguments, behind = arguments[:at], arguments[at:]
    if arguments and (stray := arguments[0]).startswith("-") and not _is_own(stray):
        parser = _parser(stray)
        name = stray.lstrip("-")
        hint = f"; the command is written {name}" if name in _COMMANDS else ""
        parser.error(f"unrecognized arguments: {stray}{hint}")
    parser = _parser(chosen)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:  # said by the subcommand, whose usage helps
        if chosen == "run" and not tree.program("trib-info"):
            tree.info()  # says that nothing is built: settings are options only where it is
        is_behind = unknown[0] in arguments[arguments.index(chosen or "") :]
        speaker = parsed.parser if is_behind else parser
        hint = (
            "; options of a launcher: LD_PRELOAD=$(trib preload --mpi NAME) mpiexec OPTION..., or the variables that it reads"
            if chosen == "run" and is_behind
            else ""
        )
        speaker.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if chosen == "run":
        parsed.program = [*parsed.program, *behind] if parsed.program else behind[1:]
    with _signals_that_interrupt():
        status = int(parsed.run(parsed))
    sys.stdout.flush()  # so that a broken pipe shows here
    return status


def _drop_output() -> None:
    """What is still to be written goes nowhere, so that the interpreter does not complain at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    name = f"trib {chosen}" if chosen in _COMMANDS else "trib"
    for stream in ("stdout", "stderr"):  # closed by whoever started this
        if getattr(sys, stream) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: its own
            os.set_inheritable(nowhere, True)
            setattr(sys, stream, os.fdopen(nowhere, "w"))
    try:
        return _run(arguments, chosen)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        return int(stop.args[0]) if stop.args else 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has left
        _drop_output()
        return 141  # as of a process that SIGPIPE ends
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        if error.filename is None and error.errno in _OF_WRITING:  # other files are named
            text = f"standard output: {error.strerror}"
            _drop_output()
        elif error.filename is None and error.errno == errno.ENOENT:
            text = f"the current folder: {error.strerror}"
        print(f"{name}: {text}", file=sys.stderr)
        return 2
