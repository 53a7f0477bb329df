"""Write a list of the slowest test files, tests/longest.txt, from the durations in the output of pytest.

    python -m pytest -n 2 --dist loadfile --durations=0 > durations.txt
    python .ci/longest.py durations.txt

Without an argument it exits with 1 if a listed file does not exist. `tests/conftest.py` starts the listed files first.
"""

import re
import sys
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
LIST = TESTS / "longest.txt"
#: files that take more seconds than this are listed
LONG = 10
LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+tests/([^:]+)::")


def longest(log: str) -> list[str]:
    """Return the files that take more than `LONG` seconds, in descending order."""
    seconds: Counter[str] = Counter()
    for line in log.splitlines():
        if match := LINE.match(line):
            seconds[match[2]] += float(match[1])
    return [file for file, total in seconds.most_common() if total > LONG]


def main() -> int:
    if sys.argv[1:]:
        LIST.write_text("".join(f"{file}\n" for file in longest(Path(sys.argv[1]).read_text())))
        return 0
    missing = [file for file in LIST.read_text().split() if not (TESTS / file).exists()]
    for file in missing:
        print(f"{LIST}:1 there is no tests/{file}: write the list anew by .ci/longest.py")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
