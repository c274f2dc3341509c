/** The pictures of the documentation: `node tests/screenshots.mjs PAGES IMAGES`. */

import { mkdirSync, statSync } from "node:fs";
import { join } from "node:path";
import { HAS_CHROMIUM, launched, opened, row } from "./browser.mjs";

const MOST_BYTES = 300_000;
const [PAGES, IMAGES] = process.argv.slice(2);

const PICTURES = [
  { name: "tree", hash: "", size: { width: 1280, height: 640 } },
  {
    name: "call",
    hash: "",
    size: { width: 1480, height: 860 },
    steps: async (page) => {
      await row(page, "attention").click();
      await page.keyboard.press("m");
      await page.keyboard.press("f");
    },
  },
  { name: "memory", hash: "#node=gelu_3", size: { width: 1480, height: 760 }, scheme: "dark" },
];

async function taken(context, { name, hash, size, scheme = "light", steps }) {
  const { page, faults } = await opened(context, join(PAGES, "gpt.html"), hash);
  await page.emulateMedia({ colorScheme: scheme });
  await page.setViewportSize(size);
  await steps?.(page);
  await page.evaluate(() => document.activeElement?.blur());
  await page.waitForTimeout(300);
  const path = join(IMAGES, `${name}.png`);
  await page.screenshot({ path });
  if (faults.length) throw new Error(faults.join("\n"));
  if (statSync(path).size > MOST_BYTES) throw new Error(`${path} is larger than ${MOST_BYTES} bytes`);
  await page.close();
}

if (HAS_CHROMIUM) {
  mkdirSync(IMAGES, { recursive: true });
  const context = await launched();
  for (const picture of PICTURES) await taken(context, picture);
  await context.close();
} else process.stdout.write("no Chromium here: no pictures are taken\n");
