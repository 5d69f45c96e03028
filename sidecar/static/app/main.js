// Mounts the page.

import { html, render } from "../vendor/preact.js";
import { followLinks } from "./routes.js";
import { Shell } from "./shell.js";
import { follow } from "./state.js";

followLinks();
follow();
render(html`<${Shell} />`, document.getElementById("page"));
