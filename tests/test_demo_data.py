"""The shipped data: a tokenizer that its text gives again, prompts that the text can continue, sources that are named."""

import importlib.util

import pytest
from headrace import specs
from headrace.runtime.demo import read_prompts
from tokenizers import Tokenizer

DATA = specs.path("data")


def test_the_shipped_tokenizer_is_what_its_script_trains_on_the_shipped_text():
    spec = importlib.util.spec_from_file_location("make_tokenizer", DATA / "make_tokenizer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trained = module.train((DATA / "text.txt").read_text("utf-8"))
    shipped = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    assert trained.get_vocab() == shipped.get_vocab()
    assert shipped.get_vocab_size() == module.VOCAB_SIZE


@pytest.mark.parametrize("text", ["It is a truth", "naïve 日本 😀", "\x00\x01\n\t", "".join(map(chr, range(0x250)))])
def test_any_text_survives_the_tokenizer(text):
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_prompts_are_worded_so_that_the_text_can_go_on():
    words = set((DATA / "text.txt").read_text("utf-8").split())
    prompts = read_prompts(None)
    assert len(prompts) >= 24
    assert [prompt for prompt in prompts if prompt.split()[-1] not in words] == []


def test_every_data_file_is_named_with_its_source():
    readme = (DATA / "README.md").read_text("utf-8")
    for file in DATA.iterdir():
        if file.is_file() and file.name != "README.md":
            assert file.name in readme
    assert "public domain" in readme


def test_the_text_is_plain_one_paragraph_per_line():
    text = (DATA / "text.txt").read_text("utf-8")
    assert text.isascii()
    assert all(line == line.strip() != "" for line in text.splitlines())
