"""What the recipes share: the argument parser and each experiment's settings with defaults."""

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict


def parse_arg(arg: str | None, *, names: Sequence[str] = (), **defaults: Any) -> ConfigDict:
    """Reads the part behind the colon of ``--config=configs/recipe.py:ARG``.

    ``ARG`` is a comma-separated list of names (each switches that name on) and ``key=value``
    pairs, for example ``tiny`` or ``smollm2,model=../models/smollm2``. Values take the type of
    the key's default.

    Args:
      arg: the text, None or empty for the recipe's default form.
      names: the switches that the recipe knows.
      **defaults: the keys that the recipe knows, with their defaults (str, int, float or bool).

    Returns:
      A ConfigDict with one bool per name and one value per key.

    Raises:
      ValueError: naming an unknown, repeated or unreadable part, and what is known.
    """
    out = ConfigDict({**dict.fromkeys(names, False), **defaults})
    known = ", ".join([*names, *(f"{key}=…" for key in defaults)]) or "no argument"
    seen: set[str] = set()
    for part in filter(None, (piece.strip() for piece in (arg or "").split(","))):
        key, has_value, text = part.partition("=")
        if key in seen:
            raise ValueError(f"config argument {key!r} is given twice; keep one of them.")
        seen.add(key)
        if key in names and not has_value:
            out[key] = True
        elif key in defaults and has_value:
            out[key] = _convert(key, text, type(defaults[key]))
        else:
            raise ValueError(f"config argument {part!r} is unknown; this recipe takes: {known}.")
    return out


def _convert(key: str, text: str, kind: type) -> Any:
    if not text:
        raise ValueError(f"config argument {key}= is empty; give a value or leave it out.")
    booleans = {"true": True, "1": True, "false": False, "0": False}
    try:
        return booleans[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(
            f"config argument {key}={text!r} is not of type {kind.__name__}; change the value."
        ) from None


def optimizer(learning_rate: float) -> ConfigDict:
    """AdamW with gradient clipping; the schedule counts updates of that role."""
    c = ConfigDict()
    c.learning_rate = learning_rate
    c.schedule = "constant"  # constant | linear | cosine
    c.warmup_steps = 0
    c.decay_steps = 0  # updates until the end of the decay; constant has none
    c.min_ratio = 0.0  # final learning rate as a share of the peak
    c.beta1 = 0.9
    c.beta2 = 0.999
    c.eps = 1e-8
    c.weight_decay = 0.01
    c.max_grad_norm = 1.0  # 0 for no clipping
    return c


def run(*, epochs: int, freq: int) -> ConfigDict:
    """What every training run has; ``freq`` is that of checkpoints and of validations."""
    c = ConfigDict()
    c.seed = 0
    c.total_epochs = epochs
    c.total_steps = 0  # stops earlier, after so many steps; 0 for the epochs alone
    c.save_freq = freq  # steps between checkpoints; 0 saves at the end alone
    c.test_freq = freq  # steps between validations; 0 validates before and at the end alone
    c.keep_checkpoints = 2

    c.model = ConfigDict()
    c.model.path = ""  # a Hugging Face directory, or a hub id
    c.model.compute_dtype = "bfloat16"  # float32 | bfloat16; master weights are always float32
    c.model.remat = "full"

    c.data = ConfigDict()
    c.data.train_files = ""
    c.data.val_files = ""
    c.data.template_options = ConfigDict()  # of the chat template; a recipe may add to them
    c.data.template_options.date_string = ""  # Llama 3's; "" leaves it to the template

    c.logging = ConfigDict()
    c.logging.writers = ("console", "jsonl", "tensorboard")  # and "wandb"
    c.logging.project = "jaxrlhf"
    return c


def supervised(*, epochs: int) -> ConfigDict:
    """``run``, where a step is one update by one optimiser."""
    c = run(epochs=epochs, freq=100)
    c.logging.console_freq = 10  # updates between two tables on the console
    return c


def ppo() -> ConfigDict:
    """Every setting of ``experiments/ppo.py`` with its default; names as in verl where equal."""
    c = run(epochs=15, freq=10)

    c.data.train_files = "data/gsm8k/train.parquet"
    c.data.val_files = "data/gsm8k/val.parquet"
    c.data.max_prompt_length = 512
    c.data.overlong_prompts = "filter"  # filter | truncate | error
    c.data.max_val_prompts = 0  # 0 validates on all of them

    c.rollout = ConfigDict()
    c.rollout.n = 1  # samples per prompt
    c.rollout.temperature = 1.0  # top-k and top-p would sample what the trainer does not train
    c.rollout.max_response_length = 256
    c.rollout.batch_size = 256  # rows that decode together
    c.rollout.chunk_length = 32  # tokens between two looks at whether all rows have ended

    c.reward = ConfigDict()
    c.reward.function = "jaxrlhf.rewards.gsm8k.score"
    c.reward.kwargs = ConfigDict()
    c.reward.on_error = "raise"  # raise | skip (an unscored row is counted and trains nothing)

    c.ppo = ConfigDict()
    c.ppo.train_batch_size = 256  # prompts per step
    c.ppo.ppo_mini_batch_size = 64  # prompts per update
    c.ppo.ppo_micro_batch_size = 4  # rows per forward-backward pass
    c.ppo.ppo_epochs = 4
    c.ppo.clip_low = 0.2
    c.ppo.clip_high = 0.2
    c.ppo.dual_clip = 0.0  # bound of the ratio where the advantage is negative; 0 for none
    c.ppo.value_clip = 0.2  # 0 for none
    c.ppo.gamma = 1.0
    c.ppo.lam = 0.95
    c.ppo.whiten_advantages = True
    c.ppo.aggregation = "token_mean"
    c.ppo.aggregation_norm = 0.0  # the constant of seq_mean_token_sum_norm, else 0
    c.ppo.entropy_coef = 0.0
    c.ppo.critic_warmup = 0  # steps in which the critic alone is updated

    c.kl = ConfigDict()
    c.kl.where = "reward"  # reward | loss | none
    c.kl.estimator = "k1"
    c.kl.coef = 0.001
    c.kl.target = 0.01  # adapts coef to this KL (nats per token, step's mean); 0 keeps coef fixed
    c.kl.horizon = 10_000.0  # rows; the adaptive controller's time constant

    c.actor = optimizer(1e-6)
    c.critic = optimizer(1e-5)

    c.logging.rollouts_per_step = 8
    return c


def sft() -> ConfigDict:
    """Every setting of ``experiments/sft.py`` with its default."""
    c = supervised(epochs=2)

    c.data.max_length = 2048  # tokens of a conversation at most, and of a packed row
    c.data.overlong = "filter"  # filter | truncate | error
    c.data.turns = "all"  # all | last: the assistant's turns that are trained on
    c.data.packing = True  # several conversations a row; False for one a row
    c.data.end_token = ""  # ends a turn, as the template writes it; "" for the model's own
    c.data.max_val_conversations = 0  # 0 validates on all of them

    c.sft = ConfigDict()
    c.sft.train_batch_size = 16  # rows per update
    c.sft.micro_batch_size = 2  # rows per forward-backward pass

    c.optimizer = optimizer(1e-5)
    return c
