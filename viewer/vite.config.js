import { createHash } from "node:crypto";
import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { defineConfig } from "vite";

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
