"""How the page stands: nothing jumps, all of it can be reached by keyboard, and has a name."""

from __future__ import annotations

from itertools import pairwise

from workshop.watch.conftest import OpenRun, until


def test_nothing_moves_and_the_page_is_as_wide_as_its_window(
    open_run: OpenRun, default_run_text: str
) -> None:
    """A laptop shows all six scenes of a run at once."""
    width, height = 1280, 800
    run = open_run(default_run_text, width=width, height=height)
    for before, now in pairwise(run.check("places", 9)):
        assert len(before) == len(now) > 30, "a step has other parts"
        for (_, *old), (part, *new) in zip(before, now):
            assert max(abs(a - b) for a, b in zip(old, new)) < 0.6, f"{part} moves"
    assert run.ask("() => document.documentElement.scrollHeight") <= height
    for narrow in (width, 800, 390):
        run.page.set_viewport_size({"width": narrow, "height": height})
        until(run.page, "width => document.documentElement.scrollWidth <= width", narrow)


def test_tab_reaches_every_control_and_shows_where_it_is(
    open_run: OpenRun, default_run_text: str
) -> None:
    """And the other way round: no part keeps the focus."""
    run = open_run(default_run_text, at="step=20")
    controls = run.check("controls")
    assert 12 < len(controls) < 40, "too many stops on the way"
    for key, order in (("Tab", controls), ("Shift+Tab", controls[-2::-1])):
        for name in order:
            run.page.keyboard.press(key)
            number, has_ring, is_in_sight = run.check("focused")
            assert (controls[number], has_ring, is_in_sight) == (name, True, True)


# Roles that have to have a name, be they reachable or not.
NAMED = {"button", "combobox", "slider", "listbox", "application", "img", "image", "region"}
NAMED |= {"dialog", "link", "option", "group"}


def test_everything_that_can_be_used_has_a_role_and_a_name(
    open_run: OpenRun, default_run_text: str
) -> None:
    run = open_run(default_run_text, at="step=20")
    tree = run.page.context.new_cdp_session(run.page).send("Accessibility.getFullAXTree")
    titles, num_usable = [], 0
    for node in tree["nodes"]:
        if node["ignored"] or "properties" not in node:
            continue
        role, name = node["role"]["value"], node.get("name", {}).get("value", "").strip()
        can_focus = any(
            p["name"] == "focusable" and p["value"]["value"] for p in node["properties"]
        )
        is_usable = can_focus and role != "RootWebArea"
        assert name or not (is_usable or role in NAMED), node
        assert not is_usable or role not in ("generic", "none", "")
        num_usable += is_usable
        titles += [name] * (role == "region")
    assert num_usable > 12 and len(titles) >= 6 and len(set(titles)) == len(titles)
