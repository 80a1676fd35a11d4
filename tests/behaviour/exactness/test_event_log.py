"""What planned models do in training runs of many kinds stays what it was, until somebody changes it on purpose."""

from __future__ import annotations

import pytest

from tests import event_log

QUICK = (  # one of each sort; `python -m tests.event_log` compares all
    *("chain-60", "gpt-50", "lengths-bytes", "lengths-share", "accumulation", "gan", "retained", "waiting"),
    *("broken", "budgets", "too-small", "half", "two-batch-sizes", "inner-gradient"),
)


@pytest.mark.parametrize("name", QUICK)
def test_a_training_run_does_what_the_event_log_says(name):
    differing = event_log.differences(event_log.record(name), event_log.expected()[name])

    assert not [*differing], "see tests/event_log.py: python -m tests.event_log --write keeps what is new"


def test_every_run_has_an_entry_and_trains_like_plain_pytorch():
    log = event_log.expected()

    assert list(log) == list(event_log.RUNS)
    assert set(QUICK) <= set(log)
    assert all(record["like_plain"] for record in log.values())


def test_a_run_that_did_something_else_is_seen():
    log = event_log.expected()["chain-60"]
    changed = {**log, "captured": {"": 2}}

    assert [*event_log.differences(changed, log)]
    assert not [*event_log.differences(log, log)]
