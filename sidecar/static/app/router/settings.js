// The recommended settings beside those of the next question, and what takes them over.

import { html, useState } from "../../vendor/preact.js";
import { applySettings, MODES, settings } from "../chat/settings.js";
import { servedId } from "../state.js";
import { Mark, Zone } from "../ui/marks.js";
import { Panel } from "../ui/panel.js";
import { Empty } from "../ui/states.js";
import { percent, shown, spaced } from "../ui/text.js";

const NAMES = [["temperature", "Temperature"], ["top_p", "top_p"], ["mode", "Capture"]];
const word = (name, value) => (name === "mode" ? MODES[value] ?? value : Number(value).toFixed(2));

export function Recommended({ found, width }) {
  const [before, setBefore] = useState(null);
  const now = settings.value;
  const wanted = found && Object.fromEntries(NAMES.map(([name]) => [name, found[name]]).filter(([, value]) => value !== null));
  const isUsed = wanted && Object.entries(wanted).every(([name, value]) => now[name] === value);
  const apply = () => {
    setBefore({ temperature: now.temperature, top_p: now.top_p, mode: now.mode });
    applySettings(wanted);
  };
  const undo = () => {
    applySettings(before);
    setBefore(null);
  };
  // What is pressed stands above what grows and shrinks as rows arrive, so that it stays in its place.
  return html`<${Panel} title="Recommended settings" says=${found ? `for the commonest zone: ${percent(found.share, 0)} of the rows` : null} width=${width} data-panel="settings">
    ${!found ? html`<${Empty} title="Nothing to recommend yet">As soon as rows come that this view looks at, the settings that fit them stand here.<//>`
      : html`<div class="stack">
        <div class="row"><${Zone} zone=${found.zone} /></div>
        <table class="data router-settings"><thead><tr><th scope="col"></th><th scope="col" class="number">recommended</th><th scope="col" class="number">next question</th></tr></thead>
          <tbody>${NAMES.map(([name, title]) => html`<tr key=${name}><th scope="row">${title}</th>
            <td class="number"><b>${found[name] === null ? "–" : word(name, found[name])}</b></td>
            <td class="number ${now[name] === found[name] ? "" : "quiet"}">${word(name, now[name])}</td></tr>`)}</tbody></table>
        <div class="row apart"><div class="row">${isUsed ? html`<${Mark} kind="good">the next question uses them<//>`
            : html`<button type="button" class="button primary" onClick=${apply}>Apply to next run</button>`}
          ${before && html`<button type="button" class="button" onClick=${undo}>Undo</button>`}</div>
          <a href="/chat">Ask in Chat</a></div>
        <ul class="reasons">${found.hintShare > 0 && found.hintShare < 0.995 && html`<li>This hint is that of ${percent(found.hintShare, 0)} of the zone's rows.</li>`}${found.reason && html`<li>${spaced(shown(found.reason))}</li>`}<li>${MODES[found.mode]}: ${found.why}</li></ul>
        ${found.temperature === null && html`<p class="quiet">${servedId.value ? "None of these rows has a hint for sampling: they are in no cluster of the served run."
          : html`No run is served, so there is no hint for sampling: run <code>attn discover</code>.`}</p>`}
        <p class="quiet small">Conventions, which nobody has measured to make answers better. They are kept in this browser until they are changed in Chat.</p>
      </div>`}
  <//>`;
}
