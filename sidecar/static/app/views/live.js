// View Live.

import { html } from "../../vendor/preact.js";
import { Empty } from "../ui/states.js";

export default function View() {
  return html`<div class="view-head"><h1>Live</h1></div><${Empty} title="Nothing here yet">This view is being built.<//>`;
}
