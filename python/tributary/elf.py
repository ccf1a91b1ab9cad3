# SPDX-License-Identifier: BSD-3-Clause
"""Which libraries a program would load, read from its ELF files as the dynamic loader would, without running anything."""

import functools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29


class NotElfError(Exception):
    """Not an ELF file of this kind of machine (64 bits, little-endian)."""


@dataclass(frozen=True)
class Elf:
    """The dynamic section of one file."""

    path: Path
    machine: int
    needed: tuple[str, ...]
    soname: str | None
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    is_dynamic: bool

    def folders(self, entries: tuple[str, ...]) -> Iterator[Path]:
        """Search path entries with $ORIGIN filled in."""
        origin = str(self.path.resolve().parent)
        for entry in entries:
            text = entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)
            yield Path(text.replace("$LIB", "lib/x86_64-linux-gnu"))


@functools.lru_cache(maxsize=256)
def read(path: Path) -> Elf:
    """Read a file's dynamic section. Raises NotElfError for anything else."""
    try:
        return _read(path)
    except struct.error as error:  # cut off
        raise NotElfError(f"{path}: damaged") from error


def _read(path: Path) -> Elf:
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            raise NotElfError(str(path))
        machine = struct.unpack_from("<H", head, 18)[0]
        (phoff,) = struct.unpack_from("<Q", head, 32)
        phentsize, phnum = struct.unpack_from("<HH", head, 54)
        size_of_file = os.fstat(file.fileno()).st_size

        def part(offset: int, length: int) -> bytes:
            if offset > size_of_file:
                raise NotElfError(f"{path}: damaged")
            file.seek(offset)
            return file.read(min(length, size_of_file))

        table = part(phoff, phentsize * phnum)
        loads: list[tuple[int, int, int]] = []
        dynamic: tuple[int, int] | None = None
        for i in range(phnum):
            kind, _, offset, address, _, filesz = struct.unpack_from(
                "<IIQQQQ", table, i * phentsize
            )
            if kind == _PT_LOAD:
                loads.append((address, offset, filesz))
            elif kind == _PT_DYNAMIC:
                dynamic = (offset, filesz)
        if dynamic is None:
            return Elf(path, machine, (), None, (), (), False)

        def offset_of(address: int) -> int:
            for start, offset, size in loads:
                if start <= address < start + size:
                    return offset + address - start
            raise NotElfError(f"{path}: damaged")

        data = part(*dynamic)
        entries: list[tuple[int, int]] = []
        for tag, value in struct.iter_unpack("<qQ", data[: len(data) // 16 * 16]):
            if tag == 0:
                break
            entries.append((tag, value))
        strings = next((offset_of(value) for tag, value in entries if tag == _DT_STRTAB), None)

        def text(at: int) -> str:
            if strings is None:
                raise NotElfError(f"{path}: damaged")
            return part(strings + at, 4096).split(b"\0", 1)[0].decode(errors="replace")

        def texts(wanted: int) -> list[str]:
            return [text(value) for tag, value in entries if tag == wanted]

        def paths(wanted: int) -> tuple[str, ...]:
            return tuple(part for entry in texts(wanted) for part in entry.split(":") if part)

        soname = texts(_DT_SONAME)
        return Elf(
            path=path,
            machine=machine,
            needed=tuple(texts(_DT_NEEDED)),
            soname=soname[0] if soname else None,
            rpath=paths(_DT_RPATH),
            runpath=paths(_DT_RUNPATH),
            is_dynamic=True,
        )


@functools.cache
def loader_cache(path: Path = Path("/etc/ld.so.cache")) -> dict[str, list[Path]]:
    """What ldconfig found: soname to files."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    magic = b"glibc-ld.so.cache1.1"
    start = data.find(magic)
    found: dict[str, list[Path]] = {}
    if start < 0:
        return found

    def text(at: int) -> str:
        return data[start + at : data.index(b"\0", start + at)].decode(errors="replace")

    (count,) = struct.unpack_from("<I", data, start + len(magic))
    for i in range(count):
        _, key, value, _, _ = struct.unpack_from("<iIIIQ", data, start + 48 + 24 * i)
        found.setdefault(text(key), []).append(Path(text(value)))
    return found


_DEFAULT_FOLDERS = tuple(
    Path(folder)
    for folder in (
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib/aarch64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/lib64",
        "/usr/lib64",
        "/lib",
        "/usr/lib",
    )
)


def _is_for(candidate: Path, machine: int) -> bool:
    try:
        return candidate.is_file() and read(candidate).machine == machine
    except (NotElfError, OSError):
        return False


def libraries(program: Path, library_path: str | None = None) -> dict[str, Path | None]:
    """All libraries that `program` loads at start, in the loader's order: soname to file, None where it is not found.

    `library_path` stands for LD_LIBRARY_PATH (default: that of the environment).
    """
    if library_path is None:
        library_path = os.environ.get("LD_LIBRARY_PATH", "")
    environment = [Path(entry) for entry in library_path.split(":") if entry]
    found: dict[str, Path | None] = {}
    # Each with the DT_RPATHs of those that led to it: they are inherited, DT_RUNPATH is not.
    queue: list[tuple[Elf, tuple[Path, ...]]] = [(read(program), ())]
    while queue:
        elf, inherited = queue.pop(0)
        own = () if elf.runpath else tuple(elf.folders(elf.rpath))
        rpaths = own + inherited
        for name in elf.needed:
            if name in found or name.startswith("ld-linux"):
                continue
            if "/" in name:
                candidates = iter([Path(name)])
            else:
                candidates = _candidates(name, elf, rpaths, environment)
            path = next((c for c in candidates if _is_for(c, elf.machine)), None)
            found[name] = path
            if path is not None:
                queue.append((read(path), rpaths))
    return found


def _candidates(
    name: str, elf: Elf, rpaths: tuple[Path, ...], environment: list[Path]
) -> Iterator[Path]:
    if not elf.runpath:
        yield from (folder / name for folder in rpaths)
    yield from (folder / name for folder in environment)
    yield from (folder / name for folder in elf.folders(elf.runpath))
    yield from loader_cache().get(name, [])
    yield from (folder / name for folder in _DEFAULT_FOLDERS)
