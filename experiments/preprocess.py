"""Turns GSM8K into the tables that the recipes read: train.parquet and val.parquet.

    python experiments/preprocess.py --input=DIR     # DIR holds train.jsonl and test.jsonl
    python experiments/preprocess.py --hub           # downloads openai/gsm8k (needs `datasets`)

The columns are verl's: data_source, prompt, ability, reward_model, extra_info. GSM8K's test split
becomes val.parquet. A row without a question or without an answer ending in ``#### N`` stops the
program with its file and row, and nothing is written.
"""

import functools
import pathlib
from collections.abc import Callable

from absl import app, flags

from jaxrlhf.data import gsm8k
from jaxrlhf.data.tables import Record, TableError, write_table
from jaxrlhf.progress import progress

INPUT = flags.DEFINE_string("input", None, "Folder with GSM8K's train.jsonl and test.jsonl.")
HUB = flags.DEFINE_bool("hub", False, "Take openai/gsm8k from the Hugging Face hub instead.")
OUTPUT = flags.DEFINE_string("output", "data/gsm8k", "Folder for train.parquet and val.parquet.")

SPLITS = {"train": "train.parquet", "test": "val.parquet"}
HUB_NAME = "openai/gsm8k"


def read_local(directory: pathlib.Path, split: str) -> list[Record]:
    """The records of one split of a folder of jsonl files."""
    file = directory / f"{split}.jsonl"
    with progress(f"preprocess {split}", unit="rows") as bar:
        return gsm8k.read_gsm8k(file, split, on_progress=bar.update)


def read_hub(split: str) -> list[Record]:
    """The records of one split from the hub."""
    try:
        import datasets
    except ImportError as error:
        raise TableError(
            "--hub needs the package datasets; pip install datasets, or give --input=DIR."
        ) from error
    rows = datasets.load_dataset(HUB_NAME, "main", split=split)
    with progress(f"preprocess {split}", unit="rows") as bar:
        return gsm8k.to_records(rows, split, source=f"{HUB_NAME} ({split})", on_progress=bar.update)


def convert(read: Callable[[str], list[Record]], output: pathlib.Path) -> dict[pathlib.Path, int]:
    """Reads all splits, then writes them; returns the number of rows of each file."""
    tables = {output / file: read(split) for split, file in SPLITS.items()}
    for path, records in tables.items():
        write_table(path, records)
    return {path: len(records) for path, records in tables.items()}


def main(argv: list[str]) -> None:
    """Reads the flags, converts, and says what was written."""
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag; give --input=DIR or --hub.")
    if (INPUT.value is None) != HUB.value:
        raise app.UsageError("give either --input=DIR or --hub.")

    read = read_hub if HUB.value else functools.partial(read_local, pathlib.Path(INPUT.value or ""))
    try:
        written = convert(read, pathlib.Path(OUTPUT.value))
    except (TableError, OSError) as error:
        raise SystemExit(f"preprocess: {error}") from error
    for path, rows in written.items():
        print(f"{path}: {rows} rows")


if __name__ == "__main__":
    app.run(main)
