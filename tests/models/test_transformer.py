import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import transformer
from jaxrlhf.models.config import ModelConfig, RopeScaling
from jaxrlhf.models.specs import abstract_params

LLAMA = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    norm_eps=1e-5,
    tie_embeddings=True,
    max_positions=128,
)
CONFIGS = {
    "llama": LLAMA,
    "llama3": dataclasses.replace(
        LLAMA,
        num_kv_heads=1,
        rope_scaling=RopeScaling("llama3", 8.0, original_max_positions=32),
        tie_embeddings=False,
    ),
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": dataclasses.replace(
        LLAMA, family="qwen3", qk_norm=True, head_dim=16, num_kv_heads=4, tie_embeddings=False
    ),
    "gemma2": dataclasses.replace(
        LLAMA,
        family="gemma2",
        norm_plus_one=True,
        post_norms=True,
        activation="gelu_tanh",
        scale_embeddings=True,
        query_scalar=5,
        sliding_window=3,
        window_pattern=(True, False),
        attention_softcap=1.5,
        final_softcap=4.0,
    ),
    "gemma3": dataclasses.replace(
        LLAMA,
        family="gemma3_text",
        num_layers=3,
        rope_scaling=RopeScaling("linear", 4.0),
        rope_local_theta=100.0,
        norm_plus_one=True,
        post_norms=True,
        qk_norm=True,
        activation="gelu_tanh",
        scale_embeddings=True,
        query_scalar=12,
        sliding_window=2,
        window_pattern=(True, True, False),
    ),
}
QWEN2 = CONFIGS["qwen2"]


def _quick_jit():
    """These programs are tiny and run once: most of the time would go into optimising them."""
    options = {"xla_backend_optimization_level": "0"}
    faster = options | {"xla_cpu_use_fusion_emitters": False}  # not known to every version of XLA
    try:
        jax.jit(lambda x: x + 1, compiler_options=faster)(0)
    except jax.errors.JaxRuntimeError:
        faster = options
    return partial(jax.jit, compiler_options=faster)


jit = _quick_jit()
forward = jit(transformer.forward, static_argnames=("config", "compute_dtype", "remat"))
prefill = jit(
    transformer.prefill, static_argnames=("config", "compute_dtype", "response_slots", "unroll")
)
decode_step = jit(transformer.decode_step, static_argnames=("config", "compute_dtype", "unroll"))


@functools.cache
def _params(config, dtype=np.float32):
    """Random everywhere: biases and norm scales too, so that a forgotten one shows."""
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        name = path[-1].key
        noise = rng.normal(size=leaf.shape, scale=0.1 if name.endswith("norm") else 0.2)
        return np.asarray(noise + (name.endswith("norm") and not config.norm_plus_one), dtype)

    drawn = jax.tree_util.tree_map_with_path(draw, abstract_params(config))
    return jax.tree.map(jnp.asarray, drawn)


def _rows(tokens):
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return tokens, positions, jnp.ones_like(tokens)


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _oracle(params, tokens, positions, segments, config):
    """The whole model in float64 numpy: one row, one head, one pair of positions at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    width, group = config.head_dim, config.num_heads // config.num_kv_heads

    def norm(x, scale):
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
        return y * (scale + config.norm_plus_one)

    def act(x):
        if config.activation == "silu":
            return x / (1 + np.exp(-x))
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def rotate(x, position, local):
        out = x.copy()
        for i in range(width // 2):
            frequency = config.rope_theta ** (-2 * i / width)
            if local and config.rope_local_theta:
                frequency = config.rope_local_theta ** (-2 * i / width)
            elif config.rope_scaling is not None and config.rope_scaling.kind == "linear":
                frequency /= config.rope_scaling.factor
            elif config.rope_scaling is not None:
                wavelength = 2 * np.pi / frequency
                turns = config.rope_scaling.original_max_positions / wavelength
                keep = np.clip((turns - 1) / (4 - 1), 0, 1)
                frequency *= keep + (1 - keep) / config.rope_scaling.factor
            cos, sin = np.cos(position * frequency), np.sin(position * frequency)
            a, b = x[i], x[i + width // 2]
            out[i], out[i + width // 2] = a * cos - b * sin, b * cos + a * sin
        return out

    out = np.zeros((*tokens.shape, config.hidden_size))
    for row, (ids, place, segment) in enumerate(zip(tokens, positions, segments, strict=True)):
        x = params["embed"][ids] * (config.hidden_size**0.5 if config.scale_embeddings else 1)
        for index, local in enumerate(config.windowed_layers):
            layer = {name: w[index] for name, w in params["layers"].items()}
            h = norm(x, layer["attention_norm"])
            heads = {}
            for name in "qkv":
                y = h @ layer[f"{name}_kernel"]
                y = y + layer[f"{name}_bias"] if config.qkv_bias else y
                y = y.reshape(len(ids), -1, width)
                if name != "v":
                    y = norm(y, layer[f"{name}_norm"]) if config.qk_norm else y
                    for t, head in np.ndindex(y.shape[:2]):
                        y[t, head] = rotate(y[t, head], place[t], local)
                heads[name] = y
            mixed = np.zeros((len(ids), config.num_heads, width))
            for t, head in np.ndindex(mixed.shape[:2]):
                seen = [s for s in range(t + 1) if segment[s] == segment[t]]
                if local:
                    seen = [s for s in seen if place[t] - place[s] < config.sliding_window]
                keys, values = (heads[n][seen, head // group] for n in "kv")
                scores = keys @ heads["q"][t, head] / np.sqrt(config.query_scalar or width)
                if config.attention_softcap:
                    scores = config.attention_softcap * np.tanh(scores / config.attention_softcap)
                mixed[t, head] = _softmax(scores) @ values
            h = mixed.reshape(len(ids), -1) @ layer["o_kernel"]
            x = x + (norm(h, layer["attention_post_norm"]) if config.post_norms else h)
            h = norm(x, layer["mlp_norm"])
            h = (act(h @ layer["gate_kernel"]) * (h @ layer["up_kernel"])) @ layer["down_kernel"]
            x = x + (norm(h, layer["mlp_post_norm"]) if config.post_norms else h)
        out[row] = norm(x, params["final_norm"])
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_a_float64_numpy_model(name, rng):
    config = CONFIGS[name]
    tokens = rng.integers(0, 97, (2, 9))
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0, 0], [3, 4, 5, 6, 7, 8, 9, 10, 31]])
    with jax.enable_x64(True):
        params = _params(config, np.float64)
        expected = _oracle(params, tokens, positions, segments, config)
        exact = forward(
            params,
            *(jnp.asarray(x) for x in (tokens, positions, segments)),
            config=config,
            compute_dtype=jnp.float64,
        )
        np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-11)
        logits = transformer.logits(params, exact, config)
        matrix = params["embed"] if config.tie_embeddings else params["lm_head"]
        wanted = expected @ np.asarray(matrix).T
        if config.final_softcap:
            wanted = config.final_softcap * np.tanh(wanted / config.final_softcap)
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-10)
    inputs = (jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments))
    hidden = forward(_params(config), *inputs, config=config)
    np.testing.assert_allclose(hidden, expected, atol=2e-5)


def test_gradients_flow_to_the_past_of_the_same_segment_alone():
    """Every position has a token of its own, so embedding rows tell positions apart."""
    tokens = jnp.arange(10)[None] + 20
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]])
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    params = _params(QWEN2)
    weights = jax.random.normal(jax.random.key(2), (QWEN2.hidden_size,))

    @jit
    def jacobian(embed):
        def read(embed):
            inputs = {**params, "embed": embed}
            hidden = transformer.forward(inputs, tokens, positions, segments, config=QWEN2)
            return hidden[0] @ weights

        return jax.jacrev(read)(embed)[:, 20:30]

    flows = np.abs(jacobian(params["embed"])).max(-1)
    segment = np.asarray(segments[0])
    wanted = np.tril(segment[:, None] == segment[None])
    np.testing.assert_array_equal(flows > 0, wanted)  # exactly zero elsewhere


def test_a_windowed_layer_reads_its_window_and_no_further():
    """One layer, so that nothing travels on; two documents, the window shorter than either."""
    config = dataclasses.replace(CONFIGS["gemma3"], num_layers=1, sliding_window=3)
    tokens = jnp.arange(11)[None] + 20
    positions = jnp.array([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]])
    segments = jnp.array([[1] * 6 + [2] * 5])
    params = _params(config)

    @jit
    def jacobian(embed):
        def read(embed):
            inputs = {**params, "embed": embed}
            hidden = transformer.forward(inputs, tokens, positions, segments, config=config)
            return hidden[0] @ jnp.linspace(0.5, 1.5, 32)

        return jax.jacrev(read)(embed)[:, 20:31]

    flows = np.abs(jacobian(params["embed"])).max(-1) > 0
    time, segment = np.arange(11), np.asarray(segments[0])
    age = time[:, None] - time[None]
    np.testing.assert_array_equal(
        flows, (age >= 0) & (age < 3) & (segment[:, None] == segment[None])
    )


def test_a_window_that_is_never_left_changes_nothing(rng):
    config = CONFIGS["gemma2"]
    inputs = _rows(rng.integers(0, 97, (2, 9)))
    params = _params(config)
    wide = dataclasses.replace(config, sliding_window=9)
    none = dataclasses.replace(config, sliding_window=None, window_pattern=())
    same = forward(params, *inputs, config=none)
    np.testing.assert_allclose(forward(params, *inputs, config=wide), same, atol=1e-6)
    assert np.abs(forward(params, *inputs, config=config) - same).max() > 1e-2


def test_the_embedding_factor_is_rounded_to_the_compute_dtype():
    """As in transformers: sqrt(3072) = 55.43 is 55.5 in bfloat16."""
    config = dataclasses.replace(CONFIGS["gemma2"], hidden_size=3072)
    params, tokens = {"embed": jnp.ones((2, 3072))}, jnp.zeros(1, jnp.int32)
    for dtype, factor in ((jnp.bfloat16, 55.5), (jnp.float32, np.float32(3072**0.5))):
        assert (transformer._embed(params, tokens, config, dtype) == factor).all()


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3"])
def test_packing_equals_separate_rows_on_either_side_of_any_padding(name, rng):
    a, b = rng.integers(0, 97, 5), rng.integers(0, 97, 7)
    params = _params(CONFIGS[name])

    def run(row, lead, trail):
        """Documents ``row`` after ``lead`` and before ``trail`` padding tokens of any id."""
        tokens = np.concatenate([rng.integers(0, 97, lead), *row, rng.integers(0, 97, trail)])
        positions = np.concatenate([np.zeros(lead), *map(np.arange, map(len, row))])
        segments = np.concatenate(
            [np.zeros(lead), *(np.full(len(d), i + 1) for i, d in enumerate(row))]
        )
        full = (np.pad(x, (0, len(tokens) - len(x))) for x in (positions, segments))
        inputs = (jnp.asarray(x, jnp.int32)[None] for x in (tokens, *full))
        hidden = forward(params, *inputs, config=CONFIGS[name])
        assert np.isfinite(hidden).all()
        return hidden[0, lead : len(tokens) - trail]

    alone = np.concatenate([run([a], 0, 0), run([b], 0, 0)])
    for lead, trail in ((0, 4), (4, 0), (2, 2)):
        np.testing.assert_allclose(run([a, b], lead, trail), alone, atol=1e-5)
    other = rng.permutation(97)[a]
    changed = run([other, b], 0, 4)
    np.testing.assert_allclose(changed[5:], alone[5:], atol=1e-5)
    assert not np.allclose(changed[:5], alone[:5], atol=1e-2)


def test_rows_do_not_see_each_other(rng):
    tokens, positions, segments = _rows(rng.integers(0, 97, (8, 12)))
    segments = segments.at[2].set(0).at[5, 4:].set(0)  # a filler row, a short one
    params = _params(CONFIGS["qwen3"])
    together = forward(params, tokens, positions, segments, config=CONFIGS["qwen3"])
    for row in (0, 5, 7):
        one = slice(row, row + 1)
        alone = forward(params, tokens[one], positions[one], segments[one], config=CONFIGS["qwen3"])
        np.testing.assert_allclose(together[one], alone, atol=1e-5)


def test_a_batch_of_pure_padding_has_finite_values_and_gradients():
    tokens = jnp.zeros((2, 6), jnp.int32)

    def loss(params):
        hidden = transformer.forward(
            params, tokens, tokens, tokens, config=QWEN2, compute_dtype=jnp.bfloat16, remat="full"
        )
        return jnp.sum(jnp.square(hidden.astype(jnp.float32)))

    value, grads = jit(jax.value_and_grad(loss))(_params(QWEN2))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_rematerialisation_changes_memory_and_not_gradients(rng):
    config = dataclasses.replace(LLAMA, num_layers=6)
    inputs = _rows(rng.integers(0, 97, (4, 64)))
    params = _params(config)

    def loss(params, remat):
        hidden = transformer.forward(params, *inputs, config=config, remat=remat)
        return jnp.mean(jnp.square(transformer.logits(params, hidden, config)))

    grads, memory = {}, {}
    for remat in transformer.REMAT:
        compiled = jit(jax.grad(partial(loss, remat=remat))).lower(params).compile()
        memory[remat] = compiled.memory_analysis().temp_size_in_bytes
        grads[remat] = compiled(params)
    for remat in ("full", "dots"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            grads[remat],
            grads["none"],
        )
    assert memory["full"] < memory["dots"] < memory["none"]
    with pytest.raises(ValueError, match=r"unknown remat 'some': use one of \['dots', 'full'"):
        loss(params, "some")


def test_bfloat16_compute_stays_close_and_keeps_float32_masters(rng):
    inputs = _rows(rng.integers(0, 97, (4, 32)))
    params = _params(QWEN2)

    def loss(params, dtype):
        hidden = transformer.forward(params, *inputs, config=QWEN2, compute_dtype=dtype)
        assert hidden.dtype == dtype
        logits = transformer.logits(params, hidden, QWEN2)
        assert logits.dtype == jnp.float32
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1)), logits

    grad = jit(jax.grad(loss, has_aux=True), static_argnums=1)
    (wide, logits), (half, half_logits) = grad(params, jnp.float32), grad(params, jnp.bfloat16)
    error = np.linalg.norm(half_logits - logits) / np.linalg.norm(logits)
    assert 1e-4 < error < 0.03  # no error would mean that nothing was computed in bfloat16
    flat, half_flat = (
        np.concatenate([g.ravel() for g in jax.tree.leaves(x)]) for x in (wide, half)
    )
    assert half_flat.dtype == np.float32
    error = np.linalg.norm(half_flat - flat) / np.linalg.norm(flat)
    assert 1e-4 < error < 0.06


def test_norm_scales_are_never_rounded_to_bfloat16(rng):
    inputs = _rows(rng.integers(0, 97, (2, 8)))
    params = _params(CONFIGS["qwen3"])
    prepared = transformer.decode_params(params, compute_dtype=jnp.bfloat16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(prepared):
        kept = path[-1].key.endswith("norm")
        assert leaf.dtype == (jnp.float32 if kept else jnp.bfloat16)

    def run(scale):
        layers = {
            name: jnp.full_like(x, scale) if name.endswith("norm") else x
            for name, x in params["layers"].items()
        }
        return forward(
            {**params, "layers": layers},
            *inputs,
            config=CONFIGS["qwen3"],
            compute_dtype=jnp.bfloat16,
        )

    assert (run(1 + 2**-9) != run(1.0)).any()  # which bfloat16 cannot tell apart


def test_final_softcap_bounds_the_logits(rng):
    config = dataclasses.replace(LLAMA, final_softcap=2.0)
    params, hidden = _params(config), jnp.asarray(rng.normal(size=(3, 32)), jnp.float32)
    plain = transformer.logits(params, hidden, LLAMA)
    assert jnp.abs(plain).max() > 2
    np.testing.assert_allclose(
        transformer.logits(params, hidden, config), 2 * np.tanh(plain / 2), atol=1e-6
    )


def _prompts_and_rows(rng, repeats, steps):
    """Uneven prompts, padded with junk, and ``repeats`` different responses to each."""
    lengths = np.array([3, 8, 1])
    prompts = rng.integers(0, 97, (3, 8))
    responses = rng.integers(0, 97, (3 * repeats, steps))
    rows = rng.integers(0, 97, (3 * repeats, 8 + steps))
    for row, response in enumerate(responses):
        length = lengths[row // repeats]
        rows[row, :length] = prompts[row // repeats, :length]
        rows[row, length : length + steps] = response
    return prompts, lengths, responses, rows


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_the_teacher_forced_forward(name, unroll, rng):
    config, repeats, steps = CONFIGS[name], 2, 5
    prompts, lengths, responses, rows = _prompts_and_rows(rng, repeats, steps)
    params = _params(config)
    expected = np.asarray(forward(params, *_rows(rows), config=config))

    last, cache = prefill(
        params,
        jnp.asarray(prompts),
        jnp.asarray(lengths),
        config=config,
        response_slots=steps,
        unroll=unroll,
    )
    first = expected[::repeats][np.arange(3), lengths - 1]
    np.testing.assert_allclose(last, first, atol=1e-5)
    cache = transformer.repeat_cache(cache, repeats)
    row_lengths = np.repeat(lengths, repeats)
    if unroll:  # the other pairing of form and preparation is tested in bfloat16
        params = transformer.decode_params(params, compute_dtype=jnp.float32)
    before = decode_step._cache_size()
    for step in range(steps):
        hidden, cache = decode_step(
            params,
            cache,
            jnp.asarray(responses[:, step]),
            prompt_lengths=jnp.asarray(row_lengths),
            step=jnp.int32(step),
            config=config,
            unroll=unroll,
        )
        wanted = expected[np.arange(len(rows)), row_lengths + step]
        np.testing.assert_allclose(hidden, wanted, atol=1e-5)
    assert decode_step._cache_size() == before + 1  # one program for all steps


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_both_forms_of_the_decode_step_agree_in_bfloat16(name, rng):
    prompts, lengths, responses, _ = _prompts_and_rows(rng, 1, 2)
    lengths, results = jnp.asarray(lengths), []
    settings = {"config": CONFIGS[name], "compute_dtype": jnp.bfloat16}
    for unroll in (True, False):
        params = _params(CONFIGS[name])
        _, cache = prefill(
            params, jnp.asarray(prompts), lengths, response_slots=2, unroll=unroll, **settings
        )
        if not unroll:
            params = transformer.decode_params(params, compute_dtype=jnp.bfloat16, unroll=False)
        hidden, cache = decode_step(
            params,
            cache,
            jnp.asarray(responses[:, 0]),
            prompt_lengths=lengths,
            step=jnp.int32(0),
            unroll=unroll,
            **settings,
        )
        k, v = (np.stack(x) if unroll else x for x in (cache.k, cache.v))
        assert k.dtype == v.dtype == hidden.dtype == jnp.bfloat16
        assert (np.abs(k[..., 8]) > 0).all()  # the common slot after the prompt's
        assert (k[..., 9] == 0).all()
        results.append([np.asarray(x, np.float32) for x in (hidden, k, v)])
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=0.05)


@pytest.mark.parametrize("unroll", [True, False])
def test_init_cache_is_prefill_s_and_the_other_form_is_refused(unroll):
    made = transformer.init_cache(QWEN2, 3, 8, 2, jnp.bfloat16, unroll=unroll)
    settings = {"config": QWEN2, "compute_dtype": jnp.bfloat16}
    tokens, lengths = jnp.zeros((3, 8), jnp.int32), jnp.full(3, 8)
    run = partial(transformer.prefill, response_slots=2, unroll=unroll, **settings)
    _, cache = jax.eval_shape(run, _params(QWEN2), tokens, lengths)
    assert jax.tree.structure(made) == jax.tree.structure(cache)
    for mine, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(cache), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    params = _params(QWEN2)
    step = partial(
        transformer.decode_step,
        tokens=tokens[:, 0],
        prompt_lengths=lengths,
        step=jnp.int32(0),
        **settings,
    )
    with pytest.raises(ValueError, match=f"made with unroll={unroll}"):
        step(params, made, unroll=not unroll)
    if not unroll:
        prepared = transformer.decode_params(params, compute_dtype=jnp.bfloat16)
        with pytest.raises(ValueError, match="prepared with unroll=True"):
            step(prepared, made, unroll=False)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


@pytest.mark.parametrize("unroll", [True, False])
def test_the_cache_is_written_by_slices_and_never_scanned_out(unroll):
    config = dataclasses.replace(LLAMA, num_layers=5)
    cache = transformer.init_cache(config, 4, 64, 64, unroll=unroll)
    params = transformer.decode_params(_params(config), compute_dtype=jnp.float32, unroll=unroll)

    def chunk(params, cache, tokens):
        def body(carry, step):
            cache, tokens = carry
            hidden, cache = transformer.decode_step(
                params,
                cache,
                tokens,
                prompt_lengths=jnp.full(4, 8),
                step=step,
                config=config,
                unroll=unroll,
            )
            tokens = jnp.argmax(transformer.logits(params, hidden, config), -1)
            return (cache, tokens), tokens

        return jax.lax.scan(body, (cache, tokens), jnp.arange(16))

    inputs = params, cache, jnp.zeros(4, jnp.int32)
    found = list(_equations(jax.make_jaxpr(chunk)(*inputs).jaxpr))
    names = [equation.primitive.name for equation in found]
    assert not any(name.startswith("scatter") for name in names)
    assert names.count("dynamic_update_slice") == (10 if unroll else 2)
    over_layers = [e for e in found if e.primitive.name == "scan" and e.params["length"] == 5]
    assert len(over_layers) == (0 if unroll else 1)
    for equation in over_layers:
        assert all(v.aval.size <= 5 * 4 * 2 * 8 for v in equation.outvars)

    # The donated cache is updated in place: less than one layer's keys of copies.
    compiled = jit(chunk, donate_argnums=1).lower(*inputs).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert compiled.alias_size_in_bytes >= size
    assert compiled.temp_size_in_bytes < size / 2
