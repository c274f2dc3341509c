/** A page in Chromium, without network, and what goes wrong in it. */

import { existsSync, mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

export const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
export const HAS_CHROMIUM = existsSync(CHROMIUM);

const FLAGS = [
  "--no-sandbox",
  "--disable-gpu",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];

export async function launched() {
  const folder = mkdtempSync(join(tmpdir(), "whence-chromium-"));
  return chromium.launchPersistentContext(folder, {
    executablePath: CHROMIUM,
    headless: true,
    offline: true,
    args: FLAGS,
    viewport: { width: 1440, height: 900 },
  });
}

/** Open a file; `faults` gathers errors, messages of the console, and whatever was asked for but the file. */
export async function opened(context, file, hash = "") {
  const page = await context.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("console", (message) => faults.push(message.text()));
  page.on("request", (request) => {
    if (!request.url().startsWith(pathToFileURL(file).href)) faults.push(`asked for ${request.url()}`);
  });
  page.on("dialog", (dialog) => {
    faults.push(`a dialog: ${dialog.message()}`);
    void dialog.dismiss();
  });
  await page.goto(pathToFileURL(file).href + hash);
  await page.waitForSelector("html[data-ready]");
  return { page, faults };
}

/** The row of the tree with this name. */
export function row(page, name) {
  return page.locator(".row").filter({ has: page.locator(".label", { hasText: new RegExp(`^${escaped(name)}$`) }) });
}

function escaped(text) {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}
