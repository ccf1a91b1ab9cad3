# SPDX-License-Identifier: BSD-3-Clause
"""placeholder."""
import argparse

HELP = "x"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """."""


def run(parsed: argparse.Namespace) -> int:
    """."""
    return 0
