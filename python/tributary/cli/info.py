# SPDX-License-Identifier: BSD-3-Clause
"""Say what is here: version, MPIs, backends, settings, algorithms, and which operators work on which types.

examples:
  trib info
  trib info --json | jq '.settings[] | select(.origin != "default")'
  trib info --markdown                 the tables of the documentation
  trib info --markdown docs            write them anew into the Markdown files below docs/, between the lines
                                       <!-- trib info: settings --> and <!-- end --> (or algorithms, types, backends)
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tributary import mpi, tree
from tributary.cli import output
from tributary.errors import UserError

_FAMILIES = {"mpich": "MPICH, Intel MPI", "openmpi": "Open MPI", "abi": "MPI-5 standard ABI"}

HELP = "say what is here: MPIs, settings, algorithms, types"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the forms of output."""
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="everything, as JSON")
    forms.add_argument(
        "--markdown",
        metavar="PATH",
        nargs="?",
        const="-",
        help="tables in Markdown; with PATH (a file or folder): write them anew where they stand there",
    )


def everything() -> dict[str, Any]:
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
    data = tree.info()
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
    for file in sorted(target.rglob("*.md")) if target.is_dir() else [target]:
        old = file.read_text()
        new = rewrite(old, data, file)
        if new != old:
            file.write_text(new)
            print(f"written: {file}")


# -------------------------------------------------------------------------------------------- for people


def _print(data: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]Tributary {data['version']}[/]\n")

    def table(title: str, *columns: str) -> Table:
        made = output.table(title)
        for column in columns:
            made.add_column(column, overflow="fold")
        made.columns[0].no_wrap = True
        return made

    mpis = table("MPIs found", "name", "version", "from", "mpiexec")
    for one in data["mpis"]:
        mpis.add_row(one["name"], one["version"], one["origin"], one["mpiexec"] or "-")
    console.print(mpis if data["mpis"] else "No MPI was found, neither on PATH nor from PyPI.")
    libraries = table("Preload libraries", "for", "path")
    for abi, path in data["preload"].items():
        libraries.add_row(_FAMILIES[abi], path or "not built")
    console.print(libraries)
    backends = table("Backends", "name", "what it found")
    for one in data["backends"]:
        backends.add_row(one["name"], one["description"])
    console.print(backends)
    levels = table("What processors share (hwloc)", "kind", "domains", "processors of each")
    for one in data["levels"]["kinds"]:
        levels.add_row(one["kind"], str(len(one["domains"])), "  ".join(one["domains"]) or "-")
    missing = data["levels"]["missing"]
    console.print(f"hwloc: {missing}" if missing else levels, highlight=False, markup=False)
    settings = table(
        "Settings", "variable", "value", "default", "origin", "accepted", "what it does"
    )
    for one in data["settings"]:
        value = one["value"] if one["origin"] == "default" else f"[bold yellow]{one['value']}[/]"
        settings.add_row(
            one["variable"], value, one["default"], one["origin"], one["accepted"], one["help"]
        )
    console.print(settings)
    algorithms = table(
        "Algorithms (p ranks, n bytes)", "name", "what it does", "steps", "bytes a rank takes in"
    )
    for one in data["algorithms"]:
        algorithms.add_row(one["name"], one["summary"], one["steps"], one["bytes"])
    console.print(algorithms)
    operators = data["operators"]
    types = table("Operators on types", "type", *operators)
    for one in data["dtypes"]:
        types.add_row(
            one["name"], *("x" if one["name"] in operators[op] else "" for op in operators)
        )
    console.print(types)


def run(parsed: argparse.Namespace) -> int:
    """Print it."""
    data = everything()
    if parsed.json:
        print(json.dumps(data, indent=1))
    elif parsed.markdown == "-":
        for name, text in sections(data).items():
            print(f"## {name.capitalize()}\n\n{text}\n")
    elif parsed.markdown:
        _write_pages(Path(parsed.markdown), data)
    else:
        _print(data, output.console())
    return 0
