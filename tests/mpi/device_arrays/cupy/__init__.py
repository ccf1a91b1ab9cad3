# SPDX-License-Identifier: BSD-3-Clause
"""Just enough of CuPy for mpi4py's own tests: arrays in memory of the device that TEST_DEVICE names.

Its device may be protected_driver.cpp's, where there is no GPU, or a real driver.
"""

from __future__ import annotations

import ctypes
import os
import types
from collections.abc import Iterator
from typing import Any

import numpy

__version__ = "13.0"

_driver = ctypes.CDLL(os.environ.get("TEST_DEVICE", "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)


def _call(name: str, *arguments: Any) -> None:
    if error := _driver[name](*arguments):
        raise RuntimeError(f"{name}: {error}")


def _make_context() -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), 0)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxSetCurrent", context)


_make_context()


class _Memory:
    def __init__(self, size: int) -> None:
        address = ctypes.c_ulonglong()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        self.address = int(address.value)

    def __del__(self) -> None:
        _driver.cuMemFree_v2(ctypes.c_ulonglong(self.address))


class ndarray:  # noqa: N801
    """A contiguous array."""

    def __init__(self, values: numpy.ndarray) -> None:
        self.dtype, self.shape = values.dtype, values.shape
        self._memory = _Memory(values.nbytes)
        self._put(values)

    size = property(lambda self: int(numpy.prod(self.shape)))
    itemsize = property(lambda self: self.dtype.itemsize)
    flags = property(lambda _: types.SimpleNamespace(c_contiguous=True))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self._memory.address if self.size else 0, False)
        return {"version": 3, "shape": self.shape, "typestr": self.dtype.str, "data": data}

    @property
    def ctypes(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(data=self._memory.address)

    device = types.SimpleNamespace(id=0)

    def toDlpack(self) -> Any:  # noqa: N802
        """Return a capsule, made by what is beside mpi4py's tests."""
        import dlpackimpl

        managed = dlpackimpl.make_dl_managed_tensor(self)
        managed.dl_tensor.device = dlpackimpl.DLDevice(
            dlpackimpl.DLDeviceType.kDLCUDA, self.device.id
        )
        return dlpackimpl.make_py_capsule(managed)

    def get(self) -> numpy.ndarray:
        """Return a copy in host memory."""
        values = numpy.empty(self.shape, self.dtype)
        self._copy(values.ctypes.data, self._memory.address)
        return values

    def _put(self, values: numpy.ndarray) -> None:
        values = numpy.ascontiguousarray(values)
        self._copy(self._memory.address, values.ctypes.data)

    def _copy(self, to: int, source: int) -> None:
        if size := self.size * self.itemsize:
            _call("cuMemcpy", *map(ctypes.c_ulonglong, (to, source)), ctypes.c_size_t(size))

    def fill(self, value: complex) -> None:
        self[...] = value

    def ravel(self) -> ndarray:
        flat = ndarray.__new__(ndarray)
        flat.dtype, flat.shape, flat._memory = self.dtype, (self.size,), self._memory
        return flat

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __getitem__(self, index: Any) -> Any:
        return self.get()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        values = self.get()
        values[index] = (
            value.get() if isinstance(value, ndarray) else numpy.asarray(value)
        ).astype(self.dtype)
        self._put(values)


def zeros(shape: Any, dtype: str = "d") -> ndarray:
    return ndarray(numpy.zeros(shape, dtype))


def asarray(values: Any, dtype: str) -> ndarray:
    return ndarray(numpy.asarray(values).astype(dtype))


def array(values: Any, dtype: str) -> ndarray:
    return asarray(values, dtype)


cuda = types.SimpleNamespace(
    get_current_stream=lambda: types.SimpleNamespace(synchronize=lambda: None),
    runtime=types.SimpleNamespace(is_hip=False),
)
