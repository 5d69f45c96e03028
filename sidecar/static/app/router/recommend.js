// Settings that fit what the model does now, and why. They are conventions: nobody has measured that
// they make answers better.

/** What to capture in a zone, and why. The sampling of a zone or cluster is the sidecar's own hint. */
const CAPTURE = {
  syntax_floor: ["fingerprint", "it looks at the nearest tokens: links would say little, and 20 numbers are enough"],
  semantic_bridge: ["raw", "it draws on sentences nearby: links show which"],
  long_range: ["raw", "it retrieves from far back: links show the source"],
  structure_ripple: ["sketch", "it repeats a structure: hubs show what it comes back to"],
  diffuse: ["sketch", "its attention is spread out: a few links would hold little of it"],
};

/**
 * The recommendation for some records: the commonest hint of those in the commonest zone.
 * @param {{zone: string, confidence: number, hint: {temperature: number, top_p: number, reason: string} | null}[]} records
 * @returns {{temperature: number | null, top_p: number | null, reason: string | null, zone: string, share: number,
 *   hintShare: number, mode: string, why: string} | null} null without records. share: of the records in
 *   this zone; hintShare: of those that have this hint
 */
export function recommend(records) {
  const [zone, inZone] = commonest(records, (record) => record.zone);
  if (!inZone) return null;
  const [, hinted] = commonest(inZone.filter(({ hint }) => hint), ({ hint }) => `${hint.temperature} ${hint.top_p} ${hint.reason}`);
  const hint = hinted?.[0].hint ?? null;
  const [mode, why] = CAPTURE[zone] ?? ["raw", "links show where it looks"];
  return {
    temperature: hint?.temperature ?? null, top_p: hint?.top_p ?? null, reason: hint?.reason ?? null,
    zone, share: inZone.length / records.length, hintShare: hinted ? hinted.length / inZone.length : 0, mode, why,
  };
}

/** The commonest key of some records, and the records that have it. */
function commonest(records, keyOf) {
  const groups = Map.groupBy(records, keyOf);
  return [...groups].sort((a, b) => b[1].length - a[1].length)[0] ?? [null, null];
}

/** Mean evidence of each zone over records, and their mean confidence; null without records. */
export function meanEvidence(records, zones) {
  const known = records.filter(({ evidence }) => evidence);
  if (!known.length) return null;
  const mean = (pick) => known.reduce((sum, record) => sum + (pick(record) || 0), 0) / known.length;
  return {
    zones: zones.map((zone) => [zone, mean(({ evidence }) => evidence[zone])]),
    confidence: mean(({ confidence }) => confidence), rows: known.length,
  };
}
