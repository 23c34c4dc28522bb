"""The page about a plan: complete, well formed, and nothing from outside."""

import re
from html.parser import HTMLParser

import pytest

from ms_zero.errors import UserError
from ms_zero.plan.explain import describe
from ms_zero.plan.html import page, write_page
from ms_zero.plan.planner import Request, make_plan
from ms_zero.plan.search import trade_offs

VOID = {"meta", "line", "circle"}


class Balance(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.data = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.data.append(data)


def plan(**options):
    wanted = {"model": "gpt3-13b", "cluster": "ascend-910b", "devices": 32, "seq_len": 2048, "tokens": 3e11}
    return make_plan(Request(**(wanted | options)))


@pytest.fixture(scope="module")
def found():
    return plan()


def parsed(text):
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    return parser


def test_the_page_is_well_formed_and_complete(found):
    parser = parsed(page(found))
    text = " ".join(parser.data)
    for title in ("Layouts", "Memory of the fullest device", "Memory against throughput", "A step by cause"):
        assert title in text
    assert describe(found.choice.layout) in text
    assert parser.seen.count("svg") >= 3
    points = trade_offs(found.found, found.time, found.memory, found.space, found.capacity)
    front = re.findall(r"<circle [^>]*><title>[^<]*: (\d+) tokens/s/device, ([\d.]+) GB</title>", page(found))
    assert len(front) >= 2
    speeds, sizes = zip(*((int(speed), float(size)) for speed, size in front), strict=True)
    assert list(speeds) == sorted(speeds) and list(sizes) == sorted(sizes)
    assert speeds[-1] == round(max(speed for _, speed, _ in points))
    assert sizes[0] <= round(min(size for size, _, _ in points) / 1e9, 1)


def test_the_page_needs_nothing_from_outside(found):
    text = page(found)
    assert not re.search(r"https?://|src=|<script|@import|url\(", text)
    assert 'name="viewport"' in text


def test_a_pipeline_is_drawn():
    parser = parsed(page(plan(model="gpt3-175b", devices=256)))
    assert "Pipeline" in parser.data


def test_a_plan_without_a_layout_lists_what_would_help():
    nothing = plan(model="gpt3-175b", devices=8, offload=False)
    text = " ".join(parsed(page(nothing)).data)
    assert "Nothing fits" in text
    assert all(remedy in text for remedy in nothing.remedies)


def test_names_are_escaped(found):
    from dataclasses import replace

    hostile = replace(found, shape=replace(found.shape, name="<script>alert(1)</script>"))
    assert "<script>" not in page(hostile)


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(found, tmp_path):
    write_page(found, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == page(found)
    with pytest.raises(UserError, match="cannot write the page"):
        write_page(found, tmp_path / "no" / "r.html")
