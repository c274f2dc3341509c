/** How fast a page is: `node tests/measure.mjs PAGE` prints milliseconds as JSON; nothing where there is no Chromium. */

import { HAS_CHROMIUM, launched, opened } from "./browser.mjs";

const MOST_CALLS = 60;

/** Milliseconds until the tree is painted, in a browser that knows nothing of the page. */
async function painted(file) {
  const context = await launched();
  const { page } = await opened(context, file);
  const ready = await page.evaluate(() => performance.getEntriesByName("ready")[0].startTime);
  await context.close();
  return ready;
}

/** Milliseconds until each call is painted whose graph is not that of one before. */
async function expansions(file) {
  const context = await launched();
  const { page } = await opened(context, file);
  await page.evaluate(async (most) => {
    const rested = () => new Promise((done) => setTimeout(done, 60));
    const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    for (let at = 0; at < most; at += 1) {
      const tree = document.querySelector(".tree-scroll");
      tree.focus();
      press("Enter");
      await rested();
      const folded = [...document.querySelectorAll(".legend .link")].find((each) => each.textContent.startsWith("show equal"));
      folded?.click();
      if (folded) await rested();
      tree.focus();
      const before = tree.getAttribute("aria-activedescendant");
      press("ArrowDown");
      if (tree.getAttribute("aria-activedescendant") === before) break;
    }
  }, MOST_CALLS);
  const found = await page.evaluate(() => performance.getEntriesByName("open").map((entry) => [entry.detail, entry.duration]));
  await context.close();
  return found;
}

async function main(file) {
  if (!HAS_CHROMIUM) return {};
  const paint = [];
  for (let time = 0; time < 3; time += 1) paint.push(await painted(file));
  return { paint, open: await expansions(file) };
}

process.stdout.write(JSON.stringify(await main(process.argv[2])));
