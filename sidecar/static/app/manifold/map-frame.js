// The map in its frame: tools, tip, legend of zones, and what is drawn over it.

import { html, useEffect, useRef, useState } from "../../vendor/preact.js";
import { query } from "../routes.js";
import { ZONES } from "../state.js";
import { zoneColor } from "../ui/colors.js";
import { Legend } from "../ui/marks.js";
import { count, percent, plural, shown, spaced } from "../ui/text.js";
import { createMap } from "./map/map.js";
import { secondOf } from "./data.js";
import { useFacts } from "./facts.js";

const HELP = "Drag to move; click the map, or hold Ctrl, and scroll to zoom; Shift and drag for a lasso. "
  + "Keys: arrows, +, −, 0, L, Esc.";

/**
 * @param {{run: {map: object, clusters: object[]}, look: import("./map/arrange.js").Look, marks: import("./map/overlay.js").Marks,
 *   hiddenZones: Set<string>, onZone: (zone: string) => void, onClick: (hit: object) => void,
 *   onLasso: (points: Uint32Array, words: string) => void, onEscape: () => void, api: {current: any}, says: any}} given
 */
export function MapFrame({ run, look, marks, hiddenZones, onZone, onClick, onLasso, onEscape, api, says }) {
  const frame = useRef(null);
  const [map, setMap] = useState(null);
  const [hovered, setHovered] = useState({ point: -1, at: null });
  const [lassoing, setLassoing] = useState(false);
  const [labels, setLabels] = useState(true);
  // Listeners of the map call what this was rendered with last.
  const on = useRef(null);
  on.current = { onClick, onLasso, onEscape };

  useEffect(() => {
    const made = createMap(frame.current, {
      hover: (point, at) => setHovered((before) => (before.point === point && !at === !before.at ? before : { point, at })),
      click: (hit) => on.current.onClick(hit),
      lasso: (points) => {
        setLassoing(false);
        on.current.onLasso(points, "in the lasso");
      },
      escape: () => {
        setLassoing(false);
        on.current.onEscape();
      },
    }, query.peek().painter ?? null);
    api.current = made;
    setMap(made);
    return () => {
      made.destroy();
      api.current = null;
    };
  }, []);
  useEffect(() => { if (map) map.show(run.map, run.clusters, look); }, [map, run, look]);
  useEffect(() => { if (map) map.mark(marks); }, [map, marks]);
  useEffect(() => {
    if (map) map.lasso.isOn = lassoing;
    frame.current.classList.toggle("lassoing", lassoing);
  }, [map, lassoing]);
  useEffect(() => setHovered({ point: -1, at: null }), [run, look]);

  const tool = (label, title, words, act, pressed = null) => html`<button type="button" aria-label=${label} title=${title}
    aria-pressed=${pressed} onClick=${act}>${words}</button>`;
  // Points in colours of clusters: a zone's own colour would be that of a cluster.
  const ink = (zone) => (look.color === "zone" ? zoneColor(zone) : "var(--quiet)");
  const zones = ZONES.map((zone) => [zone, ink(zone), percent((run.zoneCounts[zone] ?? 0) / Math.max(1, run.map.size))]);
  return html`<div class="map-column">
    <div class="map-frame">
      <div class="map" ref=${frame} tabindex="0" role="application" aria-roledescription="map" data-map
        aria-label=${`Map of run ${run.map.runId}: ${plural(run.map.size, "point")} in ${plural(run.clusters.length, "cluster")}`}
        aria-describedby="map-help"></div>
      <div class="map-tools" role="group" aria-label="Map">
        ${tool("Zoom in", "Zoom in (+)", "+", () => map.keys["+"]())}
        ${tool("Zoom out", "Zoom out (−)", "−", () => map.keys["-"]())}
        ${tool("Show the whole map", "Whole map (0)", "⤢", () => map.keys[0]())}
        ${tool("Cluster labels", "Cluster labels (L)", "Aa", () => setLabels(map.toggleLabels()), labels)}
        ${tool("Lasso", "Lasso: drag around points (or hold Shift)", "◌", () => setLassoing(!lassoing), lassoing)}
        ${tool("Take the rows in view", "List the rows in view", "▣", () => onLasso(map.inView(), "in view"))}
      </div>
      ${hovered.at && html`<${PointTip} run=${run} point=${hovered.point} at=${hovered.at} frame=${frame.current} />`}
    </div>
    <div class="map-foot">
      <div class="zones" data-zones><span class="quiet small">Zones</span><${Legend} entries=${zones} hidden=${hiddenZones} onToggle=${onZone} /></div>
      <p id="map-help" class="quiet small">${HELP}</p>
      <p class="quiet small" role="status" data-map-status>${says}</p>
    </div>
  </div>`;
}

/** The facts of the point under the pointer: what the map has at once, whose it is when the sidecar has said it. */
function PointTip({ run, point, at, frame }) {
  const { map } = run;
  const tip = useRef(null);
  const facts = useFacts(map.runId, map.row[point]);
  const id = map.clusterIds[map.cluster[point]];
  const cluster = run.byId.get(id);
  const second = facts && secondOf(facts, run);
  const lines = [
    ["request", facts ? shown(facts.request_id, 200) : "…"],
    ["position", facts ? `${count(facts.position)}${facts.layer >= 0 ? `, layer ${facts.layer}` : ""}` : "…"],
    ["phase", facts ? facts.phase : "…"],
    ...(facts?.token_id !== null && facts ? [["token", run.tokenText(facts.token_id)]] : []),
    ["cluster", id < 0 ? "noise" : `${id}  ${shown(cluster?.label ?? "", 120)}`],
    ["zone", spaced(map.zones[map.zone[point]])],
    ...(facts && facts.probability !== null ? [["probability", facts.probability.toFixed(2)]] : []),
    ...(second ? [["second cluster", `${second.cluster_id}  ${shown(second.cluster_label ?? "", 120)} (${second.probability.toFixed(2)})`]] : []),
  ];
  useEffect(() => {
    const node = tip.current;
    const [px, py] = at;
    const { clientWidth: width, clientHeight: height } = frame;
    const left = px + 16 + node.offsetWidth > width ? px - 16 - node.offsetWidth : px + 16;
    const top = Math.min(py + 12, height - node.offsetHeight - 8);
    node.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  });
  return html`<dl class="map-tip" role="tooltip" ref=${tip} data-point=${map.row[point]}>
    ${lines.map(([name, value]) => html`<dt>${name}</dt><dd><bdi>${value}</bdi></dd>`)}</dl>`;
}
