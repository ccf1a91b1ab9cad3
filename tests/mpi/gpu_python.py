# SPDX-License-Identifier: BSD-3-Clause
"""mpi4py with CuPy arrays or PyTorch tensors: an MPI program on GPU buffers, as people write them.

Usage: gpu_python.py cupy|torch [CYCLES [huge]]; huge: arrays of 1 GiB, and of more than 2^31 elements. Prints "skipped: REASON" and exits with 77 where it cannot run.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any


def skip(reason: str) -> None:
    print(f"skipped: {reason}", flush=True)
    sys.exit(77)


# PyTorch then maps and unmaps physical memory under one range of addresses, which has no classic IPC handle.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
KIND = sys.argv[1] if len(sys.argv) > 1 else "cupy"
CYCLES = int(sys.argv[2]) if len(sys.argv) > 2 else 300
try:
    import numpy as np

    if KIND == "cupy":
        import cupy

        DEVICES = cupy.cuda.runtime.getDeviceCount()
    else:
        import torch

        DEVICES = torch.cuda.device_count()
except ImportError as error:
    skip(f"no {error.name}")
except Exception as error:
    skip(f"no GPU: {error}")
if DEVICES == 0:
    skip("no GPU")
try:
    from mpi4py import MPI
except ImportError as error:
    skip(f"no {error.name}")

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
if KIND == "cupy":
    cupy.cuda.Device(RANK % DEVICES).use()
else:
    torch.cuda.set_device(RANK % DEVICES)

FLOATS = ["float32", "float64", "complex64", "complex128"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
if KIND == "cupy":  # PyTorch can do little with the others
    INTEGERS += ["uint16", "uint32", "uint64"]
ARITHMETIC: dict[str, tuple[Any, Callable[..., Any]]] = {
    "sum": (MPI.SUM, np.add),
    "prod": (MPI.PROD, np.multiply),
}
EXTREMES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "max": (MPI.MAX, np.maximum),
    "min": (MPI.MIN, np.minimum),
}
LOGICAL: dict[str, tuple[Any, Callable[..., Any]]] = {
    "land": (MPI.LAND, np.logical_and),
    "lor": (MPI.LOR, np.logical_or),
    "lxor": (MPI.LXOR, np.logical_xor),
}
BITWISE: dict[str, tuple[Any, Callable[..., Any]]] = {
    "band": (MPI.BAND, np.bitwise_and),
    "bor": (MPI.BOR, np.bitwise_or),
    "bxor": (MPI.BXOR, np.bitwise_xor),
}
OPERATORS = ARITHMETIC | EXTREMES | LOGICAL | BITWISE


def operators_of(dtype: str) -> list[str]:
    """What MPI defines."""
    if dtype == "bool":
        return list(LOGICAL)
    if dtype in INTEGERS:
        return list(OPERATORS)
    return list(ARITHMETIC if dtype.startswith("complex") else ARITHMETIC | EXTREMES)


def values(rank: int, count: int, dtype: str, seed: int) -> Any:
    """Small whole numbers: every order of additions gives the same."""
    return ((np.arange(count) * 7 + rank * 13 + seed) % 4).astype(dtype)


def on_gpu(host: Any) -> Any:
    if KIND == "cupy":
        return cupy.asarray(host)
    return torch.from_numpy(host.copy()).cuda()


def on_host(buffer: Any) -> Any:
    if isinstance(buffer, np.ndarray):
        return buffer
    return cupy.asnumpy(buffer) if KIND == "cupy" else buffer.cpu().numpy()


def synchronize() -> None:
    if KIND == "cupy":
        cupy.cuda.get_current_stream().synchronize()
    else:
        torch.cuda.synchronize()


checked = 0


def expect(what: str, got: Any, expected: Any) -> None:
    global checked
    got = on_host(got)
    if not np.array_equal(got, expected):
        at = int(np.argmax(got != expected))
        print(
            f"{what}: rank {RANK} of {SIZE}, element {at}: {got[at]}, not {expected[at]}",
            flush=True,
        )
        COMM.Abort(1)
    checked += 1


def every_call(dtype: str, operator: str, count: int, offset: int, mixed: bool) -> None:
    op, two = OPERATORS[operator]
    what = f"{dtype} {operator} of {count}, offset {offset}, mixed {mixed}"
    place: Callable[[Any], Any] = (lambda host: host.copy()) if mixed and RANK % 2 else on_gpu
    every = [values(rank, count + offset, dtype, 1) for rank in range(SIZE)]
    total = functools.reduce(
        lambda a, b: two(a, b).astype(dtype), [part[offset:] for part in every]
    )

    send, receive = place(every[RANK])[offset:], place(np.zeros(count + offset, dtype))[offset:]
    synchronize()
    COMM.Allreduce(send, receive, op=op)
    expect(f"Allreduce, {what}", receive, total)
    expect(f"Allreduce's input, {what}", send, every[RANK][offset:])
    COMM.Allreduce(MPI.IN_PLACE, send, op=op)
    expect(f"Allreduce in place, {what}", send, total)

    for root in range(SIZE):
        send, receive = place(every[RANK])[offset:], place(np.zeros(count + offset, dtype))[offset:]
        synchronize()
        COMM.Reduce(send, receive if root == RANK else None, op=op, root=root)
        if root == RANK:
            expect(f"Reduce to {root}, {what}", receive, total)
            receive = place(every[RANK])[offset:]
            synchronize()
        COMM.Reduce(MPI.IN_PLACE if root == RANK else send, receive, op=op, root=root)
        if root == RANK:
            expect(f"Reduce to {root} in place, {what}", receive, total)
        request = COMM.Ireduce(send, receive if root == RANK else None, op=op, root=root)
        request.Wait()
        if root == RANK:
            expect(f"Ireduce to {root}, {what}", receive, total)

    counts = [count // SIZE + (1 if rank < count % SIZE else 0) for rank in range(SIZE)]
    begin = sum(counts[:RANK])
    send, receive = place(every[RANK])[offset:], place(np.zeros(counts[RANK], dtype))
    synchronize()
    COMM.Reduce_scatter(send, receive, recvcounts=counts, op=op)
    own = total[begin : begin + counts[RANK]]
    expect(f"Reduce_scatter, {what}", receive, own)
    COMM.Reduce_scatter(MPI.IN_PLACE, send, recvcounts=counts, op=op)
    expect(f"Reduce_scatter in place, {what}", send[: counts[RANK]], own)

    part = count // SIZE
    send, receive = place(every[RANK])[offset:], place(np.zeros(part, dtype))
    own = total[part * RANK : part * (RANK + 1)]
    synchronize()
    COMM.Reduce_scatter_block(send[: part * SIZE], receive, op=op)
    expect(f"Reduce_scatter_block, {what}", receive, own)
    COMM.Reduce_scatter_block(MPI.IN_PLACE, send[: part * SIZE], op=op)
    expect(f"Reduce_scatter_block in place, {what}", send[:part], own)

    send, receive = place(every[RANK])[offset:], place(np.zeros(count + offset, dtype))[offset:]
    synchronize()
    request = COMM.Iallreduce(send, receive, op=op)
    request.Wait()
    expect(f"Iallreduce, {what}", receive, total)
    if MPI.VERSION >= 4:
        request = COMM.Allreduce_init(send, receive, op=op)
        for round in range(3):
            receive[:] = 0
            synchronize()
            request.Start()
            request.Wait()
            expect(f"Allreduce_init, start {round}, {what}", receive, total)
        request.Free()


def cycles() -> None:
    """Buffers come and go, also at addresses that others had before."""
    generator = np.random.default_rng(1)
    for cycle in range(CYCLES):
        count, offset = int(generator.integers(1, 60000)), int(generator.integers(0, 40))
        host = values(RANK, count + offset, "float32", cycle)
        buffer = on_gpu(host)
        part = buffer[offset:]
        synchronize()
        COMM.Allreduce(MPI.IN_PLACE, part)
        total = sum(values(rank, count + offset, "float32", cycle)[offset:] for rank in range(SIZE))
        expect(f"cycle {cycle}", part, total)
        del buffer, part
        if cycle % 50 == 49:
            if KIND == "cupy":
                cupy.get_default_memory_pool().free_all_blocks()
            else:
                torch.cuda.empty_cache()


def equal(buffer: Any, expected: Any) -> bool:
    return bool((buffer == expected).all())


def huge(count: int, dtype: str) -> None:
    """Compared on the GPU: a pattern of five numbers, again and again."""
    xp = cupy if KIND == "cupy" else torch

    def pattern(add: int, times: int) -> Any:
        five = on_gpu((np.arange(5) * times + add).astype(dtype))
        return (cupy.tile if KIND == "cupy" else torch.tile)(five, (count // 5 + 1,))[:count]

    what = f"{dtype} of {count}"
    send, total = pattern(RANK, 1), pattern(SIZE * (SIZE - 1) // 2, SIZE)
    receive = xp.zeros_like(send)
    last = SIZE - 1
    counts = [count // SIZE // 2] * SIZE
    counts[last] = count - sum(counts[:last])
    begin = sum(counts[:RANK])
    part = count // SIZE

    def check(name: str, got: Any, expected: Any) -> None:
        global checked
        if not equal(got, expected):
            print(f"{name}, {what}: rank {RANK} of {SIZE} has another result", flush=True)
            COMM.Abort(1)
        got[:] = 0
        synchronize()
        checked += 1

    synchronize()
    COMM.Allreduce(send, receive)
    check("Allreduce", receive, total)
    COMM.Reduce(send, receive if last == RANK else None, root=last)
    if last == RANK:
        check("Reduce", receive, total)
    COMM.Reduce_scatter(send, receive[: counts[RANK]], recvcounts=counts)
    check("Reduce_scatter", receive[: counts[RANK]], total[begin : begin + counts[RANK]])
    COMM.Reduce_scatter_block(send[: part * SIZE], receive[:part])
    check("Reduce_scatter_block", receive[:part], total[part * RANK : part * (RANK + 1)])


COMM.Barrier()
if len(sys.argv) > 3 and sys.argv[3] == "huge":
    huge(1 << 28, "float32")
    huge((1 << 31) + 24, "int8")
for dtype in [*FLOATS, *INTEGERS, "bool"]:
    for operator in operators_of(dtype):
        sizes = [(0, 1), (1, 0), (5, 3), (4099, 1)]
        if dtype in ("float32", "int64") and operator in ("sum", "max"):
            sizes += [(1000, 0), (300007, 5)]
        for count, offset in sizes:
            for mixed in (False, True):
                every_call(dtype, operator, count, offset, mixed)
cycles()
if RANK == 0:
    print(f"{KIND}: {checked} results checked on each rank", flush=True)
