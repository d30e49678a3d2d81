"""Arguments of every public function, by its signature: wrong shapes are named, masks boolean.

A parameter that holds an array stands in ``ARRAYS``; a new name of one must be added there.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf import losses

B, T, D, V, K = 2, 3, 4, 5, 2
FUNCTIONS = {
    name: getattr(losses, name)
    for name in losses.__all__
    if not inspect.isclass(getattr(losses, name))
}

TOKENS = dict.fromkeys(
    (
        "x", "per_token", "weights", "values", "old_values", "rewards", "returns", "advantages",
        "log_probs", "old_log_probs", "ref_log_probs", "other_log_probs", "sampler_log_probs",
        "chosen_log_probs", "rejected_log_probs", "ref_chosen_log_probs", "ref_rejected_log_probs",
        "chosen", "rejected", "logsumexp", "mean_logits", "log_ratio_kl", "entropy", "scalars",
        "successes", "samples", "answers", "desirable", "tokens", "segment_ids", "mask",
    ),
    (B, T),
)  # fmt: skip
ROWS = dict.fromkeys(
    ("scores", "group_ids", "counted", "lengths", "greedy_scores", "bootstrap", "rows"), (B,)
)
ARRAYS = TOKENS | ROWS | {
    "parts": (B, K),
    "hidden": (B, T, D), "ref_hidden": (B, T, D),
    "logits": (B, T, V), "ref_logits": (B, T, V),
    "output_matrix": (V, D), "ref_output_matrix": (V, D),
}  # fmt: skip
DTYPES = dict.fromkeys(("mask", "counted", "desirable"), jnp.bool_) | dict.fromkeys(
    ("segment_ids", "group_ids", "tokens", "answers"), jnp.int32
)
SHAPES = {  # where a name's shape is another than in most functions
    "best_at_k": {"scores": (B, T)},
    "majority_vote": {"scores": (B, T)},
    "group_relative_parts": {"weights": (K,)},
}
FREE = {
    "logits": (2,),
    "output_matrix": (0,),
    "ref_output_matrix": (),
    "hidden": (2,),
    "ref_hidden": (2,),
}

# What else a function needs, and optional arrays that it refuses without another argument.
SETTINGS = {
    "aggregate": {"mode": "token_mean"},
    "adaptive_controller": {"target": 1.0, "horizon": 10.0, "observed_kl": 0.1, "n_rows": 4},
    "fixed_controller": {"observed_kl": 0.1, "n_rows": 4},
    "best_at_k": {"k": 1},
    "pass_at_k": {"k": 1},
    "cpo": {"beta": 0.1},
    "cross_entropy": {"z_loss": 0.1, "label_smoothing": 0.1},
    "dpo": {"beta": 0.1},
    "entropy_bonus": {"coef": 0.1},
    "gae": {"gamma": 1.0, "lam": 0.9},
    "group_relative": {"baseline": "length_weighted"},
    "implicit_rewards": {"beta": 0.1},
    "kto": {"beta": 0.1, "reference_point": 0.0},
    "orpo": {"beta": 0.1},
    "overlong_penalty": {"max_length": 8, "buffer": 4},
    "simpo": {"beta": 2.0, "margin": 1.0},
    "token_rewards": {"kl_coef": 0.1},
}
WITHOUT = {"gae": ("segment_ids",), "discounted_returns": ("segment_ids",)}  # other bootstrap

UNBOUND = {("spread_over_tokens", "mask")}  # one value a row fits a mask of any length

# Functions of no array, or of a state of scalars.
SCALARS = {"adaptive_controller", "fixed_controller", "init_kl_state"}


def arguments_of(name: str) -> dict[str, jax.Array]:
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    unknown = {
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.name not in ARRAYS and p.name not in SETTINGS.get(name, {})
    }
    assert not unknown, f"add {unknown} of {name} to ARRAYS or SETTINGS"
    shapes = ARRAYS | SHAPES.get(name, {})
    return {
        p: jnp.ones(shapes[p], DTYPES.get(p, jnp.float32))
        for p in parameters
        if p in shapes and p not in WITHOUT.get(name, ())
    }


def call(name: str, arguments: dict[str, jax.Array]):
    function = functools.partial(FUNCTIONS[name], **SETTINGS.get(name, {}))
    return jax.eval_shape(lambda a: function(**a), arguments)


def wrong_shapes(p: str, x: jax.Array) -> list[tuple[int, ...]]:
    """One more in each axis; and what numpy's rules would broadcast, silently wrong."""
    axes = set(range(x.ndim)) - set(FREE.get(p, ()))
    longer = [tuple(n + (i == axis) for i, n in enumerate(x.shape)) for axis in sorted(axes)]
    return longer + ([(B, 1), (T,)] if x.shape == (B, T) else [])


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - SCALARS))
def test_an_array_of_another_shape_is_an_error_that_names_it(name):
    """With and without an optional mask, which would compare the others with itself."""
    whole = arguments_of(name)
    call(name, whole)
    variants = [whole]
    if "mask" in whole and inspect.signature(FUNCTIONS[name]).parameters["mask"].default is None:
        variants.append({p: x for p, x in whole.items() if p != "mask"})
    for arguments in variants:
        # Where the one is wrong that the others are compared with, any of them is named.
        compared_with = {next(iter(arguments)), "mask", "tokens", "x"}
        for p, x in arguments.items():
            if len(arguments) == 1 or (name, p) in UNBOUND:
                continue
            named = "|".join(arguments) if p in compared_with else p
            for shape in wrong_shapes(p, x):
                with pytest.raises(ValueError, match=rf"\b({named})\b"):
                    call(name, arguments | {p: jnp.ones(shape, x.dtype)})


@pytest.mark.parametrize(
    "name",
    [n for n in FUNCTIONS if {"mask", "counted"} & {*inspect.signature(FUNCTIONS[n]).parameters}],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_masks_must_be_boolean(name, dtype):
    arguments = arguments_of(name)
    for p in {"mask", "counted"} & set(arguments):
        with pytest.raises(TypeError, match=f"{p} must be boolean"):
            call(name, arguments | {p: arguments[p].astype(dtype)})
