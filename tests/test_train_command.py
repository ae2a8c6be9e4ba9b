"""The path of docs/training.md on the embedded autoregressive checkpoint: convert, train, and what comes out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from clover.training import train
from clover.training.conversion_target import RECORD
from clover.training.convert import Options, convert
from clover.training.corpus import write_chats

QWEN = Path(__file__).parents[1] / "checkpoints" / "qwen-tiny"
PLAIN = ["--use_cpu", "True", "--report_to", "none", "--disable_tqdm", "True", "--max_length", "128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A converted model, chats and questions."""
    folder = tmp_path_factory.mktemp("path")
    convert(QWEN, folder / "converted")
    write_chats(folder / "train.jsonl", "train", 24)
    write_chats(folder / "heldout.jsonl", "heldout", 2)
    return folder


def run(folder: Path, *arguments: str):
    model = ["--model", str(folder / "converted"), "--output_dir", str(folder / "out")]
    return train.main([*model, *PLAIN, *arguments])


@pytest.fixture(scope="module")
def trained(folder):
    questions = ["--questions", str(folder / "heldout.jsonl"), "--eval_strategy", "epoch", "--max_new_tokens", "32"]
    files = ["--train_files", str(folder / "train.jsonl"), "--per_device_train_batch_size", "2"]
    return run(folder, *files, *questions, "--max_steps", "2", "--logging_steps", "1", "--learning_rate", "1e-3")


def test_the_embedded_autoregressive_checkpoint_is_stock_and_its_text_is_the_converted_ones(folder):
    stock = AutoModelForCausalLM.from_pretrained(QWEN, dtype=torch.float32).eval()
    converted = AutoModel.from_pretrained(folder / "converted", trust_remote_code=True, dtype=torch.float32).eval()
    assert type(stock).__name__ == "Qwen3_5MoeForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(folder / "converted", trust_remote_code=True)
    message = json.loads((folder / "heldout.jsonl").read_text().splitlines()[0])["messages"][:-1]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = stock.generate(**inputs, max_new_tokens=64, do_sample=False)
    assert torch.equal(converted.generate(**inputs, max_new_tokens=64, decoding="autoregressive"), expected)
    assert expected[0, -1] == tokenizer.eos_token_id


def test_what_is_trained_loads_answers_and_goes_back(folder, trained, tmp_path):
    logs = trained.state.log_history
    assert sum("loss" in entry for entry in logs) == 2
    assert any("eval_exact_match" in entry and "eval_tokens_per_forward" in entry for entry in logs)
    out = folder / "out"
    model = AutoModel.from_pretrained(out, trust_remote_code=True).eval()
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8).shape[0] == 1
    assert json.loads((out / RECORD).read_text()) == json.loads((folder / "converted" / RECORD).read_text())
    convert(out, tmp_path / "back", Options(reverse=True))
    before, after = load_file(QWEN / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], "`train_files`"),
        (["--train_files", "a.jsonl", "--rows", "b"], "`train_files`"),
        (["--train_files", "a.jsonl", "--streaming", "True"], "`max_steps`"),
        (["--train_files", "a.jsonl", "--eval_strategy", "epoch"], "`eval_strategy`"),
        (["--train_files", "a.jsonl", "--template_options", "[1"], "`template_options` is '\\[1'"),
        (["--train_files", "a.jsonl", "--template_options", "[1]"], "`template_options` is \\[1\\]"),
        (["--train_files", "a.jsonl", "--max_length", "100"], "`max_length` is 100.*multiple"),
        (["--train_files", "a.jsonl", "--train_on", "first"], "`train_on` is 'first'"),
        (["--train_files", "a.jsonl", "--special_tokens", "drop"], "`special_tokens` is 'drop'"),
        (["--train_files", "a.jsonl", "--num_proc", "0"], "`num_proc` is 0"),
        (["--train_files", "a.jsonl", "--causal_weight", "-1"], "causal_weight"),
        (["--train_files", "a.jsonl", "--questions", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--train_files", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_the_model_is_loaded(folder, arguments, named, monkeypatch):
    def never(*_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train, "load", never)
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        run(folder, *arguments)
