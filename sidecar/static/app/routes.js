// URL <-> view. A path names the view; every state worth sharing is in the query string.

import { computed, signal } from "../vendor/preact.js";

/** @typedef {{name: string, path: string, title: string, key: string, load: () => Promise<{default: Function}>}} Route */

/** @type {Route[]} */
export const ROUTES = [
  { name: "live", title: "Live", says: "what arrives now, against the last nightly run", load: () => import("./views/live.js") },
  { name: "chat", title: "Chat", says: "an answer token by token", load: () => import("./views/chat.js") },
  { name: "inspect", title: "Inspect", says: "one request, its layers and heads", load: () => import("./views/inspect.js") },
  { name: "manifold", title: "Manifold", says: "the map of behaviours", load: () => import("./views/manifold.js") },
  { name: "router", title: "Router", says: "zones live, and recommended settings", load: () => import("./views/router.js") },
  { name: "compare", title: "Compare", says: "two sessions, requests, runs or traces", load: () => import("./views/compare.js") },
  { name: "overhead", title: "Overhead", says: "what capture costs", load: () => import("./views/overhead.js") },
].map((route, i) => ({ ...route, path: `/${route.name}`, key: String(i + 1) }));

/** What is open now: `query` is a plain object of strings. */
export const location = signal(read());
export const route = computed(() => ROUTES.find(({ path }) => path === location.value.path) ?? null);
export const query = computed(() => location.value.query);

function read() {
  const path = window.location.pathname.replace(/\/+$/, "") || "/live";
  return { path, query: Object.fromEntries(new URLSearchParams(window.location.search)) };
}

/** The address of a view; values of `query` that are null, undefined or "" are left out. */
export function href(path, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const words = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return words ? `${path}?${words}` : path;
}

/** Open a view. `replace`: without a new entry of the history. */
export function navigate(path, query = {}, { replace = false } = {}) {
  const address = href(path, query);
  if (address === window.location.pathname + window.location.search) return;
  window.history[replace ? "replaceState" : "pushState"](null, "", address);
  location.value = read();
}

/** Change some of the query of this view: null takes one away. No new entry of the history unless `push`. */
export function setQuery(changes, { push = false } = {}) {
  navigate(location.value.path, { ...location.value.query, ...changes }, { replace: !push });
}

/** Let links to views change the view and not load the page again; call it once. */
export function followLinks() {
  window.addEventListener("popstate", () => { location.value = read(); });
  document.addEventListener("click", (event) => {
    const link = event.target instanceof Element ? event.target.closest("a[href]") : null;
    const held = event.metaKey || event.ctrlKey || event.shiftKey || event.altKey;
    if (!link || held || event.button || event.defaultPrevented || link.target || link.hasAttribute("download")) return;
    const to = new URL(link.href);
    if (to.origin !== window.location.origin || !ROUTES.some(({ path }) => path === to.pathname)) return;
    event.preventDefault();
    navigate(to.pathname, Object.fromEntries(to.searchParams));
  });
}
