"""A reward model from preferences (Bradley-Terry; Ouyang et al. 2022, arXiv 2203.02155).

    python experiments/reward_model.py \\
        --config=configs/reward_model.py:model=DIR,train=FILE,val=FILE

A Hugging Face directory (or hub id), best after supervised fine-tuning, on .parquet or .jsonl files
of pairs: ``prompt``, ``chosen``, ``rejected`` in any of the forms of
``jaxrlhf/data/preferences.py``. One epoch, for reward models overfit in the second.

    python experiments/reward_model.py --config=configs/reward_model.py:tiny

Nothing to download: generated pairs in which adjectives should suit their nouns ("the very icy
glacier"), 5 % of the labels flipped, so that no rule is right on more than about 95 % of the
held-out pairs; neither a single word nor the length tells. About three minutes on two CPU cores:
accuracy .936 [.921, .951] on held-out prompts, where .941 is the most and length alone gives .512
(seed 0).
"""

from ml_collections import ConfigDict

from configs import common


def get_config(arg: str | None = None) -> ConfigDict:
    args = common.parse_arg(arg, names=("tiny",), model="", train="", val="")
    if args.tiny and (args.model or args.train or args.val):
        raise ValueError(
            "config argument tiny makes its own model and data; drop model=…, train=… and val=…, "
            "or tiny."
        )
    config = _defaults()
    config.model.path = args.model or "Qwen/Qwen2.5-0.5B-Instruct"
    config.data.train_files = args.train
    config.data.val_files = args.val
    if args.tiny:
        _tiny(config)
    return config


def _defaults() -> ConfigDict:
    """Every setting of ``experiments/reward_model.py`` with its default."""
    c = common.supervised(epochs=1)

    c.data.max_length = 1024  # tokens of prompt and answer
    c.data.overlong = "filter"  # filter | truncate (the prompt's beginning) | error
    c.data.max_val_pairs = 0  # 0 validates on all of them
    c.data.max_statistics_pairs = 2_000  # for mean and deviation of the scores; 0 takes all

    c.rm = ConfigDict()
    c.rm.train_batch_size = 64  # pairs per update
    c.rm.micro_batch_size = 4  # pairs per forward-backward pass
    c.rm.score_batch_size = 32  # rows scored together in a validation
    c.rm.margin_scale = 1.0  # times the pairs' own margins, where they have any; 0 ignores them
    c.rm.centring = 0.01  # coefficient of (chosen + rejected)^2; 0 for none
    c.rm.label_smoothing = 0.0  # probability that a label is wrong

    c.optimizer = common.optimizer(9e-6)
    c.optimizer.warmup_steps = 10
    return c


def _tiny(config: ConfigDict) -> None:
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.model.path = "start_model"  # made inside the run's directory
    config.data.train_files = "data/train.parquet"
    config.data.val_files = "data/val.parquet"
    config.data.max_length = 64
    config.total_epochs = 1_000
    config.total_steps = 300
    config.save_freq = 100
    config.test_freq = 50
    config.rm.train_batch_size = 64
    config.rm.micro_batch_size = 64
    config.rm.score_batch_size = 256
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.decay_steps = 300
    config.optimizer.min_ratio = 0.1
    config.logging.console_freq = 50

    config.embedded = ConfigDict()
    config.embedded.num_layers = 2
    config.embedded.hidden_size = 64
    config.embedded.num_heads = 4
    config.embedded.train_pairs = 8192
    config.embedded.val_pairs = 1000
    config.embedded.flip_probability = 0.05
    config.embedded.demonstrations = 4096
    config.embedded.warmup_steps = 300
    config.embedded.warmup_batch_size = 32
    config.embedded.warmup_learning_rate = 3e-3
