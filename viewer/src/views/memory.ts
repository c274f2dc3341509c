/** Memory over time: how much is alive while each node runs. */

import { counted, scaled } from "../data/numbers";
import { PHASES, type Program } from "../data/program";
import { el, svg } from "../dom";

const [HEIGHT, TOP, BOTTOM] = [116, 18, 18];

export interface MemoryActions {
  node: (side: number, at: number) => void;
}

export class MemoryView {
  readonly element: HTMLElement;
  private readonly plot = el("div", { class: "plot", attributes: { tabindex: 0, role: "slider", "aria-label": "memory over time" } });
  private readonly told = el("p", { class: "told" });
  private at = -1;
  private width = 0;

  constructor(
    private readonly program: Program,
    private readonly side: number,
    title: string,
    private readonly actions: MemoryActions,
  ) {
    const body = program.timeline.nodes.length ? this.plot : el("p", { class: "empty" }, "Nothing runs.");
    this.element = el("section", { class: "memory" }, el("header", {}, el("h2", {}, title), this.told), body);
    this.plot.addEventListener("pointermove", (event) => this.tell(this.near(event)));
    this.plot.addEventListener("pointerleave", () => (this.at < 0 ? this.tellPeak() : this.tell(this.at)));
    this.plot.addEventListener("click", (event) => this.choose(this.near(event)));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.render()).observe(this.plot);
    this.tellPeak();
  }

  /** Mark where a node runs. */
  mark(node: number | null): void {
    const at = node === null ? -1 : this.program.timeline.nodes.indexOf(node);
    this.at = at;
    this.render(true);
    if (at >= 0) this.tell(at);
    else this.tellPeak();
  }

  private get count(): number {
    return this.program.timeline.nodes.length;
  }

  private x(at: number): number {
    return (at / Math.max(1, this.count - 1)) * this.width;
  }

  private y(bytes: number): number {
    return TOP + (1 - bytes / Math.max(1, this.program.peak.bytes)) * (HEIGHT - TOP - BOTTOM);
  }

  private render(isForced = false): void {
    const width = Math.floor(this.plot.clientWidth);
    if (!width || (width === this.width && !isForced)) return;
    this.width = width;
    const line = this.outline();
    const floor = HEIGHT - BOTTOM;
    this.plot.replaceChildren(
      svg(
        "svg",
        { attributes: { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT } },
        ...this.bands(),
        svg("path", { class: "area", attributes: { d: `M0 ${floor} L${line} L${width} ${floor} z` } }),
        svg("path", { class: "outline", attributes: { d: `M${line}` } }),
        svg("line", { class: "floor", attributes: { x1: 0, x2: width, y1: floor, y2: floor } }),
        ...this.peak(),
        ...this.cursor(),
      ),
    );
  }

  /** The most of each pixel: a peak is never lost. */
  private outline(): string {
    const { alive } = this.program.timeline;
    const step = Math.max(1, alive.length / Math.max(1, this.width));
    const points: string[] = [];
    for (let from = 0; from < alive.length; from += step) {
      let most = 0;
      let place = Math.floor(from);
      for (let at = place; at < Math.min(alive.length, Math.ceil(from + step)); at += 1)
        if (alive[at]! > most) [most, place] = [alive[at]!, at];
      points.push(`${this.x(place).toFixed(1)} ${this.y(most).toFixed(1)}`);
    }
    return points.join(" L");
  }

  private bands(): SVGElement[] {
    const { nodes } = this.program.timeline;
    const found: [number, number, number][] = [];
    nodes.forEach((node, at) => {
      const phase = this.program.isOperation(node) ? this.program.phases[node]! : -1;
      const open = found.at(-1);
      if (open && open[0] === phase) open[2] = at;
      else found.push([phase, at, at]);
    });
    const wide = found.filter(([phase, from, to]) => phase >= 0 && this.x(to) - this.x(from) > 3);
    return wide.flatMap(([phase, from, to]) => {
      const [left, right] = [this.x(from), this.x(to)];
      const rect = svg("rect", { class: `band phase-${phase}`, attributes: { x: left, y: TOP - 6, width: right - left, height: HEIGHT - TOP - BOTTOM + 6 } });
      return right - left > 60 ? [rect, svg("text", { class: "band-name", attributes: { x: left + 4, y: HEIGHT - 5 } }, PHASES[phase]!)] : [rect];
    });
  }

  private peak(): SVGElement[] {
    const at = this.program.timeline.nodes.indexOf(this.program.peak.at);
    const [x, y] = [this.x(at), this.y(this.program.peak.bytes)];
    const isRight = x > this.width - 130;
    return [
      svg("circle", { class: "peak", attributes: { cx: x, cy: y, r: 3 } }),
      svg("text", { class: "peak-name", attributes: { x: x + (isRight ? -6 : 6), y: y - 5, "text-anchor": isRight ? "end" : "start" } }, `peak ${scaled(this.program.peak.bytes, "B")}`),
    ];
  }

  private cursor(): SVGElement[] {
    if (this.at < 0) return [];
    const x = this.x(this.at);
    return [svg("line", { class: "cursor", attributes: { x1: x, x2: x, y1: TOP - 6, y2: HEIGHT - BOTTOM } })];
  }

  private near(event: MouseEvent): number {
    const { left } = this.plot.getBoundingClientRect();
    const at = Math.round(((event.clientX - left) / Math.max(1, this.width)) * (this.count - 1));
    return Math.min(Math.max(at, 0), this.count - 1);
  }

  private tell(at: number): void {
    const node = this.program.timeline.nodes[at];
    if (node === undefined) return;
    const calls = this.program.callsOf(node).map((call) => this.program.label(call));
    const parts = [scaled(this.program.timeline.alive[at]!, "B"), `while ${this.program.names[node]} runs`, ...calls];
    this.told.replaceChildren(el("strong", {}, parts[0]!), ` ${parts.slice(1).join(" · ")}`, el("span", { class: "faint" }, `  ${counted(at + 1)} of ${counted(this.count)}`));
  }

  private tellPeak(): void {
    const { bytes, at, parts } = this.program.peak;
    if (!this.count) return;
    const held = Object.entries(parts).filter(([, size]) => size).sort((a, b) => b[1] - a[1]);
    const text = held.map(([kind, size]) => `${kind} ${scaled(size, "B")}`).join(", ");
    this.told.replaceChildren(el("strong", {}, `peak ${scaled(bytes, "B")}`), ` while ${this.program.names[at]} runs: ${text}`);
  }

  private choose(at: number): void {
    this.at = at;
    this.actions.node(this.side, this.program.timeline.nodes[at]!);
  }

  private key(event: KeyboardEvent): void {
    const steps: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50 };
    const step = steps[event.key];
    if (step !== undefined) {
      const from = this.at < 0 ? this.program.timeline.nodes.indexOf(this.program.peak.at) : this.at;
      this.at = Math.min(Math.max(from + step, 0), this.count - 1);
      this.render(true);
      this.tell(this.at);
    } else if (event.key === "Enter" && this.at >= 0) this.choose(this.at);
    else return;
    event.preventDefault();
  }
}
