"""Whatever the model prefers, the text is JSON of the schema; what the library cannot do is refused in a line."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from biphase.engine.grammar import GrammarError, Grammars, json_grammar, vocabulary_of
from biphase.engine.sampling import choose
from biphase.engine.text import Text, load_text
from biphase.errors import BadInput
from biphase.models import locate
from biphase.scheduling.request import LogitRules, Request, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def text() -> Text:
    return load_text(locate("smollm2-135m"))


@pytest.fixture(scope="module")
def grammars(text: Text) -> Grammars:
    vocabulary = vocabulary_of(text)
    assert vocabulary is not None
    return Grammars(vocabulary, text.vocab_size)


def request(name: str, grammar: str, seed: int = 0, temperature: float = 1.0) -> Request:
    sampling = SamplingParams(temperature, seed=seed, rules=LogitRules(grammar=grammar))
    return Request(name, (1, 2), 400, frozenset({2}), sampling)


def write(one: Request, grammars: Grammars, logits: Callable[[], np.ndarray]) -> list[int]:
    """Tokens up to the end of sequence, chosen from whatever ``logits`` gives."""
    while len(one.output) < 400:
        (choice,) = choose(logits()[None], [one], grammars)
        assert choice.token is not None, choice.error
        one.output.append(choice.token)
        if choice.token in one.stop_ids:
            return one.output[:-1]
    raise AssertionError("it did not end")


@pytest.mark.parametrize("seed", range(8))
def test_random_logits_give_json_of_the_schema(text: Text, grammars: Grammars, seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = request(f"r{seed}", json_grammar(PERSON), seed)
    answer = json.loads(text.decode(write(one, grammars, lambda: rng.standard_normal(text.vocab_size, np.float32))))
    assert set(answer) == {"name", "age", "kind"}
    assert len(answer["name"]) <= 8
    assert 0 <= answer["age"] <= 120
    assert answer["kind"] in ("cat", "dog")


def test_a_model_that_wants_to_stop_at_once_must_finish_its_object_first(text: Text, grammars: Grammars) -> None:
    logits = np.zeros(text.vocab_size, dtype=np.float32)
    logits[2] = 50.0
    tokens = write(request("stop", json_grammar(PERSON), temperature=0), grammars, lambda: logits)
    assert isinstance(json.loads(text.decode(tokens)), dict)


def test_white_space_between_tokens_is_bounded(text: Text, grammars: Grammars) -> None:
    logits = np.zeros(text.vocab_size, dtype=np.float32)
    logits[[token for token in range(text.vocab_size) if text.table[token].strip() == b""]] = 50.0
    one = request("space", json_grammar({"type": "object", "maxProperties": 0}), temperature=0)
    assert json.loads(text.decode(write(one, grammars, lambda: logits))) == {}


def test_a_grammar_that_breaks_fails_its_request_alone(text: Text, grammars: Grammars) -> None:
    one, other = request("left", json_grammar(PERSON)), request("well", json_grammar(PERSON))
    one.output += text.encode("no JSON", special=False)
    choices = choose(np.zeros((2, text.vocab_size), dtype=np.float32), [one, other], grammars)
    assert choices[0].token is None
    assert choices[0].error is not None
    assert "left its response_format" in choices[0].error
    assert choices[1].token is not None


def test_a_reason_is_short_and_repeats_no_state(grammars: Grammars) -> None:
    with pytest.raises(GrammarError) as caught:
        grammars.compile(json_grammar({"$ref": "#", "description": "x" * 5000})).result()
    assert str(caught.value) == "the response_format cannot be used: NoExtensionBias"


def test_a_forgotten_request_starts_anew_from_its_output(text: Text, grammars: Grammars) -> None:
    one = request("again", json_grammar(PERSON))
    one.output += text.encode('{"name"', special=False)
    before = grammars.allowed(one, json_grammar(PERSON))
    grammars.forget(["again", "nobody"])
    assert (grammars.allowed(one, json_grammar(PERSON)) == before).all()
    assert before.any()
    assert not before.all()


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "objct"}, "objct"),
        ({"type": "string", "pattern": "(?<=a)b"}, "look-around"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"enum": [f"value {n}" for n in range(20_000)]}, "bytes of schema are too many: at most 65,536"),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused_in_a_line(schema: dict[str, Any], part: str) -> None:
    with pytest.raises(BadInput, match=part) as caught:
        json_grammar(schema)
    assert "\n" not in str(caught.value)
