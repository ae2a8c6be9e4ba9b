"""A file of prompts, answered by one process, by two, and by a run that was killed: always the same file."""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from clover.training.corpus import heldout

ROOT = Path(__file__).parents[1]
PROGRAM, CHECKPOINT = ROOT / "examples" / "generate_distributed.py", ROOT / "checkpoints" / "clover-tiny"
TWO_PROCESSES = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def distributed():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("distributed_example", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(prompts: Path, output: Path, **changes: object) -> list[str]:
    """The command line, after the program."""
    given = {"model": CHECKPOINT, "input": prompts, "output": output, "max_new_tokens": 64} | changes
    return ["--cpu"] + [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """A file of 24 requests of all kinds, one of them without the chat template."""
    lines = []
    for exchange in heldout(23, seed=3):
        tools = {"tools": list(exchange.tools)} if exchange.tools else {}
        lines.append({"id": {"n": len(lines)}, "messages": list(exchange.messages)} | tools)
    lines.append({"id": "\u2028", "prompt": "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"})
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(distributed, prompts, tmp_path_factory) -> Path:
    """The output of one process."""
    output = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    distributed.main(options(prompts, output))
    return output


@pytest.fixture
def begun(whole, tmp_path) -> Path:
    """The output, yet to come, of a run that was killed after 5 answers, while writing another."""
    output = tmp_path / "answers.jsonl"
    shutil.copy(f"{whole}.settings.json", f"{output}.settings.json")
    lines = [{"index": i} | json.loads(line) for i, line in enumerate(whole.read_text("utf-8").split("\n")[:6])]
    for line in lines:
        del line["id"]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path(f"{output}.part-3").write_text(text[:-20])
    return output


def test_the_output_has_the_inputs_order_and_what_generate_says(prompts, whole):
    model = AutoModel.from_pretrained(CHECKPOINT, trust_remote_code=True, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)
    lines, answers = ([json.loads(x) for x in path.read_text("utf-8").split("\n")[:-1]] for path in (prompts, whole))
    assert [answer["id"] for answer in answers] == [line["id"] for line in lines]
    for line, answer in zip(lines[:8], answers, strict=False):
        inputs = tokenizer.apply_chat_template(
            line["messages"],
            tools=line.get("tools"),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = model.generate(**inputs, max_new_tokens=64, return_dict_in_generate=True)
        new = out.sequences[0, inputs["input_ids"].shape[1] :]
        assert answer == {
            "id": line["id"],
            "answer": tokenizer.decode(new, skip_special_tokens=True),
            "finish_reason": out.finish_reason[0],
            "tokens": len(new),
            "denoising_passes": out.num_denoising_passes[0],
            "commit_passes": out.num_commit_passes[0],
        }
    assert files_in(whole.parent) == ["answers.jsonl", "answers.jsonl.settings.json"]


def test_two_processes_write_what_one_does(prompts, whole, tmp_path):
    output = tmp_path / "answers.jsonl"
    command = [*TWO_PROCESSES, str(PROGRAM), *options(prompts, output, batch_size=5)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    shares = sorted(re.findall(r"process \d: \d+ to answer", run.stderr))
    assert shares == ["process 0: 12 to answer", "process 1: 12 to answer"]
    assert output.read_bytes() == whole.read_bytes()
    assert files_in(tmp_path) == files_in(whole.parent)


def test_a_killed_run_goes_on_with_another_number_of_processes(prompts, whole, tmp_path):
    output, part = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.part-0"
    program = [str(PROGRAM), *options(prompts, output, batch_size=1)]
    with subprocess.Popen([sys.executable, *program], start_new_session=True, stderr=subprocess.DEVNULL) as killed:
        while killed.poll() is None and not (part.exists() and part.read_bytes().count(b"\n") >= 3):
            time.sleep(0.005)
        os.killpg(killed.pid, signal.SIGKILL)
    before = part.read_bytes().count(b"\n")
    assert 3 <= before < 24 and not output.exists()
    run = subprocess.run([*TWO_PROCESSES, *program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    counts = re.findall(r"process \d: (\d+) to answer, (\d+) answered before", run.stderr)
    assert [int(done) for _, done in counts] == [before, before]
    assert sum(int(mine) for mine, _ in counts) == 24 - before
    assert output.read_bytes() == whole.read_bytes()


def test_a_torn_last_line_is_answered_again_and_the_others_are_not(distributed, prompts, whole, begun, monkeypatch):
    answered, answer = [], distributed.answer

    def counting(model, tokenizer, batch, **options):
        answered.extend(batch)
        return answer(model, tokenizer, batch, **options)

    monkeypatch.setattr(distributed, "answer", counting)
    distributed.main(options(prompts, begun))
    assert len(answered) == 24 - 5
    assert begun.read_bytes() == whole.read_bytes()
    distributed.main(options(prompts, begun))
    assert len(answered) == 24 - 5, "a complete output is left alone"
    assert files_in(begun.parent) == files_in(whole.parent)


@pytest.mark.parametrize("changed", ["threshold", "input", "model", "nothing known"])
def test_other_settings_are_refused(distributed, prompts, begun, tmp_path, changed):
    before = {path.name: path.read_bytes() for path in begun.parent.iterdir()}
    changes = {"threshold": 0.5} if changed == "threshold" else {}
    if changed == "input":
        changes["input"] = tmp_path / "fewer.jsonl"
        changes["input"].write_bytes(b"".join(prompts.read_bytes().splitlines(keepends=True)[:20]))
    if changed == "model":
        changes["model"] = shutil.copytree(CHECKPOINT, tmp_path / "model")
    if changed == "nothing known":
        del before[f"{begun.name}.settings.json"]
        Path(f"{begun}.settings.json").unlink()
    reason = "unknown settings" if changed == "nothing known" else f"begun with other settings: {changed} was"
    with pytest.raises(SystemExit, match=f"answers.jsonl.*{reason}"):
        distributed.main(options(prompts, begun, **changes))
    assert {name: (begun.parent / name).read_bytes() for name in before} == before
    assert not begun.exists()


def test_a_part_that_another_process_still_writes_is_left_to_it(distributed, prompts, begun):
    with open(f"{begun}.part-3", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="part-3: another process is still writing it"):
            distributed.main(options(prompts, begun))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"prompt": "a"', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON in UTF-8"),
        (b'{"prompt": "\\ud800"}', "not JSON in UTF-8"),
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b'{"promt": "a"}', "unknown key 'promt'"),
        (b'{"id": 1}', "neither or both"),
        (b'{"prompt": "a", "messages": [{"role": "user"}]}', "neither or both"),
        (b'{"prompt": 3}', "a string"),
        (b'{"messages": []}', "at least one"),
        (b'{"messages": [{"content": "a"}]}', "with a role"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}', '"tools" is a list'),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "the chat template cannot take it"),
        (b'{"prompt": ""}', "0 tokens, not 1 to 960"),
        (b'{"prompt": "' + b"word " * 1000 + b'"}', "tokens, not 1 to 960"),
    ],
)
def test_a_bad_line_is_named_before_any_work(distributed, tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b'\n{"prompt": "good"}\n')
    with pytest.raises(SystemExit, match=f"bad.jsonl, line 2: .*{re.escape(complaint)}"):
        distributed.main(options(path, tmp_path / "answers.jsonl"))
    assert files_in(tmp_path) == ["bad.jsonl"]
