"""A config as read: which keys were, and which contradict each other."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxrlhf.data.chat import TURNS
from jaxrlhf.data.prompts import OVERLONG
from jaxrlhf.losses.kl import KL_KINDS
from jaxrlhf.losses.masked import AGGREGATIONS
from jaxrlhf.models.transformer import REMAT
from jaxrlhf.trainers.ppo import LOSS_KL_KINDS

CHOICES = {
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.remat": tuple(REMAT),
    "data.overlong_prompts": OVERLONG,
    "reward.on_error": ("raise", "skip"),
    "ppo.aggregation": tuple(AGGREGATIONS),
    "kl.where": ("reward", "loss", "none"),
}
WRITERS = ("console", "jsonl", "tensorboard", "wandb")
# The smallest number that a key takes; no number is NaN.
AT_LEAST_1 = [
    "total_epochs", "keep_checkpoints", "data.max_prompt_length",
    "rollout.n", "rollout.batch_size", "rollout.chunk_length", "rollout.max_response_length",
    "ppo.train_batch_size", "ppo.ppo_mini_batch_size", "ppo.ppo_micro_batch_size", "ppo.ppo_epochs",
]  # fmt: skip
AT_LEAST_0 = [
    "seed", "total_steps", "save_freq", "test_freq", "data.max_val_prompts",
    "ppo.critic_warmup", "ppo.entropy_coef", "ppo.dual_clip", "ppo.value_clip",
    "ppo.aggregation_norm", "kl.coef", "kl.target", "logging.rollouts_per_step",
    "actor.learning_rate", "actor.max_grad_norm", "critic.learning_rate", "critic.max_grad_norm",
]  # fmt: skip


class Settings:
    """A read-only view of a config that remembers which of its leaves were read."""

    def __init__(self, config: ConfigDict, prefix: str = "", reads: set[str] | None = None):
        self._config = config
        self._prefix = prefix
        self._reads: set[str] = set() if reads is None else reads

    def __getattr__(self, name: str) -> Any:
        value = self._config[name]
        path = self._prefix + name
        if isinstance(value, ConfigDict):
            return Settings(value, path + ".", self._reads)
        self._reads.add(path)
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def as_dict(self) -> dict[str, Any]:
        """All leaves below here as a plain dict, which counts as reading them."""
        self._reads.update(self._prefix + key for key in flatten(self._config))
        return self._config.to_dict()

    def unread(self) -> list[str]:
        """Dotted names of the leaves that nothing has read so far."""
        return sorted(set(flatten(self._config)) - self._reads)

    def refuse_unread(self) -> None:
        """Raises ValueError where a key of the config has reached nobody by now."""
        if unread := self.unread():
            raise ValueError(
                f"config keys that nothing reads: {', '.join(unread)}; remove them or use them."
            )


def flatten(config: ConfigDict | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"ppo.gamma": 1.0, …}`` from a nested config."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict | dict):
            out.update(flatten(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = list(value) if isinstance(value, tuple) else value
    return out


def check_ppo(config: Settings) -> None:
    """Refuses settings that contradict each other or have no effect, before anything is loaded.

    Raises:
      ValueError: one sentence that names the keys and says what would do.
    """
    check_values(config, AT_LEAST_0, AT_LEAST_1, CHOICES)
    if not config.rollout.temperature > 0:
        raise ValueError(
            f"rollout.temperature={config.rollout.temperature} leaves nothing to learn from; "
            "training needs a positive temperature (validation is greedy by itself)."
        )
    _check_sizes(config.ppo, config.rollout)
    _check_aggregation(config.ppo)
    _check_kl(config.kl)
    _check_warmup(config)
    for role in ("actor", "critic"):
        check_schedule(role, getattr(config, role))


def check_values(
    config: Settings,
    at_least_0: Sequence[str],
    at_least_1: Sequence[str],
    choices: Mapping[str, Sequence[str]],
) -> None:
    """Raises ValueError where a key by itself, or ``logging.writers``, cannot be used."""
    for least, keys in enumerate((at_least_0, at_least_1)):
        for key in keys:
            value = _get(config, key)
            if not value >= least:  # so that NaN is refused as well
                raise ValueError(f"{key}={value} must be at least {least}.")
    for key, known in choices.items():
        _one_of(config, key, known)
    if unknown := sorted(set(config.logging.writers) - set(WRITERS)):
        raise ValueError(f"logging.writers names {unknown}; choose from {', '.join(WRITERS)}.")


def _check_sizes(ppo: Settings, rollout: Settings) -> None:
    batch, mini, micro = ppo.train_batch_size, ppo.ppo_mini_batch_size, ppo.ppo_micro_batch_size
    rows = mini * rollout.n
    if batch % mini:
        raise ValueError(
            f"ppo.train_batch_size={batch} is not a multiple of ppo.ppo_mini_batch_size={mini}; "
            f"use one of {divisors(batch)} for the latter."
        )
    if rows % micro:
        raise ValueError(
            f"ppo.ppo_mini_batch_size={mini} x rollout.n={rollout.n} = {rows} rows is not a "
            f"multiple of ppo.ppo_micro_batch_size={micro}; use one of {divisors(rows)}."
        )
    if rollout.n > rollout.batch_size:
        raise ValueError(
            f"rollout.n={rollout.n} is above rollout.batch_size={rollout.batch_size}; raise the "
            "latter, the rows that decode together, to a multiple of it."
        )


def _check_aggregation(ppo: Settings) -> None:
    mode, norm = ppo.aggregation, ppo.aggregation_norm
    if bool(norm) != (mode == "seq_mean_token_sum_norm"):
        raise ValueError(
            f"ppo.aggregation={mode!r} with ppo.aggregation_norm={norm}: give the constant "
            "together with seq_mean_token_sum_norm, and only then."
        )


def _check_kl(kl: Settings) -> None:
    if kl.where == "none":
        if kl.coef or kl.target:
            raise ValueError(
                f"kl.coef={kl.coef} and kl.target={kl.target} have no effect while kl.where is "
                "none; set both to 0, or kl.where to reward or loss."
            )
        return
    kinds = LOSS_KL_KINDS if kl.where == "loss" else KL_KINDS
    if kl.estimator not in kinds:
        raise ValueError(
            f"kl.estimator={kl.estimator!r} is unknown with kl.where={kl.where}; use one of "
            f"{', '.join(kinds)}."
        )
    if kl.target and not kl.coef:
        raise ValueError("kl.coef=0 stays 0 under the adaptive controller; give it a number.")
    if kl.target and not kl.horizon > 0:
        raise ValueError(f"kl.horizon={kl.horizon} must be positive.")


def _check_warmup(config: Settings) -> None:
    warmup, total = config.ppo.critic_warmup, config.total_steps
    if warmup and not config.critic.learning_rate:
        raise ValueError(
            "ppo.critic_warmup has no effect while critic.learning_rate is 0; set one of them."
        )
    if total and warmup >= total:
        raise ValueError(
            f"ppo.critic_warmup={warmup} of total_steps={total} leaves no step to train the actor; "
            "lower the former or raise the latter."
        )


def check_schedule(role: str, optimizer: Settings) -> None:
    """A schedule has its decay steps, and no other setting of it goes without effect."""
    decays = optimizer.schedule != "constant"
    if decays and not optimizer.decay_steps:
        raise ValueError(
            f"{role}.schedule={optimizer.schedule!r} needs {role}.decay_steps; give the number of "
            "updates until its end."
        )
    if not decays and (optimizer.decay_steps or optimizer.min_ratio):
        raise ValueError(
            f"{role}.decay_steps and {role}.min_ratio have no effect while {role}.schedule is "
            "constant; set them to 0, or the schedule to linear or cosine."
        )


def _get(config: Settings, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def _one_of(config: Settings, key: str, choices: Sequence[str]) -> None:
    value = _get(config, key)
    if value not in choices:
        raise ValueError(f"{key}={value!r} is unknown here; use one of {', '.join(choices)}.")


def divisors(n: int) -> str:
    """``"1, 2, 3, 6"`` for 6, as error messages list them."""
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def check_supervised(
    config: Settings,
    group: str,
    *,
    at_least_0: Sequence[str] = (),
    at_least_1: Sequence[str] = (),
    choices: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """``check_ppo`` for a run of ``configs.common.supervised``, with ``group``'s batch sizes.

    Args:
      config: its settings.
      group: such as ``sft``, which has ``train_batch_size`` and ``micro_batch_size``.
      at_least_0, at_least_1, choices: of keys that such runs do not share.
    """
    batch_key, micro_key = f"{group}.train_batch_size", f"{group}.micro_batch_size"
    check_values(
        config,
        [
            "seed", "total_steps", "save_freq", "test_freq", "optimizer.learning_rate",
            "optimizer.max_grad_norm", *at_least_0,
        ],
        [
            "total_epochs", "keep_checkpoints", "data.max_length", batch_key, micro_key,
            "logging.console_freq", *at_least_1,
        ],
        {key: CHOICES[key] for key in ("model.compute_dtype", "model.remat")}
        | {"data.overlong": OVERLONG}
        | dict(choices or {}),
    )  # fmt: skip
    batch, micro = _get(config, batch_key), _get(config, micro_key)
    if batch % micro:
        raise ValueError(
            f"{batch_key}={batch} is not a multiple of {micro_key}={micro}; use "
            f"one of {divisors(batch)} for the latter."
        )
    check_schedule("optimizer", config.optimizer)


def check_sft(config: Settings) -> None:
    """Refuses settings of ``experiments/sft.py``, as ``check_ppo`` does."""
    check_supervised(
        config, "sft", at_least_0=["data.max_val_conversations"], choices={"data.turns": TURNS}
    )
