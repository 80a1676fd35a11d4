"""The SVG picture: well-formed, to scale, and complete."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch import nn

from hiremate_lightning import ConfigurationError
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.reporting.svg_report import GAP, PANEL, TOP, write_svg
from hiremate_lightning.reporting.timeline import BUDGET, COLOURS, Band
from tests.tiny import mixed_plan

NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


def draw(plan: Plan, folder: Path, width: int = 860) -> ElementTree.Element:
    return ElementTree.parse(write_svg(plan, folder / "plan.svg", width)).getroot()


def words(picture: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in picture.iterfind("svg:text", NAMESPACE)]


def areas(picture: ElementTree.Element, colour: str) -> list[str]:
    found = picture.iterfind(f"svg:path[@fill='{colour}']", NAMESPACE)
    return [path.attrib["d"] for path in found]


def heights(path: str) -> list[float]:
    return [float(y) for y in re.findall(r"V([-\d.]+)", path)]


def test_both_steps_are_there_with_their_peaks_to_scale(tmp_path: Path):
    """Peaks are circles at their heights, the budget is a line in both panels, and one step has recomputed values."""
    plan = mixed_plan(4)
    picture = draw(plan, tmp_path)
    assert {"Plain step: peak 5.48 MiB, 53.6 ms", "Planned step: peak 4.67 MiB, 60.2 ms"} <= set(words(picture))
    assert len(areas(picture, COLOURS[Band.RECOMPUTED])) == 1
    assert len(areas(picture, COLOURS[Band.SAVED])) == 2

    drawn = [y for colour in COLOURS.values() for path in areas(picture, colour) for y in heights(path)]
    second = TOP + PANEL + GAP
    expected = second + PANEL * (1 - plan.planned_peak_bytes / plan.unplanned_peak_bytes)
    assert min(drawn) == TOP
    assert min(y for y in drawn if y >= second) == pytest.approx(expected, abs=0.11)
    circles = picture.findall("svg:circle[@class='peak']", NAMESPACE)
    assert [float(circle.attrib["cy"]) for circle in circles[:2]] == pytest.approx([TOP, expected], abs=0.11)
    assert len(circles) == 3  # and one in the legend

    lines = picture.findall(f"svg:path[@stroke='{BUDGET}']", NAMESPACE)
    expected = TOP + PANEL * (1 - plan.budget_bytes / plan.unplanned_peak_bytes)
    found = [float(re.match(r"M\d+ ([\d.]+)H", line.attrib["d"])[1]) for line in lines]  # type: ignore[index]
    assert found == pytest.approx([expected, expected + PANEL + GAP], abs=0.11)
    style = picture.findtext("svg:style", namespaces=NAMESPACE)
    assert style is not None
    assert "prefers-color-scheme: dark" in style


def test_a_budget_far_above_all_memory_is_not_drawn(tmp_path: Path):
    """A step that takes no time is drawn all the same."""
    plan = mixed_plan(4)
    timeless = replace(plan.profile, time_ms=(0.0,) * len(plan.profile.time_ms))
    picture = draw(replace(plan, budget_bytes=10**10, profile=timeless), tmp_path)
    assert not picture.findall(f"svg:path[@stroke='{BUDGET}']", NAMESPACE)
    assert not [text for text in words(picture) if text.startswith("budget")]


def test_the_legend_names_each_band_once_and_fits_the_picture(tmp_path: Path):
    plan = replace(mixed_plan(4), resident_parts=(("parameters", 2_000_000),))
    picture = draw(plan, tmp_path, width=480)
    texts = words(picture)
    drawn = (band.value for band in Band if band not in (Band.PASSING, Band.OFFLOADED))
    names = ["parameters, resident", *drawn, "budget, 4.76 MiB"]
    assert [texts.count(name) for name in names] == [1] * len(names)
    corners = [
        float(text.attrib["x"]) + 6.6 * len("".join(text.itertext()))
        for text in picture.iterfind("svg:text", NAMESPACE)
        if text.attrib.get("text-anchor") is None
    ]
    assert max(corners) <= 480


def test_names_can_not_be_markup(tmp_path: Path):
    title = draw(replace(mixed_plan(2), target="<b>&"), tmp_path).find("svg:title", NAMESPACE)
    assert title is not None
    assert title.text == "HiRemate plan of <b>&: memory of a step"


def test_a_picture_of_no_plan_or_too_narrow_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"Expected a plan to write, found Linear. get_plan\(model\) returns"):
        write_svg(nn.Linear(1, 1), tmp_path / "plan.svg")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width must be at least 480 pixels, found 479"):
        write_svg(mixed_plan(2), tmp_path / "plan.svg", 479)
