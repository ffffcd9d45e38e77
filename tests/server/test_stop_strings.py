"""Stop strings: the result depends on the text alone, and nothing is held back without need."""

from hypothesis import example, given
from hypothesis import strategies as st

from biphase.engine.messages import Output, Submit
from biphase.engine.text import Text
from biphase.scheduling.request import SamplingParams
from biphase.server.admission import Admitted
from biphase.server.generation import Generation
from biphase.server.stopping import StopStrings

SMALL_ALPHABET = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


def first_complete(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By brute force: read letter by letter until the text ends in a stop string; the longest such wins."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(tuple(stops))
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


@given(st.lists(SMALL_ALPHABET, max_size=6), STOPS)
@example(["a", "b", "a"], ["aba", "b"])
def test_any_split_gives_the_cut_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    assert run(stops, pieces) == first_complete("".join(pieces), stops)


@given(st.lists(SMALL_ALPHABET, max_size=6), st.text("ab\n", min_size=1, max_size=4))
def test_one_stop_string_cuts_where_find_finds_it(pieces: list[str], stop: str) -> None:
    text = "".join(pieces)
    place = text.find(stop)
    assert run([stop], pieces)[0] == (text if place < 0 else text[:place])


@given(SMALL_ALPHABET, STOPS)
def test_only_a_prefix_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStrings(tuple(stops))
    shown = matcher.feed(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def generation(text: Text, stops: tuple[str, ...] = (), stop_ids: frozenset[int] = frozenset()) -> Generation:
    """Of a client that named these stop strings and ids. Ids below 256 are bytes and may stand in any text."""
    submit = Submit("r", (1, 2, 3), 1000, text.eos_ids | stop_ids, SamplingParams(0.0))
    return Generation(Admitted((submit,), 1, stops, stop_ids, False, False, False), text)


@example(whole="a\x07b", stop="b", sizes=[])
@given(whole=st.text(max_size=8), stop=st.text(min_size=1, max_size=2), sizes=st.lists(st.integers(1, 4), max_size=40))
def test_any_split_of_utf8_into_tokens_and_steps(byte_text: Text, whole: str, stop: str, sizes: list[int]) -> None:
    """Tokens are single bytes and steps carry several of them; text and stop come out as ``str.find`` has them."""
    tokens = list(whole.encode())
    answer, shown, finish = generation(byte_text, (stop,)), "", None
    for size in [*sizes, len(tokens) or 1]:
        step, tokens = tokens[:size], tokens[size:]
        delta = answer.push(Output("r", tuple(step), None if tokens else "length"))
        shown, finish = shown + delta.text, delta.finish_reason
        if finish is not None:
            break
    place = whole.find(stop)
    assert (shown, finish) == ((whole, "length") if place < 0 else (whole[:place], "stop"))
    expected = len(whole.encode()) if place < 0 else len(whole[: place + len(stop)].encode())
    assert answer.tokens == expected


def test_the_end_of_sequence_counts_as_a_token_and_gives_no_text(byte_text: Text) -> None:
    answer = generation(byte_text)
    delta = answer.push(Output("r", (*b"hi", 257), "stop"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("hi", "stop", None)
    assert answer.tokens == 3


def test_a_stop_id_of_the_client_is_its_stop_reason(byte_text: Text) -> None:
    delta = generation(byte_text, stop_ids=frozenset({7})).push(Output("r", (*b"hi", 7), "stop"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("hi", "stop", 7)


def test_a_character_cut_off_by_the_end_becomes_one_replacement_character(byte_text: Text) -> None:
    answer = generation(byte_text)
    assert answer.push(Output("r", tuple("€".encode()[:2]))).text == ""
    assert answer.push(Output("r", (), "length")).text == "\ufffd"
