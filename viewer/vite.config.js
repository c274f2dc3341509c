import { createHash } from "node:crypto";
import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { defineConfig } from "vite";

const BUNDLED = ["@dagrejs/dagre", "@dagrejs/graphlib"];
const PAGE = new URL("../src/whence/viewer/page.html", import.meta.url);

/** One file: script and style go into the page, and the policy names both by their hashes. */
function onePage() {
  return {
    name: "one-page",
    enforce: "post",
    generateBundle(_options, bundle) {
      const files = Object.values(bundle);
      const script = files.find((file) => file.type === "chunk").code.replaceAll("</script", "<\\/script").trim();
      const style = String(files.find((file) => file.fileName.endsWith(".css")).source).trim();
      const policy = [
        "default-src 'none'",
        `script-src ${hash(script)}`,
        `style-src ${hash(style)}`,
        "base-uri 'none'",
        "form-action 'none'",
      ].join("; ");
      const page = readFileSync(new URL("index.html", import.meta.url), "utf8")
        .replace("POLICY", () => policy)
        .replace("LICENSES", () => BUNDLED.map(license).join("\n\n"))
        .replace('<link rel="stylesheet" href="/src/style.css" />', () => `<style>${style}</style>`)
        .replace('<script type="module" src="/src/main.ts"></script>', () => `<script type="module">${script}</script>`);
      for (const name of Object.keys(bundle)) delete bundle[name];
      writeFileSync(process.env.WHENCE_PAGE ?? PAGE, page);
    },
    closeBundle() {
      rmSync(new URL("dist", import.meta.url), { recursive: true, force: true });
    },
  };
}

/** The terms of a library that is in the page: they ask to be where it is. */
function license(name) {
  const text = readFileSync(new URL(`node_modules/${name}/LICENSE`, import.meta.url), "utf8").trim();
  if (text.includes("--")) throw new Error(`the licence of ${name} cannot stand in a comment`);
  return `${name}\n\n${text}`;
}

function hash(text) {
  return `'sha256-${createHash("sha256").update(text).digest("base64")}'`;
}

export default defineConfig({
  build: {
    target: "es2023",
    modulePreload: false,
    cssCodeSplit: false,
    rolldownOptions: { input: "src/main.ts", output: { format: "iife" } },
  },
  plugins: [onePage()],
});
