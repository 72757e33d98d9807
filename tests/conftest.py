"""What the suites that run real processes share: one plain cluster, the seed, the golden tokens."""

import json
import os
import random
import signal
import sys

import pytest

TESTS = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(TESTS, "integration"))

import cluster as cluster_module  # noqa: E402

SEED = int(os.environ.get("KVFERRY_SEED", "1"))
# a program of its own, which meson runs
collect_ignore = ["integration/test_command.py"]
FULL = os.environ.get("KVFERRY_FULL", "0") == "1"
PART = os.environ.get("KVFERRY_PART", "")


def part_of(items, part):
    """Each N-th of them, from the K-th on; what judges a whole run (`every_part`) is in all parts."""
    number, parts = map(int, part.split("/"))
    own = [item for item in items if item.get_closest_marker("every_part") is None]
    others = {*own} - {*own[number - 1 :: parts]}
    return [item for item in items if item not in others]


def pytest_collection_modifyitems(config, items):
    if PART:
        chosen = part_of(items, PART)
        config.hook.pytest_deselected(items=list({*items} - {*chosen}))
        items[:] = chosen


def pytest_configure(config):
    """A run that is told to end still ends its clusters."""
    config.addinivalue_line("markers", "every_part: runs in each part of --part K/N")
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("told to end (SIGTERM)", 143))


def pytest_report_header(config):
    return f"KVFERRY_SEED={SEED} full={FULL} build={cluster_module.BUILD}"


@pytest.fixture
def rng(request):
    """Another stream of numbers for every test, the same for the same seed."""
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture(scope="session")
def full():
    return FULL


@pytest.fixture(scope="session")
def golden():
    with open(os.path.join(TESTS, "golden", "golden.json"), encoding="utf-8") as file:
        return {case["name"]: case for case in json.load(file)["golden"]}


@pytest.fixture(scope="session")
def shared_cluster():
    with cluster_module.Cluster() as running:
        yield running


@pytest.fixture
def plain(shared_cluster):
    """The cluster 1:1 that many tests share; after each of them it must be clean."""
    yield shared_cluster
    shared_cluster.assert_clean()
