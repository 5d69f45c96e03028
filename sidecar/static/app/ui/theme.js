// Light, dark, or as the system has it.

import { effect, signal } from "../../vendor/preact.js";

const KEY = "attn.theme";
const THEMES = ["system", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
const stored = localStorage.getItem(KEY);

/** "system" | "light" | "dark": what was chosen. */
export const theme = signal(THEMES.includes(stored) ? stored : "system");
/** Whether the page is dark now. Pictures on a canvas are drawn again when it changes. */
export const isDark = signal(dark());

function dark() {
  return theme.peek() === "system" ? system.matches : theme.peek() === "dark";
}

effect(() => {
  if (theme.value === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem(KEY);
  } else {
    document.documentElement.dataset.theme = theme.value;
    localStorage.setItem(KEY, theme.value);
  }
  isDark.value = dark();
});
system.addEventListener("change", () => { isDark.value = dark(); });

export function cycleTheme() {
  theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length];
}

/** The value that a custom property has now, for a canvas: cssColor("--accent"). */
export function cssColor(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
