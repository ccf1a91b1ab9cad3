# SPDX-License-Identifier: BSD-3-Clause
"""Say what is here: version, MPIs, backends, settings, algorithms, and which operators work on which types.

SECTION is one of mpis, backends, gpus, levels, tuning, settings, algorithms, types; without it: all of them.

examples:
  trib info
  trib info gpus                       GPUs, the links between them, and which memory is served in which way
  trib info --json | jq '.settings[] | select(.origin != "default")'
  trib info --markdown                 the tables of the documentation
  trib info --markdown docs            write them anew into the Markdown files below docs/, between the lines
                                       <!-- trib info: settings --> and <!-- end --> (or algorithms, types)
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tributary import mpi, tree, tuning
from tributary.cli import output
from tributary.errors import UserError

_FAMILIES = {"mpich": "MPICH, Intel MPI", "openmpi": "Open MPI", "abi": "MPI-5 standard ABI"}

HELP = "say what is here: MPIs, settings, algorithms, types"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the section and the forms of output."""
    parser.add_argument(
        "section", metavar="SECTION", nargs="?", help=f"{', '.join(_SECTIONS)} (default: all)"
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="everything, as JSON")
    forms.add_argument(
        "--markdown",
        metavar="PATH",
        nargs="?",
        const="-",
        help="tables in Markdown; with PATH (a file or folder): write them anew where they stand there",
    )


def everything(with_gpus: bool = True) -> dict[str, Any]:
    """What trib-info knows, and the MPIs."""
    mpis = []
    for one in (*mpi.on_path(), *mpi.wheels()):
        mpis.append(
            {
                "name": one.vendor,
                "version": one.version,
                "origin": one.origin,
                "mpiexec": str(one.mpiexec) if one.mpiexec else None,
                "library": str(one.library) if one.library else None,
                "preload": str(tree.preload_library(tree.ABI_OF[one.vendor]) or "") or None,
            }
        )
    libraries = {abi: str(tree.preload_library(abi) or "") or None for abi in tree.ABIS}
    data = tree.info(with_gpus)
    return {"version": data["version"], "mpis": mpis, "preload": libraries, **data}


# ------------------------------------------------------------------------------------------- Markdown


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def sections(data: dict[str, Any]) -> dict[str, str]:
    """The tables of the documentation, by name. Nothing in them depends on the machine."""
    settings = [
        [
            f"`{s['variable']}`",
            s["accepted"],
            f"`{s['default']}`",
            "all ranks take rank 0's" if s["is_shared"] else "each rank's own",
            s["help"],
        ]
        for s in data["settings"]
    ]
    algorithms = [
        [
            f"`{a['name']}`",
            a["summary"],
            a["steps"],
            a["bytes"],
            a["association"].replace("_", " "),
            a["source"],
        ]
        for a in data["algorithms"]
    ]
    operators = data["operators"]
    types = [
        [
            f"`{t['name']}`",
            str(t["bytes"]),
            *("x" if t["name"] in operators[op] else "" for op in operators),
        ]
        for t in data["dtypes"]
    ]
    return {
        "settings": _markdown(
            ["variable", "accepted", "default", "whose", "what it does"], settings
        ),
        "algorithms": _markdown(
            [
                "name",
                "what it does",
                "steps",
                "bytes a rank takes in",
                "association",
                "described by",
            ],
            algorithms,
        ),
        "types": _markdown(["type", "bytes", *operators], types),
    }


_REGION = re.compile(r"(<!-- trib info: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewrite(text: str, data: dict[str, Any], file: Path) -> str:
    """A page with its tables made anew."""
    tables = sections(data)

    def fresh(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in tables:
            raise UserError(f"{file}: 'trib info: {name}' is none of {', '.join(tables)}")
        return f"{match.group(1)}{tables[name]}\n{match.group(3)}"

    return _REGION.sub(fresh, text)


def _write_pages(target: Path, data: dict[str, Any]) -> None:
    if not target.exists():
        raise UserError(f"--markdown: {target}: no such file or folder")
    has_tables = False
    for file in sorted(target.rglob("*.md")) if target.is_dir() else [target]:
        try:
            old = file.read_text()
        except UnicodeDecodeError:
            raise UserError(f"--markdown: {file} is not text in UTF-8") from None
        has_tables = has_tables or bool(_REGION.search(old))
        new = rewrite(old, data, file)
        if new != old:
            output.write_text(file, new)
            print(f"written: {file}")
    if not has_tables:
        raise UserError(
            f"--markdown: {target}: nothing to write: no lines <!-- trib info: NAME --> and <!-- end -->, "
            f"with NAME one of {', '.join(sections(data))}"
        )


# -------------------------------------------------------------------------------------------- for people


def _table(title: str, *columns: str) -> Table:
    made = output.table(title)
    for column in columns:
        made.add_column(column, overflow="fold")
    made.columns[0].no_wrap = True
    return made


def _print_mpis(data: dict[str, Any], console: Console) -> None:
    mpis = _table("MPIs found", "name", "version", "from", "mpiexec")
    for one in data["mpis"]:
        mpis.add_row(one["name"], one["version"], one["origin"], one["mpiexec"] or "-")
    console.print(mpis if data["mpis"] else "No MPI was found, neither on PATH nor from PyPI.")
    libraries = _table("Preload libraries", "for", "path")
    for abi, path in data["preload"].items():
        libraries.add_row(_FAMILIES[abi], path or "not built")
    console.print(libraries)


def _print_backends(data: dict[str, Any], console: Console) -> None:
    backends = _table("Backends", "name", "what it found")
    for one in data["backends"]:
        backends.add_row(one["name"], one["description"])
    console.print(backends)


# Ways in which memory is served; the second text says more.
_WAYS = {
    "ipc": ("mapped (IPC handle)", ""),
    "file": ("mapped (files over a socket)", ""),
    "scratch": ("scratch", "scratch: kernels push through inboxes on each other's GPUs"),
    "host_scratch": (
        "host scratch",
        "host scratch: kernels push through inboxes in pinned host memory, as GPUs do not map each other's here",
    ),
    "staging": (
        "staging",
        "staging: copied to pinned host memory, reduced there, and copied back",
    ),
    "host": ("as without a GPU", ""),
}
# Settings on which the ways depend.
_OF_WAYS = ("TRIB_DEVICE", "TRIB_P2P", "TRIB_MAP", "TRIB_SHARED_GPU")
_MAPPED = (
    "mapped: kernels read and write the buffers of all GPUs (or of all ranks on one) themselves; "
    "between GPUs in blocking and persistent calls of middling length"
)


def _ways_text(ways: list[str]) -> str:
    texts = [_WAYS[way][0] for way in ways]
    if ways[0] == "host":
        return f"{texts[0]}; beside GPU memory: {', '.join(texts[1:])}"
    return ", else ".join(texts)


def _link_text(link: dict[str, Any]) -> str:
    if link["kind"] == "nvlink":
        return f"NV{link['nvlinks'] or ''}"
    return link["ancestor"] or "PCIe" if link["kind"] == "pcie" else "none"


def _print_links(gpus: dict[str, Any], console: Console) -> None:
    count = len(gpus["devices"])
    cells = {(i, i): "X" for i in range(count)}
    for link in gpus["links"]:
        i, j = link["gpus"]
        cells[i, j] = cells[j, i] = _link_text(link)
    matrix = _table("Links between GPUs", "", *(f"GPU{i}" for i in range(count)))
    for i in range(count):
        matrix.add_row(f"GPU{i}", *(cells[i, j] for j in range(count)))
    console.print(matrix)
    console.print(
        "NV#: so many NVLinks; PCIe, PIX, PXB, PHB, NODE, SYS: peer access over PCIe, as nvidia-smi topo -m names "
        "what is between; none: no peer access\n"
    )
    if gpus["nvml"]:
        console.print(f"How many NVLinks there are is not known: {gpus['nvml']}\n")


def _tried_text(row: dict[str, Any]) -> str:
    word = {True: "yes", False: "refused", None: "not tried"}[row["works"]]
    lines = [f"{word}: {row['detail']}" if row["detail"] else word, row["remark"]]
    return "\n".join(filter(None, lines))


def _print_gpus(data: dict[str, Any], console: Console) -> None:
    gpus = data["gpus"]
    if gpus["missing"]:
        console.print(f"GPUs: none: {gpus['missing']}\n")
        return
    columns = ("GPU", "name", "memory", "compute", "kernels", "PCI", "NUMA", "processors", "MPS")
    devices = _table(f"GPUs (driver for CUDA {gpus['driver']})", *columns)
    for one in gpus["devices"]:
        kernels = one["kernels"] or "none: too old"
        devices.add_row(
            str(one["index"]),
            one["name"],
            f"{one['memory_bytes'] >> 30} GiB",
            one["compute_capability"],
            f"{kernels}, native" if kernels.startswith("sm_") else kernels,
            one["pci"] or "-",
            "-" if one["numa_node"] in ("", "-1") else one["numa_node"],
            one["processors"] or "-",
            "yes" if one["mps"] else "no",
        )
    console.print(devices)
    if gpus["links"]:
        _print_links(gpus, console)
    memory = _table(
        "Which memory is served in which way",
        *("memory", "one rank per GPU", "several ranks on a GPU", "tried here"),
    )
    for row in gpus["memory"]:
        shared = _ways_text(row["ways_on_shared_gpus"])
        memory.add_row(row["kind"], _ways_text(row["ways"]), shared, _tried_text(row))
    console.print(memory)
    used = {w for row in gpus["memory"] for w in (*row["ways"], *row["ways_on_shared_gpus"])}
    if used & {"ipc", "file"}:
        console.print(_MAPPED)
    for way, (_, text) in _WAYS.items():
        if way in used and text:
            console.print(text)
    for one in data["settings"]:
        if one["variable"] in _OF_WAYS and one["value"] != one["default"]:
            console.print(f"{one['variable']}={one['value']} is set")
    console.print()


def _print_levels(data: dict[str, Any], console: Console) -> None:
    levels = _table("What processors share (hwloc)", "kind", "domains", "processors of each")
    for one in data["levels"]["kinds"]:
        levels.add_row(one["kind"], str(len(one["domains"])), "  ".join(one["domains"]) or "-")
    missing = data["levels"]["missing"]
    console.print(f"hwloc: {missing}" if missing else levels)


def _print_tuning(data: dict[str, Any], console: Console) -> None:
    file = data["tuning"]["file"]
    state = "" if not file or Path(file).is_file() else " (not there yet: `trib tune` writes it)"
    made = _table("Tuning", "what", "")
    made.add_row("file", f"{file}{state}" if file else f"none: {tuning.missing()}")
    made.add_row("machine", data["tuning"]["machine"])
    console.print(made)


def _print_settings(data: dict[str, Any], console: Console) -> None:
    settings = _table(
        "Settings", "variable", "value", "default", "origin", "accepted", "what it does"
    )
    for one in data["settings"]:
        value = Text(one["value"], "" if one["origin"] == "default" else "bold yellow")
        settings.add_row(
            one["variable"], value, one["default"], one["origin"], one["accepted"], one["help"]
        )
    console.print(settings)


def _print_algorithms(data: dict[str, Any], console: Console) -> None:
    algorithms = _table(
        "Algorithms (p ranks, n bytes)", "name", "what it does", "steps", "bytes a rank takes in"
    )
    for one in data["algorithms"]:
        algorithms.add_row(one["name"], one["summary"], one["steps"], one["bytes"])
    console.print(algorithms)


def _print_types(data: dict[str, Any], console: Console) -> None:
    operators = data["operators"]
    types = _table("Operators on types", "type", *operators)
    for one in data["dtypes"]:
        types.add_row(
            one["name"], *("x" if one["name"] in operators[op] else "" for op in operators)
        )
    console.print(types)


# In the order of the whole. With the keys of --json that belong to each.
_SECTIONS: dict[str, tuple[Callable[[dict[str, Any], Console], None], tuple[str, ...]]] = {
    "mpis": (_print_mpis, ("mpis", "preload")),
    "backends": (_print_backends, ("backends",)),
    "gpus": (_print_gpus, ("gpus",)),
    "levels": (_print_levels, ("levels",)),
    "tuning": (_print_tuning, ("tuning",)),
    "settings": (_print_settings, ("settings",)),
    "algorithms": (_print_algorithms, ("algorithms",)),
    "types": (_print_types, ("dtypes", "operators")),
}


def run(parsed: argparse.Namespace) -> int:
    """Print it."""
    section = parsed.section
    if section is not None and section not in _SECTIONS:
        raise UserError(f"SECTION: {section} is none of {', '.join(_SECTIONS)}")
    if parsed.markdown == "":
        raise UserError("--markdown=: accepted: a file or folder, or --markdown alone")
    if section and parsed.markdown:
        raise UserError(f"SECTION: {section}: --markdown writes all tables of the documentation")
    if parsed.markdown:
        data = tree.info()
        if parsed.markdown == "-":
            for name, text in sections(data).items():
                print(f"## {name.capitalize()}\n\n{text}\n")
        else:
            _write_pages(Path(parsed.markdown), data)
        return 0
    data = everything(with_gpus=section in (None, "gpus"))
    if parsed.json:
        keys = _SECTIONS[section][1] if section else tuple(data)
        print(json.dumps({key: data[key] for key in keys}, indent=1))
        return 0
    console = output.console()
    if section is None:
        console.print(f"Tributary {data['version']}\n", style="bold")
    for name, (show, _) in _SECTIONS.items():
        if section in (None, name):
            show(data, console)
    return 0
