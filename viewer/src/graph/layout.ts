/** Where the boxes of a scene are: dagre lays out each phase, and the phases stand side by side. */

import dagre from "@dagrejs/dagre";
import type { Across, Box, Column, Edge, Scene } from "./scene";

export interface Placed<T> {
  of: T;
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface Line<T> {
  of: T;
  points: { x: number; y: number }[];
}

export interface LaidColumn {
  column: Column;
  x: number;
  width: number;
  boxes: Placed<Box>[];
  lines: Line<Edge>[];
}

export interface Laid {
  columns: LaidColumn[];
  across: Line<Across>[];
  width: number;
  height: number;
}

const HEIGHT = { operation: 42, call: 44, port: 24 };
const [GAP, MARGIN, HEAD] = [110, 24, 40];

let pen: CanvasRenderingContext2D | null = null;

export function textWidth(text: string, font: string): number {
  pen ??= document.createElement("canvas").getContext("2d");
  if (pen === null) return text.length * 7;
  pen.font = font;
  return pen.measureText(text).width;
}

export const FONT = {
  title: '600 12px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif',
  note: '11px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace',
  aside: '11px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif',
};
const [WIDEST, WIDEST_CALL] = [220, 320];

export function laidOut(scene: Scene): Laid {
  let x = MARGIN;
  const columns = scene.columns.map((column) => {
    const laid = columnOf(column, x);
    x += laid.width + GAP;
    return laid;
  });
  const height = Math.max(120, ...columns.map((column) => bottom(column)));
  for (const column of columns) lowered(column);
  const places = new Map(columns.flatMap((column) => column.boxes.map((box) => [`${column.column.phase} ${box.of.id}`, box] as const)));
  const across = scene.across.flatMap((edge) => {
    const from = places.get(`${edge.phases[0]} ${edge.from}`);
    const to = places.get(`${edge.phases[1]} ${edge.to}`);
    return from && to ? [{ of: edge, points: between(from, to) }] : [];
  });
  return { columns, across, width: Math.max(x - GAP + MARGIN, 200), height: height + HEAD + 2 * MARGIN };
}

/** The forward goes down and the backward up, so that a value and its gradient stand beside each other. */
function columnOf(column: Column, x: number): LaidColumn {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: column.phase === 1 ? "BT" : "TB", nodesep: 18, ranksep: 26, edgesep: 10, ranker: "tight-tree" });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const box of column.boxes) graph.setNode(box.id, { width: boxWidth(box), height: HEIGHT[box.kind] });
  for (const edge of column.edges) graph.setEdge(edge.from, edge.to);
  dagre.layout(graph);
  const boxes = column.boxes.map((box) => ({ of: box, ...(graph.node(box.id) as Omit<Placed<Box>, "of">) }));
  const lines = column.edges.map((edge) => ({ of: edge, points: (graph.edge(edge.from, edge.to) as { points: Line<Edge>["points"] }).points }));
  const left = Math.min(...boxes.map((box) => box.x - box.width / 2));
  const right = Math.max(...boxes.map((box) => box.x + box.width / 2));
  for (const box of boxes) box.x += x - left;
  for (const line of lines) line.points = line.points.map((point) => ({ x: point.x + x - left, y: point.y }));
  return { column, x, width: Math.max(right - left, 120), boxes, lines };
}

function boxWidth(box: Box): number {
  const title = textWidth(box.title, FONT.title) + (box.aside ? textWidth(box.aside, FONT.aside) + 10 : 0);
  const widest = Math.max(title, textWidth(box.note, FONT.note));
  return Math.min(Math.max(widest + 22, box.kind === "port" ? 40 : 76), box.kind === "call" ? WIDEST_CALL : WIDEST);
}

function bottom(column: LaidColumn): number {
  return Math.max(...column.boxes.map((box) => box.y + box.height / 2));
}

/** Below the heads: where the forward begins the backward ends. */
function lowered(column: LaidColumn): void {
  for (const box of column.boxes) box.y += HEAD + MARGIN;
  for (const line of column.lines) for (const point of line.points) point.y += HEAD + MARGIN;
}

function between(from: Placed<Box>, to: Placed<Box>): { x: number; y: number }[] {
  const isRight = from.x < to.x;
  const start = { x: from.x + (isRight ? from.width / 2 : -from.width / 2), y: from.y };
  const end = { x: to.x - (isRight ? to.width / 2 : -to.width / 2), y: to.y };
  return [start, end];
}
