"""Computes verl.json with the installed verl.   python -W ignore make_verl.py

The cases are in verl_*.py, which only call verl's own functions; see README.md for the environment.
"""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
import verl_advantages
import verl_off_policy
import verl_policy
import verl_rewards
import verl_tokens
from record import Recorder


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    packages = ["verl", "torch", "numpy", "tensordict", "transformers", "omegaconf", "ray"]
    out = Recorder("make_verl.py", packages)
    verl_advantages.add_gae(out)
    verl_advantages.add_outcome_advantages(out)
    verl_policy.add_policy_losses(out)
    verl_tokens.add_value_losses(out)
    verl_tokens.add_aggregation(out)
    verl_tokens.add_masked(out)
    verl_tokens.add_vocabulary(out)
    verl_rewards.add_kl(out)
    verl_rewards.add_controllers(out)
    verl_rewards.add_overlong(out)
    verl_off_policy.add_off_policy(out)
    verl_tokens.add_distillation(out)
    verl_policy.add_compositions(out)
    verl_rewards.add_data_metrics(out)
    verl_rewards.add_votes(out)
    out.write("verl.json")


if __name__ == "__main__":
    main()
