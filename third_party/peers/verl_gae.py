"""Times verl's GAE: one repetition and one JSON line for each line on standard input.

    python -W ignore verl_gae.py INPUTS.npz OUTPUTS.npz

`experiments/benchmark.py --case=gae` starts this in the interpreter that verl is installed in
(third_party/goldens/README.md says how) and asks for repetitions between its own. INPUTS holds
rewards, values, mask, gamma and lam; OUTPUTS gets verl's results before the first answer.
"""

import json
import os
import sys
import time
from importlib.metadata import version

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import masked_whiten


def cpu_seconds(call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main(inputs: str, outputs: str) -> None:
    torch.set_num_threads(1)
    arrays = np.load(inputs)
    rewards, values = (torch.from_numpy(arrays[name]) for name in ("rewards", "values"))
    # verl's trainer cuts its mask out of the attention mask, which is int64.
    mask = torch.from_numpy(arrays["mask"].astype(np.int64))
    gamma, lam = float(arrays["gamma"]), float(arrays["lam"])

    def gae():
        return core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)

    advantages, returns = gae()
    np.savez(outputs, advantages=advantages.numpy(), returns=returns.numpy())
    versions = {"verl": version("verl"), "torch": torch.__version__}
    for _ in sys.stdin:
        # verl's function ends by whitening: its recursion alone is what is left without that.
        whole = cpu_seconds(gae)
        whitening = cpu_seconds(lambda: masked_whiten(advantages, mask))
        times = {"gae": whole - whitening, "gae and whiten": whole}
        print(json.dumps(versions | times), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
