"""Tokenizers: opening one with the checks a run needs, and building a small word-level one.

The built tokenizer maps words, punctuation marks and single digits to one token each. A space
belongs to the token after it (written ``▁``), so that decoding gives the encoded text back exactly:
"12" and "1 2" stay different, which a scorer that reads numbers relies on.
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

PAD = "<|pad|>"
UNKNOWN = "<|unknown|>"
END = "<|end|>"  # ends a turn, and is the eos token
ROLES = ("system", "user", "assistant")

# One marker token a turn: `<|user|>text<|end|><|assistant|>text<|end|>`.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in " + json.dumps(ROLES) + " %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + END + "' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_PROBE = "Tom's 3 red hats cost $12.50 each.\nHow much for 10?\n#### 125"
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")
_SPACE = "▁"
# A word (with its apostrophes), a digit, a run of '#', a line break, or any other character.
_PIECES = rf"{_SPACE}?(?:[^\W\d_]+(?:'[^\W\d_]+)*|\d|#+|[^\s\w{_SPACE}]|_)|{_SPACE}|\n"


def build_word_tokenizer(
    texts: Iterable[str], directory: str | os.PathLike[str], *, pad_is_eos: bool = False
) -> Any:
    """Builds a word-level tokenizer over the texts' words and saves it for ``AutoTokenizer``.

    Ids depend on the set of words alone: special tokens first, then the words in sorted order.
    All digits are known, with and without a space before them. A word outside the texts becomes
    ``<|unknown|>``.

    Args:
      texts: between them they hold every word that will be needed.
      directory: where the tokenizer's files go; made if absent.
      pad_is_eos: pad with the eos token, as some published tokenizers do.

    Returns:
      The tokenizer, opened from the directory by ``load_tokenizer``.
    """
    digits = [f"{space}{digit}" for space in ("", _SPACE) for digit in range(10)]
    words = {piece for text in texts for piece in _split(text)}
    special = [PAD, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    ordered = [*special, *digits, *sorted(words - set(digits) | {_SPACE, "\n"})]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_word_level({word: i for i, word in enumerate(ordered)}, special),
        pad_token=END if pad_is_eos else PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    _name_fast_class(pathlib.Path(directory) / "tokenizer_config.json")
    return load_tokenizer(directory)


def load_tokenizer(directory: str | os.PathLike[str], *, require_chat_template: bool = True) -> Any:
    """Opens the tokenizer in a local directory (code in it is never run).

    A tokenizer without a pad token gets its eos token as one: masks and lengths come from the
    sampler, never from ``token == pad``.

    Args:
      directory: holds the tokenizer's files.
      require_chat_template: False for a task whose prompts are all plain text.

    Raises:
      FileNotFoundError: there is no such directory.
      ValueError: files that are missing or cannot be read, no eos token, no chat template where
        one is needed, or ids that disagree with the directory's own tokenizer.json.
    """
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"{directory}: is no directory; give one with tokenizer files.")
    tokenizer, ids = _open(pathlib.Path(directory))
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{directory}: has no eos token; set eos_token in tokenizer_config.json.")
    if require_chat_template and tokenizer.chat_template is None:
        raise ValueError(f"{directory}: has no chat template; add a chat_template.jinja to it.")
    if ids is not None:
        _check_ids(tokenizer, ids, directory)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str | None:
    """A sha256 of what makes token ids of messages: equal where two tokenizers do the same.

    None where the tokenizer does not tell (those that are not of the ``tokenizers`` library).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules = json.loads(backend.to_str())
    # How rows are padded and cut belongs to a caller, not to the tokenizer.
    kept = {key: value for key, value in rules.items() if key not in ("padding", "truncation")}
    whole = json.dumps([kept, tokenizer.chat_template, tokenizer.eos_token_id], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


def _split(text: str) -> list[str]:
    if _SPACE in text:
        raise ValueError(f"{text!r}: holds {_SPACE!r}, which stands for a space; remove it.")
    return re.findall(_PIECES, text.replace(" ", _SPACE))


def _word_level(vocabulary: dict[str, int], special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    return tokenizer


def _open(directory: pathlib.Path) -> tuple[Any, list[int] | None]:
    """The tokenizer, and what the directory's tokenizer.json itself makes of the probe."""
    file = directory / "tokenizer.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(os.fspath(directory), trust_remote_code=False)
        if not file.exists():
            return tokenizer, None
        return tokenizer, Tokenizer.from_file(str(file)).encode(
            _PROBE, add_special_tokens=False
        ).ids
    except Exception as error:
        raise ValueError(_why_it_does_not_open(directory, error)) from error


def _why_it_does_not_open(directory: pathlib.Path, error: Exception) -> str:
    """Names the file at fault where it can be told; transformers speaks of other things."""
    if not any((directory / name).exists() for name in _VOCABULARIES):
        return f"{directory / _VOCABULARIES[0]} is missing; give a directory with a tokenizer."
    for path in sorted(directory.glob("*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as fault:
            return f"{path} cannot be read as JSON ({fault}); fetch it again."
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{directory}: its tokenizer files cannot be opened ({said[:300]}); fetch them again."


def _check_ids(tokenizer: Any, wanted: list[int], directory: str | os.PathLike[str]) -> None:
    """Refuses a class that reads tokenizer.json as something that it is not.

    transformers 5 opens every folder of model type qwen2 as its byte-pair class, whatever class
    tokenizer_config.json names: a word-level tokenizer then drops most words without a sound.
    """
    if tokenizer.encode(_PROBE, add_special_tokens=False) != wanted:
        raise ValueError(
            f"{directory}: opens as {type(tokenizer).__name__}, whose ids differ from its own "
            "tokenizer.json; name the class that made it in tokenizer_config.json, and keep a "
            "word-level tokenizer away from model type qwen2 (llama and qwen3 work)."
        )


def _name_fast_class(config_file: pathlib.Path) -> None:
    """Names the generic fast class, which every version of transformers opens as it is.

    Version 5 writes a class name that version 4 does not know.
    """
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    text = json.dumps(config, indent=2, ensure_ascii=False)
    config_file.write_text(text + "\n", encoding="utf-8")
