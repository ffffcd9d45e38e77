"""Chat templates: what Hugging Face's environment offers, and what a sandbox must not."""

import pytest

from biphase.engine.chat_template import compile_template
from biphase.errors import BadInput

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "é <b>"}]


def render(source: str) -> str:
    return compile_template(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(MESSAGES)


def test_blocks_are_trimmed_as_templates_expect() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n{{ bos_token }}"
    assert render(source) == "system\nuser\n<s>"


def test_loop_controls_and_the_generation_tag() -> None:
    source = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}"
    assert render(source) == "user"
    assert render("{% generation %}{{ eos_token }}{% endgeneration %}") == "</s>"


def test_tojson_does_not_escape_for_html() -> None:
    assert render("{{ messages[1].content | tojson }}") == '"é <b>"'
    assert render("{{ {'a': [1]} | tojson(indent=1) }}") == '{\n "a": [\n  1\n ]\n}'


def test_the_assistant_is_asked_to_speak() -> None:
    assert render("{% if add_generation_prompt %}go{% endif %}") == "go"


def test_strftime_now_gives_a_date() -> None:
    assert render("{{ strftime_now('%Y') }}").startswith("20")


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + none }}", "None"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ missing.attribute }}", "missing"),
    ],
)
def test_what_a_template_raises_is_an_answer(source: str, part: str) -> None:
    with pytest.raises(BadInput, match=part):
        render(source)


def test_a_template_that_is_no_jinja_is_named_with_its_line() -> None:
    with pytest.raises(BadInput, match="line 2"):
        render("a\n{% for %}")
