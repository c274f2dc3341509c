/** The tree of calls as a table; only the rows that are in sight are there. */

import type { Metric } from "../colours";
import type { Item, Run, Tree } from "../data/items";
import { upTo } from "../data/items";
import { el } from "../dom";
import { FONT, textWidth } from "../graph/layout";
import { cellText, figuresOf, heatOf, type Figure } from "./columns";

const ROW = 28;
const BEYOND = 12;
const FIRST_ROWS = 28;
const MOST_PRINTED = 4000;

interface Row {
  run: Run;
  item: Item;
  level: number;
  parent: number;
}

export interface TreeActions {
  open: (item: Item) => void;
}

export class TreeView {
  readonly element: HTMLElement;
  private readonly head = el("div", { class: "tree-head", attributes: { role: "row" } });
  private readonly body = el("div", { class: "tree-body", attributes: { role: "rowgroup" } });
  private readonly scroller: HTMLElement;
  private rows: Row[] = [];
  private readonly expanded = new Set<Item>();
  private readonly unfolded = new Set<Item>();
  private cursor = 0;
  private open: Item | null = null;
  private figures: Figure[] = [];
  private metric: Metric = "bytes";
  private isNarrow = false;
  private onlyDifferences = false;

  constructor(
    private readonly tree: Tree,
    private readonly actions: TreeActions,
  ) {
    this.scroller = el(
      "div",
      { class: "tree-scroll", attributes: { tabindex: 0, role: "treegrid", "aria-label": "calls of modules" }, onkeydown: (event) => this.key(event) },
      this.head,
      this.body,
    );
    this.scroller.addEventListener("scroll", () => this.paint(), { passive: true });
    new ResizeObserver(() => this.paint()).observe(this.scroller);
    window.addEventListener("beforeprint", () => this.paint(true));
    window.addEventListener("afterprint", () => this.paint());
    this.element = el("section", { class: "tree" }, this.scroller);
    this.expandAtFirst();
    this.show("bytes");
  }

  /** Colour by another figure. */
  show(metric: Metric): void {
    this.metric = metric;
    this.figures = figuresOf(this.tree, metric);
    this.rebuild();
  }

  /** Make room for a graph: the name and one figure are left. */
  narrow(isNarrow: boolean): void {
    if (this.isNarrow === isNarrow) return;
    this.isNarrow = isNarrow;
    this.rebuild();
  }

  differences(only: boolean): void {
    this.onlyDifferences = only;
    this.rebuild();
  }

  /** Show where an item is, with everything around it expanded. */
  reveal(item: Item | null): void {
    this.open = item;
    for (let around = item?.parent; around; around = around.parent) this.expanded.add(around);
    for (let each = item; each?.parent; each = each.parent) {
      const run = this.tree.runs(each.parent.children).find((found) => within(found, each!));
      if (run && run.times > 1 && run.first !== each) this.unfolded.add(run.first);
    }
    this.rebuild();
    const at = this.rows.findIndex((row) => row.item === item);
    if (at >= 0) this.move(at);
  }

  focus(): void {
    this.scroller.focus({ preventScroll: true });
  }

  /** As deep as all rows fit on a screen. */
  private expandAtFirst(): void {
    let level = [this.tree.root];
    let shown = 1;
    while (level.length) {
      const runs = level.map((item) => [item, this.tree.runs(item.children)] as const);
      shown += runs.reduce((sum, [, found]) => sum + found.length, 0);
      if (shown > FIRST_ROWS && level[0] !== this.tree.root) return;
      for (const [item, found] of runs) if (found.length) this.expanded.add(item);
      level = runs.flatMap(([, found]) => found.map((run) => run.first));
    }
  }

  private rebuild(): void {
    const before = this.rows[this.cursor]?.item;
    this.rows = [];
    this.collect([{ first: this.tree.root, times: 1, last: this.tree.root }], 1, -1);
    this.cursor = Math.max(0, this.rows.findIndex((row) => row.item === before));
    this.measure();
    this.paint();
  }

  private collect(runs: Run[], level: number, parent: number): void {
    for (const run of runs) {
      const isUnfolded = run.times > 1 && this.unfolded.has(run.first);
      const members = isUnfolded ? run.first.parent!.children.slice(...span(run)) : [run.first];
      members.forEach((item) => {
        if (this.onlyDifferences && item.mark === "same") return;
        const shown = isUnfolded ? { first: item, times: 1, last: item } : run;
        const at = this.rows.push({ run: shown, item, level, parent }) - 1;
        if (this.expanded.has(item)) this.collect(this.tree.runs(item.children), level + 1, at);
      });
    }
  }

  private shownFigures(): Figure[] {
    if (!this.isNarrow) return this.figures;
    const kept = this.figures.filter((each) => this.isHeat(each));
    return (kept.length ? kept : this.figures.slice(0, 1)).slice(0, 1);
  }

  private isHeat(figure: Figure): boolean {
    if (this.metric === "bytes") return figure.key === "bytes_moved";
    if (this.metric === "flops") return figure.key.endsWith("_flops");
    return figure.key === (this.metric === "time" ? "microseconds" : this.metric);
  }

  private measure(): void {
    const figures = this.shownFigures();
    const widths = figures.map((figure) => {
      const texts = this.rows.map((row) => cellText(this.tree, row.item, figure));
      const longest = texts.reduce((long, text) => (text.length > long.length ? text : long), "");
      return Math.ceil(Math.max(textWidth(figure.head, FONT.aside), textWidth(longest, FONT.title)) + 26);
    });
    const names = this.rows.map((row) => textWidth(this.named(row), FONT.title) + 20 * row.level + (row.run.times > 1 ? 60 : 0));
    const types = this.rows.map((row) => textWidth(row.item.type, FONT.aside) + 28);
    const name = Math.min(Math.max(220, ...names) + 24, this.isNarrow ? 400 : 560);
    const type = this.isNarrow ? [] : [`${Math.ceil(Math.min(Math.max(80, ...types), 260))}px`];
    this.element.style.setProperty("--columns", [`minmax(${this.isNarrow ? 0 : Math.ceil(name)}px, 1fr)`, ...type, ...widths.map((width) => `${width}px`)].join(" "));
    const cells = ["module call", ...(this.isNarrow ? [] : ["class"])].map((text) => el("span", { attributes: { role: "columnheader" } }, text));
    const heads = figures.map((figure) => el("span", { class: "number", title: figure.hint, attributes: { role: "columnheader" } }, figure.head));
    this.head.replaceChildren(...cells, ...heads);
  }

  private paint(isPrinted = false): void {
    const { scrollTop, clientHeight } = this.scroller;
    const from = isPrinted ? 0 : Math.max(0, Math.floor(scrollTop / ROW) - BEYOND);
    const to = isPrinted ? Math.min(this.rows.length, MOST_PRINTED) : Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / ROW) + BEYOND);
    const most = heatOf(this.tree, this.tree.root, this.metric, this.figures);
    this.body.style.height = `${this.rows.length * ROW}px`;
    this.body.replaceChildren(...this.rows.slice(from, to).map((row, at) => this.row(row, from + at, most)));
    this.scroller.setAttribute("aria-rowcount", String(this.rows.length));
    this.scroller.setAttribute("aria-activedescendant", `row-${this.cursor}`);
  }

  private row(row: Row, at: number, most: number): HTMLElement {
    const { item, level } = row;
    const isExpanded = this.expanded.has(item);
    const classes = ["row", item.mark === "same" ? "" : `mark-${item.mark}`, at === this.cursor ? "cursor" : "", item === this.open ? "open" : ""];
    const figures = this.shownFigures();
    const element = el(
      "div",
      {
        class: classes.filter(Boolean).join(" "),
        attributes: { role: "row", id: `row-${at}`, "aria-level": level, ...(item.children.length ? { "aria-expanded": String(isExpanded) } : {}) },
        onclick: () => this.clicked(at),
        ondblclick: () => this.toggle(at),
      },
      this.name(row, at, isExpanded),
      !this.isNarrow && el("span", { class: "type", title: item.type, attributes: { role: "gridcell" } }, level > 1 ? item.type : ""),
      ...figures.map((figure) =>
        el("span", { class: this.isHeat(figure) ? "number heat" : "number", attributes: { role: "gridcell" } }, cellText(this.tree, item, figure)),
      ),
    );
    element.style.top = `${at * ROW}px`;
    element.style.setProperty("--heat", most ? (heatOf(this.tree, item, this.metric, this.figures) / most).toFixed(4) : "0");
    return element;
  }

  private name(row: Row, at: number, isExpanded: boolean): HTMLElement {
    const { item, run } = row;
    const twist = el("button", {
      class: item.children.length ? (isExpanded ? "twist down" : "twist") : "twist none",
      title: isExpanded ? "hide the calls inside" : "show the calls inside",
      attributes: { tabindex: -1, type: "button", "aria-hidden": "true" },
      onclick: (event) => {
        event.stopPropagation();
        this.toggle(at);
      },
    });
    const fold = el(
      "button",
      {
        class: "fold",
        title: "equal calls: show each",
        attributes: { tabindex: -1, type: "button" },
        onclick: (event) => {
          event.stopPropagation();
          this.unfold(at);
        },
      },
      `× ${run.times}`,
    );
    const cell = el("span", { class: "name", title: item.site || item.name, attributes: { role: "gridcell" } }, twist, el("span", { class: "label" }, this.named(row)), run.times > 1 && fold);
    cell.style.setProperty("--level", String(row.level - 1));
    return cell;
  }

  /** Below another call, a path says only what it adds. */
  private named({ item, run }: Row): string {
    const around = item.parent?.site;
    const name = around && item.site.startsWith(`${around}.`) ? item.site.slice(around.length + 1) : item.name;
    return run.times > 1 ? `${name}${upTo(run)}` : name;
  }

  private clicked(at: number): void {
    this.move(at);
    this.actions.open(this.rows[at]!.item);
  }

  private toggle(at: number): void {
    const { item } = this.rows[at]!;
    if (!item.children.length) return;
    if (!this.expanded.delete(item)) this.expanded.add(item);
    this.cursor = at;
    this.rebuild();
  }

  private unfold(at: number): void {
    this.unfolded.add(this.rows[at]!.run.first);
    this.rebuild();
  }

  private move(at: number): void {
    this.cursor = Math.min(Math.max(at, 0), this.rows.length - 1);
    const [top, height] = [this.cursor * ROW, this.scroller.clientHeight - 2 * ROW];
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top > this.scroller.scrollTop + height) this.scroller.scrollTop = top - height;
    this.paint();
  }

  private key(event: KeyboardEvent): void {
    const row = this.rows[this.cursor];
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW) - 2);
    const isExpanded = this.expanded.has(row.item);
    const moves: Record<string, () => void> = {
      ArrowDown: () => this.move(this.cursor + 1),
      ArrowUp: () => this.move(this.cursor - 1),
      PageDown: () => this.move(this.cursor + page),
      PageUp: () => this.move(this.cursor - page),
      Home: () => this.move(0),
      End: () => this.move(this.rows.length - 1),
      ArrowRight: () => (isExpanded || !row.item.children.length ? this.move(this.cursor + 1) : this.toggle(this.cursor)),
      ArrowLeft: () => (isExpanded ? this.toggle(this.cursor) : this.move(row.parent)),
      Enter: () => this.actions.open(row.item),
      " ": () => this.toggle(this.cursor),
      x: () => row.run.times > 1 && this.unfold(this.cursor),
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    move();
  }
}

function within(run: Run, item: Item): boolean {
  const [from, to] = span(run);
  const at = item.parent!.children.indexOf(item);
  return from <= at && at < to;
}

function span(run: Run): [number, number] {
  const at = run.first.parent!.children.indexOf(run.first);
  return [at, at + run.times];
}
