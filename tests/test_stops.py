"""Stop strings: found wherever they fall, never let out, the same streamed or not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.text.stops import StopMatcher


def stream(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What is emitted after each piece and at the end, as an engine drives the matcher."""
    matcher, out, hit = StopMatcher(stops), [], False
    for piece in pieces:
        text, hit = matcher.add(piece)
        out.append(text)
        if hit:
            break
    return [*out, "" if hit else matcher.flush()], hit


def cut(stops: list[str], text: str) -> tuple[str, bool]:
    """The definition, spelled out: the first place where a stop completes, the longest one there."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def test_stop_string_split_over_tokens_is_held_back():
    assert stream(["\n\nUser:"], ["Hi", ".\n", "\nUs", "er", ": no"]) == (["Hi", ".", "", "", "", ""], True)


def test_stop_string_inside_a_piece_cuts_the_piece():
    assert stream(["END"], ["one END two"]) == (["one ", ""], True)


def test_text_that_only_began_a_stop_is_let_out():
    assert stream(["END"], ["the E", "N", "emy"]) == (["the ", "", "ENemy", ""], False)


def test_held_back_text_comes_out_at_the_end():
    assert stream(["END"], ["the EN"]) == (["the ", "EN"], False)


def test_the_stop_that_completes_first_counts_whatever_their_order():
    for stops in (["abcd", "bc"], ["bc", "abcd"]):
        assert "".join(stream(stops, ["xab", "cd"])[0]) == "xa"


def test_of_stops_that_end_together_the_longest_counts():
    for stops in (["\n", "\n\n\n"], ["c", "abc"], ["abc", "c", "bc"]):
        text = "x" + max(stops, key=len)
        assert "".join(stream(stops, [text])[0]) == cut(stops, text)[0]
    assert "".join(stream(["c", "abc"], ["xa", "b", "c"])[0]) == "x"


def test_a_repeated_prefix_holds_back_the_longest_possible_beginning():
    assert stream(["aab"], ["aa", "a", "b"]) == (["", "a", "", ""], True)


def test_nothing_comes_after_a_hit():
    matcher = StopMatcher(["x"])
    assert matcher.add("axb") == ("a", True)
    assert matcher.add("more") == ("", True)
    assert matcher.flush() == ""


def test_without_stops_text_passes_through():
    assert stream([], ["a", "", "b"]) == (["a", "", "b", ""], False)


@given(
    stops=st.lists(st.text("abé😀", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("abé😀", max_size=6), max_size=8),
)
@settings(max_examples=800, deadline=None)
def test_any_cutting_into_pieces_emits_what_cutting_the_whole_text_does(stops, pieces):
    out, hit = stream(stops, pieces)
    assert ("".join(out), hit) == cut(stops, "".join(pieces))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    text=st.text("ab", max_size=12),
)
@settings(max_examples=400, deadline=None)
def test_no_more_is_held_back_than_could_begin_a_stop(stops, text):
    matcher = StopMatcher(stops)
    emitted, hit = matcher.add(text)
    held = text[len(emitted) :]
    assert hit or not held or any(stop.startswith(held) for stop in stops)
