/** One program: nodes and calls are numbers, and everything about them is a column. */

import type { RawProgram } from "./load";

export const PHASES = ["forward", "backward", "optimizer"] as const;
export const QUALITIES = ["exact", "accumulated", "inferred", "none"] as const;
export const PROGRAM = 0;
/** What stands in the text of an expression for a node. */
export const REFERENCE = "\0";

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
  readonly owners: Int32Array;
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
  readonly inputs = new Map<string, Input>();
  readonly outputs = new Map<string, Output[]>();
  /** The nodes of which a call's graph consists, without those of the calls inside it. */
  readonly own: number[][];
  private differentiated: Map<number, number[]> | null = null;
  private readonly raw: RawProgram;

  constructor(raw: RawProgram) {
    const { texts, calls, nodes } = raw;
    this.raw = raw;
    this.name = raw.name;
    this.torch = raw.torch;
    this.device = raw.device;
    this.notes = raw.notes;
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
    this.own = this.parents.map(() => []);
    this.names.forEach((name, at) => {
      if (this.owners[at] === -1) this.byName.set(name, at);
      this.own[this.places[at]!]!.push(at);
    });
    const { kept } = raw.memory;
    const [made, consumers] = [sums(kept.node), sums(kept.consumer)];
    made.forEach((node, at) =>
      this.kept.set(node, { node, consumer: consumers[at]!, bytes: kept.bytes[at]!, reads: texts[kept.reads[at]!]! }),
    );
    this.timeline = { nodes: sums(raw.memory.nodes), alive: sums(raw.memory.alive) };
    this.timeline.nodes.forEach((node, at) => this.alive.set(node, this.timeline.alive[at]!));
    for (const [name, kind, path, aliases, of] of raw.inputs) this.inputs.set(name, { kind: texts[kind]!, path, aliases, of });
    for (const [name, kind, path, node] of raw.outputs)
      if (node) this.outputs.set(node, [...(this.outputs.get(node) ?? []), { name, kind: texts[kind]!, path }]);
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
