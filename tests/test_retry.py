"""What ``objckpt.store.retry`` promises, by a clock of its own: nothing here waits."""

from __future__ import annotations

import itertools
import random
import threading

import pytest

from objckpt.errors import StoreNotFoundError, StorePermissionError, StoreTransientError
from objckpt.store.retry import RetryPolicy, is_throttling, is_transient


@pytest.fixture
def sleeps(monkeypatch):
    """The sleeps that were asked for; each moves the clock, as every attempt does by 1 ms."""
    asked = []
    now = [1000.0]

    def sleep(seconds):
        asked.append(seconds)
        now[0] += seconds

    def monotonic():
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", monotonic)
    return asked


def failing(times, then="done", error=StoreTransientError):
    count = itertools.count(1)

    def attempt():
        number = next(count)
        if number <= times:
            raise error(f"failure {number}", uri="s3://b", key="k") from OSError(f"cause {number}")
        return then

    return attempt


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", True),
        (503, "", True),
        (500, "InternalError", True),
        (502, "", True),
        (504, "", True),
        (429, "", True),
        (408, "", True),
        (307, "", True),
        (400, "RequestTimeout", True),
        (400, "SlowDown", True),
        (200, "InternalError", True),
        (0, "SlowDown", True),
        (409, "OperationAborted", True),
        (400, "", False),
        (400, "BadDigest", False),
        (301, "PermanentRedirect", False),
        (403, "AccessDenied", False),
        (404, "NoSuchKey", False),
        (412, "PreconditionFailed", False),
        (501, "NotImplemented", False),
    ],
)
def test_status_and_code_say_what_is_worth_another_try(status, code, expected):
    assert is_transient(status, code) is expected


def test_throttling_is_told_from_failures_that_may_have_had_an_effect():
    assert is_throttling(503, "SlowDown")
    assert is_throttling(429)
    assert not is_throttling(503)
    assert not is_throttling(500, "InternalError")


def test_a_burst_of_failures_ends_in_success(sleeps):
    assert RetryPolicy().run(failing(7)) == "done"
    assert len(sleeps) == 7


def test_the_deadline_is_total_and_the_first_cause_is_chained(sleeps):
    with pytest.raises(StoreTransientError) as caught:
        RetryPolicy(deadline=60).run(failing(10**6))
    error = caught.value
    assert sum(sleeps) <= 60
    assert error.attempts == len(sleeps) + 1 > 3
    assert f"after {error.attempts} attempts" in str(error)
    assert (error.uri, error.key) == ("s3://b", "k")
    assert str(error.__cause__) == "cause 1"


@pytest.mark.parametrize("kind", [StoreNotFoundError, StorePermissionError, ValueError])
def test_a_refusal_is_not_tried_again(sleeps, kind):
    error = kind("no")

    def attempt():
        raise error

    with pytest.raises(kind) as caught:
        RetryPolicy().run(attempt)
    assert caught.value is error
    assert sleeps == []


def test_a_refusal_after_failures_tells_how_often_it_was_tried(sleeps):
    outcomes = iter([StoreTransientError("busy"), StoreTransientError("busy"), StorePermissionError("no")])

    def attempt():
        raise next(outcomes)

    with pytest.raises(StorePermissionError) as caught:
        RetryPolicy().run(attempt)
    assert caught.value.attempts == 3


def test_waits_grow_are_random_and_have_a_limit(sleeps):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 # how a failure is repeated
    random.seed(seed)
    policy = RetryPolicy(deadline=1e9, first_wait=0.5, longest_wait=8)
    policy.run(failing(200))
    for index, slept in enumerate(sleeps):
        assert 0 <= slept <= min(8, 0.5 * 2**index)
    late = sleeps[10:]
    assert max(late) > 4
    assert len(set(late)) > 100


def test_who_is_abandoned_stops_without_waiting(sleeps):
    abandoned = threading.Event()

    def attempt():
        abandoned.set()
        raise StoreTransientError("busy")

    with pytest.raises(StoreTransientError) as caught:
        RetryPolicy(first_wait=1000, longest_wait=1000).run(attempt, abandoned=abandoned)
    assert caught.value.attempts == 1
