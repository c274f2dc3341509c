/** The tree of calls of one program, or of two at once, with equal neighbours as one row. */

import type { Difference } from "./load";
import { OUTER, PROGRAM, type Program } from "./program";

export const FOLD_FROM = 3;
/** What stands in the place of a class. */
const GRAPH = "nested graph";

export type Mark = "came" | "gone" | "changed" | "inside" | "same";

type Pair = [number, number];

/**
 * A call: its number in the first program, in the second, or in both; -1 where there is none. `graphs` are the
 * nodes that hold the graph in which it is looked at: a nested graph is an item with the call that it is in.
 */
export interface Item {
  calls: Pair;
  graphs: Pair;
  /** Whether it is a nested graph, and not a call. */
  isGraph: boolean;
  site: string;
  type: string;
  name: string;
  depth: number;
  parent: Item | null;
  children: Item[];
  mark: Mark;
  /** What equals it among its neighbours has the same; -1 until somebody asks. */
  shape: number;
}

/** Neighbours that are shown as one row: the first of them, how many, the last. */
export interface Run {
  first: Item;
  times: number;
  last: Item;
}

export class Tree {
  readonly root: Item;
  private readonly bySite: Map<string, Item>[] = [new Map(), new Map()];
  private readonly shapes = new Map<string, number>();

  constructor(
    readonly programs: Program[],
    readonly difference: Difference | null,
  ) {
    this.root = this.item([PROGRAM, programs.length > 1 ? PROGRAM : -1], [OUTER, OUTER], null);
    if (difference) this.marked(difference);
  }

  /** The item of a call of a program, in the graph that a node holds. */
  of(side: number, call: number, graph = OUTER): Item {
    return this.bySite[side]!.get(key(this.programs[side]!, call, graph))!;
  }

  bySiteName(side: number, site: string): Item | undefined {
    return this.bySite[side]?.get(`${OUTER}.${site}`);
  }

  /** The item in whose graph a node is a box. */
  home(side: number, node: number): Item {
    const program = this.programs[side]!;
    return this.of(side, program.homes[node]!, program.owners[node]!);
  }

  /** The graph that a node holds. */
  graphOf(side: number, node: number): Item {
    return this.of(side, this.programs[side]!.homes[node]!, node);
  }

  runs(items: Item[]): Run[] {
    const found: Run[] = [];
    let at = 0;
    while (at < items.length) {
      let end = at + 1;
      while (end < items.length && this.shape(items[end]!) === this.shape(items[at]!)) end += 1;
      if (end - at >= FOLD_FROM) found.push({ first: items[at]!, times: end - at, last: items[end - 1]! });
      else for (const each of items.slice(at, end)) found.push({ first: each, times: 1, last: each });
      at = end;
    }
    return found;
  }

  private item(calls: Pair, graphs: Pair, parent: Item | null, isGraph = false): Item {
    const side = calls[0] >= 0 ? 0 : 1;
    const [program, call] = [this.programs[side]!, calls[side]];
    const site = isGraph ? program.fullName(graphs[side]) : program.sites[call]!;
    const item: Item = {
      calls,
      graphs,
      isGraph,
      site,
      type: isGraph ? GRAPH : program.types[call]!,
      name: isGraph ? program.names[graphs[side]]! : call === PROGRAM ? "(program)" : site || "(root)",
      depth: parent === null ? 0 : parent.depth + 1,
      parent,
      children: [],
      mark: "same",
      shape: -1,
    };
    calls.forEach((each, on) => each >= 0 && this.bySite[on]!.set(key(this.programs[on]!, each, graphs[on]!), item));
    item.children = [
      ...this.pairs(calls, graphs).map((pair) => this.item(pair, graphs, item)),
      ...this.nested(calls, graphs).map((pair) => this.item(only(calls, pair), pair, item, true)),
    ];
    return item;
  }

  /** The calls inside both, by call site: those of the second alone stand where they are there. */
  private pairs(calls: Pair, graphs: Pair): Pair[] {
    const [first = [], second = []] = calls.map((call, side) => this.inside(side, call, graphs[side]!));
    return paired(first, second, (side, call) => this.programs[side]!.sites[call]!);
  }

  private inside(side: number, call: number, graph: number): number[] {
    if (call < 0) return [];
    const program = this.programs[side]!;
    if (graph === OUTER) return program.children[call]!;
    const within = program.callsIn(graph);
    return program.children[call]!.filter((child) => within.some((each) => program.isWithin(each, child)));
  }

  /** The nodes of both that hold graphs, by name. */
  private nested(calls: Pair, graphs: Pair): Pair[] {
    const [first = [], second = []] = calls.map((call, side) =>
      call < 0 ? [] : this.programs[side]!.own(call, graphs[side]).filter((node) => this.programs[side]!.holds(node)),
    );
    return paired(first, second, (side, node) => this.programs[side]!.names[node]!);
  }

  private marked(difference: Difference): void {
    const retyped = new Set(difference.retyped.map(([site]) => site));
    const changed = new Set(difference.rows.flatMap((row) => row.calls));
    const visit = (item: Item): boolean => {
      const inside = item.children.map(visit).some(Boolean);
      const isModule = !item.calls.includes(PROGRAM);
      const site = isModule ? item.site : "";
      if (item.isGraph) item.mark = item.calls[0] < 0 ? "came" : item.calls[1] < 0 ? "gone" : inside ? "inside" : "same";
      else if (item.calls[0] < 0) item.mark = "came";
      else if (item.calls[1] < 0) item.mark = "gone";
      else if ((isModule && retyped.has(site)) || ((site !== "" || !isModule) && changed.has(site))) item.mark = "changed";
      else if (inside) item.mark = "inside";
      return item.mark !== "same";
    };
    visit(this.root);
  }

  /** A number for what must be equal for two items to be shown as one: everything but their own names. */
  private shape(item: Item): number {
    if (item.shape >= 0) return item.shape;
    const figures = item.calls.map((call, side) => (call < 0 ? "" : this.programs[side]!.figuresOf(call, item.graphs[side])));
    const inside = item.children.map((child) => [last(child.site), this.shape(child)]);
    const text = JSON.stringify([item.type, item.mark, figures, inside]);
    const known = this.shapes.get(text);
    item.shape = known ?? this.shapes.size;
    if (known === undefined) this.shapes.set(text, item.shape);
    return item.shape;
  }
}

/** The program and the module at its root have the same site. */
function key(program: Program, call: number, graph: number): string {
  return `${graph}${call === PROGRAM ? "" : `.${program.sites[call]!}`}`;
}

/** Those of both sides that have the same name, and between them those of one side alone. */
function paired(first: number[], second: number[], named: (side: number, each: number) => string): Pair[] {
  const names = first.map((each) => named(0, each));
  const found: Pair[] = first.map((each) => [each, -1]);
  let behind = 0;
  for (const each of second) {
    const at = names.indexOf(named(1, each));
    if (at >= 0) {
      const place = found.findIndex((pair) => pair[0] === first[at]);
      found[place]![1] = each;
      behind = place + 1;
    } else {
      found.splice(behind, 0, [-1, each]);
      behind += 1;
    }
  }
  return found;
}

/** The calls of the sides that have a graph. */
function only(calls: Pair, graphs: Pair): Pair {
  return [graphs[0] < 0 ? -1 : calls[0], graphs[1] < 0 ? -1 : calls[1]];
}

/** The last of several calls, where it is not one more of the same module. */
export function upTo(run: Run): string {
  const [first, end] = [run.first.site, run.last.site].map((site) => site.split("@")[0]!) as [string, string];
  return first === end ? "" : ` … ${last(end)}`;
}

export function last(site: string): string {
  return site.slice(site.lastIndexOf(".") + 1);
}
