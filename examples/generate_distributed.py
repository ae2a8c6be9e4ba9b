"""Answers a file of prompts with one process or several, and goes on where a killed run stopped.

    python examples/generate_distributed.py --model DIR --input prompts.jsonl --output answers.jsonl
    torchrun --nproc_per_node 2 examples/generate_distributed.py --cpu --model DIR --input ... --output ...
    accelerate launch --num_processes 8 examples/generate_distributed.py --dtype bfloat16 ...      # 8 GPUs

On CPUs, several processes take torchrun: `accelerate launch --cpu` (1.15.0) starts one, whatever `--num_processes` is.

A line of input is {"id": any, "messages": [...]}, with "tools": [...] if it has some, or {"id": any, "prompt": "..."}:
text as it is, without the chat template. A line of output, in the order of the input, is
{"id", "answer", "finish_reason", "tokens", "denoising_passes", "commit_passes"}.

Beside the output lie `OUTPUT.settings.json`, what the answers depend on, and until the end `OUTPUT.part-N`, what the
process N has finished. Started again, a run answers what no part holds, with any number of processes and any batch
size; with other settings it is refused.
"""

import argparse
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch
import transformers
from accelerate import PartialState
from jinja2 import TemplateError
from transformers import AutoModel, AutoTokenizer

Answer = dict[str, object]  # a line of output, but for the id

# ---- input -----------------------------------------------------------------------------------------------------------


def problem(line: object) -> str | None:
    """What is wrong with a line of input, if something is."""
    if not isinstance(line, dict):
        return "not an object"
    if unknown := sorted(set(line) - {"id", "messages", "tools", "prompt"}):
        return f"unknown key {unknown[0]!r}"
    if ("messages" in line) == ("prompt" in line):
        return 'neither or both of "messages" and "prompt"'
    if "prompt" in line:
        return None if isinstance(line["prompt"], str) and "tools" not in line else '"prompt" is a string without tools'
    if not is_list_of_objects(line["messages"]) or not all("role" in message for message in line["messages"]):
        return '"messages" is a list of objects with a role, at least one'
    if "tools" in line and not is_list_of_objects(line["tools"]):
        return '"tools" is a list of objects, at least one'
    return None


def is_list_of_objects(value: object) -> bool:
    """Whether it is a list of one object or more."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def read_lines(path: Path) -> list[dict]:
    """The lines of the input; leaves with the file and the line number if one of them is bad."""
    lines = []
    for number, raw in enumerate(path.read_bytes().removesuffix(b"\n").split(b"\n"), start=1):
        try:
            line = json.loads(raw)
            json.dumps(line, ensure_ascii=False).encode()  # half a surrogate pair could not be written again
        except ValueError as error:
            sys.exit(f"{path}, line {number}: not JSON in UTF-8: {error}")
        if what := problem(line):
            sys.exit(f"{path}, line {number}: {what}")
        lines.append(line)
    return lines


def encode(path: Path, lines: list[dict], tokenizer, longest: int) -> list[list[int]]:
    """Each line's prompt as token ids; leaves with the file and the line number if one cannot be answered."""
    prompts = []
    for number, line in enumerate(lines, start=1):
        text = line.get("prompt")
        if text is None:
            try:
                text = tokenizer.apply_chat_template(
                    line["messages"], tools=line.get("tools"), add_generation_prompt=True, tokenize=False
                )
            except (TemplateError, TypeError, ValueError) as error:
                sys.exit(f"{path}, line {number}: the chat template cannot take it: {error}")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not 1 <= len(ids) <= longest:
            sys.exit(f"{path}, line {number}: {len(ids)} tokens, not 1 to {longest}: the answer has to fit behind them")
        prompts.append(ids)
    return prompts


# ---- settings --------------------------------------------------------------------------------------------------------


def settings_of(arguments: argparse.Namespace, device: torch.device) -> dict:
    """All that the answers depend on. Neither the number of processes nor the batch size is in it."""
    files = sorted(file for file in Path(arguments.model).iterdir() if file.is_file())
    return {
        "model": str(Path(arguments.model).resolve()),
        "model files (size, time)": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
        "input": hashlib.sha256(arguments.input.read_bytes()).hexdigest(),
        "threshold": arguments.threshold,
        "max_new_tokens": arguments.max_new_tokens,
        "dtype": arguments.dtype,
        "device": device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def check_settings(path: Path, settings: dict, leftovers: list[Path]) -> None:
    """Leaves if what there is already was made with other settings, or nobody knows with which."""
    if not leftovers:
        return
    if not path.exists():
        there = ", ".join(map(str, leftovers))
        sys.exit(f"{there}: made with unknown settings, as {path} is missing; delete it or take another --output")
    old = json.loads(path.read_text())
    if changed := [name for name in settings if old.get(name) != settings[name]]:
        differences = "; ".join(f"{name} was {old.get(name)!r} and is {settings[name]!r}" for name in changed)
        sys.exit(f"{path}: begun with other settings: {differences}. Go on with those, or take another --output")


# ---- parts -----------------------------------------------------------------------------------------------------------


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def parts_of(output: Path) -> list[Path]:
    """The part files beside an output."""
    return sorted(path for path in output.parent.iterdir() if path.name.startswith(output.name + ".part-"))


def delete_parts(output: Path) -> None:
    """Deletes the part files beside an output."""
    for part in parts_of(output):
        part.unlink()


def locked(path: Path) -> IO[bytes]:
    """A part file, opened to append by this process alone; leaves if another still writes it.

    A launcher that is killed may leave its processes running.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{path}: another process is still writing it; end that one first")
    return file


def drop_torn_line(part: Path) -> None:
    """Cuts off what a killed process had begun to write."""
    with locked(part) as file:
        file.truncate(part.read_bytes().rfind(b"\n") + 1)


def finished(output: Path) -> dict[int, Answer]:
    """The answers in all parts, by the index of their prompt."""
    lines = [json.loads(line) for part in parts_of(output) for line in part.read_bytes().split(b"\n") if line]
    return {line.pop("index"): line for line in lines}


def merge(output: Path, lines: list[dict]) -> None:
    """Makes the output of the parts, which then go."""
    answers = finished(output)
    merged = ({"id": line.get("id")} | answers[index] for index, line in enumerate(lines))
    write_whole(output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in merged))
    delete_parts(output)


# ---- answers ---------------------------------------------------------------------------------------------------------


def answer(model, tokenizer, prompts: list[list[int]], **options) -> Iterator[Answer]:
    """Answers a batch; each row gets what it would get alone."""
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    out = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], return_dict_in_generate=True, **options
    )
    new = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    for row, ids in enumerate(new):
        denoising, commits = out.num_denoising_passes[row], out.num_commit_passes[row]
        tokens = round(out.tokens_per_forward[row] * (denoising + commits))  # the rest is padding
        yield {
            "answer": tokenizer.decode(ids[:tokens], skip_special_tokens=True),
            "finish_reason": out.finish_reason[row],
            "tokens": tokens,
            "denoising_passes": denoising,
            "commit_passes": commits,
        }


def append_answers(
    part: Path, model, tokenizer, prompts: list[list[int]], indices: list[int], batch_size: int, **options
) -> None:
    """Answers the prompts of these indices in batches, and adds each batch to the part file as soon as it is done."""
    with locked(part) as file:
        for start in range(0, len(indices), batch_size):
            batch = indices[start : start + batch_size]
            answers = answer(model, tokenizer, [prompts[index] for index in batch], **options)
            lines = [{"index": index} | line for index, line in zip(batch, answers, strict=True)]
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder of a checkpoint")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--threshold", type=float, default=None, help="default: the checkpoint's")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parsed = parser.parse_args(arguments)
    for name in ("max_new_tokens", "batch_size"):
        if getattr(parsed, name) < 1:
            parser.error(f"{name} is at least 1")
    if not Path(parsed.model).is_dir():
        parser.error(f"model {parsed.model} is not a folder")
    return parsed


def main(arguments: list[str] | None = None) -> None:
    arguments = parse(arguments)
    output, settings_file = arguments.output, arguments.output.with_name(arguments.output.name + ".settings.json")
    lines = read_lines(arguments.input)
    on_cpu = arguments.cpu or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu, timeout=timedelta(days=7))  # how long the first to finish waits for the last
    settings = settings_of(arguments, state.device)
    # Every process looks for itself and leaves by itself: none waits for one that is gone.
    there = [path for path in (output, *parts_of(output)) if path.exists() and path.stat().st_size]
    check_settings(settings_file, settings, there)
    if output in there:
        print(f"{output} is complete already", file=sys.stderr)
        if state.is_main_process:
            delete_parts(output)  # which a process killed at the very end may have left
        return
    with state.main_process_first():  # which copies the model's code for all
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=True)
        model = AutoModel.from_pretrained(arguments.model, trust_remote_code=True, dtype=arguments.dtype)
    model = model.to(state.device).eval()
    prompts = encode(arguments.input, lines, tokenizer, model.config.max_position_embeddings - arguments.max_new_tokens)
    if state.is_main_process:
        for part in parts_of(output):
            drop_torn_line(part)
        write_whole(settings_file, json.dumps(settings, indent=1) + "\n")
    state.wait_for_everyone()
    done = finished(output)
    state.wait_for_everyone()  # until all have read what is finished
    left = sorted(set(range(len(lines))) - set(done), key=lambda index: -len(prompts[index]))
    mine = left[state.process_index :: state.num_processes]
    print(f"process {state.process_index}: {len(mine)} to answer, {len(done)} answered before", file=sys.stderr)
    options = {} if arguments.threshold is None else {"threshold": arguments.threshold}
    part = output.with_name(f"{output.name}.part-{state.process_index}")
    options["max_new_tokens"] = arguments.max_new_tokens
    append_answers(part, model, tokenizer, prompts, mine, arguments.batch_size, **options)
    state.wait_for_everyone()
    if state.is_main_process:
        merge(output, lines)


if __name__ == "__main__":
    main()
