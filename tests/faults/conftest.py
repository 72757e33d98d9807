"""What the tests of faults share: reference answers from an undisturbed cluster, and the last lines."""

import json
import os
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import field as fl  # noqa: E402
import hosts  # noqa: E402
import moments  # noqa: E402
from field import FULL, SEED  # noqa: E402

SETS = 8 if FULL else 4
REPORT = moments.Report()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    part = os.environ.get("KVFERRY_PART", "")
    if part:
        REPORT.lines.append(f"part {part}: {len(items)} tests")


@pytest.fixture(scope="session")
def report():
    return REPORT


@pytest.fixture(scope="session")
def references():
    """[(bodies, answers, prefill_s, quiet_s)]: what undisturbed workers say, how long the probe's prefill takes here,
    and the longest that a stream waits."""
    sets = []
    with fl.Field("shm", tapped=False) as plain:
        for number in range(SETS):
            bodies = moments.prompts_of(SEED, number)
            streams = fl.at_once([lambda body=body: plain.stream(body) for body in bodies])
            for stream in streams:
                assert stream.error is None and not stream.cut and len(stream.tokens) == moments.ANSWER, (stream.error, stream.cut)
            sets.append((bodies, [stream.tokens for stream in streams], streams[0].times[0] - streams[0].began, max(stream.longest_wait() for stream in streams)))
        plain.assert_clean()
    return sets


@pytest.fixture(scope="session")
def no_hosts():
    """Why there are no namespaces; "" when there are."""
    hosts.sweep()
    return hosts.why_not()


def pytest_terminal_summary(terminalreporter):
    for line in REPORT.text():
        terminalreporter.write_line(line)


def commit():
    """What was run, "+" where the tree has changes that are not committed; "" outside a repository."""
    said = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=os.path.dirname(os.path.abspath(__file__)), check=False, capture_output=True, text=True)
    return said.stdout.strip()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """Leaves what was seen beside the results, for sums.py: faults-K-of-N.json."""
    number, parts = (os.environ.get("KVFERRY_PART") or "1/1").split("/")
    folder = os.path.join(os.environ.get("KVFERRY_BUILD", ""), "test-results")
    if os.path.isdir(folder):
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        ran = {
            "part": int(number), "parts": int(parts), "full": FULL, "seed": SEED, "commit": commit(), "status": int(exitstatus),
            "tests": session.testscollected, "failed": session.testsfailed, "skipped": len(terminal.stats.get("skipped", [])) if terminal else 0,
        }
        with open(os.path.join(folder, f"faults-{number}-of-{parts}.json"), "w") as file:
            json.dump({**ran, **REPORT.kept()}, file)
