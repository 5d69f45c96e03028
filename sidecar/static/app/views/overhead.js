// View Overhead: what capture costs in time and bytes.

import { html } from "../../vendor/preact.js";
import { Answers, LastAnswer } from "../overhead/answers.js";
import { Modes } from "../overhead/modes.js";
import { Engine, Sidecar } from "../overhead/server.js";
import { Imported } from "../overhead/traces.js";
import { ImportButton, OpenedFile } from "../trace/opened.js";

export default function View() {
  return html`
    <div class="view-head"><h1>Overhead</h1><p class="says">What capture costs, in time and in bytes.</p>
      <div class="row"><${ImportButton} /></div></div>
    <${OpenedFile} />
    <div class="grid overhead">
      <${LastAnswer} width=${6} />
      <${Engine} width=${6} />
      <${Modes} width=${12} />
      <${Answers} width=${8} />
      <${Sidecar} width=${4} />
      <${Imported} width=${12} />
    </div>`;
}
