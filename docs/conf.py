# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx: `pip install -r docs/requirements.txt && sphinx-build -W docs out/docs`. The pages are readable without it, too."""

import re
from pathlib import Path

project = "Tributary"
author = "The Tributary developers"
release = re.search(  # one home for the version: CMakeLists.txt
    r"project\(tributary VERSION ([\d.]+)",
    (Path(__file__).parent.parent / "CMakeLists.txt").read_text(),
)[1]

extensions = ["myst_parser"]
exclude_patterns = ["requirements.txt"]
html_theme = "alabaster"
myst_heading_anchors = 3
