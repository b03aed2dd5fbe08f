"""The instruments themselves: a fault does what it says, where the schedule says, each time."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from scripted_http import ScriptedServer, reply

from objckpt.errors import CommitUnknownError, SpoolError, StoreTransientError
from objckpt.manifest import Attempt, Save, Step
from objckpt.spool import Spool
from objckpt.testing.faults import (
    At,
    Crashed,
    Fault,
    FaultyStore,
    Nth,
    Rule,
    Sometimes,
    faulty_spool,
)
from objckpt.testing.proxy import FaultProxy, Harm, Trouble
from objckpt.testing.worlds import DictStore

DATA = bytes(range(256))
CREATES = frozenset({"create"})


def filled(*rules, **options):
    inner = DictStore()
    inner.put("k", DATA)
    return inner, FaultyStore(inner, rules, sleep=lambda _: None, **options)


def read(store, key="k", size=300):
    into = bytearray(b"?" * size)
    return store.read(key, memoryview(into)), bytes(into)


@pytest.mark.parametrize(
    ("fault", "there"),
    [
        (Fault.FAIL_BEFORE, False),
        (Fault.THROTTLE, False),
        (Fault.HANG, False),
        (Fault.TEAR, False),
        (Fault.FAIL_AFTER, True),
        (Fault.LOSE_ANSWER, True),
    ],
)
def test_a_put_that_fails_has_its_effect_or_not(fault, there):
    inner, store = filled(Rule(fault))
    with pytest.raises(StoreTransientError, match="SlowDown" if fault is Fault.THROTTLE else "put 'new'"):
        store.put("new", b"x")
    assert ("new" in inner.objects) == there
    store.put("new", b"x")
    assert inner.read_whole("new") == b"x"


def test_an_error_of_ones_own_is_raised():
    _, store = filled(Rule(Fault.FAIL_BEFORE, error=lambda: PermissionError("mine")))
    with pytest.raises(PermissionError, match="mine"):
        store.head("k")


def test_a_create_that_fails_after_its_effect_is_unknown_and_one_without_an_answer_finds_out():
    inner, store = filled(Rule(Fault.FAIL_AFTER), Rule(Fault.LOSE_ANSWER, Nth(2, 2), CREATES))
    with pytest.raises(CommitUnknownError):
        store.create("new", b"x")
    assert inner.read_whole("new") == b"x"
    assert store.create("new", b"x") is True
    assert store.create("new", b"y") is False


def test_a_hang_waits_until_the_deadline():
    waited = []
    store = FaultyStore(DictStore(), [Rule(Fault.HANG)], hang=90.0, sleep=waited.append)
    with pytest.raises(StoreTransientError):
        list(store.list(""))
    assert waited == [90.0]


def test_a_read_that_is_cut_has_half_of_its_bytes_and_nothing_right_behind_them():
    _, store = filled(Rule(Fault.TRUNCATE))
    assert read(store) == (128, DATA[:128] + bytes(172))
    assert read(store) == (256, DATA + b"?" * 44)


def test_a_flipped_bit_is_one_and_the_same_each_time():
    found = [read(filled(Rule(Fault.FLIP, bit=7))[1]) for _ in range(2)]
    count, data = found[0]
    difference = [a ^ b for a, b in zip(data[:count], DATA, strict=True)]
    assert sum(x.bit_count() for x in difference) == 1
    assert found[0] == found[1]
    others = {read(filled(Rule(Fault.FLIP, bit=bit))[1]) for bit in range(20)}
    assert len(others) > 10


def test_a_torn_put_leaves_an_upload_that_can_be_aborted():
    now = 100.0
    inner, store = filled(Rule(Fault.TEAR), clock=lambda: now)
    with pytest.raises(StoreTransientError):
        store.put("data/new", b"x")
    assert store.torn == [("data/new", 100.0)]
    now = 160.0
    assert store.abort_uploads("data/", 60.0) == 0
    assert store.abort_uploads("records/", 30.0) == 0
    assert store.abort_uploads("data/", 30.0) == 1
    assert store.torn == []
    assert inner.objects.keys() == {"k"}


def test_a_torn_delete_has_taken_half():
    inner, store = filled(Rule(Fault.TEAR))
    for key in "abcd":
        inner.put(key, b"x")
    with pytest.raises(StoreTransientError):
        store.delete(iter("abcd"))
    assert inner.objects.keys() == {"k", "c", "d"}


def test_a_duplicate_arrives_some_calls_later_or_when_told():
    inner, store = filled(Rule(Fault.DUPLICATE, Nth(1), later=2), Rule(Fault.DUPLICATE, Nth(2)))
    buffer = bytearray(b"first")
    store.put("a", buffer)
    buffer[:] = b"XXXXX"
    store.create("b", b"second")
    inner.objects.clear()
    store.put("c", b"")
    assert inner.objects.keys() == {"a", "c"}
    assert inner.read_whole("a") == b"first"
    assert store.injector.deliver() == 1
    assert inner.read_whole("b") == b"second"
    assert store.injector.deliver() == 0


@pytest.mark.parametrize(("fault", "there"), [(Fault.CRASH_BEFORE, False), (Fault.CRASH_AFTER, True)])
def test_after_a_crash_nothing_has_an_effect_from_no_thread(fault, there):
    inner, store = filled(Rule(fault))
    with pytest.raises(Crashed):
        store.put("new", b"x")
    assert ("new" in inner.objects) == there
    raised = []

    def other():
        try:
            store.put("other", b"x")
        except Crashed as error:
            raised.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert raised
    assert "other" not in inner.objects
    assert store.crashed


def test_a_crash_of_a_real_process_runs_no_handler():
    program = """
from objckpt.testing.faults import Fault, FaultyStore, Rule, kill_process
from objckpt.testing.worlds import DictStore
store = FaultyStore(DictStore(), [Rule(Fault.CRASH_AFTER)], crash=kill_process)
try:
    store.put("k", b"x")
finally:
    print("handled")
"""
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


def test_a_rule_is_about_its_verbs_and_keys_and_the_first_that_hits_counts():
    _, store = filled(
        Rule(Fault.FAIL_BEFORE, Nth(2), frozenset({"put"}), "data/*"), Rule(Fault.CRASH_BEFORE, At(6))
    )
    store.put("data/1", b"")
    store.put("records/1", b"")
    store.head("data/1")
    with pytest.raises(StoreTransientError):
        store.put("data/2", b"")
    store.put("data/3", b"")
    assert [number for number, _ in store.injector.hits] == [4]
    with pytest.raises(Crashed):
        store.head("k")
    assert [c.verb for c in store.calls] == ["put", "put", "head", "put", "put", "head"]


def fates(seed, keys):
    _, store = filled(Rule(Fault.FAIL_BEFORE, Sometimes(0.3, seed)))
    failed = []
    for key in keys:
        try:
            store.put(key, b"")
        except StoreTransientError:
            failed.append(key)
    return store, failed


def test_a_probability_deals_the_same_to_the_same_calls_in_any_order():
    keys = [f"data/{n}" for n in range(200)]
    store, failed = fates(1, keys)
    assert 30 < len(failed) < 90
    assert set(fates(1, reversed(keys))[1]) == set(failed)
    assert set(fates(2, keys)[1]) != set(failed)
    _, again = filled(*store.injector.replay())
    for key in keys:
        if key in failed:
            with pytest.raises(StoreTransientError):
                again.put(key, b"")
        else:
            again.put(key, b"")


# ------------------------------------------------------------------ the system


def test_a_spool_meets_the_faults_of_the_system(tmp_path):
    path = tmp_path / "spool"
    path.mkdir()
    save = Save(Attempt(1), Step(10))
    rules = [
        Rule(
            Fault.TEAR,
            verbs=frozenset({"write"}),
            error=lambda: OSError(errno.ENOSPC, "No space left on device"),
        ),
        Rule(Fault.FLIP, verbs=frozenset({"read"})),
    ]
    with faulty_spool(rules) as injector:
        spool = Spool(path)
        with pytest.raises(SpoolError, match="No space left on device"):
            spool.write_checksums(save, (1, 2))
        spool.write_checksums(save, (1, 2))
        found = spool._read(f"save-{save}.crc")
        spool.close()
    assert len(injector.hits) == 2
    right = (path / f"save-{save}.crc").read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(found, right, strict=True)) == 1
    assert {"open", "write", "rename", "read"} <= {c.verb for c in injector.calls}
    assert os.listdir.__module__ == "posix"


# ------------------------------------------------------------------ the proxy


REQUEST = b"PUT /k HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"


def ask(proxy, data=REQUEST):
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(data)
        got = b""
        while not got.endswith(b"done"):
            came = client.recv(1000)
            if not came:
                return got
            got += came
        return got


def test_what_no_trouble_is_about_passes_unchanged():
    with ScriptedServer(reply(200, b"done")) as server:
        with FaultProxy(server.url, [Trouble(Harm.CUT_ANSWER, b"^GET ")]) as proxy:
            assert ask(proxy).endswith(b"\r\n\r\ndone")
        assert server.asked[0][:2] == ["PUT", "/k"]
        assert server.asked[0][3] == b"hello"
        assert proxy.requests == ["PUT /k HTTP/1.1"]
        assert proxy.hits == []


def test_a_dropped_answer_is_that_of_a_request_which_was_carried_out():
    with ScriptedServer(reply(200, b"done"), reply(200, b"done")) as server:
        with FaultProxy(server.url, [Trouble(Harm.CUT_ANSWER, b"^PUT /k")]) as proxy:
            assert ask(proxy) == b""
            assert server.asked[0][3] == b"hello"
            assert ask(proxy).endswith(b"done")
        assert [line for line, _ in proxy.hits] == ["PUT /k HTTP/1.1"]


def test_an_answer_is_cut_after_so_many_bytes():
    with ScriptedServer(reply(200, b"done")) as server, FaultProxy(server.url) as proxy:
        proxy.arm(Trouble(Harm.CUT_ANSWER, b"^PUT", after=9))
        assert ask(proxy) == b"HTTP/1.1 "


def test_a_reset_is_one():
    with ScriptedServer(reply(200, b"done")) as server, FaultProxy(server.url) as proxy:
        proxy.arm(Trouble(Harm.CUT_ANSWER, b"^PUT", reset=True))
        with pytest.raises(ConnectionResetError):
            ask(proxy)


def test_a_request_is_cut_after_so_many_bytes():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with FaultProxy(f"http://127.0.0.1:{port}", [Trouble(Harm.CUT_REQUEST, b"^PUT", after=20)]) as proxy:
            assert ask(proxy) == b""
            server, _ = listener.accept()
            with server:
                assert server.recv(1000) == REQUEST[:20]
                assert server.recv(1000) == b""


def test_a_half_open_connection_answers_nothing_until_the_proxy_ends():
    with ScriptedServer(reply(200, b"done")) as server:
        with FaultProxy(server.url, [Trouble(Harm.HALF_OPEN, b"^PUT")]) as proxy:
            host, _, port = proxy.url.removeprefix("http://").partition(":")
            client = socket.create_connection((host, int(port)), timeout=0.3)
            client.sendall(REQUEST)
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert server.asked[0][3] == b"hello"
        client.settimeout(10)
        assert client.recv(1) == b""
        client.close()


def test_the_nth_request_on_a_kept_connection_meets_the_trouble():
    trouble = Trouble(Harm.CUT_ANSWER, b"^PUT", nth=3)
    with ScriptedServer(then=reply(200, b"done")) as server, FaultProxy(server.url, [trouble]) as proxy:
        host, _, port = proxy.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            for _ in range(2):
                client.sendall(REQUEST)
                got = b""
                while not got.endswith(b"done"):
                    got += client.recv(1000)
            client.sendall(REQUEST)
            assert client.recv(1000) == b""
