// Builds sidecar/static/vendor: one ES module for each file of entries/, licences and versions.
// In this folder: npm ci && npm run build

import { build } from "esbuild";
import { copyFile, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const HERE = dirname(fileURLToPath(import.meta.url));
const OUT = join(HERE, "../../sidecar/static/vendor");
// For tools that read lock files; npm needs no address of a registry in it.
const LOCK = join(HERE, "package-lock.json");

/** Folder and name of the package that an input of the bundle belongs to. */
function packageOf(input) {
  const found = input.match(/^(.*node_modules\/((?:@[^/]+\/)?[^/]+))\//);
  return found && { folder: join(HERE, found[1]), name: found[2] };
}

/** What a package says of itself, and the text of its licence. */
async function about({ folder, name }) {
  const { version, license } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
  const file = (await readdir(folder)).find((one) => /^licen[cs]e/i.test(one));
  const text = file ? await readFile(join(folder, file), "utf8") : `Licence: ${license}\n`;
  return { name, version, license, text: text.trim().replaceAll("\r\n", "\n") };
}

async function stripRegistry() {
  const lock = JSON.parse(await readFile(LOCK, "utf8"));
  for (const entry of Object.values(lock.packages)) delete entry.resolved;
  await writeFile(LOCK, `${JSON.stringify(lock, null, 2)}\n`);
}

await rm(OUT, { recursive: true, force: true });
await mkdir(OUT, { recursive: true });
const entries = (await readdir(join(HERE, "entries"))).sort();
const result = await build({
  entryPoints: entries.map((name) => join(HERE, "entries", name)),
  absWorkingDir: HERE, outdir: OUT, bundle: true, format: "esm", minify: true, target: "es2022",
  metafile: true, legalComments: "none", charset: "utf8", logLevel: "warning",
});
await copyFile(join(HERE, "node_modules/uplot/dist/uPlot.min.css"), join(OUT, "uplot.css"));

const packages = new Map();
const modules = {};
for (const [output, { inputs, bytes }] of Object.entries(result.metafile.outputs)) {
  const inside = new Set();
  for (const input of Object.keys(inputs)) {
    const found = packageOf(input);
    if (!found) continue;
    packages.set(found.name, found);
    inside.add(found.name);
  }
  modules[basename(output)] = { bytes, packages: [...inside].sort() };
}
const known = await Promise.all([...packages.values()].map(about));
known.sort((a, b) => (a.name < b.name ? -1 : 1));
const versions = {
  packages: Object.fromEntries(known.map(({ name, version, license }) => [name, { version, license }])),
  modules,
};
await writeFile(join(OUT, "VERSIONS.json"), `${JSON.stringify(versions, null, 2)}\n`);
const rule = "=".repeat(78);
await writeFile(join(OUT, "LICENSES.txt"), known.map(({ name, version, license, text }) =>
  `${rule}\n${name} ${version} (${license})\n${rule}\n\n${text}\n`).join("\n"));
await stripRegistry();
for (const [name, { bytes }] of Object.entries(modules)) console.log(name, bytes);
