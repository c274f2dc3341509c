/** What the graph of a call shows: its operations, the calls inside it as boxes, and what flows between them. */

import { together, type Metric } from "../colours";
import { times } from "../data/numbers";
import { OUTER, PHASES, PROGRAM, type Program } from "../data/program";
import type { Item, Run, Tree } from "../data/items";
import { last, upTo } from "../data/items";

/** So many boxes of one phase at once: a layout of these takes a tenth of a second. */
export const WINDOW = 48;

/** A value that more boxes read has no line to each of them. */
const MOST_READERS = 8;

const ELSEWHERE = "operations not shown";

export interface Box {
  id: string;
  kind: "operation" | "call" | "port";
  title: string;
  note: string;
  /** Weights it reads, gradients and outputs it makes. */
  aside: string;
  nodes: number[];
  run: Run | null;
  value: number | null;
  /** Of a port: which way the value goes. */
  way: "in" | "out" | null;
}

export interface Edge {
  from: string;
  to: string;
  nodes: number[];
}

/** A value that one phase makes and another reads. */
export interface Across extends Edge {
  phases: [number, number];
  bytes: number;
  /** Whether it is kept in memory for that; views of weights are there anyway. */
  isKept: boolean;
}

export interface Column {
  phase: number;
  title: string;
  boxes: Box[];
  edges: Edge[];
  start: number;
  total: number;
}

export interface Scene {
  columns: Column[];
  across: Across[];
}

interface Place {
  box: Box;
  phase: number;
}

/** The graph of a call of one side; `starts` says for each phase which box is the first that is shown. */
export function sceneOf(tree: Tree, side: number, item: Item, metric: Metric, starts: number[], unfolded: boolean): Scene {
  const program = tree.programs[side]!;
  const all = boxesOf(tree, side, item, unfolded);
  const shown = all.map((boxes, phase) => boxes.slice(starts[phase] ?? 0, (starts[phase] ?? 0) + WINDOW));
  const places = new Map<number, Place>();
  shown.forEach((boxes, phase) =>
    boxes.forEach((box) => {
      box.value = together(metric, program, box.nodes);
      box.aside = asideOf(program, box.nodes, box.kind);
      box.nodes.forEach((node) => places.set(node, { box, phase }));
    }),
  );
  const columns = shown
    .map((boxes, phase) => ({ phase, title: titleOf(phase), boxes, edges: [], start: starts[phase] ?? 0, total: all[phase]!.length }))
    .filter((column) => column.total > 0);
  return { columns, across: connected(program, item.calls[side]!, columns, places) };
}

function titleOf(phase: number): string {
  return PHASES[phase]!;
}

function boxesOf(tree: Tree, side: number, item: Item, unfolded: boolean): Box[][] {
  const program = tree.programs[side]!;
  const [call, graph] = [item.calls[side]!, item.graphs[side]!];
  const found: Box[][] = PHASES.map(() => []);
  for (const node of program.own(call, graph)) {
    if (program.holds(node)) found[program.phases[node]!]!.push(graphBox(tree, side, node, item));
    else if (program.isOperation(node)) found[program.phases[node]!]!.push(operation(program, node));
  }
  const children = item.children.filter((child) => !child.isGraph && child.calls[side]! >= 0);
  const runs = unfolded ? children.map((child) => ({ first: child, times: 1, last: child })) : tree.runs(children);
  for (const run of runs) {
    const [from, to] = [run.first.calls[side]!, program.ends[run.last.calls[side]!]!];
    const nodes: number[][] = PHASES.map(() => []);
    for (let inner = from; inner < to; inner += 1)
      for (const node of program.own(inner, graph)) nodes[program.phases[node]!]!.push(node, ...program.inside(node));
    nodes.forEach((held, phase) => held.length && found[phase]!.push(callBox(program, run, phase, held, item)));
  }
  for (const boxes of found) boxes.sort((a, b) => a.nodes[0]! - b.nodes[0]!);
  return found;
}

function operation(program: Program, node: number): Box {
  return {
    id: `n${node}`,
    kind: "operation",
    title: program.short(node),
    note: program.made(node),
    aside: "",
    nodes: [node],
    run: null,
    value: null,
    way: null,
  };
}

/** The graph that a node holds: what reads the node runs it. */
function graphBox(tree: Tree, side: number, node: number, around: Item): Box {
  const program = tree.programs[side]!;
  const first = tree.graphOf(side, node);
  const box = callBox(program, { first, times: 1, last: first }, program.phases[node]!, [node, ...program.inside(node)], around);
  return { ...box, id: `g${node}`, title: program.names[node]! };
}

function callBox(program: Program, run: Run, phase: number, nodes: number[], around: Item): Box {
  const name = relative(run.first, around);
  const title = run.times > 1 ? `${name}${upTo(run)}  × ${run.times}` : name;
  const note = `${run.first.type} · ${times(nodes.filter((node) => program.isOperation(node)).length, "operation")}`;
  nodes.sort((a, b) => a - b);
  const id = `c${run.first.calls.join("_")}p${phase}`;
  return { id, kind: "call", title, note, aside: "", nodes, run, value: null, way: null };
}

function relative(item: Item, around: Item): string {
  const { site } = around;
  return (site && item.site.startsWith(`${site}.`) ? item.site.slice(site.length + 1) : item.site) || item.name;
}

/** Which state a box reads, which gradients and outputs it makes: of an operation, in words. */
function asideOf(program: Program, nodes: number[], kind: Box["kind"]): string {
  if (kind !== "operation") return "";
  const [node] = nodes as [number];
  const state = program.readsOf(node).flatMap((read) => {
    const input = program.input(read);
    return input && input.kind !== "user" && input.kind !== "tangent" ? [short(input.path)] : [];
  });
  const made = program.outputs(node).map((output) =>
    output.kind === "gradient" ? `∂ ${short(output.path)}` : output.kind === "mutation" ? `new ${short(output.path)}` : output.kind,
  );
  return [...state, ...made.map((text) => `→ ${text}`)].slice(0, 2).join(", ");
}

/** `weight` of `blocks.0.weight`, `exp_avg` of `optimizer.state['blocks.0.weight']['exp_avg']`. */
function short(path: string): string {
  return /\['([^']*)'\]$/.exec(path)?.[1] ?? last(path);
}

function connected(program: Program, call: number, columns: Column[], places: Map<number, Place>): Across[] {
  const across = new Map<string, Across>();
  const bases = new Map<Across, Set<number>>();
  for (const column of columns) {
    const links = new Links(column);
    for (const box of [...column.boxes])
      for (const node of box.nodes) {
        for (const read of program.readsOf(node)) {
          const source = places.get(read);
          if (source === undefined) portIn(program, call, links, box, read, column.phase);
          else if (source.box === box) continue;
          else if (source.phase === column.phase) links.add(source.box.id, box.id, read);
          else crossing(program, across, bases, source, { box, phase: column.phase }, read);
        }
        const outside = program.usersOf(node).find((user) => !places.has(user) && program.phases[user] === column.phase);
        if (outside !== undefined && (program.op(outside) !== "output" || program.owners[outside] !== OUTER)) portOut(program, call, links, box, node, outside);
      }
  }
  columns.forEach(thinned);
  return [...across.values()];
}

/** What many boxes read, as positions and masks are, is a word on most of them in the place of a line. */
function thinned(column: Column): void {
  const boxes = new Map(column.boxes.map((box) => [box.id, box]));
  const readers = new Map<string, Edge[]>();
  for (const edge of column.edges) readers.set(edge.from, [...(readers.get(edge.from) ?? []), edge]);
  const gone = new Set<Edge>();
  for (const [from, edges] of readers) {
    const { title } = boxes.get(from)!;
    if (edges.length <= (title === ELSEWHERE ? 2 : MOST_READERS)) continue;
    for (const edge of edges.slice(1)) {
      const reader = boxes.get(edge.to)!;
      if (title !== ELSEWHERE) reader.aside = [reader.aside, title].filter(Boolean).join(", ");
      gone.add(edge);
    }
  }
  column.edges = column.edges.filter((edge) => !gone.has(edge));
}

class Links {
  private readonly found = new Map<string, Edge>();
  private readonly ports = new Map<string, Box>();

  constructor(private readonly column: Column) {}

  add(from: string, to: string, node: number): void {
    const key = `${from} ${to}`;
    const edge = this.found.get(key);
    if (edge) {
      if (!edge.nodes.includes(node)) edge.nodes.push(node);
      return;
    }
    const made = { from, to, nodes: [node] };
    this.found.set(key, made);
    this.column.edges.push(made);
  }

  port(title: string, note: string, way: "in" | "out", node: number): Box {
    const id = `${way} ${title}`;
    let port = this.ports.get(id);
    if (!port) {
      port = { id, kind: "port", title, note, aside: "", nodes: [], run: null, value: null, way };
      this.ports.set(id, port);
      this.column.boxes.push(port);
    }
    if (!port.nodes.includes(node)) port.nodes.push(node);
    return port;
  }
}

function portIn(program: Program, call: number, links: Links, box: Box, read: number, phase: number): void {
  const isInside = program.isWithin(program.homes[read]!, call);
  const input = program.input(read);
  if (input && input.kind !== "user" && input.kind !== "tangent") return;
  const isArgument = program.owners[read] !== OUTER && program.op(read) === "placeholder";
  if (!input && !isArgument && (!program.isOperation(read) || (isInside && program.phases[read] !== phase))) return; // in another window
  const title = input ? input.path : isArgument ? program.names[read]! : outsideOf(program, call, read);
  const port = links.port(title, input ? input.kind : "", "in", read);
  links.add(port.id, box.id, read);
}

function portOut(program: Program, call: number, links: Links, box: Box, node: number, user: number): void {
  const port = links.port(program.op(user) === "output" ? "returned" : outsideOf(program, call, user), "", "out", node);
  links.add(box.id, port.id, node);
}

/** Where a value outside comes from or goes to: the outermost call around it that is not around this call. */
function outsideOf(program: Program, call: number, node: number): string {
  const place = program.homes[node]!;
  if (program.isWithin(place, call)) return ELSEWHERE;
  const around = new Set(program.chain(call));
  const outer = program.chain(place).find((each) => !around.has(each));
  if (outer !== undefined) return program.label(outer);
  return place === PROGRAM ? program.names[node]! : program.label(place);
}

function crossing(
  program: Program,
  across: Map<string, Across>,
  bases: Map<Across, Set<number>>,
  from: Place,
  to: Place,
  read: number,
): void {
  const key = `${from.box.id} ${to.box.id}`;
  let edge = across.get(key);
  if (!edge) {
    edge = { from: from.box.id, to: to.box.id, nodes: [], phases: [from.phase, to.phase], bytes: 0, isKept: false };
    across.set(key, edge);
    bases.set(edge, new Set());
  }
  if (edge.nodes.includes(read)) return;
  edge.nodes.push(read);
  const kept = program.keptBy(read);
  const counted = bases.get(edge)!;
  if (kept && from.phase === 0 && !counted.has(kept.node)) {
    counted.add(kept.node);
    edge.bytes += kept.bytes;
    edge.isKept = true;
  }
}
