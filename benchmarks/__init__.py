"""Side-by-side benchmarks: `python -m benchmarks` prints the table of docs/benchmarks.md."""

import json
import os
from typing import Any

TOLD = "DEVICE_TESTS_TOLD"
"""The environment's name of the file descriptor that pytest tells outcomes to."""


def pytest_runtest_logreport(report: Any) -> None:
    """Tell the outcome of a test as soon as it is known, where this is a plugin of pytest (benchmarks/device.py)."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    why = getattr(getattr(report.longrepr, "reprcrash", None), "message", None) or str(report.longrepr)
    line = json.dumps([report.outcome, report.nodeid, why.strip()])
    os.write(int(os.environ[TOLD]), f"{line}\n".encode())


pytest_collectreport = pytest_runtest_logreport  # of files that cannot be imported
