"""Computes trl.json with the installed TRL (1.16.0).   python -W ignore make_trl.py

TRL's losses live in methods of trainers: the real methods run on a minimal stand-in for `self`
(trl_stubs.py). PPO left TRL after 1.12.0: see make_trl_ppo.py.
"""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import trl_advantages
import trl_grpo
import trl_preference
import trl_supervised
from record import Recorder


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    out = Recorder("make_trl.py", ["trl", "torch", "numpy", "transformers", "accelerate"])
    trl_grpo.add_policy(out)
    trl_advantages.add_advantages(out)
    trl_grpo.add_rloo_loss(out)
    trl_advantages.add_rollout_weights(out)
    trl_advantages.add_overlong(out)
    trl_preference.add_dpo(out)
    trl_preference.add_kto(out)
    trl_preference.add_reward(out)
    trl_preference.add_reference_free(out)
    trl_preference.add_with_likelihood(out)
    trl_supervised.add_sft(out)
    trl_supervised.add_divergences(out)
    trl_supervised.add_log_probs(out)
    out.write("trl.json")


if __name__ == "__main__":
    main()
