"""Supervised fine-tuning on chat data: cross-entropy of the assistant's turns.

    python experiments/sft.py --config=configs/sft.py:model=DIR,train=FILE,val=FILE

A Hugging Face directory (or hub id) on .parquet or .jsonl files whose rows have ``messages``, or
``prompt`` and ``response``; see ``jaxrlhf/data/conversations.py``. Of a base model whose template
ends a turn with another token than its own eos, name that one: Qwen2.5's
``--config.data.end_token='<|im_end|>'``.

    python experiments/sft.py --config=configs/sft.py:tiny

Nothing to download: right answers to word problems from a seeded generator, a tokenizer and a fresh
small model. About forty seconds on two CPU cores; the validation loss, on problems that no training
conversation has, falls from 5.52 to 0.08 nats per token (seed 0).
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
    config = common.sft()
    config.model.path = args.model or "Qwen/Qwen2.5-0.5B-Instruct"
    config.data.train_files = args.train or "data/chat/train.parquet"
    config.data.val_files = args.val or "data/chat/val.parquet"
    config.optimizer.warmup_steps = 10
    if args.tiny:
        _tiny(config)
    return config


def _tiny(config: ConfigDict) -> None:
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.model.path = "start_model"  # made inside the run's directory
    config.data.train_files = "data/train.parquet"
    config.data.val_files = "data/val.parquet"
    config.data.max_length = 128
    config.total_epochs = 1_000
    config.total_steps = 300
    config.save_freq = 100
    config.test_freq = 50
    config.sft.train_batch_size = 8
    config.sft.micro_batch_size = 8
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.decay_steps = 300
    config.optimizer.min_ratio = 0.1
    config.logging.console_freq = 50

    config.embedded = ConfigDict()
    config.embedded.num_layers = 2
    config.embedded.hidden_size = 128
    config.embedded.num_heads = 4
    config.embedded.train_conversations = 8192
    config.embedded.val_conversations = 200
