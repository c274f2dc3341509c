/** The graph of an open call: forward and backward beside each other, of one program or of two. */

import { METRICS, rangeOf, type Metric } from "../colours";
import type { CallChange, Operation } from "../data/load";
import { counted, times } from "../data/numbers";
import type { Item, Tree } from "../data/items";
import { PHASES, PROGRAM, type Program } from "../data/program";
import { el, link } from "../dom";
import { draw, type Marks } from "../graph/draw";
import { laidOut, type Laid, type Placed } from "../graph/layout";
import { measured } from "../timing";
import { sceneOf, WINDOW, type Box } from "../graph/scene";

const [LEAST_ZOOM, MOST_ZOOM, READABLE] = [0.2, 2, 0.6];

export interface GraphActions {
  open: (item: Item) => void;
  node: (side: number, at: number) => void;
  close: () => void;
}

export class GraphView {
  readonly element = el("section", { class: "graphs" });
  private panes: Pane[] = [];

  constructor(
    private readonly tree: Tree,
    private readonly actions: GraphActions,
  ) {}

  show(item: Item | null, metric: Metric): void {
    this.element.hidden = item === null;
    if (item === null) return;
    const sides = this.tree.programs.map((_, side) => side).filter((side) => item.calls[side]! >= 0);
    this.panes = sides.map((side) => new Pane(this.tree, side, item, metric, this.actions));
    this.element.replaceChildren(this.bar(item), el("div", { class: "panes" }, ...this.panes.map((pane) => pane.element)));
    for (const pane of this.panes) pane.fit();
  }

  choose(side: number, at: number | null): void {
    for (const pane of this.panes) pane.choose(pane.side === side ? at : null);
  }

  focus(): void {
    this.panes[0]?.focus();
  }

  private bar(item: Item): HTMLElement {
    const chain: Item[] = [];
    for (let each: Item | null = item; each; each = each.parent) chain.unshift(each);
    const crumbs = chain.map((each, at) =>
      at === chain.length - 1 ? el("strong", {}, crumb(each)) : link(crumb(each), () => this.actions.open(each), each.site),
    );
    const zoom = (factor: number): void => this.panes.forEach((pane) => pane.zoomBy(factor));
    return el(
      "header",
      { class: "graph-bar" },
      el("nav", { class: "crumbs", attributes: { "aria-label": "calls around" } }, ...crumbs.flatMap((each, at) => (at ? [el("span", { class: "faint" }, "›"), each] : [each]))),
      el("span", { class: "type" }, item.depth ? item.type : ""),
      el("span", { class: "spring" }),
      button("−", "smaller", () => zoom(1 / 1.25)),
      button("fit", "all of it (f)", () => this.panes.forEach((pane) => pane.fit(true))),
      button("+", "larger", () => zoom(1.25)),
      button("×", "close (Esc)", () => this.actions.close()),
    );
  }
}

function crumb(item: Item): string {
  const around = item.parent?.site;
  return around && item.site.startsWith(`${around}.`) ? item.site.slice(around.length + 1) : item.name;
}

function button(text: string, title: string, onclick: () => void): HTMLButtonElement {
  return el("button", { class: "tool", title, attributes: { type: "button", "aria-label": title }, onclick }, text);
}

class Pane {
  readonly element: HTMLElement;
  private readonly scroller: HTMLElement;
  private readonly foot = el("footer", { class: "legend" });
  private drawing: SVGSVGElement | null = null;
  private laid: Laid | null = null;
  private zoom = 1;
  private starts: number[] = PHASES.map(() => 0);
  private isUnfolded = false;
  private current: Box | null = null;
  private chosen: number | null = null;
  private readonly program: Program;

  constructor(
    private readonly tree: Tree,
    readonly side: number,
    private readonly item: Item,
    private readonly metric: Metric,
    private readonly actions: GraphActions,
  ) {
    this.program = tree.programs[side]!;
    this.scroller = el("div", {
      class: "graph-scroll",
      attributes: { tabindex: 0, role: "application", "aria-label": "graph of the call" },
      onkeydown: (event) => this.key(event),
      onwheel: (event) => this.wheel(event),
      onpointerdown: (event) => this.drag(event),
    });
    const name = tree.programs.length > 1 && el("h3", {}, ["first", "second"][side]!, el("span", { class: "faint" }, ` ${this.program.name}`));
    this.element = el("div", { class: "pane" }, name, this.scroller, this.foot);
    this.render();
  }

  focus(): void {
    this.scroller.focus({ preventScroll: true });
  }

  /** As large as is readable, or as small as all of it needs. */
  fit(all = false): void {
    if (!this.laid) return;
    const across = (this.scroller.clientWidth - 4) / this.laid.width;
    const down = (this.scroller.clientHeight - 4) / this.laid.height;
    this.scaleTo(all ? Math.min(across, down, 1) : Math.min(1, Math.max(across, READABLE)));
    this.scroller.scrollTop = 0;
    this.scroller.scrollLeft = 0;
  }

  zoomBy(factor: number): void {
    this.scaleTo(this.zoom * factor);
  }

  choose(at: number | null): void {
    this.chosen = at;
    const box = at === null ? null : this.boxes().find((each) => each.of.kind !== "port" && each.of.nodes.includes(at));
    if (at !== null && !box && this.turnTo(at)) return;
    this.point(box ?? null);
  }

  private render(): void {
    const scene = sceneOf(this.tree, this.side, this.item, this.metric, this.starts, this.isUnfolded);
    if (!scene.columns.length) {
      this.laid = null;
      this.scroller.replaceChildren(el("p", { class: "empty" }, "This call has no operations of its own, and none inside it: what it returns is there before."));
      this.foot.replaceChildren();
      return;
    }
    this.laid = laidOut(scene);
    this.drawing = draw(this.laid, this.program, this.metric, this.marks(), {
      box: (box) => this.activate(box, false),
      enter: (box) => this.activate(box, true),
    });
    this.scroller.replaceChildren(this.drawing);
    this.scaleTo(this.zoom);
    this.foot.replaceChildren(...this.legend());
  }

  private legend(): Node[] {
    const columns = this.laid!.columns.map((column) => column.column);
    const found: Node[] = [];
    if (this.metric !== "none") {
      const range = rangeOf(columns.flatMap((column) => column.boxes.map((box) => box.value)));
      const { label, text } = METRICS[this.metric];
      found.push(el("span", {}, label), el("span", { class: "ramp" }), el("span", {}, range[1] ? `up to ${text(range[1])}` : "none here"));
    }
    if (this.laid!.across.length) found.push(el("span", { class: "kept-sample" }), el("span", {}, "kept for the backward"));
    if (columns.some((column) => column.boxes.some((box) => box.run && box.run.times > 1)) || this.isUnfolded)
      found.push(link(this.isUnfolded ? "fold equal calls" : "show equal calls one by one", () => this.refold()));
    for (const column of columns.filter((each) => each.total > WINDOW)) found.push(...this.pager(column.phase, column.start, column.total));
    return found;
  }

  private pager(phase: number, start: number, total: number): Node[] {
    const to = Math.min(start + WINDOW, total);
    return [
      el("span", { class: "spring" }),
      start > 0 && link("‹ earlier", () => this.turn(phase, Math.max(0, start - WINDOW))),
      el("span", {}, `${PHASES[phase]} ${counted(start + 1)}–${counted(to)} of ${times(total, "box", "boxes")}`),
      to < total && link("later ›", () => this.turn(phase, start + WINDOW)),
    ].filter((each): each is HTMLElement => each !== false);
  }

  private turn(phase: number, start: number): void {
    measured(`${this.item.site}, from ${start}`, () => {
      this.starts[phase] = start;
      this.render();
      this.fit();
    });
  }

  private refold(): void {
    measured(`${this.item.site}, one by one`, () => {
      this.isUnfolded = !this.isUnfolded;
      this.starts = PHASES.map(() => 0);
      this.render();
      this.fit();
    });
  }

  /** The window of boxes that holds a node, where it is not the one that is shown. */
  private turnTo(at: number): boolean {
    const call = this.item.calls[this.side]!;
    const phase = this.program.phases[at]!;
    const own = this.program.own(call, this.item.graphs[this.side]).filter((node) => this.program.phases[node] === phase && this.program.isOperation(node));
    const position = own.indexOf(at);
    if (position < WINDOW || this.starts[phase] !== 0) return false;
    for (let start = WINDOW; start <= own.length + WINDOW; start += WINDOW) {
      this.starts[phase] = start;
      this.render();
      const box = this.boxes().find((each) => each.of.kind !== "port" && each.of.nodes.includes(at));
      if (box) {
        this.point(box);
        return true;
      }
    }
    return false;
  }

  private marks(): Marks {
    const { difference } = this.tree;
    if (!difference) return () => null;
    const site = this.item.calls[this.side] === PROGRAM ? "" : this.item.site;
    const rows = difference.rows.filter((row) => row.calls.includes(site));
    const bag = (phase: number, operations: (row: CallChange) => Operation[]): Set<string> =>
      new Set(rows.filter((row) => row.phase === PHASES[phase]).flatMap((row) => operations(row).map(spelled)));
    const own = (row: CallChange): Operation[] => row[this.side ? "added" : "removed"].map(([operation]) => operation);
    const moved = (row: CallChange): Operation[] => [
      ...row.moved.map(([operation]) => operation),
      ...row.changed.map(([[name, was, now]]): Operation => [name, this.side ? now : was]),
    ];
    const bags = PHASES.map((_, phase) => ({ own: bag(phase, own), moved: bag(phase, moved) }));
    return (box) => {
      if (box.kind === "call") return box.run!.first.mark === "same" ? null : "inside";
      if (box.kind === "port") return null;
      const [node] = box.nodes as [number];
      const key = spelled([this.program.target(node), this.program.made(node)]);
      const { own, moved } = bags[this.program.phases[node]!]!;
      if (own.has(key)) return this.side ? "added" : "removed";
      return moved.has(key) ? "moved" : null;
    };
  }

  private boxes(): Placed<Box>[] {
    return this.laid?.columns.flatMap((column) => column.boxes) ?? [];
  }

  /** A click shows what a box is; a second one, or Enter, goes inside. */
  private activate(box: Box, isEntered: boolean): void {
    this.point(this.boxes().find((each) => each.of === box) ?? null);
    if (box.kind === "call" && (isEntered || box.run!.times >= 1)) this.actions.open(box.run!.first);
    else if (box.nodes.length && !isEntered) this.actions.node(this.side, box.nodes[0]!);
  }

  private point(placed: Placed<Box> | null): void {
    this.current = placed?.of ?? null;
    this.drawing?.querySelectorAll(".box.current, .touching").forEach((each) => each.classList.remove("current", "touching"));
    if (!placed || !this.drawing || !this.laid) return;
    const groups = [...this.drawing.querySelectorAll<SVGGElement>(".box")];
    groups[this.boxes().indexOf(placed)]?.classList.add("current");
    const id = placed.of.id;
    const lines = [...this.laid.across, ...this.laid.columns.flatMap((column) => column.lines)];
    const paths = this.drawing.querySelectorAll(".across > path, .edges > path");
    lines.forEach((line, at) => (line.of.from === id || line.of.to === id) && paths[at]?.classList.add("touching"));
    this.inSight(placed);
  }

  private inSight({ x, y, width, height }: Placed<Box>): void {
    const { scrollLeft, scrollTop, clientWidth, clientHeight } = this.scroller;
    const [left, top, right, bottom] = [x - width / 2, y - height / 2, x + width / 2, y + height / 2].map((each) => each * this.zoom) as [number, number, number, number];
    if (left < scrollLeft || right > scrollLeft + clientWidth) this.scroller.scrollLeft = (left + right - clientWidth) / 2;
    if (top < scrollTop || bottom > scrollTop + clientHeight) this.scroller.scrollTop = (top + bottom - clientHeight) / 2;
  }

  private scaleTo(zoom: number): void {
    this.zoom = Math.min(Math.max(zoom, LEAST_ZOOM), MOST_ZOOM);
    if (!this.laid || !this.drawing) return;
    this.drawing.setAttribute("width", String(Math.round(this.laid.width * this.zoom)));
    this.drawing.setAttribute("height", String(Math.round(this.laid.height * this.zoom)));
  }

  private wheel(event: WheelEvent): void {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const bounds = this.scroller.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
    const before = this.zoom;
    this.zoomBy(Math.exp(-event.deltaY / 400));
    const factor = this.zoom / before;
    this.scroller.scrollLeft = (this.scroller.scrollLeft + x) * factor - x;
    this.scroller.scrollTop = (this.scroller.scrollTop + y) * factor - y;
  }

  private drag(event: PointerEvent): void {
    if (event.button !== 0 || (event.target as Element).closest(".box")) return;
    const [x, y, left, top] = [event.clientX, event.clientY, this.scroller.scrollLeft, this.scroller.scrollTop];
    const move = (moved: PointerEvent): void => {
      this.scroller.scrollLeft = left - (moved.clientX - x);
      this.scroller.scrollTop = top - (moved.clientY - y);
    };
    const end = (): void => {
      window.removeEventListener("pointermove", move);
      window.removeEventListener("pointerup", end);
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end);
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const steps: Record<string, [number, number]> = { ArrowDown: [0, 1], ArrowUp: [0, -1], ArrowRight: [1, 0], ArrowLeft: [-1, 0] };
    const step = steps[event.key];
    if (step) this.step(step);
    else if (event.key === "Enter" && this.current) this.activate(this.current, this.current.kind === "call");
    else if (event.key === "+" || event.key === "-") this.zoomBy(event.key === "+" ? 1.25 : 0.8);
    else if (event.key === "f") this.fit(true);
    else if (event.key === "Backspace" && this.item.parent) this.actions.open(this.item.parent);
    else return;
    event.preventDefault();
  }

  /** To the nearest box in a direction. */
  private step([right, down]: [number, number]): void {
    const boxes = this.boxes().filter((each) => each.of.kind !== "port");
    const from = this.boxes().find((each) => each.of === this.current);
    if (!from) return this.point(boxes[0] ?? null);
    const ahead = boxes.filter((each) => (each.x - from.x) * right + (each.y - from.y) * down > 4);
    const cost = (each: Placed<Box>): number => {
      const [x, y] = [Math.abs(each.x - from.x), Math.abs(each.y - from.y)];
      return right ? x + 3 * y : y + 2 * x;
    };
    const next = ahead.sort((a, b) => cost(a) - cost(b))[0];
    if (!next) return;
    this.point(next);
    if (next.of.kind === "operation" && this.chosen !== null) this.actions.node(this.side, next.of.nodes[0]!);
  }
}

function spelled([name, made]: Operation): string {
  return `${name} ${made}`;
}
