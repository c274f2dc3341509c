/** The page in a browser: `PAGES` is the folder that `pages.py` filled. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import { HAS_CHROMIUM, launched, opened, row } from "./browser.mjs";

const PAGES = process.env.PAGES;
const expected = JSON.parse(readFileSync(join(PAGES, "expected.json"), "utf8"));
const file = (name) => join(PAGES, `${name}.html`);

test("the committed page is what viewer/ builds", () => {
  const built = join(mkdtempSync(join(tmpdir(), "whence-build-")), "page.html");
  const folder = fileURLToPath(new URL("..", import.meta.url));
  execFileSync("npx", ["vite", "build", "--logLevel", "error"], { cwd: folder, env: { ...process.env, WHENCE_PAGE: built } });
  const committed = fileURLToPath(new URL("../../src/whence/viewer/page.html", import.meta.url));
  assert.ok(readFileSync(built).equals(readFileSync(committed)), "run npm run build in viewer/, and commit the page");
});

describe("in a browser", { skip: !HAS_CHROMIUM && "no Chromium" }, () => {
  let context;
  before(async () => (context = await launched()));
  after(() => context.close());

  /** Run a test on a page, which has to have no faults at its end. */
  const on = (what, name, check, hash = "") =>
    test(what, async () => {
      const { page, faults } = await opened(context, file(name), hash);
      await check(page);
      assert.deepEqual(faults, []);
      await page.close();
    });

  on("it opens with the tree of calls and the figures of the report", "gpt", async (page) => {
    assert.equal(await page.locator("h1").textContent(), "GPT");
    const root = await row(page, "(program)").locator(".number").allTextContents();
    const [total] = expected.rows;
    assert.deepEqual(root.slice(0, 2), [String(total.forward), String(total.backward)]);
    assert.ok(root.includes("5.22 G") && root.includes("534 M") && root.includes("41.6 M"));
    const folded = row(page, "blocks.0 … 6");
    assert.equal(await folded.locator(".fold").textContent(), "× 7");
    await folded.locator(".fold").click();
    assert.equal(await row(page, "blocks.6").count(), 1);
  });

  on("a call opens as forward and backward, with what is kept between them", "gpt", async (page) => {
    await row(page, "head").click();
    assert.deepEqual((await page.locator(".column-head").allTextContents()).map((text) => text.slice(0, 8)), ["forward ", "backward"]);
    assert.ok((await page.locator(".box.operation").count()) >= 12);
    assert.ok((await page.locator(".across .kept").count()) >= 1);
    await page.locator(".box.operation", { hasText: "mm" }).first().click();
    const card = await page.locator(".card").textContent();
    for (const part of ["aten.mm", "exact", "demo.py:", "head", "forward"]) assert.ok(card.includes(part), part);
    await page.locator(".card dl .link", { hasText: /^head$/ }).first().click();
    assert.match(page.url(), /#call=head$/);
  });

  on("calls inside are boxes that lead inside, and the way back works", "gpt", async (page) => {
    await row(page, "(root)").click();
    await page.locator(".box.call", { hasText: "blocks.0 … 6" }).first().click();
    assert.match(page.url(), /#call=blocks\.0$/);
    await page.locator(".box.call .title", { hasText: /^mlp$/ }).first().click();
    assert.match(page.url(), /#call=blocks\.0\.mlp$/);
    await page.goBack();
    assert.equal(await page.locator(".crumbs strong").textContent(), "blocks.0");
    await page.keyboard.press("Escape");
    assert.equal(await page.locator(".graphs").isVisible(), false);
  });

  on("search finds names, paths and operators", "gpt", async (page) => {
    await page.keyboard.press("/");
    await page.keyboard.type("blocks.3.mlp");
    await page.keyboard.press("Enter");
    assert.equal(await page.locator(".crumbs strong").textContent(), "mlp");
    await page.keyboard.press("/");
    await page.keyboard.type("gelu_backward");
    assert.match(await page.locator(".hits").textContent(), /7 nodes/);
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("Enter");
    assert.match(await page.locator(".card .kind").textContent(), /aten\.gelu_backward/);
    await page.keyboard.press("/");
    await page.keyboard.type("no such thing");
    assert.match(await page.locator(".hits").textContent(), /Nothing is called so/);
    await page.locator("input[type=search]").fill("a :: b :: sideways");
    assert.match(await page.locator(".hits").textContent(), /the phases are forward, backward, optimizer/);
  });

  on("patterns select what program.select selects", "gpt", async (page) => {
    for (const [pattern, names] of Object.entries(expected.selected)) {
      await page.locator("input[type=search]").fill(pattern.includes("::") || /[*?[=]/.test(pattern) ? pattern : `${pattern} :: *`);
      const head = await page.locator(".hits-head").textContent();
      assert.equal(Number(head.replaceAll(",", "").match(/^\d+/)[0]), names.length, pattern);
      const shown = await page.locator(".hit code").allTextContents();
      assert.deepEqual(shown, names.slice(0, 200), pattern);
    }
  });

  for (const [name, patterns] of Object.entries(expected.words))
    on(`every word of program.select is one of the page's: ${name}`, name, async (page) => {
      const field = page.locator("input[type=search]");
      for (const [pattern, names] of Object.entries(patterns)) {
        const isWord = !/::|=|[*?[]|@\d+$/.test(pattern);
        await field.fill(isWord ? `${pattern} :: *` : pattern);
        const [hits, faults] = await page.evaluate(() => [
          [...document.querySelectorAll(".hits code[data-node]")].map((each) => each.dataset.node),
          document.querySelectorAll(".hits > .empty").length,
        ]);
        if (isWord && !pattern.trim()) continue;
        assert.deepEqual(hits, (names ?? []).slice(0, 200), pattern);
        assert.equal(faults, names === null ? 1 : 0, pattern);
        if (names) assert.match(await page.locator(".hits-head").textContent(), new RegExp(`^${names.length} `), pattern);
      }
    });

  on("nested graphs open as calls do", "nested", async (page) => {
    await row(page, "(root)").click();
    await page.locator(".box.call .title", { hasText: /^true_graph_0$/ }).click();
    assert.match(page.url(), /#call=\(root\)&graph=true_graph_0$|#call=%28root%29&graph=true_graph_0$/);
    assert.equal(await page.locator(".crumbs strong").textContent(), "true_graph_0");
    assert.match(await page.locator(".card").textContent(), /is run by\s*cond/);
    const titles = await page.locator(".box.operation .title").allTextContents();
    assert.deepEqual(titles.map((title) => title.split(" ")[0]).sort(), ["cond", "getitem", "gt.Scalar", "mean"]);
    assert.deepEqual((await page.locator(".box.port .title").allTextContents()).sort(), ["arg_0", "returned"]);
    for (const key of ["ArrowDown", "ArrowDown", "ArrowDown"]) await page.keyboard.press(key);
    assert.equal(await page.locator(".box.current").count(), 1);
    await page.locator(".box.call .title", { hasText: /^true_graph_0$/ }).click();
    assert.deepEqual(await page.locator(".crumbs").textContent(), "(program)›(root)›true_graph_0›true_graph_0");
    await page.locator(".box.operation", { hasText: "sin" }).click();
    assert.equal(await page.locator(".card h2").textContent(), "sin");
    assert.match(page.url(), /graph=true_graph_0%2Ftrue_graph_0&node=true_graph_0%2Ftrue_graph_0%2Fsin$/);
    await page.locator(".card dl .link", { hasText: /^true_graph_0$/ }).first().click();
    await page.locator(".graph-scroll").focus();
    await page.keyboard.press("Backspace");
    await page.keyboard.press("Backspace");
    assert.equal(await page.locator(".crumbs strong").textContent(), "(root)");
  });

  on("nested graphs are rows of the tree, with figures of their own", "nested", async (page) => {
    const inner = row(page, "true_graph_0").first();
    assert.equal(await inner.locator(".type").textContent(), "nested graph");
    assert.ok(Number(await inner.locator(".number").first().textContent()) >= 4);
    await inner.click();
    assert.equal(await page.locator(".crumbs strong").textContent(), "true_graph_0");
    await page.emulateMedia({ media: "print" });
    assert.ok(await page.locator(".box.operation", { hasText: "mean" }).isVisible());
  });

  on("search leads into a nested graph", "nested", async (page) => {
    await page.keyboard.press("/");
    await page.keyboard.type("map_impl");
    await page.keyboard.press("Enter");
    assert.match(await page.locator(".card").textContent(), /graphs\s*body_graph_0/);
    await page.keyboard.press("/");
    await page.keyboard.type(":: aten.tanh");
    await page.keyboard.press("Enter");
    assert.equal(await page.locator(".crumbs strong").textContent(), "body_graph_0");
    assert.equal(await page.locator(".box.current .title").textContent(), "tanh");
  });

  on("an address opens a node of a nested graph", "nested", async (page) => {
    assert.equal(await page.locator(".crumbs strong").textContent(), "true_graph_0");
    assert.equal(await page.locator(".card h2").textContent(), "sin");
  }, "#node=true_graph_0%2Ftrue_graph_0%2Fsin");

  on("an address opens a nested graph", "step", async (page) => {
    assert.equal(await page.locator(".crumbs strong").textContent(), "scan_combine_graph_0");
    assert.ok((await page.locator(".box.operation").count()) >= 2);
  }, "#call=(program)&graph=scan_combine_graph_0");

  on("keys lead through tree and graph", "gpt", async (page) => {
    for (const key of ["ArrowDown", "ArrowDown", "Enter"]) await page.keyboard.press(key);
    assert.match(page.url(), /#call=tokens$/);
    await page.keyboard.press("ArrowDown");
    assert.equal(await page.locator(".box.current").count(), 1);
    await page.keyboard.press("Enter");
    assert.match(page.url(), /&node=/);
    await page.keyboard.press("Backspace");
    assert.match(page.url(), /#call=\(root\)$|#call=\(root\)|%28root%29/);
    await page.keyboard.press("?");
    assert.ok(await page.locator("dialog.help").isVisible());
    await page.keyboard.press("Escape");
    await page.keyboard.press("d");
    assert.equal(await page.locator("html").getAttribute("data-theme"), "dark");
  });

  on("an address opens a node", "gpt", async (page) => {
    assert.equal(await page.locator(".card h2").textContent(), "addmm_4");
    assert.equal(await page.locator(".crumbs strong").textContent(), "qkv");
    assert.equal(await page.locator(".box.current .title").textContent(), "addmmbias");
  }, "#node=addmm_4");

  on("an address opens a call, and one that leads nowhere the tree", "gpt", async (page) => {
    assert.equal(await page.locator(".crumbs strong").textContent(), "mlp");
    await page.goto(`${page.url().split("#")[0]}#call=nowhere&node=%E0%A4%A`);
    await page.reload();
    await page.waitForSelector("html[data-ready]");
    assert.equal(await page.locator(".graphs").isVisible(), false);
    assert.match(await page.locator(".hits").textContent(), /Nothing is called so/);
  }, "#call=blocks.3.mlp");

  on("memory over time leads to the node", "gpt", async (page) => {
    assert.match(await page.locator(".told").textContent(), new RegExp(`^peak 94.5 MB while ${expected.peak} runs`));
    await page.locator(".plot").focus();
    await page.keyboard.press("ArrowLeft");
    await page.keyboard.press("ArrowRight");
    await page.keyboard.press("Enter");
    assert.equal(await page.locator(".card h2").textContent(), expected.peak);
    await page.locator(".plot").click({ position: { x: 500, y: 60 } });
    assert.notEqual(await page.locator(".card h2").textContent(), expected.peak);
  });

  on("boxes are coloured by numbers of one's own", "gpt", async (page) => {
    await page.locator("select").selectOption("values");
    assert.ok((await page.locator(".tree-head").textContent()).includes("your values"));
    await row(page, "norm").click();
    await page.locator(".box.operation").first().waitFor();
    const heats = await page.locator(".box.operation").evaluateAll((boxes) => boxes.map((box) => Number(box.style.getPropertyValue("--heat"))));
    assert.equal(Math.max(...heats), 1);
    await page.locator("select").selectOption("time");
    assert.match(await page.locator(".legend").textContent(), /time, at leastup to/);
  });

  on("hostile names are text, and nothing of them runs", "hostile", async (page) => {
    const labels = await page.locator(".row .label").allTextContents();
    for (const name of expected.hostile) assert.ok(labels.includes(name), name);
    await row(page, expected.hostile[0]).click();
    assert.equal(await page.locator(".card h2").textContent(), expected.hostile[0]);
    assert.ok((await page.locator(".graph").textContent()).includes(expected.hostile[1]));
    await page.keyboard.press("/");
    await page.keyboard.type("<img");
    assert.ok((await page.locator(".hits").textContent()).includes(expected.hostile[0]));
    assert.equal(await page.locator("img").count(), 0);
    assert.equal(await page.evaluate(() => "hacked" in window), false);
  });

  test("a script that is not the page's own does not run", async () => {
    const page = await context.newPage();
    await page.goto(`file://${file("hostile")}`);
    await page.waitForSelector("html[data-ready]");
    await page.evaluate(() => {
      const script = document.createElement("script");
      script.textContent = "window.hacked = 1";
      document.body.append(script);
    });
    assert.equal(await page.evaluate(() => "hacked" in window), false);
    await page.close();
  });

  on("two programs are one tree with their differences", "compare", async (page) => {
    const marks = await page.locator(".row.mark-came .label").allTextContents();
    assert.ok(marks.length >= 2 && marks.every((name) => name === "norm"));
    await page.locator(".only input").check();
    assert.equal(await row(page, "up").count(), 0);
    await row(page, "act").first().click();
    assert.equal(await page.locator(".pane").count(), 2);
    assert.ok((await page.locator(".box.removed").count()) >= 2 && (await page.locator(".box.added").count()) >= 2);
    const card = await page.locator(".changes").textContent();
    assert.ok(card.includes("−aten.gelu.default") && card.includes("+aten.relu.default"), card);
  });

  on("operations of another shape are changes, and marked on both sides", "widths", async (page) => {
    await row(page, "0").first().click();
    assert.ok((await page.locator(".box.moved").count()) >= 2);
    assert.equal(await page.locator(".box.removed, .box.added").count(), 0);
    const card = await page.locator(".changes").textContent();
    assert.ok(card.includes("~aten.linear.default f32[2, 8], now f32[2, 12]"), card);
  });

  on("the passes that a program went through open to what they changed", "passed", async (page) => {
    await row(page, "(program)").click();
    const passes = page.locator(".history details");
    const heads = await passes.locator("summary").allTextContents();
    assert.equal(heads.length, 3);
    assert.match(heads[0], /^decompose \d+ gone, \d+ new/);
    assert.match(heads[1], /^dead code 0 gone, 0 new$/);
    assert.ok(heads[2].startsWith(expected.hostile[0]) && heads[2].includes("10 gone, 10 new, 1 edited"), heads[2]);
    await passes.last().locator("summary").click();
    const changes = await passes.last().locator("li").allTextContents();
    assert.ok(changes.includes("+aten.mean.dim × 10 in (root), 4, 3.down, 3.up and 6 more") && changes.includes("~aten.full_like.default in (root)"), changes.join());
    assert.equal(await page.evaluate(() => "hacked" in window), false);
  });

  on("a program of no operation says so", "empty", async (page) => {
    await row(page, "(program)").click();
    assert.match(await page.locator(".graph-scroll").textContent(), /no operations of its own/);
  });

  on("a long graph is shown in windows", "unrolled", async (page) => {
    await row(page, "(program)").click();
    assert.match(await page.locator(".legend").textContent(), /forward 1–48 of 300 boxes/);
    await page.locator(".legend .link", { hasText: "later" }).click();
    assert.match(await page.locator(".legend").textContent(), /forward 49–96 of 300 boxes/);
    await page.goto(`${page.url().split("#")[0]}#node=sin_120`);
    await page.reload();
    await page.waitForSelector("html[data-ready]");
    assert.equal(await page.locator(".box.current .title").textContent(), "sin");
  });

  on("28,000 operations are there, in less than 6 MB", "large", async (page) => {
    assert.ok(statSync(file("large")).size < 6e6);
    assert.ok(expected.operations > 28_000);
    assert.ok((await page.locator(".summary").textContent()).startsWith(`${expected.operations.toLocaleString("en-US")} operations`));
    await row(page, "layers.0 … 135").locator(".fold").click();
    await page.locator(".tree-scroll").evaluate((element) => (element.scrollTop = element.scrollHeight));
    await row(page, "layers.135").click();
    assert.ok((await page.locator(".box.call").count()) >= 8);
    assert.ok((await page.locator(".row").count()) < 80);
  });
});
