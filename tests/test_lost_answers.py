"""Answers that get lost: of a create, of a put's completion, of a delete. No false conflict, no duplicate, no lost commit.

Over memory, by a store that loses them, and over real servers, by a proxy that drops them once the server has done what it was told.
"""

from __future__ import annotations

import uuid

import pytest
from protocol import history, newest, run_of, saved, started

from objckpt.commit import Outcome
from objckpt.errors import CommitUnknownError, StoreError, StoreTransientError
from objckpt.manifest import Save, Step
from objckpt.store import http, open_store, read_all
from objckpt.store.retry import RetryPolicy
from objckpt.testing.faults import Fault, FaultyStore, Nth, Rule, Sometimes
from objckpt.testing.proxy import FaultProxy, Harm, Trouble
from objckpt.testing.servers import FakeGCS
from objckpt.testing.worlds import DictStore, durable

PART = 5 << 20
#: Two parts.
LARGE = bytes(range(256)) * (PART // 256) + b"tail"
CREATES = frozenset({"create"})
READS = frozenset({"read"})


# ------------------------------------------------------------------ memory


def losing(store, *more, fault=Fault.LOSE_ANSWER, verbs=CREATES):
    """A store that loses every answer of these verbs."""
    return FaultyStore(store, [Rule(fault, Nth(1, 10**9), verbs), *more])


def test_a_create_without_an_answer_says_who_won():
    inner = DictStore()
    store = losing(inner)
    assert store.create("k", b"mine") is True
    assert store.create("k", b"mine") is True
    assert store.create("k", b"another's") is False
    assert inner.read_whole("k") == b"mine"
    assert [c.verb for c in store.calls] == [*["create", "read"] * 3, "read"]  # lost only after two looks


def test_a_create_is_unknown_only_if_the_read_back_fails_too():
    inner = DictStore()
    store = losing(inner, Rule(Fault.FAIL_BEFORE, Nth(1), READS))
    with pytest.raises(CommitUnknownError, match="Read the key when the store is back"):
        store.create("k", b"mine")
    assert store.create("k", b"mine") is True
    refused = FaultyStore(inner, [Rule(Fault.FAIL_BEFORE, Nth(1), CREATES)])
    with pytest.raises(StoreTransientError):  # certain: it had no effect
        refused.create("other", b"mine")


def committed_once(store, *saves):
    """Each save is in the newest version, once, whole, and no version says it anew."""
    version = newest(store)
    assert [e.save for e in version.kept] == list(saves)
    versions = history(store)
    assert [v.number for v in versions] == list(range(1, len(versions) + 1))
    assert [v.change for v in versions].count("commit") == len(saves)
    assert len(versions) == 1 + len(saves)
    for entry in version.kept:
        for record in run_of(store).contents(entry).records:
            for o in record.objects:
                assert read_all(store, o.key) == f"{entry.save} of rank {record.rank}".encode()


def test_a_job_none_of_whose_writes_is_ever_answered_commits_each_save_once():
    inner = DictStore()
    store = FaultyStore(inner, [Rule(Fault.LOSE_ANSWER, Nth(1, 10**9), CREATES)])
    version = started(store, world_size=2)
    saves = [saved(store, version, step) for step in (10, 20, 30)]
    committed_once(inner, *saves)
    assert (
        len(store.injector.hits) == 1 + 3 * 4
    )  # the start, and of each save two records, an index, a version


def again(call, tries=50):
    """Does it again for as long as what became of it is not known, as an uploader does."""
    for _ in range(tries):
        try:
            return call()
        except (CommitUnknownError, StoreTransientError):
            continue
    raise AssertionError("there is no end to it")


@pytest.mark.parametrize("seed", range(30))
def test_no_commit_is_lost_doubled_or_refused_whatever_answers_and_read_backs_fail(seed):
    inner = DictStore()
    store = FaultyStore(
        inner,
        [
            Rule(fault, Sometimes(0.1, seed + 100 * number))
            for number, fault in enumerate(
                (Fault.LOSE_ANSWER, Fault.FAIL_AFTER, Fault.FAIL_BEFORE, Fault.DUPLICATE)
            )
        ],
    )
    run = run_of(store)
    version = started(inner, world_size=2)
    saves = [Save(version.attempt, Step(step)) for step in (10, 20, 30)]
    for save in saves:
        for rank in (0, 1):
            again(lambda save=save, rank=rank: durable(store, version.run, save, rank, 2))
        assert again(lambda save=save: run.commit(save, 2)) is Outcome.COMMITTED
    store.injector.deliver()
    committed_once(inner, *saves)
    # The same calls from the same seed: what happened can be played again by its numbers.
    assert store.injector.hits
    assert {r.fault for r in store.injector.replay()} == {r.fault for _, r in store.injector.hits}


def test_two_ranks_that_commit_without_answers_do_not_take_each_other_for_a_conflict():
    """Both find all records and write the same version: one wins, and both say committed."""
    inner = DictStore()
    version = started(inner, world_size=2)
    save = saved(inner, version, 10, commit=False)
    one, other = (run_of(losing(inner)) for _ in range(2))
    assert one.commit(save, 2) is Outcome.COMMITTED
    assert other.commit(save, 2) is Outcome.COMMITTED
    committed_once(inner, save)


@pytest.mark.parametrize("fault", [Fault.LOSE_ANSWER, Fault.TEAR, Fault.FAIL_AFTER])
def test_a_delete_whose_answer_is_lost_is_done_again(fault):
    inner = DictStore()
    for key in "abcd":
        inner.put(key, b"x")
    store = FaultyStore(inner, [Rule(fault, Nth(1), frozenset({"delete"}))])
    again(lambda: store.delete(list("abcd")))
    assert not inner.objects
    assert len(store.calls) == 2


# ------------------------------------------------------------------ real servers


class OnServer:
    """A server behind a proxy, and how the requests of its protocol look."""

    def __init__(self, server, scheme, create, delete, complete):
        self.server, self.scheme = server, scheme
        self.create, self.delete, self.complete = create, delete, complete

    def store(self, endpoint, uri, deadline=20.0):
        options = {
            **self.server.storage_options,
            "endpoint_url": endpoint,
            "part_size": PART,
            "deadline": deadline,
        }
        store = open_store(uri, **options)
        store._retry = RetryPolicy(deadline=deadline, first_wait=0.001, longest_wait=0.01)
        return store


@pytest.fixture(scope="module")
def fake_gcs():
    with FakeGCS() as server:
        yield server


@pytest.fixture(scope="module", params=["SeaweedFS", "fake-gcs-server"])
def place(request):
    if request.param == "SeaweedFS":
        return OnServer(
            request.getfixturevalue("weed"),
            "s3",
            create=rb"(?i)^PUT [^?]* HTTP(?s:.*)\nif-none-match:",
            delete=rb"^(POST \S+\?delete|DELETE )",
            complete=rb"^POST \S+\?uploadId=",
        )
    return OnServer(
        request.getfixturevalue("fake_gcs"),
        "gs",
        create=rb"^POST /upload/\S+ifGenerationMatch=0",
        delete=rb"^DELETE ",
        complete=rb"^POST \S+/compose",
    )


@pytest.fixture
def proxy(place):
    with FaultProxy(place.server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def uri(place):
    return f"{place.scheme}://{place.server.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def direct(place, uri):
    """The store, asked without the proxy."""
    return place.store(place.server.endpoint_url, uri)


def dropped(pattern, **more):
    return Trouble(Harm.CUT_ANSWER, pattern, **more)


HARMS = {
    "dropped": {"harm": Harm.CUT_ANSWER},
    "dropped by a reset": {"harm": Harm.CUT_ANSWER, "reset": True},
    "cut in its status line": {"harm": Harm.CUT_ANSWER, "after": 7},
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_create_whose_answer_is_lost_on_the_way_says_who_won(place, proxy, uri, direct, harm):
    store = place.store(proxy.url, uri)
    lost = Trouble(pattern=place.create, **harm)
    proxy.arm(lost)
    assert store.create("k", b"mine") is True
    assert len(proxy.hits) == 1, proxy.requests
    proxy.arm(lost)
    assert store.create("k", b"another's") is False
    assert len(proxy.hits) == 1
    assert read_all(direct, "k") == b"mine"
    assert [o.key for o in direct.list("")] == ["k"]


def test_a_create_is_unknown_only_if_the_read_back_finds_no_way_either(place, proxy, uri, direct):
    store = place.store(proxy.url, uri, deadline=0.5)
    proxy.arm(dropped(place.create, times=None), dropped(b"^GET ", times=None))
    with pytest.raises(CommitUnknownError):
        store.create("k", b"mine")
    assert read_all(direct, "k") == b"mine"
    proxy.arm()
    assert store.create("k", b"mine") is True
    # The read-back alone fails, and is tried again: known.
    proxy.arm(dropped(place.create), dropped(b"^GET "))
    assert store.create("k2", b"mine") is True
    assert len(proxy.hits) == 2


def test_a_create_that_was_cut_on_its_way_there_is_created_once(place, proxy, uri, direct):
    store = place.store(proxy.url, uri)
    proxy.arm(Trouble(Harm.CUT_REQUEST, place.create, after=100))
    assert store.create("k", b"mine") is True
    assert len(proxy.hits) == 1
    assert read_all(direct, "k") == b"mine"


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_put_in_parts_whose_completion_is_not_answered_is_whole_and_leaves_nothing_behind(
    place, proxy, uri, direct, harm
):
    store = place.store(proxy.url, uri)
    proxy.arm(Trouble(pattern=place.complete, **harm))
    store.put("k", LARGE)
    assert len(proxy.hits) == 1, proxy.requests
    assert read_all(direct, "k") == LARGE
    assert [o.key for o in direct.list("")] == ["k"]
    assert direct.abort_uploads("", -3600.0) == 0


def test_a_put_none_of_whose_completions_is_answered_is_found_done(place, proxy, uri, direct):
    store = place.store(proxy.url, uri, deadline=0.5)
    proxy.arm(dropped(place.complete, times=None))
    store.put("k", LARGE)
    assert proxy.hits
    assert read_all(direct, "k") == LARGE


def test_a_put_in_one_request_whose_answer_is_lost_is_put_once_more(place, proxy, uri, direct):
    store = place.store(proxy.url, uri)
    proxy.arm(dropped(b"^(PUT|POST) "))
    store.put("k", b"small")
    assert len(proxy.hits) == 1
    assert read_all(direct, "k") == b"small"


def test_a_delete_whose_answer_is_lost_is_no_error(place, proxy, uri, direct):
    store = place.store(proxy.url, uri)
    for key in ("a", "b"):
        direct.put(key, b"x")
    proxy.arm(dropped(place.delete))
    store.delete(["a", "b"])
    assert len(proxy.hits) == 1
    assert list(direct.list("")) == []


@pytest.mark.parametrize("write", range(1, 8))
def test_a_job_that_loses_an_answer_at_any_write_commits_each_save_once(place, proxy, uri, direct, write):
    """Of each save by two ranks two shards, two records, an index and a version are written; then comes the next."""
    store = place.store(proxy.url, uri)
    version = started(direct, world_size=2)
    proxy.arm(dropped(rb"^(PUT|POST) ", nth=write))
    saves = [saved(store, version, step) for step in (10, 20)]
    assert len(proxy.hits) == 1
    committed_once(direct, *saves)


def test_a_start_none_of_whose_creates_is_answered_is_one_start(place, proxy, uri, direct):
    store = place.store(proxy.url, uri)
    proxy.arm(dropped(place.create, times=None))
    run = run_of(store)
    run.prove()
    version = started(store, world_size=1)
    assert (
        len(proxy.hits) >= 3
    )  # a request on a kept connection that ends without an answer is sent once more
    assert [v.number for v in history(direct)] == [1]
    assert newest(direct) == version
    assert [o.key for o in direct.list("probe/")] == []


# ------------------------------------------------------------------ other troubles on the way


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble(Harm.CUT_ANSWER, b"^GET ", after=100_000),
        Trouble(Harm.CUT_ANSWER, b"^GET ", after=100_000, times=3, reset=True),
        Trouble(Harm.DELAY, b"^GET ", seconds=0.05),
    ],
    ids=["cut", "reset", "delayed"],
)
def test_a_read_that_is_cut_goes_on_where_it_stopped(place, proxy, uri, direct, trouble):
    direct.put("k", LARGE)
    store = place.store(proxy.url, uri)
    proxy.arm(trouble)
    assert read_all(store, "k", len(LARGE)) == LARGE
    assert proxy.hits


def test_an_endpoint_that_hangs_is_given_up_by_its_time_out(place, proxy, uri, direct, monkeypatch):
    direct.put("k", b"x")
    made = http.Endpoint.__init__

    def soon(self, scheme, host, port, tls, _connect, _read, *rest):
        made(self, scheme, host, port, tls, 0.3, 0.3, *rest)

    monkeypatch.setattr(http.Endpoint, "__init__", soon)
    store = place.store(proxy.url, uri, deadline=0.2)
    proxy.arm(Trouble(Harm.HALF_OPEN, b"^GET ", times=None))
    with pytest.raises(StoreError):
        read_all(store, "k", 1)
    assert proxy.hits
    proxy.arm()
    assert read_all(store, "k", 1) == b"x"
