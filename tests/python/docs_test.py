# SPDX-License-Identifier: BSD-3-Clause
"""The pages agree with each other and with the sources. That their tables are up to date: info_test.py."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`: headings, as GitHub and MyST spell them."""
    text = without_code(page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings}


def squeezed(text: str) -> str:
    """Without white space, so that a formatter may break lines anew."""
    return re.sub(r"\s+", "", text)


@functools.cache
def sources() -> str:
    """All C++, CUDA and CMake files in one text."""
    files = [
        path
        for folder in ("src", "include", "tools", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".cpp", ".hpp", ".h", ".cu", ".cuh") or path.name == "CMakeLists.txt"
    ]
    return "\n".join(path.read_text() for path in [ROOT / "CMakeLists.txt", *files])


@functools.cache
def variables() -> frozenset[str]:
    """Those of the environment, as config.cpp lists them."""
    text = (ROOT / "src/base/config.cpp").read_text()
    return frozenset(re.findall(r'"(TRIB_[A-Z0-9_]+)"', text))


def test_links_resolve(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_included_files_exist(page: Path) -> None:
    for block in re.findall(r"^```\{literalinclude\}.*?^```$", page.read_text(), re.M | re.S):
        name = block.split("\n", 1)[0].split()[1]
        file = page.parent / name
        assert file.is_file(), name
        for mark in re.findall(r"^:(?:start|end)-(?:at|after|before): '?(.*?)'?$", block, re.M):
            assert mark in file.read_text(), f"{name}: {mark}"


def test_toctree_names_all_pages() -> None:
    text = (ROOT / "docs/index.md").read_text()
    listed = set(text.split(":hidden:\n\n", 1)[1].split("\n```", 1)[0].split())
    assert listed == {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}


def test_snippets_are_parts_of_their_files(page: Path) -> None:
    pattern = r"<!-- from: (\S+) -->\n```\w*\n(.*?)^```$"
    for name, snippet in re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE):
        assert squeezed(snippet) in squeezed((ROOT / name).read_text()), (
            f"{name} has no longer:\n{snippet}"
        )


def test_variables_are_known(page: Path) -> None:
    """A name is a variable of the environment, of the C API, or something of the build or the sources."""
    pattern = r"TRIB_[A-Z0-9_]*[A-Z0-9]"
    api = set(re.findall(pattern, (ROOT / "include/tributary/tributary.h").read_text()))
    for name in set(re.findall(pattern, page.read_text())) - variables() - api:
        defined = rf"(option\(|set\(|#define ){name}\b"
        assert re.search(defined, sources()), f"{name} is nowhere defined"


def test_all_variables_are_described() -> None:
    described = set(re.findall(r"^\| `(TRIB_\w+)`", (ROOT / "docs/settings.md").read_text(), re.M))
    assert described == variables()


def test_all_algorithms_are_described() -> None:
    names = re.findall(r'\{\.name = "(\w+)"', (ROOT / "src/algorithm/registry.cpp").read_text())
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/algorithms.md").read_text(), re.MULTILINE)
    assert names and headings == names


def test_all_reasons_are_described() -> None:
    text = (ROOT / "src/comm/communicator_set_up.cpp").read_text().split("kDeclineTexts[", 1)[1]
    reasons = re.findall(r'^    \{"\w+", "(.*?)"\},$', text, re.MULTILINE)
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert reasons and [reason for reason in reasons if f"| `{reason}` |" not in page] == []


def test_messages_are_the_sources_own() -> None:
    """What troubleshooting.md quotes in its first columns is what the sources say, but for `...` and names."""
    python = "\n".join(path.read_text() for path in sorted((ROOT / "python").rglob("*.py")))
    texts = re.sub(r'"\s*f?"', "", sources() + python)  # literals that the compiler joins
    page = (ROOT / "docs/troubleshooting.md").read_text()
    for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE):
        for quoted in re.findall(r"`(.*?)`", cell):
            for part in re.split(
                r"\.\.\.|: |\b[NPAB]\b|TRIB_\w+=?|MPI_|PMPI_|/\w+(?:/\w+)*", quoted
            ):
                wanted = part.strip(" :,;()?")
                if len(wanted) > 8:
                    assert wanted in texts, f"nobody says {wanted!r} (of {quoted!r})"


def test_no_big_words(page: Path) -> None:
    text = page.read_text()
    words = r"blazing|seamless|cutting[- ]edge|state[- ]of[- ]the[- ]art|world[- ]class|effortless|powerful|revolution|game[- ]chang"
    assert not re.findall(words, text, re.IGNORECASE)


def test_no_places_of_one_machine(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"(?<![\w.])/(?:work|home|root|tmp/w)/\S*", text)
    assert not re.findall(r"https?://\S*/simple\b", text)
