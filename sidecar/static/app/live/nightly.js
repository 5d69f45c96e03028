// The nightly job: the last runs and their gate, and the job that is at work with its commands.

import { html, useState } from "../../vendor/preact.js";
import { ApiError, post } from "../api.js";
import { refresh, status } from "../state.js";
import { Mark, Meter } from "../ui/marks.js";
import { Facts, Panel, Table } from "../ui/panel.js";
import { Empty, Failure, Loading } from "../ui/states.js";
import { ago, count, duration, moment, percent, plural, runName, shown } from "../ui/text.js";

const MOST_RUNS = 6;
const KINDS = { latest: "good", published: "good", "failed its check": "bad", unreadable: "bad", unfinished: "warn" };
const DONE = { pause: "It pauses at its next chunk.", resume: "It goes on.", stop: "It stops at its next checkpoint; attn discover --resume finishes it." };

export function Nightly({ manifest, width }) {
  const found = status.value;
  const last = found?.runs.find(({ gate_passed: passed }) => passed !== null && passed !== undefined);
  return html`<${Panel} title="Nightly run" width=${width} data-panel="nightly"
    says=${last ? `last finished: ${ago(last.created_at)}` : null}
    tools=${last && html`<${Mark} kind=${last.gate_passed ? "good" : "bad"}>${last.gate_passed ? "passed its gate" : "failed its gate"}<//>`}>
    ${!found ? html`<${Loading} what="the runs" />` : html`<div class="stack">
      ${found.refused && (found.refused.run_id
        ? html`<p role="alert"><${Mark} kind="bad">refused<//> Run ${runName(found.refused.run_id)} is not served: ${shown(found.refused.reason)}</p>`
        : html`<p class="quiet">No run is served: ${shown(found.refused.reason)}</p>`)}
      ${found.running ? html`<${Job} job=${found.running} />` : html`<p class="quiet">No job is at work now.</p>`}
      ${!found.runs.length ? html`<${Empty} title="No runs yet"><code>attn discover</code> finds the kinds of behaviour in what is
          stored, and the sidecar serves the run as soon as it is published.<//>`
        : html`<${Gate} manifest=${manifest} /><${Runs} runs=${found.runs} />`}
    </div>`}
  <//>`;
}

/** Progress of the running job, and commands to it. */
function Job({ job }) {
  const [said, say] = useState(null);
  const [isSure, setSure] = useState(false);
  const command = async (name) => {
    if (name === "stop" && !isSure) {
      setSure(true);
      return;
    }
    setSure(false);
    try {
      await post("/discovery/control", { command: name });
      say({ text: DONE[name] });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      say({ text: error.message, isBad: true });
    }
    refresh();
  };
  const wanted = ["pause", "resume", "stop"].filter((name) => job.commands.includes(name) && name !== (job.paused ? "pause" : "resume"));
  const share = (Math.max(0, (job.number ?? 1) - 1) + (job.total ? job.done / job.total : 0)) / job.of;
  return html`<div class="job" data-job=${job.run_id}>
    <div class="row apart wrap"><span><b>${runName(job.run_id)}</b> <span class="quiet">${job.paused ? "paused" : "at work"}
        ${job.rows ? ` on ${plural(job.rows, "row")}` : ""}, ${job.started_at ? `began ${ago(job.started_at)}` : ""}</span></span>
      <span class="row">${wanted.map((name) => html`<button type="button" key=${name} class=${`button ${name === "stop" ? "danger" : ""}`}
        onClick=${() => command(name)}>${name === "stop" && isSure ? "Stop it: sure?" : name.charAt(0).toUpperCase() + name.slice(1)}</button>`)}</span></div>
    <${Meter} value=${share} label="Progress of the job" text=${`${job.number ?? 0}/${job.of}`} />
    <p class="quiet small">${job.stage ?? "starting"}${job.total ? `: chunk ${count(job.done)} of ${count(job.total)}` : ""}</p>
    ${said && html`<p role="status" class=${said.isBad ? "bad-text" : "quiet"}>${shown(said.text)}</p>`}
  </div>`;
}

/** The served run's figures, and the checks of its gate. */
function Gate({ manifest }) {
  if (manifest.error) return html`<${Failure} error=${manifest.error} onRetry=${manifest.reload} />`;
  if (!manifest.data) return manifest.isLoading ? html`<${Loading} what="the gate" />` : html`<p class="quiet">No run is served.</p>`;
  const { counts, gate, noise, seconds, runId } = manifest.data;
  const measured = gate.checks.filter((check) => check.value !== null || !check.passed);
  const rest = gate.checks.length - measured.length;
  return html`<${Facts} plain facts=${[
      ["Served run", html`<a href=${`/manifold?run=${runId}`}>${runName(runId)}</a>`],
      ["Rows", count(counts.rows)], ["Clusters", count(counts.clusters)], ["In none", percent(noise)], ["Took", duration(seconds)],
    ]} />
    <details open=${!gate.passed}><summary>Its gate: ${measured.filter(({ passed }) => passed).length} of ${plural(measured.length, "check")} passed</summary>
      <ul class="checks">${measured.map(({ name, passed, says }) => html`<li key=${name}>
        <${Mark} kind=${passed ? "good" : "bad"}>${passed ? "passed" : "failed"}<//> ${shown(says)}</li>`)}
        ${rest > 0 && html`<li class="quiet">${plural(rest, "other")}: not measured, as there is nothing to compare with yet.</li>`}</ul></details>`;
}

/** The newest runs, the newest first. */
function Runs({ runs }) {
  return html`<${Table} label="Runs" rows=${runs.slice(0, MOST_RUNS)} rowKey=${({ run_id: id }) => id} columns=${[
    { title: "run", class: "whole", value: ({ run_id: id, gate_passed: passed }) => (passed === null || passed === undefined ? runName(id)
      : html`<a href=${`/manifold?run=${id}`}>${runName(id)}</a>`) },
    { title: "state", value: ({ state, served, reason }) => html`<span title=${shown(reason ?? "", 300)}><${Mark} kind=${KINDS[state] ?? ""}>${
      served ? "served" : state}<//></span>` },
    { title: "clusters", number: true, value: ({ clusters }) => count(clusters) },
    { title: "in none", number: true, value: ({ noise_share: share }) => percent(share) },
    { title: "made", class: "whole", value: ({ created_at: at }) => html`<span class="quiet" title=${moment(at)}>${at ? ago(at) : "–"}</span>` },
    { title: "", class: "whole", value: ({ run_id: id, parent_run: parent }) => parent && html`<a href=${`/compare?a=run:${parent}&b=run:${id}`}
        aria-label=${`What changed in run ${runName(id)}`}>what changed</a>` },
  ]} />`;
}
