// MoE: the experts that a token was routed to, where the model has any and the row says so.

import { html } from "../../vendor/preact.js";
import { engine } from "../state.js";
import { figure } from "../ui/text.js";

export function Experts({ trace, index }) {
  const record = trace.read().rows.get(trace.stepOf(index))?.record;
  const { top_experts: experts = null, router_entropy: entropy = null } = record ?? {};
  if (!experts?.length && entropy === null) {
    const reason = trace.source === "live" ? engine.value?.capabilities?.reasons?.moe_routing : null;
    return html`<p class="quiet" data-moe="none">No experts are known of this row${reason ? `: ${reason}` : ""}. They are in the records of
      models that route tokens to experts, where the engine reads their routers.</p>`;
  }
  return html`<div class="stack" data-moe="some">
    ${experts?.length ? html`<div><h3>Experts, most first</h3><ol class="chips">${experts.map((expert) => html`<li key=${expert}>${expert}</li>`)}</ol></div>` : null}
    ${entropy !== null && html`<p>Entropy of the router: <b>${figure(entropy)}</b> nats${experts?.length ? `; even among ${experts.length} experts it is ${figure(Math.log(experts.length))}` : ""}.</p>`}
  </div>`;
}
