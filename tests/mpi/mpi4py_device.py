# SPDX-License-Identifier: BSD-3-Clause
"""Run mpi4py's own tests with arrays on the device that TEST_DEVICE names.

    mpi4py_device.py MAIN [arguments of MAIN...]

MAIN is main.py of mpi4py's tests. Its arrays of CuPy are device_arrays/cupy's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

main = Path(sys.argv[1])
sys.path[:0] = [str(Path(__file__).parent / "device_arrays"), str(main.parent)]
sys.argv[:2] = [str(main), "--cupy"]

import cupy  # noqa: E402

assert Path(cupy.__file__).is_relative_to(Path(__file__).parent), cupy.__file__

import arrayimpl  # noqa: E402
from mpi4py import MPI  # noqa: E402

# Arrays in host memory are what everybody tests; a type of each size and kind is enough.
arrayimpl.ArrayBackends[:] = [each for each in arrayimpl.ArrayBackends if "cupy" in each.backend]
for backend in arrayimpl.ArrayBackends:
    backend.TypeMap = {code: mpi for code, mpi in backend.TypeMap.items() if code in "?bilfdD"}

attach = MPI.Attach_buffer


def attach_on_host(buffer: Any) -> None:
    """Attach host memory: no MPI takes any other for its own messages."""
    array = getattr(buffer, "array", buffer)
    attach(array.get() if isinstance(array, cupy.ndarray) else buffer)


MPI.Attach_buffer = attach_on_host
runpy.run_path(str(main), run_name="__main__")
