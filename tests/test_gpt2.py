"""What gpt2/ alone has: released names and buffers, matrices stored transposed, positions that end, no template."""

import json

import pytest
import torch
from helpers import assert_matches, decode, save_random
from safetensors.torch import load_file, save_file
from test_main import assert_refused, json_rows, main  # noqa: F401 (a fixture)
from test_parity import gpt2, gpt_2, random_prompts
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A checkpoint as OpenAI's are: no prefix, a mask in each layer, the head beside the embedding. And the reference,
    which has more positions, since it is asked about a row's last token too."""
    path = tmp_path_factory.mktemp("released")
    reference = save_random(path, *gpt_2(n_positions=65)[1:], rewrite=lambda raw: raw | {"n_positions": 64})
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(path / "model.safetensors").items()}
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["wpe.weight"] = tensors["wpe.weight"][:64].clone()
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    return path, reference


def test_a_released_checkpoint(released, capsys):
    path, reference = released
    prompts = random_prompts(60, 3)
    rows = decode(gpt2, path, prompts, (1, 1, 2), max_new_tokens=5)
    assert_matches(reference, prompts, rows, atol=1e-4)  # the other form of gelu differs by some 3e-4
    err = capsys.readouterr().err
    assert "left out 4 tensors of the checkpoint: the causal mask" in err and "left out 1 tensors" in err


@pytest.mark.parametrize(
    "options",
    [
        {"activation_function": "gelu"},
        {"activation_function": "gelu_fast"},
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True, "n_layer": 4},
    ],
    ids=["Cerebras-GPT", "rinna", "Stanford"],
)
def test_relatives(tmp_path, options):
    reference = save_random(tmp_path, *gpt_2(**options)[1:])
    prompts = random_prompts(70, 3)
    assert_matches(reference, prompts, decode(gpt2, tmp_path, prompts, (1, 1, 2), max_new_tokens=5), atol=1e-4)


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_all_positions(released, draft):
    """The last position, and drafts and pieces of prefill that reach beyond it."""
    path, reference = released
    prompts = [[5, 6, 7, 8] * 12, *random_prompts(30)]
    rows = decode(gpt2, path, prompts, max_new_tokens=100, max_seq_len=64, draft=draft)
    assert [len(row) for row in rows] == [17, 35]
    assert_matches(reference, prompts, rows)


def test_beyond_the_last_position(released, main):  # noqa: F811
    path, _ = released
    arguments = ["--model_path", path, "--prompt", "abc", "a" * 40, "--dtype", "float32", "--output", "json"]
    result = main(*arguments, "--max_new_tokens", "26", folder="gpt2")
    assert_refused(result, "prompt 2 and its answer need 65 positions, more than n_positions 64")
    status, out, err = main(*arguments, "--max_new_tokens", "25", folder="gpt2")
    assert status == 0 and [len(row["tokens"]) for row in json_rows(out)[0]] == [25, 25], err
    with pytest.raises(gpt2.model.InputError, match="n_positions 64"):
        decode(gpt2, path, random_prompts(65), max_new_tokens=1)


@pytest.mark.sampled
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_converted(released, tmp_path, monkeypatch, quantize):
    """Matrices are written as they were stored, in pieces or not, and int8 is what loading makes of them."""
    path, _ = released
    monkeypatch.setattr(gpt2.convert, "PIECE_BYTES", 4096)
    gpt2.convert.convert(path, tmp_path / "out", "float32", quantize)
    if not quantize:
        source, output = load_file(path / "model.safetensors"), {}
        for file in (tmp_path / "out").glob("*.safetensors"):
            output |= load_file(file)
        assert len(source) == len(output) + 5
        assert all(torch.equal(source[name], tensor) for name, tensor in output.items())
    prompts = random_prompts(20, 3)
    loaded = decode(gpt2, path, prompts, quantize=quantize, max_new_tokens=8)
    converted = decode(gpt2, tmp_path / "out", prompts, (1, 1, 8), max_new_tokens=8)
    assert [[token.id for token in row] for row in converted] == [[token.id for token in row] for row in loaded]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation_function": "relu"}, "activation_function 'relu' is not supported"),
        ({"scale_attn_weights": False}, "scale_attn_weights False"),
        ({"scale_attn_by_inverse_layer_idx": 2}, "scale_attn_by_inverse_layer_idx cannot be 2"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False"),
        ({"n_head": 7}, "n_head 7 does not divide n_embd 96"),
        ({"n_embd": None}, "n_embd is missing"),
        ({"n_layer": 0}, "n_layer cannot be 0"),
    ],
)
def test_refused(changes, words):
    raw = gpt_2()[2].to_dict() | changes
    with pytest.raises(gpt2.model.InputError, match=words):
        gpt2.model.Config.from_dict(raw)


def test_no_template(released, main):  # noqa: F811
    """A prompt is continued as it is, with a note; there is no conversation."""
    path, _ = released
    arguments = ["--model_path", path, "--max_new_tokens", "3"]
    _, out, err = main(*arguments, "--prompt", "abc", "--output", "json", folder="gpt2")
    assert json_rows(out)[0][0]["prompt_tokens"] == AutoTokenizer.from_pretrained(path)("abc")["input_ids"]
    assert "no chat template; the prompts are continued as they are" in err
    assert_refused(main(*arguments, "--chat", folder="gpt2"), "--chat needs a chat template")


def test_vocabulary_without_tokenizer_json(released, tmp_path):
    """vocab.json and merges.txt alone, as GPT-2 was released first."""
    letters = AutoTokenizer.from_pretrained(released[0]).get_vocab()
    (tmp_path / "vocab.json").write_text(json.dumps(letters | {"<|endoftext|>": 256, "Ġb": 257, "ab": 258}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ b\na b\n")
    checkpoint = type("Checkpoint", (), {"folder": tmp_path, "raw_config": {"model_type": "gpt2"}})
    tokenizer = gpt2.main.read_tokenizer(checkpoint)
    assert tokenizer("ab b<|endoftext|>")["input_ids"] == [258, 257, 256]
    assert tokenizer.decode([258, 257, 256], skip_special_tokens=True) == "ab b"
    assert {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} == {256}


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_quantized_checkpoint_converted(tmp_path, quantize):
    """Matrices that are stored transposed stay so."""
    save_random(tmp_path, *gpt_2()[1:])
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".c_" in name and name.endswith(".weight")]:
        scale = tensors[name].abs().max() / 448
        tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(tensors, tmp_path / "model.safetensors")
    prompts = random_prompts(23)
    wanted = decode(gpt2, tmp_path, prompts, quantize=quantize, max_new_tokens=3)
    gpt2.convert.convert(tmp_path, tmp_path / "output", "float32", quantize)
    assert decode(gpt2, tmp_path / "output", prompts, max_new_tokens=3) == wanted
