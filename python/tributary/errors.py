# SPDX-License-Identifier: BSD-3-Clause
"""The one exception of the command line: a text for the user, no traceback."""


class UserError(Exception):
    """Something the user can mend; the text says what and how. `trib` prints it and exits with 2."""
