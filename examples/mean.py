# SPDX-License-Identifier: BSD-3-Clause
"""The mean of a vector per rank, with mpi4py. It knows nothing of Tributary."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
mine = np.full(1000, float(comm.rank))
total = np.empty_like(mine)
comm.Allreduce(mine, total, op=MPI.SUM)
if comm.rank == 0:
    print(f"mean of 0 to {comm.size - 1}: {total[0] / comm.size:g}")
