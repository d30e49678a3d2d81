"""Parquet and jsonl files, tasks, chat templates, batching."""
