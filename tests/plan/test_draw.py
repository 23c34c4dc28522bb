"""Drawings of a timeline: text, Chrome trace, figure."""

import json
import sys
from itertools import pairwise

import pytest

from ms_zero.errors import UserError
from ms_zero.pipeline.schedule import build, simulate
from ms_zero.plan.draw import chrome_trace, text_memory, text_timeline, write_figure, write_trace


def timeline(name="1f1b", ranks=2, microbatches=2, virtual=1):
    times = {"F": 1, "B": 1 if name == "zb-h1" else 2, "W": 1}
    return simulate(build(name, ranks, microbatches, virtual), lambda action: times[action.kind])


def test_the_text_shows_actions_and_waits():
    assert list(text_timeline(timeline())) == [
        "rank 0 F0 F1 .  .  B0--- .  B1---",
        "rank 1 .  F0 B0--- F1 B1---",
    ]


def test_several_stages_of_a_rank_are_told_apart():
    rows = list(text_timeline(timeline("interleaved", 2, 2, 2)))
    assert rows[0].startswith("rank 0 0F0 0F1 2F0 2F1")


def test_long_timelines_are_wrapped_at_the_width():
    rows = list(text_timeline(timeline(ranks=2, microbatches=30), width=60))
    assert max(map(len, rows)) <= 60
    assert rows.count("") == len([row for row in rows if row.startswith("rank 0")]) - 1
    drawn = "".join(row[7:] for row in rows if row.startswith("rank 1"))
    assert drawn.count("F") == drawn.count("B") == 30


def test_memory_over_time():
    assert list(text_memory(timeline(microbatches=3))) == [
        "rank 0 holds at most 2: 1 2 1 2 1 0",
        "rank 1 holds at most 1: 1 0 1 0 1 0",
    ]
    (first, _) = text_memory(timeline(microbatches=300), width=60)
    assert first.endswith("...")
    assert len(first) <= 64


def test_the_trace_has_every_action_once(tmp_path):
    drawn = timeline("zb-h1", 3, 4)
    write_trace(drawn, tmp_path / "t.json", microseconds=10)
    trace = json.loads((tmp_path / "t.json").read_text())
    assert trace == chrome_trace(drawn, 10)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 3 * 3 * 4
    assert max(event["ts"] + event["dur"] for event in spans) == 10 * drawn.makespan
    for rank in range(3):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == rank)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    counters = [event["args"]["held"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert max(counters) == 3
    with pytest.raises(UserError, match="cannot write the trace"):
        write_trace(drawn, tmp_path / "no" / "t.json")


def test_a_figure_needs_matplotlib_and_a_known_suffix(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"ends in \.png, \.svg, \.pdf"):
        write_figure(timeline(), tmp_path / "t.bmp")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        write_figure(timeline(), tmp_path / "t.svg")


def test_a_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    write_figure(timeline(), tmp_path / "t.svg")
    assert "<svg" in (tmp_path / "t.svg").read_text()
