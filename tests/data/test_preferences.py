"""Pairs of answers: the forms in which they come, what is refused, tokens, cuts and padding."""

import json
import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrlhf.data.chat import encode_prompt
from jaxrlhf.data.preferences import (
    check_pair,
    encode_pair,
    pad_pairs,
    read_preferences,
    tokenize_preferences,
)
from jaxrlhf.data.tables import TableError
from jaxrlhf.data.tokenizer import build_word_tokenizer, load_tokenizer


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


PROMPT = [user("How many hats?"), said("Which?"), user("Red hats.")]
CHAT = {"prompt": PROMPT, "chosen": [said("3 hats.")], "rejected": [said("10 red hats.")]}
FORMS = {
    "messages": CHAT,
    "texts": CHAT | {"chosen": "3 hats.", "rejected": "10 red hats."},
    "texts, other name": {"messages": PROMPT, "chosen": "3 hats.", "rejected": "10 red hats."},
    "repeated": CHAT | {k: PROMPT + CHAT[k] for k in ("chosen", "rejected")},
    "implicit": {k: PROMPT + CHAT[k] for k in ("chosen", "rejected")},
    "implicit, a text": {"prompt": "Red hats."}
    | {k: PROMPT + CHAT[k] for k in ("chosen", "rejected")},
}


@pytest.fixture(scope="module")
def words_dir(tmp_path_factory):
    texts = ["How many hats? 10 3 hats 10 red hats.", "Which? Red hats.", "How much? 12 each."]
    return build_word_tokenizer(texts, tmp_path_factory.mktemp("hats")).name_or_path


@pytest.fixture
def words(words_dir):
    return load_tokenizer(words_dir)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_every_form_of_a_chat_is_the_same_pair(form, kind, tmp_path):
    row, path = FORMS[form] | {"margin": 2, "data_source": "shop"}, tmp_path / f"pairs.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row, row]), path)
    else:
        path.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    for record in read_preferences(path):
        assert {k: record[k] for k in CHAT} == CHAT
        assert (record["margin"], record["source"]) == (2.0, "shop")


def test_answers_that_part_inside_a_later_turn(words):
    """The shared assistant's turn is the prompt's; a question after the answer stays with it."""
    more = [said("3 hats."), user("How much?"), said("12 each.")]
    record = check_pair({"chosen": PROMPT + more, "rejected": PROMPT + more[:1]}, "here")
    assert record["prompt"] == PROMPT
    assert (record["chosen"], record["rejected"]) == (more, more[:1])
    pair = encode_pair(words, record)
    assert words.decode(pair.chosen[pair.prompt_length :]) == (
        "3 hats.<|end|><|user|>How much?<|end|><|assistant|>12 each.<|end|>"
    )
    assert pair.chosen[: len(pair.rejected)] == pair.rejected


BAD = {
    "chosen is missing": {"prompt": PROMPT, "rejected": "a"},
    "rejected is null": {"prompt": PROMPT, "chosen": "a", "rejected": None},
    "chosen: is an empty string": {"prompt": PROMPT, "chosen": " ", "rejected": "b"},
    "chosen: is int": {"chosen": 3, "rejected": "b"},
    "chosen[0].content: is null": {"chosen": [{"role": "user"}], "rejected": [said("b")]},
    "prompt[0]: is str": {"prompt": ["x"], "chosen": "a", "rejected": "b"},
    "chosen and rejected differ in kind": CHAT | {"chosen": "a"},
    "margin: is str": CHAT | {"margin": "1"},
    "margin is nan": CHAT | {"margin": float("nan")},
    "margin is -1": CHAT | {"margin": -1},
    "source: is int": CHAT | {"source": 3},
    "rejected has after the prompt messages of user": CHAT | {"rejected": [user("x")]},
    "prompt is a text that is no message": {"prompt": "else"} | FORMS["implicit"],
    "prompt is no list of messages": {"chosen": [said("a")], "rejected": [said("b")]},
}


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_row_is_named(problem, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(CHAT) + "\n" + json.dumps(BAD[problem]) + "\n")
    with pytest.raises(TableError) as error:
        read_preferences(path)
    assert str(error.value).startswith(f"{path}: row 1 (line 2): {problem}")
    assert "\n" not in str(error.value)


def test_the_prompts_tokens_are_those_that_the_sampler_would_see(words):
    pair = encode_pair(words, check_pair(CHAT, "here"))
    prompt = encode_prompt(words, PROMPT)
    assert pair.prompt_length == len(prompt)
    for row, answer in ((pair.chosen, "3 hats."), (pair.rejected, "10 red hats.")):
        assert row[: len(prompt)] == prompt
        assert words.decode(row[len(prompt) :]) == answer + "<|end|>"


def test_plain_texts_are_tokenised_as_they_are(words):
    """With their prompt apart, or within both."""
    apart = check_pair({"prompt": "How many?", "chosen": " 3 hats", "rejected": " 10"}, "here")
    within = check_pair({"chosen": "How many? 3 hats", "rejected": "How many? 10"}, "here")
    pairs = encode_pair(words, apart), encode_pair(words, within)
    for pair in pairs:
        assert words.decode(pair.chosen) == "How many? 3 hats<|end|>"
        assert words.decode(pair.rejected) == "How many? 10<|end|>"
        assert pair.prompt_length == 3
    one_in_other = encode_pair(words, check_pair({"chosen": "3", "rejected": "3 hats"}, "here"))
    assert one_in_other.prompt_length == 1
    equal = encode_pair(words, check_pair({"chosen": "3 hats", "rejected": "3 hats"}, "here"))
    assert equal.prompt_length == len(equal.chosen) - 1


def _pairs():
    long = CHAT | {"rejected": [said("10 red hats. " * 3)]}
    longest = CHAT | {"chosen": [said("3 " * 40)]}
    equal = CHAT | {"rejected": CHAT["chosen"]}
    return [check_pair(row, "here") for row in (CHAT, long, longest, equal)]


def test_overlong_and_identical_pairs(words):
    records = _pairs()
    whole = tokenize_preferences(records, words, max_length=100)
    assert (whole.rows, whole.identical, whole.filtered, whole.truncated) == ([0, 1, 2], 1, 0, 0)
    limit = len(whole.rejected[1]) - 3
    assert len(whole.rejected[0]) < limit
    filtered = tokenize_preferences(records, words, max_length=limit, source="p.jsonl")
    assert (filtered.rows, filtered.filtered, filtered.truncated) == ([0], 2, 0)
    assert filtered.place(0) == "p.jsonl: row 0 (line 1)"
    cut = tokenize_preferences(records, words, max_length=limit, overlong="truncate")
    # Of the third pair the answer alone is too long: nothing of its prompt could stay.
    assert (cut.rows, cut.filtered, cut.truncated, cut.identical) == ([0, 1], 1, 1, 1)
    assert (cut.chosen[1], cut.rejected[1]) == (whole.chosen[1][3:], whole.rejected[1][3:])
    assert cut.prompt_lengths[1] == whole.prompt_lengths[1] - 3
    with pytest.raises(ValueError, match=r"p: row 1: its longer answer makes"):
        tokenize_preferences(records, words, max_length=limit, overlong="error", source="p")
    with pytest.raises(ValueError, match="1 are of two equal answers"):
        tokenize_preferences(records, words, max_length=4)


def test_a_pair_that_the_template_refuses_is_named(words):
    record = check_pair(CHAT | {"prompt": [{"role": "judge", "content": "?"}]}, "here")
    with pytest.raises(TableError, match=r"p\.jsonl: row 1 .* unknown role judge"):
        tokenize_preferences([_pairs()[0], record], words, max_length=99, source="p.jsonl")
    words.chat_template = None
    with pytest.raises(ValueError, match="has no chat template, and records: row 0 holds"):
        tokenize_preferences(_pairs(), words, max_length=99)


def test_a_batch_holds_its_pairs_whatever_the_pad_token(words):
    data = tokenize_preferences(_pairs(), words, max_length=100)
    pads = words.pad_token_id, words.eos_token_id
    batches = [pad_pairs(data, [2, 0], pad_id=pad, multiple=8) for pad in pads]
    for batch, pad in zip(batches, pads, strict=True):
        assert batch.tokens.shape == (2, 2, 64)
        for b, i in enumerate([2, 0]):
            for side, row in enumerate((data.chosen[i], data.rejected[i])):
                n = batch.lengths[b, side]
                assert batch.tokens[b, side, :n].tolist() == row
                assert (batch.tokens[b, side, n:] == pad).all()
        assert batch.prompt_lengths.tolist() == [data.prompt_lengths[i] for i in (2, 0)]
        np.testing.assert_array_equal(batch.loss_weights, np.float32([0.5, 0.5]))
    widths = {pad_pairs(data, [i], pad_id=0, multiple=1).tokens.shape[-1] for i in range(3)}
    longest = [max(len(data.chosen[i]), len(data.rejected[i])) for i in range(3)]
    assert all(any(n <= w <= 1.5 * n for w in widths) for n in longest)
    assert all(w & (w - 1) == 0 or w % 3 == 0 for w in widths)


def test_real_pairs_of_several_turns(words, repo_root):
    shared = pathlib.Path(os.environ.get("JAXRLHF_SHARED", repo_root.parent / "shared"))
    path = shared / "data" / "preferences" / "pairs.jsonl"
    if not path.exists():
        pytest.skip("no preference pairs at hand; set JAXRLHF_SHARED to a folder with them")
    records = read_preferences(path)
    assert len(records) == 300
    assert sum(len(r["prompt"]) > 1 for r in records) == 186
    data = tokenize_preferences(records, words, max_length=10_000, source=path)
    assert len(data) + data.identical == 300
    for i in range(0, len(data), 20):
        n = data.prompt_lengths[i]
        assert data.chosen[i][:n] == data.rejected[i][:n]
        assert data.chosen[i][:n] == encode_prompt(words, data.records[i]["prompt"])
