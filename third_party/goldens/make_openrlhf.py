"""Computes openrlhf.json with the installed OpenRLHF.   python -W ignore make_openrlhf.py

OpenRLHF imports deepspeed, flash_attn and vLLM at package level; `openrlhf_modules.py` puts empty
packages in their place, so that its torch-only modules load. The cases are in openrlhf_*.py.
"""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compute_entropy without a compiler

import openrlhf_losses
import openrlhf_rewards
import torch
from record import Recorder


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    out = Recorder("make_openrlhf.py", ["openrlhf", "torch", "numpy", "transformers", "ray"])
    openrlhf_losses.add_aggregation(out)
    openrlhf_losses.add_policy(out)
    openrlhf_losses.add_corrections(out)
    openrlhf_losses.add_value(out)
    openrlhf_losses.add_supervised(out)
    openrlhf_losses.add_preference(out)
    openrlhf_rewards.add_kl(out)
    openrlhf_rewards.add_rewards(out)
    openrlhf_rewards.add_controllers(out)
    openrlhf_rewards.add_gae(out)
    openrlhf_rewards.add_estimators(out)
    openrlhf_rewards.add_penalties(out)
    openrlhf_rewards.add_vocabulary(out)
    out.write("openrlhf.json")


if __name__ == "__main__":
    main()
