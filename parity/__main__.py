"""Parity of SGLang's path and this one.

    python -m clover.parity convert RAW LOG --model DIR
    python -m clover.parity replay LOG --model DIR [--dtype float32] [--device cpu]

`replay` exits with 1 if a divergence is algorithmic.
"""

import argparse
import json
import sys
from pathlib import Path

from .fingerprint import fingerprint
from .log import Log, read_log, write_log
from .models import open_model
from .replay import Report, replay
from .sglang_raw import convert


def summary(report: Report) -> list[str]:
    """What a replay found, in lines."""
    steps, differences = len(report.comparisons), report.differences
    mean = sum(differences) / max(1, len(differences))
    lines = [
        f"requests equal: {report.requests_equal} of {report.requests}",
        f"steps equal: {report.steps_equal} of {steps} ({report.not_replayed} logged after an answer's end)",
        f"confidence difference: worst {max(differences, default=0.0):.2e}, mean {mean:.2e}, of {len(differences)}",
    ]
    for d in report.divergences:
        where = f"request {d.request}, block {d.block}, step {d.step}, position {d.position}"
        lines.append(f"{d.verdict}: {where}: {d.kind} {d.ours} where {d.logged} is logged, decided by {d.margin:.2e}")
    return lines


def check_model(log: Log, folder: Path) -> None:
    """Raises a `ValueError` if the log is of another checkpoint."""
    found, logged = fingerprint(folder), log.header.model.get("fingerprint")
    if found != logged:
        raise ValueError(f"the log is of a model with the fingerprint {logged}, but {folder} has {found}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    converting = commands.add_parser("convert", help="make a log of a raw SGLang recording")
    converting.add_argument("raw", type=Path)
    converting.add_argument("log", type=Path)
    converting.add_argument("--model", type=Path, required=True, help="the checkpoint that was recorded")
    replaying = commands.add_parser("replay", help="run Clover's loop over a log's requests")
    replaying.add_argument("log", type=Path)
    replaying.add_argument("--model", type=Path, required=True)
    replaying.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    replaying.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    try:
        if arguments.command == "convert":
            write_log(arguments.log, convert(json.loads(arguments.raw.read_text()), arguments.model))
            return 0
        log = read_log(arguments.log)
        check_model(log, arguments.model)
        size = log.header.algorithm["block_size"]
        model = open_model(arguments.model, size, arguments.dtype, arguments.device)
        report = replay(log, model, arguments.device)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(summary(report)))
    return 1 if report.algorithmic else 0


if __name__ == "__main__":
    sys.exit(main())
