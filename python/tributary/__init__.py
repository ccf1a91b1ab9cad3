# SPDX-License-Identifier: BSD-3-Clause
"""Tributary: fast reduction collectives under any MPI. The command line is in `tributary.cli`."""

__version__ = "0.1.0"
