import numpy as np
import pytest

from jaxrlhf.data.chat import encode_example, encode_prompt

USER = [{"role": "user", "content": "Tom has 3 apples and buys 4 more."}]
TURNS = [
    {"role": "user", "content": "There are 3 pens."},
    {"role": "assistant", "content": "3 + 4 = 7"},
    {"role": "user", "content": "There are 4 pens."},
]
GENERATION = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize("messages", [USER, TURNS])
def test_the_prompt_is_the_rendered_template(words, messages):
    ids = encode_prompt(words, messages)
    text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages) + "<|assistant|>"
    assert words.decode(ids) == text
    assert all(type(token) is int for token in ids)


@pytest.mark.parametrize("messages", [USER, TURNS])
@pytest.mark.parametrize("answer", ["3 + 4 = 7\n#### 7", "7", "", "3 + 4 = 7"])
def test_the_mask_is_the_answer_and_its_end(words, messages, answer):
    """Also where the same words, and the same stop token, occur in the prompt."""
    tokens, mask = encode_example(words, messages, answer)
    prompt = encode_prompt(words, messages)
    assert tokens[: len(prompt)].tolist() == prompt
    np.testing.assert_array_equal(mask, np.arange(len(tokens)) >= len(prompt))
    assert words.decode(tokens[mask].tolist()) == answer + words.eos_token
    assert tokens.dtype == np.int32
    assert mask.dtype == bool


def test_a_stop_token_inside_the_answer_does_not_end_it(words):
    tokens, mask = encode_example(words, USER, "3<|end|> + 4")
    assert words.decode(tokens[mask].tolist()) == "3<|end|> + 4<|end|>"


def test_what_follows_the_stop_token_is_left_off(words):
    words.chat_template = "{% for m in messages %}" + "{{ m.content }}<|end|>\n{% endfor %}"
    tokens, mask = encode_example(words, USER, "7")
    assert words.decode(tokens[mask].tolist()) == "7<|end|>"


def test_a_plain_text_prompt_has_no_template(words):
    assert encode_prompt(words, "3 + 4 =") == words.encode("3 + 4 =")
    tokens, mask = encode_example(words, "3 + 4 =", " 7")
    assert words.decode(tokens.tolist()) == "3 + 4 = 7<|end|>"
    assert mask.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    "template",
    [
        # A thinking prefix that the rendering of a finished turn leaves out.
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>3{% endif %}",
        # The last turn alone is kept.
        "<|user|>{{ messages[-1].content }}<|end|>" + GENERATION,
    ],
)
def test_a_template_that_changes_the_prompt_is_refused(words, template):
    words.chat_template = template
    with pytest.raises(ValueError, match=r"differently once an answer follows: from token \d+"):
        encode_example(words, USER, "7")


def test_a_template_that_does_not_end_the_answer(words):
    words.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}" + GENERATION
    )
    with pytest.raises(ValueError, match=r"none of the stop ids .*pass the token that ends"):
        encode_example(words, USER, "7")
    newline = words.encode("\n")
    tokens, mask = encode_example(words, USER, "7", stop_ids=newline)
    assert words.decode(tokens[mask].tolist()) == "7\n"


def test_options_reach_the_template(words):
    words.chat_template = "{{ messages[0].content }}{% if short %}<|end|>{% endif %}"
    ids = encode_prompt(words, USER, template_options={"short": True})
    assert ids == [*encode_prompt(words, USER), words.eos_token_id]
