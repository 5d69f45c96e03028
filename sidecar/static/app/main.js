// Mounts the page.

import { html, render } from "../vendor/preact.js";
import { followFeed } from "./live/feed.js";
import { followLinks } from "./routes.js";
import { Shell } from "./shell.js";
import { follow } from "./state.js";

followLinks();
follow();
followFeed();
render(html`<${Shell} />`, document.getElementById("page"));
