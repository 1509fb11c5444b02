"""docs/errors.md shows what a user really sees: three errors of real jobs, as they were raised.

Run as a script it writes the page's blocks anew, the traceback without torch's own frames. Times,
and what depends on the moment, are left out of the comparison.
"""

import re
import sys
from pathlib import Path

import pytest
from launch import run_job

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/errors.md"
JOBS = {
    "StageError": {"fault": "raise-F", "rank": 1},
    "PeerLostError": {"fault": "kill-F", "rank": 1},
    "StallError": {"fault": "drop", "rank": 1, "stall_timeout_s": 2.0},
}


def raised(name):
    """The text of that error on rank 0."""
    ends, _, transcript = run_job({"mode": "processes", "num_ranks": 3, **JOBS[name]})
    error = ends[0].error
    assert error and error["type"] == name, transcript
    text = f"rrfp.{name}: {error['text']}".replace(f"{ROOT}/", "").rstrip()
    # The frames of torch above the user's are of no interest on the page.
    return re.sub(r'(\(most recent call last\):\n).*?(  File "tests/)', r"\1  ...\n\2", text,
                  count=1, flags=re.DOTALL)


def block(name):
    return re.search(rf"```text\n(rrfp\.{name}: .*?)\n```", PAGE.read_text(), re.DOTALL)


def timeless(text):
    """The sentences of a text without what differs from run to run, in alphabetical order."""
    text = re.sub(r" \(which says this\)|, as last heard [\d.]+ s ago|line \d+, ", "", text)
    text = re.sub(r'gave "[^"]*" .*?, so', "gave ..., so", text, flags=re.DOTALL)
    text = re.sub(r'File "[^"]*", ', "", text)
    text = re.sub(r"\d+(\.\d+)?", "N", text)
    return sorted(line.strip() for line in re.split(r"\n|\. ", text) if line.strip(" ^~."))


@pytest.mark.parametrize("name", JOBS)
def test_page_shows_what_is_raised(name):
    shown = timeless(block(name).group(1))
    seen = timeless(raised(name))
    if name == "StageError":
        assert shown == seen
    else:  # who noticed first and what each rank was doing differ from run to run
        words = {"PeerLostError": "lost rank N", "StallError": "nothing could run on any rank"}
        for text in (shown, seen):
            assert any(words[name] in line for line in text), text


def write():
    text = PAGE.read_text()
    for name in JOBS:
        text = text.replace(block(name).group(1), raised(name))
    PAGE.write_text(text)


if __name__ == "__main__":
    sys.exit(write())
