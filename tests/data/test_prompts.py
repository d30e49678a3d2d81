import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrlhf.data.prompts import PromptDataset, PromptIterator, epoch_order, tokenize_prompts
from jaxrlhf.data.tables import TableError


def _dataset(n):
    ids = [[i, i + 1] for i in range(n)]
    return PromptDataset(records=[{"n": i} for i in range(n)], token_ids=ids, rows=list(range(n)))


def _take(iterator, n):
    return [iterator.next() for _ in range(n)]


def _same(a, b):
    return all(
        x.prompt_ids.tolist() == y.prompt_ids.tolist()
        and x.token_ids == y.token_ids
        and x.records == y.records
        and x.epoch == y.epoch
        for x, y in zip(a, b, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 13), data=st.data(), seed=st.integers(0, 5))
def test_resuming_anywhere_gives_exactly_the_remainder(size, data, seed):
    """Epoch boundaries and one step to either side of them are among the positions."""
    batch = data.draw(st.integers(1, size))
    whole = PromptIterator(_dataset(size), batch, seed)
    steps = 3 * whole.batches_per_epoch + 1
    states, batches = [whole.state()], []
    for _ in range(steps):
        batches.append(next(whole))
        states.append(whole.state())
    for done, state in enumerate(states):
        other = PromptIterator(_dataset(size), batch, seed)
        _take(other, data.draw(st.integers(0, 2)))  # wherever it stood before
        other.restore(json.loads(json.dumps(state)))
        assert _same(_take(other, steps - done), batches[done:])


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 13), data=st.data())
def test_an_epoch_is_full_batches_without_repeats(size, data):
    batch = data.draw(st.integers(1, size))
    iterator = PromptIterator(_dataset(size), batch, seed=0)
    for epoch in range(3):
        drawn = _take(iterator, size // batch)
        ids = np.concatenate([b.prompt_ids for b in drawn])
        assert len(set(ids.tolist())) == len(ids) == size // batch * batch
        assert {b.epoch for b in drawn} == {epoch}
        for b in drawn:
            assert b.prompt_ids.dtype == np.int32
            assert b.records == [{"n": i} for i in b.prompt_ids]
            assert b.token_ids == [[i, i + 1] for i in b.prompt_ids]
            assert b.places == [f"records: row {i}" for i in b.prompt_ids]


def test_orders_differ_by_epoch_and_seed_and_nothing_else():
    orders = [tuple(epoch_order(s, e, 50).tolist()) for s in range(3) for e in range(3)]
    assert len(set(orders)) == 9
    assert orders[0] == tuple(epoch_order(0, 0, 50).tolist())


def test_what_an_epoch_drops_comes_back_later():
    iterator = PromptIterator(_dataset(7), 4, seed=0)
    seen = np.concatenate([b.prompt_ids for b in _take(iterator, 12)])
    assert set(seen.tolist()) == set(range(7))


def test_a_batch_does_not_share_memory_with_the_iterator():
    iterator = PromptIterator(_dataset(6), 2, seed=0)
    start = iterator.state()
    first = iterator.next()
    expected = first.prompt_ids.tolist()
    first.prompt_ids[:] = -1
    iterator.restore(start)
    assert iterator.next().prompt_ids.tolist() == expected


def test_sizes_that_cannot_be():
    with pytest.raises(ValueError, match="batch of 4 prompts cannot be drawn from 3"):
        PromptIterator(_dataset(3), 4, seed=0)
    with pytest.raises(ValueError, match="batch of 0 prompts"):
        PromptIterator(_dataset(3), 0, seed=0)
    with pytest.raises(ValueError, match="seed -1 is negative"):
        PromptIterator(_dataset(3), 1, seed=-1)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (PromptIterator(_dataset(8), 3, 0), "batch_size"),
        (PromptIterator(_dataset(8), 2, 1), "seed"),
        (PromptIterator(_dataset(9), 2, 0), "prompts"),
        (
            PromptIterator(
                PromptDataset(_dataset(8).records, [[0, 1], *[[i] for i in range(7)]], []), 2, 0
            ),
            "checksum",
        ),
    ],
)
def test_a_position_in_other_data_is_refused(other, key):
    with pytest.raises(ValueError, match=f"is of other data: {key} was"):
        other.restore(PromptIterator(_dataset(8), 2, 0).state())
    with pytest.raises(ValueError, match="has the keys"):
        other.restore({"batches_drawn": 1})


def test_a_chat_template_is_needed_only_for_messages(words, record):
    words.chat_template = None
    plain = [record(prompt="Tom has 3."), record(prompt="There are 4.")]
    dataset = tokenize_prompts(plain, words, max_prompt_length=100)
    assert dataset.token_ids == [words.encode(row["prompt"]) for row in plain]
    with pytest.raises(ValueError, match=r"no chat template, and the prompt of t\.parquet: row 2 "):
        tokenize_prompts([*plain, record()], words, max_prompt_length=100, source="t.parquet")


@pytest.fixture
def records(record):
    contents = ["Tom has 3.", "Tom has 3 apples and buys 4 more.", "There are 3."]
    return [record(prompt=[{"role": "user", "content": c}]) for c in contents]


@pytest.mark.parametrize(
    ("overlong", "rows", "filtered", "truncated"),
    [("filter", [0, 2], 1, 0), ("truncate", [0, 1, 2], 0, 1)],
)
def test_overlong_prompts_are_counted(words, records, overlong, rows, filtered, truncated):
    whole = tokenize_prompts(records, words, max_prompt_length=100)
    assert (whole.filtered, whole.truncated, len(whole)) == (0, 0, 3)
    seen = []
    dataset = tokenize_prompts(
        records,
        words,
        max_prompt_length=8,
        overlong=overlong,
        on_progress=lambda *a: seen.append(a),
    )
    assert dataset.rows == rows
    assert dataset.place(len(rows) - 1) == "records: row 2"
    assert dataset.records == [records[i] for i in rows]
    assert dataset.token_ids == [whole.token_ids[i][-8:] for i in rows]
    assert (dataset.filtered, dataset.truncated) == (filtered, truncated)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_prompt_of_exactly_the_limit_stays(words, records):
    length = len(tokenize_prompts(records[:1], words, max_prompt_length=100).token_ids[0])
    assert tokenize_prompts(records[:1], words, max_prompt_length=length).filtered == 0
    with pytest.raises(ValueError, match="no prompt of 1 fits max_prompt_length"):
        tokenize_prompts(records[:1], words, max_prompt_length=length - 1)


def test_an_overlong_prompt_as_an_error_is_named(words, records):
    with pytest.raises(ValueError, match=r"t.jsonl: row 1 \(line 2\): prompt has 12 tokens"):
        tokenize_prompts(records, words, max_prompt_length=8, overlong="error", source="t.jsonl")
    with pytest.raises(ValueError, match="overlong='drop' is unknown"):
        tokenize_prompts(records, words, max_prompt_length=8, overlong="drop")


def test_a_prompt_that_cannot_be_encoded_is_named(words, record):
    bad = record(prompt=[{"role": "tool", "content": "x"}])
    place = r"t.parquet: row 1: prompt cannot be encoded"
    with pytest.raises(TableError, match=rf"^{place} \(TemplateError: unknown role tool\)"):
        tokenize_prompts([record(), bad], words, max_prompt_length=99, source="t.parquet")
    for prompt in (
        [{"role": "user", "content": "a \ud83d"}],
        "a \ud83d",
    ):  # unless read_table saw it
        with pytest.raises(TableError, match=rf"^{place} \(\w+: .+\); correct it"):
            tokenize_prompts(
                [record(), record(prompt=prompt)], words, max_prompt_length=99, source="t.parquet"
            )
    words.chat_template = "{{ '' }}"
    with pytest.raises(ValueError, match=r"t.parquet: row 0: prompt has no tokens"):
        tokenize_prompts([record()], words, max_prompt_length=8, source="t.parquet")
