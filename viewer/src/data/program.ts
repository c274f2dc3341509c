/** One program: nodes and calls are numbers, and everything about them is a column. */

import type { Pass, RawProgram } from "./load";

export const PHASES = ["forward", "backward", "optimizer"] as const;
export const QUALITIES = ["exact", "accumulated", "inferred", "none"] as const;
export const PROGRAM = 0;
/** What stands in the text of an expression for a node. */
export const REFERENCE = "\0";
/** The graph of the program itself, where a node is asked for that holds a graph. */
export const OUTER = -1;
/** Between the node that holds a graph and the nodes of that graph. */
const INSIDE = "/";

export interface Kept {
  node: number;
  consumer: number;
  bytes: number;
  reads: string;
}

export interface Input {
  kind: string;
  path: string;
  aliases: string[];
  of: string | null;
  moduleType: string | null;
  isHeld: boolean;
}

export interface Output {
  name: string;
  kind: string;
  path: string;
}

export class Program {
  readonly name: string;
  readonly torch: string;
  readonly device: string | null;
  readonly notes: string;
  readonly history: Pass[];
  readonly figures: Record<string, number[]>;
  readonly parents: number[];
  /** For each call the number behind the last call inside it: a call and those inside it are numbered without a gap. */
  readonly ends: number[];
  readonly children: number[][];
  readonly sites: string[];
  readonly paths: string[];
  readonly types: string[];
  readonly names: string[];
  readonly places: number[];
  readonly phases: number[];
  readonly qualities: number[];
  readonly forwards: Int32Array;
  /** The node that holds the graph of which a node is; `OUTER` for the graph of the program. */
  readonly owners: Int32Array;
  /** The call in whose graph a node is shown: in a nested graph one inside the call that holds it, or that. */
  readonly homes: Int32Array;
  /** What is behind the last node of the graph that a node holds; behind the node where it holds none. */
  readonly behind: Int32Array;
  readonly bases: Int32Array;
  readonly reads: Int32Array;
  readonly readStarts: Int32Array;
  readonly users: Int32Array;
  readonly userStarts: Int32Array;
  readonly costs: RawProgram["costs"];
  readonly values: (number | null)[] | null;
  readonly byName = new Map<string, number>();
  readonly recomputed: Set<number>;
  readonly kept = new Map<number, Kept>();
  readonly alive = new Map<number, number>();
  readonly timeline: { nodes: number[]; alive: number[] };
  /** Which nodes are of the loss, saved, and so on; what is said of nodes, by key. */
  readonly marks: Map<string, Set<number>>;
  readonly said: Map<string, [string, Set<number>][]>;
  readonly kinds: string[];
  readonly inputs = new Map<string, Input>();
  private readonly returned = new Map<string, Output[]>();
  /** For each graph, by the node that holds it: the nodes of each call, without those of the calls inside it. */
  private readonly graphs = new Map<number, Map<number, number[]>>();
  private differentiated: Map<number, number[]> | null = null;
  private readonly raw: RawProgram;

  constructor(raw: RawProgram) {
    const { texts, calls, nodes } = raw;
    this.raw = raw;
    this.name = raw.name;
    this.torch = raw.torch;
    this.device = raw.device;
    this.notes = raw.notes;
    this.history = raw.history;
    this.figures = calls.figures;
    this.parents = calls.parent.map((parent) => parent ?? -1);
    this.paths = calls.path.map((at) => texts[at]!);
    this.types = calls.type.map((at) => texts[at]!);
    this.sites = this.paths.map((path, at) => (calls.index[at] ? `${path}@${calls.index[at]}` : path));
    this.children = this.parents.map(() => []);
    this.parents.forEach((parent, call) => parent >= 0 && call > 0 && this.children[parent]!.push(call));
    this.ends = ends(this.parents);
    this.names = nodes.name;
    this.places = sums(nodes.place);
    this.phases = nodes.phase;
    this.qualities = nodes.quality;
    this.forwards = absolute(nodes.forward);
    this.owners = absolute(nodes.within);
    this.bases = absolute(raw.bases);
    this.readStarts = starts(nodes.count);
    this.reads = new Int32Array(nodes.reads.length);
    for (let at = 0; at < this.names.length; at += 1)
      for (let k = this.readStarts[at]!; k < this.readStarts[at + 1]!; k += 1) this.reads[k] = at - nodes.reads[k]!;
    [this.users, this.userStarts] = reversed(this.reads, this.readStarts);
    this.costs = raw.costs;
    this.values = raw.values;
    this.recomputed = new Set(nodes.recomputed);
    this.homes = this.homesOf();
    this.behind = behind(this.owners);
    this.names.forEach((_, at) => {
      this.byName.set(this.fullName(at), at);
      const calls = this.graphs.get(this.owners[at]!) ?? new Map<number, number[]>();
      this.graphs.set(this.owners[at]!, calls);
      const own = calls.get(this.homes[at]!);
      if (own) own.push(at);
      else calls.set(this.homes[at]!, [at]);
    });
    const { marks, said, kinds } = raw.chosen;
    this.marks = new Map(Object.entries(marks).map(([mark, places]) => [mark, new Set(sums(places))]));
    this.said = new Map(Object.entries(said).map(([key, rows]) => [key, rows.map(([text, places]) => [texts[text]!, new Set(sums(places))])]));
    this.kinds = kinds;
    const { kept } = raw.memory;
    const [made, consumers] = [sums(kept.node), sums(kept.consumer)];
    made.forEach((node, at) =>
      this.kept.set(node, { node, consumer: consumers[at]!, bytes: kept.bytes[at]!, reads: texts[kept.reads[at]!]! }),
    );
    this.timeline = { nodes: sums(raw.memory.nodes), alive: sums(raw.memory.alive) };
    this.timeline.nodes.forEach((node, at) => this.alive.set(node, this.timeline.alive[at]!));
    for (const [name, kind, path, aliases, of, moduleType, isHeld] of raw.inputs)
      this.inputs.set(name, { kind: texts[kind]!, path, aliases, of, moduleType, isHeld });
    for (const [name, kind, path, node] of raw.outputs)
      if (node) this.returned.set(node, [...(this.returned.get(node) ?? []), { name, kind: texts[kind]!, path }]);
  }

  private homesOf(): Int32Array {
    const found = new Int32Array(this.places);
    this.owners.forEach((owner, at) => {
      if (owner === OUTER) return;
      const around = found[owner]!;
      if (!this.isWithin(this.places[at]!, around)) found[at] = around;
    });
    return found;
  }

  /** Whether a call is another or inside it. */
  isWithin(call: number, around: number): boolean {
    return call >= around && call < this.ends[around]!;
  }

  /** The nodes of which a call's graph consists, without those of the calls inside it. */
  own(call: number, graph = OUTER): number[] {
    return this.graphs.get(graph)?.get(call) ?? [];
  }

  /** The calls of which a nested graph has nodes. */
  callsIn(graph: number): number[] {
    return [...(this.graphs.get(graph)?.keys() ?? [])];
  }

  /** A name that no other node has: that of the node that holds its graph comes first. */
  fullName(node: number): string {
    const owner = this.owners[node]!;
    return owner === OUTER ? this.names[node]! : `${this.fullName(owner)}${INSIDE}${this.names[node]!}`;
  }

  /** Whether a node holds a graph: that of a branch, a loop, a function that is kept. */
  holds(node: number): boolean {
    return this.behind[node]! > node + 1;
  }

  /** The nodes of the graph that a node holds, those of graphs in it included. */
  inside(node: number): number[] {
    return Array.from({ length: this.behind[node]! - node - 1 }, (_, at) => node + 1 + at);
  }

  input(node: number): Input | undefined {
    return this.owners[node] === OUTER ? this.inputs.get(this.names[node]!) : undefined;
  }

  outputs(node: number): Output[] {
    return (this.owners[node] === OUTER && this.returned.get(this.names[node]!)) || [];
  }

  /** What a call costs, in the words of the report; in a nested graph what is in that graph. */
  figuresOf(call: number, graph = OUTER): Record<string, number> {
    if (graph === OUTER) return Object.fromEntries(Object.entries(this.figures).map(([key, column]) => [key, column[call]!]));
    return this.figuresIn(graph, call);
  }

  /** What a call costs of a nested graph, with the calls inside it. */
  private figuresIn(graph: number, call: number): Record<string, number> {
    const found: Record<string, number> = {};
    const add = (key: string, value: number): void => void (found[key] = (found[key] ?? 0) + value);
    const nodes = this.inside(graph).filter((node) => this.isWithin(this.homes[node]!, call) && this.op(node) === "call_function");
    for (const node of nodes) {
      const phase = PHASES[this.phases[node]!]!;
      add(phase, 1);
      add(`${this.recomputed.has(node) ? "recomputed" : phase}_flops`, this.costs.flops[node]!);
      add("bytes_moved", this.moved(node));
      add("microseconds", this.costs.seconds[node]! * 1e6);
    }
    return found;
  }

  get peak(): { bytes: number; at: number; where: string; parts: Record<string, number> } {
    const { peak, at, where, parts } = this.raw.memory;
    return { bytes: peak, at, where, parts };
  }

  op(node: number): string {
    return this.raw.texts[this.raw.nodes.op[node]!]!;
  }

  isOperation(node: number): boolean {
    const op = this.op(node);
    return op !== "placeholder" && op !== "output";
  }

  target(node: number): string {
    return this.raw.texts[this.raw.nodes.target[node]!]!;
  }

  /** An operator without what most of them share: `mm` for `aten.mm.default`. */
  short(node: number): string {
    return this.target(node).replace(/^aten\./, "").replace(/\.default$/, "");
  }

  made(node: number): string {
    return this.raw.texts[this.raw.made[node]!]!;
  }

  expression(node: number): string {
    return this.raw.texts[this.raw.nodes.expression[node]!]!;
  }

  source(node: number): string {
    return this.raw.texts[this.raw.nodes.source[node]!]!;
  }

  /** The calls that a node comes from; several for a sum of gradients. */
  callsOf(node: number): number[] {
    const several = this.raw.nodes.calls[String(node)];
    return several ?? (this.places[node] ? [this.places[node]!] : []);
  }

  passes(node: number): string[] {
    return (this.raw.nodes.passes[String(node)] ?? []).map((at) => this.raw.texts[at]!);
  }

  readsOf(node: number): number[] {
    return [...new Set(this.reads.subarray(this.readStarts[node]!, this.readStarts[node + 1]!))];
  }

  /** All that an expression names, in order, one twice where it stands twice. */
  references(node: number): Int32Array {
    return this.reads.subarray(this.readStarts[node]!, this.readStarts[node + 1]!);
  }

  usersOf(node: number): number[] {
    return [...new Set(this.users.subarray(this.userStarts[node]!, this.userStarts[node + 1]!))];
  }

  /** The backward nodes that differentiate a node. */
  differentiating(node: number): number[] {
    if (this.differentiated === null) {
      this.differentiated = new Map();
      for (let at = 0; at < this.names.length; at += 1) {
        const forward = this.forwards[at]!;
        if (forward >= 0) this.differentiated.set(forward, [...(this.differentiated.get(forward) ?? []), at]);
      }
    }
    return this.differentiated.get(node) ?? [];
  }

  /** What the backward keeps when it reads this value: the memory in which it lies, if the forward made that. */
  keptBy(node: number): Kept | undefined {
    const base = this.bases[node]!;
    return this.kept.get(base >= 0 ? base : node);
  }

  moved(node: number): number {
    return this.costs.read[node]! + this.costs.written[node]!;
  }

  label(call: number): string {
    if (call === PROGRAM) return "(program)";
    return this.sites[call] || "(root)";
  }

  /** The call and those around it, outermost first. */
  chain(call: number): number[] {
    return call === PROGRAM ? [PROGRAM] : [...this.chain(this.parents[call]!), call];
  }
}

function sums(differences: number[]): number[] {
  let sum = 0;
  return differences.map((difference) => (sum += difference));
}

function absolute(distances: number[]): Int32Array {
  return Int32Array.from(distances, (distance, at) => (distance ? at - distance : -1));
}

function starts(counts: number[]): Int32Array {
  const found = new Int32Array(counts.length + 1);
  counts.forEach((count, at) => (found[at + 1] = found[at]! + count));
  return found;
}

/** Nodes of a nested graph follow the node that holds it. */
function behind(owners: Int32Array): Int32Array {
  const found = owners.map((_, at) => at + 1);
  for (let at = owners.length - 1; at >= 0; at -= 1)
    if (owners[at] !== OUTER) found[owners[at]!] = Math.max(found[owners[at]!]!, found[at]!);
  return found;
}

function ends(parents: number[]): number[] {
  const found = parents.map((_, call) => call + 1);
  for (let call = parents.length - 1; call > 0; call -= 1)
    found[parents[call]!] = Math.max(found[parents[call]!]!, found[call]!);
  return found;
}

function reversed(reads: Int32Array, readStarts: Int32Array): [Int32Array, Int32Array] {
  const counts = new Int32Array(readStarts.length);
  for (const read of reads) counts[read + 1]! += 1;
  for (let at = 1; at < counts.length; at += 1) counts[at]! += counts[at - 1]!;
  const next = counts.slice();
  const users = new Int32Array(reads.length);
  for (let at = 0; at + 1 < readStarts.length; at += 1)
    for (let k = readStarts[at]!; k < readStarts[at + 1]!; k += 1) users[next[reads[k]!]!++] = at;
  return [users, counts];
}
