# SPDX-License-Identifier: BSD-3-Clause
"""Where the native parts of Tributary are: in the build tree beside this package, or in an installed tree."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tributary.errors import UserError

# ABIs, each with a preload library of its own. Intel MPI has MPICH's.
ABIS = ("mpich", "openmpi", "abi")
ABI_OF = {"mpich": "mpich", "intel": "mpich", "openmpi": "openmpi", "abi": "abi"}


def _homes() -> list[Path]:
    """Folders with lib/ and bin/ (a build) or libexec/tributary/ (an installation), best first."""
    chosen = os.environ.get("TRIB_HOME")
    if chosen:
        return [Path(chosen).absolute()]
    source = Path(__file__).resolve().parents[2]
    return [source / "build", Path(sys.prefix), Path("/usr/local"), Path("/usr")]


def _find(names: list[str]) -> Path | None:
    for home in _homes():
        for name in names:
            for path in sorted(home.glob(name)):
                return path
    return None


def preload_library(abi: str) -> Path | None:
    """The library for LD_PRELOAD, or None if it was not built."""
    return _library(f"libtributary_{abi}.so")


def _library(file: str) -> Path | None:
    return _find([f"lib/{file}", f"lib/*-linux-gnu/{file}", f"lib64/{file}"])


def program(name: str) -> Path | None:
    """A native program: trib-info, trib-schedule, trib-bench-ABI."""
    return _find([f"bin/{name}", f"libexec/tributary/{name}", f"lib/tributary/{name}"])


def need_program(name: str) -> Path:
    """As program, but an error if it is not there."""
    path = program(name)
    if path is None:
        raise UserError(
            f"{name} is not there; looked below {', '.join(map(str, _homes()))}. "
            "`make build` builds it; TRIB_HOME names another place"
        )
    return path


def need_preload_library(abi: str) -> Path:
    """As preload_library, but an error if there is none."""
    path = preload_library(abi)
    if path is None:
        built = [name for name in ABIS if preload_library(name)]
        raise UserError(
            f"there is no preload library for {abi} "
            + (f"(built: {', '.join(built)})" if built else "(nothing is built yet)")
            + f"; looked below {', '.join(map(str, _homes()))}. `make build` builds it; TRIB_HOME names another place"
        )
    return path


def preloads(abi: str, settings: Mapping[str, str]) -> str:
    """What LD_PRELOAD is to hold for ranks with these settings."""
    libraries = [need_preload_library(abi)]
    if settings.get("TRIB_SHARED_HEAP") == "1":
        heap = _library("libtributary_heap.so")
        if heap is None:
            raise UserError(
                "TRIB_SHARED_HEAP=1 needs libtributary_heap.so, which is not there; `make build` builds it"
            )
        libraries.append(heap)
    for library in libraries:
        if " " in str(library) or ":" in str(library):
            raise UserError(
                f"LD_PRELOAD cannot name {library}: it ends names at spaces and colons; "
                "name a link to that place without any by TRIB_HOME"
            )
    return ":".join(map(str, libraries))


def _ask(
    *words: str, environment: Mapping[str, str] | None = None, text: bytes | None = None
) -> dict[str, Any]:
    path = need_program("trib-info")
    done = subprocess.run(
        [path, *words],
        capture_output=True,
        input=text,
        check=False,
        env=environment,
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().removeprefix("trib-info: ")
        raise UserError(said or f"{path} failed")
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


@functools.cache
def info(with_gpus: bool = False) -> dict[str, Any]:
    """What trib-info says: settings, algorithms, backends, operators and types; of GPUs where that is asked for, since it
    takes a context on one.
    """
    return _ask(*(("gpus",) if with_gpus else ()))


@functools.cache
def known_settings() -> list[dict[str, Any]]:
    """The library's settings, whatever is set in the environment, and be it wrong."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("TRIB_")}
    rows: list[dict[str, Any]] = _ask(environment=others)["settings"]
    return rows


def findings(text: bytes) -> dict[str, Any]:
    """What a tuning file says, if the library itself would take it."""
    return _ask("findings", text=text)


def environment_settings() -> dict[str, str]:
    """The library's settings that are set in the environment."""
    names = [setting["variable"] for setting in known_settings()]
    return {name: os.environ[name] for name in names if name in os.environ}


def check_settings(settings: dict[str, str]) -> None:
    """Let the library itself say whether it accepts these variables, beside those of the environment."""
    answer = _ask(environment={**os.environ, **settings})
    values = {row["variable"]: row["value"] for row in answer["settings"]}
    associations = {row["name"]: row["association"] for row in answer["algorithms"]}
    wanted = values["TRIB_ALGORITHM"]
    if wanted == "auto":
        return
    if wanted not in associations:
        known = ", ".join(("auto", *associations))
        raise UserError(f"TRIB_ALGORITHM={wanted}: no such algorithm; accepted: {known}")
    # The library says this only once a communicator is set up, in the words of src/tune/select.cpp.
    if values["TRIB_DETERMINISM"] == "order" and associations[wanted] != "rank_order":
        fitting = ", ".join(name for name, how in associations.items() if how == "rank_order")
        raise UserError(
            f"TRIB_ALGORITHM={wanted} does not fold in rank order, which TRIB_DETERMINISM=order asks for; "
            f"accepted with it: auto, {fitting}"
        )
