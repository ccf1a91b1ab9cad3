# SPDX-License-Identifier: BSD-3-Clause
import os
import pty
import subprocess
import sys

PROGRAM = """
import time
from tributary.cli.progress import steps
with steps("mpich, 2 ranks", 3) as step:
    for number in range(3):
        step(f"allreduce {number}")
        time.sleep(0.15)
"""


def test_a_bar_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            seen += data
        assert process.stdout is not None and process.stdout.read() == b""
    os.close(ours)
    assert process.returncode == 0
    text = seen.decode()
    assert "━" in text and "1/3" in text and "allreduce 1" in text
    assert text.count("\n") < 12  # a bar that is drawn anew, no lines


def test_lines_elsewhere() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stderr == "allreduce 0\nallreduce 1\nallreduce 2\n" and done.stdout == ""
