# SPDX-License-Identifier: BSD-3-Clause
"""Print the path of the preload library, for job scripts.

NAME says which MPI the programs are linked with: mpich (and all that share its ABI, such as Intel MPI), openmpi, or abi
(the MPI-5 standard ABI, libmpi_abi.so). Without it: that of the mpiexec on PATH. Where TRIB_SHARED_HEAP=1 is set, the
library that large blocks of malloc come from is printed as well, behind a colon.

examples:
  LD_PRELOAD=$(trib preload --mpi openmpi) mpiexec -n 4 ./simulation
  export LD_PRELOAD=$(trib preload --mpi mpich); srun ./simulation
"""

import argparse
import os

from tributary import mpi, tree
from tributary.cli import arguments
from tributary.errors import UserError

HELP = "print the path of the preload library"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --mpi."""
    arguments.add_mpi_argument(parser)


def run(parsed: argparse.Namespace) -> int:
    """Print the path."""
    name = arguments.check_mpi(parsed.mpi)
    if name is None:
        built = [abi for abi in tree.ABIS if tree.preload_library(abi)]
        if mpi.on_path():
            name = mpi.on_path()[0].vendor
        elif len(built) == 1:
            name = built[0]
        else:
            raise UserError(
                f"no mpiexec is on PATH to go by; say which MPI: --mpi NAME, with NAME one of {', '.join(mpi.NAMES)}"
            )
    if tree.program("trib-info"):  # else nobody knows the settings
        tree.check_settings({})
    print(tree.preloads(tree.ABI_OF[name], os.environ))
    return 0
