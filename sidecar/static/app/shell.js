// The frame of every view: navigation, connection, served run, theme, keys, and what went wrong.

import { Component, html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { needsKey, setKey } from "./api.js";
import { location, navigate, query, route, ROUTES } from "./routes.js";
import { config, connection, refresh, served, swapped } from "./state.js";
import { Dialog } from "./ui/dialog.js";
import { listenToKeys, shortcuts, useKeys, withKeys } from "./ui/keys.js";
import { Empty, Failure, Loading } from "./ui/states.js";
import { cycleTheme, theme } from "./ui/theme.js";
import { Given, runName } from "./ui/text.js";

export function Shell() {
  const [help, setHelp] = useState(false);
  useLayoutEffect(listenToKeys, []);
  useKeys("Everywhere", {
    "?": ["this help", () => setHelp(true)],
    t: ["light, dark, or as the system", cycleTheme],
    ...Object.fromEntries(ROUTES.map(({ key, path, title }) => [key, [title, () => navigate(path)]])),
  });
  return html`
    <a class="skip" href="#view" onClick=${toView}>Skip to the view</a>
    <${Head} onHelp=${() => setHelp(true)} />
    <${Notices} />
    <${View} />
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}
    ${needsKey.value && html`<${KeyDialog} />`}`;
}

function toView(event) {
  event.preventDefault();
  document.getElementById("view").focus();
}

function Head({ onHelp }) {
  return html`<header class="shell-head">
    <a class="brand" href="/live" aria-label="attn, to Live"><img src="/static/icon.svg" alt="" /><span>attn</span></a>
    <nav class="views" aria-label="Views">
      ${ROUTES.map(({ path, title, says }) => html`
        <a href=${path} title=${says} aria-current=${path === location.value.path ? "page" : null}>${title}</a>`)}
    </nav>
    <div class="shell-state">
      <${Served} />
      <${Connection} />
      <button type="button" class="plain" onClick=${cycleTheme} title=${`Theme: ${theme.value}`}
        aria-label=${`Theme: ${theme.value}. Change it`}>${{ system: "◐", light: "○", dark: "●" }[theme.value]}</button>
      <button type="button" class="plain" onClick=${onHelp} aria-label="Keys" title="Keys (?)">?</button>
    </div>
  </header>`;
}

function Served() {
  const run = served.value;
  if (!run) return null;
  return html`<a class="served" href=${`/manifold?run=${encodeURIComponent(run.run_id)}`}
    title=${`${run.model}: ${run.rows} rows, ${run.clusters} clusters`}>
    <span class="quiet">run</span><span class="clip" data-served=${run.run_id}>${runName(run.run_id)}</span></a>`;
}

function Connection() {
  const { state } = connection.value;
  const [kind, says] = {
    connecting: ["", "connecting"], open: ["good", "connected"], lost: ["bad", "disconnected"],
  }[state];
  return html`<span class="connection" role="status" data-connection=${state}>
    <span class=${`dot ${kind}`} aria-hidden="true"></span>${says}</span>`;
}

function Notices() {
  const { state, error } = connection.value;
  const change = swapped.value;
  return html`
    ${state === "lost" && html`<div class="notice bad" role="alert">
      <span>The sidecar does not answer. What you see is from before; this page tries again by itself.
        If it stays so: is <code>attn sidecar</code> running at ${window.location.host}?</span>
      <button type="button" class="button" onClick=${refresh}>Try now</button></div>`}
    ${state === "open" && error && !needsKey.value && html`<div class="notice bad" role="alert">
      <span><${Given} text=${error.message} /></span>
      <button type="button" class="button" onClick=${refresh}>Try now</button></div>`}
    ${change && html`<div class="notice" role="status" data-swapped=${change.to}>
      <span>Run <b>${runName(change.to)}</b> is served now, in place of ${runName(change.from)}.${" "}
        <a href=${`/compare?a=run:${change.from}&b=run:${change.to}`}>What changed</a></span>
      <button type="button" class="button" onClick=${() => { swapped.value = null; }}>Dismiss</button></div>`}`;
}

/** The view of the address, loaded when it is first opened. */
function View() {
  const opened = route.value;
  const [loaded, setLoaded] = useState({ name: null, View: null, error: null });
  const main = useRef(null);
  const isFirst = useRef(true);
  const load = () => {
    setLoaded({ name: null, View: null, error: null });
    opened?.load().then(
      (module) => setLoaded({ name: opened.name, View: module.default, error: null }),
      (error) => setLoaded({ name: opened.name, View: null, error }),
    );
  };
  useEffect(load, [opened]);
  useEffect(() => {
    document.title = opened ? `${opened.title} · attn` : "attn";
    if (!isFirst.current) main.current.focus({ preventScroll: true });
    isFirst.current = false;
  }, [opened]);
  const isReady = opened && loaded.name === opened.name;
  return html`<main id="view" tabindex="-1" ref=${main} data-view=${isReady && loaded.View ? opened.name : null}>
    ${!opened ? html`<${Empty} title="There is no such view">
        Choose one above, or go to <a href="/live">Live</a>.<//>`
      : isReady && loaded.error ? html`<${Failure} error=${loaded.error} onRetry=${load}
          todo="The view could not be loaded. If the sidecar was upgraded, reload the page." />`
      : isReady ? html`<${Boundary} key=${opened.name}><${loaded.View} query=${query.value} /><//>`
      : html`<${Loading} what=${opened.title} />`}
  </main>`;
}

/** A fault of a view is shown in its place; the others go on. */
class Boundary extends Component {
  state = { error: null };

  componentDidCatch(error) {
    // Also for the log of the browser, which has the place.
    console.error(error);
    this.setState({ error });
  }

  render({ children }, { error }) {
    return error ? html`<${Failure} error=${error} onRetry=${() => this.setState({ error: null })}
      todo="This is a fault of the page. The address above leads here again; reload if it stays." />` : children;
  }
}

function Help({ onClose }) {
  return html`<${Dialog} title="Keys" onClose=${onClose}>
    <label class="row"><input type="checkbox" checked=${withKeys.value}
      onChange=${(event) => { withKeys.value = event.target.checked; }} />Keys without Ctrl or Alt do something</label>
    <dl class="keys">${shortcuts.value.map(([group, keys]) => html`
      <dt class="group">${group}</dt>
      ${Object.entries(keys).map(([key, [says]]) => html`<dt><kbd>${key}</kbd></dt><dd>${says}</dd>`)}`)}
    </dl>
    <p class="quiet small">attn ${config.value?.version ?? ""} · <a href="/docs" target="_blank">HTTP interface</a></p>
  <//>`;
}

function KeyDialog() {
  const [key, put] = useState("");
  const use = (event) => {
    event.preventDefault();
    setKey(key.trim());
  };
  return html`<${Dialog} title="This sidecar needs an API key" onClose=${null}>
    <form class="stack" onSubmit=${use}>
      <p>It is one line of the file of <code>--api-key-file</code>. It is kept in this tab only.</p>
      <label class="stack"><span class="quiet">API key</span>
        <input type="password" autocomplete="off" value=${key} onInput=${(event) => put(event.target.value)} autofocus /></label>
      <div><button class="button primary" disabled=${!key.trim()}>Use it</button></div>
    </form>
  <//>`;
}
