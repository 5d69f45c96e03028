// In the place of the page's routes.js: the state of the view, in memory. A frame has no address.

import { signal } from "../vendor/preact.js";

export const query = signal({});

export function setQuery(changes) {
  query.value = Object.fromEntries(Object.entries({ ...query.peek(), ...changes }).filter(([, value]) => value !== null));
}
