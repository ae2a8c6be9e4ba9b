"""Drift between logged paths and this one stays within what `parity/drift.md` has written down."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from clover.parity.drift import CASES, HERE, LOGS, TINY, Row, grown, line, measure, parse
from clover.parity.fingerprint import fingerprint
from clover.parity.log import read_log
from clover.parity.models import backend_of, open_model
from clover.parity.prompts import read_requests
from clover.parity.replay import replay

COMMITTED = parse((HERE / "drift.md").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(vars(case).values()))
def test_drift_does_not_grow(case):
    """Against the worst of all transformers versions in the table: the installed one may be newer than them all."""
    committed = [rows[case] for rows in COMMITTED.values()]
    assert committed
    assert not grown(measure(case), committed)


def test_the_table_has_two_transformers_versions_with_amx_and_without_and_every_case():
    assert {"5.19.0", "5.19.0 with AMX"} < set(COMMITTED)
    assert len(COMMITTED) >= 4
    assert all(set(rows) == set(CASES) for rows in COMMITTED.values())


def test_in_fp32_sglangs_class_and_clovers_loop_decide_everything_alike():
    for rows in COMMITTED.values():
        for case, row in rows.items():
            if "float32" in case.log and case.dtype == "float32":
                assert (row.requests_equal, row.steps_equal) == (row.requests, row.steps)


def test_what_diverges_in_bfloat16_is_nearly_all_numerical():
    """The rest is where a token goes to another expert: that moves it farther than rounding moves any other."""
    for rows in COMMITTED.values():
        rounded = [row for case, row in rows.items() if case.dtype == "bfloat16"]
        numerical, algorithmic = (sum(getattr(row, name) for row in rounded) for name in ("numerical", "algorithmic"))
        assert 0 < numerical and algorithmic <= numerical / 5
        assert all(row.algorithmic <= row.steps / 20 for row in rounded)


def test_growth_is_seen():
    row = Row(9, 9, 50, 50, 0, 0, 1e-6, 1e-7, 1e-5)
    assert not grown(row, [row])
    assert not grown(replace(row, worst=1.5e-6), [row])
    for change in ({"worst": 1e-3}, {"mean": 1e-5}, {"worst_margin": 0.1}, {"algorithmic": 1}, {"numerical": 1}):
        assert grown(replace(row, **change), [row])
    assert grown(replace(row, steps_equal=49), [row])
    assert not grown(replace(row, worst=1e-3), [row, replace(row, worst=1e-3)])


def test_a_row_is_read_as_it_is_written():
    for rows in COMMITTED.values():
        for case, row in rows.items():
            assert parse("## transformers 1\n" + line(case, row)) == {"1": {case: row}}


def test_the_logs_of_clover_are_of_the_embedded_checkpoint():
    logs = [read_log(path) for path in LOGS.glob("clover-*.jsonl")]
    assert {log.header.model["fingerprint"] for log in logs} == {fingerprint(TINY)}
    assert {(log.header.dtype, log.header.algorithm["threshold"]) for log in logs} == {
        ("float32", 0.95),
        ("float32", 0.5),
        ("bfloat16", 0.95),
    }
    assert {log.header.backend["attention"] for log in logs} == {"sdpa", "eager"}


@pytest.mark.skipif(find_spec("sglang") is None, reason="no SGLang here: pip install --no-deps sglang==0.5.23")
def test_sglangs_class_recorded_anew_decides_as_in_the_committed_log():
    from clover.parity.sglang_class import record

    committed = read_log(LOGS / "clover-float32.jsonl")
    model = open_model(TINY, 32)
    requests = read_requests(HERE / "prompts.jsonl", TINY, max_new_tokens=96)[:6]
    log = record(TINY, model, requests, threshold=0.95, backend=backend_of(model))
    assert log.requests == committed.requests[:6]
    decisions = [(s.request, s.block, s.step, s.before, s.after) for s in log.steps]
    assert decisions == [(s.request, s.block, s.step, s.before, s.after) for s in committed.steps if s.request < 6]
    assert log.commits == [commit for commit in committed.commits if commit.request < 6]
    assert replay(log, model).is_explained
