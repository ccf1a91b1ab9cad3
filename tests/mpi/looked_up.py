# SPDX-License-Identifier: BSD-3-Clause
"""looked_up.py LIBMPI: an MPI program that is not linked with it, and finds its functions by name, as MPI.jl and Numba do."""

from __future__ import annotations

import ctypes
import sys


def handles(mpi: ctypes.CDLL, path: str) -> tuple[ctypes.c_void_p, ...]:
    """MPI_COMM_WORLD, MPI_INT, MPI_SUM and MPI_STATUS_IGNORE, as this family's header has them."""
    if "libmpi_abi" in path:
        values = [0x101, 0x209, 0x21, 0]
    elif hasattr(mpi, "ompi_mpi_comm_world"):
        names = ("ompi_mpi_comm_world", "ompi_mpi_int", "ompi_mpi_op_sum")
        values = [ctypes.addressof(ctypes.c_char.in_dll(mpi, name)) for name in names] + [0]
    else:
        values = [0x44000000, 0x4C000405, 0x58000003, 1]
    return tuple(ctypes.c_void_p(value) for value in values)


def main() -> int:
    """Check a blocking and a nonblocking sum, and that both lead through what is preloaded if anything is."""
    mpi = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_LOCAL)
    world, integer, total, ignore = handles(mpi, sys.argv[1])
    assert mpi.MPI_Init(None, None) == 0
    rank, size = ctypes.c_int(), ctypes.c_int()
    mpi.MPI_Comm_rank(world, ctypes.byref(rank))
    mpi.MPI_Comm_size(world, ctypes.byref(size))
    count = 1000
    mine = (ctypes.c_int * count)(*range(rank.value, rank.value + count))
    expected = [size.value * i + size.value * (size.value - 1) // 2 for i in range(count)]
    for _ in range(3):
        result = (ctypes.c_int * count)()
        assert mpi.MPI_Allreduce(mine, result, count, integer, total, world) == 0
        assert list(result) == expected
        result = (ctypes.c_int * count)()
        request = ctypes.c_void_p()
        begun = mpi.MPI_Iallreduce(
            mine, result, count, integer, total, world, ctypes.byref(request)
        )
        assert begun == 0
        assert mpi.MPI_Wait(ctypes.byref(request), ignore) == 0
        assert list(result) == expected
    # What is not there is not found, and leaves its message.
    assert not hasattr(mpi, "MPI_Allreduce_of_tomorrow")
    assert mpi.MPI_Finalize() == 0
    if rank.value == 0:
        print("sums checked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
