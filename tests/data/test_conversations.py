import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrlhf.data.conversations import (
    check_conversation,
    read_conversations,
    tokenize_conversations,
)
from jaxrlhf.data.tables import TableError


def said(role, content):
    return {"role": role, "content": content}


USER, SAYS = said("user", "There are 3 pens."), said("assistant", "3 + 4 = 7")
MORE, LAST = said("user", "3 + 4"), said("assistant", "7")
CHAT = [USER, SAYS, MORE, LAST]


@pytest.mark.parametrize(
    ("row", "messages", "context"),
    [
        ({"messages": CHAT}, CHAT, 0),
        ({"messages": CHAT, "prompt": "3 pens", "response": None}, CHAT, 0),
        ({"messages": [*CHAT, MORE]}, [*CHAT, MORE], 0),
        ({"prompt": CHAT[:3], "response": "7"}, CHAT, 3),
        ({"prompt": CHAT[:3], "completion": [LAST]}, CHAT, 3),
        ({"prompt": [USER], "completion": CHAT[1:]}, CHAT, 1),
        ({"messages": CHAT[:3], "response": "7"}, CHAT, 3),
    ],
)
def test_every_form_becomes_one(row, messages, context):
    found = check_conversation(row | {"id": 5}, "x")
    assert (found["messages"], found["context"], found["id"]) == (messages, context, 5)


def test_plain_texts_stay_texts():
    row = {"prompt": "3 + 4 =", "completion": " 7", "id": 5}
    assert check_conversation(row, "x") == {"prompt": "3 + 4 =", "response": " 7", "id": 5}


def test_a_call_of_a_tool_may_stand_in_place_of_words():
    turn = said("assistant", "") | {"tool_calls": [{"name": "f"}]}
    found = check_conversation({"messages": [USER, turn | {"name": None}]}, "x")
    assert found["messages"] == [USER, turn]  # parquet's nulls are gone


BAD = [
    ({"text": "3"}, ": messages is missing (the row has text); give messages, or prompt with"),
    ({"prompt": "3"}, ": messages is missing (the row has prompt); give"),
    ({"response": "3"}, ": response are given; keep messages alone, or one prompt with one"),
    ({"prompt": "3", "response": "7", "completion": "7"}, ": prompt and response and completion"),
    ({"prompt": "3", "messages": CHAT, "response": "7"}, ": messages and prompt and response are"),
    ({"prompt": "3", "response": [LAST]}, ": prompt is a text and response are messages; make"),
    ({"prompt": "3", "response": 7}, ": response: is int; make it a list of messages or a string"),
    ({"prompt": "3", "response": " "}, ": response: is an empty string; fill it in"),
    ({"messages": "3 + 4"}, ": messages is a string; make it a list"),
    ({"messages": []}, ": messages: has no messages; give at least one."),
    ({"messages": [USER, {"role": "assistant"}]}, ": messages[1].content: is null; make it a str"),
    ({"messages": [USER, {"content": "3"}]}, ": messages[1].role: is null; make it a string"),
    ({"messages": [USER, "7"]}, ": messages[1]: is str; make it a message with role and content"),
    ({"messages": [USER, MORE]}, ": messages has no turn of the assistant to train on (its roles "),
    ({"prompt": CHAT, "completion": [MORE]}, "to train on (its roles are user); add one or remove"),
    ({"messages": [USER, said("assistant", "")]}, ": messages[1].content: is an empty string"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_are_named(tmp_path, row, message):
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in ({"messages": CHAT}, row)))
    with pytest.raises(TableError) as error:
        read_conversations(file)
    assert str(error.value).startswith(f"{file}: row 1 (line 2): ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_parquet_and_jsonl_say_the_same(tmp_path):
    rows = [{"messages": CHAT, "source": "a"}, {"messages": CHAT[:2], "source": "b"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_conversations(tmp_path / "x.parquet") == read_conversations(tmp_path / "x.jsonl")


# Tokenising

# 12 tokens, of which the 3rd from the last on are trained, and 26.
RECORDS = [check_conversation({"messages": m}, "x") for m in ([USER, LAST], CHAT)]


def lengths(dataset):
    return [len(example.tokens) for example in dataset.examples]


def test_overlong_conversations_are_left_out_cut_or_refused(words):
    def tokenize(**options):
        return tokenize_conversations(RECORDS, words, source="c.jsonl", **options)

    short, long = lengths(tokenize(max_length=99))
    assert 8 < short < long
    calls = []
    filtered = tokenize(max_length=short, on_progress=lambda *done: calls.append(done))
    assert (lengths(filtered), filtered.filtered, filtered.truncated) == ([short], 1, 0)
    assert filtered.records == RECORDS[:1]
    assert calls == [(1, 2), (2, 2)]
    cut = tokenize(max_length=long - 1, overlong="truncate")
    assert (lengths(cut), cut.filtered, cut.truncated) == ([short, long - 1], 0, 1)
    whole = tokenize(max_length=long)
    assert cut.examples[1].tokens.tolist() == whole.examples[1].tokens[:-1].tolist()
    assert cut.examples[1].answer_mask.tolist() == whole.examples[1].answer_mask[:-1].tolist()
    # Cut before the first answer, nothing of it would be trained on.
    cut = tokenize(max_length=short, overlong="truncate", turns="last")
    assert (lengths(cut), cut.filtered, cut.truncated) == ([short], 1, 0)
    with pytest.raises(ValueError, match=rf"c.jsonl: row 1 .line 2.: the conversation has {long}"):
        tokenize(max_length=short, overlong="error")
    with pytest.raises(ValueError, match="no conversation of 2 fits max_length 3; raise it"):
        tokenize(max_length=3)
    assert tokenize(max_length=short).place(0) == "c.jsonl: row 0 (line 1)"
    assert whole.as_prompts().token_ids == [e.tokens.tolist() for e in whole.examples]


def test_plain_texts_and_messages_in_one_file(words):
    text = {"prompt": "3 + 4 =", "response": " 7"}
    dataset = tokenize_conversations([*RECORDS, text], words, max_length=99)
    assert words.decode(dataset.examples[2].tokens.tolist()) == "3 + 4 = 7<|end|>"
    assert dataset.examples[2].answer_mask.tolist() == [False] * 4 + [True] * 2


def test_what_cannot_be_encoded_is_named(words):
    odd = check_conversation({"messages": [said("tool", "3"), LAST]}, "x")
    with pytest.raises(TableError, match=r"c.parquet: row 2: the conversation .* unknown role too"):
        tokenize_conversations([*RECORDS, odd], words, max_length=99, source="c.parquet")
    words.chat_template = "{{ messages[-1].content }}<|end|>"
    with pytest.raises(TableError, match=r"row 0: .* chat template of .* renders the prompt diff"):
        tokenize_conversations(RECORDS, words, max_length=99)
    words.chat_template = "{% if messages|length > 1 %}{{ messages[-1].content }}<|end|>{% endif %}"
    with pytest.raises(TableError, match="row 0: its first token is the assistant's"):
        tokenize_conversations(RECORDS, words, max_length=99)
    words.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat template, and records: row 0 holds messag"):
        tokenize_conversations(RECORDS, words, max_length=99)
