"""Seeded inputs of the golden numbers. numpy alone; the scripts and the tests both call these.

Only raw 64-bit words of PCG64 are drawn, and only additions and products follow, so every machine
and numpy version makes the same float32 bits; each golden file holds a sha256 of what it used.
Arrays that a mask belongs to hold ordinary finite numbers outside it: garbage that must not count.
"""

import hashlib
import json
from typing import Any

import numpy as np

MASKS = {
    # A hole as a tool's output makes it (row 0), a row of one token (2), a row that starts outside
    # the mask (4), a full row (0), two holes in a row (3).
    "gaps": ("1110011111", "1111111000", "1000000000", "1101010000", "0111111100", "1110000000"),
    "plain": ("1111111111", "1111111000", "1000000000", "1111110000", "1111111100", "1110000000"),
    "empty_row": (
        "1110011111",
        "1111111000",
        "0000000000",
        "1101010000",
        "0111111100",
        "1110000000",
    ),
}
GROUPS = {
    # Groups of four, three, one and two rows, interleaved; group 3 has equal scores.
    "uneven": (0, 1, 0, 2, 1, 0, 3, 0, 1, 3),
    # Prompt-major groups of three; group 2 has equal scores.
    "even": (0, 0, 0, 1, 1, 1, 2, 2, 2),
    # One group of six equal scores of 0.3: the float32 mean is not 0.3.
    "constant": (0, 0, 0, 0, 0, 0),
}
EXTREME_LOG_RATIOS = (
    *(0.0, 0.1, -0.1, 1.5, -1.5, 7.0, -7.0, 9.5, -9.5, 11.0, -11.0, 15.0, -15.0),
    *(19.0, -19.0, 25.0, -25.0, 60.0, -60.0),
)


def uniforms(seed: int, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """Float64 in [0, 1), from the raw words of one stream of one seed."""
    words = np.random.PCG64([seed, stream]).random_raw(int(np.prod(shape)))
    return ((words >> np.uint64(11)) * 2.0**-53).reshape(shape)


def normals(seed: int, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """Float64 of about unit variance within [-6, 6]: twelve uniforms less 6."""
    return np.sum(uniforms(seed, stream, (12, *shape)), axis=0) - 6.0


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16 (ties to even), kept as float32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def _float32(arrays: dict[str, np.ndarray], bfloat16: bool) -> dict[str, np.ndarray]:
    out = {}
    for name, x in arrays.items():
        if x.dtype == np.float64:
            x = x.astype(np.float32)
            x = to_bfloat16(x) if bfloat16 else x
        out[name] = x
    return out


def mask_of(kind: str) -> np.ndarray:
    """The bool[6, 10] mask of that name."""
    return np.array([[c == "1" for c in row] for row in MASKS[kind]])


def token_batch(
    seed: int = 0,
    mask: str = "gaps",
    spread: float = 0.3,
    extreme: bool = False,
    bfloat16: bool = False,
) -> dict[str, np.ndarray]:
    """What policy, value and KL losses read, all [6, 10].

    mask (bool); old_log_probs; log_probs, ref_log_probs and rollout_log_probs, each old_log_probs
    plus ``spread`` times a normal, at most -0.001; advantages (per token), row_advantages [6, 1]
    spread over the row as `sequence_advantages`; values, old_values, returns, rewards; entropy;
    per_token (any losses). ``extreme`` walks the log-ratios of policy to old, reference and
    rollout through EXTREME_LOG_RATIOS, the larger of both log-probs being -0.5.
    """
    m = mask_of(mask)
    shape = m.shape
    old = -3.0 * uniforms(seed, 0, shape) - 0.05
    noise = [normals(seed, 1 + i, shape) for i in range(3)]
    log_probs, ref, rollout = (np.minimum(old + spread * n, -0.001) for n in noise)
    if extreme:
        walk = np.resize(np.array(EXTREME_LOG_RATIOS), m.size).reshape(shape)
        old = np.minimum(-walk, 0.0) - 0.5
        log_probs = np.minimum(walk, 0.0) - 0.5
        ref, rollout = old.copy(), old.copy()
    row = normals(seed, 4, (shape[0], 1))
    values = normals(seed, 6, shape)
    arrays = {
        "mask": m,
        "old_log_probs": old,
        "log_probs": log_probs,
        "ref_log_probs": ref,
        "rollout_log_probs": rollout,
        "sequence_advantages": np.broadcast_to(row, shape).copy(),
        "advantages": normals(seed, 5, shape),
        "values": values,
        "old_values": values + 0.3 * normals(seed, 7, shape),
        "returns": normals(seed, 8, shape),
        "rewards": 0.3 * normals(seed, 9, shape),
        "entropy": 2.0 * uniforms(seed, 10, shape),
        "per_token": normals(seed, 11, shape),
        "scores": normals(seed, 12, shape[:1]),
    }
    return _float32(arrays, bfloat16)


def group_batch(
    seed: int = 0,
    groups: str = "uneven",
    mask: str = "gaps",
    empty_row: bool = False,
    drop_empty: bool = False,
) -> dict[str, np.ndarray]:
    """What group-relative advantages read: R rows of 10 tokens.

    group_ids (int32 [R]); mask [R, 10], rows of the named mask in turn; scores [R]; parts [R, 3],
    reward parts of unlike scale whose second is 0 or 1; token_rewards [R, 10]: the score on the
    last set bit of the mask; baselines [R] (a greedy sample's score); log_probs, sum_pi_squared and
    weights [R, 10] for token baselines. ``empty_row`` takes every bit of row 4 (and so its score);
    ``drop_empty`` then leaves that row out of every array.
    """
    group_ids = np.array(GROUPS[groups], np.int32)
    rows = len(group_ids)
    m = np.resize(mask_of(mask), (rows, 10)).copy()
    if empty_row:
        m[4] = False
    scores = normals(seed, 20, (rows,))
    equal = {"uneven": group_ids == 3, "even": group_ids == 2, "constant": group_ids == 0}[groups]
    scores = np.where(equal, 0.3, scores)
    parts = np.stack(
        [
            4.0 * normals(seed, 21, (rows,)),
            (uniforms(seed, 22, (rows,)) < 0.5).astype(np.float64),
            0.1 * normals(seed, 23, (rows,)),
        ],
        axis=1,
    )
    last = 9 - np.argmax(m[:, ::-1], axis=1)
    token_rewards = np.zeros(m.shape)
    token_rewards[np.arange(rows), last] = scores
    token_rewards[~m.any(axis=1)] = 0.0
    arrays = {
        "group_ids": group_ids,
        "mask": m,
        "scores": scores,
        "parts": parts,
        "token_rewards": token_rewards,
        "baselines": 0.5 * normals(seed, 24, (rows,)),
        "log_probs": -2.0 * uniforms(seed, 25, m.shape) - 0.05,
        "ref_log_probs": -2.0 * uniforms(seed, 26, m.shape) - 0.05,
        "sum_pi_squared": uniforms(seed, 27, m.shape),
        "weights": 0.5 + uniforms(seed, 28, m.shape),
        "values": normals(seed, 29, m.shape),
        "kl": 0.2 * normals(seed, 30, m.shape),
    }
    if drop_empty:
        arrays = {name: x[m.any(axis=1)] for name, x in arrays.items()}
    return _float32(arrays, bfloat16=False)


def vocab_batch(
    seed: int = 0, scale: float = 2.0, bfloat16: bool = False, vocab: int = 11
) -> dict[str, np.ndarray]:
    """What functions of logits read: B = 3 rows, T = 6 tokens, hidden size D = 5.

    logits and teacher_logits [3, 6, V]; hidden [3, 6, 5], matrix [V, 5], teacher_hidden and
    teacher_matrix; tokens (int32 [3, 6]); mask [3, 6] with a hole and a short row; cotangent
    [3, 6], by which non-scalar outputs are weighted before their gradient is taken.
    """
    shape = (3, 6)
    mask = np.array([[c == "1" for c in row] for row in ("110111", "111111", "110000")])
    arrays = {
        "logits": scale * normals(seed, 40, (*shape, vocab)),
        "teacher_logits": scale * normals(seed, 41, (*shape, vocab)),
        "hidden": normals(seed, 42, (*shape, 5)),
        "matrix": scale * 0.5 * normals(seed, 43, (vocab, 5)),
        "teacher_hidden": normals(seed, 44, (*shape, 5)),
        "teacher_matrix": scale * 0.5 * normals(seed, 45, (vocab, 5)),
        "tokens": np.floor(vocab * uniforms(seed, 46, shape)).astype(np.int32),
        "mask": mask,
        "cotangent": normals(seed, 47, shape),
    }
    return _float32(arrays, bfloat16)


def pair_batch(
    seed: int = 0, spread: float = 0.4, extreme: bool = False, bfloat16: bool = False
) -> dict[str, np.ndarray]:
    """What preference losses read: P = 5 pairs, 8 tokens, chosen first.

    mask (bool [5, 2, 8]); policy and reference log-probs per token [5, 2, 8]; rewards [5, 2];
    margins [5]; labels (bool [10], True is desirable) for unpaired losses, over the chosen rows and
    then the rejected; kl_policy and kl_reference [10, 8], log-probs of mismatched completions, with
    kl_mask. ``extreme`` shifts the policy's sums by up to 400 nats and the rewards to +-200.
    """
    pairs, tokens = 5, 8
    lengths = np.array([[8, 5], [1, 8], [6, 6], [3, 2], [7, 1]])
    mask = np.arange(tokens) < lengths[..., None]
    shape = (pairs, 2, tokens)
    reference = -3.0 * uniforms(seed, 60, shape) - 0.05
    policy = np.minimum(reference + spread * normals(seed, 61, shape), -0.001)
    rewards = 1.5 * normals(seed, 62, (pairs, 2))
    if extreme:
        shift = np.array([[0.0, 50.0], [50.0, 0.0], [20.0, 20.0], [1.0, 0.0], [0.0, 2.0]])
        policy = policy - shift[..., None]
        rewards = np.array(
            [[200.0, -200.0], [-200.0, 200.0], [30.0, 29.0], [0.0, 0.0], [5.0, -9.0]]
        )
    kl_shape = (2 * pairs, tokens)
    kl_reference = -3.0 * uniforms(seed, 63, kl_shape) - 0.05
    arrays = {
        "mask": mask,
        "reference": reference,
        "policy": policy,
        "rewards": rewards,
        "margins": uniforms(seed, 64, (pairs,)),
        "labels": uniforms(seed, 65, (2 * pairs,)) < 0.6,
        "kl_reference": kl_reference,
        "kl_policy": np.minimum(kl_reference + 0.2 + 0.3 * normals(seed, 66, kl_shape), -0.001),
        "kl_mask": np.roll(mask.reshape(kl_shape), 1, axis=0),
    }
    return _float32(arrays, bfloat16)


MAKERS = {f.__name__: f for f in (token_batch, group_batch, vocab_batch, pair_batch)}


def make(identity: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a case's ``inputs``: {"maker": name, **keyword arguments}."""
    kwargs = {name: value for name, value in identity.items() if name != "maker"}
    return MAKERS[identity["maker"]](**kwargs)


def key_of(identity: dict[str, Any]) -> str:
    """The name under which a golden file holds the sha256 of these inputs."""
    return json.dumps(identity, sort_keys=True)


def digest(identity: dict[str, Any]) -> str:
    """sha256 over names, shapes and bytes of the arrays of these inputs."""
    total = hashlib.sha256()
    for name, array in sorted(make(identity).items()):
        total.update(f"{name}{array.shape}{array.dtype}".encode() + array.tobytes())
    return total.hexdigest()
