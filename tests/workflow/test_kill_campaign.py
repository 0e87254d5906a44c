"""Two rounds of the campaign of random kills. The seed is printed; each run draws another."""

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "campaign"))

from kills import Campaign  # noqa: E402


@pytest.mark.timeout(900)
def test_whatever_is_killed_the_next_run_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}: python tests/campaign/kills.py --folder NEW --rounds 2 --seed {seed}")
    # the campaign marks its processes by this process's environment
    monkeypatch.setenv("DRAFTSTATES_TEST_MARK", "")
    monkeypatch.setenv("PYTHONPATH", "")
    campaign = Campaign(tmp_path, seed=seed)
    try:
        for _ in range(2):
            print(campaign.round())
    finally:
        campaign.end()
