/** The page: a tree of calls, the graph of one, a card of what is chosen, memory over time. */

import "./style.css";
import { available, METRICS, type Metric } from "./colours";
import { Tree, type Item } from "./data/items";
import { load, type Data } from "./data/load";
import { counted, times } from "./data/numbers";
import { PHASES, Program } from "./data/program";
import { el } from "./dom";
import { address, read, type State } from "./state";
import { measured, painted } from "./timing";
import { CardView } from "./views/card";
import { GraphView } from "./views/graph";
import { helpView } from "./views/help";
import { MemoryView } from "./views/memory";
import { SearchView } from "./views/search";
import { TreeView } from "./views/tree";

class Page {
  private readonly tree: Tree;
  private readonly state: State = { item: null, node: null, metric: "bytes" };
  private readonly rows: TreeView;
  private readonly graph: GraphView;
  private readonly card: CardView;
  private readonly memory: MemoryView[];
  private readonly search: SearchView;
  private readonly help = helpView();
  private readonly stage: HTMLElement;
  private readonly strip: HTMLElement;

  constructor(data: Data) {
    const programs = data.programs.map((raw) => new Program(raw));
    this.tree = new Tree(programs, data.difference);
    const open = (item: Item): void => this.open(item);
    const node = (side: number, at: number): void => this.node(side, at);
    const close = (): void => this.close();
    this.rows = new TreeView(this.tree, { open });
    this.graph = new GraphView(this.tree, { open, node, close });
    this.card = new CardView(this.tree, { open, node, close });
    const titles = programs.length > 1 ? ["Memory, first", "Memory, second"] : ["Memory over time"];
    this.memory = programs.map((program, side) => new MemoryView(program, side, titles[side]!, { node }));
    this.search = new SearchView(this.tree, { open, node, leave: () => this.rows.focus() });
    this.stage = el("main", { class: "stage" }, this.rows.element, this.graph.element, this.card.element);
    this.strip = el("div", { class: "strip" }, ...this.memory.map((view) => view.element));
  }

  start(app: HTMLElement): void {
    app.replaceChildren(this.header(), this.stage, this.strip, this.help);
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("popstate", () => this.follow());
    this.follow();
    this.rows.focus();
  }

  private header(): HTMLElement {
    const { programs, difference } = this.tree;
    const names = [...new Set(programs.map((program) => program.name))].join(" and ");
    const only = el("input", { attributes: { type: "checkbox" }, onchange: () => this.rows.differences(only.checked) });
    const colours = el(
      "select",
      { attributes: { "aria-label": "colour by" }, onchange: () => this.colour(colours.value as Metric) },
      ...available(programs).map((metric) => el("option", { attributes: { value: metric } }, metric === "none" ? "no colour" : METRICS[metric].label)),
    );
    return el(
      "header",
      { class: "top" },
      el("h1", {}, names),
      el("p", { class: "summary" }, programs.map(summary).join("  |  ")),
      difference && el("label", { class: "only" }, only, "differences only"),
      el("span", { class: "spring" }),
      this.search.element,
      el("label", { class: "colour" }, el("span", { class: "faint" }, "colour"), colours),
      tool("◐", "dark or light (d)", () => turnTheme()),
      tool("?", "keys (?)", () => this.help.showModal()),
    );
  }

  private open(item: Item): void {
    measured(item.site, () => {
      this.go({ item, node: null });
      this.graph.focus();
    });
  }

  private node(side: number, at: number): void {
    const node = { side, at };
    this.go({ item: this.tree.home(side, at), node });
  }

  private close(): void {
    if (this.state.node) this.go({ item: this.state.item, node: null });
    else if (this.state.item) {
      this.go({ item: null, node: null });
      this.rows.focus();
    }
  }

  private go(next: Pick<State, "item" | "node">): void {
    const before = address(this.tree, this.state);
    this.apply(next);
    const now = address(this.tree, this.state);
    if (now !== before) history.pushState(null, "", now || location.pathname + location.search);
  }

  private follow(): void {
    const found = read(this.tree, location.hash);
    this.apply(found);
    if (found.missing) this.search.ask(found.missing);
  }

  private apply({ item, node }: Pick<State, "item" | "node">): void {
    const isOther = item !== this.state.item;
    this.state.item = item;
    this.state.node = node;
    document.body.classList.toggle("opened", item !== null);
    if (isOther) {
      this.rows.narrow(item !== null);
      this.rows.reveal(item);
      this.graph.show(item, this.state.metric);
    }
    this.graph.element.hidden = item === null;
    this.card.element.hidden = item === null;
    if (node) this.card.showNode(node.side, node.at);
    else if (item) this.card.showCall(item);
    this.graph.choose(node?.side ?? 0, node?.at ?? null);
    this.memory.forEach((view, side) => view.mark(node && node.side === side ? node.at : null));
  }

  private colour(metric: Metric): void {
    this.state.metric = metric;
    this.rows.show(metric);
    this.graph.show(this.state.item, metric);
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    const actions: Record<string, () => void> = {
      "/": () => this.search.focus(),
      "?": () => this.help.showModal(),
      d: () => turnTheme(),
      m: () => this.strip.toggleAttribute("hidden"),
      Escape: () => this.close(),
    };
    const action = actions[event.key];
    if (!action || this.help.open) return;
    event.preventDefault();
    action();
  }
}

function summary(program: Program): string {
  const operations = program.names.map((_, node) => node).filter((node) => program.isOperation(node));
  const parts = PHASES.map((phase, at) => [phase, operations.filter((node) => program.phases[node] === at).length] as const);
  const inPhases = parts.filter(([, count]) => count).map(([phase, count]) => `${counted(count)} ${phase}`);
  return `${times(operations.length, "operation")}: ${inPhases.join(", ")}`;
}

function tool(text: string, title: string, onclick: () => void): HTMLButtonElement {
  return el("button", { class: "tool", title, attributes: { type: "button", "aria-label": title }, onclick }, text);
}

function turnTheme(): void {
  const root = document.documentElement;
  const isDark = root.dataset["theme"] ? root.dataset["theme"] === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset["theme"] = isDark ? "light" : "dark";
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLInputElement || target instanceof HTMLSelectElement;
}

async function main(): Promise<void> {
  const app = document.getElementById("app")!;
  try {
    new Page(await load(document.getElementById("data")!)).start(app);
    painted(() => {
      performance.mark("ready");
      document.documentElement.dataset["ready"] = "true";
    });
  } catch (error) {
    app.replaceChildren(el("p", { class: "empty" }, `This page cannot be shown: ${String(error)}`));
    throw error;
  }
}

void main();
