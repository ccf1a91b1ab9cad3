# SPDX-License-Identifier: BSD-3-Clause
"""The `trib` command."""


def main() -> int:
    """Run the command line."""
    return 0
