"""The embedded checkpoint answers, as the README says; and the example shows it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from clover.training.corpus import heldout
from clover.training.evaluate import evaluate

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints" / "clover-tiny"


@pytest.fixture(scope="module")
def loaded():
    model = AutoModel.from_pretrained(CHECKPOINT, trust_remote_code=True, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)


def test_it_is_small_and_its_code_is_linked_not_copied():
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 20e6
    for name in sorted(path.name for path in ROOT.glob("*_clover.py")):
        assert (CHECKPOINT / name).is_symlink()
        assert (CHECKPOINT / name).resolve() == ROOT / name


def test_it_answers_requests_it_has_never_seen_many_tokens_per_forward(loaded):
    results = evaluate(*loaded, heldout(96, seed=9), threshold=0.95)
    assert results["all"].exact_match >= 0.85
    assert results["all"].tpf >= 5


def test_its_causal_pass_is_a_language_model_of_the_same_answers(loaded):
    model, tokenizer = loaded
    for exchange in heldout(10, seed=9, tasks=["json"]):
        prompt = tokenizer.apply_chat_template(list(exchange.messages), add_generation_prompt=True, tokenize=False)
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        ids = tokenizer(prompt + exchange.answer, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            next_tokens = model(ids).logits[0, start - 1 : -1].argmax(-1)
        assert (next_tokens == ids[0, start:]).float().mean() > 0.9


def test_the_example_answers_and_draws_the_block_being_filled(tmp_path):
    request = "Extract name, city, age as JSON. Mona from Kyoto is a miner, age 55."
    command = [sys.executable, str(ROOT / "examples" / "answer.py"), "--svg", str(tmp_path / "block.svg"), request]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert '{"name":"Mona","city":"Kyoto","age":55}' in shown
    assert "[Mona]" in shown and "tokens per forward (stop)" in shown
    assert ">Mona</text>" in (tmp_path / "block.svg").read_text()
