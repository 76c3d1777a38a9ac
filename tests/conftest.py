"""What holds for every test: hypothesis without wall-clock deadlines, and skips that are no excuse in CI.

`DIPTYCH_REQUIRE=all` (set by `.ci/run`) turns a skip into a failure, because everything that a test may miss
there can be installed; only `gpu` and `compose` tests may still skip, for want of a device or of a container
engine. `DIPTYCH_REQUIRE=gpu` or `=compose` (comma-separated with others) takes that excuse away as well.
"""

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

EXCUSES = frozenset({"gpu", "compose"})
REQUIRED = frozenset(filter(None, os.environ.get("DIPTYCH_REQUIRE", "").split(",")))

# Machines that build are shared and slow: a wall-clock deadline would measure the neighbours.
settings.register_profile("diptych", deadline=None, print_blob=True)
settings.load_profile("diptych")


def skip_is_refused(markers: set[str], required: frozenset[str]) -> bool:
    """Whether a test with these markers must not skip."""
    excuses = markers & EXCUSES
    return bool(excuses & required) if excuses else "all" in required


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_xfail = hasattr(report, "wasxfail")
    if report.skipped and not is_xfail and skip_is_refused({m.name for m in item.iter_markers()}, REQUIRED):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be missing (DIPTYCH_REQUIRE): {report.longrepr}"
    return report
