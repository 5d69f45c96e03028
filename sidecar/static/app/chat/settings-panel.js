// The settings of the next request, and what they come to in a line.

import { html, useState } from "../../vendor/preact.js";
import { engine } from "../state.js";
import { DEFAULTS, MODES, problem, settings } from "./settings.js";

export function settingsInWords() {
  const { temperature, top_p: topP, max_tokens: most, seed, mode, layers } = settings.value;
  const words = [`temperature ${temperature}`, `top_p ${topP}`, `at most ${most} tokens`];
  if (seed !== null) words.push(`seed ${seed}`);
  words.push(mode === "off" ? "no capture" : `${MODES[mode]}${layers ? `, layers ${layers}` : ""}`);
  return words.join(" · ");
}

export function SettingsPanel() {
  const capabilities = engine.value?.capabilities ?? null;
  const given = capabilities?.modes ?? [];
  const { mode } = settings.value;
  const isOther = (name) => name !== "off" && capabilities !== null && !given.includes(name);
  return html`<form class="settings" aria-label="Settings of the next request" onSubmit=${(event) => event.preventDefault()}>
    <fieldset><legend>Sampling</legend>
      <${NumberField} name="temperature" label="temperature" step="0.1" />
      <${NumberField} name="top_p" label="top_p" step="0.05" />
      <${NumberField} name="max_tokens" label="max tokens" step="1" />
      <${NumberField} name="seed" label="seed" step="1" hint="any" />
      <label class="field"><span>prompt</span><select value=${settings.value.style} onChange=${(event) => set("style", event.target.value)}>
        <option value="chat">as a chat</option><option value="plain">a text to go on with</option></select></label>
    </fieldset>
    <fieldset><legend>Capture</legend>
      <label class="field"><span>mode</span><select value=${mode} onChange=${(event) => set("mode", event.target.value)}>
        ${Object.entries(MODES).map(([name, words]) => html`<option key=${name} value=${name} disabled=${isOther(name)}>${words}${isOther(name) ? " (not here)" : ""}</option>`)}</select></label>
      <${TextField} name="layers" label="layers" hint=${capabilities?.layers?.length ? `all: ${capabilities.layers.join(", ")}` : "the server's"} disabled=${mode === "off"} />
      <${TextField} name="heads" label="heads" hint="their mean" disabled=${mode !== "raw" || capabilities?.features?.head_filtering === false} />
      <${NumberField} name="top_k" label="links a row" step="1" disabled=${mode === "off" || mode === "fingerprint"} />
      <${NumberField} name="prompt_rows" label="rows of the prompt" step="1" disabled=${mode === "off"} />
    </fieldset>
    ${capabilities?.supported === false && html`<p class="quiet small">This engine captures nothing: ${Object.values(capabilities.reasons ?? {})[0] ?? "it was not asked to"}.</p>`}
    ${engine.value && !capabilities && html`<p class="quiet small">This engine has no attention in its API: answers come without it.</p>`}
    <div><button type="button" class="button" onClick=${() => { settings.value = { ...DEFAULTS }; }}>Reset</button></div>
  </form>`;
}

function set(name, value) {
  settings.value = { ...settings.peek(), [name]: value };
}

/** A field keeps what was typed until it can be used; what is wrong with it stands below it. */
function Field({ name, label, hint = "", type, step = null, disabled = false, parse, print }) {
  const [typed, setTyped] = useState(null);
  const value = typed ?? print(settings.value[name]);
  const wrong = typed === null ? null : problem(name, parse(typed));
  const input = (event) => {
    const next = event.target.value;
    setTyped(next);
    if (problem(name, parse(next)) === null) set(name, parse(next));
  };
  return html`<label class="field"><span>${label}</span>
    <input type=${type} step=${step} value=${value} placeholder=${hint} disabled=${disabled} aria-invalid=${wrong ? "true" : null} name=${name}
      onInput=${input} onBlur=${() => { if (!wrong) setTyped(null); }} />
    ${wrong && html`<span class="wrong small" role="alert">${wrong}</span>`}</label>`;
}

const NumberField = (given) => html`<${Field} type="number" ...${given} parse=${(text) => (text.trim() === "" ? null : Number(text))}
  print=${(value) => (value === null ? "" : String(value))} />`;
const TextField = (given) => html`<${Field} type="text" ...${given} parse=${(text) => text} print=${(value) => value} />`;
