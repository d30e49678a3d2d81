"""Computes trl_ppo.json with TRL 1.12.0, the last with experimental.ppo.

python -W ignore make_trl_ppo.py     (TRL 1.12.0 first on PYTHONPATH)

PPO's maths is inside `PPOTrainer.train`, so that runs, for one step of one mini-batch, on a
stand-in for `self`: models are tables of log-probs and values looked up by the row number in the
prompt, the optimiser does nothing, `backward` is torch's. A table's logits have the wanted
log-prob on the sampled token and share the rest equally, so that the gradient by the log-prob is
the loss's own.
"""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import contextlib
import types
from collections.abc import Iterator

import torch
import trl.experimental.ppo.ppo_trainer as ppo
from record import Recorder, gradients, ids
from trl.experimental.bco.bco_trainer import BCOTrainer
from trl.experimental.gspo_token.grpo_trainer import GRPOTrainer as GSPOTokenTrainer
from trl_grpo import BATCHES, _loss_case
from trl_stubs import Accelerator, load, trainer

VOCABULARY, PAD, WORD, FIRST_ROW = 4, 0, 2, 10


class Tables:
    """The four models of one PPO step, and what its `train` left behind."""

    def __init__(self, x: dict[str, torch.Tensor], mask: torch.Tensor):
        self.mask = mask
        self.responses = torch.where(mask, WORD, PAD)
        rows = torch.arange(len(mask))[:, None] + FIRST_ROW
        self.queries = rows
        self.x = x
        self.leaves = {n: x[n].clone().requires_grad_(True) for n in ("log_probs", "values")}

    def logits(self, log_probs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        rest = torch.log1p(-torch.exp(log_probs[rows])) - torch.log(torch.tensor(VOCABULARY - 1.0))
        spread = rest[..., None].expand(*rest.shape, VOCABULARY)
        chosen = torch.nn.functional.one_hot(self.responses[rows], VOCABULARY).bool()
        return torch.where(chosen, log_probs[rows][..., None], spread)

    def row_numbers(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids[:, 0] - FIRST_ROW

    def causal(self, table: torch.Tensor) -> object:
        """A language model: position t's logits are those of response token t."""

        def call(input_ids: torch.Tensor, **kwargs: object) -> object:
            logits = self.logits(table, self.row_numbers(input_ids))
            return types.SimpleNamespace(logits=torch.cat([logits, logits[:, -1:]], dim=1))

        return call

    def scalar(self, table: torch.Tensor) -> object:
        """A scalar head whose position t, of 1 + T, holds table[:, t]."""

        def backbone(input_ids: torch.Tensor, **kwargs: object) -> object:
            return types.SimpleNamespace(hidden_states=[table[self.row_numbers(input_ids)]])

        def score(hidden: torch.Tensor) -> torch.Tensor:
            last = hidden[:, -1:]
            return torch.cat([hidden, last], dim=1)[..., None]

        return types.SimpleNamespace(base_model_prefix="backbone", backbone=backbone, score=score)

    def generate(self, input_ids: torch.Tensor, **kwargs: object) -> object:
        rows = self.row_numbers(input_ids)
        scores = self.logits(self.x["old_log_probs"], rows)
        sequences = torch.cat([input_ids, self.responses[rows]], dim=1)
        return types.SimpleNamespace(sequences=sequences, scores=tuple(scores.unbind(1)))


class PolicyAndValue:
    """What train() calls `model`: new log-probs and values together."""

    def __init__(self, tables: Tables):
        policy = tables.causal(tables.leaves["log_probs"])
        self.policy = types.SimpleNamespace(generate=tables.generate)
        self.value_model = tables.scalar(tables.x["old_values"])
        values = tables.leaves["values"]

        def call(input_ids: torch.Tensor, **kwargs: object) -> tuple[object, torch.Tensor]:
            rows = tables.row_numbers(input_ids)
            column = torch.cat([values[rows], values[rows][:, -1:]], dim=1)[..., None]
            return policy(input_ids, **kwargs), column

        self.call = call

    def __call__(self, **kwargs: object) -> tuple[object, torch.Tensor]:
        return self.call(**kwargs)

    def train(self) -> None:
        pass


class OneProcess(Accelerator):
    def __init__(self) -> None:
        self.loss: torch.Tensor | None = None

    def print(self, *args: object) -> None:
        pass

    @contextlib.contextmanager
    def accumulate(self, model: object) -> Iterator[None]:
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self.loss = loss.detach()
        loss.backward()


def run_ppo(x: dict[str, torch.Tensor], mask: torch.Tensor, **settings: object) -> dict:
    """One step of PPOTrainer.train; what it logged, what it whitened, and the gradients."""
    tables, accelerator, whitened, logged = Tables(x, mask), OneProcess(), [], {}
    rows = len(mask)
    args = types.SimpleNamespace(
        response_length=mask.shape[1],
        temperature=1.0 - 1e-7,  # train() adds 1e-7
        num_ppo_epochs=1,
        num_mini_batches=1,
        gradient_accumulation_steps=1,
        num_total_batches=1,
        total_episodes=rows,
        logging_steps=None,
        eval_steps=None,
        save_steps=None,
        batch_size=rows,
        local_batch_size=rows,
        local_mini_batch_size=rows,
        per_device_train_batch_size=rows,
        local_rollout_forward_batch_size=rows,
        ds3_gather_for_generation=False,
        missing_eos_penalty=None,
        num_sample_generations=0,
        **settings,
    )
    nothing = types.SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
    control = types.SimpleNamespace(should_save=False)
    handler = types.SimpleNamespace(
        on_train_begin=lambda *a: control,
        on_step_end=lambda *a: control,
        on_train_end=lambda *a: control,
    )
    self = types.SimpleNamespace(
        args=args,
        accelerator=accelerator,
        optimizer=nothing,
        model=PolicyAndValue(tables),
        ref_model=tables.causal(x["ref_log_probs"]),
        reward_model=tables.scalar(x["scores"][:, None].expand(mask.shape)),
        processing_class=types.SimpleNamespace(pad_token_id=PAD, eos_token_id=1),
        dataloader=[{"input_ids": tables.queries}],
        state=types.SimpleNamespace(),
        train_dataset_len=rows,
        callback_handler=handler,
        control=control,
        is_deepspeed_enabled=False,
        stop_token_id=None,
        lr_scheduler=types.SimpleNamespace(step=lambda: None, get_last_lr=lambda: [0.0]),
        log=logged.update,
    )
    real_whiten = ppo.masked_whiten

    def recording_whiten(values: torch.Tensor, mask: torch.Tensor, **kwargs: object):
        out = real_whiten(values, mask, **kwargs)
        whitened.append((values.clone(), out.clone()))
        return out

    @contextlib.contextmanager
    def unwrapped(model: object, *args: object, **kwargs: object) -> Iterator[object]:
        yield model

    ppo.masked_whiten, ppo.unwrap_model_for_generation = recording_whiten, unwrapped
    try:
        ppo.PPOTrainer.train(self)
    finally:
        ppo.masked_whiten = real_whiten
    return {
        "loss": accelerator.loss,
        "whitened": whitened,
        "logged": logged,
        "grads": {name: leaf.grad for name, leaf in tables.leaves.items()},
    }


def add_ppo(out: Recorder) -> None:
    base = {
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "whiten_rewards": False,
        "gamma": 1.0,
        "lam": 0.95,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
    }
    kinds = {
        "default": {},
        "k3": {"kl_estimator": "k3"},
        "discounted": {"gamma": 0.9, "lam": 0.8},
        "whiten_rewards": {"whiten_rewards": True},
    }
    for name, kwargs in kinds.items():
        identity = ids("token_batch", mask="plain")
        settings = {**base, **kwargs}
        x = load(identity)
        found = run_ppo(x, x["mask"], **settings)
        raw, white = found["whitened"][-1]
        keep = x["mask"].float()
        names = {
            "loss/policy_avg": "policy_loss",
            "loss/value_avg": "value_loss",
            "policy/approxkl_avg": "approxkl",
            "policy/clipfrac_avg": "clipfrac",
            "val/clipfrac_avg": "value_clipfrac",
            "val/ratio": "ratio",
            "objective/kl": "kl",
            "policy/entropy_avg": "entropy",
        }
        value = {
            "loss": found["loss"],
            "advantages_before_whitening": raw * keep,
            "advantages": white * keep,
        }
        if settings["whiten_rewards"]:
            value["rewards"], value["whitened_rewards"] = found["whitened"][0]
        out.add(
            f"trl/ppo/{name}",
            "trl.experimental.ppo.ppo_trainer.PPOTrainer.train",
            identity,
            value,
            grads=found["grads"],
            arguments=settings,
            metrics={short: found["logged"][long] for long, short in names.items()},
            note="one step over the six rows at once: old_log_probs from the sampler, old_values; "
            "reward -kl_coef * kl per token, the score one past the last token (on the last in a "
            "full row); GAE over the padded row with values up to one past the end; the value loss "
            "counts one token past the end, the policy loss does not. approxkl, ratio and entropy "
            "are means over all positions, padding included (approxkl 0, ratio 1 there)",
        )


def add_masked(out: Recorder) -> None:
    identity = ids("token_batch")
    for shift in (True, False):
        x = load(identity)
        leaf = x["per_token"].requires_grad_(True)
        mask = x["mask"].float()
        value = ppo.masked_whiten(leaf, x["mask"], shift_mean=shift) * mask
        out.add(
            f"trl/masked/whiten{'' if shift else '_keep_mean'}/gaps",
            "trl.experimental.ppo.ppo_trainer.masked_whiten",
            identity,
            value,
            grads=gradients(value, {"per_token": leaf}, x["entropy"]),
            arguments={"shift_mean": shift},
            note="stored times the mask; the gradient is of sum(value * entropy)",
        )


def add_gspo_token(out: Recorder) -> None:
    for batch in BATCHES:
        _loss_case(
            out,
            "gspo_token",
            batch,
            cls=GSPOTokenTrainer,
            advantages="advantages",
            loss_type="grpo",
            importance_sampling_level="sequence_token",
            note="the sequence ratio, differentiated through each token's own log-prob",
        )


class RunningMean:
    """The moving average of implicit rewards that BCO subtracts, held at a constant."""

    mean = 0.3

    def update(self, x: torch.Tensor) -> None:
        pass


def add_bco(out: Recorder) -> None:
    for name, extreme in (("typical", False), ("extreme", True)):
        identity = ids("pair_batch", extreme=extreme)
        x = load(identity)
        leaf = x["policy"].requires_grad_(True)
        sums = torch.where(x["mask"], leaf, 0.0).sum(-1)
        reference = torch.where(x["mask"], x["reference"], 0.0).sum(-1)
        self = trainer(
            BCOTrainer,
            beta=0.1,
            running=RunningMean(),
            embedding_func=None,
            embedding_tokenizer=None,
        )
        losses, *_ = BCOTrainer.bco_loss(
            self, sums[:, 0], sums[:, 1], reference[:, 0], reference[:, 1], None, None
        )
        out.add(
            f"trl/preference/bco/{name}",
            "trl.experimental.bco.bco_trainer.BCOTrainer.bco_loss",
            identity,
            losses,
            grads=gradients(losses, {"policy": leaf}),
            arguments={"beta": 0.1, "delta": 0.3},
            note="the five chosen completions, then the five rejected",
        )


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    out = Recorder("make_trl_ppo.py", ["trl", "torch", "numpy", "transformers", "accelerate"])
    add_ppo(out)
    add_masked(out)
    add_gspo_token(out)
    add_bco(out)
    out.write("trl_ppo.json")


if __name__ == "__main__":
    main()
