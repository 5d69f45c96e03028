// The text of a token, as it is shown: nothing in it can break a line, turn a direction or hide.

import { shown } from "../ui/text.js";

// More of one token is in the lens.
const MOST_CHARACTERS = 48;

/** What stands for a token in the flow of the text. */
export function tokenText(text, index) {
  if (text === null || text === undefined) return `‹${index}›`;
  if (text === "") return "∅";
  const marked = text.replaceAll("\r\n", "⏎").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return shown(marked, MOST_CHARACTERS);
}

/** Line breaks after a token: 0, 1, or 2 for an empty line. */
export function breaksAfter(text) {
  if (!text?.includes("\n")) return 0;
  return text.indexOf("\n") === text.lastIndexOf("\n") ? 1 : 2;
}

/** A token in a sentence or a label: with its white space made visible. */
export function named(text, index) {
  const made = tokenText(text, index);
  return made.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}
