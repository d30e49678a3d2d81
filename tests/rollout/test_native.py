"""The native sampler's behaviour: layout, stop ids, seeds, programs, progress, refusals."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import specs
from jaxrlhf.rollout import decoding, native, sampling
from jaxrlhf.types import FINISH_LENGTH, FINISH_STOP

KEY = sampling.step_key(0, 0)
STOPS = [3, 40, 41, 42, 90]


def make(config, **changes):
    defaults = {
        "max_prompt_length": 12,
        "max_response_length": 10,
        "stop_ids": STOPS,
        "pad_id": 0,
        "chunk_length": 4,
        "prompt_bucket": 8,
        "batch_size": 6,
    }
    return native.NativeSampler(config, **(defaults | changes))


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def rollout(config, params, prompts):
    return make(config).generate(
        params, prompts, prompt_ids=range(7), key=KEY, samples_per_prompt=3, policy_version=5
    )


def test_layout(rollout, prompts, check_layout):
    check_layout(rollout, prompts, 3, STOPS, 10, 0, version=5)
    assert rollout.tokens.shape == (21, 22)
    # The sample has what the definitions speak about: rows of several lengths, both reasons.
    assert set(rollout.finish_reason) == {FINISH_STOP, FINISH_LENGTH}
    assert len(set(rollout.lengths - rollout.prompt_lengths)) > 3


@pytest.mark.parametrize("short", [True, False])
def test_a_shorter_limit_cuts_the_same_responses(
    config, params, prompts, check_layout, rollout, short
):
    lengths = rollout.lengths - rollout.prompt_lengths
    row = int(np.flatnonzero((rollout.finish_reason == FINISH_STOP) & (lengths > 1))[0])
    limit = 1 if short else int(lengths[row])
    sampler = make(config, max_response_length=limit)
    out = sampler.generate(params, prompts, prompt_ids=range(7), key=KEY, samples_per_prompt=3)
    check_layout(out, prompts, 3, STOPS, limit, 0)
    np.testing.assert_array_equal(out.lengths - out.prompt_lengths, np.minimum(lengths, limit))
    for i, end in enumerate(out.lengths):
        np.testing.assert_array_equal(out.tokens[i, :end], rollout.tokens[i, :end])
    # A stop token in the last place is a stop.
    assert out.finish_reason[row] == (FINISH_LENGTH if short else FINISH_STOP)


def test_every_stop_id_ends_a_row_and_only_that(config, params, prompts, rollout):
    """A response under more stop ids is the one under fewer, cut after the first stop token."""
    sampler = make(config, stop_ids=STOPS[:1])
    fewer = sampler.generate(params, prompts, prompt_ids=range(7), key=KEY, samples_per_prompt=3)
    seen = set()
    for row in range(21):
        start = fewer.prompt_lengths[row]
        response = fewer.tokens[row, start : fewer.lengths[row]].tolist()
        stops = [i for i, token in enumerate(response) if token in STOPS]
        cut = response[: stops[0] + 1] if stops else response
        assert rollout.tokens[row, start : rollout.lengths[row]].tolist() == cut
        seen |= {cut[-1]} & set(STOPS)
    assert len(seen) > 2


def test_pad_equal_to_a_stop_id_changes_nothing(config, params, prompts, rollout):
    sampler = make(config, pad_id=STOPS[0])
    out = sampler.generate(
        params, prompts, prompt_ids=range(7), key=KEY, samples_per_prompt=3, policy_version=5
    )
    real = np.arange(22) < rollout.lengths[:, None]
    np.testing.assert_array_equal(out.tokens[real], rollout.tokens[real])
    assert (out.tokens[~real] == STOPS[0]).all()
    equal(out.replace(tokens=0), rollout.replace(tokens=0))


def test_same_seed_same_bits_and_no_step_repeats_another(config, params, prompts, rollout):
    def run(step):
        return make(config).generate(
            params,
            prompts,
            prompt_ids=range(7),
            key=sampling.step_key(0, step),
            samples_per_prompt=3,
            policy_version=5,
        )

    equal(run(0), rollout)
    rows = [
        tuple(row[12:]) for r in (rollout, run(1)) for row in r.tokens if (row[12:] > 3).sum() > 4
    ]
    assert len(rows) > 10
    assert len(set(rows)) == len(rows)


def test_a_prompt_that_occurs_twice_gets_fresh_samples(config, params, prompts, rollout):
    """As at the seam of two epochs: not the same completion twice."""
    twice = [prompts[3], prompts[2], prompts[3]]
    sampler = make(config)
    out = sampler.generate(params, twice, prompt_ids=[3, 2, 3], key=KEY, samples_per_prompt=3)
    np.testing.assert_array_equal(out.tokens[:3], rollout.tokens[9:12])
    assert len({tuple(row) for row in out.tokens[[0, 1, 2, 6, 7, 8]]}) == 6
    np.testing.assert_array_equal(out.group_ids, [0] * 3 + [1] * 3 + [2] * 3)


def test_greedy_ignores_the_noise(config, params, prompts, teacher_forced):
    sampler = make(config)
    runs = [
        sampler.generate(
            params, prompts, prompt_ids=range(7), key=sampling.step_key(0, s), temperature=0.0
        )
        for s in (0, 1)
    ]
    equal(*runs)
    logits = teacher_forced(params, config, runs[0])
    mask = runs[0].response_mask
    np.testing.assert_array_equal(logits.argmax(-1)[mask], runs[0].tokens[mask])
    expected = np.asarray(jax.nn.log_softmax(logits)).max(-1)
    np.testing.assert_allclose(runs[0].log_probs[mask], expected[mask], atol=1e-4)


def test_programs_are_few_and_settings_of_a_call_compile_nothing(config, prompts):
    config = dataclasses.replace(config, num_layers=1)  # met by no other test
    params = specs.init_params(jax.random.key(0), config)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    sampler = make(config, top_p=0.9, max_response_length=7, prompt_bucket=6)
    short = [p for p in prompts if len(p) <= 6]
    sampler.generate(params, short, prompt_ids=range(len(short)), key=KEY)
    assert compiled
    assert sampler.compile_count == 3  # parameters, prefill, chunk
    other = jax.tree.map(lambda x: x * 1.5, params)
    for step, temperature in enumerate((0.0, 0.7, 1.3)):
        key = sampling.step_key(4, step)
        compiled.clear()
        out = sampler.generate(
            other,
            short[: 1 + step],
            prompt_ids=range(1 + step),
            key=key,
            temperature=temperature,
            policy_version=step,
        )
        assert not compiled
    assert sampler.compile_count == 3
    assert (out.policy_version[out.response_mask] == 2).all()
    # A longer prompt is another bucket, and an equal sampler shares the programs.
    sampler.generate(params, prompts, prompt_ids=range(7), key=KEY)
    assert sampler.compile_count == 5
    twin = make(config, top_p=0.9, max_response_length=7, prompt_bucket=6)
    twin.generate(params, prompts, prompt_ids=range(7), key=KEY)
    assert twin.compile_count == 0


def test_parameters_are_read_at_every_call_and_not_kept(config, params, prompts, rollout):
    sampler = make(config)
    mine = specs.init_params(jax.random.key(5), config)
    seen = [weakref.ref(leaf) for leaf in jax.tree.leaves(mine)]
    first = sampler.generate(mine, prompts, prompt_ids=range(7), key=KEY, samples_per_prompt=3)
    del mine
    gc.collect()
    assert not any(ref() is not None for ref in seen)
    assert (first.tokens != rollout.tokens).any()
    again = sampler.generate(
        params, prompts, prompt_ids=range(7), key=KEY, samples_per_prompt=3, policy_version=5
    )
    equal(again, rollout)


def test_progress_and_fetches(config, params, prompts, monkeypatch):
    fetched, reports = [], []
    device_get = jax.device_get

    def counted(tree):
        fetched.append(sum(np.size(x) for x in jax.tree.leaves(tree)))
        return device_get(tree)

    monkeypatch.setattr(native.jax, "device_get", counted)
    sampler = make(config, stop_ids=STOPS[:1])  # the 9 tokens after the first in 3 chunks
    out = sampler.generate(
        params,
        prompts,
        prompt_ids=range(7),
        key=KEY,
        samples_per_prompt=3,
        on_progress=lambda *report: reports.append(report),
    )
    waves = 4  # 2 prompts of 3 samples each; 7 prompts
    assert len(fetched) <= waves * (3 + 1)
    assert sorted(fetched)[:-waves] == [2] * (len(fetched) - waves)
    tokens, finished, total = zip(*reports, strict=True)
    assert reports[-1] == (out.response_mask.sum(), 21, 21)
    assert list(tokens) == sorted(tokens)
    assert list(finished) == sorted(finished)
    assert set(total) == {21}
    assert len(reports) >= 2 * waves


def test_all_rows_ended_means_no_further_chunk(config, params, prompts):
    calls = []
    sampler = make(config, stop_ids=range(96), max_response_length=10)
    out = sampler.generate(
        params, prompts, prompt_ids=range(7), key=KEY, on_progress=lambda *r: calls.append(r)
    )
    assert (out.lengths - out.prompt_lengths == 1).all()
    assert (out.finish_reason == FINISH_STOP).all()
    assert calls == [(6, 6, 7), (7, 7, 7)]


def test_the_state_is_donated(config, params):
    settings = make(config).settings
    knobs = decoding.Knobs(jnp.float32(1), None)
    rows, state, *_ = decoding.start_wave(
        params,
        jnp.ones((2, 12), jnp.int32),
        jnp.full(2, 3, jnp.int32),
        KEY,
        jnp.zeros((2, 6), jnp.int32),
        jnp.zeros(2, bool),
        knobs,
        samples_per_prompt=3,
        settings=settings,
    )
    ready = decoding.prepare_decode_params(params, compute_dtype="float32")
    decoding.decode_chunk(ready, state, rows, jnp.int32(1), knobs, settings=settings)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_truncated_distributions_are_known_as_such(config):
    assert not make(config).truncates
    assert not make(config, top_p=1.0).truncates
    assert make(config, top_p=0.9).truncates
    assert make(config, top_k=5).truncates


def test_parameters_that_went_bad_are_an_error_that_names_the_row(config, params, prompts):
    broken = {**params, "embed": params["embed"].at[prompts[4][1]].set(jnp.nan)}
    hit = [i for i, p in enumerate(prompts) if prompts[4][1] in p]
    with pytest.raises(FloatingPointError, match=rf"row {hit[0]} \(prompt id {hit[0] + 50}\)"):
        make(config).generate(broken, prompts, prompt_ids=range(50, 57), key=KEY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_ids": []}, "eos id"),
        ({"stop_ids": [96]}, "stop id 96 is outside"),
        ({"pad_id": -1}, "pad_id -1 is outside"),
        ({"max_response_length": 60}, "exceeds the model's 64 positions"),
        ({"max_response_length": 0}, "max_response_length is 0"),
        ({"chunk_length": 0}, "chunk_length is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"prompt_bucket": 0}, "prompt_bucket is 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 97}, "None for off"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(config, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "there are no prompts"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1], list(range(1, 14))]}, "prompt 1 has 13 tokens"),
        ({"prompts": [[1, 2, 96], [1]]}, "prompt 0 holds the id 96"),
        ({"prompts": [[1], [4, -1]]}, "prompt 1 holds the id -1"),
        ({"prompts": [[1.5], [1]]}, "prompt 0 is not a sequence of ints"),
        ({"prompt_ids": [0]}, "2 prompts have 1 prompt_ids"),
        ({"prompt_ids": [0, -1]}, "prompt 1 has the prompt id -1"),
        ({"samples_per_prompt": 0}, "samples_per_prompt is 0"),
        ({"samples_per_prompt": 7}, "above the sampler's batch_size 6"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"policy_version": -1}, "policy_version is -1"),
        ({"key": jax.random.PRNGKey(0)}, "step_key"),
    ],
)
def test_calls_that_cannot_work_are_refused(config, params, changes, message):
    arguments = {"prompts": [[1], [2, 3]], "prompt_ids": [0, 1], "key": KEY}
    with pytest.raises(ValueError, match=message) as caught:
        make(config).generate(params, **(arguments | changes))
    assert "\n" not in str(caught.value)
