"""The diagram of the lineage in view Manifold: which cluster of a run its clusters come from."""

from __future__ import annotations

from playwright.sync_api import Page, expect

FOCUSED = "document.activeElement.closest('.sankey') && document.activeElement.dataset.item"
# What the focused item is to a screen reader.
SAID = "[document.activeElement.getAttribute('role'), document.activeElement.ariaLabel]"


def test_lineage_draws_every_cluster_of_the_runs_and_lists_what_changed(manifold, nights):
    page = manifold()
    _, made = nights
    expect(page.locator(".sankey .node")).to_have_count(sum(len(one.clusters) for one in made))
    expect(page.locator(".sankey .ribbon")).to_have_count(5 + 5)
    events = page.locator(".events")
    expect(events).to_contain_text("5 (born)")
    expect(events).to_contain_text("6 (born)")
    page.locator(f"[data-node='{made[0].run_id}:4']").click()
    expect(page.locator(f".manifold[data-run='{made[0].run_id}']")).to_be_visible()
    expect(page.locator("#cluster-4.chosen")).to_be_visible()


def focused(page: Page) -> str:
    return page.evaluate(FOCUSED) or ""


def press(page: Page, key: str) -> str:
    """The item that has the focus after a key."""
    page.keyboard.press(key)
    return focused(page)


def moved(page: Page, key: str) -> list[str]:
    """The items that a key leads to one after the other, until it leads nowhere."""
    found = [focused(page)]
    while (item := press(page, key)) != found[-1]:
        found.append(item)
    return found[1:]


def entered(page: Page) -> str:
    """The item that Tab leads to from what comes before the diagram."""
    page.locator("[data-lineage]").scroll_into_view_if_needed()
    page.locator(".map-side [role=tabpanel] button:visible").last.focus()
    for _ in range(50):
        if found := press(page, "Tab"):
            return found
    raise AssertionError("Tab does not lead into the diagram")


def test_arrow_keys_reach_every_cluster_and_every_flow_by_name(manifold, nights):
    page = manifold()
    expect(page.locator(".sankey .ribbon")).to_have_count(10)
    entered(page)
    reached: dict[str, str] = {}
    moved(page, "ArrowLeft")
    while True:
        press(page, "Home")
        for key in [focused(page), *moved(page, "ArrowDown")]:
            reached[key] = ""
        # From the last of a column to the first, to say what each one is.
        for key in reversed([focused(page), *moved(page, "ArrowUp")]):
            page.locator(f"[data-item='{key}']").focus()
            role, reached[key] = page.evaluate(SAID)
            assert role == "button"
        before = focused(page)
        if press(page, "ArrowRight") == before:
            break
    shown = page.locator(".sankey [data-item]")
    assert reached.keys() == {one.get_attribute("data-item") for one in shown.all()}
    assert len(reached) == 6 + 5 + 7 + 5 + 5
    first, second, third = (night.run_id for night in nights[1])
    assert reached[f"{third}:6"].startswith("Cluster 6 of run 2026-01-10 04:02:11 (4), label 6, ")
    flow = reached[f"{first}:2>{second}:2"]
    assert flow.startswith("Flow: ") and "cluster 2 of run 2026-01-10 04:02:11 (2)" in flow
    assert "to cluster 2 of run 2026-01-10 04:02:11 (3)" in flow
    assert len(set(reached.values())) == len(reached)


def test_enter_does_what_a_click_does_and_the_focus_is_seen(manifold, nights):
    page = manifold()
    expect(page.locator(".sankey .ribbon")).to_have_count(10)
    _, second, third = (night.run_id for night in nights[1])
    at = entered(page)
    assert at.startswith(third)
    press(page, "Home")
    for _ in range(20):
        if focused(page) == f"{third}:3":
            break
        press(page, "ArrowDown")
    # Left along its flow, whose line is drawn while it has the focus.
    assert press(page, "ArrowLeft") == f"{second}:3>{third}:3"
    line = page.locator(f"[data-item='{second}:3>{third}:3'] .focus-line")
    assert line.evaluate("n => getComputedStyle(n).stroke") != "none"
    assert press(page, "ArrowLeft") == f"{second}:3"
    assert line.evaluate("n => getComputedStyle(n).stroke") == "none"
    bar = page.locator(f"[data-item='{second}:3'] rect")
    assert bar.evaluate("n => getComputedStyle(n).stroke") != "none"
    page.keyboard.press("Enter")
    expect(page.locator(f".manifold[data-run='{second}']")).to_be_visible()
    expect(page.locator("#cluster-3.chosen")).to_be_visible()
    expect(page.locator(f"[data-item='{second}:3']")).to_have_attribute("aria-current", "true")
    # The focus stays where it was, and one key leads on.
    assert focused(page) == f"{second}:3"
    assert press(page, "ArrowLeft").endswith(f">{second}:3")
    page.keyboard.press("Space")
    expect(page.locator("#cluster-3.chosen")).to_be_visible()
    # A flow that is clicked shows the cluster that it leads to.
    page.goto(page.url.split("/manifold")[0] + "/manifold")
    page.locator(f"[data-item='{second}:2>{third}:2'] .ribbon").click()
    expect(page.locator("#cluster-2.chosen")).to_be_visible()
    expect(page.locator(f".manifold[data-run='{third}']")).to_be_visible()
