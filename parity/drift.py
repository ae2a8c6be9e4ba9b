"""The drift between the path that was logged and this one, by dtype, backend, threshold and transformers version.

`python -m clover.parity drift` replays every log of `logs/` in every way of `CASES` and remakes `drift.md`: the section
of the installed transformers version, with AMX or without, is measured anew, those of others stay.
"""

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import torch
import transformers

from .log import read_log
from .models import open_model
from .replay import Report, replay
from .tiny_clover import write_tiny_clover
from .tiny_sdar import write_tiny_sdar

HERE = Path(__file__).parent
LOGS, TINY = HERE / "logs", HERE.parent / "checkpoints" / "clover-tiny"


@dataclass(frozen=True)
class Case:
    """One log, and how it is replayed."""

    log: str
    dtype: str = "float32"
    attention: str = "sdpa"
    experts: str = "grouped_mm"


# Whose log it is, where not the embedded checkpoint's: tiny models with random weights, rebuilt from their seed.
BUILDERS = {
    "sglang-0.5.23-sdar-fdfo": write_tiny_sdar,
    "sglang-0.5.23-sdar-sync": write_tiny_sdar,
    "sglang-0.5.23-clover-attention": partial(write_tiny_clover, kind="attention"),
    "sglang-0.5.23-clover-hybrid": partial(write_tiny_clover, kind="hybrid"),
}
CASES = (
    Case("sglang-0.5.23-sdar-fdfo"),
    Case("sglang-0.5.23-sdar-sync"),
    Case("sglang-0.5.23-sdar-fdfo", "bfloat16"),
    Case("sglang-0.5.23-clover-attention"),
    Case("sglang-0.5.23-clover-attention", "bfloat16"),
    Case("sglang-0.5.23-clover-hybrid"),
    Case("sglang-0.5.23-clover-hybrid", "bfloat16"),
    Case("clover-float32"),
    Case("clover-float32", attention="eager", experts="eager"),
    Case("clover-float32", experts="batched_mm"),
    Case("clover-float32", "bfloat16"),
    Case("clover-float32-threshold0.5"),
    Case("clover-float32-threshold0.5", "bfloat16"),
    Case("clover-float32-eager"),
    Case("clover-bfloat16", "bfloat16"),
    Case("clover-bfloat16", "bfloat16", attention="eager", experts="eager"),
    Case("clover-bfloat16"),
)


@dataclass(frozen=True)
class Row:
    """What one replay measured; differences are of confidences and, last, of the two best logits' distance."""

    requests_equal: int
    requests: int
    steps_equal: int
    steps: int
    numerical: int
    algorithmic: int
    worst: float
    mean: float
    worst_margin: float


def row_of(report: Report) -> Row:
    verdicts = [divergence.verdict for divergence in report.divergences]
    differences = report.differences
    return Row(
        report.requests_equal,
        report.requests,
        report.steps_equal,
        len(report.comparisons),
        verdicts.count("numerical"),
        verdicts.count("algorithmic"),
        max(differences, default=0.0),
        sum(differences) / max(1, len(differences)),
        report.measured["token"].worst,
    )


def measure(case: Case) -> Row:
    """Replays one case."""
    log, options = read_log(LOGS / f"{case.log}.jsonl"), {"attn_implementation": case.attention}
    if log.header.model["architectures"] != ["SDARForCausalLM"]:
        options["experts_implementation"] = case.experts
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = BUILDERS[case.log](Path(folder)) if case.log in BUILDERS else TINY
        model = open_model(checkpoint, log.header.algorithm["block_size"], case.dtype, **options)
        return row_of(replay(log, model, case.dtype))


HEAD = (
    "| log | logged in | threshold | replayed in | attention, experts | requests equal | steps equal "
    "| numerical | algorithmic | worst | mean | worst of margins |"
)
TITLE = "## transformers "


def line(case: Case, row: Row) -> str:
    header = read_log(LOGS / f"{case.log}.jsonl").header
    backend = header.backend
    logged = ", ".join([header.dtype, *(backend[name] for name in ("attention", "experts") if name in backend)])
    cells = [case.log, logged, header.algorithm["threshold"], case.dtype, f"{case.attention}, {case.experts}"]
    cells += [f"{row.requests_equal} of {row.requests}", f"{row.steps_equal} of {row.steps}"]
    cells += [row.numerical, row.algorithmic, f"{row.worst:.1e}", f"{row.mean:.1e}", f"{row.worst_margin:.1e}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def setting() -> str:
    """What a section is of: the transformers version, and AMX where oneDNN uses it, which sums bf16 in another order.

    `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` keeps oneDNN from it, so that one processor can measure both.
    """
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    amx = torch.cpu._is_amx_tile_supported() and (allowed in ("", "ALL", "DEFAULT") or "AMX" in allowed)
    return transformers.__version__ + (" with AMX" if amx else "")


def parse(text: str) -> dict[str, dict[Case, Row]]:
    """The rows of a drift.md by setting and case."""
    found: dict[str, dict[Case, Row]] = {}
    for section in text.split(TITLE)[1:]:
        measured = found.setdefault(section.split("\n", 1)[0].strip(), {})
        for cells in (re.split(r"\s*\|\s*", row.strip("| ")) for row in section.splitlines() if row.startswith("| ")):
            if cells[0] == "log":
                continue
            case = Case(cells[0], cells[3], *cells[4].split(", "))
            counts = [int(number) for cell in cells[5:9] for number in cell.split(" of ")]
            measured[case] = Row(*counts, *map(float, cells[9:12]))
    return found


INTRODUCTION = """# Drift

How far two ways to run one model lie apart: what a log says, and what Clover's loop does with the same tokens through
transformers on a CPU. Remade by `python -m clover.parity drift`. `sglang-...` logs are of SGLang's whole engine;
`clover-...` logs are of SGLang's unmodified `LowConfidence` class over transformers' forward of `clover-tiny`, so what
they show is what a dtype or another implementation does, not what SGLang's kernels do. All figures are of small
models; none says anything of the 35B. *worst* and *mean*: differences of confidences where both name one token.
*worst of margins*: of the distance between the two best logits. Both but where a decision diverged.
"""


def write(path: Path, progress: Callable[[str], None] = lambda line: None) -> None:
    """Measures every case with the installed transformers, here, and puts the section of this setting into drift.md."""
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for case in CASES:
        lines.append(line(case, measure(case)))
        progress(lines[-1])
    old = path.read_text().split(TITLE)[1:] if path.exists() else []
    sections = {heading.strip(): rows.strip() for heading, rows in (section.split("\n", 1) for section in old)}
    sections[setting()] = f"torch {torch.__version__}, x86-64 CPU\n\n" + "\n".join(lines)
    parts = [f"{TITLE}{name}\n\n{sections[name].strip()}\n" for name in sorted(sections)]
    path.write_text("\n".join([INTRODUCTION, *parts]))


LEEWAY = {"worst": 1e-5, "mean": 1e-6, "worst_margin": 1e-4}


def grown(row: Row, committed: list[Row]) -> list[str]:
    """What of a measured row is worse than every committed one allows, as sentences.

    Another processor rounds otherwise, so a difference may be twice the committed one and 1e-5 more (the log of one
    replayed on it is 1.4e-6 off, with AVX2 instead of AVX-512 5.8e-6), and one step in fifty more may diverge where
    some do; where none does, none may.
    """
    allowed = Row(*(max(getattr(c, f.name) for c in committed) for f in fields(Row)))
    fewest = {name: min(getattr(c, name) for c in committed) for name in ("requests_equal", "steps_equal")}
    limits = asdict(allowed)
    limits |= {name: 2 * limits[name] + more for name, more in LEEWAY.items()}
    slack = row.steps // 50 if allowed.numerical else 0
    limits["numerical"] += slack
    limits["algorithmic"] += slack if allowed.algorithmic else 0
    found = [
        f"{name} is {getattr(row, name)}, but drift.md allows {limits[name]}"
        for name in ("worst", "mean", "worst_margin", "numerical", "algorithmic")
        if getattr(row, name) > limits[name]
    ]
    return found + [
        f"{name} is {getattr(row, name)}, but drift.md allows {least - slack}"
        for name, least in fewest.items()
        if getattr(row, name) < least - slack
    ]
