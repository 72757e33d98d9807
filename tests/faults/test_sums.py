"""What puts the parts of a run together says so when one is missing, failed, or too slow."""

import copy
import json
import os
import subprocess
import sys

import moments
import sums


def parts(slow=0):
    made = []
    for number in (1, 2, 3):
        report = moments.Report()
        report.gaps_s = [1.2 if at < slow else 0.3 for at in range(5)]
        report.cases, report.whole, report.patience, report.waits_s, report.clean_s = 2, 32, (0.1 * number, f"fault {number}"), [0.5], [0.1]
        report.growth = {"MiB": number, "descriptors": 1, "threads": 0, "looks": 2}
        report.count("cancels", "at once", number)
        made.append({"part": number, "parts": 3, "full": True, "seed": 10 + number, "commit": "abc", "status": 0, "tests": 7, "failed": 0, "skipped": 1, **copy.deepcopy(report.kept())})
    return made


def test_parts_are_put_together():
    lines, wrong = sums.judge(parts())
    assert wrong == []
    text = "\n".join(lines)
    assert "3 parts (--full) of abc: 21 tests, 3 skipped; seeds 11, 12, 13" in text
    assert "cancels: 6 (at once 6)" in text
    assert "15 streams, median 300 ms" in text
    assert "6 faults under 16 streams: 96 answers whole, 0 clear errors" in text
    assert "30 % of what is allowed at most, fault 3" in text
    assert "6 looks: at most 3.0 MiB, 1 descriptors" in text


def test_what_is_not_whole_is_wrong():
    one, two, three = parts()
    for some in ([one, two], [one, two, two], [one, two, {**three, "parts": 4}], [one, two, {**three, "full": False}], [one, two, {**three, "failed": 1}], [one, two, {**three, "status": 2}], [one, two, {**three, "commit": "abd"}]):
        assert len(sums.judge(some)[1]) == 1, some
    assert sums.judge([{**part, "gaps_s": []} for part in parts()])[1] == ["no decode worker was killed while it had streams"]


def test_the_median_is_over_all_parts():
    made = parts()
    made[0]["gaps_s"] = [1.4] * 5  # one slow part of three is not half of the streams
    assert sums.judge(made)[1] == []
    assert "1.20 s in the median" in sums.judge(parts(slow=3))[1][0]


def test_it_runs_by_itself(tmp_path):
    paths = []
    for part in parts(slow=3):
        paths.append(tmp_path / f"faults-{part['part']}-of-3.json")
        paths[-1].write_text(json.dumps(part))
    done = subprocess.run([sys.executable, os.path.join(os.path.dirname(__file__), "sums.py"), *paths], check=False, capture_output=True, text=True)
    assert done.returncode == 1 and "WRONG: streams go on after 1.20 s in the median, 1.0 s is the goal" in done.stdout, done
    paths[0].write_text("{")
    done = subprocess.run([sys.executable, os.path.join(os.path.dirname(__file__), "sums.py"), *paths], check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "faults-1-of-3.json" in done.stderr, done
