"""Parity of SGLang's path and this one.

    python -m clover.parity convert RAW LOG --model DIR          # a raw recording of SGLang's, as a log
    python -m clover.parity replay LOG --model DIR [--report FILE.md]
    python -m clover.parity record --url http://HOST:PORT --prompts FILE --model DIR --out LOG   # a running server
    python -m clover.parity record-class LOG --model DIR         # SGLang's LowConfidence over a Clover, no server
    python -m clover.parity drift                                # remakes parity/drift.md

`replay` exits with 0 if both paths agree but for rounding, with 1 if not, with 2 if nothing could be compared.
"""

import argparse
import sys
from pathlib import Path

from ..generation_clover import BlockModel
from . import drift, record
from .fingerprint import fingerprint, vocabulary_of
from .json_text import parsed
from .log import Log, check_new, read_log, write_log
from .models import backend_of, check_device, open_model
from .prompts import read_requests
from .replay import PLAUSIBLE, replay
from .report import check_report, summary, versions, write_report
from .sglang_class import record as record_class
from .sglang_raw import convert

HERE = Path(__file__).parent


def check_model(log: Log, folder: Path) -> None:
    """Raises a `ValueError` if the log is of another checkpoint, or has a token that this one has not."""
    found, logged, size = fingerprint(folder), log.header.model["fingerprint"], vocabulary_of(folder)
    if found != logged:
        raise ValueError(f"the log is of a model with the fingerprint {logged}, but {folder} has {found}")
    texts = [(r.request, r.prompt + r.output) for r in log.requests] + [(s.request, s.after) for s in log.steps]
    for request, tokens in texts:
        if size is not None and max(tokens) >= size:
            raise ValueError(f"request {request} has the token {max(tokens)}, but {folder} has only {size}")


def run_convert(arguments: argparse.Namespace) -> int:
    check_new(arguments.log)
    try:
        raw = parsed(arguments.raw.read_bytes())
    except ValueError as error:
        raise ValueError(f"{arguments.raw}: {error}") from None
    write_log(arguments.log, convert(raw, arguments.model))
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    if arguments.report:
        check_report(arguments.report)
    log = read_log(arguments.log)
    check_model(log, arguments.model)
    model = opened(arguments, log.header.algorithm["block_size"])
    report = replay(log, model, arguments.dtype, arguments.device)
    if arguments.report:
        write_report(arguments.report, log, report, versions() | {"dtype": arguments.dtype} | backend_of(model))
    print("\n".join(summary(report)))
    return 0 if report.is_explained else 1


def run_record_class(arguments: argparse.Namespace) -> int:
    check_new(arguments.log)
    requests = read_requests(arguments.prompts, arguments.model, arguments.max_new_tokens)
    model = opened(arguments, block_size=0)
    log = record_class(
        arguments.model, model, requests, threshold=arguments.threshold, backend=backend_of(model), progress=print
    )
    write_log(arguments.log, log)
    return 0


def run_drift(arguments: argparse.Namespace) -> int:
    drift.write(HERE / "drift.md", progress=print)
    return 0


def opened(arguments: argparse.Namespace, block_size: int) -> BlockModel:
    check_device(arguments.device)
    options = {"attn_implementation": arguments.attention, "experts_implementation": arguments.experts}
    options = {name: value for name, value in options.items() if value is not None}
    return open_model(arguments.model, block_size, arguments.dtype, arguments.device, **options)


def add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", type=Path, required=True, help="the checkpoint's folder")
    command.add_argument("--dtype", default="float32", choices=tuple(PLAUSIBLE))
    command.add_argument("--device", default="cpu")
    command.add_argument("--attention", help="attn_implementation: sdpa (the default), eager, ...")
    command.add_argument("--experts", help="experts_implementation: grouped_mm (the default), eager, batched_mm, ...")


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="python -m clover.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = whole.add_subparsers(dest="command", required=True)
    command = commands.add_parser("convert", help="make a log of a raw SGLang recording")
    command.add_argument("raw", type=Path)
    command.add_argument("log", type=Path)
    command.add_argument("--model", type=Path, required=True, help="the checkpoint that was recorded")
    command.set_defaults(run=run_convert)
    command = commands.add_parser("replay", help="run Clover's loop over a log's requests")
    command.add_argument("log", type=Path)
    add_model(command)
    command.add_argument("--report", type=Path, help="write Markdown here, and a picture beside it")
    command.set_defaults(run=run_replay)
    command = commands.add_parser("record", help="record what a running SGLang server answers")
    record.add_arguments(command)
    command = commands.add_parser("record-class", help="record SGLang's LowConfidence class over a Clover")
    command.add_argument("log", type=Path)
    add_model(command)
    command.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl")
    command.add_argument("--threshold", type=float, default=0.95)
    command.add_argument("--max-new-tokens", type=int, default=96)
    command.set_defaults(run=run_record_class)
    command = commands.add_parser("drift", help="replay every committed log in every way, and remake drift.md")
    command.set_defaults(run=run_drift)
    return whole


def main() -> int:
    arguments = parser().parse_args()
    try:
        return arguments.run(arguments)
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
