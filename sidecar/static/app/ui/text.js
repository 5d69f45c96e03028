// Numbers, times, and text of others, as a person reads them.

import { html } from "../../vendor/preact.js";

const whole = new Intl.NumberFormat("en-US");
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
/** 12,345; – if it is not known. */
export const count = (value) => (isNumber(value) ? whole.format(value) : "–");
/** 12.3K */
export const short = (value) => (isNumber(value) ? compact.format(value) : "–");
export const plural = (n, word, words = `${word}s`) => `${count(n)} ${n === 1 ? word : words}`;

/** A share in [0, 1] as 12.3%. */
export function percent(share, digits = 1) {
  if (!isNumber(share)) return "–";
  const least = 0.5 * 10 ** -(digits + 2);
  if (share > 0 && share < least) return `<${(10 ** -digits).toFixed(digits)}%`;
  return `${(100 * share).toFixed(digits)}%`;
}

/** A plain number with three decimals or, if it is large, none. */
export function figure(value, digits = 3) {
  if (!isNumber(value)) return "–";
  if (Number.isInteger(value)) return whole.format(value);
  const size = Math.abs(value);
  if (size < 10 ** -digits) return value.toExponential(1);
  return size >= 1000 ? whole.format(Math.round(value)) : value.toFixed(size >= 100 ? 1 : digits);
}

/** 1,234 B, 1.2 KB, 3.4 MB (powers of 1,000). */
export function byteSize(bytes) {
  if (!isNumber(bytes)) return "–";
  if (bytes < 1000) return `${Math.round(bytes)} B`;
  const power = Math.min(4, Math.floor(Math.log10(bytes) / 3));
  return `${(bytes / 1000 ** power).toPrecision(3)} ${["", "KB", "MB", "GB", "TB"][power]}`;
}

/** 45 ms, 1.4 s, 12 s, 3 min, 5.2 h, 3 days */
export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return plural(Math.round(seconds / 86400), "day");
}

/** How long ago a time (ISO text, or seconds since 1970) was. */
export function ago(time, now = Date.now()) {
  const at = isNumber(time) ? 1000 * time : Date.parse(time);
  if (!Number.isFinite(at)) return "–";
  const seconds = (now - at) / 1000;
  return seconds < 1 ? "now" : `${duration(seconds)} ago`;
}

/** 2026-01-10 04:02:11 UTC of ISO text or of seconds since 1970. */
export function moment(time) {
  const at = isNumber(time) ? 1000 * time : Date.parse(time);
  return Number.isFinite(at) ? `${new Date(at).toISOString().slice(0, 19).replace("T", " ")} UTC` : "–";
}

/** 2026-01-10T04-02-11-2 as 2026-01-10 04:02:11 (2) */
export function runName(runId) {
  const found = /^(\d{4}-\d{2}-\d{2})T(\d{2})-(\d{2})-(\d{2})(?:-(\d+))?$/.exec(runId ?? "");
  if (!found) return shown(runId ?? "–");
  const [, day, hour, minute, second, suffix] = found;
  return `${day} ${hour}:${minute}:${second}${suffix ? ` (${suffix})` : ""}`;
}

export const spaced = (name) => String(name).replaceAll("_", " ");
export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
export const listed = (words) => new Intl.ListFormat("en-GB").format(words);

// Control characters and the marks that turn the direction of what follows, made visible.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;
const picture = (character) => {
  const code = character.codePointAt(0);
  // The sign of the token view; fonts often lack that of Unicode's control pictures.
  if (character === "\n") return "⏎";
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return code === 0x7f ? "␡" : `‹${code.toString(16)}›`;
};

/** Text of others on one line: control characters as pictures, at most `most` characters. */
export function shown(text, most = 500) {
  const string = String(text ?? "");
  const cut = string.length > most ? `${string.slice(0, most)}…` : string;
  return cut.replace(HIDDEN, picture);
}

/** Text of others: `shown`, in an element that keeps its direction to itself. */
export const Given = ({ text, most = 500, ...more }) =>
  html`<bdi class="given" ...${more}>${shown(text, most)}</bdi>`;
