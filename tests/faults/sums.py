"""What all parts of a run of the suite faults showed together.

    .venv/bin/python tests/faults/sums.py build/test-results/faults-*-of-14.json

Exit status 1: a part is missing, is there twice, is of another commit or kind than the others, or was cut short; a test
failed; or the median from SIGKILL of a decode worker to its streams going on is not under a second.
"""

import json
import os
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration"))

import moments  # noqa: E402


def judge(parts):
    """(lines, what is wrong) of the parts' files, as read."""
    report, wrong = moments.Report(), []
    for part in parts:
        report.add(part)
    there = sorted(part["part"] for part in parts)
    of = {part["parts"] for part in parts}
    if len(of) != 1 or there != list(range(1, max(of) + 1)):
        wrong.append(f"these are the parts {there} of {sorted(of)}")
    if len({part["full"] for part in parts}) != 1:
        wrong.append("some are with --full, some without")
    commits = sorted({part["commit"] for part in parts})
    if len(commits) != 1:
        wrong.append(f"they are of the commits {', '.join(commits)}")
    failed = sum(part["failed"] for part in parts)
    if failed:
        wrong.append(f"{failed} failed")
    cut = sorted(part["part"] for part in parts if part["status"] not in (0, 1))  # 1: tests failed, see above
    if cut:
        wrong.append(f"cut short: the parts {cut}")
    if not report.gaps_s:
        wrong.append("no decode worker was killed while it had streams")
    elif statistics.median(report.gaps_s) >= moments.GOES_ON_S:
        wrong.append(f"streams go on after {statistics.median(report.gaps_s):.2f} s in the median, {moments.GOES_ON_S:.1f} s is the goal")
    kind = "--full" if parts[0]["full"] else "a choice"
    tests, skipped = (sum(part[what] for part in parts) for what in ("tests", "skipped"))
    seeds = ", ".join(str(part["seed"]) for part in sorted(parts, key=lambda part: part["part"]))
    lines = [f"{len(parts)} parts ({kind}) of {', '.join(commits)}: {tests} tests, {skipped} skipped; seeds {seeds}"]
    return lines + report.text(), wrong


def main(paths):
    if not paths:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    parts = []
    for path in paths:
        try:
            with open(path) as file:
                parts.append(json.load(file))
        except (OSError, ValueError) as error:
            print(f"sums.py: {path}: {error}", file=sys.stderr)
            return 2
    lines, wrong = judge(parts)
    for line in lines + [f"WRONG: {line}" for line in wrong]:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
