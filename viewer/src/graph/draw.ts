/** A laid out scene as SVG. */

import { METRICS, rangeOf, strength, type Metric } from "../colours";
import { scaled, times } from "../data/numbers";
import type { Program } from "../data/program";
import { svg } from "../dom";
import { FONT, textWidth, type Laid, type LaidColumn, type Line, type Placed } from "./layout";
import type { Across, Box } from "./scene";

export interface Actions {
  box: (box: Box) => void;
  enter: (box: Box) => void;
}

export type Marks = (box: Box) => "added" | "removed" | "moved" | "inside" | null;

export function draw(laid: Laid, program: Program, metric: Metric, marks: Marks, actions: Actions): SVGSVGElement {
  const range = rangeOf(laid.columns.flatMap((column) => column.boxes.map((box) => box.of.value)));
  const [low, high] = heaviest(laid.across);
  return svg(
    "svg",
    { class: "graph", attributes: { viewBox: `0 0 ${laid.width} ${laid.height}`, width: laid.width, height: laid.height, role: "img" } },
    arrow(),
    ...laid.columns.map(head),
    svg("g", { class: "across" }, ...laid.across.map((line) => crossing(line, program, low, high))),
    svg("g", { class: "edges" }, ...laid.columns.flatMap((column) => column.lines.map((line) => edge(line, program)))),
    ...laid.columns.map((column) =>
      svg("g", { class: `boxes phase-${column.column.phase}` }, ...column.boxes.map((box) => boxOf(box, program, metric, range, marks, actions))),
    ),
  );
}

function arrow(): SVGElement {
  const path = svg("path", { attributes: { d: "M0 0 L6 3 L0 6 z" } });
  const options = { id: "arrow", viewBox: "0 0 6 6", refX: 5.5, refY: 3, markerWidth: 6, markerHeight: 6, orient: "auto" };
  return svg("defs", {}, svg("marker", { attributes: options }, path));
}

function head(column: LaidColumn): SVGElement {
  const { title, total, phase } = column.column;
  const way = phase === 1 ? " ↑" : " ↓";
  return svg(
    "text",
    { class: "column-head", attributes: { x: column.x + column.width / 2, y: 26 } },
    title + way,
    svg("tspan", { class: "faint", attributes: { dx: 8 } }, times(total, "box", "boxes")),
  );
}

function edge(line: Line<{ nodes: number[] }>, program: Program): SVGElement {
  const values = line.of.nodes.map((node) => `${program.names[node]}: ${program.made(node)}`);
  return svg("path", { attributes: { d: smooth(line.points), "marker-end": "url(#arrow)" }, title: values.slice(0, 12).join("\n") });
}

/** Through the middles between the points. */
function smooth(points: { x: number; y: number }[]): string {
  const [first, ...rest] = points;
  if (!first) return "";
  if (rest.length < 2) return `M${first.x} ${first.y} ${rest.map(({ x, y }) => `L${x} ${y}`).join(" ")}`;
  const middles = rest.slice(0, -1).map((point, at) => {
    const next = rest[at + 1]!;
    const isLast = at === rest.length - 2;
    const end = isLast ? next : { x: (point.x + next.x) / 2, y: (point.y + next.y) / 2 };
    return `Q${point.x.toFixed(1)} ${point.y.toFixed(1)} ${end.x.toFixed(1)} ${end.y.toFixed(1)}`;
  });
  return `M${first.x.toFixed(1)} ${first.y.toFixed(1)} ${middles.join(" ")}`;
}

function heaviest(lines: Line<Across>[]): [number, number] {
  return rangeOf(lines.map((line) => line.of.bytes));
}

function crossing(line: Line<Across>, program: Program, low: number, high: number): SVGElement {
  const [from, to] = line.points as [{ x: number; y: number }, { x: number; y: number }];
  const pull = Math.max(40, Math.abs(to.x - from.x) / 2) * Math.sign(to.x - from.x);
  const { bytes, isKept, nodes } = line.of;
  const what = isKept ? `kept for the backward: ${scaled(bytes, "B")}` : "there anyway: no memory is kept for it";
  const path = svg("path", {
    class: isKept ? "kept" : "anyway",
    attributes: { d: `M${from.x} ${from.y} C${from.x + pull} ${from.y} ${to.x - pull} ${to.y} ${to.x} ${to.y}` },
    title: [what, ...nodes.slice(0, 12).map((node) => `${program.names[node]}: ${program.made(node)}`)].join("\n"),
  });
  path.style.setProperty("--heat", String(isKept ? 0.25 + 0.75 * strength(bytes, [low, high]) : 0));
  return path;
}

function boxOf(placed: Placed<Box>, program: Program, metric: Metric, range: [number, number], marks: Marks, actions: Actions): SVGElement {
  const { of: box, x, y, width, height } = placed;
  const mark = marks(box);
  const [left, top] = [x - width / 2, y - height / 2];
  const inner = width - 18;
  const group = svg(
    "g",
    {
      class: ["box", box.kind, mark ?? ""].join(" ").trim(),
      attributes: { transform: `translate(${left.toFixed(1)} ${top.toFixed(1)})`, "data-id": box.id },
      title: told(box, program, metric),
      onclick: () => actions.box(box),
      ondblclick: () => actions.enter(box),
    },
    box.run && box.run.times > 1 && svg("rect", { class: "behind", attributes: { x: 4, y: 4, width, height, rx: 6 } }),
    svg("rect", { class: "face", attributes: { width, height, rx: box.kind === "port" ? height / 2 : 6 } }),
    box.kind === "port"
      ? svg("text", { class: "title", attributes: { x: width / 2, y: height / 2 + 4, "text-anchor": "middle" } }, cut(box.title, inner, FONT.title))
      : svg(
          "text",
          { class: "title", attributes: { x: 10, y: 17 } },
          cut(box.title, inner, FONT.title),
          box.aside && svg("tspan", { class: "aside", attributes: { dx: 8 } }, cut(box.aside, inner - textWidth(box.title, FONT.title) - 8, FONT.aside)),
        ),
    box.kind !== "port" && svg("text", { class: "note", attributes: { x: 10, y: height - 10 } }, cut(box.note, inner, FONT.note)),
  );
  group.style.setProperty("--heat", strength(box.value, range).toFixed(3));
  return group;
}

function told(box: Box, program: Program, metric: Metric): string {
  const lines = [box.kind === "call" ? box.run!.first.site : box.kind === "operation" ? program.names[box.nodes[0]!]! : box.title, box.note];
  if (metric !== "none" && box.value !== null && box.kind !== "port") lines.push(`${METRICS[metric].label}: ${METRICS[metric].text(box.value)}`);
  return lines.filter(Boolean).join("\n");
}

function cut(text: string, width: number, font: string): string {
  if (textWidth(text, font) <= width) return text;
  let shown = text;
  while (shown.length > 1 && textWidth(`${shown}…`, font) > width) shown = shown.slice(0, -1);
  return `${shown}…`;
}
