"""Plain Python in float64 for what is computed per token or sequence, on packed rows with gaps.

An oracle gets one sequence's unmasked numbers as lists and gives its tokens' results; those of the
whole batch get a list of all sequences'. `test_every_public_function_has_an_oracle` names the file
in which each other function is compared with one, or with a peer's numbers.
"""

import functools
import inspect
import math
import pathlib
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses

ROWS, LENGTH = 5, 12


def clip(x, low, high):
    return min(max(x, low), high)


def gspo(new, old, adv, *, level, low, high):
    gaps = [n - o for n, o in zip(new, old, strict=True)]
    ratio = math.exp(statistics.fmean(gaps) if level == "mean" else sum(gaps))
    return [max(-a * ratio, -a * clip(ratio, 1 - low, 1 + high)) for a in adv]


def gmpo(new, old, adv, bound=0.1):
    gaps = [n - o for n, o in zip(new, old, strict=True)]
    taken = [min(x, bound) if a > 0 else max(x, -bound) for x, a in zip(gaps, adv, strict=True)]
    return [-statistics.fmean(adv) * math.exp(statistics.fmean(taken))] * len(new)


def each(formula):
    """A formula of single tokens."""
    return lambda *lists: [formula(*x) for x in zip(*lists, strict=True)]


def tv(n, o):
    return abs(math.exp(n) - math.exp(o))


def binary_kl(n, o):
    p, q = math.exp(n), math.exp(o)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def dppo(distance, limit):
    def one(n, o, a):
        away = (n > o) if a > 0 else (n < o)
        dropped = away and distance(n, o) > limit
        return 0.0 if dropped else -a * min(math.exp(n - o), 1.2) * n

    return each(one)


def sapo(n, o, a):
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1)))


def surrogate(n, o, a):
    ratio = math.exp(n - o)
    loss = max(-a * ratio, -a * clip(ratio, 0.9, 1.2))
    return min(loss, -a * 1.3) if a < 0 else loss


def to_go(rewards, gamma, bootstrap=0.0):
    out = []
    for reward in reversed(rewards):
        bootstrap = reward + gamma * bootstrap
        out.append(bootstrap)
    return out[::-1]


def sequence_weight(new, old, reduce):
    return [math.exp(reduce([n - o for n, o in zip(new, old, strict=True)]))] * len(new)


def k3(n, o):
    return math.exp(n - o) - 1 - (n - o)


POLICY = ("new", "old", "adv")
PAIR = ("new", "old")
partial = functools.partial
# name/variant: (ours, the arrays it takes, oracle)
ORACLES = {
    "clipped_surrogate": (
        partial(losses.clipped_surrogate, clip_low=0.1, dual_clip=1.3), POLICY, each(surrogate)
    ),
    "reinforce": (losses.reinforce, ("new", "adv"), each(lambda n, a: -a * n)),
    "gspo/mean": (
        partial(losses.gspo, clip_low=0.05, clip_high=0.1), POLICY,
        partial(gspo, level="mean", low=0.05, high=0.1),
    ),
    "gspo/token": (
        partial(losses.gspo, clip_low=0.05, clip_high=0.1, per_token_gradient=True), POLICY,
        partial(gspo, level="mean", low=0.05, high=0.1),
    ),
    "gspo/sum": (
        partial(losses.gspo, clip_low=0.2, clip_high=0.3, level="sum"), POLICY,
        partial(gspo, level="sum", low=0.2, high=0.3),
    ),
    "gmpo": (partial(losses.gmpo, clip_low=0.1, clip_high=0.1), POLICY, gmpo),
    "cispo": (
        partial(losses.cispo, clip_low=0.1, clip_high=0.2), POLICY,
        each(lambda n, o, a: -a * clip(math.exp(n - o), 0.9, 1.2) * n),
    ),
    "sapo": (losses.sapo, POLICY, each(sapo)),
    "dppo/tv": (
        partial(losses.dppo, limit_low=0.05, limit_high=0.05, max_ratio=1.2), POLICY,
        dppo(tv, 0.05),
    ),
    "dppo/kl": (
        partial(losses.dppo, divergence="kl", limit_low=0.01, limit_high=0.01, max_ratio=1.2),
        POLICY, dppo(binary_kl, 0.01),
    ),
    "binary_divergence/tv": (losses.binary_divergence, PAIR, each(tv)),
    "binary_divergence/kl": (partial(losses.binary_divergence, kind="kl"), PAIR, each(binary_kl)),
    "entropy_bonus": (partial(losses.entropy_bonus, coef=0.3), ("adv",), each(lambda x: -0.3 * x)),
    "log_ratio_between": (
        partial(losses.log_ratio_between, clip=0.2), PAIR, each(lambda n, o: clip(n - o, -0.2, 0.2))
    ),
    "importance_weights/token": (
        losses.importance_weights, PAIR, each(lambda n, o: math.exp(n - o))
    ),
    "importance_weights/sequence": (
        partial(losses.importance_weights, level="sequence"), PAIR,
        partial(sequence_weight, reduce=sum),
    ),
    "importance_weights/sequence_mean": (
        partial(losses.importance_weights, level="sequence_mean"), PAIR,
        partial(sequence_weight, reduce=statistics.fmean),
    ),
    "truncate_weights": (
        partial(losses.truncate_weights, low=-0.5, high=0.5), ("adv",),
        each(lambda w: clip(w, -0.5, 0.5)),
    ),
    "mask_weights": (
        partial(losses.mask_weights, low=-0.5, high=0.5), ("adv",),
        each(lambda w: w if -0.5 <= w <= 0.5 else 0.0),
    ),
    "keep_within/sum": (
        partial(losses.keep_within, statistic="sequence_sum", low=-0.5, high=1.0), ("adv",),
        lambda x: [-0.5 <= sum(x) <= 1.0] * len(x),
    ),
    "keep_within/max": (
        partial(losses.keep_within, statistic="sequence_max", high=1.0), ("adv",),
        lambda x: [max(x) <= 1.0] * len(x),
    ),
    "rejection_mask": (
        partial(losses.rejection_mask, statistic="sequence_mean", high=0.04), PAIR,
        lambda n, o: [statistics.fmean(map(k3, n, o)) <= 0.04] * len(n),
    ),
    "zero_outside": (lambda x, *, mask: losses.zero_outside(mask, x), ("adv",), list),
    "sequence_sum": (losses.sequence_sum, ("adv",), lambda x: [sum(x)] * len(x)),
    "sequence_mean": (losses.sequence_mean, ("adv",), lambda x: [statistics.fmean(x)] * len(x)),
    "sequence_max": (losses.sequence_max, ("adv",), lambda x: [max(x)] * len(x)),
    "discounted_returns": (
        partial(losses.discounted_returns, gamma=0.9), ("adv",), partial(to_go, gamma=0.9)
    ),
}  # fmt: skip


def batch():
    """Packed rows: arrays with NaN under the mask, and each sequence's unmasked places."""
    rng = np.random.default_rng(5)
    segments = np.cumsum(rng.random((ROWS, LENGTH)) < 0.3, axis=1)
    mask = rng.random((ROWS, LENGTH)) < 0.7
    mask[segments == 2] = False  # sequences without unmasked tokens
    old = -1.5 * rng.random(mask.shape) - 0.1
    arrays = {"old": old, "new": np.minimum(old + 0.25 * rng.normal(size=mask.shape), -0.01)}
    arrays["adv"] = rng.normal(size=mask.shape)
    arrays = {name: np.where(mask, x, np.nan) for name, x in arrays.items()}
    places = [
        (row, here)
        for row in range(ROWS)
        for i in np.unique(segments[row])
        if (here := np.flatnonzero(mask[row] & (segments[row] == i))).size
    ]
    return arrays, mask, segments, places


@pytest.mark.parametrize("name", ORACLES)
def test_equals_plain_python(name):
    ours, names, oracle = ORACLES[name]
    arrays, mask, segments, places = batch()
    expected = np.zeros(mask.shape)
    for row, here in places:
        expected[row, here] = oracle(*(arrays[n][row, here].tolist() for n in names))
    options = {"mask": mask}
    if "segment_ids" in inspect.signature(ours).parameters:
        options["segment_ids"] = segments
    elif name in SEQUENCES_MATTER:
        pytest.fail("a function of sequences needs segment_ids")
    with jax.enable_x64(True):
        found = np.asarray(ours(*(arrays[n] for n in names), **options), np.float64)
    assert len(np.unique(expected)) > 1  # neither all nor nothing is kept or clipped
    np.testing.assert_allclose(np.where(mask, found, 0), expected, rtol=1e-11, atol=1e-12)


SEQUENCES_MATTER = {
    name
    for name in ORACLES
    if name.startswith(("gspo", "gmpo", "sequence", "discounted")) or "/s" in name
}


def test_weights_of_the_whole_batch():
    """Self-normalised by token and by packed sequence; effective sample size."""
    arrays, mask, segments, places = batch()
    weights = np.exp(arrays["adv"])
    sequences = [weights[row, here].tolist() for row, here in places]
    every = [w for sequence in sequences for w in sequence]
    means = {
        "token": statistics.fmean(every),
        "sequence": statistics.fmean(map(statistics.fmean, sequences)),
    }
    with jax.enable_x64(True):
        for level, mean in means.items():
            ours = losses.normalize_weights(weights, mask, level=level, segment_ids=segments)
            np.testing.assert_allclose(ours, np.where(mask, weights, 0) / mean, rtol=1e-12)
        size = losses.effective_sample_size(weights, mask)
    expected = sum(every) ** 2 / (len(every) * sum(w * w for w in every))
    np.testing.assert_allclose(size, expected, rtol=1e-12)


def test_groups_parts_best_and_greedy_baseline():
    rng = np.random.default_rng(3)
    parts, ids = rng.normal(size=(9, 2)), rng.integers(0, 3, 9)
    counted = np.arange(9) != 4
    parts[4] = np.nan
    scores, weights = parts[:, 0], [0.5, 2.0]
    best, relative = np.zeros(9), np.zeros(9)
    for i in np.flatnonzero(counted):
        group = [j for j in range(9) if counted[j] and ids[j] == ids[i]]
        others = [scores[j] for j in group if j != i]
        if others:
            best[i] = max(0.0, scores[i] - max(others))
            for k, weight in enumerate(weights):
                values = [parts[j, k] for j in group]
                spread = statistics.stdev(values) + 1e-6
                relative[i] += weight * (parts[i, k] - statistics.fmean(values)) / spread
    rewards, mask = rng.normal(size=(9, 4)), rng.random((9, 4)) < 0.6
    greedy, expected = rng.normal(size=9), np.zeros((9, 4))
    for row in range(9):
        returns = to_go(rewards[row, mask[row]].tolist(), 0.9)
        expected[row, mask[row]] = [x - greedy[row] for x in returns]
    with jax.enable_x64(True):
        of_rows = {"counted": counted}
        found = losses.group_best(scores, ids, scale="none", **of_rows)
        np.testing.assert_allclose(found, best, rtol=1e-11, atol=1e-12)
        found = losses.group_relative_parts(parts, jnp.asarray(weights), ids, **of_rows)
        np.testing.assert_allclose(found, relative, rtol=1e-11, atol=1e-12)
        found = losses.remax(rewards, greedy, mask, gamma=0.9)
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)
        spread = losses.spread_over_tokens(greedy, mask)
    np.testing.assert_array_equal(spread, greedy[:, None] * mask)


ELSEWHERE = {
    "test_masked.py": "aggregate last_action masked_mean masked_sum masked_var one_past_end "
    "token_weights weighted_sum whiten",
    "test_advantages.py": "gae",
    "test_group_advantages.py": "group_relative",
    "test_kl.py": "adaptive_controller finite_log_ratio_rows fixed_controller init_kl_state "
    "kl_estimate token_rewards",
    "test_ppo.py": "approx_kl clip_fractions clipped_value_loss explained_variance",
    "test_log_probs.py": "align_to_tokens dense_token_log_probs token_log_probs",
    "test_distillation.py": "dense_divergence token_divergence",
    "test_sft.py": "cross_entropy mean_token_logits",
    "test_statistics.py": "best_at_k majority_vote mean_interval pass_at_k ratio_extremes",
    "test_preference.py": "bradley_terry kto_reference_point orpo pair_metrics plackett_luce "
    "sequence_log_probs",
    "test_goldens_preference.py": "cpo dpo implicit_rewards kto simpo",
    "test_goldens_policy.py": "overlong_penalty",
}


def test_every_public_function_has_an_oracle_or_a_peer():
    folder = pathlib.Path(__file__).parent
    here = pathlib.Path(__file__).read_text().split("ELSEWHERE = {")[0]
    public = {name for name in losses.__all__ if not inspect.isclass(getattr(losses, name))}
    for file, names in ELSEWHERE.items():
        text = (folder / file).read_text()
        missing = [name for name in names.split() if f"losses.{name}" not in text]
        assert not missing, f"{file} says nothing of {missing}"
    elsewhere = {name for names in ELSEWHERE.values() for name in names.split()}
    assert elsewhere | {name for name in public if f"losses.{name}" in here} == public
