import os
import subprocess
import sys

FULL_DISK = """
import resource, sys
import numpy as np
from experiments import cli
from jaxrlhf.checkpoint import Checkpointer, CheckpointError

cli._silence_orbax()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
noise = np.random.default_rng(0)
state = {f"w{i}": noise.random(20_000) for i in range(6)}
with Checkpointer(sys.argv[1], report=print) as checkpointer:
    for step in range(1, 4):
        try:
            checkpointer.save(step, state, {})
            checkpointer.wait()
        except CheckpointError as error:
            print(error)
"""


def test_saves_that_fail_are_one_sentence_each(repo_root, tmp_path):
    """orbax, asyncio and tensorstore would write hundreds of lines around them."""
    env = {**os.environ, "PYTHONPATH": str(repo_root)}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert child.stderr == ""
    sentences = [line for line in child.stdout.splitlines() if "half-written" not in line]
    assert len(sentences) == 3
    for step, sentence in enumerate(sentences, start=1):
        assert f"{step:08d} could not be written (" in sentence
        assert "File too large" in sentence
        assert sentence.endswith("then resume from the checkpoint before it.")
