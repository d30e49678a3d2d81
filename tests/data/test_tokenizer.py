import json
import shutil

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrlhf.data import word_problems
from jaxrlhf.data.tokenizer import build_word_tokenizer, load_tokenizer

# Words that a space or a line break starts: no two of them can grow together into another word.
PIECES = [
    " has",
    " 1",
    "2",
    " 3",
    " ",
    "\n",
    "\n####",
    " ####",
    ".",
    " .",
    "?",
    " ?",
    " +",
    "\nTom",
]


def test_the_tasks_texts_come_back(words):
    for record in word_problems.demonstrations(3, 300):
        for text in (record["prompt"][0]["content"], record["extra_info"]["demonstration"]):
            ids = words.encode(text)
            assert words.decode(ids) == text
            assert words.unk_token_id not in ids


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    return build_word_tokenizer(PIECES, tmp_path_factory.mktemp("pieces"))


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_known_text_comes_back(pieces, text):
    assert pieces.decode(pieces.encode(text)) == text


def test_digits_are_single_tokens_and_numbers_stay_apart(words):
    assert words.convert_ids_to_tokens(words.encode("407 81")) == ["4", "0", "7", "▁8", "1"]
    assert words.decode(words.encode("#### 12")[1:]) == " 12"
    assert words.encode("1 2") != words.encode("12")


def test_ids_depend_on_the_set_of_words(tmp_path):
    texts = word_problems.corpus()
    a = build_word_tokenizer(texts, tmp_path / "a").get_vocab()
    b = build_word_tokenizer(reversed(texts + texts), tmp_path / "b").get_vocab()
    assert a == b
    assert sorted(a.values()) == list(range(len(a)))


def test_special_tokens(words, tmp_path):
    assert words.pad_token_id != words.eos_token_id
    same = build_word_tokenizer(["a"], tmp_path, pad_is_eos=True)
    assert same.pad_token_id == same.eos_token_id is not None
    ids = words.encode("<|user|> has<|end|>")
    assert len(ids) == 3
    assert words.decode(ids, skip_special_tokens=True) == " has"
    with pytest.raises(ValueError, match="stands for a space"):
        build_word_tokenizer(["a▁b"], tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2"])
def test_auto_tokenizer_opens_it_beside_a_model(words, words_dir, tmp_path, model_type):
    """Or is refused where transformers would open it as something else (its version 5 on qwen2)."""
    shutil.copytree(words_dir, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": model_type}))
    saved = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    text = "Tom has 12 apples"
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    if auto.encode(text) == words.encode(text):
        assert load_tokenizer(tmp_path / "m").encode(text) == words.encode(text)
    else:
        assert model_type == "qwen2"
        with pytest.raises(ValueError, match=r"ids differ from its own tokenizer.json"):
            load_tokenizer(tmp_path / "m")


def _changed(words_dir, target, **changes):
    shutil.copytree(words_dir, target)
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return target


def test_what_load_refuses(words_dir, tmp_path):
    with pytest.raises(ValueError, match="has no eos token"):
        load_tokenizer(_changed(words_dir, tmp_path / "a", eos_token=None))
    bare = _changed(words_dir, tmp_path / "b", chat_template=None)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        load_tokenizer(bare)
    assert load_tokenizer(bare, require_chat_template=False).eos_token == "<|end|>"
    with pytest.raises(FileNotFoundError, match="is no directory"):
        load_tokenizer(tmp_path / "absent")


FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize(
    ("files", "content", "told"),
    [
        (FILES, None, "/tokenizer.json is missing; give a directory with a tokenizer."),
        (FILES[:1], None, "/tokenizer.json is missing"),
        (FILES[1:], None, ": "),  # without it nothing names the eos token
        (FILES[:1], "{", "/tokenizer.json cannot be read as JSON (Expecting"),
        (FILES[1:], '{"eos_token": ', "/tokenizer_config.json cannot be read as JSON (Expecting"),
        (FILES[:1], "version https://git-lfs", "/tokenizer.json cannot be read as JSON"),
        (FILES[:1], b"\xff\xfe{", "/tokenizer.json cannot be read as JSON"),
        (FILES[:1], '{"model": {"type": "None"}}', ": its tokenizer files cannot be opened ("),
        (FILES[1:], '{"tokenizer_class": 3}', ": "),
    ],
)
@pytest.mark.parametrize("beside_a_model", [True, False])
def test_missing_and_torn_files_are_named(
    words_dir, tmp_path, files, content, told, beside_a_model
):
    shutil.copytree(words_dir, tmp_path / "m")
    if beside_a_model:
        (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    for file in files:
        path = tmp_path / "m" / file
        path.unlink()
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path / "m")
    assert str(error.value).startswith(f"{tmp_path}/m{told}")
    assert "\n" not in str(error.value)


def test_a_missing_pad_token_is_eos(words_dir, tmp_path):
    tokenizer = load_tokenizer(_changed(words_dir, tmp_path / "a", pad_token=None))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_an_unknown_role_is_refused_by_the_template(words):
    with pytest.raises(Exception, match="unknown role tool"):
        words.apply_chat_template([{"role": "tool", "content": "x"}])
