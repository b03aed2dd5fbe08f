"""What S3 and GCS share, piece by piece: windows of parts, ends of uploads, refusals, keys."""

from __future__ import annotations

import pytest

from objckpt.errors import StoreError, StorePermissionError, StoreTransientError
from objckpt.store.keys import bucket_key
from objckpt.store.put_if_absent import put_if_absent
from objckpt.store.refusals import Place, xml_text
from objckpt.store.retry import RetryPolicy
from objckpt.store.uploads import abort_failed, complete
from objckpt.store.window import in_window

SHORT = RetryPolicy(deadline=0.05, first_wait=0.001, longest_wait=0.01)


def lost(*_):
    raise StoreTransientError("no answer")


def test_the_first_failure_tells_those_on_their_way():
    told = []

    def act(item, failed):
        if item == "bad":
            raise StorePermissionError("no")
        told.append(failed.wait(20))

    with pytest.raises(StorePermissionError):
        in_window(act, ["good", "bad"], 2)
    assert told == [True]


def test_after_a_failure_nothing_more_is_begun():
    begun = []

    def act(item, failed):  # as in_window calls it
        begun.append(item)
        raise StorePermissionError("no")

    with pytest.raises(StorePermissionError):
        in_window(act, range(5), 1)
    assert begun == [0]


def test_results_come_in_the_order_of_the_items():
    assert in_window(lambda item, failed: item * 2, range(9), 4) == [*range(0, 18, 2)]  # likewise


def test_a_completion_whose_answers_were_all_lost_asks_what_the_key_holds():
    assert complete(SHORT, lost, lambda: "the object") == "the object"
    with pytest.raises(StoreTransientError, match="no answer"):
        complete(SHORT, lost, lambda: None)


def test_a_clean_up_that_fails_is_only_logged(caplog):
    def forget():
        raise StorePermissionError("may not abort")

    abort_failed(SHORT, forget, "data/x")
    assert "may not abort" in caplog.text


def test_what_a_client_says_is_cleaned_of_secrets():
    place = Place("s3://b/run", "b", "run/", "http://host", lambda text: text.replace("hush", "***"))
    error = ValueError("signed with hush")
    for told in (place.no_credentials(error, "run/k", "log in"), place.unanswered(error, "run/k")):
        assert "signed with ***" in str(told)
        assert "hush" not in str(told)


def test_the_text_of_a_refusal_is_read_whatever_bytes_it_holds():
    assert xml_text(b"<Error><Message> a &lt; b \xff </Message></Error>", "Message") == "a < b \ufffd"
    assert xml_text(b"<Error><Message/></Error>", "Code") is None


@pytest.mark.parametrize("character", ["\x00", "\n", "\x1f", "\x7f", "\ufffe", "\uffff"])
def test_a_key_that_xml_cannot_hold_is_refused(character):
    assert bucket_key("s3://b", "run/", "a b+c%\u00e4") == "run/a b+c%\u00e4"
    with pytest.raises(StoreError, match="control character"):
        bucket_key("s3://b", "run/", f"a{character}b")


@pytest.mark.parametrize(
    ("held", "won"), [([b"mine"], True), ([b"minf", b"mine"], True), ([b"its", b"its"], False)]
)
def test_a_create_that_was_refused_is_lost_only_if_two_looks_say_so(held, won):
    """One flipped bit on the way back would make two jobs of one, which never commit again."""

    class Held:
        uri, key = "s3://bucket/run", "manifest/1"

        def read_back(self, _):
            return held.pop(0)

    refused = put_if_absent(
        Held(), memoryview(b"mine"), RetryPolicy(deadline=1.0), lambda: None, lambda _: False
    )
    assert refused is won
    assert not held
