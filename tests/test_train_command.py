"""The path of docs/training.md on the embedded autoregressive checkpoint: convert, train, and what comes out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from clover.training import train
from clover.training.conversion_target import RECORD
from clover.training.convert import Options, convert
from clover.training.corpus import write_chats
from clover.training.plots import read_ratios

QWEN = Path(__file__).parents[1] / "checkpoints" / "qwen-tiny"
PLAIN = ["--use_cpu", "True", "--report_to", "none", "--disable_tqdm", "True"]
ASKED = ["--train_files", "a.jsonl", "--eval_strategy", "epoch", "--questions"]
BEST = ["--load_best_model_at_end", "True", "--save_strategy", "epoch"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A converted model, chats and questions."""
    folder = tmp_path_factory.mktemp("path")
    convert(QWEN, folder / "converted")
    write_chats(folder / "train.jsonl", "train", 24)
    write_chats(folder / "heldout.jsonl", "heldout", 2)
    return folder


def run(folder: Path, output: str, *arguments: str):
    given = [str(folder / argument) if (folder / argument).is_file() else argument for argument in arguments]
    model = ["--model", str(folder / "converted"), "--output_dir", str(folder / output)]
    return train.main([*model, *PLAIN, *given])


@pytest.fixture(scope="module")
def trained(folder):
    questions = ["--questions", str(folder / "heldout.jsonl"), "--eval_strategy", "epoch", "--max_new_tokens", "32"]
    return run(folder, "out", *files(folder), *questions, "--max_steps", "2", "--save_steps", "1")


def files(folder: Path) -> list[str]:
    few = ["--per_device_train_batch_size", "2", "--logging_steps", "1", "--learning_rate", "1e-3"]
    return ["--train_files", str(folder / "train.jsonl"), "--max_length", "128", *few]


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
    assert not any("eval_loss" in entry for entry in logs)  # there are no rows to measure it on
    out = folder / "out"
    assert "documents read" in (out / "data.txt").read_text()
    assert AutoConfig.from_pretrained(out, trust_remote_code=True).use_cache
    model = AutoModel.from_pretrained(out, trust_remote_code=True).eval()
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8).shape[0] == 1
    for place in (out, out / "checkpoint-1"):
        assert (place / RECORD).read_bytes() == (folder / "converted" / RECORD).read_bytes()
    convert(out, tmp_path / "back", Options(reverse=True))
    before, after = load_file(QWEN / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before)


def losses(trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def test_a_run_goes_on_where_it_stopped_and_nothing_of_another_is_written_over(folder, trained):
    with pytest.raises(ValueError, match="`output_dir` is .* not empty"):
        run(folder, "out", *files(folder), "--max_steps", "2")
    with pytest.raises(ValueError, match="`max_steps` is 2, but .*checkpoint-2 has taken 2"):
        run(folder, "out", *files(folder), "--max_steps", "2", "--resume_from_checkpoint", "True")
    with pytest.raises(ValueError, match="`lora_rank` is 4, but .* trained with 0"):
        more = ["--lora_rank", "4", "--resume_from_checkpoint", "True"]
        run(folder, "out", *files(folder), "--max_steps", "4", *more)
    constant = ["--lr_scheduler_type", "constant", "--save_steps", "1"]
    whole = run(folder, "whole", *files(folder), *constant, "--max_steps", "3")
    first = run(folder, "parts", *files(folder), *constant, "--max_steps", "2")
    both = run(folder, "parts", *files(folder), *constant, "--max_steps", "3", "--resume_from_checkpoint", "True")
    assert len(losses(first)) == 2 and losses(both) == losses(whole)
    assert [entry["step"] for entry in read_ratios(folder / "parts")] == [1, 2, 3]
    again = ["--max_steps", "3", "--resume_from_checkpoint", str(folder / "parts" / "checkpoint-1")]
    assert losses(run(folder, "parts", *files(folder), *constant, *again)) == losses(whole)
    assert [entry["step"] for entry in read_ratios(folder / "parts")] == [1, 2, 3]


def test_a_stream_with_questions_trains_and_one_without_a_row_says_so(folder):
    asked = ["--questions", "heldout.jsonl", "--eval_strategy", "steps", "--eval_steps", "1", "--max_new_tokens", "32"]
    trainer = run(folder, "stream", *files(folder), "--streaming", "True", *asked, "--max_steps", "1")
    assert any("eval_exact_match" in entry for entry in trainer.state.log_history)
    (folder / "long.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a " * 900}, {"role": "assistant", "content": "b"}]})
    )
    nothing = ["--train_files", "long.jsonl", "--max_length", "128", "--streaming", "True", "--max_steps", "1"]
    with pytest.raises(ValueError, match="not a step was taken"):
        run(folder, "nothing", *nothing)
    assert not (folder / "nothing" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "model, named",
    [
        ("nowhere", "nowhere is no folder, and the Hub gives none"),
        (str(QWEN), "holds a 'qwen3_5_moe_text', but must hold a 'clover_moe': .* convert"),
        (str(QWEN.parent), "checkpoints holds no model"),
    ],
)
def test_what_is_no_clover_is_not_trained(model, named, folder):
    with pytest.raises(ValueError, match=named):
        train.main(["--model", model, "--output_dir", str(folder / "new"), *files(folder)])


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
        (["--train_files", "a.jsonl", "--max_length", "4096"], "`max_length` is 4096.*at most 1024"),
        (["--train_files", "a.jsonl", "--questions", "a.jsonl"], "`questions` have no effect while `eval_strategy`"),
        (["--train_files", "a.jsonl", "--eval_files", "a.jsonl"], "`eval_files` have no effect while `eval_strategy`"),
        ([*ASKED, "a.jsonl", *BEST], "`metric_for_best_model` is loss"),
        ([*ASKED, "nowhere.jsonl"], "nowhere.jsonl"),
        ([*ASKED, "heldout.jsonl", "--max_new_tokens", "1020"], "`max_new_tokens` is 1020"),
        ([*ASKED, "heldout.jsonl", "--max_questions", "-1"], "is -1"),
        (["--train_files", "a.jsonl", "--lora_alpha", "64"], "`lora_alpha` is 64, which has no effect"),
        (["--train_files", "a.jsonl", "--lora_rank", "-1"], "`lora_rank` is -1"),
        (["--train_files", "a.jsonl", "--max_new_tokens", "64"], "`max_new_tokens` is 64, which has no effect"),
        (["--rows", "a", "--max_length", "128"], "`max_length` is 128, which has no effect with `rows`"),
        (["--rows", "a", "--train_on", "last"], "`train_on` is last, which has no effect with `rows`"),
        (["--rows", "nowhere"], "nowhere"),
        (["--train_files", "a.jsonl", "--label_smoothing_factor", "0.1"], "`label_smoothing_factor` is 0.1"),
        (["--train_files", "a.jsonl", "--max_weight", "8"], "`max_weight` is 8"),
        (["--train_files", "a.jsonl", "--resume_from_checkpoint", "True"], "has no checkpoint"),
        (["--train_files", "a.jsonl", "--resume_from_checkpoint", "nowhere"], "must be True or a checkpoint's folder"),
        (
            ["--train_files", "train.jsonl", "--template_options", '{"nonsense": 1}'],
            "`template_options` has 'nonsense'",
        ),
        (
            ["--train_files", "train.jsonl", "--template_options", '{"add_generation_prompt": true}'],
            "`template_options` has 'add_generation_prompt'",
        ),
        (["--train_files", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_the_model_is_loaded(folder, arguments, named, monkeypatch):
    def never(*_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train, "load", never)
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        run(folder, "new", *arguments)
    assert not (folder / "new").exists()
