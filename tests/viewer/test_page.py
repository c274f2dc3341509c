"""A page is one file that asks nobody for anything, and text that others wrote stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from tests.viewer.reading import HOSTILE, Elements, data_of, figures, policy_of, program_of
from whence.viewer.page import escaped, page


def test_everything_is_in_it() -> None:
    """No element names another file, and the policy allows none."""
    text = page(figures())
    tags = Elements(text).tags
    assert [tag for tag, _ in tags if tag in {"link", "img", "iframe", "object", "embed", "base"}] == []
    assert [attributes for _, attributes in tags if attributes.keys() & {"src", "href", "action"}] == []
    assert policy_of(text).startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy_of(text)


def test_the_policy_names_script_and_style_by_their_hashes() -> None:
    """A page whose script was changed does not run it."""
    text = page(figures())
    (script,) = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    for part in (script, style):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" in policy_of(
            text
        )


def test_hostile_names_are_text() -> None:
    """The page has the same elements whatever modules are called, and says their names."""
    plain, hostile = page(figures()), page(figures(HOSTILE))
    assert [tag for tag, _ in Elements(plain).tags] == [tag for tag, _ in Elements(hostile).tags]
    assert HOSTILE not in hostile
    (program,) = data_of(hostile)["programs"]
    assert HOSTILE in program["texts"]


def test_the_title_is_escaped() -> None:
    """A function may be called as it likes, too."""
    named = {**figures(), "program": {**figures()["program"], "name": HOSTILE}}
    assert "<title>&lt;/script&gt;" in page(named)
    assert HOSTILE not in page(named)


def test_json_in_a_script_has_no_way_out() -> None:
    """It reads back as it was."""
    text = escaped([HOSTILE, "<!--", "\u2028"])
    assert "<" not in text
    assert json.loads(text) == [HOSTILE, "<!--", "\u2028"]


def test_two_programs_are_on_a_page_with_their_difference() -> None:
    """Both, and what `diff` says."""
    difference = program_of().diff(program_of(HOSTILE)).to_dict()
    data = data_of(page(figures(), figures(HOSTILE), difference))
    assert [program["name"] for program in data["programs"]] == ["Named", "Named"]
    assert data["difference"] == json.loads(json.dumps(difference))


def test_libraries_in_it_come_with_their_terms() -> None:
    """Who has the page has them."""
    assert (
        page(figures()).count("The above copyright notice and this permission notice shall be included") == 2
    )
