"""Entry points: read a config, build the pieces, loop."""

import os

# transformers serves as a tokenizer library here; that torch is absent is no news.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
