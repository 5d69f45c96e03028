// The runs of one lineage in the order of time: a slider over nights.

import { html, useEffect, useState } from "../../vendor/preact.js";
import { count, percent, plural, runName } from "../ui/text.js";

const STEP_MS = 1600; // between two runs while it plays

/** The finished runs that can be compared with one: same model, layout and capture, oldest first. */
export function nightsOf(runs, manifest) {
  const same = (run) => run.rows !== null && ["model", "layout", "capture_id"].every((name) => run[name] === manifest[name]);
  return runs.filter(same).reverse();
}

/**
 * @param {{nights: object[], runId: string, isLoading: boolean, onRun: (runId: string) => void}} given
 */
export function Nights({ nights, runId, isLoading, onRun }) {
  const at = nights.findIndex(({ run_id: id }) => id === runId);
  const [isPlaying, setPlaying] = useState(false);
  useEffect(() => {
    if (!isPlaying || isLoading) return undefined;
    if (at >= nights.length - 1) {
      setPlaying(false);
      return undefined;
    }
    const timer = setTimeout(() => onRun(nights[at + 1].run_id), STEP_MS);
    return () => clearTimeout(timer);
  }, [isPlaying, isLoading, at]);
  if (nights.length < 2 || at < 0) return null;
  const night = nights[at];
  const words = `${runName(night.run_id)}: ${plural(night.clusters, "cluster")}, ${percent(night.noise_share)} noise`;
  const go = (index) => {
    setPlaying(false);
    if (index !== at && nights[index]) onRun(nights[index].run_id);
  };
  const play = () => {
    if (at === nights.length - 1) onRun(nights[0].run_id);
    setPlaying(!isPlaying);
  };
  return html`<div class="nights" data-nights=${nights.length}>
    <button type="button" class="plain" aria-label="The run before" disabled=${at === 0} onClick=${() => go(at - 1)}>‹</button>
    <div class="slider">
      <input type="range" min="0" max=${nights.length - 1} step="1" value=${at} aria-label="Runs in the order of time" aria-valuetext=${words}
        onInput=${(event) => go(Number(event.target.value))} />
      <div class="ticks" aria-hidden="true">${nights.map((one) => html`<i key=${one.run_id} class=${one.gate_passed === false ? "is-failed" : one.served ? "is-served" : ""}
        title=${`${runName(one.run_id)}${one.served ? ", served" : ""}${one.gate_passed === false ? ", gate not passed" : ""}`}></i>`)}</div>
    </div>
    <button type="button" class="plain" aria-label="The next run" disabled=${at === nights.length - 1} onClick=${() => go(at + 1)}>›</button>
    <button type="button" class="plain" aria-pressed=${isPlaying} aria-label="Play the runs" title="Play the runs" onClick=${play}>${isPlaying ? "❚❚" : "▶"}</button>
    <span class="quiet small night-words">${count(at + 1)} of ${count(nights.length)}: ${plural(night.clusters, "cluster")}, ${percent(night.noise_share)} noise</span>
  </div>`;
}
