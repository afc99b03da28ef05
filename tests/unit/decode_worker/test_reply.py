"""Streaming text: whole characters, and never a piece of a stop string."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from phasor.decode_worker.reply import ReplyText, StopFilter

TINY = Path(__file__).parents[2] / "data" / "tiny-code-256" / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY))


def stream(tokenizer: Tokenizer, data: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], str]:
    """Feed bytes as tokens (this tokenizer's ids are bytes) until a stop string; returns pieces and the stop."""
    text = ReplyText(tokenizer, stop)
    pieces = []
    for byte in data:
        pieces.append(text.push(byte))
        if text.stop_string:
            break
    pieces.append(text.finish())
    return pieces, text.stop_string


@pytest.mark.parametrize("text", ["hello", "👩‍👩‍👧 family", "中文字符", "aé中🙂b", "", "\r\n\0 tail "])
def test_characters_are_never_split(tokenizer: Tokenizer, text: str) -> None:
    pieces, _ = stream(tokenizer, text.encode())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_shown_at_the_end_as_decode_shows_it(tokenizer: Tokenizer) -> None:
    data = "é".encode() + "🙂".encode()[:2]
    pieces, _ = stream(tokenizer, data)
    assert "".join(pieces) == tokenizer.decode(list(data))


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=40))
def test_joined_pieces_equal_decode_for_any_bytes(tokenizer: Tokenizer, data: bytes) -> None:
    pieces, _ = stream(tokenizer, data)
    assert "".join(pieces) == tokenizer.decode(list(data))


def test_a_stop_string_across_tokens_never_leaks(tokenizer: Tokenizer) -> None:
    pieces, stop = stream(tokenizer, b"one END two", ("END",))
    assert ("".join(pieces), stop) == ("one ", "END")
    assert not any("E" in piece for piece in pieces)


def test_what_only_looked_like_a_stop_string_is_shown(tokenizer: Tokenizer) -> None:
    pieces, stop = stream(tokenizer, b"one EN", ("END",))
    assert ("".join(pieces), stop) == ("one EN", "")


def test_the_earliest_stop_wins_and_of_two_there_the_longer() -> None:
    stop_filter = StopFilter(("lo", "llo", "hel"))
    assert stop_filter.push("say hello") == "say "
    assert stop_filter.matched == "hel"
    other = StopFilter(("ab", "abc"))
    assert other.push("xabc") == "x"
    assert other.matched == "abc"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=10),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_filter_equals_cutting_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    """Against the obvious definition: cut at the first place where any stop string is complete."""
    stop_filter = StopFilter(tuple(stops))
    shown = ""
    whole = ""
    for piece in pieces:
        shown += stop_filter.push(piece)
        whole += piece
        if stop_filter.matched:
            break
    shown += stop_filter.finish()
    starts = [whole.index(s) for s in stops if s in whole]
    assert shown == (whole[: min(starts)] if starts else whole)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=10),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 6),
)
def test_a_stop_string_counts_if_it_ends_behind_min_tokens(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    """Against the obvious definition: the first stop string that ends in a piece after the exempt ones."""
    stop_filter = StopFilter(tuple(stops))
    shown, whole, num_exempt, cut = "", "", 0, None
    for number, piece in enumerate(pieces, start=1):
        shown += stop_filter.push(piece, may_stop=number > min_tokens)
        whole += piece
        num_exempt = len(whole) if number <= min_tokens else num_exempt
        found = [
            start
            for stop in stops
            for start in range(len(whole))
            if whole.startswith(stop, start) and start + len(stop) > num_exempt
        ]
        if found:
            cut = min(found)
            break
    shown += stop_filter.finish()
    assert bool(stop_filter.matched) == (cut is not None)
    assert shown == whole[:cut]
