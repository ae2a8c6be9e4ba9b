"""Records what a running SGLang server answers, over `/generate`, as a log.

    python -m clover.parity record --url http://HOST:PORT --prompts FILE --model DIR --out LOG [--stream]

FILE has a request a line: `{"input_ids": [...]}` or `{"prompt": "..."}`, and `"sampling_params": {...}` if it likes.
Answers are kept in LOG.partial as they come. The same command, given again after an interruption, goes on from there;
the log is written when all are in. A server shows no steps: for those start it with the plugin in `sglang_observer/`,
and give the file it writes as `--steps`. If that file is still on another machine when the answers are in, bring it
over and give the command again.

Requests are sent one after another, so that what runs beside a request in the server's batch is the same every time.
A server that wants a key finds it if SGLANG_API_KEY is set.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from .fingerprint import config_of, describe, vocabulary_of
from .json_text import parsed
from .log import Header, Log, Request, check_new, write_log
from .partial import Partial
from .prompts import read_requests
from .sglang_client import Answer, Server
from .sglang_steps import add_observed, observed_settings, read_steps

# The server's arguments that may change a number or a decision, as far as it has them. The others are left out: among
# them are paths, addresses and keys, which are nobody's business.
ARGUMENTS = (
    "attention_backend",
    "chunked_prefill_size",
    "context_length",
    "device",
    "disable_cuda_graph",
    "disable_radix_cache",
    "dllm_algorithm",
    "dllm_fdfo",
    "dtype",
    "enable_deterministic_inference",
    "enable_torch_compile",
    "ep_size",
    "kv_cache_dtype",
    "linear_attn_backend",
    "max_running_requests",
    "moe_runner_backend",
    "page_size",
    "quantization",
    "sampling_backend",
    "skip_tokenizer_init",
    "tp_size",
)


# ---- whom ------------------------------------------------------------------------------------------------------------


def checkpoint_of(model: Path, info: dict) -> dict:
    """What the header says of the checkpoint, but for the mask token. The end tokens are all that SGLang stops at."""
    described, ends = describe(model), []
    path = model / "generation_config.json"
    if path.exists():
        eos = parsed(path.read_bytes()).get("eos_token_id")
        ends += eos if isinstance(eos, list) else [] if eos is None else [eos]
    if info.get("skip_tokenizer_init") is False and (model / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        eos = AutoTokenizer.from_pretrained(model).eos_token_id
        ends += [] if eos is None else [eos]
    return described | {"eos_token_ids": list(dict.fromkeys([*described["eos_token_ids"], *ends]))}


def check_served(served: dict, model: dict) -> None:
    """Raises a `ValueError` if the server says that it runs another kind of model."""
    names = served.get("architectures")
    if names and names != model["architectures"]:
        raise ValueError(f"the server runs {names}, but --model is {model['architectures']}")


def about(info: dict, model: dict) -> dict:
    """What must not change while a recording is under way."""
    return {
        "engine": {"name": "sglang", "version": info.get("version")},
        "arguments": {name: info[name] for name in ARGUMENTS if name in info},
        "model": model,
    }


def dtype_of(info: dict, config: dict) -> str:
    """The type that the server computes in. Of "auto" SGLang makes the checkpoint's own, and float16 of float32."""
    dtype = info.get("dtype") or "auto"
    if dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(dtype, dtype)
    own = config.get("dtype") or config.get("torch_dtype") or "float32"
    return "float16" if own == "float32" else own


def settings_of(info: dict, config: dict, given: dict, observed: dict) -> dict:
    """The algorithm's name, threshold, block size and mask token.

    Args:
        given: the command's arguments, those that are None having not been given. observed: what the steps say.
    Raises:
        ValueError: nobody says one of them, or a given one is not what the server or the checkpoint says.
    """
    options = info.get("dllm_algorithm_config")  # most servers name a file of their own here
    options = options if isinstance(options, dict) else {}
    known = {
        "algorithm": info.get("dllm_algorithm") or observed.get("algorithm"),
        "threshold": observed.get("threshold", options.get("threshold")),
        "block_size": observed.get("block_size", options.get("block_size", info.get("dllm_block_size"))),
        "mask_token_id": observed.get("mask_id", config.get("mask_token_id")),
    }
    for name, value in known.items():
        if value is not None and given[name] not in (None, value):
            raise ValueError(f"{option(name)} is {given[name]}, but the server or the checkpoint says {value}")
    settings = {name: given[name] if value is None else value for name, value in known.items()}
    missing = [option(name) for name, value in settings.items() if value is None]
    if missing:
        raise ValueError(f"neither the server nor the checkpoint says it: give {', '.join(missing)}")
    return settings


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


# ---- the recording ---------------------------------------------------------------------------------------------------


def record(
    server: Server,
    prompts: Path,
    model: Path,
    out: Path,
    given: dict,
    stream: bool = False,
    steps: Path | None = None,
    max_new_tokens: int = 128,
) -> Log:
    """Asks whatever has not been answered yet, and writes the log when all has.

    Args:
        given: algorithm, threshold, block_size and mask_token_id, None where the server is to say it.
        steps: the file that the observing plugin writes.
    Raises:
        ValueError: something is missing, wrong, or not what the recording was begun with; answers so far are kept.
    """
    partial_path = out.with_name(out.name + ".partial")
    if not partial_path.exists():
        check_new(out)
    if steps and not steps.exists():
        print(f"{steps} is not there yet: it is needed when all is answered", file=sys.stderr)
    requests, config = read_requests(prompts, model, max_new_tokens), config_of(model)
    info = server.about("server_info")
    checkpoint = checkpoint_of(model, info)
    check_served(server.about("model_info"), checkpoint)
    if steps is None:
        settings_of(info, config, given, {})  # what is missing is said now, not when all is recorded
    with Partial(partial_path, about(info, checkpoint), requests) as partial:
        ask(server, requests, partial, vocabulary_of(model), stream, bool(info.get("incremental_streaming_output")))
        answers = [partial.answers[number] for number in range(len(requests))]
        events = read_steps(steps, {answer.id for answer in answers}) if steps else []
        settings = settings_of(info, config, given, observed_settings(events))
        log = Log(header_of(info, config, checkpoint, settings), logged(requests, answers), [], [])
        if steps:
            add_observed(log, events, {answer.id: number for number, answer in enumerate(answers)})
        write_log(out, log)
        partial.remove()
    return log


def ask(
    server: Server, requests: list[dict], partial: Partial, vocabulary: int | None, stream: bool, incremental: bool
) -> None:
    if partial.answers:
        print(f"{len(partial.answers)} of {len(requests)} were answered before", file=sys.stderr)
    for number, request in enumerate(requests):
        if number not in partial.answers:
            prompt, sampling = request["input_ids"], request["sampling_params"]
            answer = server.generate(f"request {number}", prompt, sampling, vocabulary, stream, incremental)
            partial.keep(number, answer)
            print(f"{len(partial.answers)} of {len(requests)} are answered", file=sys.stderr)


def logged(requests: list[dict], answers: list[Answer]) -> list[Request]:
    return [
        Request(number, request["input_ids"], request["sampling_params"], answer.output, answer.finish_reason)
        for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]


def header_of(info: dict, config: dict, checkpoint: dict, settings: dict) -> Header:
    told = about(info, checkpoint)
    return Header(
        engine=told["engine"],
        model=checkpoint | {"mask_token_id": settings["mask_token_id"]},
        algorithm={
            "name": settings["algorithm"],
            "threshold": settings["threshold"],
            "block_size": settings["block_size"],
        },
        dtype=dtype_of(info, config),
        backend={"attention": info.get("attention_backend"), "device": info.get("device")},
        seed=info.get("random_seed"),
        notes={"server_arguments": told["arguments"]},
    )


# ---- the command -----------------------------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", required=True, help="http://HOST:PORT of the server")
    command.add_argument("--prompts", type=Path, required=True, help="JSON lines, a request each")
    command.add_argument("--model", type=Path, required=True, help="the checkpoint that the server runs")
    command.add_argument("--out", type=Path, required=True, help="the log to write")
    command.add_argument("--stream", action="store_true", help="have the answers streamed")
    command.add_argument("--steps", type=Path, help="the file that the observing plugin writes")
    command.add_argument("--max-new-tokens", type=int, default=128, help="where a line says nothing (128)")
    command.add_argument("--algorithm", help="where the server doesn't say it, as the next three")
    command.add_argument("--threshold", type=float)
    command.add_argument("--block-size", type=int)
    command.add_argument("--mask-token-id", type=int)
    command.add_argument("--timeout", type=float, default=600, help="seconds of silence after which to ask again (600)")
    command.add_argument("--tries", type=int, default=8, help="of each request, in all (8)")
    command.add_argument("--pause", type=float, default=1, help="seconds before the second try, doubled later (1)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carries out the command; 130 if it is interrupted, as a shell has it."""
    given = {name: getattr(arguments, name) for name in ("algorithm", "threshold", "block_size", "mask_token_id")}
    try:
        log = record(
            Server(arguments.url, arguments.timeout, arguments.tries, arguments.pause),
            arguments.prompts,
            arguments.model,
            arguments.out,
            given,
            arguments.stream,
            arguments.steps,
            arguments.max_new_tokens,
        )
    except KeyboardInterrupt:
        print("interrupted: what is answered is kept, and the same command goes on from there", file=sys.stderr)
        return 130
    print(f"{arguments.out}: {len(log.requests)} requests, {len(log.steps)} steps ({asdict(log.header)['algorithm']})")
    return 0
