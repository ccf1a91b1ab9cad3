# SPDX-License-Identifier: BSD-3-Clause
"""Run an MPI program with Tributary under it.

The program is not changed: `trib run` finds out which MPI it is linked with, starts it with that MPI's mpiexec, and
preloads Tributary's library for it. The exit status is the program's; where a rank is killed by a signal, it is what the
launcher makes of it (of SIGKILL, MPICH's makes 9, Open MPI's 137).

examples:
  trib run -n 4 -- ./simulation input.dat
  trib run -n 4 --stats -- python train.py        who served which calls, at the end
  trib run -n 4 --mpi openmpi -- ./script.sh      where the MPI cannot be told from the file
  trib run --launcher srun -- ./simulation        inside a Slurm allocation
  TRIB_STATS=1 LD_PRELOAD=$(trib preload --mpi mpich) mpiexec -n 4 ./simulation
"""

import argparse
import os
import shlex
import sys

from tributary import mpi, tree
from tributary.cli import arguments
from tributary.errors import UserError

HELP = "run an MPI program with Tributary under it"


def _option(variable: str) -> str:
    return "--" + variable.removeprefix("TRIB_").lower().replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the job's options and one per setting."""
    parser.usage = (
        "trib run [-n N] [--mpi NAME] [--launcher NAME] [--stats] [SETTING]... -- CMD [ARG]..."
    )
    arguments.add_job_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command line that would be run, and stop"
    )
    group = parser.add_argument_group("settings (each also as the variable)")
    if tree.program("trib-info"):
        for setting in tree.known_settings():
            variable = setting["variable"]
            text = f"{setting['help']} ({variable}; default: {setting['default']})".replace(
                "%", "%%"
            )
            if setting["accepted"] == "0 or 1":
                group.add_argument(
                    _option(variable),
                    dest=variable,
                    action=argparse.BooleanOptionalAction,
                    default=None,
                    help=text,
                )
            else:
                group.add_argument(
                    _option(variable),
                    dest=variable,
                    metavar="VALUE",
                    help=f"{text}; {setting['accepted']}",
                )
    parser.add_argument(
        "program", metavar="CMD", nargs=argparse.REMAINDER, help="the program and its arguments"
    )


def settings_of(parsed: argparse.Namespace) -> dict[str, str]:
    """Variables for the ranks: those of the environment, and over them the options."""
    settings = tree.environment_settings()
    typed = {}  # by variable
    for setting in tree.known_settings():
        name = setting["variable"]
        value = getattr(parsed, name, None)
        if value is not None:
            settings[name] = str(int(value)) if isinstance(value, bool) else value
            typed[name] = _option(name) if isinstance(value, bool) else f"{_option(name)} {value}"
    try:
        tree.check_settings(settings)
    except UserError as error:  # it names variables
        options = [text for name, text in typed.items() if f"{name}=" in str(error)]
        raise UserError(f"{', '.join(options)}: {error}" if options else str(error)) from None
    return settings


def run(parsed: argparse.Namespace) -> int:
    """Replace this process by the launcher."""
    if not parsed.program:
        raise UserError("CMD is missing: trib run [OPTION]... -- CMD [ARG]...")
    arguments.take_variables(parsed)
    inside = mpi.job_variables()
    if inside and not parsed.dry_run:
        raise UserError(
            f"this is a rank of a job already ({inside[0]} is set), and would start a job of its own. "
            "Put LD_PRELOAD=$(trib preload --mpi NAME) before the program instead, or start the job with trib run"
        )
    program = mpi.find_program(parsed.program[0])
    plan = mpi.plan(
        program,
        parsed.ranks,
        arguments.check_mpi(parsed.mpi),
        parsed.launcher,
        settings_of(parsed),
    )
    linked = plan.linked
    if linked.abi is None and not (linked.is_python or parsed.mpi or parsed.launcher):
        print(
            f"trib run: {program}: {linked.why}; taken for one of {mpi.TITLES[plan.vendor]}, whose mpiexec is the first on PATH "
            "(--mpi NAME: another one)",
            file=sys.stderr,
        )
    if parsed.ranks:
        plan.rank_environment["TRIB_N"] = str(parsed.ranks)
    argv = plan.argv([str(program), *parsed.program[1:]])
    if parsed.dry_run:
        # A name that is quoted is no assignment.
        variables = plan.launcher_environment()
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        print(*words, shlex.join(argv))
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(argv[0], argv, plan.full_environment())
