"""Decoder transformers as nested dicts of arrays and free functions; knows no RL."""
