"""What holds of any view, however wide, light or dark."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

# Text whose contrast with what is behind it is below that of WCAG AA, and pictures without a name.
CONTRAST = """() => {
  const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const channel = (value) => linear(value / 255);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      const color = rgba(getComputedStyle(one).backgroundColor);
      if (color[3]) layers.push(color);
      if (color[3] === 255) break;
    }
    const over = (below, [r, g, b, a]) =>
      [r, g, b].map((c, i) => (c * a + below[i] * (255 - a)) / 255);
    return layers.reduceRight(over, [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    const isSeen = element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    if (!text || !isSeen) continue;
    if (element.closest("noscript, .hidden-text, option, :disabled, [aria-hidden=true]")) continue;
    const style = getComputedStyle(element);
    const color = rgba(element instanceof SVGElement ? style.fill : style.color).slice(0, 3);
    const [one, other] = [luminance(color), luminance(behind(element))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) found.push(`${ratio.toFixed(2)} ${text.slice(0, 40)}`);
  }
  return found;
}"""
NAMELESS = """() => [...document.querySelectorAll(
    "button, a, input, select, textarea, [role=img], [role=meter]")]
  .filter((one) => one.checkVisibility() && !one.closest("[aria-hidden=true]"))
  .filter((one) => !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby")
    || one.textContent.trim() || one.title || (one.labels && one.labels.length)))
  .map((one) => one.outerHTML.slice(0, 120))"""

# Targets under 24 px that another target comes near to (WCAG 2.2, 2.5.8). Links in a sentence are
# excepted, and so are tokens of a text and parts of a diagram: these are where they are.
SMALL = """() => {
  const size = 24;
  const all = [...document.querySelectorAll("button, a[href], select, input, summary")]
    .filter((one) => one.checkVisibility() && !one.closest(".hidden-text, .skip, .flow, svg"))
    .map((one) => ({ one, rect: (one.closest("label") ?? one).getBoundingClientRect() }))
    .filter(({ rect }) => rect.width && rect.height);
  const inSentence = (one) => one.matches("a") && getComputedStyle(one).display === "inline";
  const near = (a, b) => {
    const [x, y] = [(a.left + a.right) / 2, (a.top + a.bottom) / 2];
    const across = Math.max(b.left - x, x - b.right, 0);
    return Math.hypot(across, Math.max(b.top - y, y - b.bottom, 0)) < size / 2;
  };
  const isCrowded = ({ one, rect }) => all.some((other) =>
    other.one !== one && !other.one.contains(one) && near(rect, other.rect));
  return all.filter(({ one, rect }) => rect.width < size || rect.height < size)
    .filter((target) => !inSentence(target.one) && isCrowded(target))
    .map(({ one, rect: { width, height } }) =>
      `${Math.round(width)} x ${Math.round(height)} ${one.outerHTML.slice(0, 90)}`);
}"""


def assert_legible(page: Page) -> None:
    """Nothing sticks out of the page, text has the contrast of WCAG AA, controls have names and
    can be hit."""
    wide: dict[str, Any] = page.evaluate(
        "({ page: document.documentElement.scrollWidth, window: window.innerWidth })"
    )
    assert wide["page"] <= wide["window"], wide
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
    if page.evaluate(SMALL):  # it may be laid out still
        page.wait_for_timeout(500)
    small = page.evaluate(SMALL)
    assert small == [], small


def hacked(page: Page) -> Any:
    """Whether hostile text did anything: it sets this where it is run."""
    return page.evaluate("window.hacked")
