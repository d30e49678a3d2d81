"""PPO on GSM8K grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168).

    python experiments/ppo.py --config=configs/gsm8k.py

Qwen2.5-0.5B-Instruct on one accelerator of 40 GB or more, after
``python experiments/preprocess.py --input=DIR``. verl reports 56.7 % on the test split for its
PPO quickstart with these sizes (from 36.4 % or 49.6 %, by scorer); we have not run ours yet.

    python experiments/ppo.py --config=configs/gsm8k.py:smollm2,model=DIR

SmolLM2-135M-Instruct, small enough for a CPU. It solves about one problem in thirty, so this
shows the machinery, not progress on GSM8K.

    python experiments/ppo.py --config=configs/gsm8k.py:tiny

Nothing to download: word problems from a seeded generator, a tokenizer and a model made on the
spot, warmed up on demonstrations that are spoilt on purpose (most miss the ``####`` or use the
wrong operator), then PPO. Reinforcement learning here *selects* what the demonstrations do only
some of the time; it teaches no arithmetic. Held-out means pairs of template and numbers that the
warm-up and PPO never see. About five minutes on two CPU cores.

Each form takes ``reward=package.module.function`` as well: your scorer in place of GSM8K's; or
``reward_model=DIR``, what ``experiments/reward_model.py`` exported.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(arg: str | None = None) -> ConfigDict:
    args = common.parse_arg(arg, names=("tiny", "smollm2"), model="", reward="", reward_model="")
    if args.tiny and args.smollm2:
        raise ValueError("config arguments tiny and smollm2 exclude each other; keep one of them.")
    if args.tiny and args.model:
        raise ValueError("config argument tiny makes its own model; drop model=… or tiny.")
    config = common.ppo()
    config.model.path = args.model or "Qwen/Qwen2.5-0.5B-Instruct"
    config.reward.kwargs.format_score = 0.0  # for an answer in the right form but wrong
    config.reward.kwargs.lenient = False  # True also reads \boxed{} and the last number
    if args.smollm2:
        _smollm2(config, args.model or "HuggingFaceTB/SmolLM2-135M-Instruct")
    if args.tiny:
        _tiny(config)
    if args.reward and args.reward_model:
        raise ValueError("config arguments reward and reward_model exclude each other; keep one.")
    if args.reward_model:
        config.reward.function = "jaxrlhf.rewards.reward_model.score"
        config.reward.kwargs = ConfigDict({"directory": args.reward_model, "normalise": False})
    if args.reward:
        config.reward.function = args.reward
        config.reward.kwargs = ConfigDict()  # those above are of GSM8K's scorer
    return config


def _smollm2(config: ConfigDict, model: str) -> None:
    config.model.path = model
    config.model.compute_dtype = "float32"  # faster than bfloat16 on a CPU
    config.model.remat = "none"
    config.data.max_prompt_length = 256
    config.data.max_val_prompts = 32
    config.total_steps = 20
    config.rollout.max_response_length = 128
    config.rollout.batch_size = 16
    config.ppo.train_batch_size = 16
    config.ppo.ppo_mini_batch_size = 8
    config.ppo.ppo_micro_batch_size = 4
    config.ppo.ppo_epochs = 1
    config.reward.kwargs.lenient = True  # it seldom writes "####"
    config.reward.kwargs.format_score = 0.1  # right answers are too rare to learn from alone


def _tiny(config: ConfigDict) -> None:
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.model.path = "start_model"  # made by the warm-up, inside the run's directory
    config.data.train_files = "data/train.parquet"
    config.data.val_files = "data/val.parquet"
    config.data.max_prompt_length = 24
    config.total_epochs = 1_000
    config.total_steps = 60
    config.save_freq = 10
    config.test_freq = 5
    config.rollout.n = 4
    config.rollout.max_response_length = 16
    config.rollout.chunk_length = 8
    config.ppo.train_batch_size = 64
    config.ppo.ppo_mini_batch_size = 32
    config.ppo.ppo_micro_batch_size = 128
    config.ppo.ppo_epochs = 1
    # Below 1 the critic's errors enter the advantage, and by the token's place: with shuffled
    # scores (rewards/controls) the accuracy then rose from .35 to .43 in 45 steps; at 1 it fell.
    config.ppo.lam = 1.0
    config.ppo.critic_warmup = 5  # a critic of values near 0 is no baseline
    config.actor.learning_rate = 1e-4  # at 3e-4 noise alone turns a format on: see rewards/controls
    config.critic.learning_rate = 1e-3
    # At 0.02 the noise of shuffled scores still moved the format (in one seed of two the accuracy
    # rose from .37 to .44); at 0.1 it stays, and the best policy, p exp(reward / 0.1), is as good.
    config.kl.coef = 0.1
    config.kl.target = 0.0

    config.embedded = ConfigDict()
    config.embedded.num_layers = 2
    config.embedded.hidden_size = 128
    config.embedded.num_heads = 4
    config.embedded.train_problems = 1024
    config.embedded.val_problems = 200
    config.embedded.demonstrations = 8192
    config.embedded.spoil_probability = 0.75
    config.embedded.warmup_steps = 900
    config.embedded.warmup_batch_size = 32
    config.embedded.warmup_learning_rate = 3e-3
