"""Temporaries of the compiled losses grow with their inputs, not with pairs of tokens or rows."""

from experiments import benchmark

# Those with a vocabulary have tests of their own, at its size, beside the others of their module.
# A ranking's answers are few, and its program takes seconds to compile for thousands.
ELSEWHERE = {
    *("token_log_probs", "dense_token_log_probs", "token_divergence", "dense_divergence"),
    "plackett_luce",
}
NAMES = [name for name in benchmark.MEASURED if name not in ELSEWHERE]


def test_temporaries_are_linear():
    """All losses and their gradients as one program: at [4, 4096] one array of pairs of tokens, of
    one byte each, is six times all the inputs. `experiments/benchmark.py --case=memory` tells which
    loss it is when this fails."""
    temporaries, inputs = benchmark.temporary_bytes(NAMES, 4096)
    print(f"{len(NAMES)} losses: {temporaries:,} bytes for {inputs:,} bytes of inputs")
    assert temporaries > inputs / 4
    assert temporaries < 3 * inputs
