"""The chart: what is drawn, and that no two labels overlap."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import KohyaBuckets, load_preset
from kohya_bucket.buckets import switching_points
from kohya_bucket.reports.chart import Drawing, aspect_chart, spread_labels

SETS = {"512": KohyaBuckets(512).bucket_set, "1024": KohyaBuckets(1024, 256, 2048).bucket_set}
SETS |= {name: load_preset(name) for name in ("sdxl", "flux", "novelai")}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("method", ["midpoint", "geometric", "area"])
def test_every_bucket_and_every_switching_point_is_labelled(name, method) -> None:
    svg = aspect_chart(SETS[name], method).to_svg()
    for bucket in SETS[name]:
        assert f">{bucket}  " in svg
    for point in switching_points(SETS[name], method):
        assert f">{point.aspect if point.aspect > 1 else 1 / point.aspect:.4f}<" in svg


@pytest.mark.parametrize("name", SETS)
def test_no_two_labels_overlap(name) -> None:
    sizes = np.random.default_rng(0).integers(100, 4000, (500, 2)).astype(np.int32)
    drawing = aspect_chart(SETS[name], "midpoint", sizes)
    boxes = []
    for shape in ET.fromstring(drawing.to_svg()).iter("{http://www.w3.org/2000/svg}text"):
        x, y, size, text = *(float(shape.attrib[name]) for name in ("x", "y", "font-size")), shape.text or ""
        length, thick = 0.62 * size * len(text), size * 1.05
        start = {"start": 0, "middle": 0.5, "end": 1}[shape.attrib["text-anchor"]] * length
        if "transform" in shape.attrib:
            box = (x - thick / 2, y - length + start, x + thick / 2, y + start)
        else:
            box = (x - start, y - thick / 2, x - start + length, y + thick / 2)
        boxes.append((text, *box))
    for i, (one, a, b, c, d) in enumerate(boxes):
        assert a >= 0
        assert c <= drawing.width
        assert b >= 0
        assert d <= drawing.height
        for other, e, f, g, h in boxes[i + 1 :]:
            assert a >= g or c <= e or b >= h or d <= f, (one, other)


def test_images_are_counted_once_on_either_side() -> None:
    svg = aspect_chart(SETS["512"], sizes=np.array([(10, 10), (20, 10), (10, 30), (0, 5)], np.int32)).to_svg()
    assert re.findall(r">(\d+ images?[^<]*)<", svg) == ["2 images", "1 image"]


@given(st.lists(st.floats(0, 100), max_size=8), st.floats(0.1, 12))
def test_labels_are_spread_apart_in_order_and_in_range(wanted, gap) -> None:
    wanted = np.sort(np.array(wanted))
    places = spread_labels(wanted, gap, 0, 100)
    assert (np.diff(places) >= gap - 1e-9).all()
    assert not len(places) or (places[0] >= -1e-9 and places[-1] <= 100 + 1e-9)
    if len(wanted) and (np.diff(wanted) >= gap).all():
        np.testing.assert_allclose(places, wanted, atol=1e-9)


def test_a_sheet_holds_its_shapes() -> None:
    drawing = Drawing(200, 80, title='a "title" & more')
    drawing.box(10, 10, 50, 20, "#ff0000")
    drawing.dot(100, 40, 10, "#0000ff")
    drawing.line([(0, 79), (199, 79)], "#00ff00", 2)
    drawing.text(10, 60, "a < b & c")
    drawing.text(190, 10, "up", upright=True, anchor="end", bold=True)
    root = ET.fromstring(drawing.to_svg())
    assert root.attrib["viewBox"] == "0 0 200 80"
    assert [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")] == ["a < b & c", "up"]
    assert {element.tag.partition("}")[2] for element in root} >= {"rect", "circle", "polyline"}
