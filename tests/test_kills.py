"""SIGKILL at random instants, a slice for every day: trainers, uploaders, nodes, against a real server. ``make soak`` runs more of it."""

from __future__ import annotations

import pytest
from soak import soak

SEED = 4
KILLS = 40


@pytest.mark.timeout(400)
def test_whoever_is_killed_whenever_nothing_committed_is_lost_and_nothing_corrupt_is_loaded(weed):
    """What it draws is a function of the seed; when exactly a kill hits is not, so a failure need not come back at once."""
    total = soak(SEED, KILLS, weed=weed)
    assert not total.failures, "\n".join(total.failures)
    assert total.kills.total() >= KILLS
    assert (total.losses, total.corrupt, total.processes, total.orphans) == (0, 0, 0, 0)
    assert total.resumed, "it restored something"
    assert total.adopted, "uploaders died with saves in their slots"
    assert total.unheard, "uploaders finished what their trainers did not live to see"
    assert set(total.instants) == {"start", "stage", "cycle", "close"}
